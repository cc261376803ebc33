"""Samples of a step to plan, and the tokens that fit a rank."""

import numpy as np

from benchmarks import workloads
from benchmarks.planning.adversarial import text_only
from dataservice.core.sample import LengthTable
from dataservice.planning.compose import StepSamples

MEMORY = 2048


def step_samples(n: int, seed: int, longest: int) -> StepSamples:
    """Samples of up to three images or recordings each, some far longer than others."""
    rng = np.random.default_rng(seed)
    items = rng.integers(0, 4, n)
    m = int(items.sum())
    rows = rng.integers(1, 120, m)
    offsets = np.concatenate([[0], np.cumsum(items)])
    nth = np.arange(m) - np.repeat(offsets[:-1], items)
    before = np.concatenate([[0], np.cumsum(rows)])
    position = before[:-1] - before[np.repeat(offsets[:-1], items)] + 3 * (nth + 1)
    text = np.minimum(rng.lognormal(5, 1.3, n).astype(int), longest) + 16
    tokens = text + before[offsets[1:]] - before[offsets[:-1]]
    return StepSamples(
        sample_ids=rng.permutation(10 * n)[:n].astype(np.int64),
        epoch=np.zeros(n, np.int32),
        lengths=LengthTable(
            llm_tokens=tokens.astype(np.int32),
            loss_tokens=(text // 2).astype(np.int32),
            item_offsets=offsets.astype(np.int64),
            item_modality=rng.integers(0, 2, m).astype(np.int8),
            item_encoder_tokens=(4 * rows).astype(np.int32),
            item_llm_tokens=rows.astype(np.int32),
            item_position=position.astype(np.int32),
        ),
    )


def text_samples(tokens: list[int]) -> StepSamples:
    """Samples of so many tokens and no media."""
    return workloads.step_samples(text_only(np.array(tokens)))
