"""Keeps a number of workers alive: what the in-process pool and the Ray pool share.

Seats are numbered; each holds one worker at a time, and every worker that sits down gets a
new name, `worker-<seat>.<incarnation>`, so that nothing meant for a dead one reaches its
successor.

Contract.
  start        returns when every seat has been tried, or when at least `min_workers` serve and no
               other worker has started for `others_timeout_s`. Seats still empty then are tried
               again, like those of dead workers. When fewer than `min_workers` serve, all workers
               are ended and `start` raises. Until it returns, `workers()` is empty: what is ordered
               is then shared out among all, and not given to the first of them. Workers that a
               former pool left behind keep their seats if this pool would start the same; other
               leftover workers are ended. When `min_workers` of them are found, `start` returns at
               once and the remaining seats are filled in the background.
  A worker     that dies or stops answering leaves `workers()` and is replaced in its seat; one that
               has not answered for `silent_after_s` is "silent" until it answers. A seat that
               cannot be filled is tried again, at growing intervals, until `stop`.
  replace      ends the worker and fills its seat. The name of a worker that has lost its seat is
               ignored, so two reports of one death start one successor. It does not raise when the
               successor fails to start: the seat's supervisor keeps trying.
  renew        gives a worker's seat to a successor, and keeps the worker, "draining", until it is
               drained or `drain_timeout_s` has passed. When there is no room for both, the worker
               drains first, in its seat.
  Cancelling   a `replace` or `renew` may leave a seat empty, which its supervisor fills, or a
               worker draining, which `stop` ends.
  stop         lets open streams finish for at most `stop_timeout_s`, then ends everything; it waits
               for a `replace` in progress. Workers that outlive the pool are left running instead.
               A stopped pool stays stopped.
"""

import asyncio
import contextlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

from dataservice.core.errors import ServiceError, SpecError, WorkerLostError
from dataservice.core.ports import WorkerInfo
from dataservice.core.whereabouts import ANYWHERE, Whereabouts

log = logging.getLogger(__name__)

Handle = TypeVar("Handle")


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolConfig:
    """How many workers there are, and the time limits by which they are watched."""

    workers: int
    min_workers: int = 1
    slots_per_worker: int = 2
    health_interval_s: float = 2.0
    silent_after_s: float = 5.0
    health_timeout_s: float = 20.0
    start_timeout_s: float = 120.0
    others_timeout_s: float = 20.0
    successor_timeout_s: float = 20.0
    drain_timeout_s: float = 300.0
    stop_timeout_s: float = 10.0
    longest_retry_s: float = 30.0

    def __post_init__(self) -> None:
        for name in ("workers", "min_workers", "slots_per_worker"):
            if getattr(self, name) < 1:
                raise SpecError(f"{name} is {getattr(self, name)}; it must be at least 1.")
        if self.min_workers > self.workers:
            raise SpecError(
                f"min_workers is {self.min_workers}, and there are {self.workers} workers; it "
                "must be at most as many."
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Running(Generic[Handle]):
    """A running worker: where it serves, and the handle by which it is watched and ended.
    `descriptors` and `where` are as in WorkerInfo."""

    worker: str
    address: str
    handle: Handle
    descriptors: int | None = None
    where: Whereabouts = ANYWHERE


@dataclass(kw_only=True, slots=True, eq=False)
class _Seat(Generic[Handle]):
    number: int
    incarnation: int = 0
    failures: int = 0
    failure: ServiceError | None = None
    info: WorkerInfo | None = None
    handle: Handle | None = None
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    tried: asyncio.Event = field(default_factory=asyncio.Event)

    def take(self, running: Running[Handle], slots: int) -> None:
        """Seat a worker."""
        self.info = WorkerInfo(
            worker=running.worker,
            address=running.address,
            slots=slots,
            descriptors=running.descriptors,
            where=running.where,
        )
        self.handle, self.failures, self.failure = running.handle, 0, None

    def holds(self, worker: str) -> bool:
        """Whether this very worker sits here."""
        return self.info is not None and self.info.worker == worker


class SupervisedPool(ABC, Generic[Handle]):
    """core.ports.WorkerPool; where and how a worker runs is left to the subclass."""

    def __init__(self, config: PoolConfig) -> None:
        self._config = config
        self._seats: list[_Seat[Handle]] = [_Seat(number=n) for n in range(config.workers)]
        self._leaving: dict[str, tuple[WorkerInfo, Handle]] = {}
        self._supervisors: list[asyncio.Task[None]] = []
        self._begun = False
        self._stopping = False

    # ---- where workers run -------------------------------------------------------------

    @abstractmethod
    async def _open(self) -> None:
        """Prepare to launch workers."""

    async def _found(self) -> list[Running[Handle]]:
        """Workers left behind by a former pool that are like those of this one. Any others are
        ended, and their names are noted with `_used`."""
        return []

    @abstractmethod
    async def _launch(self, worker: str) -> Running[Handle]:
        """Start a worker. Leaves nothing behind when it raises."""

    async def _resources_left(self) -> str:
        """The resources left for one more worker, in words; empty when they are not known."""
        return ""

    @abstractmethod
    async def _alive(self, handle: Handle) -> bool:
        """Ask the worker whether it is alive. It may never answer: the caller sets the limit."""

    @abstractmethod
    async def _end(self, handle: Handle, *, gracefully: bool) -> None:
        """End a worker, letting its streams finish if `gracefully`. Never raises."""

    @property
    def _outlived(self) -> bool:
        """Whether workers keep running when the pool stops."""
        return False

    @abstractmethod
    async def _close(self) -> None:
        """Undo `_open`."""

    # ---- core.ports.WorkerPool ---------------------------------------------------------

    async def start(self) -> None:
        """Start all workers; returns as the module's contract says. When fewer than `min_workers`
        serve, raises the ServiceError of the first worker that cannot start, or WorkerLostError
        when there is none."""
        await self._open()
        found = False
        try:
            found = await self._seat_found()
            self._supervisors = [asyncio.create_task(self._supervise(seat)) for seat in self._seats]
            if not self._enough:
                await self._all_tried()
            self._require_enough()
        except BaseException:
            await self._stop(keep=found and self._outlived)
            raise
        self._begun = True
        if short := self.shortfall():
            log.warning("serving with fewer workers than wanted: %s", short)

    def workers(self) -> tuple[WorkerInfo, ...]:
        """The workers now believed to be alive, by seat; then those that are draining. None before
        `start` has returned."""
        if not self._begun:
            return ()
        seated = (seat.info for seat in self._seats if seat.info is not None)
        return (*seated, *(info for info, _ in self._leaving.values()))

    def shortfall(self) -> str:
        """How many workers are missing, why, and what is done about it; empty when none is
        missing."""
        empty = [seat for seat in self._seats if seat.info is None]
        if not empty:
            return ""
        number = f"{len(empty)} of {len(self._seats)} workers"
        failed = [seat for seat in empty if seat.failure is not None]
        if not failed:
            return f"{number} are being started"
        again_s = max(map(self._pause_s, failed))
        return f"{number} are missing and tried again every {again_s:.0f} s: {failed[0].failure}"

    async def replace(self, worker: str) -> None:
        """End a worker that does not answer, and start another in its seat."""
        if worker in self._leaving:
            await self._end_leaving(worker, gracefully=False)
            return
        for seat in self._seats:
            if not self._stopping and seat.holds(worker):
                async with seat.lock:
                    if seat.holds(worker):
                        await self._empty(seat, gracefully=False)
                        await self._try_fill(seat)
                return

    async def renew(
        self, workers: Collection[str], drained: Callable[[str], Awaitable[None]]
    ) -> None:
        """Replace these workers, one after another, as the module's contract says."""
        for worker in workers:
            for seat in self._seats:
                if seat.holds(worker) and not self._stopping:
                    await self._renew(seat, worker, drained)

    async def stop(self) -> None:
        """Stop watching, let open streams finish, and end all workers except those that outlive the
        pool."""
        await self._stop(keep=self._outlived)

    async def _stop(self, *, keep: bool) -> None:
        self._stopping = True
        for task in self._supervisors:
            task.cancel()
        await asyncio.gather(*self._supervisors, return_exceptions=True)
        self._supervisors = []
        leaving = [] if keep else list(self._leaving)
        await asyncio.gather(
            *(self._vacate(seat, keep=keep) for seat in self._seats),
            *(self._end_leaving(worker, gracefully=True) for worker in leaving),
        )
        self._leaving.clear()
        await self._close()

    # ---- one seat ----------------------------------------------------------------------

    async def _seat_found(self) -> bool:
        """Give workers of a former pool their seats; if several claim a seat, the newest gets
        it."""
        surplus = []
        for running in sorted(await self._found(), key=lambda r: _place(r.worker), reverse=True):
            number, _ = _place(running.worker)
            if number < len(self._seats) and self._seats[number].info is None:
                self._seats[number].take(running, self._config.slots_per_worker)
                self._used(running.worker)
                log.info("%s goes on serving at %s", running.worker, running.address)
            else:
                surplus.append(running.handle)
        await asyncio.gather(*(self._end(handle, gracefully=True) for handle in surplus))
        return any(seat.info is not None for seat in self._seats)

    def _used(self, worker: str) -> None:
        """Never give this name to a worker again."""
        number, incarnation = _place(worker)
        if number < len(self._seats):
            seat = self._seats[number]
            seat.incarnation = max(seat.incarnation, incarnation)

    async def _started(self, seat: _Seat[Handle], timeout_s: float) -> Running[Handle]:
        seat.incarnation += 1
        worker = f"worker-{seat.number}.{seat.incarnation}"
        try:
            async with asyncio.timeout(timeout_s):
                running = await self._launch(worker)
        except TimeoutError as error:
            left = await self._resources_left()
            raise WorkerLostError(
                f"{worker} did not start within {timeout_s:g} s{left}. Look at the "
                "workers' logs, ask for fewer workers, or raise worker_start_timeout_s."
            ) from error
        except ServiceError:
            raise
        except Exception as error:
            raise WorkerLostError(
                f"{worker} did not start: {type(error).__name__}: {error}. Look at the workers' "
                "logs."
            ) from error
        log.info("%s serves at %s", worker, running.address)
        return running

    async def _fill(self, seat: _Seat[Handle]) -> None:
        running = await self._started(seat, self._config.start_timeout_s)
        seat.take(running, self._config.slots_per_worker)

    @property
    def _seated(self) -> int:
        return sum(seat.info is not None for seat in self._seats)

    @property
    def _enough(self) -> bool:
        """Whether at least `min_workers` serve."""
        return self._seated >= self._config.min_workers

    async def _all_tried(self) -> None:
        """Wait until every seat has been tried once; when enough workers serve, only while others
        keep starting."""
        empty = [seat for seat in self._seats if seat.info is None]
        trying = {asyncio.create_task(seat.tried.wait()) for seat in empty}
        try:
            while trying:
                limit_s = self._config.others_timeout_s if self._enough else None
                tried, trying = await asyncio.wait(
                    trying, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED
                )
                if not tried:
                    return
        finally:
            for task in trying:
                task.cancel()

    def _require_enough(self) -> None:
        if self._enough:
            return
        failures = (seat.failure for seat in self._seats if seat.failure is not None)
        error = next(failures, WorkerLostError("workers die as they start; look at their logs."))
        serving, config = self._seated, self._config
        if serving == 0:
            raise error
        raise type(error)(
            f"{serving} of {config.workers} workers serve, and min_workers is "
            f"{config.min_workers}: {error}"
        ) from error

    async def _try_fill(self, seat: _Seat[Handle]) -> None:
        try:
            await self._fill(seat)
        except ServiceError as error:
            seat.failures += 1
            seat.failure = error
            log.error("seat %d stays empty for now: %s", seat.number, error)
        finally:
            seat.tried.set()

    async def _empty(self, seat: _Seat[Handle], *, gracefully: bool) -> None:
        handle, seat.info, seat.handle = seat.handle, None, None
        if handle is not None:
            await self._end_within(handle, gracefully=gracefully)

    async def _end_within(self, handle: Handle, *, gracefully: bool) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._config.stop_timeout_s if gracefully else None):
                await self._end(handle, gracefully=gracefully)
            return
        await self._end(handle, gracefully=False)

    async def _vacate(self, seat: _Seat[Handle], *, keep: bool) -> None:
        async with seat.lock:  # a successor that is being started must be ended too
            if keep:
                seat.info = seat.handle = None
            else:
                await self._empty(seat, gracefully=True)

    # ---- renewing ----------------------------------------------------------------------

    async def _renew(
        self, seat: _Seat[Handle], worker: str, drained: Callable[[str], Awaitable[None]]
    ) -> None:
        async with seat.lock:
            if not seat.holds(worker):
                return
            try:
                successor = await self._started(seat, self._config.successor_timeout_s)
            except ServiceError as error:
                log.info("%s drains before its successor starts: %s", worker, error)
                assert seat.info is not None, "the seat holds the worker"
                seat.info = replace(seat.info, state="draining")
            else:
                assert seat.info is not None, "the seat holds the worker"
                assert seat.handle is not None, "the seat holds the worker"
                self._leaving[worker] = (replace(seat.info, state="draining"), seat.handle)
                seat.take(successor, self._config.slots_per_worker)
        try:
            async with asyncio.timeout(self._config.drain_timeout_s):
                await drained(worker)
        except TimeoutError:
            log.warning(
                "%s still holds packs after %g s and ends now: they are decoded again",
                worker,
                self._config.drain_timeout_s,
            )
        await self._end_leaving(worker, gracefully=True)
        async with seat.lock:
            if seat.holds(worker):
                await self._empty(seat, gracefully=True)
                await self._try_fill(seat)

    async def _end_leaving(self, worker: str, *, gracefully: bool) -> None:
        _, handle = self._leaving.pop(worker, (None, None))
        if handle is not None:
            await self._end_within(handle, gracefully=gracefully)

    # ---- supervision -------------------------------------------------------------------

    async def _supervise(self, seat: _Seat[Handle]) -> None:
        pause_s = 0.0 if seat.info is None else self._pause_s(seat)
        while True:
            await asyncio.sleep(pause_s)
            try:
                await self._look_after(seat)
            except Exception:
                log.exception("watching seat %d failed; it goes on", seat.number)
            pause_s = self._pause_s(seat)

    def _pause_s(self, seat: _Seat[Handle]) -> float:
        doubled_s = self._config.health_interval_s * 2.0 ** min(seat.failures, 16)
        return max(self._config.health_interval_s, min(doubled_s, self._config.longest_retry_s))

    async def _look_after(self, seat: _Seat[Handle]) -> None:
        info, handle = seat.info, seat.handle
        if info is None or handle is None:
            async with seat.lock:
                if seat.info is None:
                    await self._try_fill(seat)
            return
        if not await self._answers(seat, info.worker, handle):
            log.warning("%s at %s is gone; starting another", info.worker, info.address)
            await self.replace(info.worker)

    async def _answers(self, seat: _Seat[Handle], worker: str, handle: Handle) -> bool:
        asked = asyncio.ensure_future(self._alive(handle))
        patience_s = min(self._config.silent_after_s, self._config.health_timeout_s)
        try:
            await asyncio.wait({asked}, timeout=patience_s)
            if not asked.done():
                log.warning("%s has been silent for %g s", worker, patience_s)
                self._mark(seat, worker, silent=True)
                await asyncio.wait({asked}, timeout=self._config.health_timeout_s - patience_s)
            answered = asked.done() and asked.result()
        finally:
            asked.cancel()
        if answered:
            self._mark(seat, worker, silent=False)
        return answered

    def _mark(self, seat: _Seat[Handle], worker: str, *, silent: bool) -> None:
        info = seat.info
        if info is not None and info.worker == worker and info.state != "draining":
            seat.info = replace(info, state="silent" if silent else "serving")


def _place(worker: str) -> tuple[int, int]:
    """The seat and the incarnation in a worker's name."""
    seat, _, incarnation = worker.removeprefix("worker-").partition(".")
    return int(seat), int(incarnation)
