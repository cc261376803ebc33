"""The parts of a job that several rooms speak of: its sources, its batch, its records."""

import math
from dataclasses import dataclass, field
from typing import ClassVar, Literal, get_args

from dataservice.core.errors import SpecError
from dataservice.core.sample import MAX_LOSS_WEIGHT, MediaKind, PlaceholderRule

MEDIA_KINDS: tuple[MediaKind, ...] = get_args(MediaKind)
JobState = Literal["active", "draining"]
MOST_WEIGHT = 1000
LAST_STEP = 2**53
"""No job comes so far, also in epochs and samples; beyond it, sums still are of 64 bits."""
MOST_CHANGES = 64
"""Changes of a mixture, in a job file and recorded: a cursor names all that have begun."""
WeightUnit = Literal["passes", "tokens"]
SourceFormat = Literal["webdataset", "parquet", "arrow", "mds", "jsonl", "json", "text", "custom"]

# Read by pydantic where the job file is validated: unknown keys are refused, and numbers that are
# none or infinite, of which no timer or limit can be made. The string below each field is its
# description in the job file's schema.
STRICT: dict[str, object] = {"extra": "forbid", "allow_inf_nan": False}


@dataclass(frozen=True, kw_only=True, slots=True)
class ErrorBudget:
    """The rate of bad samples of a source above which its job stops."""

    __pydantic_config__: ClassVar[dict[str, object]] = STRICT

    rate: float = 0.01
    """Bad samples among a source's last `window_samples`, as a fraction; 1 never stops."""
    window_samples: int = 1000
    """Samples of the source over which the rate is taken: the last ones, in the order of
    training."""
    min_bad_samples: int = 10
    """Bad samples that must be in the window before a job stops, whatever their rate."""

    def __post_init__(self) -> None:
        if not 0 <= self.rate <= 1:
            raise SpecError(f"the error budget's rate is {self.rate}; it must be from 0 to 1.")
        if not 1 <= self.min_bad_samples <= self.window_samples:
            raise SpecError(
                f"the error budget asks for {self.min_bad_samples} bad samples in a window of "
                f"{self.window_samples}; min_bad_samples must be from 1 to window_samples."
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class ColumnMap:
    """Which columns of a source, or keys of its records, are what. A dotted path (`meta.question`)
    reaches into nested objects."""

    __pydantic_config__: ClassVar[dict[str, object]] = STRICT

    image: str | tuple[str, ...] = ()
    """The columns of images, one or several, in the order of their placeholders. No other column of
    images is then read; likewise for video and audio. In a tar, suffixes tell what is media."""
    video: str | tuple[str, ...] = ()
    """The columns of clips."""
    audio: str | tuple[str, ...] = ()
    """The columns of recordings."""
    conversation: str = ""
    """The list of turns, as OpenAI or ShareGPT write them."""
    question: str = ""
    """What the user asks; media without a placeholder come before it. Carries no loss."""
    answer: str = ""
    """What the assistant answers to `question`."""
    caption: str = ""
    """Text behind the media, all of it learnt."""
    text: str = ""
    """A document, all of it learnt."""
    system: str = ""
    """The system prompt of a conversation."""
    loss_weight: str = ""
    """A number from 0 to 1,000,000 that weighs the loss of the sample's tokens, beside the source's
    `loss_weight`. A record without it has the weight 1."""

    def __post_init__(self) -> None:
        for kind in MEDIA_KINDS:
            value = getattr(self, kind)
            columns = (value,) if isinstance(value, str) else tuple(value)
            object.__setattr__(self, kind, columns)
        if bool(self.question) != bool(self.answer):
            raise SpecError(
                f"columns has question {self.question!r} and answer {self.answer!r}; it needs both "
                "or neither."
            )
        told = [role for role in _WHOLE_TEXTS if getattr(self, role)]
        if len(told) > 1:
            raise SpecError(
                f"columns names {' and '.join(told)}; a sample's text is one of "
                f"{', '.join(_WHOLE_TEXTS)}."
            )
        if self.system and not set(told) & {"conversation", "question"}:
            raise SpecError("columns names system without a conversation or a question.")

    def __str__(self) -> str:
        named = [*self.media.items(), *self.of_records.items()]
        return ", ".join(f"{role}: {column}" for role, column in named)

    @property
    def media(self) -> dict[MediaKind, tuple[str, ...]]:
        """The columns of each kind of media that has some."""
        named = {kind: tuple(getattr(self, kind)) for kind in MEDIA_KINDS}
        return {kind: columns for kind, columns in named.items() if columns}

    @property
    def texts(self) -> dict[str, str]:
        """The column of each role of text that is named."""
        roles = ("conversation", "question", "answer", "caption", "text", "system")
        return {role: column for role in roles if (column := getattr(self, role))}

    @property
    def of_records(self) -> dict[str, str]:
        """The column of each role that is named and is not media: texts, and the loss weight."""
        return {**self.texts, **({"loss_weight": self.loss_weight} if self.loss_weight else {})}


_WHOLE_TEXTS = ("conversation", "question", "caption", "text")


@dataclass(frozen=True, kw_only=True, slots=True)
class CodeSpec:
    """Code of the user's own: a class, and what it is made with."""

    __pydantic_config__: ClassVar[dict[str, object]] = STRICT

    name: str
    """Its name in the service's config, or its import path `package.module:Class`, where the
    service takes one."""
    options: dict[str, object] = field(default_factory=dict)
    """Keyword arguments the class is made with."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceSpec:
    """One dataset at a URL, in one format."""

    __pydantic_config__: ClassVar[dict[str, object]] = STRICT

    name: str
    """Name of the source in metrics, errors and `explain`; unique in the job."""
    url: str
    """Path or URL of the files; `*` and `{000..127}` patterns are expanded. Any fsspec URL."""
    format: SourceFormat
    """How the files are laid out: webdataset (tar), parquet, arrow (as save_to_disk writes it), mds
    (MosaicML Streaming), jsonl (an object a line), json (one array of objects), text (each file a
    document) or custom (as `format_code` reads them)."""
    format_code: CodeSpec | None = None
    """With format: custom, the user's own code that says where the samples of a file lie, and what
    one is."""
    weight: float = 1.0
    """Passes over the source in one epoch: 2 shows each sample twice, 0.5 every other one, 0 none
    until the mixture changes, as for a source that is added to a job that runs. Or shares of
    tokens: see `weights`."""
    max_passes: float | None = None
    """The most passes over the source in all epochs together, however its weight changes."""
    loss_weight: float = 1.0
    """Weighs the loss of this source's tokens in the mean over a step: from 0 to 1,000,000. With 0
    they are read and not learnt."""
    columns: ColumnMap = ColumnMap()
    """Which columns or keys are image, video, audio, conversation, question, answer, caption, text
    and system. By default they are found by their names and types. Also loss_weight, which has no
    default."""
    image_column: str = ""
    """Parquet: the same as `columns: {image: …}`."""
    ignore: tuple[str, ...] = ()
    """Columns, keys of records and suffixes of tar members that are no part of a sample, such as
    `thumbnail` or `seg.png`. Media that are neither read nor named here are refused."""
    placeholders: PlaceholderRule = "strict"
    """What `<image>`, `<video>` and `<audio>` in a text are: strict (each stands for a file that
    the sample has, or the sample is refused) or text (without such a file they are words)."""
    storage_options: dict[str, str] = field(default_factory=dict)
    """Passed to fsspec, for example an endpoint or a profile. Never a secret."""
    storage_profile: str = ""
    """Name of the operator's profile with which the source's storage is opened: see
    `storage_profiles` of the service's config. Not together with storage_options."""
    media_root: str = ""
    """Where the media paths of records start: a folder of the same storage. By default each
    file's own folder. Paths and links that leave it are refused."""
    error_budget: ErrorBudget | None = None
    """The rate of bad samples that this source may have; by default the job's own error_budget."""

    def __post_init__(self) -> None:
        if not self.name or any(c in self.name for c in "/\\\0 "):
            raise SpecError(
                f"source name {self.name!r} must be non-empty, without spaces and slashes."
            )
        if not 0 <= self.weight <= MOST_WEIGHT:
            raise SpecError(
                f"source {self.name!r} has weight {self.weight}; it must be from 0 to "
                f"{MOST_WEIGHT}."
            )
        if self.max_passes is not None and not 0 < self.max_passes < math.inf:
            raise SpecError(
                f"source {self.name!r} has max_passes {self.max_passes}; it must be above 0."
            )
        if not 0 <= self.loss_weight <= MAX_LOSS_WEIGHT:
            raise SpecError(
                f"source {self.name!r} has loss_weight {self.loss_weight}; it must be from 0 to "
                f"{MAX_LOSS_WEIGHT:,.0f}. With 0 its tokens are read and not learnt."
            )
        if self.format == "text" and self.columns.loss_weight:
            raise SpecError(
                f"source {self.name!r} is text, whose files have no record, and names "
                "columns.loss_weight. Give the whole source a loss_weight, or write jsonl."
            )
        if (self.format == "custom") != (self.format_code is not None):
            raise SpecError(
                f"source {self.name!r} has format: {self.format} and "
                f"{'no ' if self.format_code is None else ''}format_code; files that code of your "
                "own reads have both: format: custom, format_code: {name: …}."
            )
        if self.format_code is not None and self.media_root:
            raise SpecError(
                f"source {self.name!r} has media_root, and a format of its own, whose code gives "
                "the bytes of media itself. Leave media_root out."
            )
        if self.storage_profile and self.storage_options:
            raise SpecError(
                f"source {self.name!r} has storage_profile and storage_options; give one of them. "
                "The operator may put options into the profile."
            )
        if self.image_column and self.columns.image:
            raise SpecError(
                f"source {self.name!r} has image_column and columns.image; give columns alone."
            )
        if self.format == "webdataset" and self.columns.media:
            raise SpecError(
                f"source {self.name!r} is webdataset, whose media are told by their members' "
                "suffixes; name image, video and audio under columns in other formats only."
            )

    @property
    def weighs_loss(self) -> bool:
        """Whether tokens of this source may count other than once in the loss."""
        return self.loss_weight != 1 or bool(self.columns.loss_weight)

    @property
    def media_columns(self) -> dict[MediaKind, tuple[str, ...]]:
        """By kind: the columns that alone are read as media of it; only kinds that have some."""
        named = self.columns.media
        return {**named, "image": (self.image_column,)} if self.image_column else named


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
    """A job as stored: the newest version of its validated job file as JSON, and its state.
    `order` identifies the order of its samples, which has grown from those of all older versions;
    empty until the job is first opened."""

    name: str
    spec_json: str
    index_fingerprint: str
    state: JobState = "active"
    created_unix_s: float = 0.0
    spec_version: int = 1
    order: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class SpecRecord:
    """One version of a job's file, from 1 on. Attempts keep the one they began with."""

    job: str
    version: int
    spec_json: str
    submitted_unix_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptRecord:
    """One start of a job's trainers, under a version of its job file. `launch` names the start
    as its launcher does; empty where it has no name."""

    job: str
    attempt: int
    world_size: int
    start_cursor: str
    opened_unix_s: float
    spec_version: int = 1
    launch: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class LedgerEntry:
    """One planned step of one attempt, with what is needed to plan it again. `committed_unix_s`
    is None until every rank has committed it. `measured_s` is the training time of the slowest rank
    that measured it; None where none did. `predicted_s` is None in entries older than schema
    version 2. `content` is a sum of what was delivered (see core/content.py); None until the
    receipts of all its packs are in, and in entries older than schema version 4."""

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
    content: bytes | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class CostRecord:
    """The coefficients that a job's steps are planned with from `from_step` on, as JSON.
    `spec_version` is the newest version of the job file when it was recorded."""

    job: str
    from_step: int
    cost_json: str
    cost_version: str
    recorded_unix_s: float
    spec_version: int = 1


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


@dataclass(frozen=True, kw_only=True, slots=True)
class MixtureChange:
    """Weights that take over at the start of an epoch, or at a step. Sources that it does not name
    keep theirs."""

    __pydantic_config__: ClassVar[dict[str, object]] = STRICT

    weights: dict[str, float]
    """By source: passes over it in one epoch, from there on. 0 leaves it out."""
    from_epoch: int | None = None
    """The epoch with which it begins; the first one of a job is 0."""
    from_step: int | None = None
    """Or: the step. In a window of several steps it begins with the next window."""

    def __post_init__(self) -> None:
        if self.from_epoch is not None:
            one, begins = self.from_step is None, 1 <= self.from_epoch <= LAST_STEP
        else:
            one, begins = self.from_step is not None, 0 <= (self.from_step or 0) <= LAST_STEP
        if not one or not begins:
            raise SpecError(
                f"a change of the mixture has from_epoch={self.from_epoch}, from_step="
                f"{self.from_step}; give exactly one of them, an epoch from 1 or a step from 0 on."
            )
        if not self.weights:
            raise SpecError("a change of the mixture needs the weight of at least one source.")
        for source, weight in self.weights.items():
            if not 0 <= weight <= MOST_WEIGHT:
                raise SpecError(
                    f"a change of the mixture gives source {source!r} weight {weight}; it must be "
                    f"from 0 to {MOST_WEIGHT}."
                )


@dataclass(frozen=True, kw_only=True, slots=True)
class MixtureRecord:
    """A change of a job's mixture that was asked for while it ran, as JSON; `number` counts them
    from 1 on."""

    job: str
    number: int
    change_json: str
    recorded_unix_s: float


SkipAction = Literal["skip", "train"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SkipRecord:
    """Steps, both ends included, that attempts from `from_attempt` on pass over ("skip"), or
    train after all ("train"). Of the records that name a step, the one with the highest `number`
    counts."""

    job: str
    number: int
    first_step: int
    last_step: int
    action: SkipAction
    from_attempt: int
    recorded_unix_s: float
