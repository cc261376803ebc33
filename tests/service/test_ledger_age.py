"""The service moves old entries of its ledger by itself, and goes on where it cannot."""

import asyncio
import time

from dataservice.core.errors import StateError
from dataservice.operate.ledger_age import DAY_S, archive_now_and_then
from dataservice.state.memory import MemoryStateStore
from tests.waiting import until


class Old(MemoryStateStore):
    """Has so many old entries, and fails at the first visit."""

    def __init__(self) -> None:
        super().__init__()
        self.left = [8192, 8192, 5000, 0]
        self.free_bytes = [2**20, 2**20]
        self.asked: list[float] = []

    def archive_ledger(self, planned_before_unix_s: float) -> int:
        self.asked.append(planned_before_unix_s)
        if len(self.asked) == 1:
            raise StateError("the disk is full")
        return self.left.pop(0) if self.left else 0

    def trim(self) -> int:
        return self.free_bytes.pop() if self.free_bytes else 0


async def test_all_that_is_old_enough_moves_and_a_failure_is_tried_again(caplog):
    caplog.set_level("INFO")
    store, began_s = Old(), time.time()
    task = asyncio.create_task(archive_now_and_then(store, 30.0, every_s=0.01, rest_s=0.001))
    await until(lambda: not store.left)
    await until(lambda: "21384 old entries of the ledger went" in caplog.text)
    task.cancel()
    assert abs(began_s - 30 * DAY_S - store.asked[0]) < 60
    assert "stay in state.db; it is tried again" in caplog.text


async def test_room_is_given_back_also_where_nothing_can_be_archived(caplog):
    caplog.set_level("INFO")
    store = Old()
    task = asyncio.create_task(archive_now_and_then(store, 30.0, every_s=3600.0, rest_s=0.001))
    await until(lambda: "2048 KB of free room were given back" in caplog.text)
    task.cancel()
    assert len(store.asked) == 1, "which failed"
