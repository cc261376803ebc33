"""Keeps a number of workers alive: what the in-process pool and the Ray pool share.

Seats are numbered; each holds one worker at a time, and every worker that sits down gets a
new name, `worker-<seat>.<incarnation>`, so that nothing meant for a dead one reaches its
successor.

Contract.
  start        returns when every seat serves; if one cannot, all are ended and it raises.
  A worker     that dies or stops answering leaves `workers()` and is replaced in its seat. A
               seat that cannot be filled is tried again, ever more slowly, until `stop`.
  replace      ends the worker and fills its seat. A name that no longer sits is ignored, so
               two reports of one death start one successor. It does not raise when the
               successor fails to start: the seat's supervisor goes on trying.
  Cancelling   `replace` leaves the seat empty; its supervisor fills it.
  stop         lets open streams finish up to `stop_timeout_s`, then ends everything; it waits
               for a `replace` that is under way. A pool that has stopped stays stopped.
"""

import asyncio
import contextlib
import logging
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
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
    health_timeout_s: float = 20.0
    start_timeout_s: float = 60.0
    stop_timeout_s: float = 10.0
    longest_retry_s: float = 30.0

    def __post_init__(self) -> None:
        for name in ("workers", "slots_per_worker"):
            if getattr(self, name) < 1:
                raise SpecError(f"{name} is {getattr(self, name)}; it must be at least 1.")


@dataclass(kw_only=True, slots=True, eq=False)
class _Seat(Generic[Handle]):
    number: int
    incarnation: int = 0
    failures: int = 0
    info: WorkerInfo | None = None
    handle: Handle | None = None
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class SupervisedPool(ABC, Generic[Handle]):
    """core.ports.WorkerPool; where and how a worker runs is left to the subclass."""

    def __init__(self, config: PoolConfig) -> None:
        self._config = config
        self._seats: list[_Seat[Handle]] = [_Seat(number=n) for n in range(config.workers)]
        self._supervisors: list[asyncio.Task[None]] = []
        self._stopping = False

    # ---- where workers run -------------------------------------------------------------

    @abstractmethod
    async def _open(self) -> None:
        """Make ready to launch workers."""

    @abstractmethod
    async def _launch(self, worker: str) -> tuple[str, Handle]:
        """Start a worker; (address, handle). Leaves nothing behind when it raises."""

    @abstractmethod
    async def _alive(self, handle: Handle) -> bool:
        """Ask the worker whether it lives. May take for ever: the caller sets the limit."""

    @abstractmethod
    async def _end(self, handle: Handle, *, gracefully: bool) -> None:
        """End a worker, letting its streams finish if `gracefully`. Never raises."""

    @abstractmethod
    async def _close(self) -> None:
        """Undo `_open`."""

    # ---- core.ports.WorkerPool ---------------------------------------------------------

    async def start(self) -> None:
        """Start all workers; returns when each serves. Raises the ServiceError of the first
        that cannot start, WorkerLostError where it gave none."""
        await self._open()
        try:
            filled = await asyncio.gather(*map(self._fill, self._seats), return_exceptions=True)
            for error in filled:
                if error is not None:
                    raise error
        except BaseException:
            await self.stop()
            raise
        self._supervisors = [asyncio.create_task(self._supervise(seat)) for seat in self._seats]

    def workers(self) -> tuple[WorkerInfo, ...]:
        """The workers now believed to be alive, by seat."""
        return tuple(seat.info for seat in self._seats if seat.info is not None)

    async def replace(self, worker: str) -> None:
        """The worker does not answer: end it and start another in its seat."""
        for seat in self._seats:
            if not self._stopping and seat.info is not None and seat.info.worker == worker:
                async with seat.lock:
                    if seat.info is not None and seat.info.worker == worker:
                        await self._empty(seat, gracefully=False)
                        await self._try_fill(seat)
                return

    async def stop(self) -> None:
        """Stop watching, let open streams finish, end all workers."""
        self._stopping = True
        for task in self._supervisors:
            task.cancel()
        await asyncio.gather(*self._supervisors, return_exceptions=True)
        self._supervisors = []
        await asyncio.gather(*map(self._vacate, self._seats))
        await self._close()

    # ---- one seat ----------------------------------------------------------------------

    async def _fill(self, seat: _Seat[Handle]) -> None:
        seat.incarnation += 1
        worker = f"worker-{seat.number}.{seat.incarnation}"
        try:
            async with asyncio.timeout(self._config.start_timeout_s):
                address, handle = await self._launch(worker)
        except TimeoutError as error:
            raise WorkerLostError(
                f"{worker} did not start within {self._config.start_timeout_s:g} s. Look at the "
                "workers' logs, ask for fewer workers, or raise start_timeout_s."
            ) from error
        except ServiceError:
            raise
        except Exception as error:
            raise WorkerLostError(
                f"{worker} did not start: {type(error).__name__}: {error}. Look at the workers' "
                "logs."
            ) from error
        seat.handle, seat.failures = handle, 0
        seat.info = WorkerInfo(worker=worker, address=address, slots=self._config.slots_per_worker)
        logger.info("%s serves at %s", worker, address)

    async def _try_fill(self, seat: _Seat[Handle]) -> None:
        try:
            await self._fill(seat)
        except Exception as error:
            seat.failures += 1
            logger.error("seat %d stays empty for now: %s", seat.number, error)

    async def _empty(self, seat: _Seat[Handle], *, gracefully: bool) -> None:
        handle, seat.info, seat.handle = seat.handle, None, None
        if handle is None:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._config.stop_timeout_s if gracefully else None):
                await self._end(handle, gracefully=gracefully)
            return
        await self._end(handle, gracefully=False)

    async def _vacate(self, seat: _Seat[Handle]) -> None:
        async with seat.lock:  # a successor that is just starting must not be missed
            await self._empty(seat, gracefully=True)

    async def _supervise(self, seat: _Seat[Handle]) -> None:
        while True:
            await asyncio.sleep(self._pause_s(seat))
            try:
                await self._look_after(seat)
            except Exception:
                logger.exception("watching seat %d failed; it goes on", seat.number)

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
        try:
            async with asyncio.timeout(self._config.health_timeout_s):
                alive = await self._alive(handle)
        except TimeoutError:
            alive = False
        if not alive:
            logger.warning("%s at %s is gone; starting another", info.worker, info.address)
            await self.replace(info.worker)
