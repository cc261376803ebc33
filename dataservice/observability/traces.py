"""Spans of a step, for an OpenTelemetry collector: from its plan to its packs, and on to ranks.

    coordinator            worker               trainer_client/traces.py
    plan ──► trace id ──► prepare pack ──► receive ──► train

A step's trace id is its plan's digest: 16 bytes that coordinator, workers and ranks hold anyway,
so that nothing has to be passed on for their spans to meet, and log lines bear the same id. The
same plan has the same trace in whichever attempt it is trained; spans name the attempt.

Contract. A span is recorded when it is over; recording neither waits nor raises. A collector that
does not answer loses its spans, and nothing else. `close` sends what is left, for CLOSE_S at most.
"""

import time
from contextvars import ContextVar
from typing import TYPE_CHECKING

from dataservice.core.distribution import installing
from dataservice.core.errors import SpecError
from dataservice.core.plan import StepPlan
from dataservice.observability.metrics import PrometheusMetrics

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

CLOSE_S = 2.0
SEND_EVERY_MS = 1000.0  # spans of this time are lost with a worker that is killed
PARENT_DIGITS = 16  # the digits of a plan's digest that are the id of its span


class StepTracer:
    """Records spans of steps. Made by `open_traces`."""

    def __init__(self, provider: "TracerProvider") -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("dataservice")

    def plan(self, plan_digest: str, *, began_s: float, **about: str | int | float) -> None:
        """The root span of a step; it is over now. `began_s` is by `time.time`."""
        from opentelemetry.context import Context

        token = _planned.set(plan_digest)
        try:
            span = self._tracer.start_span(
                "plan", Context(), attributes=about, start_time=round(began_s * 1e9)
            )
            span.end()
        finally:
            _planned.reset(token)

    def part(
        self, name: str, plan_digest: str, *, began_s: float, **about: str | int | float
    ) -> None:
        """The span of something that was done for the step; it is over now."""
        from opentelemetry import trace

        parent = trace.SpanContext(
            trace_id=int(plan_digest, 16),
            span_id=int(plan_digest[:PARENT_DIGITS], 16),
            is_remote=True,
            trace_flags=trace.TraceFlags(trace.TraceFlags.SAMPLED),
        )
        context = trace.set_span_in_context(trace.NonRecordingSpan(parent))
        span = self._tracer.start_span(
            name, context, attributes=about, start_time=round(began_s * 1e9)
        )
        span.end()

    def close(self) -> None:
        """Send what is left."""
        self._provider.force_flush(round(CLOSE_S * 1000))
        self._provider.shutdown()


class TracedMetrics(PrometheusMetrics):
    """The coordinator's series, and a span for each plan."""

    def __init__(self, tracer: StepTracer) -> None:
        super().__init__()
        self._tracer = tracer

    def step_planned(self, job: str, plan: StepPlan, *, plan_s: float) -> None:
        """Count the step, and record its span."""
        super().step_planned(job, plan, plan_s=plan_s)
        self._tracer.plan(
            plan.digest,
            began_s=time.time() - plan_s,
            job=job,
            step=plan.step,
            samples=len(plan.sample_ids),
            packs=plan.packs,
            predicted_s=plan.predicted_s,
        )


_planned: ContextVar[str] = ContextVar("_planned")


def open_traces(endpoint: str, *, ratio: float, process: str) -> StepTracer:
    """Sends spans to the collector at `endpoint` (OTLP over HTTP, such as http://otel:4318), of the
    fraction `ratio` of all steps, which is the same steps in every process. Raises SpecError where
    OpenTelemetry is not installed."""
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
        from opentelemetry.sdk.trace.sampling import TraceIdRatioBased
    except ImportError as error:
        raise SpecError(
            f"traces is {endpoint!r}, and OpenTelemetry is not installed: {error}. Install "
            f"it by {installing('traces')}; or leave `traces` out."
        ) from error

    class DigestIds(RandomIdGenerator):
        """Gives a plan's span the ids that the other spans derive from the plan's digest."""

        def generate_trace_id(self) -> int:
            return int(_planned.get(), 16)

        def generate_span_id(self) -> int:
            digest = _planned.get(None)
            return int(digest[:PARENT_DIGITS], 16) if digest else super().generate_span_id()

    provider = TracerProvider(
        sampler=TraceIdRatioBased(ratio),
        id_generator=DigestIds(),
        resource=Resource.create({"service.name": "dataservice", "service.instance.id": process}),
        shutdown_on_exit=False,
    )
    exporter = OTLPSpanExporter(f"{endpoint.rstrip('/')}/v1/traces", timeout=CLOSE_S)
    provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=SEND_EVERY_MS))
    return StepTracer(provider)
