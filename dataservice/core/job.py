"""The parts of a job that several rooms speak of: its sources, its batch, its records."""

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from dataservice.core.errors import SpecError

JobState = Literal["active", "draining"]
SourceFormat = Literal["webdataset", "parquet", "jsonl"]

# Read by pydantic where the job file is validated: unknown keys are refused, and the string
# below each field is its description in the job file's schema.
STRICT = {"extra": "forbid", "use_attribute_docstrings": True}


@dataclass(frozen=True, kw_only=True, slots=True)
class ErrorBudget:
    """How often a source's samples may be bad before its job stops."""

    __pydantic_config__: ClassVar[dict[str, object]] = STRICT

    rate: float = 0.01
    """Bad samples among a source's last `window_samples`, as a fraction; 1 never stops."""
    window_samples: int = 1000
    """Over how many samples of the source, in the order of training, the rate is taken."""
    min_bad_samples: int = 10
    """So many bad samples must be in the window before a job stops, whatever their rate."""

    def __post_init__(self) -> None:
        if not 0 <= self.rate <= 1:
            raise SpecError(f"the error budget's rate is {self.rate}; it must be from 0 to 1.")
        if not 1 <= self.min_bad_samples <= self.window_samples:
            raise SpecError(
                f"the error budget asks for {self.min_bad_samples} bad samples in a window of "
                f"{self.window_samples}; min_bad_samples must be from 1 to window_samples."
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceSpec:
    """One dataset at a URL, in one format."""

    __pydantic_config__: ClassVar[dict[str, object]] = STRICT

    name: str
    """Name of the source in metrics, errors and `explain`; unique in the job."""
    url: str
    """Path or URL of the files; `*` and `{000..127}` patterns are expanded. Any fsspec URL."""
    format: SourceFormat
    """How the files are laid out: webdataset (tar), parquet, or jsonl."""
    weight: float = 1.0
    """Passes over the source in one epoch. 2 shows each sample twice, 0.5 every other one."""
    image_column: str = "image"
    """Parquet: the column of struct{bytes, path}, or a list of them."""
    storage_options: dict[str, str] = field(default_factory=dict)
    """Passed to fsspec, for example an endpoint or a profile. Never a secret."""
    media_root: str = ""
    """Where the media paths of records start: a folder of the same storage. By default each
    file's own folder. Paths and links that leave it are refused."""
    error_budget: ErrorBudget | None = None
    """How often this source's samples may be bad; by default the job's own error_budget."""

    def __post_init__(self) -> None:
        if not self.name or any(c in self.name for c in "/\\\0 "):
            raise SpecError(
                f"source name {self.name!r} must be non-empty, without spaces and slashes."
            )
        if not 0 < self.weight <= 1000:
            raise SpecError(
                f"source {self.name!r} has weight {self.weight}; it must be in (0, 1000]. "
                "Leave a source out instead of giving it weight 0."
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchSize:
    """How many samples make one global batch: exactly one of the two."""

    __pydantic_config__: ClassVar[dict[str, object]] = STRICT

    samples: int | None = None
    """Samples of one optimizer step, over all ranks."""
    tokens: int | None = None
    """Or: LLM tokens of one step; samples are drawn while they fit."""

    def __post_init__(self) -> None:
        given = [value for value in (self.samples, self.tokens) if value is not None]
        if len(given) != 1 or given[0] < 1:
            raise SpecError(
                f"batch has samples={self.samples}, tokens={self.tokens}; give exactly one of "
                "them, at least 1."
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class JobRecord:
    """A job as stored: the validated job file as JSON and the state it is in."""

    name: str
    spec_json: str
    index_fingerprint: str
    state: JobState = "active"
    created_unix_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptRecord:
    """One start of a job's trainers."""

    job: str
    attempt: int
    world_size: int
    start_cursor: str
    opened_unix_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class LedgerEntry:
    """One planned step of one attempt; enough to plan it again. `committed_unix_s` is None
    until every rank has committed it; `measured_s`, of the slowest rank that told, may stay so.
    `predicted_s` is None in entries older than schema version 2."""

    job: str
    attempt: int
    step: int
    cursor: str
    plan_digest: str
    world_size: int
    cost_version: str
    planned_unix_s: float
    committed_unix_s: float | None = None
    predicted_s: float | None = None
    measured_s: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class CostRecord:
    """The coefficients that a job's steps are planned with from `from_step` on, as JSON."""

    job: str
    from_step: int
    cost_json: str
    cost_version: str
    recorded_unix_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class QuarantineEntry:
    """A sample that was trained with its labels masked, and why."""

    job: str
    attempt: int
    step: int
    sample_id: int
    source: str
    key: str
    reason: str


SkipAction = Literal["skip", "train"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SkipRecord:
    """Steps, both ends included, that attempts from `from_attempt` on pass over ("skip"), or
    train after all ("train"). Of the records that name a step, the one of highest `number`
    counts."""

    job: str
    number: int
    first_step: int
    last_step: int
    action: SkipAction
    from_attempt: int
    recorded_unix_s: float
