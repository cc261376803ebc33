"""Spans and log records of a step, under the trace id that the service uses for it too.

A step's trace id is its plan's digest, 16 bytes in hex. Log records have level DEBUG and the logger
`trainer_client`. Spans go to the OpenTelemetry provider that the trainer's own code has set up;
without one nothing is loaded or sent.
"""

import logging
import sys
import time

log = logging.getLogger("trainer_client")

PARENT_DIGITS = 16  # digits of the digest that are the id of the plan's span, the root of all


def note(what: str, digest: str, *, began_s: float, **about: str | int) -> None:
    """Record that a step was received or trained; it began at `began_s`, by `time.time`."""
    log.debug("%s in %.3g s", what, time.time() - began_s, extra={**about, "trace_id": digest})
    otel = sys.modules.get("opentelemetry.trace")
    if otel is None or len(digest) != 2 * PARENT_DIGITS:
        return
    parent = otel.SpanContext(
        trace_id=int(digest, 16),
        span_id=int(digest[:PARENT_DIGITS], 16),
        is_remote=True,
        trace_flags=otel.TraceFlags(otel.TraceFlags.SAMPLED),
    )
    context = otel.set_span_in_context(otel.NonRecordingSpan(parent))
    tracer = otel.get_tracer("trainer_client")
    tracer.start_span(what, context, attributes=about, start_time=round(began_s * 1e9)).end()
