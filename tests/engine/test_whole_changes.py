"""Whoever asks for a change of a job may be gone before it is done: what the store has of it, the
service has."""

import asyncio
import json
import threading

import pytest

from dataservice.core.cost import ContextCost
from dataservice.core.errors import ConflictError, NotFoundError
from dataservice.core.plan_options import CostModel
from dataservice.state.memory import MemoryStateStore
from tests.engine.sessions import leave, open_all, open_rank, train
from tests.engine.support import Books, make_coordinator, make_setup
from tests.ledger import ledger_of
from tests.waiting import LIMIT_S, until

OTHER = ContextCost(attention_s_per_token2=1e-5, linear_s_per_token=1e-5, group_s=1e-3)
COST = json.dumps(CostModel(llm=OTHER).to_dict())


@pytest.fixture
def store():
    return MemoryStateStore()


async def running(store):
    coordinator = make_coordinator(store, Books(), make_setup())
    await coordinator.submit("job", "")
    return coordinator, await open_all(coordinator)


async def asked_and_gone(store, method, asking):
    """Ask for a change, and be gone while the store's method is at it."""
    begun, go, ended, real = *(threading.Event() for _ in range(3)), getattr(store, method)

    def slowly(*args, **more):
        begun.set()
        assert go.wait(LIMIT_S)
        real(*args, **more)
        ended.set()

    setattr(store, method, slowly)
    task = asyncio.create_task(asking)
    await until(begun.is_set)
    task.cancel()
    await asyncio.wait([task])
    go.set()
    await until(ended.is_set)
    setattr(store, method, real)


async def test_a_job_that_is_deleted_is_gone_and_may_be_submitted_again(store):
    coordinator, sessions = await running(store)
    leave(coordinator, sessions)
    await asked_and_gone(store, "delete_job", coordinator.delete("job"))
    await coordinator.submit("job", "")  # behind the deletion
    assert len(await train(coordinator, await open_all(coordinator), 0, 2)) == 2
    await coordinator.stop()


async def test_a_job_that_is_drained_begins_no_attempt(store):
    coordinator, sessions = await running(store)
    leave(coordinator, sessions)
    await asked_and_gone(store, "put_job", coordinator.drain("job"))
    await coordinator.skip("job", [(0, 0)], "train")  # behind the other change
    with pytest.raises(ConflictError, match="drain"):
        await open_rank(coordinator, 0)
    await coordinator.stop()


async def test_steps_are_planned_by_the_costs_that_are_recorded(store):
    coordinator, sessions = await running(store)
    await train(coordinator, sessions, 0, 3)
    await asked_and_gone(store, "put_cost", coordinator.recost("job", COST, None))
    await train(coordinator, sessions, 3, 100)
    (record,) = store.costs("job")
    later = [entry for entry in ledger_of(store, "job") if entry.step >= record.from_step]
    assert {entry.cost_version for entry in later} == {record.cost_version}
    await coordinator.stop()


CHANGES = {
    "costs": lambda coordinator: coordinator.recost("job", COST, None),
    "weights": lambda coordinator: coordinator.change_mixture("job", {"b": 0.25}, None),
}


@pytest.mark.parametrize("what", CHANGES)
async def test_what_was_asked_of_a_deleted_job_does_not_change_the_next_of_its_name(store, what):
    opening, go, setup = threading.Event(), threading.Event(), make_setup()
    store.put_job(setup.record)

    def open_job(record):
        if not opening.is_set():
            opening.set()
            assert go.wait(LIMIT_S)
        return setup

    coordinator = make_coordinator(store, Books(), setup, open_job=open_job)
    await coordinator.start()
    asking = asyncio.create_task(CHANGES[what](coordinator))
    await until(opening.is_set)
    await coordinator.delete("job")
    await coordinator.submit("job", "")
    go.set()
    with pytest.raises(NotFoundError, match="was deleted"):
        await asyncio.wait_for(asking, LIMIT_S)
    assert (store.costs("job"), store.mixtures("job")) == ([], [])
    await coordinator.stop()
