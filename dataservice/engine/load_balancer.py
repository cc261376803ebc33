"""Which workers there are, how much work is queued at each, and so who gets the next order.

Work is counted in tokens, see `pack_orders.decode_work`. Contract: a worker that an order finds
lost is replaced once, however many orders find it so, and gets no orders meanwhile; `wake` is set
once it is replaced.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Collection

from dataservice.core.errors import ServiceError
from dataservice.core.ports import Metrics, WorkerInfo, WorkerPool
from dataservice.engine.tasks import cancel_all

log = logging.getLogger(__name__)


class LoadBalancer:
    """`workers` by name, as they were when they were last looked at, and which were `silent`."""

    def __init__(self, pool: WorkerPool, metrics: Metrics, *, wake: asyncio.Event) -> None:
        self._pool = pool
        self._metrics = metrics
        self._wake = wake
        self._queued: Counter[str] = Counter()
        self._retiring: set[str] = set()  # they may drain and end between two looks
        self._replacements: dict[str, asyncio.Task[None]] = {}
        self.workers: dict[str, WorkerInfo] = {}
        self.silent: frozenset[str] = frozenset()

    # ---- workers --------------------------------------------------------------------------

    def refresh(self) -> list[str]:
        """Look which workers there are. Returns those that have gone since the last look."""
        before, self.workers = self.workers, {info.worker: info for info in self._pool.workers()}
        serving = [info for info in self.workers.values() if info.state == "serving"]
        silent = (name for name, info in self.workers.items() if info.state == "silent")
        self.silent = frozenset(silent)
        self._metrics.workers_serving(len(serving), slots=sum(info.slots for info in serving))
        gone = [info for name, info in before.items() if name not in self.workers]
        for info in gone:
            if info.state == "draining" or info.worker in self._retiring:
                self._retiring.discard(info.worker)
                log.info("%s has ended", info.worker)
                self._metrics.worker_retired(info.worker)
            else:
                log.warning("%s is lost", info.worker)
                self._metrics.worker_lost(info.worker)
        return [info.worker for info in gone]

    def retire(self, worker: str) -> None:
        """The worker will end soon: that is then no loss."""
        self._retiring.add(worker)

    def is_silent(self, worker: str) -> bool:
        """The worker has not answered for a while."""
        return worker in self.silent

    def replace(self, worker: str) -> None:
        """Have the pool replace a worker that does not answer."""
        if worker not in self._replacements:
            self._replacements[worker] = asyncio.create_task(self._have_replaced(worker))

    async def _have_replaced(self, worker: str) -> None:
        try:
            await self._pool.replace(worker)
        except ServiceError as error:
            log.error("worker %s could not be replaced: %s", worker, error)
        finally:
            del self._replacements[worker]
            self._wake.set()

    async def stop(self) -> None:
        """Wait for no replacement any more."""
        await cancel_all(*self._replacements.values())

    # ---- queued work ----------------------------------------------------------------------

    def candidates(self, *, silent: bool = True) -> list[WorkerInfo]:
        """Workers that may be given orders; silent ones if there are no others."""
        known = [info for name, info in self.workers.items() if name not in self._replacements]
        serving = [info for info in known if info.state == "serving"]
        return serving or [info for info in known if silent and info.state == "silent"]

    def least_loaded(self, workers: Collection[WorkerInfo]) -> WorkerInfo | None:
        """The one of these workers with the least work queued for each of its slots."""
        return min(workers, key=lambda w: (self.queued_per_slot(w), w.worker), default=None)

    def queued(self, worker: str) -> int:
        """The work ordered from a worker and not done."""
        return self._queued[worker]

    def queued_per_slot(self, worker: WorkerInfo) -> float:
        """The work that each slot of a worker has before it."""
        return self.queued(worker.worker) / worker.slots

    def add(self, worker: str, work: int) -> None:
        """An order of this work was made, or, where it is negative, has ended."""
        self._queued[worker] += work
        if worker in self.workers:
            self._metrics.work_outstanding(worker, self._queued[worker])
        if not self._queued[worker]:
            del self._queued[worker]  # names are not used again
