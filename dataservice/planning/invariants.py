"""What every answer shows of itself before it leaves the planner, in O(its size).

A plan is arrays that index one another. Where a planner is wrong they still look like a plan, and
ranks then train other samples than were drawn, or wait for one another. So every public function
checks what it made, and a broken answer is an error that asks for a report.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dataservice.core.errors import PlanningError
from dataservice.core.sample import IntArray
from dataservice.planning.kernels.compile import kernel
from dataservice.planning.kernels.integers import padded_length

_FINE, _SAMPLE, _TWICE, _REPLICA, _SHARED, _MEMORY = range(6)


def broken(what: str) -> PlanningError:
    """The error that says so."""
    return PlanningError(
        f"invariant broken: {what}. This is a defect of the planner; please report the job file "
        "and the step, or the values that it was given."
    )


def require(holds: bool, what: str) -> None:
    """Raises PlanningError naming `what` is broken, unless it `holds`."""
    if not holds:
        raise broken(what)


def check_assignment(part_of: NDArray[np.int32] | NDArray[np.int64], parts: int, what: str) -> None:
    """Each of `part_of` [n] names one of 0..parts-1; `what` words one entry, "rank of item"."""
    if part_of.size:
        low, high = int(part_of.min()), int(part_of.max())
        require(low >= 0 and high < parts, f"a {what} is {low if low < 0 else high} of {parts}")


def check_permutation(order: NDArray[np.int32] | NDArray[np.int64], count: int, what: str) -> None:
    """`order` [count] names each of 0..count-1 once."""
    require(order.shape == (count,), f"the {what} has {order.size} places for {count}")
    check_assignment(order, count, f"place in the {what}")
    require(bool((np.bincount(order, minlength=count) == 1).all()), f"the {what} repeats one")


def check_offsets(offsets: NDArray[np.int64], groups: int, ends: int, what: str) -> None:
    """`offsets` cut 0..ends into that many groups, none of them empty."""
    cut = offsets.shape == (groups + 1,) and bool(offsets[0] == 0 and offsets[-1] == ends)
    require(cut, f"offsets of {what} do not cut {ends} into {groups} groups")
    require(bool((offsets[1:] > offsets[:-1]).all()), f"a group has no {what}")


class Groups(NamedTuple):
    """CP groups: group g holds samples[sample_offsets[g]:sample_offsets[g+1]] on the replicas
    ranks[rank_offsets[g]:rank_offsets[g+1]]."""

    samples: NDArray[np.int32]
    sample_offsets: NDArray[np.int64]
    ranks: NDArray[np.int32]
    rank_offsets: NDArray[np.int64]


def check_groups(
    groups: Groups,
    wave_of: NDArray[np.int32],
    tokens: IntArray,
    *,
    replicas: int,
    memory_tokens: int,
) -> None:
    """Groups in wave order hold every sample once, within memory, on replicas of their own.

    `wave_of` int32[groups]; `tokens` int[n] are the samples' lengths.
    """
    count, held = wave_of.size, groups.samples.size
    require(held == tokens.size, f"{held} samples of {tokens.size} are in groups")
    check_offsets(groups.sample_offsets, count, held, "samples")
    check_offsets(groups.rank_offsets, count, groups.ranks.size, "replicas")
    steps = wave_of[1:] - wave_of[:-1]
    in_order = bool(((steps == 0) | (steps == 1)).all()) and (count == 0 or wave_of[0] == 0)
    require(in_order, "groups are not in wave order, or a wave has none")
    broken, where = _first_broken(groups, wave_of, tokens, replicas, memory_tokens)
    require(broken == _FINE, _WORDS[broken].format(where, replicas, memory_tokens))


_WORDS = {
    _FINE: "",
    _SAMPLE: "group {0} names a sample that was not drawn",
    _TWICE: "sample {0} is in two groups",
    _REPLICA: "group {0} names a replica that is none of the {1}",
    _SHARED: "replica {0} is in two groups of one wave",
    _MEMORY: "group {0} puts more on each of its replicas than the memory budget of {2} tokens",
}


@kernel
def _first_broken(
    groups: Groups,
    wave_of: NDArray[np.int32],
    tokens: IntArray,
    replicas: int,
    memory_tokens: int,
) -> tuple[int, int]:
    """What is broken, and the group, sample or replica where it is."""
    samples, sample_offsets, ranks, rank_offsets = groups
    seen = np.zeros(tokens.size, np.bool_)  # bool[n]
    last_wave = np.full(replicas, -1)  # int64[replicas]
    for group in range(wave_of.size):
        degree = rank_offsets[group + 1] - rank_offsets[group]
        held = 0
        for at in range(sample_offsets[group], sample_offsets[group + 1]):
            sample = samples[at]
            if sample < 0 or sample >= tokens.size:
                return _SAMPLE, group
            if seen[sample]:
                return _TWICE, int(sample)
            seen[sample] = True
            held += padded_length(tokens[sample], degree)
        if held > memory_tokens * degree:
            return _MEMORY, group
        for at in range(rank_offsets[group], rank_offsets[group + 1]):
            rank = ranks[at]
            if rank < 0 or rank >= replicas:
                return _REPLICA, group
            if last_wave[rank] == wave_of[group]:
                return _SHARED, int(rank)
            last_wave[rank] = wave_of[group]
    return _FINE, 0
