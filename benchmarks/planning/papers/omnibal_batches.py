"""Microbatches of OmniBal's tables: padded fours, and the packs of ISF."""

import functools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks import omnibal, workloads
from dataservice.planning import pack_isf
from dataservice.planning.layout.profile import LayerWork
from dataservice.planning.packs.padded import pack_length_grouped, pack_random

BATCH, SAMPLES_A_PACK = 1024, 4
# Samples of a draw for ISF: enough to choose from, as the paper chooses from 1.2 million.
ISF_POOL = 8
TILE_TOKENS = workloads.TILE_ENCODER_TOKENS


@dataclass(frozen=True, kw_only=True, slots=True)
class Mix:
    """Samples of a step, and what they are: shares of 1, 3 and 5 tiles, σ of the text's length."""

    batch: int = BATCH
    tile_shares: tuple[float, float, float] = (0.70, 0.14, 0.16)
    sigma: float = 0.6

    def drawn(self, samples: int, seed: int) -> workloads.Workload:
        """That many samples."""
        return workloads.vlm_sft(samples, seed, tile_shares=self.tile_shares, sigma=self.sigma)


INTERNVL, ONE_TILE = Mix(), Mix(tile_shares=(1.0, 0.0, 0.0))
EVEN = Mix(tile_shares=(0.3, 0.3, 0.4), sigma=0.3)


@dataclass(frozen=True, kw_only=True, slots=True)
class Batches:
    """Microbatches of a step, float64[microbatches]: tiles, decoder tokens and squared lengths with
    padding; and how many samples they hold."""

    tiles: NDArray[np.float64]
    tokens: NDArray[np.float64]
    squares: NDArray[np.float64]
    samples: int

    def dealt(self, replicas: int) -> list[LayerWork]:
        """In turn to the replicas."""
        return [self.work(slice(rank, None, replicas)) for rank in range(replicas)]

    def work(self, chosen: slice) -> LayerWork:
        """Of some microbatches."""
        tile = float(omnibal.TILE_TOKENS)
        return LayerWork.of(
            vision=(self.tiles[chosen] * tile, self.tiles[chosen] * tile**2),
            decoder=(self.tokens[chosen], self.squares[chosen]),
        )


@functools.cache
def padded_batches(kind: str, seed: int, mix: Mix = INTERNVL) -> Batches:
    """Four samples each, padded: "random"; "length", in the order of a length-grouped sampler;
    "device", one of each quarter of the lengths, so that all are about as large and pad more than
    random ones, as the paper's device groups do (0.378 to 0.31)."""
    made = mix.drawn(mix.batch, seed)
    if kind == "device":
        quarters = np.argsort(made.llm_tokens, kind="stable").reshape(SAMPLES_A_PACK, -1)
        order = np.random.default_rng(seed).permuted(quarters, axis=1).T.ravel()
    else:
        order = np.arange(mix.batch)
    tokens, tiles = (
        column[order] for column in (made.llm_tokens, made.encoder_tokens // TILE_TOKENS)
    )
    pack = pack_length_grouped if kind == "length" else pack_random
    packs = pack(tokens, tiles, samples_per_pack=SAMPLES_A_PACK)
    longest = np.zeros(mix.batch // SAMPLES_A_PACK)
    np.maximum.at(longest, packs.pack_of, tokens)
    return Batches(
        tiles=packs.vision_tokens.astype(np.float64),
        tokens=SAMPLES_A_PACK * longest,
        squares=SAMPLES_A_PACK * longest**2,
        samples=mix.batch,
    )


@functools.cache
def isf_batches(seed: int, replicas: int, mix: Mix = INTERNVL) -> Batches:
    """Packs that ISF makes, about as many samples in all."""
    made = mix.drawn(ISF_POOL * mix.batch, seed)
    count = made.encoder_tokens // TILE_TOKENS
    limit = omnibal.TEXT_TOKENS
    packs = pack_isf(
        made.llm_tokens,
        count,
        max_text=limit,
        max_vision=omnibal.TILES,
        min_text=limit - 128,
        min_vision=omnibal.TILES,
    )
    size = np.bincount(packs.pack_of)
    squares = np.bincount(packs.pack_of, made.llm_tokens.astype(np.float64) ** 2)
    whole = np.flatnonzero(packs.satisfied)
    needed = replicas * round(mix.batch / size[whole].mean() / replicas)
    chosen = np.random.default_rng(seed).permutation(whole)[:needed]
    return Batches(
        tiles=packs.vision_tokens[chosen].astype(np.float64),
        tokens=packs.text_tokens[chosen].astype(np.float64),
        squares=squares[chosen],
        samples=int(size[chosen].sum()),
    )
