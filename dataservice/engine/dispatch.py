"""Give each pack of a step to one worker, and keep it available until it is released.

Contract. `dispatch` returns at once; packs decode in the background in wave order. A worker
that is lost while decoding costs a replacement and the same order at another worker. A
worker lost later is noticed by the rank that cannot fetch: `recover` orders its packs again.
Cancelling a step cancels its orders; workers drop what they hold for it.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from dataservice.core.errors import ServiceError, WorkerLostError
from dataservice.core.orders import PackKey, PackOrder, PackReceipt, PackSample
from dataservice.core.plan import StepPlan
from dataservice.core.ports import (
    Catalog,
    Metrics,
    NoMetrics,
    WorkerInfo,
    WorkerLink,
    WorkerPool,
)

log = logging.getLogger(__name__)

# How often one pack is ordered anew before its loss is reported to the ranks that wait.
ORDER_TRIES = 8
RETRY_PAUSE_S = 0.5
NO_WORKER_WAIT_S = 120.0
RECEIPT_WAIT_S = 10.0


@dataclass(slots=True, kw_only=True)
class DispatchedStep:
    """The packs of one step and where each is. `holder[p]` is the worker of pack p, `work[p]`
    what it adds to that worker's line."""

    plan: StepPlan
    orders: list[PackOrder]
    work: list[float]
    holder: list[WorkerInfo]
    decoding: dict[int, asyncio.Task[None]] = field(default_factory=dict)


def pack_orders(
    plan: StepPlan, *, job: str, digest: str, pipeline: str, catalog: Catalog
) -> list[PackOrder]:
    """One order a pack: its samples in sequence order, with locations and planned shapes."""
    details = catalog.details(plan.sample_ids)
    degrees = plan.pack_degree
    return [
        PackOrder(
            key=PackKey(job=job, step=plan.step, plan_digest=digest, pack=pack),
            degree=int(degrees[pack]),
            pipeline=pipeline,
            samples=tuple(
                PackSample(ref=details[s][0], lengths=details[s][1])
                for s in plan.samples_of(pack).tolist()
            ),
        )
        for pack in range(plan.packs)
    ]


def decode_work(plan: StepPlan) -> NDArray[np.float64]:
    """A stand-in for each pack's decode seconds, in tokens: float64[P].

    Encoder tokens are pixels and samples of sound, which dominate decoding; text is cheap.
    """
    sample_work = plan.sample_tokens.astype(np.float64)
    np.add.at(sample_work, plan.item_sample, 4.0 * plan.item_encoder_tokens)
    work: NDArray[np.float64] = np.bincount(
        plan.pack_of_sample, weights=sample_work, minlength=plan.packs
    ).astype(np.float64)
    return work


class Dispatcher:
    """Orders packs from workers, for all jobs of the coordinator."""

    def __init__(
        self,
        pool: WorkerPool,
        link: WorkerLink,
        *,
        on_receipt: Callable[[PackReceipt], Awaitable[None]],
        metrics: Metrics | None = None,
    ) -> None:
        self._pool = pool
        self._link = link
        self._on_receipt = on_receipt
        self._metrics = metrics or NoMetrics()
        self._outstanding: dict[str, float] = {}
        self._alive: set[str] = set()
        self._replacing: dict[str, asyncio.Task[None]] = {}

    async def dispatch(self, plan: StepPlan, orders: list[PackOrder]) -> DispatchedStep:
        """Choose a worker for each pack, least work first in line, and start decoding."""
        work = decode_work(plan).tolist()
        holders = [await self._choose(pack_work) for pack_work in work]
        step = DispatchedStep(plan=plan, orders=orders, work=work, holder=holders)
        for pack in range(plan.packs):
            self._start(step, pack)
        return step

    async def recover(self, step: DispatchedStep, worker_names: Iterable[str]) -> None:
        """A rank could not fetch from these workers: make the step's packs available again."""
        lost = set(worker_names)
        again = [pack for pack, holder in enumerate(step.holder) if holder.worker in lost]
        for pack in again:
            if step.decoding[pack].done():
                self._add_work(step.holder[pack].worker, step.work[pack])
                self._start(step, pack)
        if again:
            await asyncio.wait([step.decoding[pack] for pack in again])

    async def release(self, step: DispatchedStep, *, received: bool) -> None:
        """Free the workers' memory: every rank has `received` the step, or nobody wants it.

        A rank may have its bytes before we have the receipt, and the receipt names bad samples,
        so a received step's receipts are waited for.
        """
        tasks = list(step.decoding.values())
        if received:
            await asyncio.wait(tasks, timeout=RECEIPT_WAIT_S)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        packs: dict[WorkerInfo, list[PackKey]] = {}
        for order, holder in zip(step.orders, step.holder, strict=True):
            packs.setdefault(holder, []).append(order.key)
        job = step.orders[0].key.job
        await asyncio.gather(
            *(self._link.release(worker, job, keys) for worker, keys in packs.items())
        )

    def _start(self, step: DispatchedStep, pack: int) -> None:
        task = asyncio.create_task(self._prepare(step, pack))
        # Not in the task: one that is cancelled before its first turn runs no line of its own.
        task.add_done_callback(lambda _: self._add_work(step.holder[pack].worker, -step.work[pack]))
        step.decoding[pack] = task

    async def _prepare(self, step: DispatchedStep, pack: int) -> None:
        order = step.orders[pack]
        about = {"job": order.key.job, "step": order.key.step}
        for attempt in range(ORDER_TRIES):
            holder = step.holder[pack]
            try:
                await self._on_receipt(await self._link.prepare(holder, order))
                return
            except WorkerLostError as error:
                log.warning("%s lost pack %d: %s", holder.worker, pack, error, extra=about)
            except ServiceError as error:
                log.error("pack %d could not be prepared: %s", pack, error, extra=about)
                return
            await self._replace(holder.worker)
            await asyncio.sleep(RETRY_PAUSE_S * min(attempt, 4))
            step.holder[pack] = await self._choose(step.work[pack])
            self._add_work(holder.worker, -step.work[pack])
        log.error("no worker prepared pack %d in %d tries", pack, ORDER_TRIES, extra=about)

    async def _choose(self, work: float) -> WorkerInfo:
        """The worker with the shortest line; waits a while for one to exist."""
        deadline = asyncio.get_running_loop().time() + NO_WORKER_WAIT_S
        while not (workers := self._pool.workers()):
            if asyncio.get_running_loop().time() > deadline:
                raise WorkerLostError(
                    f"no worker has been alive to decode for {NO_WORKER_WAIT_S:.0f} s. Start "
                    "workers, or look in their logs for why they ended."
                )
            await asyncio.sleep(RETRY_PAUSE_S)
        self._note_alive({worker.worker for worker in workers})
        line = self._outstanding
        chosen = min(workers, key=lambda w: (line.get(w.worker, 0.0) / w.slots, w.worker))
        self._add_work(chosen.worker, work)
        return chosen

    def _note_alive(self, workers: set[str]) -> None:
        """Whoever has left the pool is lost, whether we or the pool noticed it."""
        for worker in self._alive - workers:
            log.warning("%s is lost", worker)
            self._metrics.worker_lost(worker)
        self._alive = workers

    def _add_work(self, worker: str, work: float) -> None:
        self._outstanding[worker] = self._outstanding.get(worker, 0.0) + work
        if worker in self._alive:
            self._metrics.work_outstanding(worker, self._outstanding[worker])

    async def _replace(self, worker: str) -> None:
        """Replace a worker once, however many packs notice its loss."""
        if worker not in self._replacing:
            self._replacing[worker] = asyncio.create_task(self._pool.replace(worker))
        try:
            await asyncio.shield(self._replacing[worker])
        except ServiceError as error:
            log.error("worker %s could not be replaced: %s", worker, error)
