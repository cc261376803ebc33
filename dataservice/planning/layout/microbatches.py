"""Microbatches as the index gives them, before any plan, to judge stages and recomputation by.

Samples fill microbatches of `tokens` in draw order; a longer one is shared by as many replicas as
hold it, so that a microbatch has its part. Encoders' items are dealt out evenly, as the planner's
dispatch does: every microbatch has its share of their tokens, and of their squares.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dataservice.core.sample import LengthTable, Modality
from dataservice.planning.compose import StepSamples
from dataservice.planning.layout.profile import LayerWork

# Microbatches of which stages are judged: enough for a steady state, and for the mix of lengths.
MOST_MICROBATCHES = 64


def microbatch_work(
    batch: StepSamples, tokens: int, replicas: int, modules: Sequence[str]
) -> LayerWork:
    """The microbatches of `tokens` that one of `replicas` has in a step. O(samples)."""
    sums, squares = _filled(batch.lengths, tokens)
    count = max(1, min(-(-sums.size // replicas), MOST_MICROBATCHES))
    # Every k-th of them, so that all of the batch is seen.
    chosen = np.linspace(0, sums.size - 1, count).astype(np.int64)
    return _work(batch, modules, sums[chosen], squares[chosen], sums.size)


def mean_work(batch: StepSamples, microbatches: int, modules: Sequence[str]) -> LayerWork:
    """One of so many equal microbatches that the batch is taken to have."""
    whole = batch_work([batch], modules)
    return LayerWork(
        tokens={name: tokens / microbatches for name, tokens in whole.tokens.items()},
        squares={name: squares / microbatches for name, squares in whole.squares.items()},
    )


def batch_work(batches: Sequence[StepSamples], modules: Sequence[str]) -> LayerWork:
    """Each batch as one microbatch."""
    whole = []
    for batch in batches:
        lengths = batch.lengths.llm_tokens.astype(np.float64)
        sums = np.array([lengths.sum()]), np.array([(lengths * lengths).sum()])
        whole.append(_work(batch, modules, *sums, 1))
    return LayerWork(
        tokens={name: np.concatenate([each.tokens[name] for each in whole]) for name in modules},
        squares={name: np.concatenate([each.squares[name] for each in whole]) for name in modules},
    )


def sample_work(batches: Sequence[StepSamples], modules: Sequence[str]) -> LayerWork:
    """Every sample of the batches as one microbatch, with its own items."""
    lengths = [batch.lengths for batch in batches]
    text = np.concatenate([each.llm_tokens for each in lengths]).astype(np.float64)
    named = {"decoder": (text, text * text)}
    for modality in Modality:
        rows = [_sample_items(batch, modality) for batch in batches]
        tokens, squares = (np.concatenate(column) for column in zip(*rows, strict=True))
        named[modality.name.lower()] = tokens, squares
    return LayerWork.of(**{name: named[name] for name in modules})


def _sample_items(
    samples: StepSamples, modality: Modality
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Encoder tokens and their squares of each sample, float64[n] each."""
    lengths = samples.lengths
    mine = lengths.item_modality == modality
    owner = np.repeat(np.arange(len(lengths)), np.diff(lengths.item_offsets))[mine]
    tokens, pieces = _items(samples, mine)
    count = len(lengths)
    sums = np.zeros((2, count))
    np.add.at(sums[0], owner, tokens)
    np.add.at(sums[1], owner, tokens * tokens / pieces)
    return sums[0], sums[1]


def _work(
    batch: StepSamples,
    modules: Sequence[str],
    sums: NDArray[np.float64],
    squares: NDArray[np.float64],
    in_batch: int,
) -> LayerWork:
    named = {
        modality.name.lower(): _shares(batch, modality, in_batch, sums.size)
        for modality in Modality
    }
    named["decoder"] = sums, squares
    return LayerWork.of(**{name: named[name] for name in modules})


def _filled(lengths: LengthTable, tokens: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Σ tokens and Σ tokens² of the microbatches, float64[microbatches]."""
    sizes = lengths.llm_tokens.astype(np.float64)
    parts = np.ceil(sizes / tokens).astype(np.int64)
    # A part of a shared sample has 1/d of its tokens, and of its attention.
    each, squares = np.repeat(sizes / parts, parts), np.repeat(sizes * sizes / parts, parts)
    made: list[tuple[float, float]] = []
    total = square = 0.0
    for size, its_square in zip(each.tolist(), squares.tolist(), strict=True):
        if total and total + size > tokens:
            made.append((total, square))
            total = square = 0.0
        total, square = total + size, square + its_square
    made.append((total, square))
    columns = np.array(made)
    return columns[:, 0], columns[:, 1]


def _shares(
    samples: StepSamples, modality: Modality, microbatches: int, count: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Every microbatch's part of what is encoded: tokens and squares, float64[count] each."""
    tokens, pieces = _items(samples, samples.lengths.item_modality == modality)
    whole = np.full(count, tokens.sum() / microbatches)
    return whole, np.full(count, float((tokens * tokens / pieces).sum()) / microbatches)


def _items(
    samples: StepSamples, mine: NDArray[np.bool_]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Encoder tokens of these items, and the pieces that attend to themselves alone."""
    tokens = samples.lengths.item_encoder_tokens[mine].astype(np.float64)
    units = samples.lengths.item_units(samples.unit_frames)
    pieces = np.ones(tokens.size) if units is None else units[mine].astype(np.float64)
    return tokens, pieces
