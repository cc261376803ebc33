"""One team of the soak: it trains one job after another, each to its end, and audits it."""

import contextlib
import itertools
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from dataservice.core.errors import NotFoundError, ServiceError
from dataservice.serving.client_access import Access
from dataservice.serving.coordinator_client import CoordinatorClient
from soak.audit import Dataset, audit
from soak.corpus import JobShape, write_job
from soak.training import Connection, Training

JOB_LIMIT_S = 300.0
RETRY_S = 0.5
RETRY_LIMIT_S = 90.0


@dataclass(frozen=True, kw_only=True, slots=True)
class TeamPlan:
    """A team's plan: jobs of one shape, whose launches cycle through these world sizes."""

    name: str
    shape: JobShape
    world_sizes: tuple[int, ...]
    steps_per_checkpoint: int


@dataclass(frozen=True, kw_only=True, slots=True)
class JobResult:
    """A job that was trained to its end. `findings` are the audit's."""

    job: str
    samples: int
    steps: int
    launches: int
    world_sizes: tuple[int, ...]
    seconds: float
    unasked: tuple[str, ...]
    findings: tuple[str, ...]


@dataclass
class Team:
    """A team at work in a separate thread, from `start` until `finish`."""

    plan: TeamPlan
    data: Path
    home: Path
    address: str
    gate: str
    token: str
    pace_s: float
    epochs: int
    results: list[JobResult] = field(default_factory=list)
    failure: str | None = None
    current: Training | None = None
    _dataset: Dataset | None = None
    _last: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin with the first job."""
        self._thread = threading.Thread(target=self._work, name=self.plan.name, daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Make the current job the last."""
        self._last.set()

    def join(self, limit_s: float) -> None:
        """Wait until the last job is audited."""
        assert self._thread is not None
        self._thread.join(limit_s)
        if self._thread.is_alive() and self.failure is None:
            self.failure = f"{self.plan.name} did not finish within {limit_s:.0f} s"
        self.abandon()

    def abandon(self) -> None:
        """Kill the remaining ranks."""
        if self.current is not None:
            self.current.stop()

    def progress(self) -> "Progress | None":
        """The current job's committed step; None while the service does not answer."""
        training = self.current
        if training is None or not training.launches:
            return None
        launch = training.launches[-1]
        try:
            with self._client(timeout_s=1.0) as client:
                status = client.job(training.job)
        except ServiceError:
            return None
        return Progress(
            job=training.job,
            attempt=status.attempt,
            step=status.committed_step,
            start_step=launch.start_step,
        )

    # ---- in the thread -------------------------------------------------------------------

    def _work(self) -> None:
        try:
            for number in itertools.count(1):
                if self._last.is_set() or self.failure is not None:
                    return
                self._train(f"{self.plan.name}-{number:03d}", number)
        except BaseException:
            self.failure = traceback.format_exc()

    def _train(self, job: str, seed: int) -> None:
        shape = replace(self.plan.shape, seed=seed, epochs=self.epochs)
        job_file = write_job(self.data, job, shape)
        self._ask(lambda client: client.submit(job_file.read_text(), str(self.data)))
        training = self.current = Training(
            self.home / job,
            job,
            Connection(address=self.address, gate=self.gate, token=self.token),
            world_sizes=self.plan.world_sizes,
            steps_per_checkpoint=self.plan.steps_per_checkpoint,
            pace_s=self.pace_s,
        )
        began_s = time.monotonic()
        training.start().join(JOB_LIMIT_S)
        seconds = time.monotonic() - began_s
        # Jobs of a team differ only in the order of samples: each sample is decoded once for all
        # audits.
        dataset = self._dataset = self._dataset or Dataset(job_file)
        findings = self._masked(job) + audit(training.folder, training.launches, dataset)
        result = JobResult(
            job=job,
            samples=dataset.expected_visits.total(),
            steps=training.steps,
            launches=len(training.launches),
            world_sizes=tuple(launch.world_size for launch in training.launches),
            seconds=seconds,
            unasked=tuple(training.unasked),
            findings=tuple(findings),
        )
        self.results.append(result)
        self._ask(lambda client: _delete(client, job))

    def _masked(self, job: str) -> list[str]:
        """Findings about samples that the service masked, in any attempt: none of them is bad."""
        found: list[str] = []
        self._ask(
            lambda client: found.extend(
                f"attempt {each.attempt}, step {each.step}: sample {each.sample_id} was masked: "
                f"{each.reason}"
                for each in client.quarantine(job)
            )
        )
        return found

    def _ask(self, question: Callable[[CoordinatorClient], object]) -> None:
        """Ask the service, again and again while it is unavailable."""
        deadline_s = time.monotonic() + RETRY_LIMIT_S
        while True:
            try:
                with self._client(timeout_s=30.0) as client:
                    question(client)
                return
            except ServiceError:
                if time.monotonic() > deadline_s:
                    raise
                time.sleep(RETRY_S)

    def _client(self, *, timeout_s: float) -> CoordinatorClient:
        access = Access(token=lambda: self.token)
        return CoordinatorClient(self.address, timeout_s=timeout_s, access=access)


def _delete(client: CoordinatorClient, job: str) -> None:
    """Delete a job; it may be gone, if the answer to an earlier request was lost."""
    with contextlib.suppress(NotFoundError):
        client.delete(job)


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """A team's progress: the committed step of a job's attempt, which began at `start_step`."""

    job: str
    attempt: int
    step: int
    start_step: int

    def beyond(self, before: "Progress") -> bool:
        """Whether a step has been committed since `before`."""
        return self.steps_since(before) > 0

    def steps_since(self, before: "Progress") -> int:
        """Number of steps committed since `before`."""
        if (self.job, self.attempt) == (before.job, before.attempt):
            return self.step - before.step
        return max(0, self.step - self.start_step + 1)
