"""Who encodes what: every item of a plan on one replica, or pieces of it on several.

An item that would take one replica long, or keep more than a small part of what it may, is cut
where it may be (`pieces.py`, `nodes/slices.py`); pieces are joined where they met.
"""

from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dataservice.core.plan import StepPlan
from dataservice.core.plan_options import PlanOptions
from dataservice.core.topology import Topology
from dataservice.planning.encoder_memory.fit import within_rooms
from dataservice.planning.encoder_memory.room import EncoderRoom
from dataservice.planning.invariants import broken
from dataservice.planning.nodes.slices import Slices
from dataservice.planning.pieces import (
    Cut,
    by_row,
    cut_evenly,
    cut_items,
    join_items,
    join_pieces,
    long_items,
)
from dataservice.planning.stages.dispatch import (
    MODALITIES,
    EncoderItems,
    EncoderLoads,
    cut_encoder_items,
    dispatch_items,
    encoder_loads,
    encoding_bounds,
    slice_items,
    slowest_s,
)
from dataservice.planning.validate import check_items

# Of what no pieces beat, within which they are not compared with whole items.
NEAR = 1.02
_TRIES = 3  # sliced, in even pieces, in single units


def place_items(
    grouped: StepPlan,
    items: EncoderItems,
    bound_s: NDArray[np.float64] | None,
    topology: Topology,
    options: PlanOptions,
    *,
    near: NDArray[np.int32] | None = None,
) -> tuple[StepPlan, EncoderLoads]:
    """The plan with each of its `items` on the replica that encodes it, and what it then encodes:
    pieces of the long ones in each wave that ends sooner by it. Where memory counts encoders, every
    replica has room for what it is given. Baselines leave items whole where there is room, as
    trainers do. `bound_s` float64[phases] are the items' `encoding_bounds`, None where they stay at
    home; `near` int32[m], where it is given, has a replica for each item, which stays whole where
    there is room."""
    room = EncoderRoom.of(options.memory, topology)
    pieces, unit_bytes = np.ones(items.units.size, np.int64), None
    if room is not None:
        unit_bytes = room.unit_bytes(grouped.item_modality, items.encoder_tokens, items.units)
        pieces = room.pieces(unit_bytes, items.units)
    sliced = None
    if bound_s is not None and near is None:
        rooms = None if room is None else room.rooms(grouped)
        sliced = _sliced(grouped, items, pieces, bound_s, unit_bytes, rooms, topology, options)
    for _ in range(_TRIES):
        stays = np.ones(pieces.size, np.bool_) if sliced is None else ~sliced.taken[items.phase]
        cut, rows = _in_pieces(grouped, items, stays, pieces, options)
        replica = _dispatched(rows, bound_s, topology, options) if near is None else near[cut.row]
        if sliced is not None:
            sliced = sliced.decided(rows, replica, grouped.replicas)
            cut, replica = sliced.beside(cut, rows, replica, items)
        whole = cut.row.size == pieces.size
        plan = grouped if whole else cut_items(grouped, cut)
        full = np.zeros(plan.waves, np.bool_)
        if room is not None:
            replica, full = within_rooms(plan, replica, room, topology.replicas_per_node)
        if not full.any():
            check_items(plan, replica, room)
            plan = replace(plan, item_replica=replica)
            joined = plan if room is None else join_items(plan)
            if whole:
                return joined, items
            pack = items.pack[cut.row] if joined is plan else None
            return joined, encoder_loads(joined, options.cost, pack)
        # A wave has room for even pieces or, however they come, for single units (`WaveRoom`).
        full_phases = np.repeat(full, MODALITIES)
        pieces = np.where(full_phases[items.phase] & stays, items.units, pieces)
        sliced = None if sliced is None else sliced.without(full_phases)
    raise broken("a wave has items that its replicas have no room for")


class _Sliced(NamedTuple):
    """Phases whose items are sliced: `slices` by item and then by first unit, the phases of which
    they are `taken` bool[phases], and those that are compared with whole items yet, `unsure`."""

    slices: Slices
    taken: NDArray[np.bool_]
    unsure: NDArray[np.bool_]

    def decided(self, rows: EncoderItems, replica: NDArray[np.int32], replicas: int) -> "_Sliced":
        """With unsure phases taken where they end sooner than these `rows` on their replicas."""
        if not self.unsure.any():
            return self
        faster = self.slices.slowest_s < slowest_s(rows, replica, replicas)
        taken = self.taken | (self.unsure & faster)
        return self._replace(taken=taken, unsure=np.zeros_like(taken))

    def beside(
        self, cut: Cut, rows: EncoderItems, replica: NDArray[np.int32], items: EncoderItems
    ) -> tuple[Cut, NDArray[np.int32]]:
        """What is taken, and of the `rows` of `cut` on their replicas those of other phases."""
        chosen = self.taken[items.phase[self.slices.cut.row]]
        mine, rank = self.slices.cut.take(chosen), self.slices.rank[chosen]
        stays = ~self.taken[rows.phase]
        if not stays.any():
            return mine, rank
        if not chosen.any():
            return cut, replica
        together = mine.beside(cut.take(stays))
        return by_row(together, np.append(rank, replica[stays]), items.phase.size)

    def without(self, phases: NDArray[np.bool_]) -> "_Sliced":
        """With none of these phases taken."""
        return self._replace(taken=self.taken & ~phases)


def _sliced(
    grouped: StepPlan,
    items: EncoderItems,
    pieces: NDArray[np.int64],
    bound_s: NDArray[np.float64],
    unit_bytes: NDArray[np.int64] | None,
    rooms: NDArray[np.int64] | None,
    topology: Topology,
    options: PlanOptions,
) -> _Sliced | None:
    """Phases with an item that takes long, or is to be in several `pieces`; None where there are
    none."""
    large = np.zeros(items.phases, np.bool_)
    large[items.phase[pieces > 1]] = True
    long = long_items(items.phase, items.seconds, items.units, large, grouped.replicas)
    of_long = long.phases[items.phase]
    if not of_long.any():
        return None
    shares, rows = _in_pieces(grouped, items, of_long, long.pieces, options)  # near their own text
    slices = slice_items(
        rows,
        bound_s,
        replicas=topology.replicas,
        replicas_per_node=topology.replicas_per_node,
        unit_bytes=None if unit_bytes is None else unit_bytes[shares.row],
        rooms=rooms,
    )
    cut, rank = by_row(slices.cut, slices.rank, shares.row.size)
    cut, rank = join_pieces(shares.again(cut), rank)
    taken = long.phases & (slices.slowest_s < np.where(large, np.inf, bound_s * NEAR))
    if taken.sum() < long.phases.sum():  # pieces may take so little that whole ones lose
        whole_s = encoding_bounds(items.take(of_long), grouped.replicas, whole=True)
        taken |= long.phases & (slices.slowest_s < whole_s)
    return _Sliced(Slices(cut, rank, slices.slowest_s), taken, long.phases & ~taken)


def _in_pieces(
    grouped: StepPlan,
    items: EncoderItems,
    chosen: NDArray[np.bool_],
    pieces: NDArray[np.int64],
    options: PlanOptions,
) -> tuple[Cut, EncoderItems]:
    """Some of the items, each in so many even `pieces` int64[m]."""
    at = np.flatnonzero(chosen)
    if pieces[at].max(initial=1) == 1:
        return Cut(at, np.zeros(at.size, np.int32), items.units[at]), items.take(chosen)
    even = cut_evenly(items.units[at], pieces[at])
    cut = even._replace(row=at[even.row])
    return cut, cut_encoder_items(items, cut, cut_items(grouped, cut), options.cost)


def _dispatched(
    items: EncoderItems,
    bound_s: NDArray[np.float64] | None,
    topology: Topology,
    options: PlanOptions,
) -> NDArray[np.int32]:
    return dispatch_items(
        items,
        bound_s,
        replicas=topology.replicas,
        replicas_per_node=topology.replicas_per_node,
        algorithm=options.stages.dispatch,
    )
