"""Have workers decode a step again, beside what they decode for training, to compare it.

    step plan ──► orders under names of their own ──► a few packs at a time ──► Delivered
                                                      ordered, told, released

Contract. The packs are named by a word that no plan has, so that none that is held for training
is taken for one of them, nor one of them handed to a rank. They are ordered as for a job of its
own within the team: decoding time is shared with the team's jobs as theirs is among each other,
and counts for the team's weight and limit. No more packs than the workers have slots are held or
decoded at once, and those of one step of a job at a time. However it ends, workers release them.
"""

import asyncio
import uuid
from collections import defaultdict
from functools import partial

from dataservice.core.errors import ServiceError, WorkerLostError
from dataservice.core.job_setup import JobSetup
from dataservice.core.order_columns import PackOrders
from dataservice.core.plan import StepPlan
from dataservice.core.ports import WorkerPool
from dataservice.engine.affinity import PackWishes
from dataservice.engine.delivered import Delivered
from dataservice.engine.dispatch import Dispatcher
from dataservice.engine.pack_orders import pack_orders
from dataservice.engine.placement import DispatchedStep
from dataservice.engine.shares import Shares
from dataservice.engine.step_threads import StepThreads

# Refusals in a row after which a pack counts as refused.
REFUSALS = 2


class Redecoder:
    """Decodes steps again, for all jobs of the coordinator."""

    def __init__(
        self, dispatcher: Dispatcher, pool: WorkerPool, shares: Shares, threads: StepThreads
    ) -> None:
        self._dispatcher = dispatcher
        self._pool = pool
        self._shares = shares
        self._threads = threads
        self._turn: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def orders(self, setup: JobSetup, plan: StepPlan) -> PackOrders:
        """The orders of a step's packs under names of their own. Raises what looking its samples up
        does."""
        job = setup.record.name
        ordering = partial(
            pack_orders,
            plan,
            setup.catalog,
            job=f"{job} (replay)",
            digest=f"replay-{uuid.uuid4().hex}",
            pipeline=setup.pipeline,
            share=self._shares(job),
        )
        return await self._threads.look_up(setup, ordering)

    async def decode(self, setup: JobSetup, plan: StepPlan, orders: PackOrders) -> Delivered:
        """What workers deliver for these orders of a step now. Raises the error with which they
        refuse a pack."""
        delivered = Delivered(plan, orders)
        wishes = PackWishes(keys=setup.catalog.row_keys(plan.sample_ids), replicas=())
        async with self._turn[setup.record.name]:
            begun = 0
            while begun < len(orders):
                some = orders[begun : begun + self._at_once]
                await self._decode_some(plan, some, delivered, wishes)
                begun += len(some)
        return delivered

    @property
    def _at_once(self) -> int:
        return max(1, sum(worker.slots for worker in self._pool.workers()))

    async def _decode_some(
        self, plan: StepPlan, orders: PackOrders, delivered: Delivered, wishes: PackWishes
    ) -> None:
        step = await self._dispatcher.dispatch(plan, orders, delivered=delivered, wishes=wishes)
        try:
            while delivered.missing.intersection(orders.pack.tolist()):
                if error := _refusal(step):
                    raise error
                await step.next_change()
        finally:
            await self._dispatcher.release(step, received=False)


def _refusal(step: DispatchedStep) -> ServiceError | None:
    for placement in step.placements.apart.values():
        refused = placement.tries >= REFUSALS and not isinstance(placement.error, WorkerLostError)
        if placement.failure is not None or refused:
            return placement.failure or placement.error
    return None
