"""Workers that die, fall silent, are slow, refuse and lose packs, as a test tells them."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Iterable, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import numpy as np

from dataservice.core.cursor import Cursor
from dataservice.core.errors import SpecError, WorkerLostError
from dataservice.core.orders import (
    BadSample,
    Holdings,
    PackKey,
    PackOrder,
    PackReceipt,
    StorageOutage,
)
from dataservice.core.plan import StepPlan
from dataservice.core.ports import NoMetrics, WorkerInfo
from dataservice.core.receipts import PackAnswers
from dataservice.engine.dispatch import Dispatcher
from dataservice.engine.pack_orders import pack_orders
from dataservice.engine.placement import DispatchedStep
from dataservice.engine.planner import plan_step
from dataservice.engine.tasks import retrieve_error
from tests.engine.support import make_setup
from tests.one_order import OneByOne


class Workers(OneByOne):
    """A pool and its link: every worker answers at once unless it is told otherwise."""

    def __init__(self, count: int = 3) -> None:
        self.infos = {
            f"w{n}": WorkerInfo(worker=f"w{n}", address="a:1", slots=1) for n in range(count)
        }
        self.held: dict[str, set[PackKey]] = {name: set() for name in self.infos}
        self.dead: set[str] = set()
        self.mute: set[str] = set()  # do not say what they hold
        self.stuck: dict[str, asyncio.Event] = {}
        self.refuses: set[str] = set()
        self.decode_s = 0.0  # what they tell of each pack
        self.ordered: list[tuple[str, PackKey]] = []
        self.calls: list[str] = []  # the worker of each call, whatever it orders
        self.replaced: list[str] = []
        self.asked = 0
        self.outages: tuple[StorageOutage, ...] = ()  # what each tells
        self.decoding: set[asyncio.Task[PackReceipt]] = set()
        self.released: set[tuple[str, PackKey]] = set()

    @property
    def names(self) -> list[str]:
        return list(self.infos)

    def kill(self, name: str, *, noticed: bool) -> None:
        """All it held is gone; its successor comes at once if the pool has noticed."""
        self.dead.add(name)
        self.held[name] = set()
        if noticed:
            self._succeed(name)

    def set_state(self, name: str, state: str) -> None:
        self.infos[name] = replace(self.infos[name], state=state)  # type: ignore[arg-type]

    def stick(self, name: str) -> None:
        """It takes orders and does not finish them until it is `unstick`."""
        self.stuck[name] = asyncio.Event()

    def unstick(self, name: str) -> None:
        self.stuck.pop(name).set()

    def _succeed(self, name: str) -> None:
        if self.infos.pop(name, None) is not None:
            new = f"w{len(self.held)}"
            self.infos[new] = WorkerInfo(worker=new, address="a:1", slots=1)
            self.held[new] = set()

    # ---- core.ports.WorkerPool

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    def workers(self) -> tuple[WorkerInfo, ...]:
        return tuple(self.infos.values())

    def shortfall(self) -> str:
        return ""

    async def replace(self, worker: str) -> None:
        await asyncio.sleep(0)
        self.replaced.append(worker)
        self.kill(worker, noticed=True)

    async def renew(
        self, workers: Collection[str], drained: Callable[[str], Awaitable[None]]
    ) -> None: ...

    # ---- core.ports.WorkerLink

    async def order(
        self, worker: WorkerInfo, orders: Sequence[PackOrder]
    ) -> AsyncGenerator[PackAnswers, None]:
        self.calls.append(worker.worker)
        async with aclosing(super().order(worker, orders)) as answers:
            async for each in answers:
                yield each

    async def prepare(self, worker: WorkerInfo, order: PackOrder) -> PackReceipt:
        self.ordered.append((worker.worker, order.key))
        # It knows of an order as soon as that has come: a release that comes later is of it.
        self.released.discard((worker.worker, order.key))
        # As a worker does: a call that is cancelled does not stop the work.
        work = asyncio.create_task(self._decode(worker.worker, order))
        self.decoding.add(work)
        work.add_done_callback(self.decoding.discard)
        work.add_done_callback(retrieve_error)
        return await asyncio.shield(work)

    async def _decode(self, name: str, order: PackOrder) -> PackReceipt:
        await asyncio.sleep(0)
        if name in self.stuck:
            await self.stuck[name].wait()
        if name in self.dead:
            raise WorkerLostError(f"{name} is gone")
        if name in self.refuses:
            raise SpecError("no such processor")
        if (name, order.key) not in self.released:
            self.held[name].add(order.key)
        bad = BadSample(sample_id=order.samples[0].ref.sample_id, source="s", key="k", reason="r")
        return PackReceipt(key=order.key, size_bytes=1, decode_s=self.decode_s, bad_samples=(bad,))

    async def release(self, worker: WorkerInfo, job: str, packs: Sequence[PackKey]) -> None:
        await asyncio.sleep(0)
        self.held[worker.worker] -= set(packs)
        self.released |= {(worker.worker, key) for key in packs}

    async def ask_held(self, worker: WorkerInfo) -> Holdings:
        self.asked += 1
        if worker.worker in self.dead:
            raise WorkerLostError("gone")
        if worker.worker in self.mute:
            await asyncio.Event().wait()
        return Holdings(packs=frozenset(self.held[worker.worker]), outages=self.outages)


class Counts(NoMetrics):
    def __init__(self) -> None:
        self.hedged = 0
        self.found = 0
        self.lost: list[str] = []
        self.retired: list[str] = []
        self.queued: dict[str, float] = {}

    def pack_hedged(self, job: str) -> None:
        self.hedged += 1

    def pack_found(self, job: str) -> None:
        self.found += 1

    def worker_lost(self, worker: str) -> None:
        self.lost.append(worker)
        self.queued.pop(worker, None)

    def worker_retired(self, worker: str) -> None:
        self.retired.append(worker)
        self.queued.pop(worker, None)

    def work_outstanding(self, worker: str, tokens: float) -> None:
        self.queued[worker] = tokens


SETUP = make_setup(samples=400, batch=32)
TOPOLOGY = SETUP.topology(2)


def step_of(number: int) -> tuple[StepPlan, list[PackOrder]]:
    cursor = Cursor()
    for _ in range(number):
        planned = plan_step(SETUP, cursor, TOPOLOGY)
        assert planned is not None
        cursor = planned.next_cursor
    planned = plan_step(SETUP, cursor, TOPOLOGY)
    assert planned is not None
    plan = planned.plan
    orders = pack_orders(plan, SETUP.catalog, job="job", digest=plan.digest, pipeline="{}")
    return plan, orders


PLAN, ORDERS = step_of(0)
PACKS = range(PLAN.packs)


def ready(step: DispatchedStep) -> bool:
    return all(place.ready for place in step.placements)


def holders_of(workers: Workers, key: PackKey) -> list[str]:
    return [name for name in workers.infos if key in workers.held[name]]


def holders(step: DispatchedStep) -> set[str]:
    return {name for place in step.placements for name in place.copies}


async def held_by(
    dispatcher: Dispatcher, step: DispatchedStep, rank: int, packs: Iterable[int], **told: Any
) -> dict[int, WorkerInfo]:
    """Where a rank is sent for each pack."""
    wanted = np.array(list(packs), dtype=np.int32)
    found = await dispatcher.holders(step, rank, wanted, **told)
    return {int(pack): step.workers[k] for pack, k in zip(wanted, found, strict=True)}
