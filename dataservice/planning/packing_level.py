"""Evening out the text of packs that already agree in vision.

Filling by vision leaves text to chance. Swapping samples of the same vision length changes no
pack's vision, so the heaviest pack in text trades with the lightest, the next with the next, and
the spread of text falls round by round:

    text   5.1k ──┐ ┌── 3.2k            a 1-tile sample with a long answer against
    tiles  9      └─┘   9               a 1-tile sample with a short one
"""

import numba
import numpy as np
from numpy.typing import NDArray

from dataservice.planning.kernel_sort import argsort_descending, group_stable

_ROUNDS = 10
_PAIRS_LOOKED_AT = 256  # swaps looked at between two packs
_ENOUGH = 0.002  # mean distance from the mean text of a pack at which to stop


@numba.njit(cache=True, nogil=True)
def _trade_mirrored(
    falling: NDArray[np.int64],
    totals: NDArray[np.float64],
    members: NDArray[np.int64],
    begins: NDArray[np.int64],
    text: NDArray[np.int64],
    vision: NDArray[np.int64],
    pack_of: NDArray[np.int64],
) -> int:
    """One round: k-th heaviest with k-th lightest, the best single swap. Returns swaps made."""
    swaps = 0
    for k in range(falling.size // 2):
        a = falling[k]
        b = falling[falling.size - 1 - k]
        wanted = 0.5 * (totals[a] - totals[b])
        best = wanted
        best_i = -1
        best_j = -1
        looked = 0
        for i in range(begins[a], begins[a + 1]):
            x = members[i]
            for j in range(begins[b], begins[b + 1]):
                y = members[j]
                if vision[x] == vision[y]:
                    distance = abs(text[x] - text[y] - wanted)
                    if distance < best:
                        best, best_i, best_j = distance, i, j
            looked += begins[b + 1] - begins[b]
            if looked >= _PAIRS_LOOKED_AT:
                break
        if best_i < 0:
            continue
        x, y = members[best_i], members[best_j]
        members[best_i], members[best_j] = y, x
        pack_of[x], pack_of[y] = b, a
        totals[a] -= text[x] - text[y]
        totals[b] += text[x] - text[y]
        swaps += 1
    return swaps


def level_text(
    pack_of: NDArray[np.int64],
    text: NDArray[np.int64],
    vision: NDArray[np.int64],
    eligible: NDArray[np.bool_],
) -> None:
    """Even out, in place, the text totals of the packs `eligible` bool[packs].

    `pack_of`, `text`, `vision` int64[n]. No pack's vision changes and none exceeds the largest
    text total there was. O(rounds · n).
    """
    packs = np.flatnonzero(eligible)
    if packs.size < 2:
        return
    members, begins = group_stable(pack_of, np.arange(pack_of.size), eligible.size)
    totals = np.bincount(pack_of, weights=text, minlength=eligible.size)
    for _ in range(_ROUNDS):
        chosen = totals[packs]
        if np.abs(chosen - chosen.mean()).mean() <= _ENOUGH * chosen.mean():
            return
        falling = packs[argsort_descending(chosen)]
        if _trade_mirrored(falling, totals, members, begins, text, vision, pack_of) == 0:
            return
