"""What the coordinator asks of a worker, and what it tells a rank.

A *pack order* names a pack's samples and their planned lengths; a worker decodes and
assembles it once and holds it until it is released. A *rank shard* is one rank's part of a
step plan, with the tickets that fetch its bytes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dataservice.core.errors import ServiceError
from dataservice.core.plan import StageReport
from dataservice.core.positions import IN_SEQUENCE, PositionRule
from dataservice.core.sample import ItemNotes, Modality, SampleLengths, SampleRef
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
class PackAnswers:
    """Packs that are ready, and those that could not be made, by pack with the reason."""

    receipts: tuple[PackReceipt, ...] = ()
    failures: Mapping[int, ServiceError] = field(default_factory=dict)


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

    Of a sequence the `tensors` named are streamed, all of them when none is named.
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


@dataclass(frozen=True, kw_only=True, slots=True)
class FeatureRoutes:
    """Rows of encoded features that one rank sends and receives in a wave, for one modality.

    The rank encodes its items in the order given by its parts; their features, end to end,
    are its rows. `send_rows` int32[s] are rows of those, in order of destination;
    `send_splits`, `recv_splits` int32[N] count rows per replica; `recv_positions` int32[r]
    are the local token positions of the rows received, in order of source.
    """

    modality: Modality
    send_rows: NDArray[np.int32]
    send_splits: NDArray[np.int32]
    recv_splits: NDArray[np.int32]
    recv_positions: NDArray[np.int32]


@dataclass(frozen=True, kw_only=True, slots=True)
class ItemsOfPack:
    """Encoder items of one pack, as places in the pack's list of items; of each the units in
    `ranges`, or all of it where there are none."""

    pack: int
    items: tuple[int, ...]
    ranges: tuple[UnitRange, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class PackItems:
    """The m encoder items of a pack, in sequence order: `modality` int8[m]; `start` int32[m], the
    place of an item's first token in the padded pack; `tokens` int32[m], how many it has."""

    modality: NDArray[np.int8]
    start: NDArray[np.int32]
    tokens: NDArray[np.int32]
    notes: ItemNotes

    def __len__(self) -> int:
        return len(self.modality)

    @staticmethod
    def none() -> "PackItems":
        """No items: of an idle replica, or of a pack of text alone."""
        empty = np.zeros(0, dtype=np.int32)
        return PackItems(
            modality=empty.astype(np.int8), start=empty, tokens=empty, notes=ItemNotes.unknown(0)
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Microbatch:
    """One rank's part of one wave. `pack` is -1 when its replica is idle in the wave.

    `cu_seqlens` int32[S+1] are the padded sample offsets of the whole pack, `lengths`
    int32[S] the true lengths, `items` all its encoder items; `encodes[modality]` lists the items
    that this rank encodes, by pack, and `encode_notes[modality]` what is known of them.
    `loss_weights` float64[S] are of the samples, empty where all samples of the step weigh 1.
    """

    wave: int
    pack: int
    cp_group: tuple[int, ...]
    cp_rank: int
    seconds: float
    sample_ids: NDArray[np.int64]
    cu_seqlens: NDArray[np.int32]
    lengths: NDArray[np.int32]
    encodes: dict[Modality, tuple[ItemsOfPack, ...]]
    routes: dict[Modality, FeatureRoutes]
    encode_notes: dict[Modality, ItemNotes] = field(default_factory=dict)
    items: PackItems = field(default_factory=PackItems.none)
    loss_weights: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardColumns:
    """One replica's rows of a step, as `dataservice_proto.columns` has them; `replicas` are all of
    the step, `rings` its packs that several replicas share."""

    waves: int
    replicas: int
    rings: int
    columns: Mapping[str, bytes]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSummary:
    """The groups of a whole step as `dataservice_proto.columns` has them, the same for every rank;
    `packs` are their number."""

    plan_digest: str
    replicas: int
    waves: int
    packs: int
    samples: int
    predicted_s: float
    stages: tuple[StageReport, ...]
    columns: Mapping[str, bytes]

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
