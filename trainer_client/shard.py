"""What a trainer rank receives: one shard a step, as tensors beside the plan they follow.

    Shard ─ plan: PlanSummary ─ waves ─ groups        the whole step, the same on every rank
          └ microbatches ─ vision, audio: ModalityBatch ─ exchange     this rank's part of it

N is the number of replicas. A *wave* is the k-th microbatch of all replicas; in it every
replica is in exactly one CP group, and is idle where it is in none of the plan's groups.
Rows of `input_ids`, `labels` and `position_ids` are this rank's own tokens ("local"): the
whole pack at degree 1, two zigzag chunks of every sample at higher degrees.
"""

from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from trainer_client.errors import NotFetched

Value = TypeVar("Value")


class Fetched(Generic[Value]):
    """A field whose bytes only those ranks have that asked for them (`parts=`).

    Reading it elsewhere raises NotFetched, which says what to ask for; `hasattr` tells without
    raising. It lives in the instance's dictionary, so its dataclass has no slots.
    """

    def __init__(self, part: str) -> None:
        self._part = part
        self._name = part

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, holder: object, owner: type | None = None) -> Value:
        if holder is None:
            raise AttributeError(self._name)  # so dataclasses see a field without a default
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


@dataclass(frozen=True, kw_only=True, slots=True)
class StageReport:
    """What one planning stage achieved, in its own unit: cost before, after, lower bound."""

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
        """How many replicas share the pack."""
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
class PlanSummary:
    """The plan of a whole step, the same on every rank.

    `digest` names it: ranks whose digests differ must not train together. `loss_tokens`
    counts the labelled tokens of all ranks, the weight of the step's mean loss; samples that
    were masked while decoding are still counted.
    """

    digest: str
    replicas: int
    samples: int
    loss_tokens: int
    predicted_s: float
    waves: tuple[Wave, ...]
    stages: tuple[StageReport, ...]

    @property
    def groups(self) -> tuple[Group, ...]:
        """All groups in execution order; a group's place is its pack's number."""
        return tuple(group for wave in self.waves for group in wave.groups)

    @property
    def degrees(self) -> tuple[int, ...]:
        """CP degree of every group, in execution order."""
        return tuple(group.degree for group in self.groups)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class FeatureExchange:
    """The all-to-all that brings encoded features to the ranks that hold their tokens.

    This rank's items, encoded and joined end to end, are its rows. `send_rows` int64[s] are
    rows of those, ordered by destination; `send_splits` and `recv_splits` count rows per
    replica (N each); `recv_positions` int64[r] are the local tokens that the received rows
    replace, ordered by source. Every replica takes part, with empty splits if need be.
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
    NotFetched where `parts=` leaves out media.
    """

    items: Fetched[list[torch.Tensor]] = Fetched("media")
    exchange: FeatureExchange

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """The shape of each item."""
        return [tuple(item.shape) for item in self.items]


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Microbatch:
    """This rank's part of one wave. `pack` is -1 and the token tensors are empty when idle.

    `input_ids`, `labels`, `position_ids` int64[local tokens]: labels are already shifted
    (`labels[i]` is the target at i, -100 for none). A rank that did not ask for tokens or
    labels (`parts=`) has no `input_ids` or `labels`: reading them raises NotFetched, and
    `position_ids` are worked out from the plan. `cu_seqlens` int32[S+1] are the padded
    sample offsets of the *whole* pack, `lengths` int32[S] the true lengths, `sample_ids`
    int64[S]. `cp_group` are the replicas that share the pack in ring order and `cp_rank` this
    replica's place among them. `vision` and `audio` are None only in a wave in which no
    replica has such an item (an idle replica, too, may encode and must join the exchange), and
    on ranks that asked neither for tokens nor for media.
    """

    wave: int
    pack: int
    cp_group: tuple[int, ...]
    cp_rank: int
    predicted_s: float
    input_ids: Fetched[torch.Tensor] = Fetched("tokens")
    labels: Fetched[torch.Tensor] = Fetched("labels")
    position_ids: torch.Tensor
    cu_seqlens: torch.Tensor
    lengths: torch.Tensor
    sample_ids: torch.Tensor
    vision: ModalityBatch | None = None
    audio: ModalityBatch | None = None

    @property
    def idle(self) -> bool:
        """True when this replica has no tokens in the wave."""
        return self.pack < 0

    @property
    def local_tokens(self) -> int:
        """Rows of this rank's token tensors, known without them."""
        return 0 if self.idle else int(self.cu_seqlens[-1]) // len(self.cp_group)

    def __repr__(self) -> str:
        return (
            f"Microbatch(wave={self.wave}, pack={self.pack}, cp_rank={self.cp_rank} of "
            f"{list(self.cp_group)}, local_tokens={self.local_tokens})"
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Shard:
    """One rank's part of one optimizer step; `microbatches` are in execution order.

    `cursor_after` is the position behind this step. `wait_s` is how long the training loop
    was blocked for this shard: the exposed data wait.
    """

    job: str
    attempt: int
    step: int
    rank: int
    replica: int
    cursor_after: str
    plan: PlanSummary
    microbatches: tuple[Microbatch, ...]
    size_bytes: int
    wait_s: float = 0.0
