"""The job file: one YAML file, validated here.

Each part of the job file is a dataclass beside the code that uses it. This module only joins the
parts, resolves relative paths and refuses paths that a team may not name. It loads no gRPC, codec
or kernel.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, model_validator

from dataservice.core.errors import SpecError
from dataservice.core.job import (
    MOST_CHANGES,
    BatchSize,
    ErrorBudget,
    MixtureChange,
    SourceSpec,
    WeightUnit,
)
from dataservice.core.named_files import judged_by
from dataservice.core.plan_options import PlanOptions
from dataservice.core.topology import EncoderStage, Meet, ReplicaLayout
from dataservice.core.validation import SUFFIX, validation_of
from dataservice.decode.processors.transformers_image import FILES as FOLDER_FILES
from dataservice.decode.processors.transformers_image import TransformersImageSpec
from dataservice.decode.spec import PipelineSpec
from dataservice.jobs.cost_file import read_cost_file
from dataservice.jobs.layout_keys import read_layout_keys
from dataservice.jobs.yaml_file import Strict, Written, validated, written
from dataservice.sources.roots import Roots

NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}"
"""A job's name, as a job file may write it."""
TEMPLATES = ("auto", "chatml")
"""Chat templates that are built in, not files."""
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json"),
    *("chat_template.jinja", "chat_template.json"),
)
"""Files that are read from a tokenizer's folder if they exist."""


class TopologySpec(Strict):
    """How the ranks of a trainer form replicas. The trainer tells the world size itself."""

    tensor_parallel: Annotated[int, Field(ge=1)] = 1
    """Number of ranks that split each layer. They belong to one replica and get the same
    microbatches."""
    pipeline_parallel: Annotated[int, Field(ge=1)] = 1
    """Number of pipeline stages: ranks that each hold some of the layers."""
    virtual_stages: Annotated[int, Field(ge=1)] = 1
    """Number of model chunks in each pipeline stage. Set it above 1 where the trainer runs
    interleaved 1F1B: the order of microbatches is then optimised for that schedule."""
    replicas_per_node: Annotated[int | None, Field(ge=1)] = None
    """Number of replicas on one host. Where it is set, CP groups and feature exchanges stay inside
    hosts if possible."""
    replicas_meet: Meet = "wave"
    """When replicas wait for one another: in every wave, as where weights are sharded (FSDP), or
    once a step, as in plain data parallelism. Plans are made for it, and predicted by it."""
    encoder_stage: EncoderStage = "first"
    """Which stages of a pipeline encode: the first, beside its part of the decoder, as
    `run_pipeline_step` does it; one of its own before the decoder's; all, before the pipeline
    fills and after it drains (spread); or several, whose parts `vision_shares` and `audio_shares`
    say (cut)."""
    encoders_train: bool = True
    """Whether gradients flow into the encoders; where they are frozen, an encoder has a forward
    pass alone."""
    features_ahead: bool = False
    """Whether a microbatch's features travel under the backward pass of the one before, as
    `run_step` sends them where it encodes ahead. Not in a pipeline."""
    stage_shares: tuple[Annotated[float, Field(ge=0, allow_inf_nan=False)], ...] = ()
    """The part of the decoder's seconds that each model chunk takes, in model order, in any unit.
    Without it all chunks take the same."""
    vision_shares: tuple[Annotated[float, Field(ge=0, allow_inf_nan=False)], ...] = ()
    """With `encoder_stage: cut`, the part of the vision encoder's seconds that each model chunk
    takes, in model order, in any unit. Without it the first chunk encodes alone."""
    audio_shares: tuple[Annotated[float, Field(ge=0, allow_inf_nan=False)], ...] = ()
    """The same of the audio encoder."""

    @model_validator(mode="after")
    def _interleaved_over_stages(self) -> "TopologySpec":
        if self.virtual_stages > 1 and self.pipeline_parallel == 1:
            raise ValueError(
                f"virtual_stages is {self.virtual_stages} and pipeline_parallel 1: one stage would "
                "hand model chunks to itself; raise pipeline_parallel or leave virtual_stages out"
            )
        if self.features_ahead and self.pipeline_parallel > 1:
            raise ValueError(
                f"features_ahead with pipeline_parallel {self.pipeline_parallel}, whose stages "
                "encode when their schedule says; leave it out"
            )
        chunks = self.pipeline_parallel * self.virtual_stages
        for name in ("stage_shares", "vision_shares", "audio_shares"):
            shares = getattr(self, name)
            if shares and not (len(shares) == chunks and max(shares) > 0):
                raise ValueError(
                    f"{name} is {list(shares)}; give each of the {chunks} model "
                    "chunks (pipeline_parallel × virtual_stages) its part, and not 0 to all of them"
                )
        if (self.encoder_stage == "cut") != bool(self.vision_shares or self.audio_shares):
            raise ValueError(
                f"encoder_stage is {self.encoder_stage}, with vision_shares of "
                f"{len(self.vision_shares)} and audio_shares of {len(self.audio_shares)} chunks; "
                "give them where encoders are cut, and nowhere else"
            )
        return self

    @property
    def layout(self) -> ReplicaLayout:
        """The same as planning takes it."""
        return ReplicaLayout(
            ranks_per_replica=self.tensor_parallel * self.pipeline_parallel,
            pipeline_stages=self.pipeline_parallel,
            virtual_stages=self.virtual_stages,
            replicas_per_node=self.replicas_per_node,
            replicas_meet=self.replicas_meet,
            encoder_stage=self.encoder_stage,
            encoders_train=self.encoders_train,
            features_ahead=self.features_ahead,
            stage_shares=self.stage_shares,
            vision_shares=self.vision_shares,
            audio_shares=self.audio_shares,
        )


class JobSpec(Strict):
    """One job: which data is read, how it becomes tokens, and how each batch is balanced."""

    job: Annotated[str, Field(pattern=f"^{NAME}({SUFFIX})?$")]
    """Name of the job; trainers give it when they connect."""
    sources: Annotated[list[SourceSpec], Field(min_length=1)]
    """The datasets that are mixed."""
    weights: WeightUnit = "passes"
    """What weights are: passes over a source in an epoch, or shares of an epoch's tokens. An epoch
    by shares ends when the first source has been passed over once."""
    mixture_changes: Annotated[tuple[MixtureChange, ...], Field(max_length=MOST_CHANGES)] = ()
    """Weights that change with an epoch or a step. `dataservice job mixture` adds to them."""
    index: str
    """Folder or fsspec URL where `dataservice index` keeps the index of these sources."""
    pipeline: PipelineSpec
    """Tokenizer, chat template and media processors."""
    batch: BatchSize
    """Size of one global batch."""
    plan: PlanOptions
    """How each batch is balanced."""
    seed: int = 0
    """Seed of the sample order, which depends only on the seed, the sources and their weights."""
    epochs: Annotated[int, Field(ge=1)] = 1
    """Number of passes over the mixture."""
    topology: TopologySpec = TopologySpec()
    """Tensor and pipeline parallelism, and hosts."""
    ready_steps: Annotated[int, Field(ge=1, le=64)] = 4
    """Number of steps that may be planned and decoded ahead of the slowest rank."""
    error_budget: ErrorBudget = ErrorBudget()
    """Share of each source's samples that may be bad before the job stops."""

    @model_validator(mode="after")
    def _names_fit_and_one_has_weight(self) -> "JobSpec":
        _require_weight(self.sources)
        trained = [source.name for source in self.sources]
        for change in self.mixture_changes:
            if strange := sorted(change.weights.keys() - set(trained)):
                raise ValueError(
                    f"mixture_changes names {strange}, which are none of the sources {trained}"
                )
        names = [source.name for source in self.all_sources]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"source names {twice} occur twice; each must be unique")
        unfit = [name for name in names if not name.isprintable() or not 0 < len(name) <= 100]
        if unfit:
            raise ValueError(
                f"source name {unfit[0][:100]!r} must be 1 to 100 characters that can be printed"
            )
        return self

    @model_validator(mode="after")
    def _memory_is_given_once(self) -> "JobSpec":
        if self.plan.memory is not None and self.plan.memory_tokens:
            raise ValueError(
                f"plan has memory_tokens {self.plan.memory_tokens} and memory: drop memory_tokens, "
                f"as memory leaves {self.plan.memory.tokens(self.topology.layout)} tokens in this "
                "topology; or drop memory, and encoders are not limited"
            )
        _ = self.planned
        return self

    @property
    def planned(self) -> PlanOptions:
        """The plan's options, with the tokens that its `memory` leaves in this topology."""
        return self.plan.over(self.topology.layout)

    @property
    def all_sources(self) -> list[SourceSpec]:
        """Every source that the index is to hold."""
        return self.sources


class ValidationSpec(Strict):
    """Held-out sources, passed over whole between training steps. All else is as in training,
    without `augment`."""

    sources: Annotated[list[SourceSpec], Field(min_length=1)]
    """The held-out datasets, with names of their own."""
    batch: BatchSize | None = None
    """Size of one global batch; by default that of training."""

    @model_validator(mode="after")
    def _gives_samples(self) -> "ValidationSpec":
        _require_weight(self.sources)
        return self


class JobFile(JobSpec):
    """A job file: which data is read, how it becomes tokens, and how each batch is balanced."""

    job: Annotated[str, Field(pattern=f"^{NAME}$")]
    """Name of the job; trainers give it when they connect."""
    validation: ValidationSpec | None = None
    """Held-out sources for passes between training steps: `dataset.validation()` on the ranks."""
    layout: str | None = None
    """A file that `dataservice layout` wrote. Its topology and plan, seconds and tokens of a
    microbatch among them, hold for all that the job does not say itself."""

    @property
    def all_sources(self) -> list[SourceSpec]:
        """Every source that the index is to hold: of training, then of validation."""
        return [*self.sources, *(self.validation.sources if self.validation else ())]

    @property
    def jobs(self) -> tuple[JobSpec, ...]:
        """The jobs that the file stands for: training, and its validation where there is one."""
        told = {name: getattr(self, name) for name in JobSpec.model_fields}
        training = JobSpec.model_validate(told)
        if self.validation is None:
            return (training,)
        held_out = {
            "job": validation_of(self.job),
            "sources": self.validation.sources,
            "batch": self.validation.batch or self.batch,
            "pipeline": replace(self.pipeline, augment=()),
            "epochs": 1,
            "weights": "passes",
            "mixture_changes": (),
        }
        return training, JobSpec.model_validate({**told, **held_out})


def read_job(text: str, base: Path, roots: Roots | None = None) -> JobFile:
    """Validate a job file and make its paths absolute. Raises SpecError where it is invalid, or
    names a file that is not under `roots`. Storage profiles are not looked up."""
    with judged_by(None if roots is None else roots.hold_file):
        file = _with_cost(_with_layout(written(text, "job file"), base, roots), base, roots)
    spec = _resolved(validated(JobFile, file, "job file"), base)
    if roots is not None:
        require_allowed(spec, roots)
    return spec


def require_allowed(spec: JobSpec, roots: Roots) -> None:
    """Check that all files which the service would open for a job lie under the roots; sources with
    a storage profile lie under that one's. Raises SpecError where one does not."""
    for source in spec.all_sources:
        if source.storage_profile:
            continue  # see storage_profiles.require_profile
        roots.require(source.url, f"the url of source {source.name!r}")
        if source.media_root:
            roots.require(source.media_root, f"the media_root of source {source.name!r}")
        if source.storage_options:
            # With another endpoint or profile the same URL would name other data.
            raise SpecError(
                f"source {source.name!r} has storage_options, which this service does not take "
                "from jobs. Leave them out, and name a storage_profile of the operator's."
            )
    roots.require(spec.index, "index")
    tokenizer, template = Path(spec.pipeline.tokenizer), spec.pipeline.chat_template
    folder = tokenizer if tokenizer.is_dir() else tokenizer.parent
    roots.require(str(tokenizer), "tokenizer")
    for name in TOKENIZER_FILES:
        roots.require(str(folder / name), "a file of the tokenizer")
    if template not in TEMPLATES:
        roots.require(template, "chat_template")
    if isinstance(spec.pipeline.vision, TransformersImageSpec):
        for name in FOLDER_FILES:
            roots.require(str(Path(spec.pipeline.vision.folder) / name), "a file of vision.folder")


def _require_weight(sources: Sequence[SourceSpec]) -> None:
    if not any(source.weight for source in sources):
        raise ValueError(
            f"the sources {', '.join(repr(each.name) for each in sources[:8])} have weight 0, and "
            "there is no other; give one of them a weight above 0"
        )


def _with_layout(file: Written, base: Path, roots: Roots | None) -> Written:
    """The job with the topology and the plan of its layout file copied in, under what the job says
    itself. As with a cost file, the job does not need the layout file from here on."""
    path = file.plain.get("layout")
    if not isinstance(path, str):
        return file
    if roots is not None:
        roots.require(_absolute(path, base), "the layout file")
    laid_out = read_layout_keys(base / path)
    merged = dict(file.plain) | {"layout": None}
    for key, found in laid_out.items():
        given = file.plain.get(key, {})
        if not isinstance(given, dict):
            continue  # told as a mistake of the job file
        if key == "plan" and "memory" in given:
            found = {name: value for name, value in found.items() if name != "memory_tokens"}
        merged[key] = {**found, **given}
    return file.with_plain(merged)


def _with_cost(file: Written, base: Path, roots: Roots | None) -> Written:
    """The job with the coefficients of its cost file, and the bytes, copied in: from here on the
    job does not need the cost file, and changes to it do not change the plans."""
    plan = file.plain.get("plan")
    if not isinstance(plan, dict):
        return file
    for key in ("cost", "memory"):
        if isinstance(plan.get(key), str):
            if roots is not None:
                roots.require(_absolute(plan[key], base), "the cost file")
            plan = {**plan, key: _part_of_cost_file(key, base / plan[key])}
    return file.with_plain({**file.plain, "plan": plan})


def _part_of_cost_file(key: str, path: Path) -> dict[str, Any]:
    made = read_cost_file(path)
    if key == "cost":
        return made.cost.model.to_dict()
    if made.memory is None:
        raise SpecError(
            f"plan.memory names the cost file {path}, which has no memory: it was measured where "
            "no device tells how much it holds. Measure on CUDA, write memory into it, or give "
            "plan.memory_tokens."
        )
    return made.memory.to_dict()


def job_from_json(text: str) -> JobSpec:
    """Read a job from the JSON that the state store keeps."""
    return validated(JobSpec, Written(plain=json.loads(text)), "stored job")


def _resolved(file: JobFile, base: Path) -> JobFile:
    """The same file with absolute local paths, which any process can open."""
    plain: dict[str, Any] = file.model_dump(mode="json")
    plain["index"] = _absolute(plain["index"], base)
    held_out = plain["validation"]["sources"] if plain["validation"] else []
    for source in [*plain["sources"], *held_out]:
        source["url"] = _absolute(source["url"], base)
        if source["media_root"]:
            source["media_root"] = _absolute(source["media_root"], base)
    pipeline = plain["pipeline"]
    pipeline["tokenizer"] = _absolute(pipeline["tokenizer"], base)
    if pipeline["chat_template"] not in TEMPLATES:
        pipeline["chat_template"] = _absolute(pipeline["chat_template"], base)
    if isinstance(file.pipeline.vision, TransformersImageSpec):
        pipeline["vision"]["folder"] = _absolute(pipeline["vision"]["folder"], base)
    return JobFile.model_validate(plain)


def _absolute(path: str, base: Path) -> str:
    return path if "://" in path else str((base / path).absolute())
