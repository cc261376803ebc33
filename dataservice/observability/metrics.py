"""core.ports.Metrics as Prometheus series, and the endpoint where they are scraped.

Labels are job, source, stage, degree and worker: few values each, and none that grows with
steps, ranks or samples. A deleted job and a lost worker take their series along.
"""

import threading
from dataclasses import dataclass
from typing import TypeVar
from wsgiref.simple_server import WSGIServer

import numpy as np
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server

from dataservice.core.errors import SpecError
from dataservice.core.orders import PackReceipt
from dataservice.core.plan import StepPlan

NAMESPACE = "dataservice"
DRIFT_WEIGHT = 0.1  # of the newest step in the moving average of measured over predicted

Metric = TypeVar("Metric", Counter, Gauge, Histogram)


class PrometheusMetrics:
    """core.ports.Metrics over a registry of its own, so that services can share a process.

    Counters begin at zero with the service: a restarted coordinator does not count again what
    its ledger holds. `rate` and `increase` expect that.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._of_jobs: list[Counter | Gauge | Histogram] = []
        job = self._of_job
        self._planned_steps = job(Counter, "planned_steps", "Steps planned.")
        self._planned_samples = job(Counter, "planned_samples", "Samples of the steps planned.")
        self._committed_steps = job(Counter, "committed_steps", "Steps trained by every rank.")
        self._ready_steps = job(
            Gauge, "ready_steps", "Steps decoding or decoded that not every rank has received."
        )
        self._plan_s = job(Histogram, "plan_seconds", "Time to draw and plan a step.")
        self._plan_gap = job(
            Gauge, "plan_gap_ratio", "Last plan's cost over its lower bound, minus 1.", "stage"
        )
        self._predicted_s = job(
            Gauge, "predicted_step_seconds", "Training time that the last plan predicts."
        )
        self._drift = job(
            Gauge,
            "measured_over_predicted_ratio",
            "Measured over predicted step time, a moving average over about 10 steps.",
        )
        self._drift_of: dict[str, float] = {}
        self._groups = job(Counter, "cp_groups", "CP groups of the steps planned.", "degree")
        self._packs = job(Counter, "decoded_packs", "Packs decoded by workers.")
        self._decode_s = job(
            Counter, "decode_seconds", "Time of workers' threads spent reading and decoding."
        )
        self._bytes = job(Counter, "prepared_bytes", "Size of the packs decoded by workers.")
        self._quarantined = job(
            Counter, "quarantined_samples", "Samples decoded as masked.", "source"
        )
        self._outstanding = Gauge(
            f"{NAMESPACE}_worker_outstanding_tokens",
            "Decoding ordered from a worker and not done; encoder tokens weigh 4.",
            ["worker"],
            registry=self.registry,
        )
        self._lost_workers = Counter(
            f"{NAMESPACE}_lost_workers", "Workers lost and replaced.", registry=self.registry
        )

    # ---- core.ports.Metrics -----------------------------------------------------------------

    def step_planned(self, job: str, plan: StepPlan, *, plan_s: float) -> None:
        """A step was planned. O(samples + packs)."""
        self._committed_steps.labels(job)  # 0, not missing, until the first commit
        self._planned_steps.labels(job).inc()
        self._planned_samples.labels(job).inc(len(plan.sample_ids))
        self._plan_s.labels(job).observe(plan_s)
        self._predicted_s.labels(job).set(plan.predicted_s)
        for report in plan.stages:
            self._plan_gap.labels(job, report.stage).set(report.gap)
        for degree, groups in enumerate(np.bincount(plan.pack_degree).tolist()):
            if groups:
                self._groups.labels(job, degree).inc(groups)

    def ready_steps(self, job: str, steps: int) -> None:
        """The size of the ready window now."""
        self._ready_steps.labels(job).set(steps)

    def step_committed(self, job: str) -> None:
        """One more step is trained."""
        self._committed_steps.labels(job).inc()

    def step_measured(self, job: str, *, predicted_s: float, measured_s: float) -> None:
        """Move the average; the first step sets it."""
        if predicted_s <= 0:
            return
        ratio = measured_s / predicted_s
        before = self._drift_of.get(job, ratio)
        self._drift_of[job] = before + DRIFT_WEIGHT * (ratio - before)
        self._drift.labels(job).set(self._drift_of[job])

    def pack_prepared(self, receipt: PackReceipt) -> None:
        """A pack is decoded. One decoded again, for its worker was lost, counts again."""
        job = receipt.key.job
        self._packs.labels(job).inc()
        self._decode_s.labels(job).inc(receipt.decode_s)
        self._bytes.labels(job).inc(receipt.size_bytes)
        for bad in receipt.bad_samples:
            self._quarantined.labels(job, bad.source).inc()

    def work_outstanding(self, worker: str, tokens: float) -> None:
        """The line of a worker now."""
        self._outstanding.labels(worker).set(tokens)

    def worker_lost(self, worker: str) -> None:
        """Count the loss; drop the worker's series."""
        self._lost_workers.inc()
        self._outstanding.remove(worker)

    def job_deleted(self, job: str) -> None:
        """Drop the job's series."""
        self._drift_of.pop(job, None)
        for metric in self._of_jobs:
            metric.remove_by_labels({"job": job})

    # ---- inside -----------------------------------------------------------------------------

    def _of_job(self, kind: type[Metric], name: str, text: str, *labels: str) -> Metric:
        metric = kind(f"{NAMESPACE}_{name}", text, ("job", *labels), registry=self.registry)
        self._of_jobs.append(metric)
        return metric


@dataclass(frozen=True, kw_only=True, slots=True)
class MetricsEndpoint:
    """The HTTP server that a Prometheus scrapes, in a thread of its own."""

    address: str
    server: WSGIServer
    thread: threading.Thread

    def stop(self) -> None:
        """Close the port; takes up to half a second."""
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


def serve_metrics(metrics: PrometheusMetrics, listen: str) -> MetricsEndpoint:
    """Serve /metrics at `listen` (host:port; port 0 picks a free one). Raises SpecError when
    that cannot be listened on."""
    host, _, port = listen.rpartition(":")
    try:
        server, thread = start_http_server(
            int(port), host.strip("[]") or "0.0.0.0", registry=metrics.registry
        )
    except OSError as error:
        raise SpecError(
            f"cannot serve metrics at {listen}: {error.strerror}. Stop what uses the port, or "
            "choose another; port 0 picks a free one."
        ) from error
    return MetricsEndpoint(address=f"{host}:{server.server_port}", server=server, thread=thread)
