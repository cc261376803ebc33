"""Evening out the text of packs that already agree in vision.

Filling by vision leaves text to chance. Exchanging samples of equal vision, one against one or
several small against one large, changes no pack's vision; so the heaviest pack in text trades with
the lightest, the next with the next, and the spread of text falls round by round:

    text 5.1k   tiles 1 1 1 1 1 3 1        three 1-tile samples, each with its own answer,
    text 3.2k   tiles 3 1 5                against one 3-tile sample with a single answer
"""

import numpy as np
from numpy.typing import NDArray

from dataservice.planning.kernels.compile import kernel, leaf
from dataservice.planning.kernels.sort import argsort_descending

_ROUNDS = 3
_MOST_MEMBERS = 64  # packs of more samples are even enough by the law of large numbers
_ENOUGH = 0.001  # mean distance from the mean text of a pack at which to stop


@leaf
def _gather_sorted(
    pack: int,
    head: NDArray[np.int64],
    next_of: NDArray[np.int64],
    text: NDArray[np.int64],
    vision: NDArray[np.int64],
    out: NDArray[np.int64],
) -> int:
    """Members of a pack by rising vision, then text; returns how many, at most out.size."""
    count = 0
    sample = head[pack]
    while sample >= 0 and count < out.size:
        at = count
        while at > 0 and (
            vision[out[at - 1]] > vision[sample]
            or (vision[out[at - 1]] == vision[sample] and text[out[at - 1]] > text[sample])
        ):
            out[at] = out[at - 1]
            at -= 1
        out[at] = sample
        count += 1
        sample = next_of[sample]
    return count


@leaf
def _best_group(
    many: NDArray[np.int64],
    one: NDArray[np.int64],
    wanted: float,
    text: NDArray[np.int64],
    vision: NDArray[np.int64],
) -> tuple[float, int, int, int]:
    """k neighbours of one vision length in `many` against one sample of k times that in `one`,
    so that their text differs by `wanted`: (distance, first, k, place in `one`)."""
    best = np.inf
    best_first, best_k, best_one = -1, 0, -1
    begin = 0
    while begin < many.size:
        unit = vision[many[begin]]
        end = begin + 1
        while end < many.size and vision[many[end]] == unit:
            end += 1
        for place in range(one.size):
            need = vision[one[place]]
            k = 1
            if need != unit:
                if unit == 0 or need % unit or need // unit > end - begin:
                    continue
                k = need // unit
            total = 0
            for m in range(begin, begin + k):
                total += text[many[m]]
            for first in range(begin, end - k + 1):
                distance = abs(total - text[one[place]] - wanted)
                if distance < best:
                    best, best_first, best_k, best_one = distance, first, k, place
                if first + k < end:
                    total += text[many[first + k]] - text[many[first]]
        begin = end
    return best, best_first, best_k, best_one


@leaf
def _relink(
    pack: int,
    other: int,
    mine: NDArray[np.int64],
    theirs: NDArray[np.int64],
    pack_of: NDArray[np.int64],
    head: NDArray[np.int64],
    next_of: NDArray[np.int64],
) -> None:
    """Write the lists of two packs anew from where `pack_of` now puts their members."""
    head[pack] = -1
    head[other] = -1
    for members in (mine, theirs):
        for sample in members:
            next_of[sample] = head[pack_of[sample]]
            head[pack_of[sample]] = sample


@kernel
def _trade_mirrored(
    falling: NDArray[np.int64],
    totals: NDArray[np.float64],
    head: NDArray[np.int64],
    next_of: NDArray[np.int64],
    text: NDArray[np.int64],
    vision: NDArray[np.int64],
    pack_of: NDArray[np.int64],
) -> int:
    """One round: k-th heaviest with k-th lightest, the best exchange. Returns exchanges made."""
    buffer_a = np.empty(_MOST_MEMBERS, np.int64)
    buffer_b = np.empty(_MOST_MEMBERS, np.int64)
    exchanges = 0
    for k in range(falling.size // 2):
        a = falling[k]
        b = falling[falling.size - 1 - k]
        count_a = _gather_sorted(a, head, next_of, text, vision, buffer_a)
        count_b = _gather_sorted(b, head, next_of, text, vision, buffer_b)
        if count_a == _MOST_MEMBERS or count_b == _MOST_MEMBERS:
            continue
        in_a, in_b = buffer_a[:count_a], buffer_b[:count_b]
        wanted = 0.5 * (totals[a] - totals[b])
        give, first_a, size_a, at_b = _best_group(in_a, in_b, wanted, text, vision)
        take, first_b, size_b, at_a = _best_group(in_b, in_a, -wanted, text, vision)
        if min(give, take) >= 0.9 * wanted:
            continue
        if give <= take:
            out_of_a = in_a[first_a : first_a + size_a]
            out_of_b = in_b[at_b : at_b + 1]
        else:
            out_of_a = in_a[at_a : at_a + 1]
            out_of_b = in_b[first_b : first_b + size_b]
        net = text[out_of_a].sum() - text[out_of_b].sum()
        pack_of[out_of_a] = b
        pack_of[out_of_b] = a
        totals[a] -= net
        totals[b] += net
        _relink(a, b, in_a, in_b, pack_of, head, next_of)
        exchanges += 1
    return exchanges


@kernel
def _linked_members(
    pack_of: NDArray[np.int64], packs: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    head = np.full(packs, -1)  # int64[packs]: last member of each
    next_of = np.empty(pack_of.size, np.int64)  # int64[n]: members of a pack, as lists
    for sample in range(pack_of.size):
        next_of[sample] = head[pack_of[sample]]
        head[pack_of[sample]] = sample
    return head, next_of


def level_text(
    pack_of: NDArray[np.int64],
    text: NDArray[np.int64],
    vision: NDArray[np.int64],
    eligible: NDArray[np.bool_],
) -> None:
    """Even out, in place, the text totals of the packs `eligible` bool[packs].

    `pack_of`, `text`, `vision` int64[n]. No pack's vision changes and none exceeds the largest
    text total there was. O(rounds · n) for packs of few samples.
    """
    packs = np.flatnonzero(eligible)
    if packs.size < 2:
        return
    head, next_of = _linked_members(pack_of, eligible.size)
    totals: NDArray[np.float64] = np.zeros(eligible.size)
    np.add.at(totals, pack_of, text)
    for _ in range(_ROUNDS):
        chosen = totals[packs]
        if np.abs(chosen - chosen.mean()).mean() <= _ENOUGH * chosen.mean():
            return
        falling = packs[argsort_descending(chosen)]
        if _trade_mirrored(falling, totals, head, next_of, text, vision, pack_of) == 0:
            return
