"""What a job's last steps were: windows over the events, by a clock of the test's own."""

import pytest

from dataservice.core.health import RankReport
from dataservice.core.orders import BadSample, PackKey, PackReceipt, SourceWork
from dataservice.engine.vitals import BUSY_S, WINDOW_STEPS, Vitals
from dataservice.observability.metrics import PrometheusMetrics

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
def vitals(clock, shown) -> Vitals:
    made = Vitals(shown, clock)
    made.attempt_begun(JOB)
    return made


def value(shown, name, **labels):
    return shown.registry.get_sample_value(f"dataservice_{name}", {"job": JOB, **labels})


def told(steps, waited_s=0.0, waiting_s=0.0):
    return RankReport(step=steps - 1, steps=steps, waited_s=waited_s, waiting_s=waiting_s)


def decoded(step, *, pack=0, bad=(), **seconds):
    """A receipt of a pack with one sample of each source, which took so long to decode."""
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


def test_nothing_is_known_of_a_job_that_never_ran(vitals):
    assert vitals.lately("another").steps == 0
    assert vitals.busy_slots() == 0.0


def test_a_rank_s_wait_is_what_it_waited_since_its_reports_began_a_step(vitals):
    vitals.reported(JOB, 0, told(1))
    vitals.reported(JOB, 0, told(5, waited_s=2.0))
    vitals.reported(JOB, 1, told(5))
    assert vitals.lately(JOB).wait_s == {0: 0.5, 1: 0.0}


def test_a_wait_that_lasts_counts_before_it_ends(vitals):
    vitals.reported(JOB, 0, told(4))
    vitals.reported(JOB, 0, told(4, waiting_s=8.0))
    assert vitals.lately(JOB).wait_s == {0: 8.0}


def test_old_waits_are_forgotten_after_a_window_of_steps(vitals):
    vitals.reported(JOB, 0, told(1))
    for steps in range(2, 2 + 2 * WINDOW_STEPS):
        vitals.reported(JOB, 0, told(steps, waited_s=60.0))
    assert vitals.lately(JOB).wait_s == {0: 0.0}


def test_waits_are_seen_of_steps_so_quick_that_a_window_of_them_passes_between_reports(vitals):
    for report in range(1, 4):
        vitals.reported(JOB, 0, told(report * 100, waited_s=report * 50.0))
    assert vitals.lately(JOB).wait_s == {0: 0.5}


def test_a_rank_that_began_anew_is_not_reckoned_with_its_former_waits(vitals):
    vitals.reported(JOB, 0, told(9, waited_s=50.0))
    vitals.reported(JOB, 0, told(1))
    vitals.reported(JOB, 0, told(3, waited_s=1.0))
    assert vitals.lately(JOB).wait_s == {0: 0.5}


def test_waits_reach_the_metrics_as_seconds_a_step_and_as_ranks_that_stand_now(vitals, shown):
    vitals.reported(JOB, 0, told(1, waiting_s=1.0))
    vitals.reported(JOB, 1, told(1, waiting_s=1.0))
    assert value(shown, "waiting_ranks") == 2
    vitals.reported(JOB, 0, told(5, waited_s=2.0))
    assert value(shown, "waiting_ranks") == 1
    vitals.rank_left(JOB, 1)
    assert value(shown, "waiting_ranks") == 0
    assert value(shown, "exposed_wait_seconds_count") == 1
    assert value(shown, "exposed_wait_seconds_sum") == 0.5


def test_a_rank_that_went_is_quiet_for_as_long_as_it_was_by_then(vitals, clock):
    vitals.reported(JOB, 0, told(1))
    clock.now_s += 3
    assert vitals.lately(JOB).quiet_s == {0: 3.0}
    vitals.rank_left(JOB, 0)
    clock.now_s += 60
    assert vitals.lately(JOB).quiet_s == {0: 3.0}
    vitals.reported(JOB, 0, told(1))
    assert vitals.lately(JOB).quiet_s == {0: 0.0}


def test_the_pace_is_that_of_the_last_commits_and_sinks_when_the_next_is_overdue(vitals, clock):
    for _ in range(5):
        vitals.step_committed(JOB)
        clock.now_s += 2
    assert vitals.lately(JOB).interval_s == 2
    assert vitals.lately(JOB).steps_per_s == 0.5
    clock.now_s += 30
    assert vitals.lately(JOB).steps_per_s == 0.1


def test_what_a_sample_usually_takes_is_learnt_of_steps_behind_the_window(vitals):
    for step in range(2 * WINDOW_STEPS):
        vitals.pack_prepared(decoded(step, ocr=0.5 if step < WINDOW_STEPS else 3.0))
    (source,) = vitals.lately(JOB).sources
    assert (source.source, source.usual_s, source.decode_s) == ("ocr", 0.5, 3.0)


def test_sources_are_told_apart_with_their_bad_samples_and_budgets(vitals, shown):
    vitals.pack_prepared(decoded(0, bad=["ocr"], chat=0.125, ocr=0.5))
    vitals.pack_prepared(decoded(0, pack=1, ocr=0.5))
    vitals.error_budget_used(JOB, "ocr", 0.75)
    chat, ocr = vitals.lately(JOB).sources
    assert (chat.samples, chat.decode_s, chat.quarantined) == (1.0, 0.125, 0)
    assert (ocr.samples, ocr.decode_s, ocr.quarantined, ocr.budget_used) == (2.0, 1.0, 1, 0.75)
    assert value(shown, "read_samples_total", source="ocr") == 2
    assert value(shown, "read_bytes_total", source="ocr") == 10
    assert value(shown, "source_decode_seconds_total", source="ocr") == 1.0


def test_busy_slots_are_those_of_the_last_seconds(vitals, clock):
    vitals.pack_prepared(decoded(0, ocr=2.0))
    clock.now_s += 2
    vitals.pack_prepared(decoded(1, ocr=4.0))
    assert vitals.busy_slots() == 1.5  # since the first pack was begun, 4 s ago
    clock.now_s += BUSY_S + 1
    assert vitals.busy_slots() == 0.0


def test_a_new_attempt_keeps_what_samples_take_and_forgets_its_ranks(vitals):
    for step in range(WINDOW_STEPS + 1):
        vitals.pack_prepared(decoded(step, ocr=0.5))
    vitals.reported(JOB, 0, told(3))
    vitals.step_committed(JOB)
    vitals.attempt_begun(JOB)
    lately = vitals.lately(JOB)
    assert (lately.steps, lately.wait_s, lately.sources) == (0, {}, ())
    vitals.pack_prepared(decoded(0, ocr=0.5))
    assert vitals.lately(JOB).sources[0].usual_s == 0.5


def test_a_deleted_job_is_forgotten(vitals):
    vitals.pack_prepared(decoded(0, ocr=0.5))
    vitals.job_deleted(JOB)
    assert vitals.lately(JOB).sources == ()
