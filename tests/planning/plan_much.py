"""Warms up, plans all sorts of steps and layouts, cuts the steps, and prints each kernel that this
has compiled or loaded.

A program, so that what other tests have compiled in their process hides nothing.
"""

import importlib
import itertools
import pkgutil

import numpy as np
from numba.core.dispatcher import Dispatcher

from benchmarks import workloads
from dataservice import planning
from dataservice.core.errors import PlanningError
from dataservice.core.memory import MemoryModel
from dataservice.core.plan_options import STRATEGIES, PlanOptions
from dataservice.core.sample import LengthTable
from dataservice.core.topology import Topology
from dataservice.engine.shards import cut_step
from dataservice.planning.compose import StepSamples, compose_step, split_window
from dataservice.planning.layout.before_after import time_before_after
from dataservice.planning.layout.module_layout import lay_out_modules, planned_s
from dataservice.planning.layout.search import LayoutTask, search_layout
from dataservice.planning.layout.warm import warm_layouts
from dataservice.planning.loads.partition import ALGORITHMS, partition
from dataservice.planning.packs.isf import pack_isf
from dataservice.planning.place_packs import Pull, WorkerSites, place_packs
from dataservice.planning.warm import warm_up
from tests.planning.layout.small_models import MODEL, nodes

TOPOLOGIES = (
    Topology(world_size=1),
    Topology(world_size=6, replicas_per_node=3),
    Topology(world_size=8, replicas_per_node=2),
    Topology(world_size=16, ranks_per_replica=2, pipeline_stages=2, replicas_per_node=4),
)
CHOICES = [
    *({"strategy": strategy} for strategy in STRATEGIES),
    *({"pack": pack, "context": "dynamic"} for pack in ("joint", "balanced", "isf")),
]
STEPS = [*itertools.product(CHOICES, TOPOLOGIES, (2, 16, 60, 200))]
# What asks for kernels of its own: bytes of memory, replicas that meet once, DHP's eq. 8.
STEPS += itertools.product(
    [
        {"memory": MemoryModel(budget_bytes=9e9, llm_token_bytes=1e6, vision_token_bytes=4e5)},
        {"memory": MemoryModel(budget_bytes=9_000, llm_token_bytes=1, audio_token_bytes=1)},
        {"pack": "joint", "solver": "dp"},
        {"strategy": "full"},
    ],
    [
        Topology(world_size=8, replicas_per_node=2),
        Topology(world_size=1, replicas_meet="step"),
        Topology(world_size=8, replicas_meet="step", features_ahead=True),
    ],
    (16, 60),
)
# Only asked for the words of an error, and compiled with the kernels that use it.
NOT_WARM = "dataservice.planning.context.units.least_degree"
KERNELS = {
    kernel
    for module in pkgutil.walk_packages(planning.__path__, planning.__name__ + ".")
    for kernel in vars(importlib.import_module(module.name)).values()
    if isinstance(kernel, Dispatcher)
}


def samples(rng, count, memory_tokens):
    items = rng.integers(0, 3, count)
    of_items = int(items.sum())
    tokens = np.minimum(64 + np.exp(rng.normal(5.5, 1.0, count)), 3 * memory_tokens)
    lengths = LengthTable(
        llm_tokens=(tokens + 16 * items).astype(np.int32),
        loss_tokens=(tokens / 2).astype(np.int32),
        item_offsets=np.concatenate([[0], np.cumsum(items)]).astype(np.int64),
        item_modality=rng.integers(0, 2, of_items).astype(np.int8),
        item_encoder_tokens=rng.integers(16, 900, of_items).astype(np.int32),
        item_llm_tokens=np.full(of_items, 16, np.int32),
        item_position=np.full(of_items, 4, np.int32),
    )
    ids = np.arange(count, dtype=np.int64)
    return StepSamples(sample_ids=ids, epoch=np.zeros(count, np.int32), lengths=lengths)


def plan_steps(rng):
    for choice, topology, count in STEPS:
        for memory_tokens in (1024, 4096):
            options = PlanOptions(memory_tokens=memory_tokens, **choice)
            step = samples(rng, count, memory_tokens)
            try:
                split_window(step.lengths, steps=2, options=options)
                plan = compose_step(step, step=0, topology=topology, options=options)
            except PlanningError:
                continue  # a sample that no group of this topology can hold
            cut_step(plan)
            place(plan, rng)


def place(plan, rng):
    """The plan's packs on workers of one place, of several, and where no place is known."""
    replicas, packs = np.zeros(plan.replicas, np.int64), np.arange(plan.packs)
    for workers, sites in ((1, 1), (3, 1), (3, 3)):
        for known in (np.arange(sites), np.full(sites, -1)):
            places = WorkerSites(
                queued=rng.random(workers),
                slots=np.ones(workers, np.int64),
                site=np.arange(workers) % sites,
                cache=known,
                node=known,
                zone=known,
            )
            cache = rng.integers(0, sites, len(plan.sample_ids))
            pull = Pull(cache=cache, node=replicas, zone=replicas)
            place_packs(plan, packs, np.ones(plan.packs, np.int64), places, pull)


def plan_parts(rng):
    for _ in range(200):
        dtype = rng.choice(["i4", "i8", "f8"])
        costs = rng.integers(1, 100, rng.integers(1, 60)).astype(dtype)
        costs.setflags(write=False)
        limits = {"equal_count": True}, {"capacity": max(float(costs.sum()) / 2, 100.0)}, {}
        algorithm = str(rng.choice(list(ALGORITHMS)))
        partition(costs, np.int32(rng.integers(3, 9)), algorithm=algorithm, **rng.choice(limits))
    lengths = np.arange(1, 400, dtype=np.int32)
    pack_isf(lengths, lengths % 3, max_text=np.int32(900), max_vision=np.int64(9))


def lay_out():
    for memory_bytes, count in ((80e9, 1), (9e9, 1), (12e9, 2)):
        batches = (workloads.step_samples(workloads.vlm_sft(96, 0)),)
        task = LayoutTask(model=MODEL, group=nodes(memory_bytes, count), batches=batches)
        time_before_after(task, search_layout(task))
        planned_s(task, lay_out_modules(task.model, task.group, task.batches))


def compiled():
    return {
        (f"{kernel.py_func.__module__}.{kernel.py_func.__name__}", str(signature))
        for kernel in KERNELS
        for signature in kernel.signatures
    }


def main():
    warm_up()
    warm_layouts()
    warm = compiled()
    assert len(warm) > 50
    rng = np.random.default_rng(0)
    plan_steps(rng)
    plan_parts(rng)
    lay_out()
    for name, signature in sorted(compiled() - warm):
        if name != NOT_WARM:
            print(name, signature)


if __name__ == "__main__":
    main()
