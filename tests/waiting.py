"""Waiting for what another process, thread or task is about to do."""

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

# The first plan of a process compiles kernels, which takes most of a minute on a busy machine.
LIMIT_S = 180.0


def wait_for(condition: Callable[[], T], limit_s: float = LIMIT_S) -> T:
    """Poll until the condition holds; returns what it gave."""
    deadline_s = time.monotonic() + limit_s
    while not (found := condition()):
        assert time.monotonic() < deadline_s, "waited in vain"
        time.sleep(0.01)
    return found


async def settled() -> None:
    """Let tasks and threads do what they can do without being let go."""
    for _ in range(20):
        await asyncio.sleep(0.002)


async def until(condition: Callable[[], object], limit_s: float = LIMIT_S) -> None:
    """The same in a coroutine: its loop goes on meanwhile."""
    async with asyncio.timeout(limit_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
