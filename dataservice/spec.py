"""The job file and the service's config: one YAML file each, validated here.

Each part of the job file is a dataclass that lives beside the code that reads it; this file
only joins them, resolves relative paths and turns pydantic's findings into a SpecError.
"""

import difflib
import json
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from dataservice.core.errors import SpecError
from dataservice.core.job import BatchSize, SourceSpec
from dataservice.cost_file import read_cost_file
from dataservice.decode.pipeline import PipelineSpec
from dataservice.planning.options import PlanOptions

Model = TypeVar("Model", bound=BaseModel)


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class TopologySpec(_Strict):
    """What the ranks of a trainer are to each other. The world size comes with the trainer."""

    tensor_parallel: Annotated[int, Field(ge=1)] = 1
    """Ranks that split each layer. They share one replica and get the same microbatches."""
    pipeline_parallel: Annotated[int, Field(ge=1)] = 1
    """Ranks that split the layers among them."""
    replicas_per_node: Annotated[int | None, Field(ge=1)] = None
    """Replicas on one host; groups and exchanges then stay inside hosts where they can."""


class JobSpec(_Strict):
    """A job file: which data, how it becomes tokens, and how each batch is balanced."""

    job: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")]
    """Name of the job; trainers name it when they connect."""
    sources: Annotated[list[SourceSpec], Field(min_length=1)]
    """The datasets that are mixed."""
    index: str
    """Folder or fsspec URL where `dataservice index` keeps the index of these sources."""
    pipeline: PipelineSpec
    """Tokenizer, chat template and media processors."""
    batch: BatchSize
    """Size of one global batch."""
    plan: PlanOptions
    """How each batch is balanced."""
    seed: int = 0
    """Decides the order of samples, together with nothing else."""
    epochs: Annotated[int, Field(ge=1)] = 1
    """Passes over the mixture."""
    topology: TopologySpec = TopologySpec()
    """Tensor and pipeline parallelism, and hosts."""
    ready_steps: Annotated[int, Field(ge=1, le=64)] = 4
    """How many steps may be planned and decoded ahead of the slowest rank."""

    @model_validator(mode="after")
    def _names_are_unique(self) -> "JobSpec":
        names = [source.name for source in self.sources]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"source names {twice} occur twice; each must be unique")
        return self


class ServiceConfig(_Strict):
    """The service's own config, written by the operator. Flags of `serve` override it."""

    listen: str = "127.0.0.1:50051"
    """Address of the coordinator. Use 0.0.0.0:50051 to serve other hosts."""
    state_dir: str = "state"
    """Folder for jobs, attempts and the ledger. Keep it: recovery starts from it."""
    workers: Annotated[int, Field(ge=1, le=4096)] = 2
    """How many workers decode."""
    slots_per_worker: Annotated[int, Field(ge=1, le=256)] = 1
    """Samples that one worker decodes at once; each takes a CPU."""
    worker_host: str = "127.0.0.1"
    """Address under which trainers reach workers on this host."""
    pool: Literal["ray", "local"] = "ray"
    """ray runs workers as Ray actors; local runs them as threads of the coordinator."""
    ray_address: str | None = None
    """An existing Ray cluster to join; by default one is started on this machine."""
    attempt_timeout_s: Annotated[float, Field(gt=0)] = 300.0
    """How long the first ranks of an attempt wait for the last."""
    metrics_listen: str | None = None
    """Address where Prometheus scrapes, such as 0.0.0.0:9090; none by default. It tells the
    names of jobs and sources to whoever asks."""
    secret_file: str | None = None
    """File with the secret shared with workers; by default one is made in state_dir."""
    custom_processors: dict[str, str] = {}
    """Names that jobs may use, each the import path `package.module:Class` of a processor."""

    @field_validator("listen", "metrics_listen")
    @classmethod
    def _listens_somewhere(cls, listen: str | None) -> str | None:
        # Said here, before workers are started in vain.
        if listen is None:
            return None
        _, colon, port = listen.rpartition(":")
        if not colon or not port.isdecimal() or int(port) > 65535:
            raise ValueError("it must be host:port, such as 0.0.0.0:50051")
        return listen


def read_job(text: str, base: Path) -> JobSpec:
    """Validate a job file and make its paths absolute. Raises SpecError."""
    plain = _with_cost(_mapping(text, "job file"), base)
    return _resolved(_validated(JobSpec, plain, "job file"), base)


def _with_cost(plain: dict[str, Any], base: Path) -> dict[str, Any]:
    """The job with the coefficients of the cost file it names, so that it needs no other file
    from here on and plans the same whatever becomes of that one."""
    plan = plain.get("plan")
    if not isinstance(plan, dict) or not isinstance(plan.get("cost"), str):
        return plain
    made = read_cost_file(base / plan["cost"])
    return {**plain, "plan": {**plan, "cost": made.cost.model.to_dict()}}


def job_from_json(text: str) -> JobSpec:
    """A job as the store keeps it."""
    return _validated(JobSpec, json.loads(text), "stored job")


def read_config(path: Path | None, overrides: dict[str, Any]) -> ServiceConfig:
    """The config file, if any, with the flags that were given on top. Raises SpecError."""
    plain: dict[str, Any] = {}
    if path is not None:
        plain = _mapping(read_text(path, "config file"), f"config file {path}")
    plain.update({key: value for key, value in overrides.items() if value is not None})
    return _validated(ServiceConfig, plain, "service config")


def read_text(path: Path, what: str) -> str:
    """The text of a file that the user named. Raises SpecError saying why it has none."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise SpecError(
            f"the {what} {path} cannot be read: {error.strerror}. Check the path."
        ) from error
    except UnicodeDecodeError as error:
        raise SpecError(
            f"the {what} {path} is not text in UTF-8 ({error.reason} at byte {error.start}). "
            "Give a YAML file."
        ) from error


def _mapping(text: str, what: str) -> dict[str, Any]:
    try:
        plain = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise SpecError(f"the {what} is not YAML: {_place(error)}. Mend that line.") from error
    if plain is None:
        return {}
    if not isinstance(plain, dict):
        raise SpecError(
            f"the {what} holds a {type(plain).__name__}; it must be a mapping of keys to values. "
            "The README shows a complete one."
        )
    return plain


def _validated(model: type[Model], plain: dict[str, Any], what: str) -> Model:
    try:
        return model.model_validate(plain)
    except ValidationError as error:
        known = _known_keys(model)
        lines = [
            f"  {'.'.join(str(part) for part in found['loc']) or what}: {_sentence(found, known)}"
            for found in error.errors(include_url=False)
        ]
        raise SpecError(
            f"the {what} has {len(lines)} mistake{'s' if len(lines) > 1 else ''}:\n"
            + "\n".join(lines)
            + "\nThe README lists every key with its meaning."
        ) from error


def _place(error: yaml.YAMLError) -> str:
    """What is wrong and where, on one line."""
    mark = getattr(error, "problem_mark", None)
    where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark is not None else ""
    return where + str(getattr(error, "problem", None) or error)


def _sentence(found: Any, known: list[str]) -> str:
    """One of pydantic's findings, in the words of whoever wrote the file."""
    message: str = found["msg"].removeprefix("Value error, ").removesuffix(".")
    if found["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        alike = difflib.get_close_matches(str(found["loc"][-1]), known, n=1)
        message = "there is no such key here" + (f"; did you mean {alike[0]}?" if alike else "")
    elif found["type"] in ("missing", "missing_keyword_only_argument", "missing_argument"):
        return "required, and missing"
    seen = found.get("input")
    return f"{message} (seen: {seen!r})" if isinstance(seen, (str, int, float)) else message


def _known_keys(model: type[BaseModel]) -> list[str]:
    """Every key that may stand somewhere in this file."""
    schema = model.model_json_schema()
    parts = [schema, *schema.get("$defs", {}).values()]
    return sorted({key for part in parts for key in part.get("properties", {})})


def _resolved(spec: JobSpec, base: Path) -> JobSpec:
    """The same job with its local paths absolute, so that any process can open them."""
    plain = spec.model_dump(mode="json")
    plain["index"] = _absolute(plain["index"], base)
    for source in plain["sources"]:
        source["url"] = _absolute(source["url"], base)
    pipeline = plain["pipeline"]
    pipeline["tokenizer"] = _absolute(pipeline["tokenizer"], base)
    if pipeline["chat_template"] not in ("auto", "chatml"):
        pipeline["chat_template"] = _absolute(pipeline["chat_template"], base)
    return JobSpec.model_validate(plain)


def _absolute(path: str, base: Path) -> str:
    return path if "://" in path else str((base / path).absolute())
