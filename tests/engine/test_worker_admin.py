"""Workers under running jobs: listed, restarted, left to a successor, relieved when idle."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from dataservice.core.errors import ConflictError, NotFoundError
from dataservice.engine.coordinator import Coordinator
from tests.engine.sessions import open_all, settled, shard_of, train
from tests.engine.support import Books, make_coordinator, make_setup
from tests.waiting import until


@pytest.fixture
async def coordinator(store, books) -> AsyncIterator[Coordinator]:
    made = make_coordinator(store, books, make_setup(), idle_release_s=0.1)
    await made.submit("job", "")
    await made.start()
    yield made
    await made.stop()


async def test_packs_of_a_job_that_every_trainer_left_are_let_go_until_one_comes_back(
    coordinator, books
):
    sessions = await open_all(coordinator)
    (first,) = await train(coordinator, sessions, 0, 1)
    await until(lambda: {key.step for key in books.held} == {1, 2, 3})
    await asyncio.sleep(0.3)
    assert books.held  # the trainers are there
    for opened in sessions:
        coordinator.close_session(opened.session)
    await until(lambda: not books.held)
    back = await open_all(coordinator, rejoin=1)
    assert (await shard_of(coordinator, back[0], 0)).plan_digest == first.plan_digest
    assert len(await train(coordinator, back, 1, 5)) == 5


async def test_a_coordinator_that_stops_leaves_packs_where_its_successor_finds_them(store, books):
    former = make_coordinator(store, books, make_setup())
    await former.submit("job", "")
    await train(former, await open_all(former), 0, 3)
    await until(lambda: {key.step for key in books.held} == {3, 4, 5})
    await former.stop()
    assert books.held
    books.held = dict.fromkeys(books.held, "w1")  # where no shortest line would send them all
    books.orders.clear()

    successor = make_coordinator(store, books, make_setup())
    await successor.start()
    back = await open_all(successor, rejoin=1)
    for step in (3, 4, 5):
        for opened in back:
            await shard_of(successor, opened, step)
    # A rank has its tickets as soon as orders are on their way.
    await until(lambda: {key.step for key in books.orders} >= {3, 4, 5})
    again = {key: at for key, at in books.orders.items() if key.step in (3, 4, 5)}
    assert set(map(tuple, again.values())) == {("w1",)}
    await successor.stop()


async def test_workers_are_listed_with_what_they_hold(coordinator, books):
    await open_all(coordinator)
    await until(lambda: {key.step for key in books.held} >= {0, 1, 2})

    # An order is off the line only once its worker's answer came.
    async def nothing_is_outstanding():
        return not any(each.outstanding_tokens for each in await coordinator.workers())

    await settled(nothing_is_outstanding)
    statuses = {each.info.worker: each for each in await coordinator.workers()}
    assert set(statuses) == set(books.alive)
    for name, status in statuses.items():
        assert status.packs == sum(worker == name for worker in books.held.values())


async def test_workers_are_restarted_once_at_a_time(coordinator, books):
    gate = asyncio.Event()
    renew = Books.renew

    async def renew_behind_the_gate(workers, drained):
        await gate.wait()
        await renew(books, workers, drained)

    books.renew = renew_behind_the_gate
    with pytest.raises(NotFoundError, match="there is no worker w9; there are w0, w1"):
        await coordinator.restart_workers(["w9"])
    assert await coordinator.restart_workers([]) == ["w0", "w1"]
    with pytest.raises(ConflictError, match="already"):
        await coordinator.restart_workers(["w0"])
    gate.set()
    await until(lambda: books.alive == ["w2", "w3"])
    assert await coordinator.restart_workers(["w3"]) == ["w3"]
    await until(lambda: books.alive == ["w2", "w4"])
