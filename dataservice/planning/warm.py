"""Compile every kernel before the first step needs it.

Kernels are cached on disk under a digest of all planning sources (`dataservice/__init__.py`), so
only the first start after an installation or an edit pays; where that folder is read-only,
NUMBA_CACHE_DIR names another.
"""

import numpy as np

from dataservice.core.memory import MemoryModel
from dataservice.core.plan_options import STRATEGIES, PlanOptions
from dataservice.core.sample import LengthTable
from dataservice.core.topology import Topology
from dataservice.planning.compose import StepSamples, compose_step, split_window
from dataservice.planning.validate import validate_plan
from dataservice.planning.warm_kernels import warm_kernels

SAMPLES = 48
MEMORY_TOKENS = 1024
# glibc gives freed memory back beyond twice the largest block that it has mapped and freed so far,
# and counts blocks of up to 32 MiB. After one of this size, a step of 153,600 samples finds its
# 64 MB of arrays in place, where 16,000 page faults took a sixth of its planning time.
KEPT_BYTES = 31 << 20


def warm_up() -> None:
    """Call every algorithm, and plan a small step by every strategy, on one node and several; and
    have the allocator keep what a step is planned in."""
    np.empty(KEPT_BYTES, np.uint8)
    warm_kernels()
    samples = _samples()
    choices = [PlanOptions(memory_tokens=MEMORY_TOKENS, strategy=name) for name in STRATEGIES]
    choices.append(PlanOptions(memory_tokens=MEMORY_TOKENS, pack="balanced"))
    tight = MemoryModel(
        budget_bytes=4 * MEMORY_TOKENS, llm_token_bytes=4, vision_token_bytes=1, audio_token_bytes=1
    )
    choices.append(PlanOptions(memory_tokens=MEMORY_TOKENS, memory=tight))
    for options in choices:
        split_window(samples.lengths, steps=2, options=options)
        for topology in (
            Topology(world_size=4),
            Topology(world_size=16, ranks_per_replica=2, pipeline_stages=2, replicas_per_node=4),
        ):
            plan = compose_step(samples, step=0, topology=topology, options=options)
            validate_plan(plan, memory_tokens=MEMORY_TOKENS, sample_count=SAMPLES)


def _samples() -> StepSamples:
    """Lengths from one to three times the memory of a replica, an image in every other sample."""
    tokens = (40 + 17 * np.arange(SAMPLES)).astype(np.int32)
    tokens[0] = 3 * MEMORY_TOKENS
    items = np.arange(SAMPLES) % 2
    count = int(items.sum())
    lengths = LengthTable(
        llm_tokens=tokens,
        loss_tokens=tokens // 2,
        item_offsets=np.concatenate([[0], np.cumsum(items)]).astype(np.int64),
        item_modality=(np.arange(count) % 2).astype(np.int8),
        item_encoder_tokens=(64 + 8 * np.arange(count)).astype(np.int32),
        item_llm_tokens=np.full(count, 16, dtype=np.int32),
        item_position=np.full(count, 4, dtype=np.int32),
    )
    return StepSamples(
        sample_ids=np.arange(SAMPLES, dtype=np.int64),
        epoch=np.zeros(SAMPLES, dtype=np.int32),
        lengths=lengths,
    )
