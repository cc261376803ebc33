"""Stage 1, pack: which samples go together, or that the group stage decides it."""

from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from dataservice.core.layout import padded_tokens
from dataservice.core.plan import StageReport
from dataservice.core.plan_options import IsfLimits, Pack, PlanOptions, algorithm_named
from dataservice.core.sample import LengthTable, Modality
from dataservice.planning.context.groups import ContextPlan
from dataservice.planning.packs.bfd import best_fit_falling
from dataservice.planning.packs.isf import pack_isf
from dataservice.planning.packs.limits import LimitMethod, isf_limits
from dataservice.planning.packs.padded import pack_padded, padded_sum, padded_to_longest

# The pack of each sample int32[n], or None where the group stage makes packs and groups together;
# and the lengths that are paid for, int64[n].
Packed = tuple[NDArray[np.int32] | None, NDArray[np.int64]]
PackAlgorithm = Callable[[LengthTable, int, PlanOptions, IsfLimits | None], Packed]


def pack_samples(
    lengths: LengthTable, *, degree: int, options: PlanOptions, limits: IsfLimits | None
) -> Packed:
    """Packs that fill the memory of `degree` replicas, their samples padded for that degree.

    `limits` are those of ISF, by default the paper's for these samples. Raises PlanningError on
    an unknown algorithm.
    """
    pack = algorithm_named(PACKS, options.stages.pack, "plan.pack")
    return pack(lengths, degree, options, limits)


def step_limits(
    lengths: LengthTable, options: PlanOptions, method: LimitMethod = "paper"
) -> IsfLimits:
    """ISF limits within a replica's memory: `search` is worth its tenths of a second once a job."""
    return isf_limits(
        lengths.llm_tokens,
        lengths.encoder_tokens(Modality.VISION),
        method=method,
        cap_text=options.memory_tokens,
    )


def isf_packs(
    lengths: LengthTable, options: PlanOptions, limits: IsfLimits | None
) -> NDArray[np.int32]:
    """The ISF pack of each sample, int32[n]. Limits that were found for more memory than there is
    beside what encoders keep are lowered to it."""
    limits = limits or step_limits(lengths, options)
    lower = max(0, limits.max_text - options.memory_tokens)
    if lower:
        limits = replace(
            limits,
            max_text=limits.max_text - lower,
            min_text=max(0, limits.min_text - lower),
        )
    vision_tokens = lengths.encoder_tokens(Modality.VISION)
    return pack_isf(lengths.llm_tokens, vision_tokens, **asdict(limits)).pack_of


def _left_to_groups(
    lengths: LengthTable, degree: int, options: PlanOptions, limits: IsfLimits | None
) -> Packed:
    return None, padded_tokens(lengths.llm_tokens, degree)


def _isf(
    lengths: LengthTable, degree: int, options: PlanOptions, limits: IsfLimits | None
) -> Packed:
    return isf_packs(lengths, options, limits), padded_tokens(lengths.llm_tokens, degree)


def _bfd(
    lengths: LengthTable, degree: int, options: PlanOptions, limits: IsfLimits | None
) -> Packed:
    tokens = padded_tokens(lengths.llm_tokens, degree)
    room_tokens = options.memory_tokens * degree
    pack_of = best_fit_falling(tokens, np.zeros_like(tokens), room_tokens, 0)
    return pack_of.astype(np.int32), tokens


def _padded(
    lengths: LengthTable,
    degree: int,
    options: PlanOptions,
    limits: IsfLimits | None,
    *,
    by_length: bool,
) -> Packed:
    tokens = padded_tokens(lengths.llm_tokens, degree)
    room_tokens = options.memory_tokens * degree
    pack_of = pack_padded(tokens, max_tokens=room_tokens, by_length=by_length)
    return pack_of, padded_to_longest(tokens, pack_of)


PACKS: dict[Pack, PackAlgorithm] = {
    "auto": _left_to_groups,
    "joint": _left_to_groups,
    "balanced": _left_to_groups,
    "isf": _isf,
    "bfd": _bfd,
    "padded": partial(_padded, by_length=False),
    "padded_by_length": partial(_padded, by_length=True),
}


def pack_report(
    lengths: LengthTable,
    charged: NDArray[np.int64],
    waves: tuple[ContextPlan, ...],
    options: PlanOptions,
) -> StageReport:
    """Tokens that are paid for: padded microbatches in draw order before, packs after."""
    packed = sum(int(wave.padded_tokens.sum()) for wave in waves)
    return StageReport(
        stage="pack",
        algorithm=options.stages.pack,
        unit="tokens",
        before=float(padded_sum(lengths.llm_tokens, options.memory_tokens)),
        after=float(max(packed, int(charged.sum()))),
        lower_bound=float(lengths.llm_tokens.sum(dtype=np.int64)),
    )
