"""The nouns of packing: checked lengths, the answer and its certificate."""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dataservice.core.errors import PlanningError
from dataservice.planning.invariants import check_assignment, require


@dataclass(frozen=True, kw_only=True, slots=True)
class Packing:
    """Samples gathered into packs; every sample is in exactly one.

    `pack_of` int32[n] pack of each sample; `text_tokens`, `vision_tokens` int64[packs] totals;
    `satisfied` bool[packs] within both limits and up to a minimum; `oversize` bool[packs] one
    sample that alone exceeds a limit, handed on as a long item (never satisfied);
    `lower_bound` no packing within the limits has fewer packs.
    """

    pack_of: NDArray[np.int32]
    text_tokens: NDArray[np.int64]
    vision_tokens: NDArray[np.int64]
    satisfied: NDArray[np.bool_]
    oversize: NDArray[np.bool_]
    lower_bound: int

    @property
    def packs(self) -> int:
        """Number of packs."""
        return int(self.satisfied.size)


def as_lengths(values: ArrayLike, name: str) -> NDArray[np.int64]:
    """`values` as int64[n]. Raises PlanningError unless one-dimensional, whole and ≥ 0."""
    given = np.asarray(values)
    if given.ndim != 1:
        raise PlanningError(f"{name} has {given.ndim} axes; give one length a sample")
    if given.dtype.kind not in "iu" and given.size:
        if given.dtype.kind != "f" or not bool((np.floor(given) == given).all()):
            raise PlanningError(f"{name} must hold whole token counts, got {given.dtype} values")
        if not bool(np.isfinite(given).all()):
            raise PlanningError(f"{name} holds an infinite length; mend the index")
    # Writable: kernels are compiled for that, and a read-only array would compile them anew.
    lengths = np.require(given, np.int64, ("C", "W"))
    if lengths.size and lengths.min() < 0:
        at = int(lengths.argmin())
        raise PlanningError(
            f"{name}[{at}] is {lengths[at]}; lengths are at least 0, mend the index"
        )
    return lengths


def check_pair(
    text_tokens: ArrayLike, vision_tokens: ArrayLike
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Both lengths as int64[n]. Raises PlanningError on bad values or unequal sizes."""
    text = as_lengths(text_tokens, "text_tokens")
    vision = as_lengths(vision_tokens, "vision_tokens")
    if text.size != vision.size:
        raise PlanningError(
            f"text_tokens has {text.size} samples and vision_tokens {vision.size}; "
            "give both lengths of every sample, 0 where it has none"
        )
    return text, vision


def check_limit(value: int, name: str, *, least: int) -> int:
    """Raises PlanningError if a limit is below `least`."""
    if value < least:
        raise PlanningError(f"{name} is {value}; it must be at least {least} tokens")
    return int(value)


def certify_packs(
    text: NDArray[np.int64], vision: NDArray[np.int64], max_text: int, max_vision: int
) -> int:
    """⌈max(ΣT/Q_t, ΣV/Q_v)⌉ over samples that fit, plus one pack for each that does not. O(n)."""
    fits = (text <= max_text) & (vision <= max_vision)
    by_text = math.ceil(int(text[fits].sum()) / max_text)
    by_vision = math.ceil(int(vision[fits].sum()) / max_vision) if max_vision else 0
    some = 1 if bool(fits.any()) else 0
    return max(by_text, by_vision, some) + int(fits.size - np.count_nonzero(fits))


def to_packing(
    pack_of: NDArray[np.int64],
    text: NDArray[np.int64],
    vision: NDArray[np.int64],
    *,
    max_text: int,
    max_vision: int,
    min_text: int,
    min_vision: int,
) -> Packing:
    """Total the packs and mark which ones meet the limits. O(n)."""
    packs = int(pack_of.max()) + 1 if pack_of.size else 0
    check_assignment(pack_of, packs, "pack of a sample")
    total_text = np.zeros(packs, np.int64)
    total_vision = np.zeros(packs, np.int64)
    np.add.at(total_text, pack_of, text)
    np.add.at(total_vision, pack_of, vision)
    over = (total_text > max_text) | (total_vision > max_vision)
    count = np.bincount(pack_of, minlength=packs)
    require(bool((count > 0).all()), "a pack has no samples")
    require(bool((count[over] == 1).all()), "a pack of several samples exceeds its limits")
    enough = (total_text >= min_text) | (total_vision >= min_vision)
    return Packing(
        pack_of=pack_of.astype(np.int32),
        text_tokens=total_text,
        vision_tokens=total_vision,
        satisfied=enough & ~over,
        oversize=over,
        lower_bound=certify_packs(text, vision, max_text, max_vision),
    )
