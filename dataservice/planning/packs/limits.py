"""Choosing what a pack may hold: by OmniBal's statistics, or by search.

The limits decide quality far more than the packer. If text and vision are limited in just the
ratio of their means, each stops the other early and most packs end half full; if one limit has
some slack, the other binds nearly always and packs come out alike. How much slack is best depends
on the spread of the data, so the search packs a sample of it under each candidate and looks.

    memory caps text      text is to bind: vision has the slack       fewest packs, evenly costly
    no cap                vision is to bind: text has the slack       packs as full as their limits
"""

from collections.abc import Iterator
from dataclasses import asdict
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dataservice.core.errors import PlanningError
from dataservice.core.plan_options import IsfLimits, algorithm_named
from dataservice.planning.loads.problem import dist_ratio
from dataservice.planning.packs.isf import pack_isf
from dataservice.planning.packs.packing import check_limit, check_pair
from dataservice.planning.packs.wave_assignment import assign_packs_to_waves

LimitMethod = Literal["search", "paper"]
# Whether a search goes on from the paper's limits.
METHODS: dict[LimitMethod, bool] = {"search": True, "paper": False}

_SAMPLES = 12_288
_TEXT_SLACKS = (1.0, 1.1, 1.15, 1.18, 1.21, 1.24, 1.27, 1.3, 1.4, 1.5)
_VISION_SLACKS = (1.0, 1.03, 1.06, 1.08, 1.1, 1.12, 1.15, 1.2, 1.25, 1.3, 1.4, 1.5)
_NEAR_CAP_TOKENS = (128, 32, 16)  # below a cap that is to be reached
_VISION_CANDIDATES = 8
_MINIMUM_SHARES = (0.99, 0.98, 0.96)  # of a limit, where lengths are too fine to hit it exactly
_WAVES = 8
# What a candidate is measured against; all three met is a score of at most 1.
_GOAL_EXCESS = 0.008
_GOAL_TEXT = 0.03
_GOAL_VISION = 0.02
_NEAR_FEWEST = 1.001  # among candidates with so nearly the fewest packs, the most even wins
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
    candidate. With a cap on text it takes the one with the fewest packs among those whose Dist
    ratios, in waves of up to 16 replicas, are within 3 % of text and 2 % of vision or no worse than
    the paper's, so it never makes more packs than the paper's rule does there. Without a cap the
    one best in the worst of three: those two ratios, and packs over the certificate (0.8 %).
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
    # Evenly spaced, so that no part of a sorted or grouped data set is left out.
    chosen = np.arange(0, text.size, max(1, text.size // _SAMPLES))[:_SAMPLES]
    if cap_text is not None:
        return _fewest_packs(text[chosen], vision[chosen], paper, top_text, top_vision)
    # Without a cap the paper's scale is an anchor, not a wall.
    share = float(text.sum()) / max(float(vision.sum()), 1.0)
    wall_text = int(max(1.25 * top_text, _TEXT_SLACKS[-1] * share * paper.max_vision))
    candidates = _candidates(text, vision, paper, wall_text, top_vision)
    scores = [_tried(text[chosen], vision[chosen], limits).worst for limits in candidates]
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


def _fewest_packs(
    text: NDArray[np.int64],
    vision: NDArray[np.int64],
    paper: IsfLimits,
    cap_text: int,
    cap_vision: int | None,
) -> IsfLimits:
    """Of limits that fill the cap on text, with slack in vision or, where that is capped, in text:
    those with the fewest packs, as even as the goals ask or as the paper's."""
    candidates = [*_at_the_cap(vision, paper, cap_text, cap_vision)]
    if cap_vision is not None:
        candidates += _candidates(text, vision, paper, cap_text, cap_vision)
    tried = [(limits, _tried(text, vision, limits)) for limits in (paper, *candidates)]
    _, by_paper = tried[0]
    most = max(by_paper.text_ratio, _GOAL_TEXT), max(by_paper.vision_ratio, _GOAL_VISION)
    even = [
        (limits, found)
        for limits, found in tried
        if found.text_ratio <= most[0] and found.vision_ratio <= most[1]
    ]
    fewest = min(found.packs for _, found in even)
    near = [pair for pair in even if pair[1].packs <= min(fewest * _NEAR_FEWEST, by_paper.packs)]
    limits, _ = min(near, key=lambda pair: pair[1].uneven)
    return limits


def _at_the_cap(
    vision: NDArray[np.int64], paper: IsfLimits, cap_text: int, cap_vision: int | None
) -> Iterator[IsfLimits]:
    """Packs that reach the cap on text, under growing limits on vision."""
    grain = _grain(vision)
    for slack in _VISION_SLACKS:
        max_vision = max(int(slack * paper.max_vision) // grain * grain, int(vision.max()))
        if cap_vision is not None and max_vision > cap_vision:
            return
        for near in _NEAR_CAP_TOKENS:
            yield IsfLimits(
                max_text=cap_text,
                max_vision=max_vision,
                min_text=max(cap_text - near, 1),
                min_vision=max_vision,
            )


class _Tried(NamedTuple):
    """What limits make of a sample: packs, how many more than their certificate as a share, and the
    Dist ratios of text and vision in waves."""

    packs: int
    excess: float
    text_ratio: float
    vision_ratio: float

    @property
    def uneven(self) -> float:
        """The larger Dist ratio, as a multiple of its goal."""
        return max(self.text_ratio / _GOAL_TEXT, self.vision_ratio / _GOAL_VISION)

    @property
    def worst(self) -> float:
        """The same, or the excess of packs."""
        return max(self.excess / _GOAL_EXCESS, self.uneven)


def _tried(text: NDArray[np.int64], vision: NDArray[np.int64], limits: IsfLimits) -> _Tried:
    packing = pack_isf(text, vision, **asdict(limits))
    excess = packing.packs / packing.lower_bound - 1.0
    replicas = min(max(packing.packs // _WAVES, 1), 16)
    # Early packs are fuller than late ones, and a step has its share of both: each of k steps takes
    # every k-th pack.
    steps = max(packing.packs // (replicas * _WAVES), 1)
    ratios = []
    for step in range(steps):
        mine = np.arange(step, packing.packs, steps)
        mine = mine[: mine.size // replicas * replicas]
        tokens = np.stack((packing.text_tokens[mine], packing.vision_tokens[mine]), axis=1)
        costs = tokens / np.maximum(tokens.mean(axis=0), 1.0)
        order = np.argsort(assign_packs_to_waves(costs, replicas=replicas), kind="stable")
        in_waves = tokens[order].reshape(-1, replicas, 2)
        ratios.append([dist_ratio(in_waves[:, :, 0]), dist_ratio(in_waves[:, :, 1])])
    text_ratio, vision_ratio = np.mean(ratios, axis=0)
    return _Tried(packing.packs, excess, float(text_ratio), float(vision_ratio))
