"""Orders of packs at workers: made, answered, refused, lost; and which workers there are.

Contract. An order is a task. However it ends (answered, failed, cancelled), its work leaves
the worker's line once. Unanswered, it also leaves the pack's copies, so a pack without copies
is one that must be ordered again; `wake` is set for whoever sees to that. A worker that an
order finds lost is replaced once, however many orders do.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Coroutine
from typing import Any

from dataservice.core.errors import ServiceError, WorkerLostError
from dataservice.core.orders import PackReceipt
from dataservice.core.ports import Metrics, WorkerInfo, WorkerLink, WorkerPool
from dataservice.engine.lines import Lines
from dataservice.engine.pace import Pace
from dataservice.engine.places import Copy, DispatchedStep, PackPlace

log = logging.getLogger(__name__)

# How often in a row an order may fail before the ranks that wait are told.
ORDER_TRIES = 8
RETRY_PAUSE_S = 0.5
LONGEST_PAUSE_S = 5.0


class Ordering:
    """Makes orders for the steps in `steps`, and keeps their copies true."""

    def __init__(
        self,
        pool: WorkerPool,
        link: WorkerLink,
        *,
        on_receipt: Callable[[PackReceipt], Awaitable[None]],
        metrics: Metrics,
    ) -> None:
        self._pool = pool
        self._link = link
        self._on_receipt = on_receipt
        self._metrics = metrics
        self._replacing: set[str] = set()
        self._tasks: set[asyncio.Task[Any]] = set()
        self.steps: dict[DispatchedStep, None] = {}
        self.alive: dict[str, WorkerInfo] = {}
        self.retiring: set[str] = set()  # they may drain and end between two looks
        self.lines = Lines(metrics)
        self.pace = Pace()
        self.wake = asyncio.Event()

    # ---- workers --------------------------------------------------------------------------

    def see_workers(self) -> None:
        """Look who is alive. Whoever has left the pool is gone, and so are its copies."""
        before, self.alive = self.alive, {info.worker: info for info in self._pool.workers()}
        self.lines.know(frozenset(self.alive))
        serving = (info for info in self.alive.values() if info.state == "serving")
        self._metrics.worker_slots(sum(info.slots for info in serving))
        for name, info in before.items():
            if name in self.alive:
                continue
            if info.state == "draining" or name in self.retiring:
                self.retiring.discard(name)
                log.info("%s has ended", name)
                self._metrics.worker_retired(name)
            else:
                log.warning("%s is lost", name)
                self._metrics.worker_lost(name)
            for step in self.steps:
                for pack, place in enumerate(step.places):
                    if name in place.copies:
                        self.forget(step, pack, name)

    def takers(self, *, silent: bool = True) -> list[WorkerInfo]:
        """Workers that may be given orders; silent ones if there are no others."""
        known = [w for name, w in self.alive.items() if name not in self._replacing]
        serving = [w for w in known if w.state == "serving"]
        return serving or [w for w in known if silent and w.state == "silent"]

    def shortest_line(self, workers: Collection[WorkerInfo]) -> WorkerInfo | None:
        """The worker with the shortest line for its slots."""
        return min(workers, key=lambda w: (self.line_of(w), w.worker), default=None)

    def line_of(self, worker: WorkerInfo) -> float:
        """The work that each of a worker's slots has before it."""
        return self.lines.of(worker.worker) / worker.slots

    def is_silent(self, worker: str) -> bool:
        """The worker has not answered for a while."""
        info = self.alive.get(worker)
        return info is not None and info.state == "silent"

    # ---- orders ---------------------------------------------------------------------------

    def order(
        self, step: DispatchedStep, pack: int, worker: WorkerInfo, *, hedge: bool = False
    ) -> None:
        """Order a pack from a worker. The same order twice is decoded once."""
        place = step.places[pack]
        copy = Copy(
            worker=worker,
            ordered_s=asyncio.get_running_loop().time(),
            line=self.line_of(worker) + place.work,
            hedge=hedge,
        )
        self.lines.add(worker.worker, place.work)
        place.copies[worker.worker] = copy
        if not place.ready:
            step.pending.add(pack)
        copy.task = asyncio.create_task(self._have_prepared(step, pack, copy))
        # Not in the task: one that is cancelled before its first turn runs no line of its own.
        copy.task.add_done_callback(lambda _: self._ended(step, pack, copy))
        step.note_change()

    def forget(self, step: DispatchedStep, pack: int, worker: str) -> None:
        """The worker no longer has its copy, and will not have it."""
        place = step.places[pack]
        copy = place.copies.pop(worker)
        if copy.task is not None:
            copy.task.cancel()
        if not place.ready:
            step.pending.add(pack)
        step.note_change()
        self.wake.set()

    async def _have_prepared(self, step: DispatchedStep, pack: int, copy: Copy) -> None:
        place, name = step.places[pack], copy.worker.worker
        try:
            receipt = await self._link.prepare(copy.worker, place.order)
        except WorkerLostError as error:
            log.warning("%s lost pack %d: %s", name, pack, error, extra=step.about)
            self._note_failure(place, error)
            self._replace(name)
        except ServiceError as error:
            log.error("%s refused pack %d: %s", name, pack, error, extra=step.about)
            self._note_failure(place, error)
        except Exception as error:
            log.exception("ordering pack %d from %s failed", pack, name, extra=step.about)
            self._note_failure(place, ServiceError(f"{name} could not be asked: {error!r}"))
        else:
            self.pace.note(step.job, work=place.work, decode_s=receipt.decode_s)
            self._note_ready(step, pack, copy)
            try:
                await self._on_receipt(receipt)
            except ServiceError as error:
                log.error("pack %d's receipt was not noted: %s", pack, error, extra=step.about)

    def _ended(self, step: DispatchedStep, pack: int, copy: Copy) -> None:
        place, name = step.places[pack], copy.worker.worker
        self.lines.remove(name, place.work)
        if not copy.ready and place.copies.get(name) is copy:
            self.forget(step, pack, name)

    def _note_failure(self, place: PackPlace, error: ServiceError) -> None:
        pause_s = RETRY_PAUSE_S * 2.0 ** (place.tries - 1) if place.tries else 0.0
        place.not_before_s = asyncio.get_running_loop().time() + min(pause_s, LONGEST_PAUSE_S)
        place.tries += 1
        if place.tries >= ORDER_TRIES:
            place.failure = error

    def _note_ready(self, step: DispatchedStep, pack: int, copy: Copy) -> None:
        place = step.places[pack]
        copy.ready_s = asyncio.get_running_loop().time()
        place.tries, place.failure = 0, None
        step.pending.discard(pack)
        losers = [c for c in place.copies.values() if not c.ready and (c.hedge or copy.hedge)]
        for loser in losers:
            del place.copies[loser.worker.worker]
            assert loser.task is not None, "an order that is not ready is under way"
            loser.task.cancel()
            # Ranks that wait there are told that it is not held, and come for other tickets.
            self.background(self._link.release(loser.worker, step.job, [place.order.key]))
        step.note_change()

    # ---- a lost worker --------------------------------------------------------------------

    def _replace(self, worker: str) -> None:
        if worker not in self._replacing:
            self._replacing.add(worker)
            self.background(self._have_replaced(worker))

    async def _have_replaced(self, worker: str) -> None:
        try:
            await self._pool.replace(worker)
        except ServiceError as error:
            log.error("worker %s could not be replaced: %s", worker, error)
        finally:
            self._replacing.discard(worker)
            self.wake.set()

    # ---- tasks ----------------------------------------------------------------------------

    def background(self, work: Coroutine[Any, Any, None]) -> None:
        """Run it, and keep it until it ends or `stop`."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def stop(self) -> None:
        """Cancel every order and whatever is under way."""
        steps = list(self.steps)
        self.steps.clear()
        copies = [c for step in steps for place in step.places for c in place.copies.values()]
        tasks = [*self._tasks, *(copy.task for copy in copies if copy.task is not None)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
