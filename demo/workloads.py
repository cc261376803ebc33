"""Lengths, sizes and counts of samples: published workloads, shrunk to fit a laptop.

Each function draws from one published distribution, divided by a shrink factor, so that four
replicas of 2,048 tokens see the same shape of imbalance as a cluster. The far tail is listed
explicitly: with most seeds, a corpus of 700 samples would miss it.
"""

from bisect import bisect_right
from math import exp, log
from random import Random

IMAGE_SHRINK = 4
TEXT_SHRINK = 6
SPEECH_SHRINK = 10
VIDEO_SHRINK = 2

MIN_IMAGE_SIDE_PX = 28
MAX_IMAGE_SIDE_PX = 448
MAX_DOCUMENT_TOKENS = 1_500
MAX_VIDEO_S = 60.0

# Against a budget of 2,048 tokens a replica: one document needs 4 replicas, four need 3, seven
# need 2, and the rest are merely long. Ordered so that every prefix of four has each kind.
TAIL_DOCUMENT_TOKENS = (
    *(6_700, 4_700, 2_900, 1_900),
    *(5_600, 3_700, 2_500, 1_700),
    *(5_200, 3_400, 2_350, 1_600),
    *(4_400, 3_100, 2_700, 1_400),
    *(1_300, 1_200, 1_100, 1_000, 950),
)
# At 112 px a side and 2 frames/s these cost about 2,600, 1,900 and 1,100 tokens.
TAIL_VIDEO_S = (160.0, 120.0, 70.0)

# LibriSpeech train-clean-360: (share of utterances, seconds); given as quantiles, since it is
# left-skewed.
_SPEECH_QUANTILES_S = (
    *((0.00, 1.3), (0.01, 2.5), (0.05, 4.2), (0.10, 6.2), (0.25, 11.2), (0.50, 13.7)),
    *((0.75, 15.3), (0.90, 16.6), (0.95, 17.3), (0.99, 18.1), (1.00, 33.0)),
)


def image_size_px(rng: Random) -> tuple[int, int]:
    """Width and height of a web image (LAION-400M shape), landscape or portrait.

    The published marginals of the shorter and longer side are drawn with correlation 0.9: drawn
    independently, they would give more narrow strips than the web has.
    """
    z = rng.gauss(0.0, 1.0)
    z_long = 0.9 * z + 0.19**0.5 * rng.gauss(0.0, 1.0)
    short = exp(5.563 + 0.687 * z) / IMAGE_SHRINK
    long = max(short, exp(5.814 + 0.725 * z_long) / IMAGE_SHRINK)
    sides = [min(MAX_IMAGE_SIDE_PX, max(MIN_IMAGE_SIDE_PX, round(s))) for s in (short, long)]
    if rng.random() < 0.5:
        sides.reverse()
    return sides[0], sides[1]


def large_image_size_px(rng: Random) -> tuple[int, int]:
    """Width and height of a document page or photograph near the size limit."""
    return rng.randrange(336, MAX_IMAGE_SIDE_PX + 1, 28), MAX_IMAGE_SIDE_PX


def answer_tokens(rng: Random) -> int:
    """Length of an assistant's answer about an image (InternVL-1.2M shape: lognormal, σ 0.6)."""
    mean = 267 / TEXT_SHRINK
    return max(6, round(rng.lognormvariate(log(mean) - 0.6**2 / 2, 0.6)))


def document_tokens(rng: Random) -> int:
    """Length of a plain document (Wikipedia shape: ln mean 5.95, sd 1.26), capped."""
    tokens = round(rng.lognormvariate(5.95 - log(TEXT_SHRINK), 1.26))
    return min(MAX_DOCUMENT_TOKENS, max(6, tokens))


def speech_s(rng: Random) -> float:
    """Duration of an utterance (LibriSpeech shape), by inverting its quantile table."""
    u = rng.random()
    k = min(bisect_right(_SPEECH_QUANTILES_S, (u, 1e9)), len(_SPEECH_QUANTILES_S) - 1)
    (u0, s0), (u1, s1) = _SPEECH_QUANTILES_S[k - 1 : k + 1]
    return (s0 + (s1 - s0) * (u - u0) / (u1 - u0)) / SPEECH_SHRINK


def video_s(rng: Random) -> float:
    """Duration of a clip: 85 % short (mean 4.5 s), 15 % long (mean 52 s), shrunk and capped."""
    mean, sigma = (4.5, 0.5) if rng.random() < 0.85 else (52.0, 0.6)
    seconds = rng.lognormvariate(log(mean) - sigma**2 / 2, sigma) / VIDEO_SHRINK
    return min(MAX_VIDEO_S, max(1.0, seconds))
