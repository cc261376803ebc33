"""The answer of context planning: one wave of groups, each inside one node wherever it fits.

Groups wider than a node take whole free nodes first. What is left of them and the narrower ones
go, widest first, to the node with the least room that is enough; a group that no node can hold
waits until the others are placed and then takes what is left, crossing nodes.

    node 0 [5 5 5 5 5 2 2 .]   node 1 [4 4 4 4 3 3 3 .]   waits: one more of 2 → the two dots
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from dataservice.core.layout import sample_starts
from dataservice.planning.context.build import Grouping
from dataservice.planning.context.degrees import member_sums
from dataservice.planning.context.improve import ROUNDS, improve_groups
from dataservice.planning.context.seconds import group_seconds
from dataservice.planning.context.units import Setting, Units, list_groups
from dataservice.planning.kernels.compile import kernel, leaf
from dataservice.planning.kernels.sort import group_stable


def place_groups(
    degrees: NDArray[np.int64],
    priority: NDArray[np.float64],
    *,
    ranks: int,
    ranks_per_node: int,
) -> tuple[NDArray[np.int32], NDArray[np.int64], NDArray[np.bool_]]:
    """Ranks int32[Σd] of all groups end to end, their offsets int64[G+1], and whether each group
    crosses a node bool[G]. Σ degrees must be within `ranks`; node k holds the ranks from
    k·ranks_per_node on. Of equally wide groups the one of higher `priority` [G] is placed first.

    O(G · (log G + nodes)).
    """
    order = np.lexsort((np.arange(degrees.size), -priority, -degrees))
    return _place_in(order, degrees, ranks, ranks_per_node)


def place_sorted(
    degrees: NDArray[np.int64], *, ranks: int, ranks_per_node: int
) -> tuple[NDArray[np.int32], NDArray[np.int64], NDArray[np.bool_]]:
    """As `place_groups`, of groups that come in the order in which they are to be placed."""
    return _place_in(np.arange(degrees.size), degrees, ranks, ranks_per_node)


def _place_in(
    order: NDArray[np.int64], degrees: NDArray[np.int64], ranks: int, ranks_per_node: int
) -> tuple[NDArray[np.int32], NDArray[np.int64], NDArray[np.bool_]]:
    offsets = np.zeros(degrees.size + 1, np.int64)
    np.cumsum(degrees, out=offsets[1:])
    assert offsets[-1] <= ranks
    placed, crosses = _place(degrees, order, offsets, ranks, ranks_per_node)
    return placed, offsets, crosses


@kernel
def _place(
    degrees: NDArray[np.int64],
    order: NDArray[np.int64],
    offsets: NDArray[np.int64],
    ranks: int,
    ranks_per_node: int,
) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
    nodes = -(-ranks // ranks_per_node)
    free = np.full(nodes, ranks_per_node, np.int64)
    free[nodes - 1] = ranks - (nodes - 1) * ranks_per_node
    start = np.arange(nodes) * ranks_per_node
    placed = np.empty(offsets[-1], np.int32)
    crosses = degrees > ranks_per_node
    ends = offsets[:-1].copy()  # where each group's next rank is written
    left = degrees.copy()
    wider = order.size  # groups up to the last that is wider than one rank; most waves have few
    while wider > 0 and degrees[order[wider - 1]] == 1:
        wider -= 1
    whole = 0
    for group in order[:wider]:
        while left[group] >= ranks_per_node and whole < nodes and free[whole] == ranks_per_node:
            ends[group] = _fill(placed, ends[group], start, free, whole, ranks_per_node)
            left[group] -= ranks_per_node
            whole += 1
    # What is left of wide groups takes its turn, widest first.
    wide, count = np.empty(wider, np.int64), 0
    for group in order[:wider]:
        wide[count] = group
        count += 1 < left[group] < ranks_per_node
    wide = wide[:count]
    turns, _ = group_stable(ranks_per_node - left, wide, ranks_per_node)
    hints = np.zeros(ranks_per_node + 1, np.int64)
    for group in turns:
        node = _tightest(free, hints, left[group])
        if node >= 0:
            ends[group] = _fill(placed, ends[group], start, free, node, left[group])
            hints[free[node]] = min(hints[free[node]], node)
    node = 0  # the many groups of one rank, placed last, fill the nodes in turn
    for group in order:
        if left[group] == 1:
            while node < nodes and free[node] == 0:
                node += 1
            if node < nodes:
                placed[ends[group]] = start[node]
                ends[group] += 1
                start[node] += 1
                free[node] -= 1
    for group in order[:wider]:
        while ends[group] < offsets[group + 1]:
            crosses[group] = True
            node = int(np.argmax(free))
            taken = min(offsets[group + 1] - ends[group], free[node])
            ends[group] = _fill(placed, ends[group], start, free, node, taken)
    return placed, crosses


@leaf
def _tightest(free: NDArray[np.int64], hints: NDArray[np.int64], least: int) -> int:
    """The node with the least room that is at least `least`, the first of such; −1 if none. No node
    before hints[r] has room for exactly r."""
    best = -1
    if free.size <= hints.size:  # few large nodes
        for node in range(free.size):
            if free[node] >= least and (best < 0 or free[node] < free[best]):
                best = node
        return best
    for room in range(least, hints.size):
        node = hints[room]
        while node < free.size and free[node] != room:
            node += 1
        hints[room] = node
        if node < free.size:
            return int(node)
    return best


@leaf
def _fill(
    placed: NDArray[np.int32],
    end: int,
    start: NDArray[np.int64],
    free: NDArray[np.int64],
    node: int,
    count: int,
) -> int:
    """Give `count` ranks of a node to the group being written at `end`."""
    for _ in range(count):
        placed[end] = start[node]
        start[node] += 1
        end += 1
    free[node] -= count
    return end


@dataclass(frozen=True, kw_only=True, slots=True)
class ContextGroup:
    """Samples that share one pack, and the replicas that share it along the sequence.

    `samples` int32[k] indices of the caller's samples, in sequence order; `ranks` in ring order;
    `padded_tokens` length of the pack, each sample padded to a multiple of 2·degree.
    """

    samples: NDArray[np.int32]
    degree: int
    ranks: tuple[int, ...]
    time_s: float
    padded_tokens: int


@dataclass(frozen=True, kw_only=True)  # no slots: what is asked of it again and again is kept
class ContextPlan:
    """One wave of G groups, widest first. Σ degree ≤ replicas; no replica is in two groups.

    Group g holds samples[sample_offsets[g]:sample_offsets[g+1]] on the replicas
    ranks[rank_offsets[g]:rank_offsets[g+1]]; `time_s` float64[G], `padded_tokens` int64[G].
    `lower_bound_s`: no grouping of these samples on these replicas is faster.
    """

    samples: NDArray[np.int32]
    sample_offsets: NDArray[np.int64]
    ranks: NDArray[np.int32]
    rank_offsets: NDArray[np.int64]
    time_s: NDArray[np.float64]
    padded_tokens: NDArray[np.int64]
    lower_bound_s: float

    @cached_property
    def makespan_s(self) -> float:
        """Time of the slowest group, and so of the wave."""
        return float(self.time_s.max(initial=0.0))

    @cached_property
    def degrees(self) -> NDArray[np.int64]:
        """Degree of each group int64[G]."""
        return np.diff(self.rank_offsets)

    @property
    def groups(self) -> tuple[ContextGroup, ...]:
        """The same as readable objects; built at every call."""
        ranks = self.ranks.tolist()
        return tuple(
            ContextGroup(
                samples=self.samples[self.sample_offsets[g] : self.sample_offsets[g + 1]],
                degree=int(self.rank_offsets[g + 1] - self.rank_offsets[g]),
                ranks=tuple(ranks[self.rank_offsets[g] : self.rank_offsets[g + 1]]),
                time_s=float(self.time_s[g]),
                padded_tokens=int(self.padded_tokens[g]),
            )
            for g in range(self.time_s.size)
        )


def place_plan(
    units: Units,
    members: NDArray[np.int64],
    offsets: NDArray[np.int64],
    degrees: NDArray[np.int64],
    bound_s: float,
    setting: Setting,
    *,
    movable: bool,
) -> ContextPlan:
    """Put groups members[offsets[g]:offsets[g+1]] of `degrees` on replicas and time them there.

    Where a ring had to cross nodes and is now the slowest, `movable` units leave it. The ranks of
    a group that all of its units have left are idle.
    """
    tokens, squares, inside_s, outside_s = group_times(units, members, offsets, degrees, setting)
    order = np.lexsort((np.arange(degrees.size), -inside_s, -degrees))
    members, offsets = _reorder(members, offsets, order)
    degrees, tokens, squares = degrees[order], tokens[order], squares[order]
    inside_s, outside_s = inside_s[order], outside_s[order]
    ranks, rank_offsets, crosses = place_groups(
        degrees, outside_s, ranks=setting.ranks, ranks_per_node=setting.ranks_per_node
    )
    seconds = np.where(crosses, outside_s, inside_s)
    if movable and seconds.max(initial=0.0) > inside_s.max(initial=0.0):
        grouping = Grouping(
            group_of=_group_of(members, offsets),
            degree=degrees,
            tokens=tokens,
            squares=squares,
            seconds=seconds,
            crosses=crosses,
            used=np.array([degrees.size]),
        )
        improve_groups(units, grouping, bound_s, ROUNDS, setting._replace(placed=True))
        members, offsets = list_groups(grouping.group_of, degrees.size)
        held = np.bincount(grouping.group_of, minlength=degrees.size) > 0
        ranks, degrees = ranks[np.repeat(held, degrees)], degrees[held]
        rank_offsets = sample_starts(degrees)
        seconds, tokens = seconds[held], tokens[held]
    samples, sample_offsets = _samples_of(units, members, offsets)
    return ContextPlan(
        samples=samples,
        sample_offsets=sample_offsets,
        ranks=ranks,
        rank_offsets=rank_offsets,
        time_s=seconds,
        padded_tokens=tokens,
        lower_bound_s=bound_s,
    )


def plan_of_groups(
    units: Units,
    members: NDArray[np.int64],
    offsets: NDArray[np.int64],
    ranks: NDArray[np.int32],
    rank_offsets: NDArray[np.int64],
    crosses: NDArray[np.bool_],
    bound_s: float,
    setting: Setting,
) -> ContextPlan:
    """Groups members[offsets[g]:offsets[g+1]] on the ranks that they have, widest first."""
    degrees = np.diff(rank_offsets)
    tokens, _, inside_s, outside_s = group_times(units, members, offsets, degrees, setting)
    samples, sample_offsets = _samples_of(units, members, offsets)
    return ContextPlan(
        samples=samples,
        sample_offsets=sample_offsets,
        ranks=ranks,
        rank_offsets=rank_offsets,
        time_s=np.where(crosses, outside_s, inside_s),
        padded_tokens=tokens,
        lower_bound_s=bound_s,
    )


@kernel
def _group_of(members: NDArray[np.int64], offsets: NDArray[np.int64]) -> NDArray[np.int64]:
    group_of = np.empty(members.size, np.int64)
    for g in range(offsets.size - 1):
        for place in range(offsets[g], offsets[g + 1]):
            group_of[members[place]] = g
    return group_of


@kernel
def group_times(
    units: Units,
    members: NDArray[np.int64],
    offsets: NDArray[np.int64],
    degrees: NDArray[np.int64],
    setting: Setting,
) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Padded Σs, Σ(1+η)s², and seconds inside a node and across nodes, of each group."""
    groups = degrees.size
    tokens = np.empty(groups, np.int64)
    squares = np.empty(groups, np.float64)
    inside = np.empty(groups, np.float64)
    outside = np.empty(groups, np.float64)
    for g in range(groups):
        size, square = member_sums(units, members, offsets[g], offsets[g + 1], degrees[g])
        tokens[g] = size
        squares[g] = square
        crosses = degrees[g] > setting.ranks_per_node
        inside[g] = group_seconds(float(size), square, degrees[g], crosses, setting.coefficients)
        outside[g] = group_seconds(float(size), square, degrees[g], True, setting.coefficients)
    return tokens, squares, inside, outside


@kernel
def _reorder(
    members: NDArray[np.int64], offsets: NDArray[np.int64], order: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    moved = np.empty_like(members)
    ends = np.zeros_like(offsets)
    end = 0
    for place in range(order.size):
        for i in range(offsets[order[place]], offsets[order[place] + 1]):
            moved[end] = members[i]
            end += 1
        ends[place + 1] = end
    return moved, ends


@kernel
def _samples_of(
    units: Units, members: NDArray[np.int64], offsets: NDArray[np.int64]
) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    samples = np.empty(units.samples.size, np.int32)
    ends = np.zeros_like(offsets)
    end = 0
    for g in range(offsets.size - 1):
        for place in range(offsets[g], offsets[g + 1]):
            for i in range(units.offsets[members[place]], units.offsets[members[place] + 1]):
                samples[end] = units.samples[i]
                end += 1
        ends[g + 1] = end
    return samples, ends
