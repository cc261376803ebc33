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
from dataservice.planning.pieces import Cut, cut_evenly, cut_items, join_items, long_items
from dataservice.planning.stages.dispatch import (
    MODALITIES,
    EncoderItems,
    dispatch_items,
    encoder_items,
    encoding_bounds,
    slice_items,
    slowest_s,
)
from dataservice.planning.validate import check_items

# Of what no pieces beat, within which they are not compared with whole items.
NEAR = 1.02


def place_items(
    grouped: StepPlan, items: EncoderItems, topology: Topology, options: PlanOptions
) -> tuple[StepPlan, EncoderItems]:
    """The plan with each of its `items` on the replica that encodes it, and what it then encodes:
    pieces of the long ones in each wave that ends sooner by it. Where memory counts encoders, every
    replica has room for what it is given. Baselines leave items whole where there is room, as
    trainers do."""
    room = EncoderRoom.of(options.memory, topology)
    base, base_items = grouped, items
    if room is not None and grouped.item_units is not None:
        units = grouped.item_units
        pieces = room.pieces(grouped.item_modality, grouped.item_encoder_tokens, units)
        if pieces.max(initial=1) > 1:
            base = cut_items(grouped, cut_evenly(units, pieces))
            base_items = encoder_items(base, options.cost)
    sliced = None
    if options.stages.dispatch != "home":
        sliced = _sliced(base, base_items, topology, options, room)
    return sliced or _whole(base, base_items, topology, options, room)


def _whole(
    base: StepPlan,
    items: EncoderItems,
    topology: Topology,
    options: PlanOptions,
    room: EncoderRoom | None,
) -> tuple[StepPlan, EncoderItems]:
    """Every row on one replica."""
    found = _kept(base, _dispatched(items, topology, options), topology, room)
    if found is None:
        raise broken("a wave has items that its replicas have no room for")
    joined = join_items(found)
    return joined, items if joined is found else encoder_items(joined, options.cost)


def _sliced(
    base: StepPlan,
    items: EncoderItems,
    topology: Topology,
    options: PlanOptions,
    room: EncoderRoom | None,
) -> tuple[StepPlan, EncoderItems] | None:
    """Long rows in pieces, in each wave that ends sooner by it, and the others whole; None where
    none is long, or pieces have no room."""
    long = long_items(items.phase, items.seconds, items.units, items.phases, base.replicas)
    if not long.phases.any():
        return None
    shares = cut_evenly(items.units, long.pieces)  # each of them near its own text
    cut, replica = _dispatch_slices(
        encoder_items(cut_items(base, shares), options.cost), long.phases, topology, options
    )
    cut = shares.again(cut)
    found = _kept(cut_items(base, cut), replica, topology, room)
    if found is None:
        return None
    joined = join_items(found)
    joined_items = encoder_items(joined, options.cost)
    seconds = _by_wave(slowest_s(joined_items, joined.item_replica, base.replicas))
    uncut = ~long.phases.reshape(-1, MODALITIES).any(axis=1)
    sooner = seconds < _by_wave(encoding_bounds(items, base.replicas, whole=True))
    near = seconds <= _by_wave(encoding_bounds(items, base.replicas)) * NEAR
    if (sooner | near | uncut).all():
        return joined, joined_items
    whole = _kept(base, _dispatched(items, topology, options), topology, room)
    if whole is None:
        return joined, joined_items
    sooner = seconds < _by_wave(slowest_s(items, whole.item_replica, base.replicas))
    if (sooner | uncut).all():
        return joined, joined_items
    better = sooner[items.phase[cut.row] // MODALITIES]
    mixed = np.where(better, found.item_replica, whole.item_replica[cut.row])
    joined = join_items(replace(found, item_replica=mixed))
    check_items(joined, joined.item_replica, room)
    return joined, encoder_items(joined, options.cost)


def _dispatch_slices(
    items: EncoderItems, long: NDArray[np.bool_], topology: Topology, options: PlanOptions
) -> tuple[Cut, NDArray[np.int32]]:
    """Pieces of all rows, and the replica of each; rows of other phases than `long` stay whole."""
    others = np.flatnonzero(~long[items.phase])
    replica = np.zeros(items.phase.size, np.int32)
    if others.size:
        replica[others] = _dispatched(items.take(others), topology, options)
    return slice_items(
        items,
        long,
        replica,
        replicas=topology.replicas,
        replicas_per_node=topology.replicas_per_node,
    )


def _dispatched(items: EncoderItems, topology: Topology, options: PlanOptions) -> NDArray[np.int32]:
    return dispatch_items(
        items,
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


def _by_wave(seconds: NDArray[np.float64]) -> NDArray[np.float64]:
    """Those of phases, summed over the encoders of a wave: float64[W]."""
    summed: NDArray[np.float64] = seconds.reshape(-1, MODALITIES).sum(axis=1)
    return summed
