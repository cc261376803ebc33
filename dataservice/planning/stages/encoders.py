"""Who encodes what: every item of a plan on one replica, or pieces of it on several.

An item that would take one replica long, or keep more than a small part of what it may, is cut
where it may be (`pieces.py`, `nodes/slices.py`); pieces are joined where they met.
"""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from dataservice.core.plan import StepPlan
from dataservice.core.plan_options import PlanOptions
from dataservice.core.topology import Topology
from dataservice.planning.encoder_memory.fit import within_rooms
from dataservice.planning.encoder_memory.room import EncoderRoom
from dataservice.planning.invariants import broken
from dataservice.planning.pieces import (
    by_row,
    cut_evenly,
    cut_items,
    join_items,
    join_pieces,
    long_items,
)
from dataservice.planning.stages.dispatch import (
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


def place_items(
    grouped: StepPlan,
    items: EncoderItems,
    bound_s: NDArray[np.float64],
    topology: Topology,
    options: PlanOptions,
) -> tuple[StepPlan, EncoderLoads]:
    """The plan with each of its `items` on the replica that encodes it, and what it then encodes:
    pieces of the long ones in each wave that ends sooner by it. Where memory counts encoders, every
    replica has room for what it is given. Baselines leave items whole where there is room, as
    trainers do. `bound_s` float64[phases] are the items' `encoding_bounds`."""
    room = EncoderRoom.of(options.memory, topology)
    base, base_items = grouped, items
    if room is not None and grouped.item_units is not None:
        units = grouped.item_units
        pieces = room.pieces(grouped.item_modality, grouped.item_encoder_tokens, units)
        if pieces.max(initial=1) > 1:
            even = cut_evenly(units, pieces)
            base = cut_items(grouped, even)
            base_items = cut_encoder_items(items, even, base, options.cost)
    known_s = bound_s if base is grouped else None
    sliced = None
    if options.stages.dispatch != "home":
        sliced = _sliced(base, base_items, known_s, topology, options, room)
    return sliced or _whole(base, base_items, known_s, topology, options, room)


def _whole(
    base: StepPlan,
    items: EncoderItems,
    bound_s: NDArray[np.float64] | None,
    topology: Topology,
    options: PlanOptions,
    room: EncoderRoom | None,
) -> tuple[StepPlan, EncoderLoads]:
    """Every row on one replica."""
    found = _kept(base, _dispatched(items, bound_s, topology, options), topology, room)
    if found is None:
        raise broken("a wave has items that its replicas have no room for")
    joined = join_items(found)
    return joined, items if joined is found else encoder_loads(joined, options.cost)


def _sliced(
    base: StepPlan,
    items: EncoderItems,
    bound_s: NDArray[np.float64] | None,
    topology: Topology,
    options: PlanOptions,
    room: EncoderRoom | None,
) -> tuple[StepPlan, EncoderLoads] | None:
    """Long rows in pieces, in each phase that ends sooner by it, and the others whole; None where
    none is long, or pieces have no room."""
    long = long_items(items.phase, items.seconds, items.units, items.phases, base.replicas)
    of_long = long.phases[items.phase]
    if not of_long.any():
        return None
    if bound_s is None:
        bound_s = encoding_bounds(items, base.replicas)
    rows = np.flatnonzero(of_long)
    shares = cut_evenly(items.units[rows], long.pieces[rows])  # each of them near its own text
    shares = shares._replace(row=rows[shares.row])
    slices = slice_items(
        cut_encoder_items(items, shares, cut_items(base, shares), options.cost),
        bound_s,
        replicas=topology.replicas,
        replicas_per_node=topology.replicas_per_node,
    )
    cut, replica = by_row(slices.cut, slices.rank, shares.row.size)
    cut = shares.again(cut)
    sliced = slices.slowest_s <= bound_s * NEAR
    if not sliced.all():  # pieces take so little that whole items would take more
        whole_s = encoding_bounds(items.take(of_long), base.replicas, whole=True)
        sliced |= slices.slowest_s < whole_s
    sliced &= long.phases
    stay = ~sliced[items.phase]
    plan = base
    if stay.any():
        whole = items.take(stay)
        whole_replica = _dispatched(whole, bound_s, topology, options)
        if sliced.sum() < long.phases.sum():
            whole_s = slowest_s(whole, whole_replica, base.replicas)
            sliced |= long.phases & (slices.slowest_s < whole_s)
        if sliced.any():
            chosen, left = sliced[items.phase[cut.row]], ~sliced[whole.phase]
            cut = cut.take(chosen).beside(np.flatnonzero(stay)[left], items.units)
            replica = np.append(replica[chosen], whole_replica[left])
            cut, replica = by_row(cut, replica, items.phase.size)
        else:
            replica = whole_replica
    if sliced.any():
        cut, replica = join_pieces(cut, replica)
        plan = cut_items(base, cut)
    found = _kept(plan, replica, topology, room)
    if found is None:
        return None
    joined = found if room is None else join_items(found)
    if joined is found and plan is base:
        return joined, items
    pack = items.pack[cut.row] if joined is found else None
    return joined, encoder_loads(joined, options.cost, pack)


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


def _kept(
    plan: StepPlan,
    item_replica: NDArray[np.int32],
    topology: Topology,
    room: EncoderRoom | None,
) -> StepPlan | None:
    """The plan with its rows there, or where they keep `room`; None where no way is found."""
    if room is not None:
        kept = within_rooms(plan, item_replica, room, topology.replicas_per_node)
        if kept is None:
            return None
        item_replica = kept
    check_items(plan, item_replica, room)
    return replace(plan, item_replica=item_replica)
