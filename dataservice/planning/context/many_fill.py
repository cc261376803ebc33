"""Short samples into the groups that long ones opened and into groups of one rank.

Longest first, each goes to the group with the least time so far that has the memory; then the
slowest groups of one rank trade a sample each with the fastest. Groups lie sorted by time and are
served in batches, as in `loads.greedy`; one found without room waits until samples are small
enough.

    τ ┈┈┈┈┈┈┈┈┈┈┈┈┈┈┈┈┈┈┈┈┈┈┈┈┈┈┈
      ░░░░░░░░░░░░░  ░░ ░░ ▒▒ ▓▓      ░ short samples   █ a long one over 5 ranks
      █████████████  ▓▓ ▒▒ ▒▒ ▓▓

Shapes: n samples, `sizes` int64[n] in tokens, falling; G groups. A group's key is `time_s` −
`spare_s`: the seconds by which groups are compared.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dataservice.planning.context.seconds import fixed_seconds, work_seconds
from dataservice.planning.context.units import Setting, degree_seconds
from dataservice.planning.kernels.compile import kernel, leaf
from dataservice.planning.kernels.integers import padded_length
from dataservice.planning.kernels.sort import heap_sift_down, heap_sift_up
from dataservice.planning.loads.greedy import sort_rising


class Groups(NamedTuple):
    """G groups being filled: `degree` int64, padded `tokens` int64, `squares` float64 (Σs² of the
    padded samples) and `time_s` float64, of each [G]; `spare_s` float64[G] is how far it is let run
    beyond the lower level."""

    degree: NDArray[np.int64]
    tokens: NDArray[np.int64]
    squares: NDArray[np.float64]
    time_s: NDArray[np.float64]
    spare_s: NDArray[np.float64]


@leaf
def put(size: int, group: int, groups: Groups, setting: Setting) -> None:
    """One more sample of `size` tokens in the group; memory is not looked at."""
    taken = padded_length(size, groups.degree[group])
    groups.tokens[group] += taken
    groups.squares[group] += float(taken) * float(taken)
    _time(group, groups, setting)


@leaf
def _time(group: int, groups: Groups, setting: Setting) -> None:
    """The group's seconds from its sums."""
    groups.time_s[group] = degree_seconds(
        groups.tokens[group], groups.squares[group], groups.degree[group], setting
    )


@kernel
def put_all(
    sizes: NDArray[np.int64], group_of: NDArray[np.int32], groups: Groups, setting: Setting
) -> None:
    """Each sample sizes[i] into group_of[i]: both [samples], none of them −1."""
    for place in range(sizes.size):
        put(sizes[place], group_of[place], groups, setting)


@kernel
def fill(
    sizes: NDArray[np.int64], start: int, groups: Groups, setting: Setting
) -> NDArray[np.int32]:
    """Group of each of the samples sizes[start:], which fall: int32[n − start]; −1 from the first
    that finds no memory."""
    count = groups.degree.size
    group_of = np.full(sizes.size - start, -1, np.int32)  # int32[n − start]
    # Every group is either open, among the first `open_groups` by rising key, or waits.
    keys = groups.time_s - groups.spare_s  # float64[G], seconds
    ids = np.arange(count)  # int64[G]: group of each key
    sort_rising(keys, ids)
    open_groups = count
    back_keys = np.empty(count)  # float64[G]: groups of this batch that are open after it
    back_ids = np.empty(count, np.int64)  # int64[G]
    wait_keys = np.empty(count)  # float64[G]: a min-heap of −room in tokens
    wait_ids = np.empty(count, np.int64)  # int64[G]
    waiting = 0
    at = start
    while at < sizes.size:
        back = 0
        # Afterwards no waiting group has room for this sample, the longest of the rest.
        while waiting > 0 and -wait_keys[0] >= sizes[at]:
            back_ids[back] = wait_ids[0]
            back_keys[back] = groups.time_s[wait_ids[0]] - groups.spare_s[wait_ids[0]]
            back += 1
            waiting -= 1
            wait_keys[0], wait_ids[0] = wait_keys[waiting], wait_ids[waiting]
            heap_sift_down(wait_keys, wait_ids, waiting, 0)
        least_after = np.inf
        for k in range(back):
            least_after = min(least_after, back_keys[k])
        # Up to the least key that came back, the sorted keys tell which group is the fastest.
        looked = 0
        while at < sizes.size and looked < open_groups and keys[looked] <= least_after:
            group = ids[looked]
            room = setting.memory_tokens * groups.degree[group] - groups.tokens[group]
            looked += 1
            if room < padded_length(sizes[at], groups.degree[group]):
                if groups.degree[group] > 1:  # only whole chunks of padding count
                    room -= room % (2 * groups.degree[group])
                wait_keys[waiting] = -float(room)
                wait_ids[waiting] = group
                heap_sift_up(wait_keys, wait_ids, waiting)
                waiting += 1
                continue
            put(sizes[at], group, groups, setting)
            group_of[at - start] = group
            back_keys[back] = groups.time_s[group] - groups.spare_s[group]
            back_ids[back] = group
            least_after = min(least_after, back_keys[back])
            back += 1
            at += 1
        if back == 0 and looked == open_groups:
            return group_of  # all groups wait
        sort_rising(back_keys[:back], back_ids[:back])
        open_groups = _merge(keys, ids, looked, open_groups, back_keys[:back], back_ids[:back])
    return group_of


@leaf
def _merge(
    keys: NDArray[np.float64],
    ids: NDArray[np.int64],
    looked: int,
    size: int,
    back_keys: NDArray[np.float64],
    back_ids: NDArray[np.int64],
) -> int:
    """Merge the sorted `back` with keys[looked:size], from the front on; returns how many remain.

    Groups that wait have left a gap, and reopened ones may need more room than there is. `keys` and
    `ids` [G], `back_keys` and `back_ids` [back]; afterwards keys[:returned] rise.
    """
    total = size - looked + back_keys.size
    if back_keys.size > looked:  # make room at the end of the run that stays
        shift = back_keys.size - looked
        for k in range(size - 1, looked - 1, -1):
            keys[k + shift] = keys[k]
            ids[k + shift] = ids[k]
        looked += shift
        size += shift
    # keys[:looked] are free, at least as many as come back: writing never passes reading.
    taken = 0
    at = 0
    while taken < back_keys.size:
        if looked < size and keys[looked] < back_keys[taken]:
            keys[at] = keys[looked]
            ids[at] = ids[looked]
            looked += 1
        else:
            keys[at] = back_keys[taken]
            ids[at] = back_ids[taken]
            taken += 1
        at += 1
    if at < looked:
        for k in range(looked, size):
            keys[at] = keys[k]
            ids[at] = ids[k]
            at += 1
    return total


@kernel
def list_members(
    group_of: NDArray[np.int32], groups: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Places in `group_of` int32[samples] of each group's samples, rising, end to end
    int64[samples], and offsets int64[G + 1]. Every sample must have a group."""
    begins = np.zeros(groups + 1, np.int64)  # int64[G + 1]: counts, then their prefix sums
    for place in range(group_of.size):
        begins[group_of[place] + 1] += 1
    for group in range(groups):
        begins[group + 1] += begins[group]
    ends = begins[:-1].copy()  # int64[G]: where the next member of each is written
    members = np.empty(group_of.size, np.int64)  # int64[samples]
    for place in range(group_of.size):
        members[ends[group_of[place]]] = place
        ends[group_of[place]] += 1
    return members, begins


@kernel
def trade(
    sizes: NDArray[np.int64],
    members: NDArray[np.int64],
    begins: NDArray[np.int64],
    single: NDArray[np.int64],
    rounds: int,
    enough: float,
    groups: Groups,
    setting: Setting,
) -> None:
    """Level the groups `single` of one rank: in each round the k-th slowest and the k-th fastest
    exchange the samples whose difference comes nearest to half of theirs. O(n) a round.

    Ends when the slowest is within `enough` times the mean. Group g holds the samples
    members[begins[g]:begins[g+1]], rising places; `single` int64[groups of one rank].
    """
    keys = np.empty(single.size)  # float64[single], seconds
    for _ in range(rounds):
        for k in range(single.size):
            keys[k] = groups.time_s[single[k]] - groups.spare_s[single[k]]
        if single.size < 2 or keys.max() <= enough * keys.mean():
            return
        ids = single.copy()  # int64[single]: group of each key once both are sorted
        sort_rising(keys, ids)
        for k in range(ids.size // 2):
            slow, fast = ids[ids.size - 1 - k], ids[k]
            half_s = (keys[ids.size - 1 - k] - keys[k]) / 2
            # Two groups that are nearly level are left as they are.
            if half_s > 0.25 * (enough - 1.0) * keys[k]:
                _exchange(sizes, members, begins, slow, fast, half_s, groups, setting)


@leaf
def _exchange(
    sizes: NDArray[np.int64],
    members: NDArray[np.int64],
    begins: NDArray[np.int64],
    slow: int,
    fast: int,
    half_s: float,
    groups: Groups,
    setting: Setting,
) -> None:
    """Swap the one sample of `slow` and one of `fast` by which seconds nearest to `half_s` change
    sides, if any swap helps and `fast` has the memory. Arrays as in `trade`. O(members of both)."""
    cost = setting.coefficients
    nearest, best_s = -1, half_s * (1 - 1e-9)
    other = -1
    j = begins[fast]
    # Both lists fall, so the partner for a smaller sample lies further on.
    for i in range(begins[slow], begins[slow + 1]):
        own = float(sizes[members[i]])
        own_s = work_seconds(own, own * own, cost)
        while j < begins[fast + 1]:
            its = float(sizes[members[j]])
            gain_s = own_s - work_seconds(its, its * its, cost)
            if abs(gain_s - half_s) < best_s:
                nearest, other, best_s = i, j, abs(gain_s - half_s)
            if gain_s >= half_s:
                break
            j += 1
        if j > begins[fast]:
            j -= 1  # for the next i, the one before may be the nearest from below
    if nearest < 0:
        return
    # Tokens. `nearest` and `other` are places in `members`; `slow` has the memory, as it gets less.
    given, taken = sizes[members[nearest]], sizes[members[other]]
    if groups.tokens[fast] + given - taken > setting.memory_tokens:
        return
    members[nearest], members[other] = members[other], members[nearest]
    _settle(members, nearest, begins[slow], begins[slow + 1])
    _settle(members, other, begins[fast], begins[fast + 1])
    for group, tokens, square in (
        (slow, taken - given, float(taken) * float(taken) - float(given) * float(given)),
        (fast, given - taken, float(given) * float(given) - float(taken) * float(taken)),
    ):
        groups.tokens[group] += tokens
        groups.squares[group] += square
        work_s = work_seconds(float(groups.tokens[group]), groups.squares[group], cost)
        groups.time_s[group] = fixed_seconds(cost) + work_s


@leaf
def _settle(members: NDArray[np.int64], at: int, begin: int, end: int) -> None:
    """Move the changed place to where members[begin:end] rise again."""
    while at > begin and members[at - 1] > members[at]:
        members[at - 1], members[at] = members[at], members[at - 1]
        at -= 1
    while at + 1 < end and members[at + 1] < members[at]:
        members[at + 1], members[at] = members[at], members[at + 1]
        at += 1
