"""What a trainer rank receives: one shard a step, as tensors beside the plan they follow.

    Shard ─ plan: PlanSummary ─ waves ─ groups        the whole step, the same on every rank
          └ microbatches ─ vision, audio: ModalityBatch ─ exchange     this rank's part of it

N is the number of replicas. A *wave* is the k-th microbatch of all replicas; in it every
replica is in exactly one CP group, and is idle where it is in none of the plan's groups.
Rows of `input_ids`, `labels` and `position_ids` are this rank's own tokens ("local"): the
whole pack at degree 1, two zigzag chunks of every sample at higher degrees.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from trainer_client.errors import NotFetched
from trainer_client.position import Progress
from trainer_client.staging import Move, with_tensors

if TYPE_CHECKING:  # the runtime reads shards
    from trainer_client.runtime.ring_layout import RingLayout

MODALITIES = ("vision", "audio")
"""Of encoder items: columns number them so, and the phases of a wave come in this order."""
IGNORED_LABEL = -100  # of a token without a target

Value = TypeVar("Value")


class Fetched(Generic[Value]):
    """A field whose bytes a rank has only if it asked for them (`parts=`).

    Reading it on another rank raises NotFetched, which says what to ask for; `hasattr` does not
    raise. The value is in the instance's dictionary, so the dataclass has no slots.
    """

    def __init__(self, part: str) -> None:
        self._part = part
        self._name = part

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, holder: object, owner: type | None = None) -> Value:
        if holder is None:
            raise AttributeError(self._name)  # so that dataclasses see a field without a default
        value: Value | None = holder.__dict__[self._name]
        if value is None:
            raise NotFetched(
                f"{self._name} did not come to this rank: the parts it asked for leave out "
                f"{self._part!r}. Name it in ShardDataset(parts=...), or leave {self._name} to "
                "the rank that computes with it."
            )
        return value

    def __set__(self, holder: object, value: Value | None) -> None:
        holder.__dict__[self._name] = value


class Recorded(Fetched[Value]):
    """A `Fetched` field whose name is put into the holder's `reads` when it is read."""

    def __get__(self, holder: object, owner: type | None = None) -> Value:
        value = super().__get__(holder, owner)  # raises where there is nothing to read
        holder.__dict__["reads"].add(self._name)
        return value


@dataclass(frozen=True, kw_only=True, slots=True)
class StageReport:
    """What one planning stage achieved, in the stage's own unit: cost before and after, and its
    lower bound."""

    stage: str
    algorithm: str
    unit: str
    before: float
    after: float
    lower_bound: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """The replicas that share one pack in a wave, in ring order; `tokens` count padding."""

    pack: int
    replicas: tuple[int, ...]
    tokens: int
    predicted_s: float

    @property
    def degree(self) -> int:
        """Number of replicas that share the pack."""
        return len(self.replicas)


@dataclass(frozen=True, kw_only=True, slots=True)
class Wave:
    """The groups that work at the same time, and the replicas that no group names."""

    index: int
    groups: tuple[Group, ...]
    idle: tuple[int, ...]

    @property
    def predicted_s(self) -> float:
        """Seconds of the slowest group."""
        return max((group.predicted_s for group in self.groups), default=0.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanGroups:
    """What few ranks look at: the groups of the whole step, and the stages of its planning."""

    waves: tuple[Wave, ...]
    stages: tuple[StageReport, ...]


class LaterGroups:
    """The groups of a large step, which the service is asked for when they are first read. Known
    before are `wave_count`, `ring_count`, and of this rank's packs the `rings`."""

    def __init__(
        self,
        ask: Callable[[], PlanGroups],
        *,
        wave_count: int,
        ring_count: int,
        rings: Mapping[int, int],
    ) -> None:
        self.wave_count = wave_count
        self.ring_count = ring_count
        self.rings = rings
        self._ask = ask
        self._asking = threading.Lock()
        self._found: PlanGroups | None = None

    def found(self) -> PlanGroups:
        """The groups. Raises what asking raises; it may be tried again."""
        with self._asking:
            if self._found is None:
                self._found = self._ask()
            return self._found


class OfAllRanks(Generic[Value]):
    """A field of a plan that is given, or is that of its `LaterGroups`. As with `Fetched`, the
    value is in the instance's dictionary."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, holder: object, owner: type | None = None) -> Value:
        if holder is None:
            raise AttributeError(self._name)  # so that dataclasses see a field without a default
        value: Value | LaterGroups = holder.__dict__[self._name]
        if isinstance(value, LaterGroups):
            found: Value = getattr(value.found(), self._name)
            return found
        return value

    def __set__(self, holder: object, value: "Value | LaterGroups") -> None:
        holder.__dict__[self._name] = value


@dataclass(frozen=True, kw_only=True)
class PlanSummary:
    """The plan of a whole step, the same on every rank.

    `digest` names it: ranks whose digests differ must not train together. `loss_tokens`
    counts the labelled tokens of all ranks, the weight of the step's mean loss; samples that
    were masked while decoding are still counted. `weighted_loss_tokens` is the sum of the
    `loss_weights` of the same tokens, None where all of them weigh 1.

    `waves`, `stages`, `groups`, `degrees` and `ring_packs` are of all ranks. Those of a large step
    do not come with the shard: the first to read them asks the service, so the dataset must be open
    then, and what a call raises is raised.
    """

    digest: str
    replicas: int
    samples: int
    loss_tokens: int
    predicted_s: float
    waves: OfAllRanks[tuple[Wave, ...]] = OfAllRanks()
    stages: OfAllRanks[tuple[StageReport, ...]] = OfAllRanks()
    weighted_loss_tokens: float | None = None

    @property
    def wave_count(self) -> int:
        """The number of waves."""
        waves: tuple[Wave, ...] | LaterGroups = self.__dict__["waves"]
        return waves.wave_count if isinstance(waves, LaterGroups) else len(waves)

    @property
    def ring_count(self) -> int:
        """How many packs of the step several replicas share."""
        waves: tuple[Wave, ...] | LaterGroups = self.__dict__["waves"]
        return waves.ring_count if isinstance(waves, LaterGroups) else len(self.ring_packs)

    @property
    def rings(self) -> Mapping[int, int]:
        """By pack that several replicas share, its number among all such packs of the step, the
        same on each of them. Of a large step, this rank's packs alone."""
        waves: tuple[Wave, ...] | LaterGroups = self.__dict__["waves"]
        if isinstance(waves, LaterGroups):
            return waves.rings
        return {pack: number for number, pack in enumerate(self.ring_packs)}

    @property
    def ring_packs(self) -> tuple[int, ...]:
        """The packs that several replicas share, in execution order."""
        return tuple(group.pack for group in self.groups if group.degree > 1)

    @property
    def groups(self) -> tuple[Group, ...]:
        """All groups in execution order; a group's place is its pack's number."""
        return tuple(group for wave in self.waves for group in wave.groups)

    @property
    def degrees(self) -> tuple[int, ...]:
        """CP degree of every group, in execution order."""
        return tuple(group.degree for group in self.groups)

    def __getstate__(self) -> dict[str, Any]:
        """A copy for another process has the groups, because it cannot ask for them."""
        return {**self.__dict__, "waves": self.waves, "stages": self.stages}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ItemNotes:
    """What a model needs to know of m encoder items, as numpy columns.

    `kind` int8[m]: 0 an image, 1 a clip, 2 a recording, -1 unknown; `grid` int64[m, 4]: patches in
    time, height and width, and the patches per side that merge into one token, zeros where the
    model has no grid; `seconds_per_patch` float64[m]: what one patch of a clip spans, or nan.
    """

    kind: NDArray[np.int8]
    grid: NDArray[np.int64]
    seconds_per_patch: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.kind)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PackItems(ItemNotes):
    """All m encoder items of a pack, in sequence order, whoever encodes them.

    `modality` int8[m]: 0 vision, 1 audio; `start` int64[m]: the place of an item's first token in
    the whole padded pack, as `cu_seqlens` counts; `tokens` int64[m].
    """

    modality: NDArray[np.int8]
    start: NDArray[np.int64]
    tokens: NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class FeatureExchange:
    """The all-to-all that brings encoded features to the ranks that hold their tokens.

    This rank's items, encoded and joined end to end, are its rows. `send_rows` int64[s] are
    rows of those, ordered by destination; `send_splits` and `recv_splits` count rows per
    replica (N each); `recv_positions` int64[r] are the local tokens that the received rows
    replace, ordered by source. Every replica takes part, if necessary with empty splits.
    """

    send_rows: torch.Tensor
    send_splits: list[int]
    recv_splits: list[int]
    recv_positions: torch.Tensor


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class ModalityBatch:
    """What this rank encodes in a wave for one encoder, whoever needs the features.

    `items` are uint8 [frames, height, width, 3] for vision and float32 [samples] at 16 kHz
    for audio; they are views into the buffers that the bytes arrived in. May be empty; raises
    NotFetched where `parts=` leaves out media. `notes` are of these items, in their order. `reads`
    names the fields that were read, and is shared by copies on other devices.
    """

    items: Recorded[list[torch.Tensor]] = Recorded("media")
    exchange: Recorded[FeatureExchange] = Recorded("media")
    notes: ItemNotes | None = None
    reads: set[str] = field(default_factory=set)

    @property
    def item_count(self) -> int:
        """Number of items that came to this rank; does not count as reading them."""
        return len(self.__dict__["items"] or ())

    @property
    def item_numbers(self) -> int:
        """Pixel values and sound samples of those items; does not count as reading them."""
        return sum(item.numel() for item in self.__dict__["items"] or ())

    def mapped(self, move: Move) -> "ModalityBatch":
        """With `move` applied to items and exchange indices; does not count as reading them."""
        items, exchange = self.__dict__["items"], self.__dict__["exchange"]
        return ModalityBatch(
            items=None if items is None else [move(item) for item in items],
            exchange=replace(
                exchange,
                send_rows=move(exchange.send_rows),
                recv_positions=move(exchange.recv_positions),
            ),
            notes=self.notes,
            reads=self.reads,
        )

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """The shape of each item."""
        return [tuple(item.shape) for item in self.items]


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Microbatch:
    """This rank's part of one wave. `pack` is -1 and the token tensors are empty when idle.

    `input_ids`, `labels`, `position_ids` int64[local tokens]: labels are already shifted
    (`labels[i]` is the target at i, -100 for none); `position_ids` count from the start of the
    sample. `positions` are those that the model computes with: int64[3, local tokens] (time,
    height, width) where it counts by M-RoPE, else `position_ids`. A rank that did not ask for
    tokens or labels (`parts=`) has no `input_ids` or `labels`: reading them raises NotFetched, and
    positions are worked out from the plan. `cu_seqlens` int32[S+1] are the padded
    sample offsets of the *whole* pack, `lengths` int32[S] the true lengths, `sample_ids`
    int64[S]. `cp_group` are the replicas that share the pack in ring order and `cp_rank` this
    replica's place among them. `vision` and `audio` are None only in a wave in which no
    replica has such an item (an idle replica, too, may encode and must join the exchange), and
    on ranks that asked neither for tokens nor for media. `items` are those of the whole pack,
    known at any degree and wherever they are encoded. `loss_weights` weigh the loss of each token:
    float64[local tokens], that of its sample times that of the source, and 1 in steps without
    weights. `reads` names which of labels, weights and positions were read. `layouts` are those of
    the pack's ring attention, by whether it is causal, where they were made with the shard.
    `rows_multiple`: local tokens are a multiple of it, the last of them a sample with the id -1
    that has no labels (`alignment.py`).
    """

    wave: int
    pack: int
    cp_group: tuple[int, ...]
    cp_rank: int
    predicted_s: float
    input_ids: Fetched[torch.Tensor] = Fetched("tokens")
    labels: Recorded[torch.Tensor] = Recorded("labels")
    position_ids: Recorded[torch.Tensor] = Recorded("tokens")
    cu_seqlens: torch.Tensor
    lengths: torch.Tensor
    sample_ids: torch.Tensor
    vision: ModalityBatch | None = None
    audio: ModalityBatch | None = None
    items: PackItems | None = None
    mrope: torch.Tensor | None = None
    weights: torch.Tensor | None = None
    reads: set[str] = field(default_factory=set)
    layouts: Mapping[bool, "RingLayout"] = field(default_factory=dict)
    rows_multiple: int = 1

    def loss_tokens(self) -> tuple[int, float]:
        """Labels other than -100, and the sum of their weights. Waits for the labels' device; ask
        one of `Shard.planned`."""
        have = self.labels != IGNORED_LABEL
        count = int(have.sum())
        return count, float(count) if self.weights is None else float(self.weights[have].sum())

    @property
    def loss_weights(self) -> torch.Tensor:
        """The weight of each token's loss: float64[local tokens]."""
        self.reads.add("loss_weights")
        if self.weights is not None:
            return self.weights
        places = self.__dict__["position_ids"]  # reading them would count as reading them
        return torch.ones(len(places), dtype=torch.float64, device=places.device)

    @property
    def positions(self) -> torch.Tensor:
        """Positions as the model counts them: int64[local tokens], or [3, local tokens]."""
        self.reads.add("positions")
        return self.position_ids if self.mrope is None else self.mrope

    @property
    def idle(self) -> bool:
        """True when this replica has no tokens in the wave."""
        return self.pack < 0

    @property
    def local_tokens(self) -> int:
        """Number of rows of this rank's token tensors, known also where they were not fetched."""
        return 0 if self.idle else int(self.cu_seqlens[-1]) // len(self.cp_group)

    def laid_out(self, layouts: Mapping[bool, "RingLayout"]) -> "Microbatch":
        """With these layouts; does not count as reading anything."""
        return Microbatch(**{**self.__dict__, "layouts": layouts})

    def mapped(self, move: Move) -> "Microbatch":
        """With `move` applied to tokens, encoder items, exchange indices and layouts."""
        # A tensor that this rank did not ask for stays absent.
        tokens, labels = self.__dict__["input_ids"], self.__dict__["labels"]
        mrope = None if self.mrope is None else move(self.mrope)
        return replace(
            self,
            input_ids=None if tokens is None else move(tokens),
            labels=None if labels is None else move(labels),
            position_ids=move(self.__dict__["position_ids"]),
            mrope=mrope,
            weights=None if self.weights is None else move(self.weights),
            vision=self.vision and self.vision.mapped(move),
            audio=self.audio and self.audio.mapped(move),
            layouts={causal: with_tensors(of, move) for causal, of in self.layouts.items()},
        )

    def __repr__(self) -> str:
        return (
            f"Microbatch(wave={self.wave}, pack={self.pack}, cp_rank={self.cp_rank} of "
            f"{list(self.cp_group)}, local_tokens={self.local_tokens})"
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Shard:
    """One rank's part of one optimizer step; `microbatches` are in execution order.

    `cursor_after` is the position after this step. `wait_s` is the exposed data wait: the seconds
    for which the training loop was blocked for this shard. `progress` is told when `to` is called.
    `on_host` are the microbatches as they arrived, where `microbatches` are copies elsewhere.

    With `device=`, a microbatch is copied to the device while the one before it computes, and is
    gone from there when nobody holds it any more (`device.py`): go through them once.
    """

    job: str
    attempt: int
    step: int
    rank: int
    replica: int
    cursor_after: str
    plan: PlanSummary
    microbatches: Sequence[Microbatch]
    size_bytes: int
    wait_s: float = 0.0
    progress: Progress | None = field(default=None, repr=False)
    on_host: Sequence[Microbatch] | None = field(default=None, repr=False)

    @property
    def planned(self) -> Sequence[Microbatch]:
        """The microbatches as they are on the host, for whoever reads the plan's numbers or labels
        and needs nothing on the device."""
        return self.microbatches if self.on_host is None else self.on_host

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> "Shard":
        """The shard with tokens, encoder items and exchange indices on `device`; the plan's numbers
        stay on the host.

        Lightning and accelerate call it on the shard that is trained next, and so may a loop. From
        then on, the shard counts as trained in a saved state, unless the loop commits.
        """
        if self.progress is not None:
            self.progress.take(self.step)
        return self.mapped(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def mapped(self, move: Move) -> "Shard":
        """With `move` applied to tokens, encoder items and exchange indices."""
        moved = tuple(mb.mapped(move) for mb in self.microbatches)
        return replace(self, microbatches=moved, on_host=self.planned)
