"""core.ports.Metrics as Prometheus series, and the endpoint that serves them.

Labels are job, source, stage, degree and worker: few values each, and none that grows with
steps, ranks or samples. What is deleted or lost takes its series along.
"""

import threading
from dataclasses import dataclass
from wsgiref.simple_server import WSGIServer

import numpy as np
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server

from dataservice.core.errors import SpecError
from dataservice.core.orders import PackReceipt
from dataservice.core.plan import StepPlan

# Planning is meant to take less than a step takes to train: milliseconds to tens of seconds.
PLAN_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class PrometheusMetrics:
    """core.ports.Metrics over a registry of its own, so that two services may share a process.

    Counters begin at zero with the service; a restarted coordinator does not count again what
    its ledger holds.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._planned_steps = self._counter("planned_steps", "Steps planned.")
        self._planned_samples = self._counter("planned_samples", "Samples of the planned steps.")
        self._committed_steps = self._counter(
            "committed_steps", "Steps that every rank has trained."
        )
        self._ready_steps = self._gauge(
            "ready_steps", "Steps planned, decoding or decoded, that not every rank has received."
        )
        self._plan_s = Histogram(
            "plan_seconds",
            "Time to draw and plan one step.",
            ["job"],
            namespace="dataservice",
            registry=self.registry,
            buckets=PLAN_BUCKETS_S,
        )
        self._plan_gap = self._gauge(
            "plan_gap_ratio",
            "Cost over its lower bound, minus 1, of the step planned last, by planning stage.",
            "stage",
        )
        self._predicted_s = self._gauge(
            "predicted_step_seconds", "Predicted training time of the step planned last."
        )
        self._cp_groups = self._counter(
            "cp_groups", "Context-parallel groups of the planned steps, by degree.", "degree"
        )
        self._decoded_packs = self._counter("decoded_packs", "Packs that workers have decoded.")
        self._decode_s = self._counter(
            "decode_seconds", "Time that workers' threads spent on reading and decoding."
        )
        self._prepared_bytes = self._counter(
            "prepared_bytes", "Bytes of the packs that workers have decoded."
        )
        self._quarantined = self._counter(
            "quarantined_samples", "Samples that were decoded as masked, by source.", "source"
        )
        self._outstanding = Gauge(
            "worker_outstanding_tokens",
            "Decoding ordered from the worker and not done; a token of an encoder counts as 4.",
            ["worker"],
            namespace="dataservice",
            registry=self.registry,
        )
        self._lost_workers = Counter(
            "lost_workers",
            "Workers that were lost and replaced.",
            namespace="dataservice",
            registry=self.registry,
        )

    # ---- core.ports.Metrics ----------------------------------------------------------------

    def step_planned(self, job: str, plan: StepPlan, *, plan_s: float) -> None:
        """A step was planned. O(packs + samples)."""
        # Made here so that the rate of commits is 0, not missing, until the first one.
        self._committed_steps.labels(job)
        self._planned_steps.labels(job).inc()
        self._planned_samples.labels(job).inc(len(plan.sample_ids))
        self._plan_s.labels(job).observe(plan_s)
        self._predicted_s.labels(job).set(plan.predicted_s)
        for stage in plan.stages:
            self._plan_gap.labels(job, stage.stage).set(stage.gap)
        degrees, groups = np.unique(plan.pack_degree, return_counts=True)
        for degree, count in zip(degrees.tolist(), groups.tolist(), strict=True):
            self._cp_groups.labels(job, degree).inc(count)

    def ready_steps(self, job: str, steps: int) -> None:
        """The size of the ready window now."""
        self._ready_steps.labels(job).set(steps)

    def step_committed(self, job: str) -> None:
        """One more step is trained."""
        self._committed_steps.labels(job).inc()

    def pack_prepared(self, receipt: PackReceipt) -> None:
        """A pack is decoded. One decoded again, because its worker was lost, counts again."""
        job = receipt.key.job
        self._decoded_packs.labels(job).inc()
        self._decode_s.labels(job).inc(receipt.decode_s)
        self._prepared_bytes.labels(job).inc(receipt.size_bytes)
        for bad in receipt.bad_samples:
            self._quarantined.labels(job, bad.source).inc()

    def work_outstanding(self, worker: str, tokens: float) -> None:
        """The line of a worker now."""
        self._outstanding.labels(worker).set(tokens)

    def worker_lost(self, worker: str) -> None:
        """Count the loss and drop the worker's series."""
        self._lost_workers.inc()
        self._outstanding.remove(worker)

    def job_deleted(self, job: str) -> None:
        """Drop every series of the job."""
        for metric in self._of_jobs:
            metric.remove_by_labels({"job": job})

    # ---- inside ----------------------------------------------------------------------------

    @property
    def _of_jobs(self) -> tuple[Counter | Gauge | Histogram, ...]:
        kept = (each for each in vars(self).values() if isinstance(each, Counter | Gauge | Histogram))
        return tuple(each for each in kept if each not in (self._outstanding, self._lost_workers))
