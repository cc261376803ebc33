"""A job in memory: lengths of a long-tailed mixture, a store, and workers that only keep books."""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from dataservice.core.cost import PhaseCost
from dataservice.core.cursor import Cursor
from dataservice.core.errors import SpecError, WorkerLostError
from dataservice.core.job import BatchSize, JobRecord
from dataservice.core.job_setup import JobSetup
from dataservice.core.orders import BadSample, Holdings, PackKey, PackOrder, PackReceipt
from dataservice.core.plan import StepPlan
from dataservice.core.plan_options import CostModel, PlanOptions
from dataservice.core.ports import Metrics, WorkerInfo
from dataservice.core.sample import (
    ItemLengths,
    Modality,
    SampleLengths,
    SampleLocation,
)
from dataservice.core.sample_columns import PackedSamples
from dataservice.core.topology import Topology
from dataservice.engine.coordinator import Coordinator
from dataservice.engine.planner import plan_step
from dataservice.sources.memory import MemoryCatalog
from dataservice.sources.mixture import Mixture
from dataservice.state.memory import MemoryStateStore
from tests.ledger import ledger_of
from tests.one_order import OneByOne

MEMORY_TOKENS = 512


def sample_lengths(rng: np.random.Generator) -> SampleLengths:
    """One sample: long-tailed text, now and then images or sound in the middle of it."""
    text = int(min(rng.lognormal(4.3, 1.0), 900)) + 8
    items, position = [], 4
    for _ in range(rng.integers(0, 3)):
        modality = Modality(int(rng.integers(0, 2)))
        tokens = int(rng.integers(4, 60))
        shape = (1, 28, 28, 3) if modality is Modality.VISION else (1600,)
        items.append(
            ItemLengths(
                modality=modality,
                encoder_tokens=4 * tokens,
                llm_tokens=tokens,
                position=position,
                shape=shape,
            )
        )
        position += tokens + 2
    total = text + position
    return SampleLengths(llm_tokens=total, loss_tokens=text // 2, items=tuple(items))


def as_clips(sample: SampleLengths) -> SampleLengths:
    """The same sample, its pictures clips of one frame a token."""
    items = (
        replace(item, shape=(item.llm_tokens, *item.shape[1:]), grid=(item.llm_tokens, 2, 2, 2))
        if item.modality is Modality.VISION
        else item
        for item in sample.items
    )
    return replace(sample, items=tuple(items))


def make_setup(
    *,
    name: str = "job",
    samples: int = 200,
    batch: int = 16,
    seed: int = 0,
    clips: bool = False,
    **plan: object,
) -> JobSetup:
    """A job over `samples` synthetic samples of two sources. Its `clips` may be cut between any two
    of their frames, and take so long that it pays."""
    rng = np.random.default_rng(seed)
    made = [sample_lengths(rng) for _ in range(samples)]
    rows = [
        (f"{i:06d}", SampleLocation(file="memory"), as_clips(lengths) if clips else lengths)
        for i, lengths in enumerate(made)
    ]
    catalog = MemoryCatalog({"a": rows[: samples // 3], "b": rows[samples // 3 :]})
    cost = CostModel(vision=PhaseCost(linear_s_per_token=1e-2)) if clips else CostModel()
    options = PlanOptions(**{"memory_tokens": MEMORY_TOKENS, "cost": cost, **plan})
    return JobSetup(
        record=JobRecord(name=name, spec_json=f'{{"job": "{name}"}}', index_fingerprint="f"),
        stream=Mixture(catalog.sizes, [1.0, 1.0], seed=seed, epochs=1, names=("a", "b")),
        catalog=catalog,
        batch=BatchSize(samples=batch),
        options=options,
        pipeline="{}",
        ready_steps=3,
        unit_frames=int(clips),
    )


def sample_ids_of(order: PackOrder) -> list[int]:
    """Without the objects of its samples, of which a large step has many."""
    samples = order.samples
    if isinstance(samples, PackedSamples):
        return samples.of.cut(samples.rows.start, samples.rows.stop).sample_id.tolist()
    return [sample.ref.sample_id for sample in samples]


@dataclass
class Books(OneByOne):
    """A worker pool and its link in one: keeps what was ordered and released, decodes nothing."""

    alive: list[str] = field(default_factory=lambda: ["w0", "w1"])
    orders: dict[PackKey, list[str]] = field(default_factory=dict)
    held: dict[PackKey, str] = field(default_factory=dict)
    deaf: set[str] = field(default_factory=set)
    started: int = 2
    refuses: set[int] = field(default_factory=set)
    masks: set[int] = field(default_factory=set)
    other_bytes: dict[str, set[int]] = field(default_factory=dict)
    """By worker, "" for all: the samples, by id, that do not decode as they used to."""
    replayed: list[PackKey] = field(default_factory=list)
    most_replayed: int = 0

    async def start(self) -> None:
        pass

    async def stop(self) -> None:
        pass

    def workers(self) -> tuple[WorkerInfo, ...]:
        return tuple(WorkerInfo(worker=w, address=f"{w}:1", slots=1) for w in self.alive)

    def shortfall(self) -> str:
        return ""

    async def replace(self, worker: str) -> None:
        if worker in self.alive:
            self.alive[self.alive.index(worker)] = f"w{self.started}"
            self.started += 1

    async def renew(
        self, workers: Collection[str], drained: Callable[[str], Awaitable[None]]
    ) -> None:
        for worker in workers:
            await self.replace(worker)

    async def prepare(self, worker: WorkerInfo, order: PackOrder) -> PackReceipt:
        await asyncio.sleep(0)
        if worker.worker in self.deaf or worker.worker not in self.alive:
            raise WorkerLostError(f"{worker.worker} is gone")
        ids = sample_ids_of(order)
        if self.refuses.intersection(ids):
            raise SpecError("the tokenizer is another")
        self.orders.setdefault(order.key, []).append(worker.worker)
        self.held[order.key] = worker.worker
        if order.key.plan_digest.startswith("replay"):
            held = [key for key in self.held if key.plan_digest.startswith("replay")]
            self.most_replayed = max(self.most_replayed, len(held))
            self.replayed.append(order.key)
        others = self.other_bytes.get("", set()) | self.other_bytes.get(worker.worker, set())
        return PackReceipt(
            key=order.key,
            size_bytes=1,
            decode_s=0.0,
            bad_samples=tuple(
                BadSample(sample_id=s.ref.sample_id, source="s", key=s.ref.key, reason="cut short")
                for s in (order.samples if self.masks.intersection(ids) else ())
                if s.ref.sample_id in self.masks
            ),
            sample_digests=np.array(
                [0 if i in self.masks else hash((i, i in others)) for i in ids], dtype="<i8"
            ).tobytes(),
        )

    async def release(self, worker: WorkerInfo, job: str, packs: Sequence[PackKey]) -> None:
        for key in packs:
            if self.held.get(key) == worker.worker:
                del self.held[key]

    async def ask_held(self, worker: WorkerInfo) -> Holdings:
        mine = (key for key, name in self.held.items() if name == worker.worker)
        return Holdings(packs=frozenset(mine))


def make_coordinator(
    store: MemoryStateStore,
    books: Books,
    *setups: JobSetup,
    timeout_s: float = 120.0,
    idle_release_s: float = 60.0,
    metrics: Metrics | None = None,
    **more: Any,
) -> Coordinator:
    """A coordinator that knows how to open these jobs; their job file is their name, unless
    `read_job` and `open_job` say otherwise."""
    known = {setup.record.name: setup for setup in setups}
    jobs: dict[str, Any] = {
        "read_job": lambda text, _base, _team: [known[text].record],
        "open_job": lambda record: known[record.name],
    }
    return Coordinator(
        store=store,
        pool=books,
        link=books,
        ticket_secret=b"secret",
        attempt_timeout_s=timeout_s,
        idle_release_s=idle_release_s,
        metrics=metrics,
        **{**jobs, **more},
    )


@dataclass
class TornSource(Books):
    """The workers find every sample of one source bad, while it is `torn`."""

    torn: str = "b"

    async def prepare(self, worker, order):
        receipt = await super().prepare(worker, order)
        bad = [s.ref for s in order.samples if s.ref.source == self.torn]
        return replace(
            receipt,
            bad_samples=tuple(
                BadSample(
                    sample_id=r.sample_id, source=r.source, key=r.key, reason=f"{r.key!r} is torn"
                )
                for r in bad
            ),
        )


def all_plans(setup: JobSetup, ranks: int) -> list[StepPlan]:
    plans, cursor = [], Cursor()
    while (planned := plan_step(setup, cursor, Topology(world_size=ranks))) is not None:
        plans.append(planned.plan)
        cursor = planned.next_cursor
    return plans


async def samples_by_step(
    coordinator: Coordinator, store: Any, attempt: int
) -> dict[int, list[int]]:
    """The samples of each step of an attempt, planned again to the digest of its ledger."""
    found = {}
    for entry in ledger_of(store, "job"):
        if entry.attempt == attempt:
            explained = await coordinator.explain("job", entry.step, attempt)
            assert explained.plan.digest == entry.plan_digest
            found[entry.step] = sorted(explained.plan.sample_ids.tolist())
    return found


class Held:
    """Of a dispatched step what tickets are made from."""

    def __init__(self, packs: int, workers: int) -> None:
        self.workers = [
            WorkerInfo(worker=f"w{k}", address=f"host{k}:1", slots=1) for k in range(workers)
        ]
        self.holder = np.random.default_rng(0).integers(0, workers, packs, dtype=np.int32)
