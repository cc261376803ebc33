"""The job file and the service's config: one YAML file each, validated here.

Each part of the job file is a dataclass that lives beside the code that reads it; this file
only joins them, resolves relative paths and turns pydantic's findings into a SpecError.
"""

import difflib
import functools
import json
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from dataservice.access import TeamName
from dataservice.core.errors import SpecError
from dataservice.core.job import BatchSize, ErrorBudget, SourceSpec
from dataservice.core.limits import DEFAULT_LIMITS, DecodeLimits
from dataservice.core.team import TeamSpec
from dataservice.cost_file import read_cost_file
from dataservice.decode.pipeline import PipelineSpec
from dataservice.planning.options import PlanOptions
from dataservice.serving.tls import TlsSpec, is_loopback
from dataservice.sources.roots import Roots
from dataservice.text_file import read_text

Model = TypeVar("Model", bound=BaseModel)

MOST_PARTS = 100_000

TEMPLATES = ("auto", "chatml")
"""Chat templates that are no files."""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
"""Read from a tokenizer's folder, as far as they are there."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class TopologySpec(_Strict):
    """What the ranks of a trainer are to each other. The world size comes with the trainer."""

    tensor_parallel: Annotated[int, Field(ge=1)] = 1
    """Ranks that split each layer. They share one replica and get the same microbatches."""
    pipeline_parallel: Annotated[int, Field(ge=1)] = 1
    """Ranks that split the layers among them."""
    virtual_stages: Annotated[int, Field(ge=1)] = 1
    """Model chunks of each of those ranks, where the trainer runs interleaved 1F1B: the order of
    microbatches is searched for that schedule."""
    replicas_per_node: Annotated[int | None, Field(ge=1)] = None
    """Replicas on one host; groups and exchanges then stay inside hosts where they can."""

    @model_validator(mode="after")
    def _interleaved_over_stages(self) -> "TopologySpec":
        if self.virtual_stages > 1 and self.pipeline_parallel == 1:
            raise ValueError(
                f"virtual_stages is {self.virtual_stages} and pipeline_parallel 1: one stage would "
                "hand model chunks to itself; raise pipeline_parallel or leave virtual_stages out"
            )
        return self


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
    error_budget: ErrorBudget = ErrorBudget()
    """How often the samples of each source may be bad before the job stops."""

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
    decode_timeout_s: Annotated[float, Field(gt=0)] = 60.0
    """A sample that takes longer to read and decode is masked, and its process ended."""
    decode_memory_bytes: Annotated[int | None, Field(ge=256 * 2**20)] = None
    """Memory of its own that one decoding process may take, its libraries and tokenizers
    included, about 150 MiB; a sample that needs more is masked. No limit by default."""
    limits: DecodeLimits = DEFAULT_LIMITS
    """What one sample may ask of a decoding process. Give `dataservice index` the same config:
    an index that was written under other limits is refused."""
    held_bytes_per_worker: Annotated[int, Field(ge=2**20)] = 4 * 2**30
    """Decoded bytes that a worker holds ahead of need; packs that ranks ask for come on top."""
    worker_host: str = "127.0.0.1"
    """Address under which trainers reach workers on this host; `node` is each worker's own
    address in the Ray cluster."""
    worker_ports: Annotated[str | None, Field(pattern=r"^\d{1,5}-\d{1,5}$")] = None
    """Ports that workers listen on, as 20100-20115, where a firewall wants to know: at least
    twice as many as workers share a host. By default any free one."""
    worker_metrics_ports: Annotated[str | None, Field(pattern=r"^\d{1,5}-\d{1,5}$")] = None
    """Ports where workers serve /metrics to Prometheus, as 20200-20203: at least twice as many as
    workers share a host. None by default."""
    worker_start_timeout_s: Annotated[float, Field(gt=0)] = 60.0
    """How long a worker may take to start. A cluster that grows on demand takes minutes."""
    pool: Literal["ray", "local"] = "ray"
    """ray runs workers as Ray actors; local runs them as threads of the coordinator."""
    ray_address: str | None = None
    """An existing Ray cluster to join; by default one is started on this machine."""
    keep_workers: bool = True
    """In a Ray cluster that was joined, workers go on when the service stops, and the one that
    starts next takes them over. In a Ray of its own they end with it."""
    orphan_after_s: Annotated[float, Field(gt=0)] = 900.0
    """A worker that was kept, and that no service has asked after for so long, ends itself."""
    idle_release_s: Annotated[float, Field(ge=0)] = 60.0
    """How long decoded packs are held once no trainer of their job is connected."""
    attempt_timeout_s: Annotated[float, Field(gt=0)] = 300.0
    """How long the first ranks of an attempt wait for the last."""
    metrics_listen: str | None = None
    """Address where Prometheus scrapes, such as 0.0.0.0:9090; none by default. It tells the
    names of jobs and sources to whoever asks."""
    traces: str | None = None
    """OpenTelemetry collector that is told the spans of steps, by OTLP over HTTP, such as
    http://otel:4318; none by default. Needs the extra `traces`."""
    trace_ratio: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Part of the steps whose spans are told; the same steps by coordinator and workers."""
    log_json: bool = False
    """Log JSON, an object a line, also in workers' own processes."""
    health_listen: str | None = None
    """Address that answers gRPC health checks in the clear, and nothing else: for probes that
    cannot do TLS, such as those of Kubernetes."""
    secret_file: str | None = None
    """File with the secret shared with workers; by default one is made in state_dir."""
    custom_processors: dict[str, str] = {}
    """Names that jobs may use, each the import path `package.module:Class` of a processor."""
    tokens_file: str | None = None
    """Tokens of the teams, made by `dataservice token new`; without it every caller is an
    admin. Changes are taken up without a restart."""
    teams: dict[TeamName, TeamSpec] = {}
    """Shares and limits by team; one that is not listed has weight 1 and no limits."""
    tls: TlsSpec | None = None
    """Certificates of coordinator and workers; without it everything travels in the clear."""
    insecure: bool = False
    """Serve beyond this machine without tokens or without TLS, where the network itself is
    trusted."""
    allowed_roots: list[str] | None = None
    """Folders and URL prefixes under which jobs may name files; `{team}` stands for the job's
    team. By default any."""
    audit_log: str | None = None
    """File that tells who changed what and who was refused, a JSON object a line."""

    @field_validator("listen", "metrics_listen", "health_listen")
    @classmethod
    def _listens_somewhere(cls, listen: str | None) -> str | None:
        # Said here, before workers are started in vain.
        if listen is None:
            return None
        _, colon, port = listen.rpartition(":")
        if not colon or not port.isdecimal() or int(port) > 65535:
            raise ValueError("it must be host:port, such as 0.0.0.0:50051")
        return listen

    @field_validator("worker_ports", "worker_metrics_ports")
    @classmethod
    def _ports_are_a_range(cls, ports: str | None) -> str | None:
        first, _, last = (ports or "1-1").partition("-")
        if not 0 < int(first) <= int(last) <= 65535:
            raise ValueError("it must be a range of ports, such as 20100-20115")
        return ports

    @model_validator(mode="after")
    def _is_protected(self) -> "ServiceConfig":
        hosts = {"listen": self.listen.rpartition(":")[0], "worker_host": self.worker_host}
        beyond = [(key, host) for key, host in hosts.items() if not is_loopback(host)]
        missing = [key for key in ("tokens_file", "tls") if getattr(self, key) is None]
        if beyond and missing and not self.insecure:
            raise ValueError(
                f"by {beyond[0][0]} it would serve other hosts at "
                f"{beyond[0][1] or 'every address'} without {' and '.join(missing)}. Set them, or "
                "insecure: true where the network itself is trusted"
            )
        return self


def read_job(text: str, base: Path, roots: Roots | None = None) -> JobSpec:
    """Validate a job file and make its paths absolute. Raises SpecError, also where it names a
    file that is not under `roots`."""
    plain = _with_cost(_mapping(text, "job file"), base, roots)
    spec = _resolved(_validated(JobSpec, plain, "job file"), base)
    if roots is not None:
        require_allowed(spec, roots)
    return spec


def require_allowed(spec: JobSpec, roots: Roots) -> None:
    """Raises SpecError unless all that the service would open for a job lies under the roots."""
    for source in spec.sources:
        roots.require(source.url, f"the url of source {source.name!r}")
        if source.media_root:
            roots.require(source.media_root, f"the media_root of source {source.name!r}")
        if source.storage_options:
            # An endpoint or a profile would lead to other places under the same URL.
            raise SpecError(
                f"source {source.name!r} has storage_options, which this service does not take "
                "from jobs. Leave them out; the operator sets them in fsspec's configuration."
            )
    roots.require(spec.index, "index")
    tokenizer, template = Path(spec.pipeline.tokenizer), spec.pipeline.chat_template
    folder = tokenizer if tokenizer.is_dir() else tokenizer.parent
    roots.require(str(tokenizer), "tokenizer")
    for name in TOKENIZER_FILES:
        roots.require(str(folder / name), "a file of the tokenizer")
    if template not in TEMPLATES:
        roots.require(template, "chat_template")


def _with_cost(plain: dict[str, Any], base: Path, roots: Roots | None) -> dict[str, Any]:
    """The job with the coefficients of the cost file it names, so that it needs no other file
    from here on and plans the same whatever becomes of that one."""
    plan = plain.get("plan")
    if not isinstance(plan, dict) or not isinstance(plan.get("cost"), str):
        return plain
    if roots is not None:
        roots.require(_absolute(plan["cost"], base), "the cost file")
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


def _mapping(text: str, what: str) -> dict[str, Any]:
    try:
        plain = yaml.safe_load(text)
        parts = _parts(plain, {})
    except yaml.YAMLError as error:
        raise SpecError(f"the {what} is not YAML: {_place(error)}. Mend that line.") from error
    except (ValueError, RecursionError) as error:
        reason = error if isinstance(error, ValueError) else "it is nested too deeply"
        raise SpecError(f"the {what} cannot be read: {reason}. Mend it.") from error
    if parts > MOST_PARTS:
        raise SpecError(
            f"the {what} has {parts:,} values once its aliases are written out; at most "
            f"{MOST_PARTS:,} are read. Use fewer aliases."
        )
    if plain is None:
        return {}
    if not isinstance(plain, dict):
        raise SpecError(
            f"the {what} holds a {type(plain).__name__}; it must be a mapping of keys to values. "
            "The README shows a complete one."
        )
    return plain


def _parts(value: object, known: dict[int, int]) -> int:
    """How many values there are with every alias written out. A few lines of YAML may stand for
    more than memory holds. Raises RecursionError for a value that is part of itself."""
    if not isinstance(value, dict | list):
        return 1
    if id(value) not in known:
        inner = [*value, *value.values()] if isinstance(value, dict) else value
        known[id(value)] = 1 + sum(_parts(each, known) for each in inner)
    return known[id(value)]


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


@functools.cache
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
        if source["media_root"]:
            source["media_root"] = _absolute(source["media_root"], base)
    pipeline = plain["pipeline"]
    pipeline["tokenizer"] = _absolute(pipeline["tokenizer"], base)
    if pipeline["chat_template"] not in TEMPLATES:
        pipeline["chat_template"] = _absolute(pipeline["chat_template"], base)
    return JobSpec.model_validate(plain)


def _absolute(path: str, base: Path) -> str:
    return path if "://" in path else str((base / path).absolute())
