"""One suite for every Metrics: watching is safe, and changes nothing."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from dataservice.core.cursor import Cursor
from dataservice.core.orders import PackKey, PackReceipt
from dataservice.core.ports import Metrics, NoMetrics
from dataservice.core.receipts import PackReceipts
from dataservice.engine.planner import plan_step
from dataservice.observability.metrics import PrometheusMetrics
from dataservice.state.memory import MemoryStateStore
from tests.engine.sessions import open_all, train
from tests.engine.support import Books, all_plans, make_coordinator, make_setup


@pytest.fixture(params=[NoMetrics, PrometheusMetrics])
def metrics(request: pytest.FixtureRequest) -> Metrics:
    return request.param()


async def digests(metrics: Metrics | None) -> list[str]:
    coordinator = make_coordinator(MemoryStateStore(), Books(), make_setup(), metrics=metrics)
    await coordinator.submit("job", "")
    shards = await train(coordinator, await open_all(coordinator), 0, 100)
    await coordinator.stop()
    return [shard.plan_digest for shard in shards]


async def test_a_job_is_planned_alike_whoever_watches(metrics):
    assert await digests(metrics) == await digests(None)


async def test_a_job_is_trained_though_whoever_watches_it_fails(caplog):
    def fail(*_, **__):
        raise ZeroDivisionError

    events = [name for name in vars(NoMetrics) if not name.startswith("_")]
    failing = type("Failing", (NoMetrics,), dict.fromkeys(events, fail))()
    assert await digests(failing) == await digests(None)
    assert "the event step_planned could not be shown" in caplog.text


def test_a_step_that_its_window_leaves_empty_is_an_event_too(metrics):
    plans = all_plans(make_setup(samples=9, batch=2, window_steps=4), 2)
    assert 0 in {len(plan.sample_ids) for plan in plans}
    for plan in plans:
        metrics.step_planned("job", plan, plan_s=0.1)


def test_events_are_taken_in_any_order_from_any_thread_and_twice(metrics):
    setup = make_setup()
    planned = plan_step(setup, Cursor(), setup.topology(2))
    receipt = PackReceipt(
        key=PackKey(job="job", step=0, plan_digest="d", pack=0), size_bytes=7, decode_s=0.5
    )
    events = [
        lambda: metrics.worker_lost("w0"),
        lambda: metrics.job_deleted("job"),
        lambda: metrics.step_committed("job"),
        lambda: metrics.step_measured("job", predicted_s=0.0, measured_s=1.0),
        lambda: metrics.step_measured("job", predicted_s=2.0, measured_s=1.0),
        lambda: metrics.packs_prepared(PackReceipts.of([receipt])),
        lambda: metrics.ready_steps("job", 0),
        lambda: metrics.work_outstanding("w0", 0.0),
        lambda: metrics.step_planned("job", planned.plan, plan_s=0.1),
    ]
    with ThreadPoolExecutor(4) as threads:
        for done in [threads.submit(event) for event in events + events]:
            assert done.result() is None
