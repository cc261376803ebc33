"""Steps passed over: the dataset minus just their samples is trained, and no plan changes."""

import asyncio
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.cut_microbatches import microbatches
from dataservice.core.cursor import Cursor
from dataservice.core.errors import NotFoundError, QuotaError, SpecError
from dataservice.core.job import SkipRecord
from dataservice.core.topology import Topology
from dataservice.engine import jobs
from dataservice.engine.api import EndOfData, SkippedSteps
from dataservice.engine.planner import draw_step, pass_over, plan_step
from dataservice.engine.skips import Skips
from dataservice.state.memory import MemoryStateStore
from tests.engine.counted import calls_of
from tests.engine.sessions import leave, open_all
from tests.engine.support import Books, make_coordinator, make_setup
from tests.ledger import ledger_of
from tests.waiting import until

STEPS = 13  # 200 samples in batches of 16


@pytest.fixture
def store(each_store):
    return each_store


def record(number, first, last, *, action="skip", attempt=1):
    return SkipRecord(
        job="job", number=number, first_step=first, last_step=last, action=action,
        from_attempt=attempt, recorded_unix_s=0.0,
    )  # fmt: skip


async def train_on(coordinator, sessions, first, *, until=None):
    """As a client does: the ranks' shards from a step on, every rank fetching and committing."""
    shards, step = [], first
    while until is None or step < until:
        got = [
            await coordinator.shard(s.session, step, received_step=step - 1, failed_workers=())
            for s in sessions
        ]
        if isinstance(got[0], EndOfData):
            break
        if isinstance(got[0], SkippedSteps):
            assert len({answer.next_step for answer in got}) == 1
            assert got[0].next_step > step
            step = got[0].next_step
            continue
        assert len({shard.plan_digest for shard in got}) == 1
        shards.append(got)
        for session in sessions:
            await coordinator.commit(session.session, step)
        step += 1
    return shards


def samples_of_steps(setup) -> list[Counter[int]]:
    """What each step draws."""
    cursor, steps = Cursor(), []
    while (drawn := draw_step(setup, cursor)) is not None:
        samples, cursor = drawn
        steps.append(Counter(samples.sample_ids.tolist()))
    return steps


def trained(shards) -> Counter[int]:
    return Counter(
        sample
        for of in shards
        for shard in of
        for mb in microbatches(shard.columns)
        if mb.cp_rank == 0
        for sample in mb.sample_ids.tolist()
    )


class Compared(int):
    """A number whose comparisons are calls."""

    def __lt__(self, other):
        return int(self) < int(other)

    def __gt__(self, other):
        return int(self) > int(other)


# ---- which steps --------------------------------------------------------------------------

ranges = st.tuples(st.integers(0, 30), st.integers(0, 12)).map(lambda r: (r[0], r[0] + r[1]))
actions = st.sampled_from(["skip", "skip", "train"])


@given(st.lists(st.tuples(ranges, actions, st.integers(1, 3)), max_size=8), st.integers(1, 3))
def test_of_the_records_that_name_a_step_the_last_that_holds_counts(made, attempt):
    records = [
        record(n, first, last, action=action, attempt=from_attempt)
        for n, ((first, last), action, from_attempt) in enumerate(made)
    ]
    skipped: dict[int, SkipRecord] = {}
    for each in records:
        if each.from_attempt <= attempt:
            for step in range(each.first_step, each.last_step + 1):
                skipped.pop(step, None)
                if each.action == "skip":
                    skipped[step] = each
    skips = Skips(records, attempt=attempt)
    for step in range(50):
        assert skips.record(step) == skipped.get(step)
        assert skips.next_trained(step) == next(n for n in range(step, 99) if n not in skipped)
        expected = sum(n not in skipped for n in range(step, 45))
        assert skips.trained_between(step, 44) == expected


def test_four_times_the_records_take_an_attempt_about_four_times_the_work():
    def comparisons(count):
        apart = [record(n, Compared(2 * n), Compared(2 * n)) for n in range(count)]
        return calls_of(lambda: Skips(apart, attempt=1))

    assert comparisons(4000) < 5 * comparisons(1000)


async def test_a_job_has_so_many_ranges_of_skipped_steps_and_is_told_so(monkeypatch, store):
    monkeypatch.setattr(jobs, "MOST_SKIPS", 3)
    coordinator = make_coordinator(store, Books(), make_setup())
    await coordinator.submit("job", "")
    await coordinator.skip("job", [(0, 0), (2, 2)], "skip")
    with pytest.raises(QuotaError, match="2 ranges of steps were given, job 'job' has 2, and 3"):
        await coordinator.skip("job", [(4, 4), (6, 6)], "skip")
    assert len(store.skips("job")) == 2
    await coordinator.skip("job", [(0, 9)], "train")
    await coordinator.stop()


@pytest.mark.parametrize("window", [1, 4])
def test_passing_over_steps_leads_to_the_cursor_that_planning_them_leads_to(window):
    setup, cursor = make_setup(window_steps=window), Cursor()
    cursors = [cursor]
    while (planned := plan_step(setup, cursor, Topology(world_size=4))) is not None:
        cursor = planned.next_cursor
        cursors.append(cursor)
    for first in range(len(cursors)):
        for last in range(first, len(cursors)):
            assert pass_over(setup, cursors[first], to_step=last) == cursors[last]
    assert pass_over(setup, cursors[3], to_step=1000) == cursors[-1]


# ---- what is trained ----------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(
    skipped=st.lists(
        st.tuples(st.integers(0, 15), st.integers(0, 6)).map(lambda r: (r[0], r[0] + r[1])),
        min_size=1,
        max_size=4,
    ),
    window=st.sampled_from([1, 3]),
    first_world=st.sampled_from([2, 3]),
    then_world=st.sampled_from([2, 4]),
    stop_at=st.integers(0, 13),
    resume_from=st.integers(0, 13),
)
def test_what_is_trained_is_the_dataset_minus_the_samples_of_skipped_steps(
    skipped, window, first_world, then_world, stop_at, resume_from
):
    """An attempt trains up to a step; then the steps are skipped, and another goes on from a
    checkpoint at or before that step, at another world size."""

    async def history() -> tuple[Counter[int], list[int]]:
        store, setup = MemoryStateStore(), make_setup(window_steps=window)
        coordinator = make_coordinator(store, Books(), setup)
        await coordinator.submit("job", "")
        sessions = await open_all(coordinator, world=first_world)
        before = await train_on(coordinator, sessions, 0, until=stop_at)
        await coordinator.skip("job", skipped, "skip")
        leave(coordinator, sessions)
        kept = before[:resume_from]
        start = Cursor.from_json(kept[-1][0].cursor_after) if kept else Cursor()
        resumed = await open_all(coordinator, world=then_world, cursor=start)
        after = await train_on(coordinator, resumed, start.step)
        status = await coordinator.job("job")
        assert status.committed_step == (after[-1][0].step if after else start.step - 1)
        planned = [e.step for e in ledger_of(store, "job") if e.attempt == 2]
        assert planned == [of[0].step for of in after]
        await coordinator.stop()
        return trained(kept) + trained(after), [of[0].step for of in kept + after]

    visits, steps = asyncio.run(history())
    samples = samples_of_steps(make_setup(window_steps=window))
    start = min(resume_from, stop_at, STEPS)
    gone = {n for first, last in skipped for n in range(first, last + 1) if n >= start}
    assert steps == [n for n in range(STEPS) if n not in gone]
    assert visits == sum((samples[n] for n in range(STEPS) if n not in gone), Counter())


async def test_the_running_attempt_is_not_changed_and_the_next_one_is(store):
    coordinator = make_coordinator(store, Books(), make_setup())
    await coordinator.submit("job", "")
    sessions = await open_all(coordinator)
    await train_on(coordinator, sessions, 0, until=2)
    (made,) = await coordinator.skip("job", [(4, 6)], "skip")
    assert (made.from_attempt, (await coordinator.job("job")).skips) == (2, (made,))
    first = await train_on(coordinator, sessions, 2)
    assert [of[0].step for of in first] == list(range(2, STEPS))
    leave(coordinator, sessions)
    again = await train_on(coordinator, await open_all(coordinator), 0)
    assert [of[0].step for of in again] == [0, 1, 2, 3, *range(7, STEPS)]
    digests = {of[0].step: of[0].plan_digest for of in first}
    assert all(
        shard.plan_digest == digests.get(shard.step, shard.plan_digest) for shard, *_ in again
    )
    await coordinator.stop()


async def test_steps_that_are_to_be_trained_after_all_are(store):
    coordinator = make_coordinator(store, Books(), make_setup())
    await coordinator.submit("job", "")
    await coordinator.skip("job", [(4, 8)], "skip")
    await coordinator.skip("job", [(5, 6)], "train")
    shards = await train_on(coordinator, await open_all(coordinator), 0)
    assert [of[0].step for of in shards] == [0, 1, 2, 3, 5, 6, *range(9, STEPS)]
    await coordinator.stop()


async def test_planning_runs_ahead_across_skipped_steps(store):
    coordinator = make_coordinator(store, Books(), make_setup())
    await coordinator.submit("job", "")
    await coordinator.skip("job", [(1, 9)], "skip")
    sessions = await open_all(coordinator)
    await coordinator.shard(sessions[0].session, 0, received_step=-1, failed_workers=())
    await until(lambda: len(ledger_of(store, "job")) >= 3)  # ready_steps is 3
    await asyncio.sleep(0.1)
    assert [entry.step for entry in ledger_of(store, "job")] == [0, 10, 11]
    await coordinator.stop()


async def test_a_coordinator_that_restarts_inside_a_gap_goes_on_behind_it(store):
    coordinator = make_coordinator(store, Books(), make_setup())
    await coordinator.submit("job", "")
    await coordinator.skip("job", [(3, 7)], "skip")
    sessions = await open_all(coordinator)
    before = await train_on(coordinator, sessions, 0, until=3)
    await coordinator.stop()
    again = make_coordinator(store, Books(), make_setup())
    await again.start()
    await again.skip("job", [(9, 9)], "skip")  # of the next attempt, not of this one
    after = await train_on(again, await open_all(again, rejoin=1), 3)
    assert [of[0].step for of in before + after] == [0, 1, 2, *range(8, STEPS)]
    assert (await again.job("job")).committed_step == STEPS - 1
    await again.stop()


# ---- what is said of them -----------------------------------------------------------------


async def test_a_skipped_step_is_explained_by_its_record_with_the_samples_passed_over(store):
    coordinator = make_coordinator(store, Books(), make_setup(window_steps=3))
    await coordinator.submit("job", "")
    sessions = await open_all(coordinator)
    first = await train_on(coordinator, sessions, 0, until=9)
    leave(coordinator, sessions)
    (made,) = await coordinator.skip("job", [(4, 6)], "skip")
    await train_on(coordinator, await open_all(coordinator), 0)
    explained = await coordinator.explain("job", 5, None)
    assert (explained.attempt, explained.skipped_by, explained.entry) == (2, made, None)
    fates = {fate.attempt: fate.fate for fate in explained.fates}
    assert fates == {1: "committed", 2: "skipped"}
    assert Counter(explained.plan.sample_ids.tolist()) == trained([first[5]])
    before = await coordinator.explain("job", 5, 1)
    assert before.entry is not None
    assert before.plan.digest == before.entry.plan_digest == first[5][0].plan_digest
    with pytest.raises(NotFoundError, match="has not been planned in attempt 7"):
        await coordinator.explain("job", 5, 7)
    await coordinator.stop()


async def test_a_range_is_replayed_with_its_gap_as_far_as_the_ledger_goes(store):
    coordinator = make_coordinator(store, Books(), make_setup())
    await coordinator.submit("job", "")
    with pytest.raises(NotFoundError, match=r"no step of job 'job' has been planned\. Start its"):
        await anext(coordinator.replay("job", 0, 5, None))
    await coordinator.skip("job", [(4, 6)], "skip")
    await train_on(coordinator, await open_all(coordinator), 0)
    steps = [step async for step in coordinator.replay("job", 2, 10_000, None)]
    assert [step.step for step in steps] == list(range(2, STEPS))
    assert [step.step for step in steps if step.skipped] == [4, 5, 6]
    assert all(step.plan_digest == step.ledger_digest for step in steps)
    with pytest.raises(NotFoundError, match="the last planned is 12"):
        await anext(coordinator.replay("job", 13, 20, None))
    with pytest.raises(SpecError, match="9-4 is no range of steps"):
        await anext(coordinator.replay("job", 9, 4, None))
    await coordinator.stop()


async def test_a_plan_that_changed_since_is_told_by_its_digests(store):
    coordinator = make_coordinator(store, Books(), make_setup())
    await coordinator.submit("job", "")
    await train_on(coordinator, await open_all(coordinator), 0)
    await coordinator.stop()
    changed = make_coordinator(store, Books(), make_setup(strategy="random"))
    await changed.start()
    steps = [step async for step in changed.replay("job", 0, 12, 1)]
    assert all(step.plan_digest != step.ledger_digest for step in steps)
    await changed.stop()


@pytest.mark.parametrize("given", [[], [(3, 2)], [(-1, 2)], [(0, 2**60)], [(0, 1)] * 1001])
async def test_ranges_that_are_none_are_refused_and_nothing_is_recorded(store, given):
    coordinator = make_coordinator(store, Books(), make_setup())
    await coordinator.submit("job", "")
    with pytest.raises(SpecError):
        await coordinator.skip("job", [(1, 2), *given] if given else [], "skip")
    assert store.skips("job") == []
    with pytest.raises(NotFoundError):
        await coordinator.skip("other", [(1, 2)], "skip")
