"""What a job's last steps were: windows over the events, by a clock of the test's own."""

import random
from dataclasses import replace

import pytest

from dataservice.core.health import RankReport
from dataservice.core.orders import BadSample, PackKey, PackReceipt, SourceWork
from dataservice.core.ports import Metrics, NoMetrics
from dataservice.core.receipts import PackReceipts
from dataservice.engine.job_statistics import BUSY_S, WINDOW_STEPS, WORST_EVERY_S, JobStatistics
from dataservice.engine.metrics_fan_out import fan_out
from dataservice.observability.metrics import PrometheusMetrics
from tests.engine.counted import calls_of

JOB = "job"


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def shown() -> PrometheusMetrics:
    return PrometheusMetrics()


@pytest.fixture
def statistics(clock, shown) -> JobStatistics:
    made = JobStatistics(shown, clock)
    made.attempt_begun(JOB)
    return made


@pytest.fixture
def events(statistics, shown) -> Metrics:
    return fan_out(statistics, shown)


def value(shown, name, **labels):
    return shown.registry.get_sample_value(f"dataservice_{name}", {"job": JOB, **labels})


def told(steps, waited_s=0.0, waiting_s=0.0):
    return RankReport(step=steps - 1, steps=steps, waited_s=waited_s, waiting_s=waiting_s)


def decoded(step, *, pack=0, bad=(), **seconds):
    """A receipt of a pack with one sample of each source, by the seconds that it took to decode."""
    return PackReceipt(
        key=PackKey(job=JOB, step=step, plan_digest="d", pack=pack),
        size_bytes=10,
        decode_s=sum(seconds.values()),
        bad_samples=tuple(
            BadSample(sample_id=0, source=source, key="k", reason="torn") for source in bad
        ),
        sources=tuple(
            SourceWork(source=source, samples=1, read_s=0.0, decode_s=own_s, read_bytes=5)
            for source, own_s in seconds.items()
        ),
    )


def test_nothing_is_known_of_a_job_that_never_ran(statistics):
    assert statistics.recent_steps("another").steps == 0
    assert statistics.busy_slots() == 0.0


def test_a_rank_s_wait_is_what_it_waited_since_its_reports_began_a_step(statistics):
    statistics.reported(JOB, 0, told(1))
    statistics.reported(JOB, 0, told(5, waited_s=2.0))
    statistics.reported(JOB, 1, told(5))
    assert statistics.recent_steps(JOB).wait_s == {0: 0.5, 1: 0.0}


def test_a_wait_that_lasts_counts_before_it_ends(statistics):
    statistics.reported(JOB, 0, told(4))
    statistics.reported(JOB, 0, told(4, waiting_s=8.0))
    assert statistics.recent_steps(JOB).wait_s == {0: 8.0}


def test_old_waits_are_forgotten_after_a_window_of_steps(statistics):
    statistics.reported(JOB, 0, told(1))
    for steps in range(2, 2 + 2 * WINDOW_STEPS):
        statistics.reported(JOB, 0, told(steps, waited_s=60.0))
    assert statistics.recent_steps(JOB).wait_s == {0: 0.0}


def test_waits_are_seen_of_steps_so_quick_that_a_window_of_them_passes_between_reports(statistics):
    for report in range(1, 4):
        statistics.reported(JOB, 0, told(report * 100, waited_s=report * 50.0))
    assert statistics.recent_steps(JOB).wait_s == {0: 0.5}


def test_a_rank_that_began_anew_is_not_reckoned_with_its_former_waits(statistics):
    statistics.reported(JOB, 0, told(9, waited_s=50.0))
    statistics.reported(JOB, 0, told(1))
    statistics.reported(JOB, 0, told(3, waited_s=1.0))
    assert statistics.recent_steps(JOB).wait_s == {0: 0.5}


def test_waits_reach_the_metrics_as_seconds_a_step_and_as_ranks_that_stand_now(statistics, shown):
    statistics.reported(JOB, 0, told(1, waiting_s=1.0))
    statistics.reported(JOB, 1, told(1, waiting_s=1.0))
    assert value(shown, "waiting_ranks") == 2
    statistics.reported(JOB, 0, told(5, waited_s=2.0))
    assert value(shown, "waiting_ranks") == 1
    statistics.rank_left(JOB, 1)
    assert value(shown, "waiting_ranks") == 0
    assert value(shown, "exposed_wait_seconds_count") == 1
    assert value(shown, "exposed_wait_seconds_sum") == 0.5


@pytest.mark.parametrize("seed", range(10))
def test_the_ranks_that_wait_are_counted_through_reports_leavings_and_attempts(
    statistics, shown, clock, seed
):
    draw, waits_s = random.Random(seed), {}
    for steps in range(1, 200):
        clock.now_s += WORST_EVERY_S
        rank, waiting_s = draw.randrange(8), draw.choice([0.0, 1.0])
        what = draw.choices(["report", "leave", "begin"], [20, 8, 1])[0]
        if what == "report":
            statistics.reported(JOB, rank, told(steps, waiting_s=waiting_s))
            waits_s[rank] = waiting_s
        elif what == "leave":
            statistics.rank_left(JOB, rank)
            waits_s.pop(rank, None)
        else:
            statistics.attempt_begun(JOB)
            waits_s.clear()
        assert value(shown, "waiting_ranks") == sum(each > 0 for each in waits_s.values())
        if what == "leave":
            assert (value(shown, "worst_exposed_wait_rank") == -1) == (not waits_s)


def test_a_report_and_a_leaving_take_as_many_calls_however_many_ranks_there_are():
    def calls(ranks):
        clock = Clock()
        statistics = JobStatistics(NoMetrics(), clock)
        for rank in range(ranks):
            statistics.reported(JOB, rank, told(1, waiting_s=1.0))

        def go_on():
            for rank in range(4):
                statistics.reported(JOB, rank, told(2, waiting_s=1.0))
                statistics.rank_left(JOB, rank)

        return calls_of(go_on)

    assert calls(2000) == calls(5)


def test_a_rank_that_went_is_quiet_for_as_long_as_it_was_by_then(statistics, clock):
    statistics.reported(JOB, 0, told(1))
    clock.now_s += 3
    assert statistics.recent_steps(JOB).quiet_s == {0: 3.0}
    statistics.rank_left(JOB, 0)
    clock.now_s += 60
    assert statistics.recent_steps(JOB).quiet_s == {0: 3.0}
    statistics.reported(JOB, 0, told(1))
    assert statistics.recent_steps(JOB).quiet_s == {0: 0.0}


def test_the_pace_is_that_of_the_last_commits_and_sinks_when_the_next_is_overdue(statistics, clock):
    for _ in range(5):
        statistics.step_committed(JOB)
        clock.now_s += 2
    assert statistics.recent_steps(JOB).interval_s == 2
    assert statistics.recent_steps(JOB).steps_per_s == 0.5
    clock.now_s += 30
    assert statistics.recent_steps(JOB).steps_per_s == 0.1


def test_what_a_sample_usually_takes_is_learnt_of_steps_behind_the_window(statistics):
    for step in range(2 * WINDOW_STEPS):
        statistics.packs_prepared(
            PackReceipts.of([decoded(step, ocr=0.5 if step < WINDOW_STEPS else 3.0)])
        )
    (source,) = statistics.recent_steps(JOB).sources
    assert (source.source, source.usual_s, source.decode_s) == ("ocr", 0.5, 3.0)


def test_sources_are_told_apart_with_their_bad_samples_and_budgets(events, statistics, shown):
    events.packs_prepared(PackReceipts.of([decoded(0, bad=["ocr"], chat=0.125, ocr=0.5)]))
    events.packs_prepared(PackReceipts.of([decoded(0, pack=1, ocr=0.5)]))
    events.error_budget_used(JOB, "ocr", 0.75)
    chat, ocr = statistics.recent_steps(JOB).sources
    assert (chat.samples, chat.decode_s, chat.quarantined) == (1.0, 0.125, 0)
    assert (ocr.samples, ocr.decode_s, ocr.quarantined, ocr.budget_used) == (2.0, 1.0, 1, 0.75)
    assert value(shown, "read_samples_total", source="ocr") == 2
    assert value(shown, "read_bytes_total", source="ocr") == 10
    assert value(shown, "source_decode_seconds_total", source="ocr") == 1.0


def test_busy_slots_are_those_of_the_last_seconds(statistics, clock):
    statistics.packs_prepared(PackReceipts.of([decoded(0, ocr=2.0)]))
    clock.now_s += 2
    statistics.packs_prepared(PackReceipts.of([decoded(1, ocr=4.0)]))
    assert statistics.busy_slots() == 1.5  # since the first pack was begun, 4 s ago
    clock.now_s += BUSY_S + 1
    assert statistics.busy_slots() == 0.0


def test_a_new_attempt_keeps_what_samples_take_and_forgets_its_ranks(statistics):
    for step in range(WINDOW_STEPS + 1):
        statistics.packs_prepared(PackReceipts.of([decoded(step, ocr=0.5)]))
    statistics.reported(JOB, 0, told(3))
    statistics.step_committed(JOB)
    statistics.attempt_begun(JOB)
    recent = statistics.recent_steps(JOB)
    assert (recent.steps, recent.wait_s, recent.sources) == (0, {}, ())
    statistics.packs_prepared(PackReceipts.of([decoded(0, ocr=0.5)]))
    assert statistics.recent_steps(JOB).sources[0].usual_s == 0.5


def test_a_deleted_job_is_forgotten(statistics):
    statistics.packs_prepared(PackReceipts.of([decoded(0, ocr=0.5)]))
    statistics.job_deleted(JOB)
    assert statistics.recent_steps(JOB).sources == ()


def test_work_of_cpus_is_told_beside_the_time_of_slots_and_counted(events, statistics, shown):
    work = SourceWork(
        source="ocr", samples=2, read_s=1.0, decode_s=3.0, read_bytes=5,
        read_cpu_s=0.25, decode_cpu_s=2.0,
    )  # fmt: skip
    events.packs_prepared(PackReceipts.of([replace(decoded(0, ocr=4.0), sources=(work,))]))
    (source,) = statistics.recent_steps(JOB).sources
    assert (source.read_cpu_s, source.decode_cpu_s) == (0.25, 2.0)
    assert value(shown, "source_cpu_seconds_total", source="ocr") == 2.25


def test_the_wait_for_room_is_a_mean_over_packs_and_begins_anew_with_an_attempt(statistics):
    for room_s in (0.0, 1.0, 2.0):
        statistics.packs_prepared(PackReceipts.of([replace(decoded(0, ocr=1.0), room_s=room_s)]))
    assert statistics.recent_steps(JOB).room_s == 1.0
    statistics.attempt_begun(JOB)
    assert statistics.recent_steps(JOB).room_s == 0.0
