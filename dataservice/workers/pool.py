"""Keeps a number of workers alive: what the in-process pool and the Ray pool share.

Seats are numbered; each holds one worker at a time, and every worker that sits down gets a
new name, `worker-<seat>.<incarnation>`, so that nothing meant for a dead one reaches its
successor.

Contract.
  start        returns when every seat serves; if one cannot be filled, all are ended and it
               raises. Workers that a former pool left behind keep their seats if they are like
               those this pool would start; others are ended. Where one was found it serves
               alone at first: start returns, and the other seats are filled meanwhile.
  A worker     that dies or stops answering leaves `workers()` and is replaced in its seat; one
               that has not answered for `silent_after_s` is "silent" until it does. A seat that
               cannot be filled is tried again, ever more slowly, until `stop`.
  replace      ends the worker and fills its seat. A name that no longer sits is ignored, so
               two reports of one death start one successor. It does not raise when the
               successor fails to start: the seat's supervisor goes on trying.
  renew        gives a worker's seat to a successor, and keeps the worker, "draining", until it
               is drained or `drain_timeout_s` is over. Where there is no room for both it
               drains first, in its seat.
  Cancelling   `replace` or `renew` may leave a seat empty, which its supervisor fills, or a
               worker draining, which `stop` ends.
  stop         lets open streams finish up to `stop_timeout_s`, then ends everything; it waits
               for a `replace` that is under way. Workers that outlive the pool are let go
               instead. A pool that has stopped stays stopped.
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

logger = logging.getLogger(__name__)

Handle = TypeVar("Handle")


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolConfig:
    """How many workers, and how patiently they are watched."""

    workers: int
    slots_per_worker: int = 2
    health_interval_s: float = 2.0
    silent_after_s: float = 5.0
    health_timeout_s: float = 20.0
    start_timeout_s: float = 60.0
    successor_timeout_s: float = 20.0
    drain_timeout_s: float = 300.0
    stop_timeout_s: float = 10.0
    longest_retry_s: float = 30.0

    def __post_init__(self) -> None:
        for name in ("workers", "slots_per_worker"):
            if getattr(self, name) < 1:
                raise SpecError(f"{name} is {getattr(self, name)}; it must be at least 1.")


@dataclass(frozen=True, kw_only=True, slots=True)
class Running(Generic[Handle]):
    """A worker that runs: where it serves, and how it is reached to be watched and ended."""

    worker: str
    address: str
    handle: Handle


@dataclass(kw_only=True, slots=True, eq=False)
class _Seat(Generic[Handle]):
    number: int
    incarnation: int = 0
    failures: int = 0
    info: WorkerInfo | None = None
    handle: Handle | None = None
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    def take(self, running: Running[Handle], slots: int) -> None:
        """Seat a worker."""
        self.info = WorkerInfo(worker=running.worker, address=running.address, slots=slots)
        self.handle, self.failures = running.handle, 0

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
        self._stopping = False

    # ---- where workers run -------------------------------------------------------------

    @abstractmethod
    async def _open(self) -> None:
        """Make ready to launch workers."""

    async def _found(self) -> list[Running[Handle]]:
        """Workers left behind by a former pool that are like those of this one. What else it
        left is ended, and its names noted with `_used`."""
        return []

    @abstractmethod
    async def _launch(self, worker: str) -> tuple[str, Handle]:
        """Start a worker; (address, handle). Leaves nothing behind when it raises."""

    @abstractmethod
    async def _alive(self, handle: Handle) -> bool:
        """Ask the worker whether it lives. May take for ever: the caller sets the limit."""

    @abstractmethod
    async def _end(self, handle: Handle, *, gracefully: bool) -> None:
        """End a worker, letting its streams finish if `gracefully`. Never raises."""

    @property
    def _outlived(self) -> bool:
        """Whether workers go on when the pool stops."""
        return False

    @abstractmethod
    async def _close(self) -> None:
        """Undo `_open`."""

    # ---- core.ports.WorkerPool ---------------------------------------------------------

    async def start(self) -> None:
        """Start all workers; returns when each serves, or those that were found. Raises the
        ServiceError of the first that cannot start, WorkerLostError where it gave none."""
        await self._open()
        found = False
        try:
            found = await self._seat_found()
            if not found:
                await self._fill_all()
        except BaseException:
            await self._stop(keep=found and self._outlived)
            raise
        self._supervisors = [asyncio.create_task(self._supervise(seat)) for seat in self._seats]

    def workers(self) -> tuple[WorkerInfo, ...]:
        """The workers now believed to be alive, by seat; then those that leave."""
        seated = (seat.info for seat in self._seats if seat.info is not None)
        return (*seated, *(info for info, _ in self._leaving.values()))

    async def replace(self, worker: str) -> None:
        """The worker does not answer: end it and start another in its seat."""
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
        """Stop watching, let open streams finish, end all workers but those that outlive us."""
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
        """Give workers of a former pool their seats; the newest of a seat, if there is one."""
        surplus = []
        for running in sorted(await self._found(), key=lambda r: _place(r.worker), reverse=True):
            number, _ = _place(running.worker)
            if number < len(self._seats) and self._seats[number].info is None:
                self._seats[number].take(running, self._config.slots_per_worker)
                self._used(running.worker)
                logger.info("%s goes on serving at %s", running.worker, running.address)
            else:
                surplus.append(running.handle)
        await asyncio.gather(*(self._end(handle, gracefully=True) for handle in surplus))
        return any(seat.info is not None for seat in self._seats)

    def _used(self, worker: str) -> None:
        """This name is never to be given again."""
        number, incarnation = _place(worker)
        if number < len(self._seats):
            seat = self._seats[number]
            seat.incarnation = max(seat.incarnation, incarnation)

    async def _started(self, seat: _Seat[Handle], timeout_s: float) -> Running[Handle]:
        seat.incarnation += 1
        worker = f"worker-{seat.number}.{seat.incarnation}"
        try:
            async with asyncio.timeout(timeout_s):
                address, handle = await self._launch(worker)
        except TimeoutError as error:
            raise WorkerLostError(
                f"{worker} did not start within {timeout_s:g} s. Look at the workers' logs, ask "
                "for fewer workers, or raise start_timeout_s."
            ) from error
        except ServiceError:
            raise
        except Exception as error:
            raise WorkerLostError(
                f"{worker} did not start: {type(error).__name__}: {error}. Look at the workers' "
                "logs."
            ) from error
        logger.info("%s serves at %s", worker, address)
        return Running(worker=worker, address=address, handle=handle)

    async def _fill(self, seat: _Seat[Handle]) -> None:
        running = await self._started(seat, self._config.start_timeout_s)
        seat.take(running, self._config.slots_per_worker)

    async def _fill_all(self) -> None:
        """Every seat; all have been tried when it raises what the first failed with."""
        filled = await asyncio.gather(*map(self._fill, self._seats), return_exceptions=True)
        for error in filled:
            if error is not None:
                raise error

    async def _try_fill(self, seat: _Seat[Handle]) -> None:
        try:
            await self._fill(seat)
        except Exception as error:
            self._note_failure(seat, error)

    def _note_failure(self, seat: _Seat[Handle], error: BaseException) -> None:
        seat.failures += 1
        logger.error("seat %d stays empty for now: %s", seat.number, error)

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
        async with seat.lock:  # a successor that is just starting must not be missed
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
                logger.info("%s drains before its successor starts: %s", worker, error)
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
            logger.warning(
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
                logger.exception("watching seat %d failed; it goes on", seat.number)
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
            logger.warning("%s at %s is gone; starting another", info.worker, info.address)
            await self.replace(info.worker)

    async def _answers(self, seat: _Seat[Handle], worker: str, handle: Handle) -> bool:
        asked = asyncio.ensure_future(self._alive(handle))
        patience_s = min(self._config.silent_after_s, self._config.health_timeout_s)
        try:
            await asyncio.wait({asked}, timeout=patience_s)
            if not asked.done():
                logger.warning("%s has been silent for %g s", worker, patience_s)
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
    """The seat and the incarnation that a worker's name tells."""
    seat, _, incarnation = worker.removeprefix("worker-").partition(".")
    return int(seat), int(incarnation)
