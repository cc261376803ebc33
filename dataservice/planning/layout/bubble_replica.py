"""Encoders of a replica in the bubbles of its backbone (Optimus), asked of `schedule_bubbles`.

    the decoder's chunks     ──► BackboneTimes ─┐
    profiles at every TP     ──► EncoderTimes  ─┼─► schedule_bubbles ─► encoding_shown, layers,
    a step's mean microbatch ──► KernelTimes   ─┘                       gradients

A bubble schedule takes microbatches to be equal: it is made for as many as the planned step has,
each of them its mean. What its step takes longer than the same backbone alone, so scheduled, is
what encoding costs. The step planner has encoders that are spread over all stages and take only
that part of their seconds: unequal microbatches and items are priced as for any other layout.

A layer is two kernels between its collectives: gathers and scatters take a quarter each of what its
ranks exchange, and the halves of its compute are taken to be equal. Without tensor parallelism it
is one kernel. What comes before an encoder's first layer belongs to it, a projector to the last.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from dataservice.core.errors import PlanningError
from dataservice.planning.layout.bubble_inputs import (
    BackboneTimes,
    EncoderPlan,
    EncoderTimes,
    KernelTimes,
    even_bounds,
)
from dataservice.planning.layout.bubbles import BubbleSchedule, schedule_bubbles
from dataservice.planning.layout.cluster import NodeGroup
from dataservice.planning.layout.gradients import whole_gradients_s
from dataservice.planning.layout.profile import (
    RECOMPUTE,
    Floats,
    LayerProfile,
    LayerWork,
    Recompute,
    joined,
)
from dataservice.planning.layout.replica import DECODER, InBubbles, Replica, decoding

# A schedule of more, of which each is a small part of the step, takes long and gains little.
MOST_MICROBATCHES = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class BubbleAsk:
    """The GPUs, and profiles of the whole model over every number of tensor-parallel ranks: as they
    are, and without the seconds of what ranks exchange."""

    group: NodeGroup
    profile: Callable[[int], LayerProfile]
    linkless: Callable[[int], LayerProfile]


def in_bubbles(replica: Replica, ask: BubbleAsk, mean: LayerWork, microbatches: int) -> Replica:
    """The replica with its encoders in bubbles, of a step of so many microbatches of `mean` work.
    Raises PlanningError where there are too many, and where encoders have no room."""
    if microbatches > MOST_MICROBATCHES:
        raise PlanningError(
            f"a replica has {microbatches} microbatches, and bubbles are filled for up to "
            f"{MOST_MICROBATCHES}: use larger ones"
        )
    backbone = backbone_times(replica, ask, mean, microbatches)

    def scheduled(recompute: Recompute) -> BubbleSchedule:
        encoders = encoder_times(replica, ask, mean, recompute)
        return schedule_bubbles(backbone, encoders, memory_bytes=ask.group.device.memory_bytes)

    recompute: Recompute = "none"
    try:
        made = scheduled(recompute)
    except PlanningError:  # no room for all that they keep
        recompute = "full"
        made = scheduled(recompute)
    gradient_bytes, ranks = _gradients(replica, ask, made.plan)
    choice = replica.recompute.choice.copy()
    choice[: int(replica.bounds[0])] = RECOMPUTE.index(recompute)
    chosen = replace(replica, recompute=replace(replica.recompute, choice=choice))
    return replace(
        chosen,
        encoding_shown=_shown(chosen, ask, mean, microbatches, made),
        in_bubbles=InBubbles(
            schedule=made,
            microbatches=microbatches,
            layers=_layers(replica.profile),
            recompute=recompute,
            gradient_bytes=gradient_bytes,
            gradient_ranks=ranks,
        ),
    )


@dataclass(frozen=True, slots=True)
class _Encoder:
    """The entries of one encoder in a profile: `mine` bool[entries], and their names."""

    name: str
    mine: NDArray[np.bool_]
    names: tuple[str, ...]

    def joined(self, values: Floats) -> Floats:
        """Sums of float64[..., entries] by layer: float64[..., layers]."""
        return joined(values[..., self.mine], self.names)


def _encoders_of(profile: LayerProfile) -> list[_Encoder]:
    """In the order in which they run."""
    found = []
    for module in dict.fromkeys(profile.modules):
        if module != DECODER:
            mine = profile.entries_of(module)
            names = tuple(name for name, ours in zip(profile.names, mine, strict=True) if ours)
            found.append(_Encoder(module, mine, names))
    return found


def _layers(profile: LayerProfile) -> dict[str, tuple[str, ...]]:
    """Names of layers as the actions count them: each encoder's, and the decoder's entries."""
    found = {
        each.name: tuple(name for name in each.names if name.rpartition(".")[2].isdigit())
        for each in _encoders_of(profile)
    }
    pairs = zip(profile.names, profile.modules, strict=True)
    return {**found, DECODER: tuple(name for name, module in pairs if module == DECODER)}


def backbone_times(
    replica: Replica, ask: BubbleAsk, mean: LayerWork, microbatches: int
) -> BackboneTimes:
    """The decoder's chunks, of so many microbatches of `mean` work: a row for each entry."""
    parallel, profile = replica.parallel, replica.profile
    first = int(replica.bounds[0])
    passes = _passes(ask, parallel.tensor_ranks, mean, replica.recompute.choice)
    trained_bytes = profile.trained_bytes
    link = parallel.link_bytes_per_s(ask.group, parallel.replicas)
    scatter_s, gather_s = (
        _fullest(replica, whole_gradients_s(each, parallel.replicas, link))
        for each in (profile.gradient_bytes, trained_bytes - profile.gradient_bytes)
    )
    return BackboneTimes(
        forward=passes[0].kernels(lambda seconds: seconds[first:]),
        backward=passes[1].kernels(lambda seconds: seconds[first:]),
        microbatches=microbatches,
        pipeline_parallel=parallel.pipeline_stages,
        virtual_stages=parallel.virtual_stages,
        tensor_parallel=parallel.tensor_ranks,
        gather_s=gather_s,
        scatter_s=scatter_s,
        held_bytes=np.maximum(replica.recompute.peak_bytes - replica.encoder_fixed_bytes, 0.0),
        bounds=replica.bounds - first,
    )


def _fullest(replica: Replica, seconds: Floats) -> float:
    """Of the stage whose layers take most: of `seconds` float64[entries]."""
    first, parallel = int(replica.bounds[0]), replica.parallel
    chunks = np.add.reduceat(seconds[first:], replica.bounds[:-1] - first)
    return float(chunks.reshape(-1, parallel.pipeline_stages).sum(axis=0).max())


def encoder_times(
    replica: Replica, ask: BubbleAsk, mean: LayerWork, recompute: Recompute
) -> list[EncoderTimes]:
    """Every encoder at every degree that divides the backbone's."""
    parallel, whole = replica.parallel, ask.profile(1)
    degrees = _powers(parallel.tensor_ranks)
    choice = np.full(len(whole.names), RECOMPUTE.index(recompute), np.int8)
    passes = {degree: _passes(ask, degree, mean, choice) for degree in degrees}
    handed = whole.handed_on_bytes(mean)[0]
    link = ask.group.link_bytes_per_s(parallel.ranks_per_replica)
    found = []
    states = whole.state_bytes + whole.optimizer_bytes / parallel.replicas
    for encoder in _encoders_of(whole):
        there, back = (
            {degree: both[way].kernels(encoder.joined) for degree, both in passes.items()}
            for way in (0, 1)
        )
        trains = any(times.seconds.any() for times in back.values())
        found.append(
            EncoderTimes(
                name=encoder.name,
                forward=there,
                backward=back if trains else None,
                layer_bytes=encoder.joined(states),
                activation_bytes=encoder.joined(whole.kept_bytes(mean, recompute)[0]),
                transfer_s=float(handed[encoder.mine].max()) / parallel.tensor_ranks / link,
            )
        )
    return found


def _powers(ranks: int) -> list[int]:
    """Powers of two up to `ranks`, which is one."""
    return [1 << k for k in range(ranks.bit_length())]


@dataclass(frozen=True, slots=True)
class _Pass:
    """One direction: seconds of compute and of what ranks exchange, float64[entries]."""

    compute_s: Floats
    links_s: Floats

    def kernels(self, of: Callable[[Floats], Floats]) -> KernelTimes:
        """One row for each layer that `of` makes of the entries."""
        compute, links = of(self.compute_s), of(self.links_s)
        if not self.links_s.any():
            return KernelTimes(seconds=compute[:, None], communicates=np.array([False]))
        row = [links / 4, compute / 2, links / 2, compute / 2, links / 4]
        kinds = np.array([True, False, True, False, True])
        return KernelTimes(seconds=np.stack(row, axis=1), communicates=kinds)


def _passes(
    ask: BubbleAsk, ranks: int, mean: LayerWork, choice: NDArray[np.int8]
) -> tuple[_Pass, _Pass]:
    """Forward and backward of every entry, recomputed as `choice` int8[entries] says."""
    both = [_both_s(profile, mean, choice) for profile in (ask.profile(ranks), ask.linkless(ranks))]
    (forward, backward), (bare_forward, bare_backward) = both
    return (
        _Pass(bare_forward, forward - bare_forward),
        _Pass(bare_backward, backward - bare_backward),
    )


def _both_s(
    profile: LayerProfile, mean: LayerWork, choice: NDArray[np.int8]
) -> tuple[Floats, Floats]:
    forward, backward = profile.seconds(mean)
    added = np.choose(choice, [profile.added_s(mean, kind)[0] for kind in RECOMPUTE])
    return forward[0], backward[0] + added


def _shown(
    replica: Replica, ask: BubbleAsk, mean: LayerWork, microbatches: int, made: BubbleSchedule
) -> float:
    """What encoding adds to the step, as a part of what it takes spread over all stages."""
    cost = replace(replica, encoding_shown=1.0).cost(ask.group)
    encoding_s = 0.0
    for name, phase in (("vision", cost.vision), ("audio", cost.audio)):
        if name in mean.tokens:
            encoding_s += (
                phase.linear_s_per_token * float(mean.tokens[name][0])
                + phase.quadratic_s_per_token2 * float(mean.squares[name][0])
                + phase.batch_s
            )
    spread_s = encoding_s * microbatches / replica.parallel.pipeline_stages
    return (made.before_s + made.after_s) / spread_s if spread_s > 0 else 0.0


def _gradients(replica: Replica, ask: BubbleAsk, plan: EncoderPlan) -> tuple[float, int]:
    """Weights and gradients of encoders on the GPU that has most of them, and the ranks over which
    they are summed."""
    profile = ask.profile(plan.tensor_parallel)
    hops = np.zeros(plan.pipeline_parallel)
    for encoder in _encoders_of(profile):
        layers = encoder.joined(profile.trained_bytes)
        hops += np.add.reduceat(layers, even_bounds(layers.size, plan.pipeline_parallel)[:-1])
    return float(hops.max()), replica.parallel.replicas * plan.pipelines


def least_encoder_bytes(
    profile: LayerProfile, work: LayerWork, *, stages: int, replicas: int
) -> float:
    """Room that encoders in bubbles need on a GPU at least, or nearly so: states over all stages,
    and what two microbatches keep, every layer recomputed."""
    encodes = ~decoding(profile)
    states = (profile.state_bytes + profile.optimizer_bytes / replicas)[encodes]
    kept = profile.kept_bytes(work, "full")[:, encodes].sum(axis=1).mean()
    share = max(float(states.sum()) / stages, float(states.max(initial=0.0)))
    return share + 2.0 * float(kept)
