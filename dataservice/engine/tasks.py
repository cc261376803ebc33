"""Work that goes on when its caller is cancelled, or all who asked; tasks cancelled together."""

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial, wraps
from typing import Any, Generic, ParamSpec, TypeVar

from dataservice.engine.waiters import Waiters

Given = ParamSpec("Given")
Result = TypeVar("Result")


def detach(work: Coroutine[Any, Any, Result]) -> asyncio.Task[Result]:
    """A task to be awaited under `asyncio.shield`, which leaves it alone when its caller is
    cancelled: its error is retrieved even then, or asyncio would log it with a traceback."""
    task = asyncio.create_task(work)
    task.add_done_callback(retrieve_error)
    return task


def to_its_end(
    work: Callable[Given, Coroutine[Any, Any, Result]],
) -> Callable[Given, Coroutine[Any, Any, Result]]:
    """The same work, which goes on when its caller is cancelled."""

    @wraps(work)
    async def whole(*args: Given.args, **kwargs: Given.kwargs) -> Result:
        return await asyncio.shield(detach(work(*args, **kwargs)))

    return whole


def retrieve_error(done: asyncio.Future[Any]) -> None:
    """Nobody may be left who waits for what has ended."""
    if not done.cancelled():
        done.exception()


class SharedWork(Generic[Result]):
    """Work by number, of a step say, begun once for all who ask while it lasts; it goes on when
    they leave. Whoever asks, waits and leaves costs O(1), as under many shields of one task it does
    not."""

    def __init__(self) -> None:
        self._tasks: dict[int, asyncio.Task[Result]] = {}
        self._waiters = Waiters()

    @property
    def tasks(self) -> list[asyncio.Task[Result]]:
        """Those that have not ended."""
        return list(self._tasks.values())

    def look_again(self) -> None:
        """Have all who wait look whether they still want the work."""
        self._waiters.wake()

    async def result(self, number: int, begin: Callable[[], Coroutine[Any, Any, Result]]) -> Result:
        """What the work of this number makes. Raises what it raises."""
        return (await self._over(self._task(number, begin), lambda: True)).result()

    async def result_while(
        self,
        wanted: Callable[[], bool],
        number: int,
        begin: Callable[[], Coroutine[Any, Any, Result]],
    ) -> Result | None:
        """The same, or None once it is not `wanted`."""
        if not wanted():
            return None
        task = await self._over(self._task(number, begin), wanted)
        try:
            return task.result() if wanted() else None
        finally:
            del task  # what it raises keeps this frame, which would keep it

    def _task(
        self, number: int, begin: Callable[[], Coroutine[Any, Any, Result]]
    ) -> asyncio.Task[Result]:
        if number not in self._tasks:
            self._tasks[number] = detach(begin())
            self._tasks[number].add_done_callback(partial(self._ended, number))
        return self._tasks[number]

    async def _over(
        self, task: asyncio.Task[Result], wanted: Callable[[], bool]
    ) -> asyncio.Task[Result]:
        while wanted() and not task.done():
            await self._waiters.next_change()
        return task

    def _ended(self, number: int, _task: asyncio.Task[Result]) -> None:
        del self._tasks[number]
        self._waiters.wake()


async def cancel_all(*tasks: asyncio.Task[Any] | None) -> None:
    """Cancel these tasks, and wait until each has ended, however it ends."""
    ending = [task for task in tasks if task is not None]
    for task in ending:
        task.cancel()
    await asyncio.gather(*ending, return_exceptions=True)
