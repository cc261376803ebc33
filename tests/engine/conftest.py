import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

import pytest

from dataservice.core.orders import PackReceipt
from dataservice.core.ports import Metrics, WorkerPool
from dataservice.engine import dispatch, hedging, open_orders
from dataservice.engine.dispatch import Dispatcher
from dataservice.engine.load_balancer import LoadBalancer
from dataservice.engine.placement import DispatchedStep
from dataservice.state.memory import MemoryStateStore
from dataservice.state.sqlite import SqliteStateStore
from tests.engine.scripted_workers import Counts, Workers
from tests.engine.support import Books
from tests.one_order import each_of


@pytest.fixture
def books() -> Books:
    return Books()


@pytest.fixture
def store() -> MemoryStateStore:
    return MemoryStateStore()


@pytest.fixture(params=["memory", "sqlite"])
def each_store(
    request: pytest.FixtureRequest, tmp_path: Path
) -> Iterator[MemoryStateStore | SqliteStateStore]:
    """The one, then the other: what is recorded is tested on both."""
    made = MemoryStateStore() if request.param == "memory" else SqliteStateStore(tmp_path)
    yield made
    made.close()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same clockwork, a hundred times as fast; only waits that a test does not want to see the
    end of are long, for the machine may stall."""
    for module, name, value in (
        (dispatch, "TICK_S", 0.005),
        (dispatch, "NO_WORKER_PAUSE_S", 0.005),
        (dispatch, "HOLDERS_WAIT_S", 60.0),
        (dispatch, "RECEIPT_WAIT_S", 0.1),
        (open_orders, "RETRY_PAUSE_S", 0.005),
        (open_orders, "LONGEST_PAUSE_S", 0.02),
        (hedging, "SOONEST_S", 600.0),
        (hedging, "UNKNOWN_S", 600.0),
    ):
        monkeypatch.setattr(module, name, value)


@pytest.fixture
def hedged_soon(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Orders are overdue after a hundredth of the usual time."""
    monkeypatch.setattr(hedging, "SOONEST_S", 0.03)
    monkeypatch.setattr(hedging, "UNKNOWN_S", 0.2)


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
def balancers(monkeypatch: pytest.MonkeyPatch) -> list[LoadBalancer]:
    """Those of the dispatchers that are made: they know of work queued at workers now gone."""
    made: list[LoadBalancer] = []

    def make(pool: WorkerPool, metrics: Metrics, *, wake: asyncio.Event) -> LoadBalancer:
        made.append(LoadBalancer(pool, metrics, wake=wake))
        return made[-1]

    monkeypatch.setattr(dispatch, "LoadBalancer", make)
    return made


@pytest.fixture
async def dispatcher(
    quick: None,
    balancers: list[LoadBalancer],
    workers: Workers,
    counts: Counts,
    receipts: list[PackReceipt],
) -> AsyncIterator[Dispatcher]:
    async def take(step: DispatchedStep, some: Sequence[PackReceipt]) -> None:
        receipts.extend(each_of(some))

    made = Dispatcher(workers, workers, on_receipts=take, metrics=counts)
    yield made
    await made.stop()
