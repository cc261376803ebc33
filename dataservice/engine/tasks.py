"""Tasks that go on when their caller is cancelled, and tasks that are cancelled together."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")


def detach(work: Coroutine[Any, Any, Result]) -> asyncio.Task[Result]:
    """A task to be awaited under `asyncio.shield`, which leaves it alone when its caller is
    cancelled: its error is retrieved even then, or asyncio would log it with a traceback."""
    task = asyncio.create_task(work)
    task.add_done_callback(retrieve_error)
    return task


def retrieve_error(done: asyncio.Future[Any]) -> None:
    """Nobody may be left who waits for what has ended."""
    if not done.cancelled():
        done.exception()


async def cancel_all(*tasks: asyncio.Task[Any] | None) -> None:
    """Cancel these tasks, and wait until each has ended, however it ends."""
    ending = [task for task in tasks if task is not None]
    for task in ending:
        task.cancel()
    await asyncio.gather(*ending, return_exceptions=True)
