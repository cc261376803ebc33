"""Choosing what a pack may hold: by OmniBal's statistics, or by search.

The limits decide quality far more than the packer. If text and vision are limited in just the
ratio of their means, each stops the other early and most packs end half full; if one limit has
some slack, the other binds nearly always and packs come out alike. How much slack is best depends
on the spread of the data, so the search packs a sample of it under each candidate and looks.
"""

from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dataservice.core.errors import PlanningError
from dataservice.core.plan_options import IsfLimits
from dataservice.planning.metrics import dist_ratio
from dataservice.planning.packs.isf import pack_isf
from dataservice.planning.packs.packing import check_limit, check_pair
from dataservice.planning.packs.wave_assignment import assign_packs_to_waves
from dataservice.planning.registry import algorithm_named

LimitMethod = Literal["search", "paper"]
# Whether a search goes on from the paper's limits.
METHODS: dict[LimitMethod, bool] = {"search": True, "paper": False}

_SAMPLES = 12_288
_TEXT_SLACKS = (1.0, 1.1, 1.15, 1.18, 1.21, 1.24, 1.27, 1.3, 1.4, 1.5)
_VISION_CANDIDATES = 8
_MINIMUM_SHARES = (0.99, 0.98, 0.96)  # of a limit, where lengths are too fine to hit it exactly
_WAVES = 8
# What a candidate is measured against; all three met is a score of at most 1.
_GOAL_EXCESS = 0.008
_GOAL_TEXT = 0.03
_GOAL_VISION = 0.02
_PAPER_TEXT_SLACK_TOKENS = 128


def isf_limits(
    text_tokens: ArrayLike,
    vision_tokens: ArrayLike,
    *,
    method: LimitMethod = "search",
    cap_text: int | None = None,
    cap_vision: int | None = None,
) -> IsfLimits:
    """Limits for `pack_isf` from the lengths of a data set or a fair sample of it.

    `text_tokens`, `vision_tokens` [n]. `cap_text`, `cap_vision` are what a replica's memory holds;
    no limit exceeds them, and samples beyond them will be oversize. Without caps every sample
    fits. "paper" (OmniBal §5.2): Q_t the longest text, Q_v by the ratio of the totals,
    Q'_v = Q_v, Q'_t = Q_t − 128. "search": packs at most 12,288 of the samples under each
    candidate and takes the one best in the worst of three: packs over the certificate (goal 0.8 %),
    Dist ratio of text (3 %) and of vision (2 %) in waves of up to 16 replicas.
    Raises PlanningError on bad input. Under a second; once a job, not once a step.
    """
    text, vision = check_pair(text_tokens, vision_tokens)
    searched = algorithm_named(METHODS, method, "method")
    if text.size == 0 or text.max() == 0:
        raise PlanningError(
            f"{text.size} samples hold no text tokens; give lengths with some text to set limits by"
        )
    top_text = int(text.max()) if cap_text is None else check_limit(cap_text, "cap_text", least=1)
    top_vision = None if cap_vision is None else check_limit(cap_vision, "cap_vision", least=0)
    paper = _paper_limits(text, vision, top_text, top_vision)
    if not searched or paper.max_vision == 0:
        return paper
    fits = (text <= top_text) & (vision <= (paper.max_vision if top_vision is None else top_vision))
    if not bool(fits.any()):
        return paper
    text, vision = text[fits], vision[fits]
    # Without a cap the paper's scale is an anchor, not a wall.
    wall_text = top_text
    if cap_text is None:
        share = float(text.sum()) / max(float(vision.sum()), 1.0)
        wall_text = int(max(1.25 * top_text, _TEXT_SLACKS[-1] * share * paper.max_vision))
    # Evenly spaced, so that no part of a sorted or grouped data set is left out.
    chosen = np.arange(0, text.size, max(1, text.size // _SAMPLES))[:_SAMPLES]
    candidates = _candidates(text, vision, paper, wall_text, top_vision)
    scores = [_score(text[chosen], vision[chosen], limits) for limits in candidates]
    # Candidates come with the largest packs first: among near equals, take the fullest.
    good = min(scores) * 1.05
    return next(limits for limits, score in zip(candidates, scores, strict=True) if score <= good)


def _grain(vision: NDArray[np.int64]) -> int:
    """Greatest common divisor: one tile where images come in tiles, 1 where they do not."""
    return max(int(np.gcd.reduce(vision)), 1)


def _paper_limits(
    text: NDArray[np.int64], vision: NDArray[np.int64], top_text: int, top_vision: int | None
) -> IsfLimits:
    grain = _grain(vision)
    by_ratio = int(top_text * vision.sum() / text.sum()) // grain * grain
    max_vision = max(by_ratio, int(vision.max()))
    if top_vision is not None:
        max_vision = min(max_vision, top_vision)
    return IsfLimits(
        max_text=top_text,
        max_vision=max_vision,
        min_text=max(top_text - _PAPER_TEXT_SLACK_TOKENS, 1),
        min_vision=max_vision,
    )


def _candidates(
    text: NDArray[np.int64],
    vision: NDArray[np.int64],
    paper: IsfLimits,
    wall_text: int,
    wall_vision: int | None,
) -> list[IsfLimits]:
    """Vision limits from the paper's downwards, each with text limits of growing slack."""
    ratio = float(text.sum()) / float(vision.sum())
    grain = _grain(vision)
    least_text, least_vision = int(text.max()), int(vision.max())
    top = paper.max_vision if wall_vision is None else wall_vision
    top = min(top, max(paper.max_vision, least_vision))
    bottom = max(0.6 * top, least_vision)
    steps = np.unique(np.linspace(bottom, top, _VISION_CANDIDATES).astype(np.int64) // grain)
    found = [paper]
    for max_vision in (steps * grain)[::-1].tolist():
        if max_vision < max(least_vision, 1):
            continue
        shares = (1.0,) if grain > 0.02 * max_vision else _MINIMUM_SHARES
        for slack in _TEXT_SLACKS:
            max_text = max(int(slack * ratio * max_vision), least_text)
            if max_text > wall_text:
                continue
            near = max(max_text - _PAPER_TEXT_SLACK_TOKENS, int(0.97 * max_text), 1)
            found.extend(
                IsfLimits(
                    max_text=max_text,
                    max_vision=max_vision,
                    min_text=near if share == 1.0 else max(int(share * max_text), 1),
                    min_vision=int(share * max_vision),
                )
                for share in shares
            )
    return found


def _score(text: NDArray[np.int64], vision: NDArray[np.int64], limits: IsfLimits) -> float:
    """The worst of excess packs and the Dist ratios in waves, each as a multiple of its goal."""
    packing = pack_isf(
        text,
        vision,
        max_text=limits.max_text,
        max_vision=limits.max_vision,
        min_text=limits.min_text,
        min_vision=limits.min_vision,
    )
    excess = packing.packs / packing.lower_bound - 1.0
    replicas = min(max(packing.packs // _WAVES, 1), 16)
    window = packing.packs // replicas * replicas
    # The packs of a step come in no order: take windows of as many waves as a step has.
    ratios = []
    for begin in range(0, window, replicas * _WAVES):
        stop = min(begin + replicas * _WAVES, window)
        tokens = np.stack(
            (packing.text_tokens[begin:stop], packing.vision_tokens[begin:stop]), axis=1
        )
        costs = tokens / np.maximum(tokens.mean(axis=0), 1.0)
        order = np.argsort(assign_packs_to_waves(costs, replicas=replicas), kind="stable")
        in_waves = tokens[order].reshape(-1, replicas, 2)
        ratios.append([dist_ratio(in_waves[:, :, 0]), dist_ratio(in_waves[:, :, 1])])
    text_ratio, vision_ratio = np.mean(ratios, axis=0)
    worst = max(excess / _GOAL_EXCESS, text_ratio / _GOAL_TEXT, vision_ratio / _GOAL_VISION)
    return float(worst)
