from collections.abc import AsyncIterator

import pytest

from dataservice.core.orders import PackReceipt
from dataservice.engine import dispatch, ordering, pace
from dataservice.engine.dispatch import Dispatcher
from dataservice.state.memory import MemoryStateStore
from tests.engine.scripted_workers import Counts, Workers
from tests.engine.support import Books


@pytest.fixture
def books() -> Books:
    return Books()


@pytest.fixture
def store() -> MemoryStateStore:
    return MemoryStateStore()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same clockwork, a hundred times as fast."""
    for module, name, value in (
        (dispatch, "TICK_S", 0.005),
        (dispatch, "NO_WORKER_PAUSE_S", 0.005),
        (dispatch, "HOLDERS_WAIT_S", 2.0),
        (dispatch, "RECEIPT_WAIT_S", 0.1),
        (ordering, "RETRY_PAUSE_S", 0.005),
        (ordering, "LONGEST_PAUSE_S", 0.02),
        (pace, "SOONEST_S", 0.03),
        (pace, "UNKNOWN_S", 0.2),
    ):
        monkeypatch.setattr(module, name, value)


@pytest.fixture
def workers() -> Workers:
    return Workers()


@pytest.fixture
def counts() -> Counts:
    return Counts()


@pytest.fixture
def receipts() -> list[PackReceipt]:
    return []


@pytest.fixture
async def dispatcher(
    quick: None, workers: Workers, counts: Counts, receipts: list[PackReceipt]
) -> AsyncIterator[Dispatcher]:
    async def take(receipt: PackReceipt) -> None:
        receipts.append(receipt)

    made = Dispatcher(workers, workers, on_receipt=take, metrics=counts)
    yield made
    await made.stop()
