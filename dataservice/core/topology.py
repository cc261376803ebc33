"""The trainer's ranks, seen as replicas on nodes, and each replica's ranks as stages.

    rank = (replica · pipeline_stages + stage) · tensor_ranks + tensor rank

    2 replicas, 2 stages, 2 tensor ranks
    rank       0   1   2   3 │ 4   5   6   7
    replica    ──────0────── │ ──────1──────
    stage      ──0──   ──1── │ ──0──   ──1──
    tensor     0   1   0   1 │ 0   1   0   1

Tensor-parallel peers, which exchange most, are neighbours; then come stages, then replicas. This is
the layout of a torch device mesh of shape (replicas, pipeline_stages, tensor_ranks).
"""

import math
from dataclasses import dataclass, fields
from typing import Literal, get_args

from dataservice.core.errors import WorldSizeError

Meet = Literal["wave", "step"]
EncoderStage = Literal["first", "spread", "own", "cut"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaLayout:
    """One replica: `ranks_per_replica` (tensor × pipeline parallel), cut into `pipeline_stages`,
    each of which holds `virtual_stages` model chunks (interleaved 1F1B). All ranks of a replica get
    the same microbatches.

    `replicas_meet`: in every wave, as where weights are sharded over replicas (FSDP), or once a
    step, as in plain data parallelism. `encoder_stage`: the pipeline stage that encodes: the first,
    beside its part of the decoder; one of its own before the decoder's; `spread`, all stages of
    a replica, before the pipeline fills and after it drains; or `cut`, each chunk the part of the
    encoders' seconds that `vision_shares` and `audio_shares` say. `features_ahead`: without
    pipelines, features travel under the backward pass of the wave before theirs. `stage_shares`:
    the part of the decoder's seconds that each model chunk takes, in model order; equal parts where
    it is empty.
    """

    ranks_per_replica: int = 1
    pipeline_stages: int = 1
    virtual_stages: int = 1
    replicas_per_node: int | None = None
    replicas_meet: Meet = "wave"
    encoder_stage: EncoderStage = "first"
    encoders_train: bool = True
    features_ahead: bool = False
    stage_shares: tuple[float, ...] = ()
    vision_shares: tuple[float, ...] = ()
    audio_shares: tuple[float, ...] = ()

    @property
    def encoder_shares(self) -> tuple[tuple[float, ...], ...]:
        """The part of each encoder's seconds that each model chunk takes, in the order of Modality:
        all of it the first, unless encoders are cut. With `spread` they belong to no chunk."""
        chunks = self.pipeline_stages * self.virtual_stages
        first = (1.0,) + (0.0,) * (chunks - 1)
        if self.encoder_stage != "cut":
            return first, first
        both = (self.vision_shares, self.audio_shares)
        return tuple(
            tuple(share / sum(shares) for share in shares) if shares else first for shares in both
        )

    @property
    def chunk_shares(self) -> tuple[float, ...]:
        """The part of the decoder's seconds that each model chunk takes; their sum is 1."""
        chunks = self.pipeline_stages * self.virtual_stages
        if self.stage_shares:
            return tuple(share / sum(self.stage_shares) for share in self.stage_shares)
        if self.encoder_stage == "own" and self.pipeline_stages > 1:
            decoding = chunks - self.virtual_stages
            return tuple(float(c % self.pipeline_stages > 0) / decoding for c in range(chunks))
        return (1.0 / chunks,) * chunks

    @property
    def kept_microbatches(self) -> float:
        """Microbatches whose decoder activations the first pipeline stage keeps at once, in 1F1B:
        as many as there are stages; interleaved, parts of microbatches, one a model chunk."""
        p, v = self.pipeline_stages, self.virtual_stages
        return float(p) if v == 1 or p == 1 else (2 * (p - 1) + (v - 1) * p + 1) / v

    @property
    def begun_microbatches(self) -> int:
        """Microbatches of which the first pipeline stage keeps anything at once: what it encoded
        for a microbatch stays until the last of its backward passes."""
        p, v = self.pipeline_stages, self.virtual_stages
        return p if v == 1 or p == 1 else 2 * p

    def over(self, world_size: int) -> "Topology":
        """So many ranks in such replicas. Raises WorldSizeError where they cannot be divided."""
        plain = {field.name: getattr(self, field.name) for field in fields(ReplicaLayout)}
        return Topology(world_size=world_size, **plain)


@dataclass(frozen=True, kw_only=True, slots=True)
class Topology(ReplicaLayout):
    """`world_size` ranks in replicas of one layout."""

    world_size: int

    def __post_init__(self) -> None:
        if self.world_size < 1:
            raise WorldSizeError(
                f"world size is {self.world_size}; it must be at least 1. Pass the number of "
                "trainer ranks, as torchrun sets it in WORLD_SIZE."
            )
        for name in ("ranks_per_replica", "pipeline_stages", "virtual_stages", "replicas_per_node"):
            if (count := getattr(self, name)) is not None and count < 1:
                raise WorldSizeError(f"{name} is {count}; it must be at least 1.")
        for name, known in (("replicas_meet", Meet), ("encoder_stage", EncoderStage)):
            if (choice := getattr(self, name)) not in get_args(known):
                raise WorldSizeError(
                    f"{name} is {choice!r}; it is one of {', '.join(get_args(known))}."
                )
        if self.world_size % self.ranks_per_replica:
            raise WorldSizeError(
                f"world size {self.world_size} is not a multiple of {self.ranks_per_replica}, "
                "the ranks of one replica (tensor × pipeline parallel in the job's topology). "
                "Start a multiple, or change the job's topology."
            )
        if self.ranks_per_replica % self.pipeline_stages:
            raise WorldSizeError(
                f"{self.ranks_per_replica} ranks of a replica cannot be cut into "
                f"{self.pipeline_stages} pipeline stages. Make the ranks per replica tensor × "
                "pipeline parallel."
            )
        if self.features_ahead and self.pipeline_stages > 1:
            raise WorldSizeError(
                f"features_ahead with {self.pipeline_stages} pipeline stages, which encode when "
                "their schedule says: leave it out."
            )
        for name, whose in (
            ("stage_shares", "the decoder's"),
            ("vision_shares", "the vision encoder's"),
            ("audio_shares", "the audio encoder's"),
        ):
            self._check_shares(name, whose)
        if (self.encoder_stage == "cut") != bool(self.vision_shares or self.audio_shares):
            raise WorldSizeError(
                f"encoder_stage is {self.encoder_stage}, vision_shares {list(self.vision_shares)} "
                f"and audio_shares {list(self.audio_shares)}; where encoders are cut, and nowhere "
                "else, give each model chunk its part of them."
            )

    def _check_shares(self, name: str, whose: str) -> None:
        shares, chunks = getattr(self, name), self.pipeline_stages * self.virtual_stages
        sound = all(math.isfinite(share) and share >= 0 for share in shares) and sum(shares) > 0
        if shares and not (len(shares) == chunks and sound):
            raise WorldSizeError(
                f"{name} is {list(shares)}; give each of the {chunks} model chunks "
                f"(pipeline stages × virtual stages) its part of {whose} seconds: 0 or more, "
                "and not all of them 0."
            )

    @property
    def replicas(self) -> int:
        """N, the number of model replicas."""
        return self.world_size // self.ranks_per_replica

    @property
    def tensor_ranks(self) -> int:
        """Tensor-parallel ranks of each stage of each replica."""
        return self.ranks_per_replica // self.pipeline_stages

    def replica_of(self, rank: int) -> int:
        """The replica that a rank belongs to."""
        if not 0 <= rank < self.world_size:
            raise WorldSizeError(
                f"rank {rank} is outside 0..{self.world_size - 1}; the world size is "
                f"{self.world_size}. Pass the rank that torchrun sets in RANK."
            )
        return rank // self.ranks_per_replica

    def stage_of(self, rank: int) -> int:
        """The pipeline stage that a rank computes, 0 .. pipeline_stages-1."""
        return (rank - self.replica_of(rank) * self.ranks_per_replica) // self.tensor_ranks

    def tensor_rank_of(self, rank: int) -> int:
        """A rank's place among the tensor-parallel peers of its stage."""
        return (rank - self.replica_of(rank) * self.ranks_per_replica) % self.tensor_ranks
