"""Encoder items over replicas: each wave's items of one modality are balanced on their own.

Where an item's text goes does not bind it (OrchMLLM §6): the features travel in one exchange.
With nodes known, items stay in their node as far as balance allows.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

from dataservice.core.plan import StageReport, StepPlan
from dataservice.core.plan_options import CostModel, Dispatch, algorithm_named
from dataservice.core.sample import Modality
from dataservice.planning.kernels.compile import kernel, leaf
from dataservice.planning.nodes.phases import (
    name_parts,
    phase_bounds,
    phase_loads,
    spread_phases,
)
from dataservice.planning.nodes.slices import Slices, slice_phases
from dataservice.planning.pieces import Cut, unit_counts
from dataservice.planning.routes import item_homes, item_packs

# What a node may have above the mean. A balance this close is worth more than what it would cost
# the network to come closer.
TOLERANCE = 2e-3
# Where nodes are not known, as if of so many: a search among all replicas would take too long.
ISLAND_REPLICAS = 8
MODALITIES = len(Modality)


@dataclass(frozen=True, kw_only=True, slots=True)
class EncoderLoads:
    """What a step encodes: its items, or pieces of them, by phase, arrays [m].

    A phase is one modality in one wave: `phase` int64, wave · modalities + modality; `seconds`
    float64 what encoding an item takes. `batch_s` float64[modalities] comes on top in every phase
    that has items.
    """

    phases: int
    phase: NDArray[np.int64]
    seconds: NDArray[np.float64]
    batch_s: NDArray[np.float64]

    def mean_s(self, replicas: int) -> NDArray[np.float64]:
        """What a replica encodes of each modality in the mean: float64[modalities]."""
        of_phase = np.bincount(self.phase, self.seconds, self.phases)
        mean_s: NDArray[np.float64] = of_phase.reshape(-1, MODALITIES).sum(axis=0) / replicas
        return mean_s


@dataclass(frozen=True, kw_only=True, slots=True)
class EncoderItems(EncoderLoads):
    """Items that are to be given to replicas: `pack` int32 holds an item's text, `home` int32 is
    where its first token is needed, and `unit_seconds` float64 what one of its `units` int32 takes
    alone."""

    pack: NDArray[np.int32]
    home: NDArray[np.int32]
    encoder_tokens: NDArray[np.int32]
    llm_tokens: NDArray[np.int32]
    units: NDArray[np.int32]
    unit_seconds: NDArray[np.float64]

    def take(self, chosen: NDArray[np.bool_]) -> "EncoderItems":
        """The same columns for the items chosen."""
        if chosen.all():
            return self
        places = np.flatnonzero(chosen)
        own = (field.name for field in fields(self) if field.name not in ("phases", "batch_s"))
        return replace(self, **{name: getattr(self, name)[places] for name in own})


def encoder_loads(
    plan: StepPlan, cost: CostModel, pack: NDArray[np.int32] | None = None
) -> EncoderLoads:
    """What a plan whose packs are placed encodes; `pack` int32[m] where that of each item is known
    already. O(n + m)."""
    pack = item_packs(plan) if pack is None else pack
    phase, seconds, _ = _phases_and_seconds(plan, pack, unit_counts(plan), cost)
    return EncoderLoads(
        phases=plan.waves * MODALITIES, phase=phase, seconds=seconds, batch_s=_batch_s(cost)
    )


def encoder_items(plan: StepPlan, cost: CostModel) -> EncoderItems:
    """Every item of a plan whose packs are placed, as it is dispatched. O(n + m)."""
    pack = item_packs(plan)
    return _encoder_items(plan, cost, pack, item_homes(plan, pack))


def cut_encoder_items(
    items: EncoderItems, cut: Cut, plan: StepPlan, cost: CostModel
) -> EncoderItems:
    """The items of a `plan` in which those of another one, `items`, are in such pieces. O(k)."""
    pack, home = items.pack[cut.row], items.home[cut.row]
    inside = np.flatnonzero(cut.first)  # the others begin where their items do
    home[inside] = item_homes(plan, pack, inside)
    return _encoder_items(plan, cost, pack, home)


def _encoder_items(
    plan: StepPlan, cost: CostModel, pack: NDArray[np.int32], home: NDArray[np.int32]
) -> EncoderItems:
    units = unit_counts(plan)
    phase, seconds, unit_seconds = _phases_and_seconds(plan, pack, units, cost)
    return EncoderItems(
        phases=plan.waves * MODALITIES,
        phase=phase,
        seconds=seconds,
        batch_s=_batch_s(cost),
        pack=pack,
        home=home,
        encoder_tokens=plan.item_encoder_tokens,
        llm_tokens=plan.item_llm_tokens,
        units=units,
        unit_seconds=unit_seconds,
    )


def _batch_s(cost: CostModel) -> NDArray[np.float64]:
    return np.array([cost.vision.batch_s, cost.audio.batch_s])  # in the order of Modality


def _phases_and_seconds(
    plan: StepPlan, pack: NDArray[np.int32], units: NDArray[np.int32], cost: CostModel
) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.float64]]:
    return _phase_and_seconds(
        plan.pack_wave,
        pack,
        plan.item_modality,
        plan.item_encoder_tokens,
        units,
        np.array([cost.vision.coefficients, cost.audio.coefficients]),
    )


def dispatch_items(
    items: EncoderItems,
    bound_s: NDArray[np.float64] | None,
    *,
    replicas: int,
    replicas_per_node: int | None,
    algorithm: Dispatch,
) -> NDArray[np.int32]:
    """The replica that encodes each item: int32[m]. `bound_s` float64[phases] are the items'
    `encoding_bounds`, where they are known. Raises PlanningError on an unknown algorithm.
    O(m log N)."""
    dispatch = algorithm_named(DISPATCHES, algorithm, "plan.dispatch")
    return dispatch(items, bound_s, replicas, replicas_per_node)


def _home(
    items: EncoderItems,
    bound_s: NDArray[np.float64] | None,
    replicas: int,
    replicas_per_node: int | None,
) -> NDArray[np.int32]:
    return items.home


def _balanced(
    items: EncoderItems,
    bound_s: NDArray[np.float64] | None,
    replicas: int,
    replicas_per_node: int | None,
) -> NDArray[np.int32]:
    if len(items.home) == 0:
        return items.home
    if bound_s is None or items.units.max() > 1:  # they are whole here
        bound_s = encoding_bounds(items, replicas, whole=True)
    spread = spread_phases(
        items.phase,
        items.seconds,
        items.encoder_tokens,
        items.home,
        items.llm_tokens,
        bounds=bound_s,
        ranks=replicas,
        ranks_per_node=min(replicas_per_node or ISLAND_REPLICAS, replicas),
        tolerance=TOLERANCE,
    )
    if replicas_per_node is None or replicas_per_node >= replicas:
        return name_parts(spread, items.home, items.phase, items.phases, replicas)
    return spread


def slice_items(
    items: EncoderItems,
    bound_s: NDArray[np.float64],
    *,
    replicas: int,
    replicas_per_node: int | None,
    unit_bytes: NDArray[np.int64] | None,
    rooms: NDArray[np.int64] | None,
) -> Slices:
    """The items in pieces, and the replica of each piece: as `dispatch_items` where long ones may
    be cut; `bound_s` float64[phases] as `encoding_bounds`, bytes as in `slice_phases`, None where
    there is room for all. O(m log m)."""
    slices = slice_phases(
        items.phase,
        items.seconds,
        items.unit_seconds,
        items.encoder_tokens,
        items.units,
        items.home,
        bounds=bound_s,
        ranks=replicas,
        ranks_per_node=min(replicas_per_node or ISLAND_REPLICAS, replicas),
        unit_bytes=unit_bytes,
        rooms=rooms,
    )
    if rooms is not None or (replicas_per_node is not None and replicas_per_node < replicas):
        return slices  # another rank has other room
    row = slices.cut.row
    named = name_parts(slices.rank, items.home[row], items.phase[row], items.phases, replicas)
    return slices._replace(rank=named)


DISPATCHES: dict[
    Dispatch,
    Callable[[EncoderItems, NDArray[np.float64] | None, int, int | None], NDArray[np.int32]],
] = {
    "balanced": _balanced,
    "home": _home,
}


def slowest_s(
    items: EncoderLoads, replica_of: NDArray[np.int32], replicas: int
) -> NDArray[np.float64]:
    """Seconds of the slowest replica in each phase, without the batch's own: float64[phases]."""
    loads = phase_loads(items.phase, items.seconds, replica_of, items.phases, replicas)
    slowest: NDArray[np.float64] = loads.max(axis=1)
    return slowest


def encoding_bounds(
    items: EncoderItems, replicas: int, *, whole: bool = False
) -> NDArray[np.float64]:
    """What the slowest replica of each phase takes at least, without the batch's own:
    float64[phases]; items are cut, or stay `whole`."""
    return phase_bounds(
        items.phase,
        items.seconds,
        items.encoder_tokens,
        np.ones_like(items.units) if whole else items.units,
        items.seconds if whole else items.unit_seconds,
        items.phases,
        replicas,
    )


def dispatch_reports(
    items: EncoderItems,
    encoded_s: NDArray[np.float64],
    bound: NDArray[np.float64],
    replicas: int,
    algorithm: Dispatch,
) -> tuple[StageReport, ...]:
    """For each modality: Σ over waves of the slowest replica's encoding, before (whole items at
    home) and after, `encoded_s` float64[modalities]; `bound` float64[phases] is that of
    `encoding_bounds`. What a batch takes by itself is in all three: replicas without items encode a
    small one."""
    before = slowest_s(items, items.home, replicas)
    used = np.bincount(items.phase, minlength=items.phases) > 0
    batches_s = [float(used[m::MODALITIES].sum() * items.batch_s[m]) for m in Modality]
    return tuple(
        StageReport(
            stage=f"dispatch {modality.name.lower()}",
            algorithm=algorithm,
            unit="s",
            before=float(before[modality::MODALITIES].sum()) + batches_s[modality],
            after=float(encoded_s[modality]),
            lower_bound=float(bound[modality::MODALITIES].sum()) + batches_s[modality],
        )
        for modality in Modality
    )


@kernel
def _phase_and_seconds(
    pack_wave: NDArray[np.int32],
    pack: NDArray[np.int32],
    modality: NDArray[np.int8],
    tokens: NDArray[np.int32],
    units: NDArray[np.int32],
    coefficients: NDArray[np.float64],
) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.float64]]:
    phase = np.empty(pack.size, np.int64)
    seconds = np.empty(pack.size, np.float64)
    unit_seconds = np.empty(pack.size, np.float64)
    for item in range(pack.size):
        encoder = modality[item]
        phase[item] = pack_wave[pack[item]] * coefficients.shape[0] + encoder
        of_units, fixed = units_seconds(tokens[item], units[item], coefficients[encoder])
        seconds[item] = of_units * units[item] + fixed
        unit_seconds[item] = of_units + fixed
    return phase, seconds, unit_seconds


@leaf
def units_seconds(
    tokens: int, units: int, coefficients: NDArray[np.float64]
) -> tuple[float, float]:
    """Seconds of each of the units that an item has, and of the item beside them, whatever it
    holds; `PhaseCost.item_seconds` has the same formula for arrays."""
    size = tokens / units
    return coefficients[0] * size + coefficients[1] * size * size, coefficients[2]
