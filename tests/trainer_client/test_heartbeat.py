"""A rank tells the service that it lives and what it waits for; training never notices."""

import threading
import time

import pytest

from tests.waiting import wait_for
from trainer_client.heartbeat import DataWait, Waited


def test_the_wait_for_the_first_step_is_not_counted():
    waits = DataWait()
    with waits.waiting():
        time.sleep(0.02)
        assert waits.now() == Waited(step=-1, steps=0, waited_s=0.0, waiting_s=0.0)
    waits.begin(7)
    assert waits.now() == Waited(step=7, steps=1, waited_s=0.0, waiting_s=0.0)


def test_waits_add_up_and_the_one_that_lasts_is_told_apart():
    waits = DataWait()
    waits.begin(0)
    for step in (1, 2):
        with waits.waiting():
            time.sleep(0.02)
            assert waits.now().waiting_s >= 0.02
            assert waits.now().steps == step
        waits.begin(step)
    now = waits.now()
    assert (now.step, now.steps, now.waiting_s) == (2, 3, 0.0)
    assert now.waited_s >= 0.04


def test_a_wait_that_ends_with_an_error_is_counted_too():
    waits = DataWait()
    waits.begin(0)
    with pytest.raises(TimeoutError), waits.waiting():
        raise TimeoutError
    assert waits.now().waiting_s == 0.0


def test_a_rank_reports_from_its_opening_until_it_is_closed(service):
    service.coordinator.report_every_s = 0.05
    service.coordinator.planned.clear()
    with service.dataset(prefetch_steps=1) as dataset:
        steps = iter(dataset)
        service.coordinator.planned.set()
        next(steps)
        service.coordinator.planned.clear()
        reports = service.coordinator.reports
        wait_for(lambda: reports and reports[-1].steps == 1)
        assert reports[0].session == "session-1"
        assert (reports[-1].step, reports[-1].waiting_s) == (0, 0.0)
        service.coordinator.planned.set()
        list(steps)
    assert "shard-heartbeat" not in [thread.name for thread in threading.enumerate()]
    count = len(reports)
    time.sleep(0.15)
    # The last one may have been cut off on its way, and be taken in only now.
    assert len(reports) <= count + 1, "it goes on after the dataset is closed"


def test_questions_take_reports_along_and_no_call_is_made(make_service):
    service = make_service(steps=6)
    service.coordinator.report_every_s, service.coordinator.reports_along = 600.0, True
    with service.dataset() as dataset:
        list(dataset)
    told = [ask.HasField("report") for ask in service.coordinator.asks]
    assert told == [True, *[False] * 6], "the next is due in minutes"
    assert service.coordinator.asks[0].report.step == -1
    assert service.coordinator.reports == []


def test_a_question_takes_along_what_is_due_when_it_is_asked(make_service):
    service = make_service(steps=6)
    service.coordinator.report_every_s, service.coordinator.reports_along = 1e-9, True
    service.fail("GetShard", "UNAVAILABLE", "busy")
    with service.dataset() as dataset:
        list(dataset)
    reports = [ask.report for ask in service.coordinator.asks if ask.HasField("report")]
    assert len(reports) == len(service.coordinator.asks) > 7
    assert [each.steps for each in reports] == sorted(each.steps for each in reports)
    assert reports[-1].steps > 0


def test_a_rank_whose_questions_stay_away_reports_by_calls(service):
    service.coordinator.report_every_s, service.coordinator.reports_along = 0.05, True
    with service.dataset(prefetch_steps=1) as dataset:
        steps = iter(dataset)
        next(steps)
        service.coordinator.planned.clear()
        told = len(service.coordinator.reports)
        wait_for(lambda: len(service.coordinator.reports) > told + 1)
        assert service.coordinator.reports[-1].session == "session-1"
        service.coordinator.planned.set()
        list(steps)


def test_reports_that_fail_are_forgotten(service):
    service.coordinator.report_every_s = 0.02
    for _ in range(3):
        service.fail("Report", "UNAVAILABLE", "away")
    service.fail("Report", "INTERNAL", "a fault")
    with service.dataset() as dataset:
        steps = iter(dataset)
        next(steps)
        wait_for(lambda: service.coordinator.reports)
        assert 1 + len(list(steps)) == service.coordinator.steps


def test_a_service_that_wants_no_reports_gets_none(service):
    with service.dataset() as dataset:
        list(dataset)
    assert service.coordinator.reports == []
