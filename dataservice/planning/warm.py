"""Compile every kernel of a step before the first one needs it.

Kernels are cached on disk under a digest of their sources (`dataservice/__init__.py`), so
only the first start after an installation or an edit pays; where that folder is read-only,
NUMBA_CACHE_DIR names another.
"""

import numpy as np

from dataservice.core.cost import ContextCost
from dataservice.core.memory import MemoryModel
from dataservice.core.plan import StepPlan
from dataservice.core.plan_options import STRATEGIES, PlanOptions
from dataservice.core.sample import LengthTable
from dataservice.core.topology import Topology
from dataservice.planning.compose import StepSamples, compose_step, split_window
from dataservice.planning.context.degrees import degrees_by_dp, degrees_by_threshold
from dataservice.planning.context.groups import plan_context_waves
from dataservice.planning.context.many import find_many_waves
from dataservice.planning.encoder_memory.room import EncoderRoom
from dataservice.planning.loads.partition import ALGORITHMS, partition
from dataservice.planning.packs.bfd import pack_bfd
from dataservice.planning.packs.isf import pack_isf
from dataservice.planning.packs.wave_assignment import assign_packs_to_waves
from dataservice.planning.pipeline_parallel.microbatch_order import order_microbatches
from dataservice.planning.pipeline_parallel.simulator import simulate_1f1b
from dataservice.planning.place_packs import Pull, WorkerSites, place_packs
from dataservice.planning.routes import encode_order, encoded_parts, listed_items
from dataservice.planning.validate import validate_plan

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
    _warm_kernels()
    samples = _samples()
    choices = [PlanOptions(memory_tokens=MEMORY_TOKENS, strategy=name) for name in STRATEGIES]
    choices.append(PlanOptions(memory_tokens=MEMORY_TOKENS, pack="balanced"))
    choices.append(PlanOptions(memory_tokens=MEMORY_TOKENS, full_attention="items"))
    choices.append(PlanOptions(memory_tokens=MEMORY_TOKENS, pack="joint", solver="dp"))
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
    _warm_placement(plan)
    if (room := EncoderRoom.of(tight, Topology(world_size=4))) is not None:
        room.may_be_lacked_by(samples.lengths, MEMORY_TOKENS)
    listed = listed_items(plan)
    encoded_parts(listed, encode_order(plan, listed))


def _warm_placement(plan: StepPlan) -> None:
    """Place the plan's packs on two workers, and where there is one place alone."""
    at = np.zeros(plan.replicas, np.int64)
    pull = Pull(cache=np.zeros(len(plan.sample_ids), np.int64), node=at, zone=at)
    packs, work = np.arange(plan.packs), np.ones(plan.packs, np.int64)
    for count in (2, 1):
        each = np.arange(count)
        workers = WorkerSites(
            queued=np.zeros(count),
            slots=np.ones(count, np.int64),
            site=each,
            cache=each,
            node=each,
            zone=each,
        )
        place_packs(plan, packs, work, workers, pull)


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


def _warm_kernels() -> None:
    """Plan a few made-up lengths by every algorithm. Seconds at first, then milliseconds."""
    lengths = (np.arange(97, dtype=np.int64) * 7919) % 89 + 1
    small = np.array([50, 33, 33, 33, 21, 21, 11])  # no split meets the bound: all is tried
    for algorithm in ALGORITHMS:
        for equal_count in (False, True):
            partition(lengths, 8, algorithm=algorithm, equal_count=equal_count)
            partition(small, 3, algorithm=algorithm, equal_count=equal_count)
            partition(
                lengths,
                8,
                algorithm=algorithm,
                equal_count=equal_count,
                sizes=lengths,
                capacity=600,
            )
    tiles = lengths % 3 + 1
    pack_isf(lengths, tiles, max_text=400, max_vision=9, min_text=380)
    pack_bfd(lengths, tiles, max_text=400, max_vision=9)
    assign_packs_to_waves(np.stack((lengths, lengths[::-1]), axis=1), replicas=8)
    times = np.linspace(1.0, 2.0, 12 * 3).reshape(12, 3)
    for count in (6, 12):  # every order, and the search
        order_microbatches(times[:count], times[:count], virtual_stages=1)
    order_microbatches(times, times, algorithm="mmscale")
    simulate_1f1b(times, times)
    table = np.linspace(8.0, 1.0, 24).reshape(4, 6)
    degrees_by_threshold(table, ranks=6)
    degrees_by_dp(table, ranks=6)
    cost = ContextCost.flexsp_7b()
    # Few enough to try all; and more, where a ring across nodes is the slowest and a cut is mended.
    # And what fills groups by time alone finds no room; and groups of whole nodes are tried.
    crossing = [1313, 1137, 1441, 1611, 2240, 2701, 496, 2821, 1734, 1266]
    for few in (crossing[:5], crossing):
        plan_context_waves(few, ranks=6, memory_tokens=4096, cost=cost, ranks_per_node=3)
    find_many_waves([500, 400, 300, 300, 300], ranks=1, memory_tokens=900, cost=cost)
    find_many_waves([1500] * 8, ranks=6, memory_tokens=1000, cost=cost, ranks_per_node=3)
