"""Items into the room that replicas have: whether they fit at all, and mending a dispatch.

A dispatch that keeps seconds level nearly always keeps bytes as well. Where it does not, a replica
with too much hands items on, the smallest that is enough first, to whoever has most room, of its
node if one there has it; where that fails, all items of the wave are placed anew.

    room   ███████ ██████ ███ ██████       largest item first, always where most room is left;
    items  ▒▒▒▒▒▒  ▒▒▒▒▒  ▒▒▒ ▒▒▒▒         failing that, where it leaves the least
"""

import numpy as np
from numpy.typing import NDArray

from dataservice.core.plan import StepPlan
from dataservice.planning.encoder_memory.room import EncoderRoom
from dataservice.planning.homes import item_packs
from dataservice.planning.kernels.compile import kernel, leaf
from dataservice.planning.kernels.heap import heap_sift_down
from dataservice.planning.kernels.sort import argsort_falling, group_stable

# Looks at items and replicas in one wave: what handing on may take, and up to which the closest fit
# is tried too.
_CLOSE_LOOKS = 4_000_000


def within_rooms(
    plan: StepPlan,
    item_replica: NDArray[np.int32],
    room: EncoderRoom,
    replicas_per_node: int | None,
) -> NDArray[np.int32] | None:
    """`item_replica` int32[m], changed where a replica would keep more than it has room for; None
    where no way is found. O((m + W·N) log N)."""
    kept, broken = keep_rooms(
        plan.pack_wave[item_packs(plan)].astype(np.int64),
        room.item_bytes(plan.item_modality, plan.item_encoder_tokens),
        item_replica,
        room.rooms(plan),
        replicas_per_node or plan.replicas,
    )
    return kept if broken < 0 else None


@kernel
def fit_items(
    sizes: NDArray[np.int64], room: NDArray[np.int64], place_of: NDArray[np.int64]
) -> bool:
    """Whether a place was found for every item of `sizes` [k], which fall, in `room` [N].

    Written: `place_of` int64[k]. Only the rooms' values decide, not which replica has which.
    O((k + N) log N), and O(k·N) more where that is little and the first way fails.
    """
    if sizes.size == 0:
        return True
    if sizes.sum() > room.sum() or sizes[0] > room.max():
        return False
    keys = -room.astype(np.float64)  # float64[N], a heap: most room first
    ids = np.arange(room.size)
    for start in range(room.size // 2 - 1, -1, -1):
        heap_sift_down(keys, ids, room.size, start)
    fits = True
    for k in range(sizes.size):
        if sizes[k] > -keys[0]:
            fits = False
            break
        place_of[k] = ids[0]
        keys[0] += sizes[k]
        heap_sift_down(keys, ids, room.size, 0)
    if fits or sizes.size * room.size > _CLOSE_LOOKS:
        return fits
    return _fit_closely(sizes, room.copy(), place_of)


@leaf
def _fit_closely(
    sizes: NDArray[np.int64], left: NDArray[np.int64], place_of: NDArray[np.int64]
) -> bool:
    """The same, each item where it leaves the least room."""
    for k in range(sizes.size):
        best = -1
        for place in range(left.size):
            if left[place] >= sizes[k] and (best < 0 or left[place] < left[best]):
                best = place
        if best < 0:
            return False
        place_of[k] = best
        left[best] -= sizes[k]
    return True


@kernel
def keep_rooms(
    wave_of: NDArray[np.int64],
    sizes: NDArray[np.int64],
    replica_of: NDArray[np.int32],
    rooms: NDArray[np.int64],
    ranks_per_node: int,
) -> tuple[NDArray[np.int32], int]:
    """`replica_of` int32[m] changed where a replica has more than its room, rooms[wave, replica],
    and the first wave for which no way was found, or −1. `sizes` int64[m] are the items' bytes."""
    waves = rooms.shape[0]
    kept = replica_of.copy()
    if sizes.size == 0:
        return kept, -1
    falling = argsort_falling(sizes)
    listed, begins = group_stable(wave_of, falling, waves)
    for wave in range(waves):
        items = listed[begins[wave] : begins[wave + 1]]
        left = rooms[wave].copy()
        for item in items:
            left[kept[item]] -= sizes[item]
        if left.min() >= 0:
            continue
        if not _hand_on(items, sizes, kept, left, ranks_per_node):
            place_of = np.empty(items.size, np.int64)
            if not fit_items(sizes[items], rooms[wave], place_of):
                return kept, wave
            for k in range(items.size):
                kept[items[k]] = place_of[k]
    return kept, -1


@leaf
def _hand_on(
    items: NDArray[np.int64],
    sizes: NDArray[np.int64],
    kept: NDArray[np.int32],
    left: NDArray[np.int64],
    ranks_per_node: int,
) -> bool:
    """Relieve each replica whose `left` [N] is below 0; whether all were, in so many looks at items
    and replicas. `items` fall by size."""
    looks = _CLOSE_LOOKS
    for replica in range(left.size):
        while left[replica] < 0:
            looks -= items.size + left.size
            if looks < 0:
                return False
            moved = False
            enough = -1  # the smallest item that is enough by itself
            for k in range(items.size - 1, -1, -1):
                if kept[items[k]] == replica and sizes[items[k]] >= -left[replica]:
                    enough = k
                    break
            for k in range(max(enough, 0), items.size):  # that one, or else the largest that moves
                item = items[k]
                if kept[item] != replica or sizes[item] == 0:
                    continue
                taker = _roomiest(left, replica, ranks_per_node, sizes[item])
                if taker >= 0:
                    kept[item] = taker
                    left[taker] -= sizes[item]
                    left[replica] += sizes[item]
                    moved = True
                    break
            if not moved:
                return False
    return True


@leaf
def _roomiest(left: NDArray[np.int64], replica: int, ranks_per_node: int, size: int) -> int:
    """Who has most room for an item of `size`, in the node of `replica` if one there has; or −1."""
    first = replica // ranks_per_node * ranks_per_node
    best = -1
    for near in range(first, min(first + ranks_per_node, left.size)):
        if left[near] >= size and (best < 0 or left[near] > left[best]):
            best = near
    if best >= 0:
        return best
    for taker in range(left.size):
        if left[taker] >= size and (best < 0 or left[taker] > left[best]):
            best = taker
    return best
