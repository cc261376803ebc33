"""Packs that workers hold and no step claims: asked for, used for new orders, released in the end.

A coordinator that was killed leaves packs at workers that outlive it, and a release may fail to
arrive. The same question tells workers that a coordinator still commands them.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping

from dataservice.core.errors import ServiceError
from dataservice.core.order_columns import PackOrders
from dataservice.core.orders import Holdings, PackKey, PackSet, StorageOutage
from dataservice.core.ports import WorkerInfo, WorkerLink, WorkerPool

log = logging.getLogger(__name__)

ASK_EVERY_S = 15.0
# A pack that nobody has claimed for this time is released.
GRACE_S = 60.0


class OrphanedPacks:
    """Orphaned packs by worker, as of the last time that workers were asked."""

    def __init__(self, pool: WorkerPool, link: WorkerLink) -> None:
        self._pool = pool
        self._link = link
        self._since_s: dict[tuple[str, PackKey], float] = {}
        self._worker_of: dict[PackKey, str] = {}
        self._asked = False
        self.outages: tuple[StorageOutage, ...] = ()
        """The storage that workers wait for."""
        self.sent_bytes = 0, 0
        """What workers have sent to ranks, over gRPC and through memory."""

    def any_of(self, orders: PackOrders) -> bool:
        """Whether there may be one of their step to be claimed."""
        return any(key.step == orders.step for key in self._worker_of)

    def take(self, orders: PackOrders, place: int) -> str | None:
        """Claim an orphaned pack, one of those ordered. Returns the worker that holds it, None
        where none does."""
        return self._worker_of.pop(orders.key(place), None)

    async def ask(self, claimed: Callable[[], Mapping[str, PackSet]]) -> None:
        """Ask every worker what it holds, and release the packs that were not among those
        `claimed`, by worker, for too long."""
        workers = self._pool.workers()

        async def held_by(worker: WorkerInfo) -> Holdings:
            held = await self._held_by(worker)
            if not self._asked:  # of use before the last of them answers: nothing is ordered yet
                self._worker_of.update(dict.fromkeys(held.packs, worker.worker))
            return held

        holdings = await asyncio.gather(*map(held_by, workers))
        self.outages = tuple(outage for each in holdings for outage in each.outages)
        self.sent_bytes = (
            sum(each.grpc_bytes for each in holdings),
            sum(each.same_node_bytes for each in holdings),
        )
        self._asked = True
        # Only now, since what was ordered while they answered is claimed.
        taken = claimed()
        now_s, since_s = asyncio.get_running_loop().time(), self._since_s
        self._since_s, self._worker_of = {}, {}
        releases = []
        for worker, held in zip(workers, holdings, strict=True):
            stale = []
            for key in held.packs - taken.get(worker.worker, PackSet()):
                first_s = since_s.get((worker.worker, key), now_s)
                if now_s - first_s < GRACE_S:
                    self._since_s[worker.worker, key] = first_s
                    self._worker_of[key] = worker.worker
                else:
                    stale.append(key)
            if stale:
                log.info("%s holds %d packs that nobody claims", worker.worker, len(stale))
                releases.append(self._link.release(worker, stale[0].job, stale))
        await asyncio.gather(*releases)

    async def _held_by(self, worker: WorkerInfo) -> Holdings:
        try:
            return await self._link.ask_held(worker)
        except ServiceError as error:
            log.info("%s does not say what it holds: %s", worker.worker, error)
            return Holdings()
