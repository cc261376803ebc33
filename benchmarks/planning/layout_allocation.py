"""How fast GPUs are allocated to modules: `python -m benchmarks.planning --only allocation`."""

from functools import partial

import numpy as np

from benchmarks.harness import Row, Scale, timed_row
from dataservice.planning import ModuleLoad, allocate_modules

TENSOR_RANKS = np.array([1, 2, 4, 8])


def allocations(scale: Scale) -> list[Row]:
    """GPUs for the modules of MMScale's MLLM-72B, at the paper's sizes and at 16,384 GPUs."""
    rows = []
    for gpus, batch, limit, paper in (
        (112, 240, None, "MMScale 133 ms"),
        (324, 480, None, "MMScale 441 ms"),
        (648, 960, None, "MMScale 641 ms"),
        (1_296, 1_920, 10.0, "MMScale 922 ms"),
        (16_384, 1_920, 1_000.0, ""),
        (16_384, 720_720, 1_000.0, ""),  # a batch with 240 divisors
    ):
        call = partial(
            allocate_modules,
            backbone(),
            encoder=module("vision", layers=32, sample_s=0.3, weights=0.63e9),
            generator=module("generator", layers=25, sample_s=0.6, weights=1e9),
            gpus=gpus,
            batch=batch,
            memory_bytes=80e9,
        )
        found = call()
        parts = ", ".join(
            f"{each.name} {each.gpus:,} (TP {each.tensor_ranks}, DP {each.data_ranks}, "
            f"PP {each.pipeline_stages})"
            for each in found.modules
        )
        rows.append(
            timed_row(
                {"allocation": call},
                group="allocation",
                what=f"allocation, MLLM-72B on {gpus:,} GPUs, {batch:,} samples a step",
                limit=limit,
                repeats=scale.repeats,
                paper=paper,
                explanation=f"{parts}; {100 * found.gap:.1f} % over a bound without whole stages.",
            )
        )
    return rows


def backbone() -> ModuleLoad:
    """Llama of 70B: a sample of 8,192 tokens, TP at 95 % for each doubling."""
    return module("decoder", layers=80, sample_s=8.0, weights=70e9, kept_bytes=60e9)


def module(
    name: str, *, layers: int, sample_s: float, weights: float, kept_bytes: float = 6e9
) -> ModuleLoad:
    """A trained module: 6 bytes a weight with its gradient, 12 of the optimizer; gradients over
    25 GB/s a GPU."""
    return ModuleLoad.of(
        name,
        layers=layers,
        tensor_ranks=TENSOR_RANKS,
        sample_s=sample_s / (TENSOR_RANKS * 0.95 ** np.log2(TENSOR_RANKS)),
        state_bytes=6 * weights / TENSOR_RANKS,
        kept_bytes=kept_bytes / TENSOR_RANKS,
        gradients_s=4 * weights / TENSOR_RANKS / 25e9,
        optimizer_bytes=12 * weights,
    )
