"""Karmarkar–Karp differencing over many ranks (1982; multiway form by Korf 2009).

A state is a partial partition: one load per rank, its smallest subtracted away. The two states
of largest spread are merged, the heaviest rank of one with the lightest of the other:

    (9 0 0) + (7 0 0) → (9 7 0);   (9 7 0) + (6 0 0) → (9 7 6) − 6 → (3 1 0)

States are kept sparse: only ranks above zero are stored, so all live states together hold at
most one entry an item and memory is O(items), not O(items · ranks).
"""

import numpy as np
from numpy.typing import NDArray

from dataservice.planning.kernels.compile import kernel, leaf
from dataservice.planning.kernels.sort import argsort_rising, heap_sift_down, heap_sift_up
from dataservice.planning.loads.problem import PartitionProblem


@kernel
def _sort_falling(loads: NDArray[np.float64], heads: NDArray[np.int64], size: int) -> None:
    """Stable, in place. Most merges only append, and insertion then takes one pass."""
    if size > 48:
        falling = argsort_rising(-loads[:size])
        old_loads, old_heads = loads[:size].copy(), heads[:size].copy()
        for k in range(size):
            loads[k] = old_loads[falling[k]]
            heads[k] = old_heads[falling[k]]
        return
    for i in range(1, size):
        load = loads[i]
        head = heads[i]
        j = i - 1
        while j >= 0 and loads[j] < load:
            loads[j + 1] = loads[j]
            heads[j + 1] = heads[j]
            j -= 1
        loads[j + 1] = load
        heads[j + 1] = head


@leaf
def _merge_states(
    load_a: NDArray[np.float64],
    head_a: NDArray[np.int64],
    load_b: NDArray[np.float64],
    head_b: NDArray[np.int64],
    ranks: int,
    next_item: NDArray[np.int64],
    tail_of: NDArray[np.int64],
    load_out: NDArray[np.float64],
    head_out: NDArray[np.int64],
) -> int:
    """Heaviest of a with lightest of b; lists of items are joined end to end. Returns its size.

    Both states hold loads falling, zero ranks left out; `head` is the first item of a rank.
    """
    size_a = load_a.size
    size_b = load_b.size
    shared = max(0, size_a + size_b - ranks)
    for i in range(size_a):
        load_out[i] = load_a[i]
        head_out[i] = head_a[i]
    # The lightest `shared` ranks of a meet the lightest of b in opposite order.
    for k in range(size_b - shared):
        load_out[size_a + k] = load_b[k]
        head_out[size_a + k] = head_b[k]
    for k in range(shared):
        i = size_a - shared + k
        j = size_b - 1 - k
        load_out[i] += load_b[j]
        next_item[tail_of[head_out[i]]] = head_b[j]
        tail_of[head_out[i]] = tail_of[head_b[j]]
    return size_a + size_b - shared


@kernel
def _labels_from_lists(
    heads: NDArray[np.int64], next_item: NDArray[np.int64], n: int
) -> NDArray[np.int64]:
    rank_at = np.zeros(n, np.int64)
    for rank in range(heads.size):
        item = heads[rank]
        while item >= 0:
            if item < n:  # places past n are the zero items that even out the counts
                rank_at[item] = rank
            item = next_item[item]
    return rank_at


@kernel
def _karmarkar_karp(costs: NDArray[np.float64], ranks: int) -> NDArray[np.int64]:
    """Full differencing; a live state of s entries lies at pool[start : start + s]."""
    n = costs.size
    next_item = np.full(n, -1)  # int64[n]: items of a rank, as lists
    tail_of = np.arange(n)  # int64[n]: last item of the list of each head
    room = 4 * n + 4 * ranks
    pool_load = np.empty(room)  # float64[room]: loads of all states
    pool_head = np.empty(room, np.int64)  # int64[room]: first item of each
    pool_load[:n] = costs
    pool_head[:n] = np.arange(n)
    start = np.arange(n)  # int64[states]
    length = np.ones(n, np.int64)  # int64[states]
    keys = -costs.copy()  # float64[states], a heap
    states = np.arange(n)  # costs fall, so the keys already rise: a valid heap
    live = n
    used = n
    while live > 1:
        first = states[0]
        live -= 1
        keys[0] = keys[live]
        states[0] = states[live]
        heap_sift_down(keys, states, live, 0)
        second = states[0]
        if used + ranks > room:
            used = _compact(pool_load, pool_head, start, length, states[:live], first)
        a, b = start[first], start[second]
        size = _merge_states(
            pool_load[a : a + length[first]],
            pool_head[a : a + length[first]],
            pool_load[b : b + length[second]],
            pool_head[b : b + length[second]],
            ranks,
            next_item,
            tail_of,
            pool_load[used:],
            pool_head[used:],
        )
        out_load = pool_load[used : used + size]
        out_head = pool_head[used : used + size]
        _sort_falling(out_load, out_head, size)
        spread = out_load[0]
        if size == ranks:
            spread -= out_load[size - 1]
            out_load -= out_load[size - 1]
        start[second] = used
        # A rank now at zero still owns its items, so a full state keeps all its entries.
        length[second] = size
        used += size
        keys[0] = -spread
        heap_sift_down(keys, states, live, 0)
    last = start[states[0]]
    return _labels_from_lists(pool_head[last : last + length[states[0]]], next_item, n)


@kernel
def _compact(
    pool_load: NDArray[np.float64],
    pool_head: NDArray[np.int64],
    start: NDArray[np.int64],
    length: NDArray[np.int64],
    states: NDArray[np.int64],
    popped: int,
) -> int:
    """Slide live states to the front of the pool; returns how much of it is used."""
    live = np.empty(states.size + 1, np.int64)
    live[: states.size] = states
    live[states.size] = popped
    used = 0
    begins = np.empty(live.size)
    for k in range(live.size):
        begins[k] = start[live[k]]
    for at in argsort_rising(begins):
        state = live[at]
        begin = start[state]
        for k in range(length[state]):
            pool_load[used + k] = pool_load[begin + k]
            pool_head[used + k] = pool_head[begin + k]
        start[state] = used
        used += length[state]
    return used


@kernel
def _balanced_differencing(costs: NDArray[np.float64], ranks: int) -> NDArray[np.int64]:
    """Equal counts: start from states that already hold one item a rank (BLDM, Michiels 2003).

    `costs` falls and its length is a multiple of ranks; every merge keeps counts equal.
    """
    n = costs.size
    blocks = n // ranks
    loads = costs.copy().reshape(blocks, ranks)  # float64[blocks, ranks]
    heads = np.arange(n).reshape(blocks, ranks)  # int64[blocks, ranks]
    next_item = np.full(n, -1)  # int64[n]
    tail_of = np.arange(n)
    keys = np.empty(blocks)  # float64[blocks], a heap
    states = np.empty(blocks, np.int64)
    for block in range(blocks):
        keys[block] = loads[block, ranks - 1] - loads[block, 0]
        states[block] = block
        heap_sift_up(keys, states, block)
    live = blocks
    while live > 1:
        first = states[0]
        live -= 1
        keys[0] = keys[live]
        states[0] = states[live]
        heap_sift_down(keys, states, live, 0)
        second = states[0]
        for k in range(ranks):
            head = heads[second, ranks - 1 - k]
            loads[first, k] += loads[second, ranks - 1 - k]
            next_item[tail_of[heads[first, k]]] = head
            tail_of[heads[first, k]] = tail_of[head]
        falling = argsort_rising(-loads[first])
        least = loads[first, falling[ranks - 1]]
        for k in range(ranks):
            loads[second, k] = loads[first, falling[k]] - least
            heads[second, k] = heads[first, falling[k]]
        keys[0] = -loads[second, 0]
        heap_sift_down(keys, states, live, 0)
    return _labels_from_lists(heads[states[0]], next_item, n)


def balanced_differencing(problem: PartitionProblem) -> NDArray[np.int64]:
    """Counts equal to within one, capacity not looked at. O(n log ranks), so the variant for
    many ranks even where counts are free."""
    missing = -problem.costs.size % problem.ranks
    padded = np.concatenate((problem.costs, np.zeros(missing)))
    rank_at = _balanced_differencing(padded, problem.ranks)
    return rank_at[: problem.costs.size]


def karmarkar_karp(problem: PartitionProblem) -> NDArray[np.int64] | None:
    """Rank of each sorted place, or None where the result breaks the capacity, which
    differencing cannot look at. O(n · ranks) at worst."""
    if problem.costs.size == 0:
        return np.empty(0, np.int64)
    if problem.equal_count:
        rank_at = balanced_differencing(problem)
    else:
        rank_at = _karmarkar_karp(problem.costs, problem.ranks)
    held = np.bincount(rank_at, weights=problem.sizes, minlength=problem.ranks)
    return rank_at if held.max() <= problem.capacity else None
