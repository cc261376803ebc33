"""Who encodes what: every item of a plan on one replica, or pieces of it on several.

An item that would take one replica long, or keep more than a small part of what it may, is cut
where it may be (`pieces.py`); pieces are spread as items are, and joined where they met.
"""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from dataservice.core.plan import StepPlan
from dataservice.core.plan_options import PlanOptions
from dataservice.core.sample import Modality
from dataservice.core.topology import Topology
from dataservice.planning.encoder_memory.fit import within_rooms
from dataservice.planning.encoder_memory.room import EncoderRoom
from dataservice.planning.homes import item_packs
from dataservice.planning.invariants import broken
from dataservice.planning.pieces import cut_evenly, cut_items, join_items, long_pieces, unit_counts
from dataservice.planning.stages.dispatch import (
    EncoderItems,
    dispatch_items,
    encoder_items,
    slowest_s,
)
from dataservice.planning.validate import check_items


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
        base, base_items = _cut(grouped, items, pieces, options)
    found = _placed(base, base_items, topology, options, room)
    if found is None:
        raise broken("a wave has items that its replicas have no room for")
    whole = join_items(found)
    whole_items = base_items if whole is found else encoder_items(whole, options.cost)
    if options.stages.dispatch == "home":
        return whole, whole_items
    more = long_pieces(base, base_items.phase, base_items.seconds, base_items.phases)
    finer, finer_items = _cut(base, base_items, more, options)
    cut = None if finer is base else _placed(finer, finer_items, topology, options, room)
    if cut is None:
        return whole, whole_items
    joined = join_items(cut)
    joined_s = _encoding_s(joined, encoder_items(joined, options.cost))
    sooner = joined_s < _encoding_s(whole, whole_items)
    if not sooner.all():
        before = found.item_replica[np.repeat(np.arange(more.size), more)]
        better = sooner[cut.pack_wave[item_packs(cut)]]
        joined = join_items(replace(cut, item_replica=np.where(better, cut.item_replica, before)))
        check_items(joined, joined.item_replica, room)
    return joined, encoder_items(joined, options.cost)


def _cut(
    plan: StepPlan, items: EncoderItems, pieces: NDArray[np.int64], options: PlanOptions
) -> tuple[StepPlan, EncoderItems]:
    """The plan with each row in so many pieces, and what they take; the same where all is whole."""
    if pieces.max(initial=1) == 1:
        return plan, items
    cut = cut_items(plan, cut_evenly(unit_counts(plan), pieces))
    return cut, encoder_items(cut, options.cost)


def _placed(
    plan: StepPlan,
    items: EncoderItems,
    topology: Topology,
    options: PlanOptions,
    room: EncoderRoom | None,
) -> StepPlan | None:
    """Every row on a replica; None where no way is found that keeps `room`."""
    node = topology.replicas_per_node
    item_replica = dispatch_items(
        items,
        replicas=topology.replicas,
        replicas_per_node=node,
        algorithm=options.stages.dispatch,
    )
    if room is not None:
        kept = within_rooms(plan, item_replica, room, node)
        if kept is None:
            return None
        item_replica = kept
    check_items(plan, item_replica, room)
    return replace(plan, item_replica=item_replica)


def _encoding_s(plan: StepPlan, items: EncoderItems) -> NDArray[np.float64]:
    """Seconds of the slowest replicas of each wave, summed over its encoders: float64[W]."""
    slowest = slowest_s(items, plan.item_replica, plan.replicas)
    seconds: NDArray[np.float64] = slowest.reshape(plan.waves, len(Modality)).sum(axis=1)
    return seconds
