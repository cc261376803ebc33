"""Weights that change while a job runs: from a recorded step on, and no step before it changes."""

import json
from dataclasses import replace

import numpy as np
import pytest

from dataservice.core.cursor import Cursor
from dataservice.core.errors import (
    ConflictError,
    CursorMismatchError,
    NotFoundError,
    QuotaError,
    SpecError,
)
from dataservice.core.job import MOST_CHANGES, MixtureRecord
from dataservice.sources.mixture import Mixture
from dataservice.state.memory import MemoryStateStore
from tests.engine.sessions import leave, open_all, settled, train
from tests.engine.support import Books, make_coordinator, make_setup, samples_by_step
from tests.ledger import ledger_of

RARE = {"b": 0.25}


@pytest.fixture
def store(each_store):
    return each_store


def a_job(*, samples=200, epochs=2, **plan):
    """A third of its samples are of source a, the others of b."""
    setup = make_setup(samples=samples, **plan)
    stream = Mixture(setup.catalog.sizes, [1, 1], seed=0, epochs=epochs, names=("a", "b"))
    return replace(setup, stream=stream, order="o")


async def running(store, setup=None):
    coordinator = make_coordinator(store, Books(), setup or a_job())
    await coordinator.submit("job", "")
    return coordinator, await open_all(coordinator)


async def undisturbed():
    store = MemoryStateStore()
    coordinator, sessions = await running(store)
    await train(coordinator, sessions, 0, 100)
    steps = await samples_by_step(coordinator, store, 1)
    await coordinator.stop()
    return steps


async def test_steps_planned_before_stay_and_those_behind_are_drawn_by_the_new_weights(store):
    before = await undisturbed()
    coordinator, sessions = await running(store)
    await train(coordinator, sessions, 0, 3)
    change = await coordinator.change_mixture("job", RARE, None)
    assert change.from_step == store.last_planned_step("job") + 1
    await train(coordinator, sessions, 3, 100)
    after = await samples_by_step(coordinator, store, 1)
    n = change.from_step
    assert {s: after[s] for s in range(n)} == {s: before[s] for s in range(n)}
    assert all(after[step] != before[step] for step in range(n, len(after)))
    counts = np.bincount(np.concatenate(list(after.values())), minlength=200)
    assert counts[:66].tolist() == [2] * 66, "the other source goes on as it was"
    assert counts[66:].max() - counts[66:].min() <= 1
    late = np.concatenate([after[step] for step in range(n, len(after) - 1)])
    assert (late >= 66).mean() == pytest.approx(0.25 * 134 / (66 + 0.25 * 134), abs=0.08)
    await coordinator.stop()


async def test_a_restart_goes_on_by_the_weights_that_were_recorded(store):
    coordinator, sessions = await running(store)
    await train(coordinator, sessions, 0, 2)
    await coordinator.change_mixture("job", RARE, 7)
    await train(coordinator, sessions, 2, 100)
    whole = await samples_by_step(coordinator, store, 1)
    cursor = Cursor.from_json(store.ledger_entry("job", 4).cursor)
    await coordinator.stop()
    again = make_coordinator(store, Books(), a_job())
    await again.start()
    sessions = await open_all(again, cursor=cursor, world=4)
    await train(again, sessions, 4, 100)
    resumed = await samples_by_step(again, store, 2)
    assert resumed == {step: ids for step, ids in whole.items() if step >= 4}
    assert await samples_by_step(again, store, 1) == whole
    await again.stop()


@pytest.mark.parametrize("went_on", [5, 7, 9])
async def test_a_restarted_attempt_begins_the_change_where_it_would_have_begun(store, went_on):
    coordinator, sessions = await running(store)
    await coordinator.change_mixture("job", RARE, 8)
    await train(coordinator, sessions, 0, 100)
    whole = await samples_by_step(coordinator, store, 1)
    await coordinator.stop()

    other = MemoryStateStore()
    first, sessions = await running(other)
    await first.change_mixture("job", RARE, 8)
    await train(first, sessions, 0, went_on)
    await first.stop()
    again = make_coordinator(other, Books(), a_job())
    await again.start()
    await train(again, await open_all(again, rejoin=1), went_on, 100)
    assert await samples_by_step(again, other, 1) == whole
    await again.stop()


async def test_a_step_that_trainers_may_ask_for_again_keeps_its_mixture(store):
    coordinator, sessions = await running(store)
    await train(coordinator, sessions, 0, 6)
    with pytest.raises(
        ConflictError, match=r"up to \d+, and trainers are at work \(host:0, host:1"
    ):
        await coordinator.change_mixture("job", RARE, 4)
    assert store.mixtures("job") == []
    await coordinator.stop()


async def test_going_back_to_a_checkpoint_changes_what_comes_and_not_what_was(store):
    coordinator, sessions = await running(store)
    await train(coordinator, sessions, 0, 10)
    first = await samples_by_step(coordinator, store, 1)
    cursor = Cursor.from_json(store.ledger_entry("job", 3).cursor)
    leave(coordinator, sessions)
    assert (await coordinator.change_mixture("job", RARE, 5)).from_step == 5
    sessions = await open_all(coordinator, cursor=cursor)
    await train(coordinator, sessions, 3, 100)
    second = await samples_by_step(coordinator, store, 2)
    still = await samples_by_step(coordinator, store, 1)
    assert {step: still[step] for step in first} == first
    assert (second[3], second[4]) == (first[3], first[4])
    assert second[5] != first[5]
    await coordinator.stop()


async def test_a_change_that_is_due_in_skipped_steps_begins_there(store):
    coordinator, sessions = await running(store)
    await coordinator.change_mixture("job", RARE, 6)
    await train(coordinator, sessions, 0, 100)
    whole = await samples_by_step(coordinator, store, 1)
    leave(coordinator, sessions)
    await coordinator.skip("job", [(3, 9)], "skip")
    sessions = await open_all(coordinator)
    await train(coordinator, sessions, 0, 3)
    await train(coordinator, sessions, 10, 100)
    skipping = await samples_by_step(coordinator, store, 2)
    assert skipping == {step: ids for step, ids in whole.items() if not 3 <= step <= 9}
    explained = await coordinator.explain("job", 8, 2)
    assert sorted(explained.plan.sample_ids.tolist()) == whole[8]
    await coordinator.stop()


async def test_steps_that_were_planned_before_a_restart_keep_their_mixture(store):
    coordinator, sessions = await running(store)
    await train(coordinator, sessions, 0, 6)
    await coordinator.stop()
    before = {entry.step: entry.plan_digest for entry in ledger_of(store, "job")}
    again = make_coordinator(store, Books(), a_job())
    await again.start()
    await again.restored()
    await again.change_mixture("job", RARE, 4)
    sessions = await open_all(again, rejoin=1)
    await train(again, sessions, 6, 100)
    begun = {entry.step: Cursor.from_json(entry.cursor).begun for entry in ledger_of(store, "job")}
    after = {entry.step: entry.plan_digest for entry in ledger_of(store, "job")}
    assert {step: after[step] for step in before} == before
    assert next(step for step in sorted(begun) if begun[step]) == max(before) + 1
    await again.stop()


async def test_a_change_behind_skipped_steps_begins_there_in_every_attempt(store):
    coordinator, sessions = await running(store)
    leave(coordinator, sessions)
    await coordinator.skip("job", [(5, 8)], "skip")
    sessions = await open_all(coordinator)
    await train(coordinator, sessions, 0, 2)

    async def stands_behind_them():
        return (await coordinator.job("job")).planned_step >= 8

    await settled(stands_behind_them)
    first = (await coordinator.change_mixture("job", RARE, None)).from_step
    assert first == (await coordinator.job("job")).planned_step + 1 >= 9
    await train(coordinator, sessions, 2, 3)
    await train(coordinator, sessions, 9, 100)
    whole = await samples_by_step(coordinator, store, 2)
    cursor = Cursor.from_json(store.ledger_entry("job", 3, 2).cursor)
    leave(coordinator, sessions)
    sessions = await open_all(coordinator, cursor=cursor)
    await train(coordinator, sessions, 3, 2)
    await train(coordinator, sessions, 9, 100)
    again = await samples_by_step(coordinator, store, 3)
    assert again == {step: ids for step, ids in whole.items() if step >= 3}
    await coordinator.stop()


async def test_inside_a_window_of_steps_a_change_waits_for_the_next(store):
    coordinator, sessions = await running(store, a_job(window_steps=4))
    await coordinator.change_mixture("job", RARE, 5)
    await train(coordinator, sessions, 0, 100)
    begun = {entry.step: Cursor.from_json(entry.cursor).begun for entry in ledger_of(store, "job")}
    assert [bool(begun[step]) for step in range(12)] == [False] * 8 + [True] * 4
    await coordinator.stop()


async def test_what_cannot_be_a_change_is_refused_and_changes_nothing(store):
    coordinator, sessions = await running(store)
    await train(coordinator, sessions, 0, 2)
    for weights, says in (
        ({}, "needs the weight of at least one source"),
        ({"c": 1.0}, "names the source 'c'; the job's are a, b"),
        ({"a": 0.0, "b": 0.0}, "nothing is left to train"),
        ({"a": -1.0}, "must be from 0 to 1000"),
        ({"a": float("nan")}, "must be from 0 to 1000"),
        ({"a": 1e9}, "must be from 0 to 1000"),
    ):
        with pytest.raises(SpecError, match=says):
            await coordinator.change_mixture("job", weights, None)
    with pytest.raises(NotFoundError):
        await coordinator.change_mixture("other", RARE, None)
    assert store.mixtures("job") == []
    for _ in range(MOST_CHANGES):
        await coordinator.change_mixture("job", RARE, 90)
    with pytest.raises(QuotaError, match=f"changed {MOST_CHANGES} times"):
        await coordinator.change_mixture("job", RARE, None)
    await train(coordinator, sessions, 2, 100)
    await coordinator.stop()


async def test_a_checkpoint_of_a_change_that_nobody_knows_any_more_is_refused(store):
    coordinator, sessions = await running(store)
    await coordinator.change_mixture("job", RARE, 2)
    await train(coordinator, sessions, 0, 8)
    cursor = Cursor.from_json(store.ledger_entry("job", 6).cursor)
    leave(coordinator, sessions)
    await coordinator.delete("job")
    await coordinator.submit("job", "")
    with pytest.raises(CursorMismatchError, match=r"change of the mixture, 'r1-.*does not know"):
        await open_all(coordinator, cursor=cursor)
    await coordinator.change_mixture("job", {"b": 0.5}, 2)
    with pytest.raises(CursorMismatchError, match="does not know; it knows r1-"):
        await open_all(coordinator, cursor=cursor)
    await coordinator.stop()


async def test_changes_are_kept_by_number_and_go_with_their_job(store):
    coordinator, sessions = await running(store)
    await coordinator.change_mixture("job", RARE, 9)
    await coordinator.change_mixture("job", {"a": 2.0, "b": 1.0}, 20)
    first, second = store.mixtures("job")
    assert (first.number, second.number) == (1, 2)
    assert json.loads(second.change_json)["weights"] == {"a": 2.0, "b": 1.0}
    leave(coordinator, sessions)
    await coordinator.delete("job")
    assert store.mixtures("job") == []
    with pytest.raises(NotFoundError):
        store.add_mixture(MixtureRecord(job="job", number=1, change_json="{}", recorded_unix_s=1.0))
    await coordinator.stop()
