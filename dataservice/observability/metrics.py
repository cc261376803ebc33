"""core.ports.Metrics as Prometheus series.

Labels are job, team, source, stage, phase, degree, worker and `over_replicas`: each has few values,
and none grows with steps, ranks or samples. So what differs by rank is a histogram over ranks, or
its least, mean and most; the number of the rank that waits longest is a value, not a label. The
series of a deleted job and of a lost worker are dropped.
"""

import threading
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, cast

import numpy as np
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from dataservice.core.orders import SourceWork
from dataservice.core.plan import StepPlan
from dataservice.core.receipts import PackReceipts
from dataservice.core.team import team_of

NAMESPACE = "dataservice"
DRIFT_WEIGHT = 0.1  # of the newest step in the moving average of measured over predicted

WAIT_BUCKETS_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
STEP_BUCKETS_S = (0.01, 0.03, 0.1, 0.3, 1.0, 2.0, 3.0, 5.0, 10.0, 30.0, 100.0)
# The phase of each planning stage whose costs are seconds of a whole step.

Metric = TypeVar("Metric", Counter, Gauge, Histogram)


class PrometheusMetrics:
    """core.ports.Metrics over a registry of its own, so that services can share a process.

    Counters begin at zero with the service: a restarted coordinator does not count again what
    its ledger holds. `rate` and `increase` allow for that.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._of_jobs: list[Counter | Gauge | Histogram] = []
        self._made: dict[tuple[Any, tuple[str | int, ...]], Any] = {}
        self._making = threading.Lock()
        job = self._of_job
        self._planned_steps = job(Counter, "planned_steps", "Steps planned.")
        self._planned_samples = job(Counter, "planned_samples", "Samples of the steps planned.")
        self._committed_steps = job(Counter, "committed_steps", "Steps trained by every rank.")
        self._ready_steps = job(
            Gauge,
            "ready_steps",
            "Steps that are decoding or decoded, and that not every rank has received.",
        )
        self._plan_s = job(Histogram, "plan_seconds", "Time to draw and plan a step.")
        self._plan_gap = job(
            Gauge, "plan_gap_ratio", "Last plan's cost over its lower bound, minus 1.", "stage"
        )
        self._predicted_s = job(
            Gauge, "predicted_step_seconds", "Training time that the last plan predicts."
        )
        self._measured_s = job(
            Gauge,
            "measured_step_seconds",
            "Training time of the slowest rank, in the last step that was measured.",
        )
        self._predicted_replica_s = job(
            Gauge,
            "predicted_replica_seconds",
            "Backbone time that the last plan predicts for its replicas: least, mean, most.",
            "over_replicas",
        )
        self._measured_rank_s = job(
            Histogram,
            "measured_rank_seconds",
            "Training time of a step at a rank: one value for each rank and step.",
            buckets=STEP_BUCKETS_S,
        )
        self._pad = job(
            Gauge, "plan_pad_ratio", "Padding in the last plan's packs, as a share of their tokens."
        )
        self._dist = job(
            Gauge,
            "plan_dist_ratio",
            "Tokens of the last plan's heaviest replica above the mean, as a share of its own.",
        )
        self._predicted_phase_s = job(
            Gauge,
            "predicted_phase_seconds",
            "Time that the last plan predicts for a phase, on the mean of ranks.",
            "phase",
        )
        self._phase_s = job(
            Gauge,
            "measured_phase_seconds",
            "Time of a phase in the last step that was measured, on the mean of ranks.",
            "phase",
        )
        self._waited_s = job(
            Histogram,
            "exposed_wait_seconds",
            "Time a step that a rank's training waited for data: one value for each report.",
            buckets=WAIT_BUCKETS_S,
        )
        self._waiting_ranks = job(
            Gauge, "waiting_ranks", "Ranks whose training waits for data now."
        )
        self._stalled = job(
            Gauge,
            "stalled_jobs",
            "1 where `dataservice status` says that the job is stalled, or 0.",
        )
        self._worst_wait_s = job(
            Gauge,
            "worst_exposed_wait_seconds",
            "Time a step that the rank which waits longest waits for data, mean of its last 20.",
        )
        self._worst_rank = job(
            Gauge,
            "worst_exposed_wait_rank",
            "The rank that waits longest for data; -1 when none is connected.",
        )
        self._drift = job(
            Gauge,
            "measured_over_predicted_ratio",
            "Measured over predicted step time: a moving average of about 10 steps.",
        )
        self._phase_drift = job(
            Gauge,
            "measured_over_predicted_phase_ratio",
            "Measured over predicted time of a phase, on the mean of ranks: a moving average.",
            "phase",
        )
        self._drift_of: dict[tuple[str, str], float] = {}
        self._groups = job(Counter, "cp_groups", "CP groups of the steps planned.", "degree")
        self._packs = job(Counter, "decoded_packs", "Packs decoded by workers.")
        self._decode_s = job(
            Counter, "decode_seconds", "Time that workers' slots spent reading and decoding."
        )
        self._bytes = job(Counter, "prepared_bytes", "Size of the packs decoded by workers.")
        self._hedged = job(
            Counter,
            "hedged_packs",
            "Packs ordered from a second worker because the first was slow.",
        )
        self._found = job(
            Counter,
            "found_packs",
            "Packs that a worker held already when they were ordered, and so did not decode.",
        )
        self._placed = job(
            Counter,
            "placed_tokens",
            "Decode work of the packs ordered, in tokens: all; of samples thought to be kept where "
            "they go; of what goes to ranks on the worker's node, and in its zone.",
            "where",
        )
        self._otherwise = job(
            Counter,
            "differing_packs",
            "Packs and steps that were decoded again, to other bytes; each ends an attempt.",
        )
        self._read_samples = job(
            Counter, "read_samples", "Samples read by workers, masked ones included.", "source"
        )
        self._read_bytes = job(Counter, "read_bytes", "Stored size of the samples read.", "source")
        self._source_read_s = job(
            Counter, "source_read_seconds", "Time that slots spent reading.", "source"
        )
        self._source_decode_s = job(
            Counter, "source_decode_seconds", "Time that slots spent decoding.", "source"
        )
        self._source_cpu_s = job(
            Counter,
            "source_cpu_seconds",
            "Time that CPUs worked at reading and decoding.",
            "source",
        )
        self._quarantined = job(
            Counter, "quarantined_samples", "Samples decoded as masked.", "source"
        )
        self._budget_used = job(
            Gauge,
            "error_budget_used_ratio",
            "Bad samples in a source's window over those allowed; above 1 the job stops.",
            "source",
        )
        self._outstanding = Gauge(
            f"{NAMESPACE}_worker_outstanding_tokens",
            "Decoding ordered from a worker and not done; an encoder's tokens count four times.",
            ["worker"],
            registry=self.registry,
        )
        self._workers = Gauge(f"{NAMESPACE}_workers", "Workers that serve.", registry=self.registry)
        self._wanted_workers = Gauge(
            f"{NAMESPACE}_wanted_workers",
            "Workers that the config asks for; the excess over dataservice_workers is missing.",
            registry=self.registry,
        )
        self._slots = Gauge(
            f"{NAMESPACE}_worker_slots",
            "Samples that all workers together decode at once.",
            registry=self.registry,
        )
        self._team_decode_s = Counter(
            f"{NAMESPACE}_team_decode_seconds",
            "Time that slots spent for a team; without tokens there is one team, without a name.",
            ["team"],
            registry=self.registry,
        )
        self._team_weight = Gauge(
            f"{NAMESPACE}_team_weight",
            "A team's weight: over the sum of those that want slots it is the team's share.",
            ["team"],
            registry=self.registry,
        )
        self._lost_workers = Counter(
            f"{NAMESPACE}_lost_workers", "Workers lost and replaced.", registry=self.registry
        )

    def team_weights(self, weights: Mapping[str, float]) -> None:
        """Set the weights that the operator gave the teams."""
        for team, weight in weights.items():
            self._series(self._team_weight, team).set(weight)

    def wanted_workers(self, workers: int) -> None:
        """Set the number of workers that the operator asks for."""
        self._wanted_workers.set(workers)

    # ---- core.ports.Metrics -----------------------------------------------------------------

    def step_planned(self, job: str, plan: StepPlan, *, plan_s: float) -> None:
        """Count the step, and set what its plan predicts. O(samples + packs)."""
        self._series(self._committed_steps, job)  # 0, not missing, until the first commit
        self._series(self._planned_steps, job).inc()
        self._series(self._planned_samples, job).inc(len(plan.sample_ids))
        self._series(self._plan_s, job).observe(plan_s)
        self._series(self._predicted_s, job).set(plan.predicted_s)
        for report in plan.stages:
            self._series(self._plan_gap, job, report.stage).set(report.gap)
        for phase, seconds in ({} if plan.time is None else plan.time.phase_s).items():
            self._series(self._predicted_phase_s, job, phase).set(seconds)
        for name, seconds in _replica_seconds(plan).items():
            self._series(self._predicted_replica_s, job, name).set(seconds)
        self._series(self._pad, job).set(_pad_ratio(plan))
        self._series(self._dist, job).set(_dist_ratio(plan))
        for degree, groups in enumerate(np.bincount(plan.pack_degree).tolist()):
            if groups:
                self._series(self._groups, job, degree).inc(groups)

    def ready_steps(self, job: str, steps: int) -> None:
        """Set the size of the ready window."""
        self._series(self._ready_steps, job).set(steps)

    def step_committed(self, job: str) -> None:
        """Count the step."""
        self._series(self._committed_steps, job).inc()

    def step_measured(self, job: str, *, predicted_s: float, measured_s: float) -> None:
        """Set the time, and move the average of the ratio, which the first step sets."""
        self._series(self._measured_s, job).set(measured_s)
        if predicted_s <= 0:
            return
        self._series(self._drift, job).set(self._drifted(job, "", measured_s / predicted_s))

    def step_phases(
        self, job: str, *, predicted_s: Mapping[str, float], measured_s: Mapping[str, float]
    ) -> None:
        """Set the times of the last step, and move the averages of those that were predicted. The
        caller bounds the phases: each is a series."""
        for phase, seconds in measured_s.items():
            self._series(self._phase_s, job, phase).set(seconds)
            if predicted_s.get(phase, 0.0) > 0:
                drift = self._drifted(job, phase, seconds / predicted_s[phase])
                self._series(self._phase_drift, job, phase).set(drift)

    def _drifted(self, job: str, phase: str, ratio: float) -> float:
        """The moving average of a phase, or of the step where none is named."""
        before = self._drift_of.get((job, phase), ratio)
        self._drift_of[job, phase] = before + DRIFT_WEIGHT * (ratio - before)
        return self._drift_of[job, phase]

    def ranks_measured(self, job: str, measured_s: Sequence[float]) -> None:
        """Observe each rank's time of one step."""
        observe = self._series(self._measured_rank_s, job).observe
        for seconds in measured_s:
            observe(seconds)

    def waited_most(self, job: str, rank: int, step_s: float) -> None:
        """Set the rank and its seconds."""
        self._series(self._worst_wait_s, job).set(step_s)
        self._series(self._worst_rank, job).set(rank)

    def data_waited(self, job: str, step_s: float) -> None:
        """Observe one rank's wait."""
        self._series(self._waited_s, job).observe(step_s)

    def waiting_ranks(self, job: str, ranks: int) -> None:
        """Set the number of ranks."""
        self._series(self._waiting_ranks, job).set(ranks)

    def job_looked_at(self, job: str, *, stalled: bool) -> None:
        """Set whether it is stalled."""
        self._series(self._stalled, job).set(stalled)

    def workers_serving(self, workers: int, *, slots: int) -> None:
        """Set the size of the fleet."""
        self._workers.set(workers)
        self._slots.set(slots)

    def packs_prepared(self, receipts: PackReceipts) -> None:
        """Count the packs. One that is decoded again, because its worker was lost, counts again."""
        job, decode_s = receipts.job, float(receipts.decode_s.sum())
        self._series(self._packs, job).inc(len(receipts))
        self._series(self._decode_s, job).inc(decode_s)
        self._series(self._bytes, job).inc(int(receipts.size_bytes.sum()))
        self._series(self._team_decode_s, team_of(job)).inc(decode_s)
        for work in receipts.sources:
            self._note_work(job, work)
        for bad in receipts.bad:
            self._series(self._quarantined, job, bad.source).inc()

    def _note_work(self, job: str, work: SourceWork) -> None:
        self._series(self._read_samples, job, work.source).inc(work.samples)
        self._series(self._read_bytes, job, work.source).inc(work.read_bytes)
        self._series(self._source_read_s, job, work.source).inc(work.read_s)
        self._series(self._source_decode_s, job, work.source).inc(work.decode_s)
        self._series(self._source_cpu_s, job, work.source).inc(work.read_cpu_s + work.decode_cpu_s)

    def pack_hedged(self, job: str) -> None:
        """Count the hedge."""
        self._series(self._hedged, job).inc()

    def pack_found(self, job: str) -> None:
        """Count the pack that need not be decoded."""
        self._series(self._found, job).inc()

    def packs_placed(
        self, job: str, *, work: float, cached: float, same_node: float, same_zone: float
    ) -> None:
        """Count the work."""
        for where, placed in (
            ("anywhere", work),
            ("cached", cached),
            ("same_node", same_node),
            ("same_zone", same_zone),
        ):
            self._series(self._placed, job, where).inc(placed)

    def delivered_otherwise(self, job: str) -> None:
        """Count the second version of a pack or step."""
        self._series(self._otherwise, job).inc()

    def error_budget_used(self, job: str, source: str, share: float) -> None:
        """Set the share of the budget that is used."""
        self._series(self._budget_used, job, source).set(share)

    def work_outstanding(self, worker: str, tokens: float) -> None:
        """Set the work queued at a worker."""
        self._series(self._outstanding, worker).set(tokens)

    def worker_lost(self, worker: str) -> None:
        """Count the loss; drop the worker's series."""
        self._lost_workers.inc()
        self.worker_retired(worker)

    def worker_retired(self, worker: str) -> None:
        """Drop the worker's series; nothing was lost."""
        with self._making:
            self._outstanding.remove(worker)
            self._made.clear()

    def job_deleted(self, job: str) -> None:
        """Drop the job's series."""
        self._drift_of = {of: drift for of, drift in self._drift_of.items() if of[0] != job}
        with self._making:
            for metric in self._of_jobs:
                metric.remove_by_labels({"job": job})
            self._made.clear()

    # ---- inside -----------------------------------------------------------------------------

    def _series(self, metric: Metric, *labels: str | int) -> Metric:
        """The series of a metric with these labels. Found by `labels` it would take several times
        as long, some fifty times a step."""
        made = self._made.get((metric, labels))
        if made is None:
            with self._making:  # else one that is removed meanwhile would be kept
                made = self._made[metric, labels] = metric.labels(*labels)
        return cast(Metric, made)

    def _of_job(
        self, kind: type[Metric], name: str, text: str, *labels: str, **more: Any
    ) -> Metric:
        metric = kind(f"{NAMESPACE}_{name}", text, ("job", *labels), registry=self.registry, **more)
        self._of_jobs.append(metric)
        return metric


def _replica_seconds(plan: StepPlan) -> dict[str, float]:
    """Predicted seconds of the replicas: least, mean and most. O(packs)."""
    share = np.repeat(plan.pack_seconds, plan.pack_degree)
    seconds = np.bincount(plan.pack_replicas, weights=share, minlength=plan.replicas)
    return {
        "least": float(seconds.min()),
        "mean": float(seconds.mean()),
        "most": float(seconds.max()),
    }


def _pad_ratio(plan: StepPlan) -> float:
    padded = int(plan.pack_tokens.sum())
    return 1.0 - int(plan.sample_tokens.sum()) / padded if padded else 0.0


def _dist_ratio(plan: StepPlan) -> float:
    """OmniBal eq. 2 over the tokens of each replica; a group's are spread over its members."""
    share = np.repeat(plan.pack_tokens / plan.pack_degree, plan.pack_degree)
    tokens = np.bincount(plan.pack_replicas, weights=share, minlength=plan.replicas)
    heaviest = float(tokens.max(initial=0.0))
    return 1.0 - float(tokens.mean()) / heaviest if heaviest else 0.0
