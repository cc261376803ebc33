"""Spans of a step meet in one trace, sent to a collector over HTTP, with nothing passed along."""

import sys
import time
from collections.abc import Iterator

import pytest
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor

from dataservice.core.cursor import Cursor
from dataservice.core.errors import SpecError
from dataservice.engine.planner import plan_step
from dataservice.observability.traces import TracedMetrics, open_traces
from tests.engine.support import make_setup
from tests.observability.collector import Collector, collecting
from trainer_client.traces import note


@pytest.fixture
def collector(monkeypatch) -> Iterator[Collector]:
    # It shares a process with those that send: on a busy machine they may all be slow.
    monkeypatch.setattr("dataservice.observability.traces.CLOSE_S", 30.0)
    with collecting() as server:
        yield server


def plan_of(step: int):
    setup = make_setup()
    return plan_step(setup, Cursor(step=step, position=0), setup.topology(2)).plan


def provider_of_a_trainer(collector: Collector) -> TracerProvider:
    """What a trainer's own code sets up of OpenTelemetry."""
    provider = TracerProvider(resource=Resource.create({"service.instance.id": "trainer"}))
    exporter = OTLPSpanExporter(f"{collector.endpoint}/v1/traces")
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return provider


def test_plan_packs_and_ranks_of_a_step_are_one_trace_of_the_plan_s_digest(collector, monkeypatch):
    coordinator, worker = (
        open_traces(collector.endpoint, ratio=1.0, process=name)
        for name in ("coordinator", "worker-0.1")
    )
    trainer = provider_of_a_trainer(collector)
    plan = plan_of(0)
    before_s = time.time()
    TracedMetrics(coordinator).step_planned("job", plan, plan_s=0.5)
    recording_s = time.time() - before_s
    worker.part("prepare pack", plan.digest, began_s=time.time() - 0.25, job="job", pack=3)
    monkeypatch.setattr(trace, "get_tracer", trainer.get_tracer)
    note("receive", plan.digest, began_s=time.time() - 0.125, job="job", step=0, rank=1)
    for each in (coordinator, worker):
        each.close()
    trainer.shutdown()
    spans = {span.name: (process, span) for process, span in collector.spans}
    assert {name: process for name, (process, _) in spans.items()} == {
        "plan": "coordinator",
        "prepare pack": "worker-0.1",
        "receive": "trainer",
    }
    assert {span.trace_id.hex() for _, span in spans.values()} == {plan.digest}
    root = spans["plan"][1]
    assert root.parent_span_id == b""
    shown_s = (root.end_time_unix_nano - root.start_time_unix_nano) / 1e9
    assert 0.49 < shown_s < 0.51 + recording_s
    for name in ("prepare pack", "receive"):
        assert spans[name][1].parent_span_id == root.span_id


def test_every_process_tells_of_the_same_part_of_the_steps(collector):
    tracers = [open_traces(collector.endpoint, ratio=0.5, process=name) for name in "ab"]
    digests = [
        f"{step * 0x9E3779B97F4A7C15F39CC0605CEDC834 % 2**128:032x}" for step in range(1, 65)
    ]
    for digest in digests:
        tracers[0].plan(digest, began_s=time.time())
        tracers[1].part("prepare pack", digest, began_s=time.time())
    for each in tracers:
        each.close()
    told = {
        process: {span.trace_id.hex() for name, span in collector.spans if name == process}
        for process in "ab"
    }
    assert told["a"] == told["b"]
    assert 10 < len(told["a"]) < 54


def test_a_collector_that_is_away_holds_nobody_up():
    tracer = open_traces("http://127.0.0.1:9", ratio=1.0, process="worker")
    tracer.plan("ab" * 16, began_s=time.time())
    tracer.close()


def test_without_opentelemetry_the_config_is_refused_with_the_remedy(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(SpecError, match=r"OpenTelemetry is not installed.*\[service,traces\]"):
        open_traces("http://otel:4318", ratio=1.0, process="worker")


def test_a_trainer_without_opentelemetry_only_logs(monkeypatch, caplog):
    monkeypatch.delitem(sys.modules, "opentelemetry.trace")
    caplog.set_level("DEBUG", "trainer_client")
    note("receive", "ab" * 16, began_s=time.time(), job="job", step=7, rank=2)
    (record,) = caplog.records
    about = {name: vars(record)[name] for name in ("job", "step", "rank", "trace_id")}
    assert about == {"job": "job", "step": 7, "rank": 2, "trace_id": "ab" * 16}
