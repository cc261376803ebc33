"""Costs that change while a job runs: from a recorded step on, and no plan before it changes."""

import asyncio
import json

import pytest

from dataservice.core.cost import ContextCost
from dataservice.core.cursor import Cursor
from dataservice.core.errors import (
    ConflictError,
    NotFoundError,
    PlanningError,
    QuotaError,
    SpecError,
)
from dataservice.core.plan_options import CostModel
from dataservice.engine import jobs
from dataservice.state.memory import MemoryStateStore
from tests.engine.sessions import open_all, shard_of, train
from tests.engine.support import Books, make_coordinator, make_setup
from tests.ledger import ledger_of

# Attention dear and rings cheap: plans differ from those by the default cost.
OTHER = CostModel(
    llm=ContextCost(attention_s_per_token2=1e-5, linear_s_per_token=1e-5, group_s=1e-3)
)
COST = json.dumps(OTHER.to_dict())


@pytest.fixture
def store(each_store):
    return each_store


async def running(store, **plan):
    coordinator = make_coordinator(store, Books(), make_setup(**plan))
    await coordinator.submit("job", "")
    return coordinator, await open_all(coordinator)


def leave(coordinator, sessions) -> None:
    for opened in sessions:
        coordinator.close_session(opened.session)


async def digests(store) -> list[str]:
    """Of an epoch that nothing disturbs, under the default cost."""
    coordinator, sessions = await running(store)
    shards = await train(coordinator, sessions, 0, 100)
    await coordinator.stop()
    return [shard.plan_digest for shard in shards]


async def test_steps_planned_before_keep_their_plans_and_those_behind_get_the_new_cost(store):
    before = await digests(MemoryStateStore())
    coordinator, sessions = await running(store)
    shards = await train(coordinator, sessions, 0, 3)
    record = await coordinator.recost("job", COST, None)
    assert record.from_step == store.last_planned_step("job") + 1
    shards += await train(coordinator, sessions, 3, 100)
    n = record.from_step
    assert 3 <= n < 10
    assert [shard.plan_digest for shard in shards[:n]] == before[:n]
    assert all(s.plan_digest != d for s, d in zip(shards[n:], before[n:], strict=True))
    versions = [entry.cost_version for entry in ledger_of(store, "job")]
    assert versions == [CostModel().version] * n + [OTHER.version] * (13 - n)
    await coordinator.stop()


async def test_every_step_is_explained_by_the_cost_it_was_planned_with(store):
    coordinator, sessions = await running(store)
    await train(coordinator, sessions, 0, 2)
    await coordinator.recost("job", COST, None)
    await train(coordinator, sessions, 2, 100)
    for step in range(13):
        explained = await coordinator.explain("job", step, None)
        assert explained.plan.digest == explained.entry.plan_digest
        assert explained.plan.cost_version == explained.entry.cost_version
    await coordinator.stop()


async def test_a_restart_plans_every_step_as_it_was_and_goes_on_with_the_new_cost(store):
    coordinator, sessions = await running(store)
    await train(coordinator, sessions, 0, 3)
    record = await coordinator.recost("job", COST, 8)
    trained = await train(coordinator, sessions, 3, 6)  # up to step 8, planned ahead of it
    await coordinator.stop()
    known = {entry.step: entry.plan_digest for entry in ledger_of(store, "job")}
    assert max(known) >= record.from_step

    again = make_coordinator(store, Books(), make_setup())
    await again.start()
    sessions = await open_all(again, rejoin=1)
    replayed = await train(again, sessions, 3, 100)
    assert [s.plan_digest for s in replayed[:6]] == [s.plan_digest for s in trained]
    after = {entry.step: entry for entry in ledger_of(store, "job")}
    assert {step: after[step].plan_digest for step in known} == known
    assert {e.cost_version for s, e in after.items() if s >= 8} == {OTHER.version}
    assert {e.cost_version for s, e in after.items() if s < 8} == {CostModel().version}
    await again.stop()


async def test_an_older_checkpoint_replays_both_sides_of_the_change(store):
    coordinator, sessions = await running(store)
    await train(coordinator, sessions, 0, 2)
    await coordinator.recost("job", COST, 7)
    first = await train(coordinator, sessions, 2, 100)
    cursor = Cursor.from_json(store.ledger_entry("job", 4).cursor)
    leave(coordinator, sessions)
    resumed = await open_all(coordinator, cursor=cursor)
    second = await train(coordinator, resumed, 4, 100)
    assert [s.plan_digest for s in second] == [s.plan_digest for s in first[2:]]
    await coordinator.stop()


async def test_a_step_that_any_attempt_planned_is_refused(store):
    coordinator, sessions = await running(store)
    await train(coordinator, sessions, 0, 6)
    leave(coordinator, sessions)
    await open_all(coordinator)  # a new attempt from the beginning has planned little so far
    last = store.last_planned_step("job")
    assert last >= 5
    with pytest.raises(ConflictError, match=rf"up to {last}\. Begin at step {last + 1}"):
        await coordinator.recost("job", COST, 5)
    with pytest.raises(SpecError, match="the last step is"):
        await coordinator.recost("job", COST, 2**63 - 1)
    assert (await coordinator.recost("job", COST, last + 1)).from_step == last + 1
    await coordinator.stop()


async def test_a_job_has_so_many_changes_of_its_costs_and_is_told_so(store, monkeypatch):
    monkeypatch.setattr(jobs, "MOST_COSTS", 2)
    coordinator, _ = await running(store)
    for step in (100, 200):
        await coordinator.recost("job", COST, step)
    with pytest.raises(QuotaError, match="changed 2 times"):
        await coordinator.recost("job", COST, 300)
    await coordinator.recost("job", COST, 200)  # in place of the other
    await coordinator.stop()


async def test_the_newest_change_wins_over_one_that_has_not_begun(store):
    coordinator, sessions = await running(store)
    await train(coordinator, sessions, 0, 1)
    await coordinator.recost("job", COST, 9)
    base = json.dumps(CostModel().to_dict())
    await coordinator.recost("job", base, 8)
    await train(coordinator, sessions, 1, 100)
    assert {entry.cost_version for entry in ledger_of(store, "job")} == {CostModel().version}
    await coordinator.stop()


async def test_changes_while_steps_are_planned_never_disturb_a_replay(store):
    coordinator, sessions = await running(store)

    async def keep_changing() -> None:
        for turn in range(12):
            cost = CostModel(
                llm=ContextCost(attention_s_per_token2=1e-6 * (turn + 1), linear_s_per_token=1e-5)
            )
            await coordinator.recost("job", json.dumps(cost.to_dict()), None)
            await asyncio.sleep(0.005)

    changing = asyncio.create_task(keep_changing())
    await train(coordinator, sessions, 0, 100)
    await changing
    await coordinator.stop()
    again = make_coordinator(store, Books(), make_setup())
    await again.start()
    for step in range(13):
        explained = await again.explain("job", step, None)
        assert explained.plan.digest == explained.entry.plan_digest
    await again.stop()


async def test_before_the_first_attempt_it_is_the_cost_from_the_start(store):
    coordinator = make_coordinator(store, Books(), make_setup())
    await coordinator.submit("job", "")
    assert (await coordinator.recost("job", COST, None)).from_step == 0
    await train(coordinator, await open_all(coordinator), 0, 100)
    assert {entry.cost_version for entry in ledger_of(store, "job")} == {OTHER.version}
    await coordinator.stop()


@pytest.mark.parametrize(
    ("cost_json", "error"),
    [
        ("not json", SpecError),
        ("[1]", SpecError),
        ('{"video": {}}', PlanningError),
        ('{"llm": {"linear_s_per_token": 1}}', PlanningError),
    ],
)
async def test_a_cost_that_is_none_is_refused_and_nothing_recorded(cost_json, error):
    store = MemoryStateStore()
    coordinator, _ = await running(store)
    with pytest.raises(error):
        await coordinator.recost("job", cost_json, None)
    assert store.costs("job") == []
    with pytest.raises(NotFoundError):
        await coordinator.recost("other", COST, None)
    await coordinator.stop()


async def test_the_ledger_has_the_slowest_rank_s_seconds_beside_the_prediction(store):
    coordinator, sessions = await running(store)
    for opened in sessions:
        await shard_of(coordinator, opened, 0)
    await coordinator.commit(sessions[0].session, 0, measured_s=0.5)
    assert store.ledger_entry("job", 0).measured_s is None  # not trained by all yet
    await coordinator.commit(sessions[1].session, 0, measured_s=0.25)
    entry = store.ledger_entry("job", 0)
    explained = await coordinator.explain("job", 0, None)
    assert entry.measured_s == explained.entry.measured_s == 0.5
    assert entry.predicted_s == explained.plan.predicted_s
    for opened in sessions:
        await shard_of(coordinator, opened, 1)
        await coordinator.commit(opened.session, 1)  # ranks of an older client tell nothing
    assert store.ledger_entry("job", 1).measured_s is None
    await coordinator.stop()
