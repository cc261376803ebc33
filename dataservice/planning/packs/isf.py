"""OmniBal's iterative sampling and filtering (Alg. 1), completed.

Each round shuffles what is left, fills packs one after the other until the next sample would break
a limit, and keeps the packs that came close enough to one; the rest is drawn again:

    shuffle → | a b c | d e | f g h i | j (open) |  → keep full ones → shuffle the rest → …

What the paper leaves open is settled here: the last, open group is judged like any other; a
sample beyond a limit becomes a pack of its own, marked oversize; what is left after the last round
is packed by two-dimensional best-fit decreasing and marked by the same minimum.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dataservice.core.errors import PlanningError
from dataservice.planning.kernels.compile import kernel, leaf
from dataservice.planning.packs.bfd import by_falling_need, pack_by_best_fit
from dataservice.planning.packs.level import level_text
from dataservice.planning.packs.packing import Packing, check_limit, check_pair, to_packing

_PAPER_TEXT_SLACK_TOKENS = 128


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
