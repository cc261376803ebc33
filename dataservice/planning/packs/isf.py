"""OmniBal's iterative sampling and filtering (Alg. 1), completed.

Each round shuffles what is left, fills packs one after the other until the next sample would break
a limit, and keeps the packs that came close enough to one; the rest is drawn again:

    shuffle → | a b c | d e | f g h i | j (open) |  → keep full ones → shuffle the rest → …

What the paper leaves open is settled here: the last, open group is judged like any other; a
sample beyond a limit becomes a pack of its own, marked oversize; what is left after the last round
is packed by two-dimensional best-fit decreasing and marked by the same minimum.

Filling by vision leaves text to chance. Exchanging samples of equal vision, one against one or
several small against one large, changes no pack's vision; so the heaviest pack in text trades with
the lightest, the next with the next, and the spread of text falls round by round (`level_text`):

    text 5.1k   tiles 1 1 1 1 1 3 1        three 1-tile samples, each with its own answer,
    text 3.2k   tiles 3 1 5                against one 3-tile sample with a single answer
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dataservice.core.errors import PlanningError
from dataservice.planning.kernels.compile import kernel, leaf
from dataservice.planning.kernels.sort import argsort_descending
from dataservice.planning.packs.bfd import by_falling_need, pack_by_best_fit
from dataservice.planning.packs.packing import Packing, check_limit, check_pair, to_packing

_PAPER_TEXT_SLACK_TOKENS = 128
_LEVEL_ROUNDS = 3
_MOST_MEMBERS = 64  # packs of more samples are even enough by the law of large numbers
_LEVEL_ENOUGH = 0.001  # mean distance from the mean text of a pack at which to stop


@kernel
def _shuffle(left: NDArray[np.int64], state: np.uint64) -> np.uint64:
    """Fisher–Yates in place with splitmix64 (Steele 2014); returns the generator's next state.

    numpy may change its streams between releases, and then a recovered plan would differ.
    """
    for i in range(left.size - 1, 0, -1):
        state += np.uint64(0x9E3779B97F4A7C15)
        bits = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        bits ^= bits >> np.uint64(31)
        j = np.int64(((bits >> np.uint64(32)) * np.uint64(i + 1)) >> np.uint64(32))
        left[i], left[j] = left[j], left[i]
    return state


@leaf
def _sample_and_filter(
    left: NDArray[np.int64],
    text: NDArray[np.int64],
    vision: NDArray[np.int64],
    max_text: int,
    max_vision: int,
    min_text: int,
    min_vision: int,
    first_pack: int,
    pack_of: NDArray[np.int64],
) -> tuple[int, int]:
    """One round over the samples `left`, in order. Samples kept back are moved to its front.

    Returns (samples kept back, packs made).
    """
    kept_back = 0
    packs = 0
    begin = 0
    sum_text = 0
    sum_vision = 0
    n = left.size
    for k in range(n + 1):
        if k < n:
            sample = left[k]
            with_text = sum_text + text[sample]
            with_vision = sum_vision + vision[sample]
            if with_text <= max_text and with_vision <= max_vision:
                sum_text = with_text
                sum_vision = with_vision
                continue
        if begin < k and (sum_text >= min_text or sum_vision >= min_vision):
            for m in range(begin, k):
                pack_of[left[m]] = first_pack + packs
            packs += 1
        else:
            for m in range(begin, k):
                left[kept_back] = left[m]
                kept_back += 1
        if k < n:
            begin = k
            sum_text = text[left[k]]
            sum_vision = vision[left[k]]
    return kept_back, packs


def pack_isf(
    text_tokens: ArrayLike,
    vision_tokens: ArrayLike,
    *,
    max_text: int,
    max_vision: int,
    min_text: int | None = None,
    min_vision: int | None = None,
    iterations: int = 10,
    seed: int = 0,
    level: bool = True,
) -> Packing:
    """Pack samples so that packs are alike in both text and vision tokens.

    `text_tokens`, `vision_tokens` [n] lengths. A pack is kept by a round when it holds at least
    `min_text` or at least `min_vision` tokens (by default max_text − 128 and max_vision, the
    paper's). `level` then swaps samples of equal vision between packs that are full in vision, to
    even out their text (not in the paper). Only packs of one oversize sample exceed a limit.
    Packs are numbered kept ones first, then the best-fit ones, then oversize ones. Same input and
    seed, same packs.
    Raises PlanningError on bad input. O(iterations · n).
    """
    text, vision = check_pair(text_tokens, vision_tokens)
    max_text = check_limit(max_text, "max_text", least=1)
    max_vision = check_limit(max_vision, "max_vision", least=0)
    if iterations < 0:
        raise PlanningError(f"iterations is {iterations}; give 0 or more rounds, 10 is usual")
    least_text = max(max_text - _PAPER_TEXT_SLACK_TOKENS, 1) if min_text is None else min_text
    # With no vision allowed, "enough vision" would hold for every pack and mean nothing.
    least_vision = max(max_vision, 1) if min_vision is None else max(min_vision, 1)
    least_text = check_limit(least_text, "min_text", least=0)
    least_vision = int(least_vision)

    fits = (text <= max_text) & (vision <= max_vision)
    left = np.flatnonzero(fits)
    pack_of = np.empty(text.size, np.int64)
    state = np.uint64(seed & 0xFFFFFFFFFFFFFFFF)
    packs = 0
    for _ in range(iterations):
        if left.size == 0:
            break
        state = np.uint64(_shuffle(left, state))
        kept_back, made = _sample_and_filter(
            left, text, vision, max_text, max_vision, least_text, least_vision, packs, pack_of
        )
        packs += made
        left = left[:kept_back]
    order = left[by_falling_need(text[left], vision[left], max_text, max_vision)]
    packs += pack_by_best_fit(order, text, vision, max_text, max_vision, packs, pack_of)
    alone = np.flatnonzero(~fits)
    pack_of[alone] = packs + np.arange(alone.size)
    if level:
        held = np.bincount(pack_of, weights=vision, minlength=packs + alone.size)
        by_vision = (held >= least_vision) & (held <= max_vision)
        by_vision[packs:] = False
        level_text(pack_of, text, vision, by_vision)
    return to_packing(
        pack_of,
        text,
        vision,
        max_text=max_text,
        max_vision=max_vision,
        min_text=least_text,
        min_vision=least_vision,
    )


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
    for _ in range(_LEVEL_ROUNDS):
        chosen = totals[packs]
        if np.abs(chosen - chosen.mean()).mean() <= _LEVEL_ENOUGH * chosen.mean():
            return
        falling = packs[argsort_descending(chosen)]
        if _trade_mirrored(falling, totals, head, next_of, text, vision, pack_of) == 0:
            return
