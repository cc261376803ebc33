"""Made-up batches with the published statistics of real data sets. Seeded; lengths only.

Each generator gives n samples. What a publication leaves open is chosen here and said in its
docstring, because a figure means nothing without the mix it was taken on.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dataservice.core.sample import LengthTable, Modality
from dataservice.planning.compose import StepSamples

TILE_ENCODER_TOKENS = 1024
TILE_LLM_TOKENS = 256
FRAMES_PER_S = 50
_SPEECH_SHARES = (0.0, 0.01, 0.05, 0.10, 0.25, 0.50, 0.75, 0.90, 0.95, 0.99, 1.0)
_SPEECH_S = (1.4, 2.5, 4.2, 6.2, 11.2, 13.7, 15.3, 16.6, 17.3, 18.1, 33.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """n samples of one mix: `llm_tokens`, `media_llm_tokens` (how many of them an encoder
    makes), `encoder_tokens` (patches or frames; 0: no encoder item); all int64[n]. Items may be cut
    between tiles of `tile_tokens` encoder tokens."""

    name: str
    llm_tokens: NDArray[np.int64]
    media_llm_tokens: NDArray[np.int64]
    encoder_tokens: NDArray[np.int64]
    modality: Modality = Modality.VISION
    tile_tokens: int | None = None

    def __len__(self) -> int:
        return self.llm_tokens.size


def vlm_sft(
    samples: int,
    seed: int = 0,
    *,
    tile_shares: tuple[float, float, float] = (0.70, 0.14, 0.16),
    sigma: float = 0.6,
) -> Workload:
    """InternVL-1.2M-like: tiles 1/3/5 with .70/.14/.16, 256 tokens a tile and 1,024 in the ViT;
    an answer of lognormal length, mean 267, σ .6."""
    generator = np.random.default_rng(seed)
    tiles = generator.choice([1, 3, 5], samples, p=tile_shares).astype(np.int64)
    answer = _lognormal(generator, samples, mean=267.0, sigma=sigma)
    return Workload(
        name="vlm-sft",
        llm_tokens=TILE_LLM_TOKENS * tiles + answer,
        media_llm_tokens=TILE_LLM_TOKENS * tiles,
        encoder_tokens=TILE_ENCODER_TOKENS * tiles,
        tile_tokens=TILE_ENCODER_TOKENS,
    )


def vlm_long(samples: int, seed: int = 0) -> Workload:
    """vlm-sft of which a twentieth carries a document, lognormal(8.5, 1.2) up to 200,000 tokens,
    so that context parallelism has something to do."""
    base = vlm_sft(samples, seed)
    generator = np.random.default_rng((seed, 1))
    document = np.minimum(np.exp(generator.normal(8.5, 1.2, samples)), 200_000).astype(np.int64)
    long = generator.random(samples) < 0.05
    return Workload(
        name="vlm-sft with documents",
        llm_tokens=base.llm_tokens + np.where(long, document, 0),
        media_llm_tokens=base.media_llm_tokens,
        encoder_tokens=base.encoder_tokens,
        tile_tokens=base.tile_tokens,
    )


def web_image(samples: int, seed: int = 0) -> Workload:
    """LAION-400M-like: sides lognormal (5.563, .687) and (5.814, .725) px, patches of 16 px.

    Ours: sides correlated at .9, at most 16,384 patches, four of them one LLM token, and a
    caption of lognormal length, mean 20."""
    generator = np.random.default_rng(seed)
    shared, own = generator.standard_normal((2, samples))
    shorter = np.exp(5.563 + 0.687 * shared)
    longer = np.exp(5.814 + 0.725 * (0.9 * shared + np.sqrt(1 - 0.9**2) * own))
    patches = np.ceil(shorter / 16) * np.ceil(longer / 16)
    patches = np.clip(patches, 4, 16_384).astype(np.int64)
    media = -(-patches // 4)
    return Workload(
        name="web-image",
        llm_tokens=media + _lognormal(generator, samples, mean=20.0, sigma=0.6),
        media_llm_tokens=media,
        encoder_tokens=patches,
    )


def speech(samples: int, seed: int = 0) -> Workload:
    """LibriSpeech-like seconds by their quantiles (left-skewed), 50 frames a second.

    Ours: two frames an LLM token, and a transcript of 3.3 tokens a second."""
    generator = np.random.default_rng(seed)
    seconds = np.interp(generator.random(samples), _SPEECH_SHARES, _SPEECH_S)
    frames = np.maximum(np.rint(FRAMES_PER_S * seconds), 2).astype(np.int64)
    return Workload(
        name="speech",
        llm_tokens=frames // 2 + np.rint(3.3 * seconds).astype(np.int64),
        media_llm_tokens=frames // 2,
        encoder_tokens=frames,
        modality=Modality.AUDIO,
    )


def video(samples: int, seed: int = 0) -> Workload:
    """OpenVid/InternVid-like: 85 % lognormal of mean 4.5 s, 15 % of mean 52 s.

    Ours: σ .6 and .8, one tile a second, a caption of lognormal length, mean 120."""
    generator = np.random.default_rng(seed)
    tiles = np.ceil(video_seconds(generator, samples)).astype(np.int64)
    return Workload(
        name="video",
        llm_tokens=TILE_LLM_TOKENS * tiles + _lognormal(generator, samples, mean=120.0, sigma=0.6),
        media_llm_tokens=TILE_LLM_TOKENS * tiles,
        encoder_tokens=TILE_ENCODER_TOKENS * tiles,
        tile_tokens=TILE_ENCODER_TOKENS,
    )


def rare_clips(samples: int, seed: int = 0) -> Workload:
    """Text as long as samples of vlm-sft; one in twenty asks about a clip of 64 frames that is
    encoded whole, of 1,024 patches each, and that a resampler turns into 64 tokens."""
    text = vlm_sft(samples, seed).llm_tokens
    has_clip = np.random.default_rng((seed, 1)).random(samples) < 0.05
    return Workload(
        name="text with rare clips",
        llm_tokens=text,
        media_llm_tokens=np.where(has_clip, 64, 0),
        encoder_tokens=np.where(has_clip, 64 * TILE_ENCODER_TOKENS, 0),
    )


def video_seconds(generator: np.random.Generator, samples: int) -> NDArray[np.float64]:
    """Seconds of OpenVid/InternVid-like clips, as `video` says."""
    short = generator.lognormal(np.log(4.5) - 0.6**2 / 2, 0.6, samples)
    long = generator.lognormal(np.log(52.0) - 0.8**2 / 2, 0.8, samples)
    return np.where(generator.random(samples) < 0.85, short, long)


def long_text(samples: int, seed: int = 0, *, longest_tokens: int = 1_000_000) -> Workload:
    """Wikipedia-like: ln tokens of mean 5.95 and sd 1.26, with a heavier tail.

    Ours: 3 % are 2,000 tokens and more with a Pareto tail of index 1.1, cut at
    `longest_tokens`."""
    generator = np.random.default_rng(seed)
    tokens = generator.lognormal(5.95, 1.26, samples)
    tail = generator.random(samples) < 0.03
    tokens[tail] = 2000.0 * (1.0 + generator.pareto(1.1, int(tail.sum())))
    nothing = np.zeros(samples, np.int64)
    return Workload(
        name="long-text",
        llm_tokens=np.clip(tokens, 16, longest_tokens).astype(np.int64),
        media_llm_tokens=nothing,
        encoder_tokens=nothing,
    )


WORKLOADS: dict[str, Callable[[int, int], Workload]] = {
    "vlm-sft": vlm_sft,
    "web-image": web_image,
    "speech": speech,
    "video": video,
    "long-text": long_text,
}


def step_samples(workload: Workload) -> StepSamples:
    """The workload as one global batch: one encoder item a sample, where it has any, which may be
    cut between its tiles."""
    n = len(workload)
    has_item = workload.encoder_tokens > 0
    items = int(has_item.sum())
    tiles = workload.encoder_tokens[has_item] // (workload.tile_tokens or 1)
    text = workload.llm_tokens - workload.media_llm_tokens
    return StepSamples(
        sample_ids=np.arange(n),
        epoch=np.zeros(n, np.int32),
        lengths=LengthTable(
            llm_tokens=workload.llm_tokens.astype(np.int32),
            loss_tokens=text.astype(np.int32),
            item_offsets=np.concatenate([[0], np.cumsum(has_item)]).astype(np.int64),
            item_modality=np.full(items, workload.modality, np.int8),
            item_encoder_tokens=workload.encoder_tokens[has_item].astype(np.int32),
            item_llm_tokens=workload.media_llm_tokens[has_item].astype(np.int32),
            item_position=np.minimum(text[has_item] // 2, 3).astype(np.int32),
            item_frames=tiles.astype(np.int32),
        ),
        unit_frames=0 if workload.tile_tokens is None else 1,
    )


def _lognormal(
    generator: np.random.Generator, samples: int, *, mean: float, sigma: float
) -> NDArray[np.int64]:
    """Whole lengths of at least 1 with the given mean of the lengths themselves."""
    lengths = generator.lognormal(np.log(mean) - sigma**2 / 2, sigma, samples)
    return np.maximum(np.rint(lengths), 1).astype(np.int64)
