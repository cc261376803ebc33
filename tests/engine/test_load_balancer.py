"""Who gets the next order, by the work queued at workers that come, go silent and are replaced."""

import asyncio

import pytest

from dataservice.engine.load_balancer import LoadBalancer
from tests.waiting import until


@pytest.fixture
async def wake() -> asyncio.Event:
    return asyncio.Event()


@pytest.fixture
async def balancer(workers, counts, wake) -> LoadBalancer:
    made = LoadBalancer(workers, counts, wake=wake)
    made.refresh()
    return made


def names(infos) -> list[str]:
    return [info.worker for info in infos]


async def test_the_least_loaded_worker_is_the_one_with_least_work_for_each_slot(balancer, counts):
    balancer.add("w0", 500)
    balancer.add("w1", 100)
    balancer.add("w2", 300)
    assert balancer.least_loaded(balancer.candidates()).worker == "w1"
    assert counts.queued == {"w0": 500, "w1": 100, "w2": 300}
    balancer.add("w0", -500)
    assert (balancer.queued("w0"), counts.queued["w0"]) == (0, 0)
    assert balancer.least_loaded(balancer.candidates()).worker == "w0"
    assert balancer.least_loaded([]) is None


async def test_silent_workers_get_orders_only_where_there_are_no_others(balancer, workers):
    for name in workers.names:
        assert not balancer.is_silent(name)
        workers.set_state(name, "silent")
        balancer.refresh()
        assert balancer.is_silent(name)
        assert name not in names(balancer.candidates(silent=False))
    assert names(balancer.candidates()) == workers.names
    assert balancer.candidates(silent=False) == []


async def test_a_lost_worker_is_replaced_once_and_gets_no_orders_meanwhile(
    balancer, workers, counts, wake
):
    for _ in range(3):
        balancer.replace("w0")
    assert names(balancer.candidates()) == ["w1", "w2"]
    await until(wake.is_set)
    assert workers.replaced == ["w0"]
    assert balancer.refresh() == ["w0"]
    assert names(balancer.candidates()) == ["w1", "w2", "w3"]
    assert counts.lost == ["w0"]


async def test_a_worker_that_was_to_end_is_no_loss(balancer, workers, counts):
    balancer.retire("w0")
    del workers.infos["w0"]
    assert balancer.refresh() == ["w0"]
    assert (counts.lost, counts.retired) == ([], ["w0"])


async def test_nothing_is_told_of_the_queue_of_a_worker_that_is_gone(balancer, workers, counts):
    balancer.add("w0", 500)
    workers.kill("w0", noticed=True)
    balancer.refresh()
    balancer.add("w0", -500)
    assert "w0" not in counts.queued
    assert balancer.queued("w0") == 0
