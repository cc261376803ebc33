"""What the last steps of each job took, and how long its ranks waited for data.

JobStatistics is one of the listeners to the engine's events, and hears the ranks' reports. It keeps
windows of bounded length in this process, and begins anew with it. Called from any thread.
"""

import math
import statistics
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from dataservice.core.health import RankReport, SourceHealth
from dataservice.core.orders import SourceWork
from dataservice.core.plan import StepPlan
from dataservice.core.ports import Metrics, NoMetrics
from dataservice.core.receipts import PackReceipts

WINDOW_STEPS = 20
# Weight of the newest step in a source's usual cost, which is a plain mean over the first steps.
USUAL_WEIGHT = 0.01
# Packs over which the wait for room in workers' memory is averaged.
ROOM_PACKS = 64
# Seconds of decoding from which the busy slots are counted.
BUSY_S = 15.0
# Seconds between two searches for the rank that waits most, which look at every rank.
WORST_EVERY_S = 2.0


@dataclass(kw_only=True, slots=True)
class _Work:
    """Samples of a source in one step, and the seconds that reading and decoding them took."""

    samples: int = 0
    read_s: float = 0.0
    decode_s: float = 0.0
    read_cpu_s: float = 0.0
    decode_cpu_s: float = 0.0

    def add(self, work: "SourceWork | _Work") -> None:
        self.samples += work.samples
        self.read_s += work.read_s
        self.decode_s += work.decode_s
        self.read_cpu_s += work.read_cpu_s
        self.decode_cpu_s += work.decode_cpu_s


@dataclass(kw_only=True, slots=True)
class _Usual:
    """Seconds that a sample of a source usually takes to read and decode: a moving average."""

    seconds: float = 0.0
    steps: int = 0

    def learn(self, work: _Work) -> None:
        self.steps += 1
        seconds = (work.read_s + work.decode_s) / work.samples
        self.seconds += max(USUAL_WEIGHT, 1 / self.steps) * (seconds - self.seconds)


@dataclass(kw_only=True, slots=True)
class _Rank:
    """A rank's reports. `told` is (steps begun, seconds waited in all) each time that a step
    began, the newest last; `waiting_s` how long it has waited now; `heard_s` when it reported
    last, and `gone_s` when its client left, if it did."""

    told: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=WINDOW_STEPS))
    waiting_s: float = 0.0
    heard_s: float = 0.0
    gone_s: float | None = None

    def wait_s(self) -> float:
        """Seconds that it waited for data, mean over its last steps; a wait that is not over
        counts too."""
        if not self.told:
            return 0.0
        *before, (last, waited_s) = self.told
        # More quick steps may lie between two reports than the window has.
        since = [each for each in before if each[0] >= last - WINDOW_STEPS] or before[-1:]
        first, before_s = since[0] if since else (last, waited_s)
        steps = last - first + (self.waiting_s > 0)
        return (waited_s - before_s + self.waiting_s) / max(1, steps)

    def quiet_s(self, now_s: float) -> float:
        """Seconds since its last report, until now or until its client left."""
        return (now_s if self.gone_s is None else self.gone_s) - self.heard_s


@dataclass(kw_only=True, slots=True)
class _Ranks:
    """Those that have reported, and which of them are `here`, and wait now: thousands report, and
    leave, one by one."""

    known: dict[int, _Rank] = field(default_factory=lambda: defaultdict(_Rank))
    here: set[int] = field(default_factory=set)
    waiting: set[int] = field(default_factory=set)

    def heard(self, rank: int, now_s: float, *, waiting_s: float) -> _Rank:
        """A rank reports."""
        own = self.known[rank]
        own.heard_s, own.gone_s, own.waiting_s = now_s, None, waiting_s
        self.here.add(rank)
        if waiting_s > 0:
            self.waiting.add(rank)
        else:
            self.waiting.discard(rank)
        return own

    def left(self, rank: int, now_s: float) -> None:
        """A rank's client is gone."""
        if rank in self.known:
            self.known[rank].gone_s, self.known[rank].waiting_s = now_s, 0.0
        self.here.discard(rank)
        self.waiting.discard(rank)


@dataclass(kw_only=True, slots=True)
class _Job:
    plan_s: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW_STEPS))
    samples: deque[int] = field(default_factory=lambda: deque(maxlen=WINDOW_STEPS))
    plan_gap: float = 0.0
    commits_s: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW_STEPS + 1))
    measured_s: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW_STEPS))
    work: dict[int, dict[str, _Work]] = field(default_factory=dict)
    usual: dict[str, _Usual] = field(default_factory=lambda: defaultdict(_Usual))
    quarantined: Counter[str] = field(default_factory=Counter)
    budget_used: dict[str, float] = field(default_factory=dict)
    ranks: _Ranks = field(default_factory=_Ranks)
    room_s: deque[float] = field(default_factory=lambda: deque(maxlen=ROOM_PACKS))
    worst_due_s: float = 0.0

    def add_work(self, step: int, sources: Sequence[SourceWork]) -> None:
        known = self.work.setdefault(step, {})
        for work in sources:
            known.setdefault(work.source, _Work()).add(work)
        while len(self.work) > WINDOW_STEPS:
            for source, done in self.work.pop(min(self.work)).items():
                self.usual[source].learn(done)


@dataclass(frozen=True, kw_only=True, slots=True)
class RecentSteps:
    """A job's last steps as numbers; see core.health.JobHealth. `interval_s` is the time from one
    commit to the next, `measured_s` the training time of a step as ranks measure it; 0 when
    unknown. `wait_s`, `quiet_s` and `begun_steps` are by rank."""

    steps: int = 0
    interval_s: float = 0.0
    measured_s: float = 0.0
    plan_s: float = 0.0
    plan_gap: float = 0.0
    steps_per_s: float = 0.0
    samples_per_s: float = 0.0
    sources: tuple[SourceHealth, ...] = ()
    wait_s: Mapping[int, float] = field(default_factory=dict)
    quiet_s: Mapping[int, float] = field(default_factory=dict)
    begun_steps: Mapping[int, int] = field(default_factory=dict)
    room_s: float = 0.0


class JobStatistics(NoMetrics):
    """A listener that remembers the last steps; of the other events it takes none."""

    def __init__(self, shown: Metrics, clock: Callable[[], float] = time.monotonic) -> None:
        """`shown` is told what ranks wait, which only their reports together say."""
        self._shown = shown
        self._clock = clock
        self._lock = threading.Lock()
        self._jobs: dict[str, _Job] = defaultdict(_Job)
        self._decoded: deque[tuple[float, float]] = deque()
        self._began_s = math.inf

    # ---- what is asked ----------------------------------------------------------------------

    def attempt_begun(self, job: str) -> None:
        """Forget the ranks and steps of the attempt before; what a sample usually takes stays."""
        with self._lock:
            known = self._jobs[job]
            known.ranks = _Ranks()
            known.commits_s.clear()
            known.measured_s.clear()
            known.budget_used.clear()
            known.work.clear()
            known.room_s.clear()
        self._shown.waiting_ranks(job, 0)

    def reported(self, job: str, rank: int, report: RankReport) -> None:
        """Take a rank's report of the steps that it has begun and of its waits. O(1), but for the
        search each WORST_EVERY_S."""
        with self._lock:
            known = self._jobs[job].ranks
            own = known.heard(rank, self._clock(), waiting_s=report.waiting_s)
            if own.told and own.told[-1][0] > report.steps:
                own.told.clear()  # the rank began anew
            before = own.told[-1] if own.told else None
            new = report.steps - before[0] if before is not None else report.steps
            if new > 0:
                own.told.append((report.steps, report.waited_s))
            waiting, worst = len(known.waiting), self._worst(job)
        if worst is not None:
            self._shown.waited_most(job, *worst)
        if before is not None and new > 0:
            self._shown.data_waited(job, (report.waited_s - before[1]) / new)
        self._shown.waiting_ranks(job, waiting)

    def _worst(self, job: str) -> tuple[int, float] | None:
        """The rank that waits most and its seconds a step; None until the next search is due.
        O(ranks)."""
        known, now_s = self._jobs[job], self._clock()
        if now_s < known.worst_due_s:
            return None
        known.worst_due_s = now_s + WORST_EVERY_S
        ranks = known.ranks.known.items()
        waits_s = {rank: own.wait_s() for rank, own in ranks if own.gone_s is None}
        rank = max(waits_s, key=waits_s.__getitem__)
        return rank, waits_s[rank]

    def rank_left(self, job: str, rank: int) -> None:
        """A rank's client has left, and no longer waits for anything. O(1)."""
        with self._lock:
            known = self._jobs[job].ranks
            known.left(rank, self._clock())
            waiting, deserted = len(known.waiting), not known.here
        self._shown.waiting_ranks(job, waiting)
        if deserted:
            self._shown.waited_most(job, -1, 0.0)

    def recent_steps(self, job: str) -> RecentSteps:
        """The job's last steps. O(window + ranks)."""
        with self._lock:
            known, now_s = self._jobs.get(job), self._clock()
            if known is None:
                return RecentSteps()
            steps_per_s, ranks = _rate(known.commits_s, now_s), known.ranks.known
            return RecentSteps(
                steps=max(0, len(known.commits_s) - 1),
                interval_s=_interval_s(known.commits_s),
                measured_s=statistics.median(known.measured_s) if known.measured_s else 0.0,
                plan_s=_mean(known.plan_s),
                plan_gap=known.plan_gap,
                steps_per_s=steps_per_s,
                samples_per_s=steps_per_s * _mean(known.samples),
                sources=_sources(known),
                wait_s={rank: own.wait_s() for rank, own in ranks.items()},
                quiet_s={rank: own.quiet_s(now_s) for rank, own in ranks.items()},
                begun_steps={rank: own.told[-1][0] for rank, own in ranks.items() if own.told},
                room_s=_mean(known.room_s),
            )

    def busy_slots(self) -> float:
        """Slots that were decoding, mean over the last BUSY_S seconds."""
        with self._lock:
            now_s = self._clock()
            while self._decoded and self._decoded[0][0] < now_s - BUSY_S:
                self._decoded.popleft()
            since_s = min(BUSY_S, max(1.0, now_s - self._began_s))
            return sum(seconds for _, seconds in self._decoded) / since_s

    # ---- core.ports.Metrics -----------------------------------------------------------------

    def step_planned(self, job: str, plan: StepPlan, *, plan_s: float) -> None:
        """Note the seconds, the samples, and the gap of the worst stage to its lower bound."""
        with self._lock:
            known = self._jobs[job]
            known.plan_s.append(plan_s)
            known.samples.append(len(plan.sample_ids))
            known.plan_gap = max((stage.gap for stage in plan.stages), default=0.0)

    def step_committed(self, job: str) -> None:
        """Note when the step was committed."""
        with self._lock:
            self._jobs[job].commits_s.append(self._clock())

    def step_measured(self, job: str, *, predicted_s: float, measured_s: float) -> None:
        """Note the training time of the slowest rank."""
        with self._lock:
            self._jobs[job].measured_s.append(measured_s)

    def packs_prepared(self, receipts: PackReceipts) -> None:
        """Note what their samples took, by source."""
        with self._lock:
            known, now_s = self._jobs[receipts.job], self._clock()
            known.add_work(receipts.step, receipts.sources)
            known.room_s.extend(receipts.room_s.tolist())
            known.quarantined.update(bad.source for bad in receipts.bad)
            self._began_s = min(self._began_s, now_s - float(receipts.decode_s.max()))
            self._decoded.append((now_s, float(receipts.decode_s.sum())))
            while self._decoded[0][0] < now_s - BUSY_S:
                self._decoded.popleft()

    def error_budget_used(self, job: str, source: str, share: float) -> None:
        """Note the share that is used now."""
        with self._lock:
            self._jobs[job].budget_used[source] = share

    def job_deleted(self, job: str) -> None:
        """Forget the job."""
        with self._lock:
            self._jobs.pop(job, None)


def _sources(job: _Job) -> tuple[SourceHealth, ...]:
    """What a step costs by source. Work is counted over the samples that it was for, so packs
    whose receipts are still to come do not lower it."""
    total: dict[str, _Work] = defaultdict(_Work)
    for step in job.work.values():
        for source, work in step.items():
            total[source].add(work)
    samples = sum(work.samples for work in total.values())
    steps = samples / _mean(job.samples) if job.samples else float(len(job.work))
    return tuple(
        SourceHealth(
            source=source,
            samples=work.samples / max(steps, 1e-9),
            read_s=work.read_s / max(steps, 1e-9),
            decode_s=work.decode_s / max(steps, 1e-9),
            read_cpu_s=work.read_cpu_s / max(steps, 1e-9),
            decode_cpu_s=work.decode_cpu_s / max(steps, 1e-9),
            usual_s=job.usual[source].seconds if source in job.usual else 0.0,
            quarantined=job.quarantined[source],
            budget_used=job.budget_used.get(source, 0.0),
        )
        for source, work in sorted(total.items())
    )


def _interval_s(times_s: deque[float]) -> float:
    return (times_s[-1] - times_s[0]) / (len(times_s) - 1) if len(times_s) > 1 else 0.0


def _rate(times_s: deque[float], now_s: float) -> float:
    """Events a second; it falls once the next event is overdue."""
    if len(times_s) < 2:
        return 0.0
    overdue = now_s - times_s[-1] > 2 * _interval_s(times_s)
    until_s = now_s if overdue else times_s[-1]
    return (len(times_s) - 1) / max(until_s - times_s[0], 1e-9)


def _mean(values: deque[float] | deque[int]) -> float:
    return sum(values) / len(values) if values else 0.0
