"""What trainers do without a planner, through the same interface: fixed counts of samples.

Batches of these are padded, not packed, so `pad_ratio(lengths, packing.pack_of)` is what they
waste. They know no limits: every pack counts as satisfied.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dataservice.core.errors import PlanningError
from dataservice.planning.packs.packing import Packing, check_pair


def pack_random(
    text_tokens: ArrayLike, vision_tokens: ArrayLike, *, samples_per_pack: int
) -> Packing:
    """Consecutive samples, `samples_per_pack` a pack, in the order given (already shuffled by the
    mixture). Raises PlanningError on bad input. O(n)."""
    text, vision = check_pair(text_tokens, vision_tokens)
    _check_count(samples_per_pack, "samples_per_pack")
    return _fixed_count(np.arange(text.size), text, vision, samples_per_pack)


def pack_length_grouped(
    text_tokens: ArrayLike,
    vision_tokens: ArrayLike,
    *,
    samples_per_pack: int,
    packs_per_megabatch: int = 50,
) -> Packing:
    """Sort by text, then vision length inside megabatches, and cut those into fixed counts, as
    length-grouped samplers do. Raises PlanningError on bad input. O(n log n)."""
    text, vision = check_pair(text_tokens, vision_tokens)
    _check_count(samples_per_pack, "samples_per_pack")
    _check_count(packs_per_megabatch, "packs_per_megabatch")
    megabatch = np.arange(text.size) // (samples_per_pack * packs_per_megabatch)
    order = np.lexsort((-vision, -text, megabatch))
    return _fixed_count(order, text, vision, samples_per_pack)


def _check_count(value: int, name: str) -> None:
    if value < 1:
        raise PlanningError(f"{name} is {value}; give at least 1")


def _fixed_count(
    order: NDArray[np.int64], text: NDArray[np.int64], vision: NDArray[np.int64], count: int
) -> Packing:
    packs = -(-order.size // count)
    pack_of = np.empty(order.size, np.int32)
    pack_of[order] = np.arange(order.size) // count
    totals = [np.zeros(packs, np.int64), np.zeros(packs, np.int64)]
    np.add.at(totals[0], pack_of, text)
    np.add.at(totals[1], pack_of, vision)
    return Packing(
        pack_of=pack_of,
        text_tokens=totals[0],
        vision_tokens=totals[1],
        satisfied=np.ones(packs, np.bool_),
        oversize=np.zeros(packs, np.bool_),
        lower_bound=packs,
    )
