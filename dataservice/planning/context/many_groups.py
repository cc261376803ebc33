"""All groups of so many waves at given levels: opened, filled, traded between, dealt to waves.

Shapes as in `many`: n samples, known by their place when sorted longest first; u of them are long;
G groups, of which the first `anchors` were opened by the samples of the same places; L groups that
hold anything.
"""

import numpy as np
from numpy.typing import NDArray

from dataservice.planning.context.many_fill import (
    Groups,
    fill,
    list_members,
    put,
    put_all,
    trade,
)
from dataservice.planning.context.many_target import Target
from dataservice.planning.context.many_waves import (
    WIDE_SHARES,
    Answer,
    deal,
    list_groups_widest,
)
from dataservice.planning.context.seconds import fixed_seconds, work_seconds
from dataservice.planning.context.units import Setting
from dataservice.planning.kernels.compile import kernel, leaf

_ENOUGH = 1.003  # slowest to mean group of one rank at which trading ends
_ROUNDS = 3


def level_groups(
    sizes: NDArray[np.int64], target: Target, waves: int, setting: Setting
) -> Answer | None:
    """The groups of a target and their waves, or None where memory or ranks do not allow it."""
    groups, anchors = _open_groups(sizes, target, waves, setting)
    group_of = fill(sizes, anchors, groups, setting)  # int32[n − anchors]
    if group_of.size and group_of[-1] < 0:
        return None
    # int64[n − anchors], int64[G + 1]; an anchor's own sample is not among its members
    members, begins = list_members(group_of, groups.degree.size)
    members += anchors  # places among all n samples from here on
    single = np.arange(anchors, groups.degree.size)  # int64[G − anchors]
    trade(sizes, members, begins, single, _ROUNDS, _ENOUGH, groups, setting)
    listed = list_groups_widest(groups)  # int64[L]
    wave_of = deal(listed, groups, target.slow_waves, waves, WIDE_SHARES[0], setting)  # int64[L]
    if wave_of.size and wave_of.min() < 0:
        return None
    return Answer(
        total_s=float(_total_seconds(listed, wave_of, waves, groups)),
        waves=waves,
        slow_waves=target.slow_waves,
        groups=groups,
        anchors=anchors,
        members=members,
        begins=begins,
        listed=listed,
        wave_of=wave_of,
    )


@kernel
def _open_groups(
    sizes: NDArray[np.int64], target: Target, waves: int, setting: Setting
) -> tuple[Groups, int]:
    """A group for each sample that must be widened or is slow, the first `anchors` of all, and
    groups of one rank for the others in the ranks that are left."""
    anchors = 0
    slots = waves * setting.ranks  # ranks left, over all waves
    slow_slots = target.slow_waves * setting.ranks  # the same, of the first waves
    while anchors < target.degree.size and target.degree[anchors] > 1:
        slots -= target.degree[anchors]
        slow_slots -= target.degree[anchors]
        anchors += 1
    count = anchors + min(slots, sizes.size - anchors)  # G
    groups = Groups(
        np.ones(count, np.int64),  # degree int64[G]
        np.zeros(count, np.int64),  # tokens int64[G]
        np.zeros(count, np.float64),  # squares float64[G]
        np.full(count, fixed_seconds(setting.coefficients)),  # time_s float64[G]
        np.zeros(count, np.float64),  # spare_s float64[G]
    )
    for group in range(count):
        if group < anchors:
            groups.degree[group] = target.degree[group]
            put(sizes[group], group, groups, setting)
        # The target has all anchors in the first waves, and groups of one rank on the ranks left.
        if group < anchors + slow_slots:
            groups.spare_s[group] = target.slow_s - target.fast_s
    return groups, anchors


@kernel
def _total_seconds(
    listed: NDArray[np.int64], wave_of: NDArray[np.int64], waves: int, groups: Groups
) -> float:
    """Sum over waves of their slowest groups; `listed` int64[L], and the wave of each int64[L]."""
    slowest = np.zeros(waves)  # float64[waves], seconds
    for at in range(listed.size):
        slowest[wave_of[at]] = max(slowest[wave_of[at]], groups.time_s[listed[at]])
    return float(slowest.sum())


@leaf
def count_long(sizes: NDArray[np.int64], work_s: float, waves: int, setting: Setting) -> int:
    """How many of the samples, which fall, are beyond a rank's memory or its share of a wave."""
    share_s = work_s / (waves * setting.ranks)
    count = 0
    while count < sizes.size:
        size = float(sizes[count])
        alone_s = work_seconds(size, size * size, setting.coefficients)
        if sizes[count] <= setting.memory_tokens and alone_s <= share_s:
            break
        count += 1
    return count


def node_groups(
    sizes: NDArray[np.int64], least: NDArray[np.int64], setting: Setting
) -> Answer | None:
    """One wave of groups of whole nodes, so that no ring crosses nodes that does not have to; None
    where they do not hold the samples. `least` int64[n] are their least degrees."""
    node = setting.ranks_per_node
    if setting.power_of_two and node & (node - 1):
        return None
    anchors = int(np.count_nonzero(least > node))
    wide = -(-least[:anchors] // node) * node
    nodes, left = divmod(setting.ranks - int(wide.sum()), node)
    if nodes < 0 or (setting.power_of_two and (wide & (wide - 1)).any()):
        return None
    degree = np.concatenate([wide, np.full(nodes, node), np.ones(left, np.int64)])  # int64[G]
    nothing = np.zeros(degree.size, np.int64)
    fixed_s = np.full(degree.size, fixed_seconds(setting.coefficients))
    groups = Groups(degree, nothing, nothing.astype(np.float64), fixed_s, np.zeros(degree.size))
    put_all(sizes[:anchors], np.arange(anchors, dtype=np.int32), groups, setting)
    group_of = fill(sizes, anchors, groups, setting)
    if group_of.size and group_of[-1] < 0:
        return None
    members, begins = list_members(group_of, degree.size)
    listed = list_groups_widest(groups)
    return Answer(
        total_s=float(groups.time_s[listed].max()),
        waves=1,
        slow_waves=1,
        groups=groups,
        anchors=anchors,
        members=members + anchors,
        begins=begins,
        listed=listed,
        wave_of=np.zeros(listed.size, np.int64),
    )
