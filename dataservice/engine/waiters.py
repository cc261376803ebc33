"""Tasks that wait for something to change, by the thousand: each comes, goes and is woken in O(1).

A future keeps its callbacks in a list, and an event those who wait for it: whoever leaves is looked
for among all. Where each of n ranks waits on one of them, that is O(n²) when they wake or leave.
"""

import asyncio


class Waiters:
    """Those who wait for the next change."""

    def __init__(self) -> None:
        self._waiting: dict[asyncio.Future[None], None] = {}  # in the order in which they came

    def __len__(self) -> int:
        return len(self._waiting)

    async def next_change(self) -> None:
        """Wait for `wake`."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[waiter] = None
        try:
            await waiter
        finally:
            self._waiting.pop(waiter, None)

    def wake(self) -> None:
        """Something changed: all who wait now go on, and look whether it is what they want."""
        waiting, self._waiting = self._waiting, {}
        for waiter in waiting:
            if not waiter.done():
                waiter.set_result(None)
