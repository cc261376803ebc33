"""What the engine reports while a job runs, read from the series."""

import asyncio
from collections import Counter
from dataclasses import replace

import pytest

from dataservice.core.cursor import Cursor
from dataservice.core.job import ErrorBudget
from dataservice.core.orders import BadSample, PackOrder, PackReceipt
from dataservice.core.ports import WorkerInfo
from dataservice.observability.metrics import PrometheusMetrics
from dataservice.state.memory import MemoryStateStore
from tests.engine.sessions import open_all, open_rank, shard_of, train
from tests.engine.support import Books, make_coordinator, make_setup
from tests.waiting import until


class PickyBooks(Books):
    """Every pack takes a quarter of a second and 1000 bytes; the first sample of each is bad."""

    async def prepare(self, worker: WorkerInfo, order: PackOrder) -> PackReceipt:
        receipt = await super().prepare(worker, order)
        ref = order.samples[0].ref
        bad = BadSample(
            sample_id=ref.sample_id, source=ref.source, key=ref.key, reason="torn\nfile"
        )
        return replace(receipt, decode_s=0.25, size_bytes=1000, bad_samples=(bad,))


@pytest.fixture
def metrics() -> PrometheusMetrics:
    return PrometheusMetrics()


def value(metrics: PrometheusMetrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(f"dataservice_{name}", labels)


def series(metrics: PrometheusMetrics, name: str) -> dict[str, float]:
    """Values by the label that is not the job."""
    return {
        next(v for k, v in sample.labels.items() if k != "job"): sample.value
        for family in metrics.registry.collect()
        for sample in family.samples
        if sample.name == f"dataservice_{name}"
    }


async def run_epoch(metrics, store, books):
    coordinator = make_coordinator(store, books, make_setup(), metrics=metrics)
    await coordinator.submit("job", "")
    sessions = await open_all(coordinator)
    await train(coordinator, sessions, 0, 100)
    return coordinator, sessions


async def plans_of(coordinator, steps):
    return [(await coordinator.explain("job", step, None)).plan for step in range(steps)]


async def all_receipts(coordinator, metrics):
    """Wait for those that come after the ranks have trained; how many packs there were."""
    packs = sum(plan.packs for plan in await plans_of(coordinator, 13))
    await until(lambda: value(metrics, "decoded_packs_total", job="job") == packs)
    return packs


async def test_an_epoch_is_counted_as_it_was_planned_and_committed(metrics):
    coordinator, _ = await run_epoch(metrics, MemoryStateStore(), Books())
    plans = await plans_of(coordinator, 13)
    assert value(metrics, "planned_steps_total", job="job") == 13
    assert value(metrics, "planned_samples_total", job="job") == 200
    assert value(metrics, "committed_steps_total", job="job") == 13
    assert value(metrics, "plan_seconds_count", job="job") == 13
    degrees = Counter(str(d) for plan in plans for d in plan.pack_degree.tolist())
    assert series(metrics, "cp_groups_total") == degrees
    last = plans[-1]
    assert value(metrics, "predicted_step_seconds", job="job") == last.predicted_s
    assert series(metrics, "predicted_phase_seconds") == last.time.phase_s
    assert (
        series(metrics, "plan_gap_ratio").items() >= {s.stage: s.gap for s in last.stages}.items()
    )
    await coordinator.stop()


async def test_drift_is_the_moving_average_of_measured_over_predicted(metrics):
    store = MemoryStateStore()
    coordinator = make_coordinator(store, Books(), make_setup(), metrics=metrics)
    await coordinator.submit("job", "")
    sessions = await open_all(coordinator)
    expected = None
    for step, times in enumerate((2.0, 2.0, 3.0)):
        for opened in sessions:
            await shard_of(coordinator, opened, step)
        predicted_s = store.ledger_entry("job", step).predicted_s
        for share, opened in zip((0.5, 1.0), sessions, strict=True):  # the slowest counts
            seconds = share * times * predicted_s
            await coordinator.commit(opened.session, step, measured_s=seconds)
        expected = times if expected is None else expected + 0.1 * (times - expected)
    assert value(metrics, "measured_over_predicted_ratio", job="job") == pytest.approx(expected)
    await coordinator.stop()


async def test_drift_compares_phase_by_phase_on_the_mean_of_ranks(metrics):
    store = MemoryStateStore()
    coordinator = make_coordinator(store, Books(), make_setup(), metrics=metrics)
    await coordinator.submit("job", "")
    sessions = await open_all(coordinator)
    times = {"vision": 1.5, "audio": 1.0, "llm": 0.8, "waiting": 3.0}
    for step in range(2):
        for opened in sessions:
            await shard_of(coordinator, opened, step)
        (plan,) = (p for p in await plans_of(coordinator, step + 1) if p.step == step)
        foreseen = {k: v for k, v in plan.time.phase_s.items() if v > 0 and k in times}
        for share, opened in zip((0.5, 1.5), sessions, strict=True):
            spent = {k: share * times[k] * v for k, v in foreseen.items()}
            await coordinator.commit(
                opened.session, step, measured_s=1.0, phase_s={**spent, "own": 0.25}
            )
        assert series(metrics, "measured_phase_seconds") == pytest.approx(
            {**{k: times[k] * v for k, v in foreseen.items()}, "own": 0.25}
        )
    drift = series(metrics, "measured_over_predicted_phase_ratio")
    assert drift == pytest.approx({k: times[k] for k in drift})
    assert {"vision", "llm"} <= drift.keys() <= times.keys()
    await coordinator.stop()


async def test_a_step_planned_again_is_counted_once():
    store, setup = MemoryStateStore(), make_setup()
    before, after = PrometheusMetrics(), PrometheusMetrics()
    first = make_coordinator(store, Books(), setup, metrics=before)
    await first.submit("job", "")
    await train(first, await open_all(first), 0, 6)
    await first.stop()

    second = make_coordinator(store, Books(), setup, metrics=after)
    await second.start()
    await train(second, await open_all(second, rejoin=1), 2, 100)
    for name in ("planned_steps_total", "committed_steps_total"):
        assert sum(value(each, name, job="job") for each in (before, after)) == 13
    await second.stop()


async def test_ready_steps_are_the_window_and_none_once_the_job_stops(metrics):
    coordinator = make_coordinator(MemoryStateStore(), Books(), make_setup(), metrics=metrics)
    await coordinator.submit("job", "")
    sessions = await open_all(coordinator)
    await shard_of(coordinator, sessions[0], 0)
    await until(lambda: value(metrics, "ready_steps", job="job") == 3)
    await coordinator.stop()
    assert value(metrics, "ready_steps", job="job") == 0


async def test_packs_bytes_decode_seconds_and_bad_samples_come_from_the_receipts(metrics):
    store = MemoryStateStore()
    coordinator, _ = await run_epoch(metrics, store, PickyBooks())
    packs = await all_receipts(coordinator, metrics)
    assert value(metrics, "decoded_packs_total", job="job") == packs
    assert value(metrics, "decode_seconds_total", job="job") == packs / 4
    assert value(metrics, "prepared_bytes_total", job="job") == packs * 1000
    await until(lambda: len(store.quarantine("job")) == packs)
    kept = Counter(entry.source for entry in store.quarantine("job"))
    assert series(metrics, "quarantined_samples_total") == kept
    assert set(kept) == {"a", "b"}
    await coordinator.stop()


def used_of(metrics, source):
    return value(metrics, "error_budget_used_ratio", job="job", source=source)


async def test_how_near_a_source_is_to_stopping_its_job_is_a_gauge(metrics):
    budget = ErrorBudget(rate=0.5, window_samples=1000, min_bad_samples=50)
    setup = replace(make_setup(), budgets={"a": budget, "b": budget})
    store = MemoryStateStore()
    coordinator = make_coordinator(store, PickyBooks(), setup, metrics=metrics)
    await coordinator.submit("job", "")
    await train(coordinator, await open_all(coordinator), 0, 100)
    packs = await all_receipts(coordinator, metrics)
    await until(lambda: len(store.quarantine("job")) == packs)
    samples = Counter("a" if number < 66 else "b" for number in range(200))
    for source, bad in Counter(entry.source for entry in store.quarantine("job")).items():
        most = max(49, samples[source] / 2)
        await until(lambda source=source, used=bad / most: used_of(metrics, source) == used)
    await coordinator.stop()


async def test_a_lost_worker_is_counted_and_its_line_is_gone(metrics):
    books = Books(deaf={"w0"})
    coordinator, _ = await run_epoch(metrics, MemoryStateStore(), books)
    await until(
        lambda: series(metrics, "worker_outstanding_tokens") == dict.fromkeys(books.alive, 0.0)
    )
    assert value(metrics, "lost_workers_total") == 1
    await coordinator.stop()


async def test_a_worker_that_only_the_pool_missed_is_counted_too(metrics):
    books = Books()
    coordinator = make_coordinator(MemoryStateStore(), books, make_setup(), metrics=metrics)
    await coordinator.submit("job", "")
    sessions = await open_all(coordinator)
    await train(coordinator, sessions, 0, 2)
    await books.replace("w1")
    await train(coordinator, sessions, 2, 6)
    assert value(metrics, "lost_workers_total") == 1
    assert "w1" not in series(metrics, "worker_outstanding_tokens")
    await coordinator.stop()


async def test_a_deleted_job_leaves_no_series(metrics):
    coordinator, sessions = await run_epoch(metrics, MemoryStateStore(), PickyBooks())
    for opened in sessions:
        coordinator.close_session(opened.session)
    await coordinator.delete("job")
    left = {s.name for f in metrics.registry.collect() for s in f.samples if "job" in s.labels}
    assert not left
    await coordinator.stop()


async def test_log_records_say_what_they_are_about(metrics, caplog):
    caplog.set_level("INFO", "dataservice.engine")

    def every(message: str) -> list[dict[str, object]]:
        told = [vars(r) for r in caplog.records if r.getMessage().startswith(message)]
        names = ("job", "attempt", "step", "rank")
        return [{n: each[n] for n in names if n in each} for each in told]

    coordinator = make_coordinator(MemoryStateStore(), PickyBooks(), make_setup())
    await coordinator.submit("job", "")
    sessions = await open_all(coordinator)
    shard = await shard_of(coordinator, sessions[1], 0)
    of_step_0 = {"job": "job", "attempt": 1, "step": 0}
    await until(lambda: of_step_0 in every("quarantined"))
    failed = shard.ticket.workers
    await shard_of(coordinator, sessions[1], 0, failed)
    for opened in sessions:
        coordinator.close_session(opened.session)
    await asyncio.gather(
        *(open_rank(coordinator, rank, world=3, cursor=Cursor()) for rank in range(3))
    )
    await coordinator.stop()

    assert every("attempt opened by 2 ranks")[0] == {"job": "job", "attempt": 1}
    assert every("planned 16 samples")[0] == of_step_0
    assert every("the rank cannot fetch")[0] == {**of_step_0, "rank": 1}
    assert every("fenced by attempt 2")[0] == {"job": "job", "attempt": 1}
    assert every("attempt opened by 3 ranks")[0] == {"job": "job", "attempt": 2}


def test_series_of_a_deleted_job_begin_anew_when_it_comes_back():
    metrics = PrometheusMetrics()
    metrics.step_committed("job")
    metrics.job_deleted("job")
    metrics.step_committed("job")
    metrics.step_committed("job")
    value = metrics.registry.get_sample_value("dataservice_committed_steps_total", {"job": "job"})
    assert value == 2
