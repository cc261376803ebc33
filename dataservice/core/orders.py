"""What the coordinator asks of a worker, and what it tells a rank.

A *pack order* names a pack's samples and their planned lengths; a worker decodes and
assembles it once and holds it until it is released. A *rank shard* is one rank's part of a
step plan, with the tickets that fetch its bytes.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, overload
from weakref import ref

from dataservice.core.plan import StageReport
from dataservice.core.positions import IN_SEQUENCE, PositionRule
from dataservice.core.sample import SampleLengths, SampleRef
from dataservice.core.team import TeamShare

TOKEN_TENSORS = ("input_ids", "position_ids")
LABEL_TENSORS = ("labels",)


@dataclass(frozen=True, kw_only=True, slots=True)
class PackKey:
    """A pack's name on the wire. `plan_digest` keeps two plans of one step apart."""

    job: str
    step: int
    plan_digest: str
    pack: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PackKeys(Sequence[PackKey]):
    """The names of packs of one plan, of which a large step has many."""

    job: str
    step: int
    plan_digest: str
    packs: Sequence[int]

    def __len__(self) -> int:
        return len(self.packs)

    @overload
    def __getitem__(self, place: int) -> PackKey: ...
    @overload
    def __getitem__(self, place: slice) -> "PackKeys": ...
    def __getitem__(self, place: int | slice) -> "PackKey | PackKeys":
        if isinstance(place, slice):
            return replace(self, packs=self.packs[place])
        return PackKey(
            job=self.job, step=self.step, plan_digest=self.plan_digest, pack=self.packs[place]
        )


class PackSet(Set[PackKey]):
    """The names of packs of any plans, kept by plan."""

    __slots__ = ("_of_plan",)

    def __init__(self, keys: Iterable[PackKeys] = ()) -> None:
        self._of_plan: dict[tuple[str, int, str], set[int]] = {}
        for of in keys:
            plan = of.job, of.step, of.plan_digest
            self._of_plan.setdefault(plan, set()).update(of.packs)

    @classmethod
    def _from_iterable(cls, it: Iterable[Any]) -> frozenset[Any]:  # of what Set derives
        return frozenset(it)

    def __contains__(self, key: object) -> bool:
        if not isinstance(key, PackKey):
            return False
        return key.pack in self._of_plan.get((key.job, key.step, key.plan_digest), ())

    def __iter__(self) -> Iterator[PackKey]:
        for (job, step, plan_digest), packs in self._of_plan.items():
            yield from PackKeys(job=job, step=step, plan_digest=plan_digest, packs=[*packs])

    def __len__(self) -> int:
        return sum(map(len, self._of_plan.values()))

    def __sub__(self, other: Set[Any]) -> Set[PackKey]:
        if not isinstance(other, PackSet):
            return super().__sub__(other)
        left = PackSet()  # mostly empty, and then no key is made
        for plan, packs in self._of_plan.items():
            if more := packs - other._of_plan.get(plan, set()):
                left._of_plan[plan] = more
        return left


@dataclass(frozen=True, kw_only=True, slots=True)
class PackSample:
    """One sample of a pack order: where it lies, the shape that it must take, and the epoch that
    it was drawn in."""

    ref: SampleRef
    lengths: SampleLengths
    epoch: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class PackOrder:
    """Decode these samples and assemble them, in this order, for a group of this degree.

    `pipeline` is the job's text and media pipeline as JSON; workers keep one decoder built
    from each distinct value.
    """

    key: PackKey
    degree: int
    pipeline: str
    samples: Sequence[PackSample]
    share: TeamShare = field(default=TeamShare(), compare=False)
    """The share of the job's team; it may change while the order stays the same."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BadSample:
    """A sample that kept its planned shape with labels masked, and why."""

    sample_id: int
    source: str
    key: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceWork:
    """What the samples of one source took in a pack: seconds of slots, the part of them that a CPU
    worked, and `read_bytes`, the stored size of those that could be read."""

    source: str
    samples: int
    read_s: float
    decode_s: float
    read_bytes: int
    read_cpu_s: float = 0.0
    decode_cpu_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class StorageOutage:
    """The storage of a job's source has not answered a worker for `away_s` seconds; its samples
    wait for it."""

    job: str
    source: str
    away_s: float
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Holdings:
    """The packs that were ordered from a worker and not released, the storage that it waits for,
    and the bytes that it has sent to ranks so far, over gRPC and through memory."""

    packs: Set[PackKey] = frozenset()
    outages: tuple[StorageOutage, ...] = ()
    grpc_bytes: int = 0
    same_node_bytes: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class PackReceipt:
    """What assembling a pack took. `decode_s` includes reading; `sources` tell the same by source.
    `room_s` is how long the pack waited before that for room in the worker's memory.

    `sample_digests` are of what is delivered of each sample, masked or not: 8 bytes each, in
    the pack's order. Decoding the same sample again must come to the same digest.
    """

    key: PackKey
    size_bytes: int
    decode_s: float
    bad_samples: tuple[BadSample, ...] = ()
    sources: tuple[SourceWork, ...] = ()
    sample_digests: bytes = b""
    room_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class WantedParts:
    """The bytes of its microbatches that a rank asks for; the numbers of the plan always come.

    A rank that computes a whole replica needs all of them. Of pipeline stages the first needs
    `tokens` and `media`, the last `labels`, and those between nothing; a tensor-parallel peer that
    gets encoded features from another rank needs no `media`.
    """

    tokens: bool = True
    media: bool = True
    labels: bool = True

    @property
    def sequence(self) -> tuple[str, ...]:
        """Names of the sequence tensors to stream."""
        return TOKEN_TENSORS * self.tokens + LABEL_TENSORS * self.labels


EVERYTHING = WantedParts()


class UnitRange(NamedTuple):
    """Units `first` to `stop` - 1 of an encoder item that is cut into `of` equal ones: the same
    share of its frames."""

    first: int
    stop: int
    of: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PartSpec:
    """One part of a pack that a rank may fetch.

    The sequence part of group member `cp_rank` when `items` is empty, else those encoder
    items (places in the pack's list of items), of each the units in `ranges`, or all of it where
    there are none. Of a sequence only the `tensors` named are streamed, in the pack's order; all of
    them when none is named.
    """

    key: PackKey
    cp_rank: int = -1
    items: tuple[int, ...] = ()
    tensors: tuple[str, ...] = ()
    ranges: tuple[UnitRange, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Ticket:
    """The right of its `holder` to stream some parts of a step from the `workers` that hold them.
    Each worker checks it alone, and finds its own parts in the `columns`, which have rows for so
    many `sequences` and `parts` of items; `addresses` are the workers'.

    Of a sequence the `tensors` named are streamed, all of them when none is named. `written` are
    the columns as fields of a message, where they are at hand.
    """

    job: str
    step: int
    plan_digest: str
    rank: int
    holder: str
    expires_unix_s: int
    workers: tuple[str, ...]
    addresses: tuple[str, ...] = ()
    tensors: tuple[str, ...] = ()
    sequences: int
    parts: int
    columns: Mapping[str, bytes]
    signature: bytes = b""
    written: bytes = field(default=b"", compare=False, repr=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardColumns:
    """One replica's rows of a step, as `dataservice_proto.columns` has them; `replicas` are all of
    the step, `rings` its packs that several replicas share. `written` are the same columns as
    fields of a message, where they are at hand."""

    waves: int
    replicas: int
    rings: int
    columns: Mapping[str, bytes]
    written: tuple[bytes, ...] = field(default=(), compare=False, repr=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSummary:
    """The groups of a whole step as `dataservice_proto.columns` has them, the same for every rank;
    `packs` are their number. `written` is the message of it, once someone has asked."""

    plan_digest: str
    replicas: int
    waves: int
    packs: int
    samples: int
    predicted_s: float
    stages: tuple[StageReport, ...]
    columns: Mapping[str, bytes]
    written: list[bytes] = field(default_factory=list, compare=False, repr=False)

    @property
    def size_bytes(self) -> int:
        """Of its columns."""
        return sum(map(len, self.columns.values()))


@dataclass(frozen=True, kw_only=True, slots=True)
class RankShard:
    """One rank's part of a step. `positions` says how the model counts its tokens' positions;
    `weighted_loss_tokens` is the sum of the weights of the step's loss tokens, None where all
    weigh 1. `loss_tokens`, `samples` and `predicted_s` are of the whole step. Without a `ticket`
    nothing is to be fetched. A small `summary` comes along; another is asked for."""

    job: str
    attempt: int
    step: int
    rank: int
    replica: int
    plan_digest: str
    cursor_after: str
    loss_tokens: int
    samples: int
    predicted_s: float
    columns: ShardColumns
    ticket: Ticket | None
    summary: StepSummary | None = None
    positions: PositionRule = IN_SEQUENCE
    weighted_loss_tokens: float | None = None
    made_with: "ref[ShardsMade] | None" = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False, weakref_slot=True)
class ShardsMade:
    """Parts of ranks that were made together, for as long as who made them keeps them. Who writes
    one may write all, since in a row they take half the time, and keep what is `written` until each
    is asked for: by what their ranks know the job as, the bytes of each rank."""

    shards: list[RankShard] = field(default_factory=list)
    written: dict[str, dict[int, bytes]] = field(default_factory=dict)
