"""One way of laying a model over the GPUs, and its price: a topology, a cost model and a memory
model, which is all that the evaluator of steps knows of a model.

    profile of layers ─┬─ split into chunks ─┬─► Topology     shares of the chunks, replicas
                       ├─ recomputation ─────┼─► CostModel    seconds of encoders, decoder, ring
                       └─ states, kept bytes ┴─► MemoryModel  of the stage that has least room
"""

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from dataservice.core.cost import ContextCost, PhaseCost, StepCost
from dataservice.core.memory import MemoryModel
from dataservice.core.plan_options import CostModel
from dataservice.core.topology import Topology
from dataservice.planning.layout.bubbles import BubbleSchedule
from dataservice.planning.layout.cluster import NodeGroup
from dataservice.planning.layout.gradients import shown_gradients_s, whole_gradients_s
from dataservice.planning.layout.profile import RECOMPUTE, Floats, LayerProfile, Recompute
from dataservice.planning.layout.recompute import RecomputeChoice

Place = Literal["first", "own", "cut", "spread", "bubbles"]
PLACES: tuple[Place, ...] = get_args(Place)
DECODER = "decoder"
# Keys and values forward; again, with their gradients, backward (FlexSP's 1.5 MB of a token).
_RING_PASSES = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Parallel:
    """How many ranks share a replica, and as what. `encoder_stage`: where encoders run: as
    ReplicaLayout has it, or in the bubbles of the decoder's stages."""

    tensor_ranks: int
    pipeline_stages: int
    virtual_stages: int
    replicas: int
    encoder_stage: Place = "first"

    @property
    def ranks_per_replica(self) -> int:
        """GPUs of one replica."""
        return self.tensor_ranks * self.pipeline_stages

    @property
    def chunks(self) -> int:
        """Model chunks of the pipeline."""
        return self.pipeline_stages * self.virtual_stages

    def kept_microbatches(self, stage: int) -> float:
        """Microbatches that a stage keeps at once, as ReplicaLayout has them of the first."""
        after, v = self.pipeline_stages - 1 - stage, self.virtual_stages
        if v == 1 or self.pipeline_stages == 1:
            return after + 1.0
        return (2 * after + (v - 1) * self.pipeline_stages + 1) / v

    def replicas_per_node(self, group: NodeGroup) -> int:
        """Replicas that lie in one node; 1 where one fills a node or more."""
        return max(1, group.gpus_per_node // self.ranks_per_replica)

    def link_bytes_per_s(self, group: NodeGroup, replicas: int) -> float:
        """Bytes a second between so many neighbouring replicas."""
        inside = replicas <= self.replicas_per_node(group)
        return group.inside_bytes_per_s if inside else group.between_bytes_per_s


@dataclass(frozen=True, kw_only=True, slots=True)
class InBubbles:
    """Encoders in the bubbles of a replica's backbone: their schedule for `microbatches` equal
    ones, and their layers by name, in the numbers of its actions. `recompute`: what all encoder
    layers do. `gradient_bytes` of a GPU's weights and gradients of encoders, summed over
    `gradient_ranks`."""

    schedule: BubbleSchedule
    microbatches: int
    layers: dict[str, tuple[str, ...]]
    recompute: Recompute
    gradient_bytes: float
    gradient_ranks: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Replica:
    """A model cut and placed. `bounds` int64[chunks + 1] over the profile's entries; with encoders
    spread over all stages, or in their bubbles, the first entries are theirs and belong to no
    chunk. `encoding_shown`: the part of the encoders' seconds that a step is longer by. `last_pass`
    float64[2, entries]: forward and backward seconds of a mean microbatch, under which gradients
    and weights travel; None where they wait for the step's end."""

    parallel: Parallel
    profile: LayerProfile
    bounds: NDArray[np.int64]
    recompute: RecomputeChoice
    ring_token_bytes: float
    row_bytes: float
    encoder_fixed_bytes: float = 0.0
    encoding_shown: float = 1.0
    in_bubbles: InBubbles | None = None
    last_pass: Floats | None = None

    @property
    def outside(self) -> bool:
        """Whether encoders are on all stages, and in no chunk."""
        return self.parallel.encoder_stage in ("spread", "bubbles")

    def topology(self, group: NodeGroup) -> Topology:
        """Replicas of this shape. They meet once a step: ZeRO-1 shards optimizer states alone."""
        parallel = self.parallel
        return Topology(
            world_size=parallel.ranks_per_replica * parallel.replicas,
            ranks_per_replica=parallel.ranks_per_replica,
            pipeline_stages=parallel.pipeline_stages,
            virtual_stages=parallel.virtual_stages,
            replicas_per_node=parallel.replicas_per_node(group),
            replicas_meet="step",
            encoder_stage=(
                "spread" if parallel.encoder_stage == "bubbles" else parallel.encoder_stage
            ),
            encoders_train=bool((self.profile.trains & ~self._decoding).any()),
            stage_shares=self.chunk_shares,
            vision_shares=self.encoder_shares("vision"),
            audio_shares=self.encoder_shares("audio"),
        )

    @property
    def chunk_shares(self) -> tuple[float, ...]:
        """The part of the decoder's seconds that each chunk takes, by tokens."""
        return self._shares(self._decoding)

    def encoder_shares(self, module: str) -> tuple[float, ...]:
        """The same of an encoder's seconds, where encoders are cut; else empty."""
        mine = self.profile.entries_of(module)
        if self.parallel.encoder_stage != "cut" or not mine.any():
            return ()
        return self._shares(mine)

    @property
    def is_cut(self) -> bool:
        """Whether encoders lie in several chunks."""
        last = int(np.flatnonzero(~self._decoding).max(initial=-1))
        return bool(last >= self.bounds[1])

    @property
    def seconds_a_token(self) -> Floats:
        """Both passes of a token, and what is made again between them: float64[entries]."""
        return self._both_passes("token_s")

    def _shares(self, entries: NDArray[np.bool_]) -> tuple[float, ...]:
        token_s = np.where(entries, self.seconds_a_token, 0.0)
        by_chunk = np.add.reduceat(token_s, self.bounds[:-1])
        return tuple((by_chunk / by_chunk.sum()).tolist())

    def cost(self, group: NodeGroup) -> CostModel:
        """Seconds of one replica's ranks, its recomputation among them."""
        parallel, decodes, shown = self.parallel, self._decoding, self.encoding_shown
        token, square, constant = (
            self._both_passes(of) for of in ("token_s", "square_s", "constant_s")
        )
        ring_intra_s, ring_inter_s = ring_seconds(parallel, group, self.ring_token_bytes)
        row_intra_s, row_inter_s = row_seconds(parallel, group, self.row_bytes)
        phases = {}
        for name in ("vision", "audio"):
            mine = self.profile.entries_of(name)
            phases[name] = PhaseCost(
                linear_s_per_token=float(token[mine].sum()) * shown,
                quadratic_s_per_token2=float(square[mine].sum()) * shown,
                batch_s=float(constant[mine].sum()) * shown,
            )
        return CostModel(
            llm=ContextCost(
                linear_s_per_token=float(token[decodes].sum()),
                attention_s_per_token2=float(square[decodes].sum()),
                group_s=float(constant[decodes].sum()),
                ring_intra_s_per_token=ring_intra_s,
                ring_inter_s_per_token=ring_inter_s,
            ),
            vision=phases["vision"],
            audio=phases["audio"],
            step=StepCost(
                feature_intra_s_per_token=row_intra_s,
                feature_inter_s_per_token=row_inter_s,
                gradient_s=self._gradient_s(group),
            ),
        )

    def memory(self, group: NodeGroup) -> MemoryModel:
        """Bytes of the stage with the least room for tokens; where stages hold encoders, of those
        with so much less room for a token that what fits there fits on every stage."""
        kept = self._kept_token_bytes()
        budget = group.device.memory_bytes
        rows = []
        for device, states in enumerate(self.states_bytes().tolist()):
            mine = self._entries_of(device)
            held = self.parallel.kept_microbatches(device) / self.parallel.kept_microbatches(0)
            token = max(float(kept[mine & self._decoding].sum()) * held, 1.0)
            encodes = bool((mine & ~self._decoding).any())
            rows.append(((budget - states) / token, states, token, encodes))
        tokens, states, token, _ = min(rows)
        encoding = [states for _, states, _, encodes in rows if encodes]
        if encoding and tokens > 0:
            states = max(encoding)
            token = (budget - states) / tokens
        # Those outside of the chunks were counted beforehand, with the states.
        vision, audio = (
            0.0 if self.outside else self._kept_by(kept, name) for name in ("vision", "audio")
        )
        return MemoryModel(
            budget_bytes=budget,
            llm_token_bytes=token,
            states_bytes=states,
            vision_token_bytes=vision,
            audio_token_bytes=audio,
        )

    def held_tokens(self, group: NodeGroup, tokens: int) -> int:
        """Tokens of a microbatch: as many as were asked for, where every stage has room for
        them."""
        return min(tokens, self.memory(group).tokens(self.topology(group)))

    def states_bytes(self) -> Floats:
        """Weights, gradients and optimizer states of a rank of each stage, and with encoders spread
        over all stages all of theirs: float64[stages]."""
        return states_of(self.profile, self.bounds, self.parallel) + self.encoder_fixed_bytes

    @property
    def _decoding(self) -> NDArray[np.bool_]:
        return decoding(self.profile)

    def _both_passes(self, of: str) -> Floats:
        return self.profile.both_passes(of, self.recompute.choice)

    def _kept_token_bytes(self) -> Floats:
        kept = [self.profile.kept_token_bytes[kind] for kind in RECOMPUTE]
        chosen: Floats = np.choose(self.recompute.choice, kept)
        return chosen

    def _kept_by(self, kept: Floats, module: str) -> float:
        return float(kept[self.profile.entries_of(module)].sum())

    def _entries_of(self, device: int) -> NDArray[np.bool_]:
        mine: NDArray[np.bool_] = device_of(self.profile, self.bounds, self.parallel) == device
        return mine

    def _gradient_s(self, group: NodeGroup) -> float:
        """ZeRO-1: gradients reduced and scattered, weights gathered; what the step is longer by."""
        replicas, profile = self.parallel.replicas, self.profile
        link = self.parallel.link_bytes_per_s(group, replicas)
        device = device_of(profile, self.bounds, self.parallel)
        if self.parallel.encoder_stage == "bubbles":
            outside_s = self._bubbles_gradient_s(group)
        else:
            outside = profile.state_bytes[profile.trains & (device < 0)].sum()
            outside_s = whole_gradients_s(outside, replicas, link)
        both_s = whole_gradients_s(profile.trained_bytes, replicas, link)
        stages, first = self.parallel.pipeline_stages, int(self.bounds[0])
        if self.last_pass is None:
            of_stage = np.bincount(device[first:], both_s[first:], minlength=stages)
            return float(outside_s + of_stage.max())
        scatter_s = whole_gradients_s(profile.gradient_bytes * profile.trains, replicas, link)
        return float(outside_s) + shown_gradients_s(
            scatter_s[first:],
            (both_s - scatter_s)[first:],
            self.last_pass[:, first:],
            bounds=self.bounds - first,
            stages=stages,
        )

    def _bubbles_gradient_s(self, group: NodeGroup) -> Floats:
        if self.in_bubbles is None:  # not scheduled yet
            return np.zeros(())
        ranks = self.in_bubbles.gradient_ranks
        link = self.parallel.link_bytes_per_s(group, ranks)
        return whole_gradients_s(self.in_bubbles.gradient_bytes, ranks, link)


def ring_seconds(parallel: Parallel, group: NodeGroup, token_bytes: float) -> tuple[float, float]:
    """Seconds of a token in a ring of neighbouring replicas, and in one that crosses nodes, whose
    keys and values are `token_bytes`."""
    return _sent_s(parallel, group, token_bytes * _RING_PASSES)


def row_seconds(parallel: Parallel, group: NodeGroup, row_bytes: float) -> tuple[float, float]:
    """Seconds of a feature row to a replica of the same node and to one of another, and of its
    gradient back."""
    return _sent_s(parallel, group, 2.0 * row_bytes)


def _sent_s(parallel: Parallel, group: NodeGroup, sent_bytes: float) -> tuple[float, float]:
    near = parallel.link_bytes_per_s(group, 2)
    far = parallel.link_bytes_per_s(group, parallel.replicas)
    share = sent_bytes / parallel.tensor_ranks
    return share / near, share / min(near, far)


def decoding(profile: LayerProfile) -> NDArray[np.bool_]:
    """Which entries are the decoder's: bool[entries]."""
    return profile.entries_of(DECODER)


def device_of(
    profile: LayerProfile, bounds: NDArray[np.int64], parallel: Parallel
) -> NDArray[np.int64]:
    """The stage that runs each entry, int64[entries]; -1 for those that are on all of them."""
    entries = np.arange(len(profile.names))
    chunk = np.searchsorted(bounds, entries, side="right") - 1
    device: NDArray[np.int64] = np.where(chunk < 0, -1, chunk % parallel.pipeline_stages)
    return device


def states_of(profile: LayerProfile, bounds: NDArray[np.int64], parallel: Parallel) -> Floats:
    """Weights, gradients and optimizer states of the entries of each stage: float64[stages]."""
    each = profile.state_bytes + profile.optimizer_bytes / parallel.replicas
    device = device_of(profile, bounds, parallel)
    mine = device >= 0
    summed: Floats = np.bincount(
        device[mine], weights=each[mine], minlength=parallel.pipeline_stages
    ).astype(np.float64)
    return summed
