"""Running jobs as they are seen: attempts, windows and shares, in the words of core.health."""

import asyncio
from functools import partial

import pytest

from dataservice.core.errors import NotFoundError, StateError
from dataservice.core.health import OTHERS, Finding, RankReport
from dataservice.core.team import TeamSpec
from dataservice.engine.health import report_every_s
from dataservice.observability.diagnosis import diagnose
from dataservice.observability.metrics import PrometheusMetrics
from dataservice.state.memory import MemoryStateStore
from tests.engine.sessions import only_missing, open_all, open_rank, settled, started, train
from tests.engine.support import Books


class StuckBooks(Books):
    """Workers that never finish a pack."""

    async def prepare(self, worker, order):
        await asyncio.Event().wait()


class FullDisk(MemoryStateStore):
    """Has no room for a step."""

    def put_ledger(self, entry, contents=()):
        raise StateError("the disk is full")


async def health_of(coordinator, *jobs, team=None):
    """(health of each job, fleet)."""
    seen = await coordinator.health(jobs, team=team)
    return [each.health for each in seen.jobs], seen.fleet


async def test_a_job_without_trainers_has_no_ranks():
    coordinator = await started("job")
    (job,), _ = await health_of(coordinator, "job")
    assert (job.attempt, job.ranks, job.committed_step, job.ready_steps) == (0, (), -1, 0)
    with pytest.raises(NotFoundError, match="no job 'other'"):
        await coordinator.health(["other"], team=None)
    await coordinator.stop()


async def test_ranks_that_have_not_opened_are_missing():
    coordinator = await started("job")
    opening = asyncio.create_task(open_rank(coordinator, 1, world=3))
    await only_missing(coordinator, 0, 2)
    (job,), _ = await health_of(coordinator, "job")
    assert (job.world_size, job.missing_ranks) == (3, (0, 2))
    assert job.forming_s > 0
    opening.cancel()
    await asyncio.gather(opening, return_exceptions=True)
    await coordinator.stop()


async def test_a_stalled_job_shows_in_metrics_though_it_has_never_trained(monkeypatch):
    monkeypatch.setattr("dataservice.engine.coordinator.LOOKED_AT_EVERY_S", 0.02)
    monkeypatch.setattr("dataservice.observability.diagnosis.QUIET_S", 0.0)
    metrics = PrometheusMetrics()
    coordinator = await started("waits", "idle", metrics=metrics, diagnose=diagnose)
    await coordinator.start()

    async def shown(job, stalled):
        name = "dataservice_stalled_jobs"
        return metrics.registry.get_sample_value(name, {"job": job}) == stalled

    await settled(partial(shown, "waits", 0.0))
    opening = asyncio.create_task(open_rank(coordinator, 1, world=2, job="waits"))
    await settled(partial(shown, "waits", 1.0))
    assert await shown("idle", 0.0)
    opening.cancel()
    await asyncio.gather(opening, return_exceptions=True)
    await coordinator.delete("waits")
    assert await shown("waits", None)
    await coordinator.stop()


async def test_a_running_job_is_seen_with_its_window_steps_and_ranks():
    coordinator = await started("job")
    sessions = await open_all(coordinator)
    await train(coordinator, sessions, 0, 4)

    async def window_is_decoded():
        (job,), _ = await health_of(coordinator, "job")
        return job.decoded_steps == job.ready_steps == job.window_steps == 3

    await settled(window_is_decoded)
    report = RankReport(step=3, steps=4, waited_s=0.5, waiting_s=0.0)
    await coordinator.report(sessions[1].session, report)
    coordinator.close_session(sessions[0].session)
    (job,), fleet = await health_of(coordinator, "job")
    assert (job.committed_step, job.planned_step, job.steps) == (3, 6, 3)
    assert [(rank.rank, rank.client, rank.live) for rank in job.ranks] == [
        (0, "host:0", False),
        (1, "host:1", True),
    ]
    assert job.samples_per_s == pytest.approx(16 * job.steps_per_s)
    assert job.report_every_s == 2.0
    assert (fleet.workers, fleet.slots, fleet.slots_per_worker) == (2, 2, 1)
    await coordinator.stop()


async def test_nothing_is_decoded_of_a_step_whose_packs_are_out():
    coordinator = await started("job", books=StuckBooks())
    await open_all(coordinator)

    async def is_full():
        (job,), _ = await health_of(coordinator, "job")
        return job.window_is_full

    await settled(is_full)
    (job,), _ = await health_of(coordinator, "job")
    assert (job.decoded_steps, job.steps) == (0, 0)
    await coordinator.stop()


async def test_the_end_of_an_attempt_is_told_with_its_reason():
    coordinator = await started("job", store=FullDisk())
    for opened in await open_all(coordinator):
        with pytest.raises(StateError):
            await asyncio.wait_for(coordinator.session_ended(opened.session), 120.0)
    (job,), _ = await health_of(coordinator, "job")
    assert (job.failure, job.ranks) == ("the disk is full", ())
    await coordinator.stop()


async def test_slots_are_shared_by_weight_between_teams_and_equally_between_a_team_s_jobs():
    teams = {"a": TeamSpec(weight=3), "b": TeamSpec(weight=1), "c": TeamSpec(max_decode_cpus=0.5)}
    books = Books(alive=[f"w{n}" for n in range(8)])
    coordinator = await started("a/1", "a/2", "b/1", "c/1", books=books, teams=lambda: teams)
    for job in ("a/1", "a/2", "b/1"):
        await open_all(coordinator, world=1, job=job)
    jobs, _ = await health_of(coordinator, "a/1", "a/2", "b/1", "c/1")
    # 8 slots: a and b have 6 and 2 while c's job is not trained; c may not take more than half.
    assert [job.share_slots for job in jobs] == [3.0, 3.0, 2.0, 0.5]
    await coordinator.stop()


async def test_another_team_in_line_is_not_named_to_a_team():
    coordinator = await started("a/1", "b/1", books=StuckBooks())
    for job in ("a/1", "b/1"):
        await open_all(coordinator, world=1, job=job)

    async def both_wait():
        _, told_admin = await health_of(coordinator, "a/1")
        return set(told_admin.waiting_teams) == {"a", "b"}

    await settled(both_wait)
    _, told_a = await health_of(coordinator, "a/1", team="a")
    assert set(told_a.waiting_teams) == {"a", OTHERS}
    await coordinator.stop()


async def test_what_is_concluded_is_asked_of_each_job_with_the_fleet():
    def diagnose(job, fleet):
        return [Finding(severity="info", text=f"{job.job} of {fleet.slots} slots")]

    coordinator = await started("a", "b", diagnose=diagnose)
    seen = await coordinator.health(["a", "b"], team=None)
    assert [each.findings[0].text for each in seen.jobs] == ["a of 2 slots", "b of 2 slots"]
    await coordinator.stop()


async def test_steps_that_a_rank_has_begun_count_as_untrained_until_it_trains_one():
    coordinator = await started("job")
    sessions = await open_all(coordinator)
    begun = RankReport(step=11, steps=12, waited_s=0.0, waiting_s=0.0)
    for opened in sessions:
        await coordinator.report(opened.session, begun)
    (job,), _ = await health_of(coordinator, "job")
    assert [rank.untrained_steps for rank in job.ranks] == [12, 12]
    await train(coordinator, sessions, 0, 1)
    (job,), _ = await health_of(coordinator, "job")
    assert [rank.untrained_steps for rank in job.ranks] == [0, 0]
    await coordinator.stop()


async def test_a_rank_of_a_former_attempt_is_not_heard_any_more():
    coordinator = await started("job")
    old = await open_all(coordinator, world=2)
    coordinator.close_session(old[0].session)
    new = await open_all(coordinator, world=1)
    report = RankReport(step=0, steps=3, waited_s=9.0, waiting_s=1.0)
    await coordinator.report(old[1].session, report)
    (job,), _ = await health_of(coordinator, "job")
    assert [(rank.rank, rank.quiet_s) for rank in job.ranks] == [(0, 0.0)]
    with pytest.raises(NotFoundError, match="no such session"):
        await coordinator.report("nobody's", report)
    assert new[0].report_every_s == 2.0
    await coordinator.stop()


def test_all_ranks_of_a_job_report_no_more_than_two_hundred_times_a_second():
    assert [report_every_s(ranks) for ranks in (1, 400, 2560)] == [2.0, 2.0, 12.8]
