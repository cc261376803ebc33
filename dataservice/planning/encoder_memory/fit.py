"""Items into the room that replicas have: whether they fit at all, and mending a dispatch.

A dispatch that keeps seconds level nearly always keeps bytes as well. Where it does not, a replica
with too much hands items on, the smallest that is enough first, to whoever keeps least, of its node
if one there has room; where that fails, all items of the wave are placed anew.

    room   ███████ ██████ ███ ██████       largest item first, always where most room is left;
    items  ▒▒▒▒▒▒  ▒▒▒▒▒  ▒▒▒ ▒▒▒▒         failing that, where it leaves the least
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from dataservice.core.plan import StepPlan
from dataservice.core.sample import IntArray
from dataservice.planning.encoder_memory.room import EncoderRoom
from dataservice.planning.kernels.compile import kernel, leaf
from dataservice.planning.kernels.sort import argsort_falling, group_stable, heap_sift_down
from dataservice.planning.loads.greedy import add_least_loaded
from dataservice.planning.routes import item_packs

# Looks at items and replicas in one wave: what handing on may take, and up to which the closest fit
# is tried too.
_CLOSE_LOOKS = 4_000_000


def within_rooms(
    plan: StepPlan,
    item_replica: NDArray[np.int32],
    room: EncoderRoom,
    replicas_per_node: int | None,
) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
    """`item_replica` int32[m], changed where a replica would keep more than it has room for; and
    for each wave whether no way was found, bool[W]. O((m + W·N) log N)."""
    return keep_rooms(
        plan.pack_wave[item_packs(plan)].astype(np.int64),
        room.row_bytes(plan),
        item_replica,
        room.rooms(plan),
        replicas_per_node or plan.replicas,
    )


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


@kernel
def have_room(sizes: NDArray[np.int64], room: NDArray[np.int64]) -> bool:
    """Whether `fit_items` finds a place for every item. It is known as soon as the largest are
    placed and the others are small beside what is left."""
    left_bytes = sizes.sum()
    if sizes.size == 0 or surely_fit(left_bytes, sizes[0], room):
        return True
    if left_bytes > room.sum() or sizes[0] > room.max():
        return False
    filled = -room.astype(np.float64)  # float64[N], rising: most room first
    filled.sort()
    names = np.arange(room.size)
    at_a_time = 2 * room.size
    for begin in range(0, sizes.size, at_a_time):
        some = sizes[begin : begin + at_a_time]
        if begin > 0 and surely_fit(left_bytes, some[0], -filled):
            return True
        add_least_loaded(some.astype(np.float64), filled, names)
        if filled[-1] > 0.0:
            few = sizes.size * room.size <= _CLOSE_LOOKS
            return few and _fit_closely(sizes, room.copy(), np.empty(sizes.size, np.int64))
        left_bytes -= some.sum()
    return True


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


@leaf
def surely_fit(total_bytes: float, largest: float, room: NDArray[Any]) -> bool:
    """Whether items of this sum, none above `largest`, find places in `room` [N] however they come,
    each where most is left: one that finds none has less than `largest` left on every replica, so
    that all have taken more than is asked here. O(N)."""
    taken = 0.0
    for place in range(room.size):
        taken += max(room[place] - largest, 0.0)
    return total_bytes <= taken


@kernel
def rooms_left(
    wave_of: IntArray,
    sizes: NDArray[np.int64],
    replica_of: NDArray[np.int32],
    rooms: NDArray[np.int64],
) -> NDArray[np.int64]:
    """What each replica has left in each wave, int64[W, N]: below 0 where it has too much. O(m)."""
    left = rooms.copy()
    for item in range(sizes.size):
        left[wave_of[item], replica_of[item]] -= sizes[item]
    return left


@kernel
def keep_rooms(
    wave_of: NDArray[np.int64],
    sizes: NDArray[np.int64],
    replica_of: NDArray[np.int32],
    rooms: NDArray[np.int64],
    ranks_per_node: int,
) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
    """`replica_of` int32[m] changed where a replica has more than its room, rooms[wave, replica],
    and the waves for which no way was found, bool[W]. `sizes` int64[m] are the items' bytes."""
    waves = rooms.shape[0]
    kept = replica_of.copy()
    left = rooms_left(wave_of, sizes, kept, rooms)
    full = np.zeros(waves, np.bool_)  # bool[waves that have a replica with too much]
    for wave in range(waves):
        full[wave] = left[wave].min() < 0
    listed, begins = group_stable(wave_of, _falling_of_full(wave_of, sizes, kept, left), waves)
    every = starts = np.empty(0, np.int64)  # all items, wave by wave, once they are needed
    for wave in range(waves):
        if not full[wave]:
            continue
        items = listed[begins[wave] : begins[wave + 1]]
        full[wave] = False
        if not _hand_on(items, sizes, kept, left[wave], rooms[wave], ranks_per_node):
            if starts.size == 0:
                every, starts = group_stable(wave_of, argsort_falling(sizes), waves)
            items = every[starts[wave] : starts[wave + 1]]
            place_of = np.empty(items.size, np.int64)
            full[wave] = not fit_items(sizes[items], rooms[wave], place_of)
            for k in range(items.size if not full[wave] else 0):
                kept[items[k]] = place_of[k]
    return kept, full


@kernel
def _falling_of_full(
    wave_of: NDArray[np.int64],
    sizes: NDArray[np.int64],
    replica_of: NDArray[np.int32],
    left: NDArray[np.int64],
) -> NDArray[np.int64]:
    """Items of replicas with too much, whose left[wave, replica] is below 0: by falling size."""
    some, count = np.empty(sizes.size, np.int64), 0
    for item in range(sizes.size):
        if left[wave_of[item], replica_of[item]] < 0:
            some[count] = item
            count += 1
    return some[:count][argsort_falling(sizes[some[:count]])]


@kernel
def _hand_on(
    items: NDArray[np.int64],
    sizes: NDArray[np.int64],
    kept: NDArray[np.int32],
    left: NDArray[np.int64],
    rooms: NDArray[np.int64],
    ranks_per_node: int,
) -> bool:
    """Relieve each replica whose `left` [N] is below 0; whether all were, in so many looks at items
    and replicas. `items` are theirs, falling by size: only who has room takes on more, so that one
    with too much never has others."""
    looks = _CLOSE_LOOKS
    listed, begins = group_stable(kept, items, left.size)
    for replica in range(left.size):
        own = listed[begins[replica] : begins[replica + 1]]
        while left[replica] < 0:
            looks -= own.size + left.size
            if looks < 0:
                return False
            moved = False
            enough = -1  # the smallest item that is enough by itself
            for k in range(own.size - 1, -1, -1):
                if kept[own[k]] == replica and sizes[own[k]] >= -left[replica]:
                    enough = k
                    break
            for k in range(max(enough, 0), own.size):  # that one, or else the largest that moves
                item = own[k]
                if kept[item] != replica or sizes[item] == 0:
                    continue
                taker = _taker(left, rooms, replica, ranks_per_node, sizes[item])
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
def _taker(
    left: NDArray[np.int64],
    rooms: NDArray[np.int64],
    replica: int,
    ranks_per_node: int,
    size: int,
) -> int:
    """Who keeps least and has room for an item of `size`, in the node of `replica` if one there
    has it; or −1."""
    first = replica // ranks_per_node * ranks_per_node
    node = first, min(first + ranks_per_node, left.size)
    for begin, end in (node, (0, left.size)):
        best = -1
        for other in range(begin, end):
            if left[other] >= size and (
                best < 0 or rooms[other] - left[other] < rooms[best] - left[best]
            ):
                best = other
        if best >= 0:
            return best
    return -1
