"""A small blocking client of the coordinator, for the CLI."""

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

import grpc
from dataservice_proto.v1 import coordinator_pb2, coordinator_pb2_grpc

from dataservice.core.health import ServiceHealth
from dataservice.core.index_orders import IndexAnswer
from dataservice.core.job import QuarantineEntry, SkipAction, SkipRecord
from dataservice.engine.api import FoundSample, JobStatus, ReplayedStep, WorkerStatus
from dataservice.serving import wire_health, wire_index, wire_jobs
from dataservice.serving.client_access import Access
from dataservice.serving.status_codes import ServiceUnreachableError, error_of, is_unreachable
from dataservice.serving.wire_jobs import ExplainedStep

# `explain` returns a whole step plan: the only answer that may be larger than 4 MiB.
ANSWER_LIMIT_BYTES = 512 * 2**20


# Longest time for an answer from what the service holds.
ANSWERED_S = 60.0
# For one that may open a job first: it has a limit of its own there, 10 minutes by default, and
# waits for a place.
OPENED_S = 1800.0
# For a step that is decoded again: training goes first.
REDECODED_S = 3600.0


class IndexCall:
    """The answers to an errand, as they come. Raises as the methods of the client do."""

    def __init__(
        self, call: Any, translated: Callable[[], contextlib.AbstractContextManager[float]]
    ) -> None:
        self._call = call
        self._translated = translated

    def __iter__(self) -> Iterator[IndexAnswer]:
        with self._translated():
            for answer in self._call:
                yield wire_index.index_answer_from_proto(answer)

    def cancel(self) -> None:
        """End the errand, from any thread: whoever takes its answers is told by
        ServiceUnreachableError."""
        self._call.cancel()


class CoordinatorClient:
    """Each call raises the ServiceError that the service raised, or ServiceUnreachableError where
    no answer comes."""

    def __init__(
        self,
        address: str,
        *,
        timeout_s: float | None = None,
        access: Access | None = None,
    ) -> None:
        """By default the connection is plaintext and carries no token, and a call waits for its
        answer for `ANSWERED_S`, or `OPENED_S` where the service may open a job for it."""
        self._address = address
        self._timeout_s = timeout_s or ANSWERED_S
        self._opened_s = timeout_s or OPENED_S
        self._access = access or Access()
        self._channel = self._access.channel(address, ANSWER_LIMIT_BYTES)
        self._stub = coordinator_pb2_grpc.CoordinatorStub(self._channel)

    def await_service(self, limit_s: float) -> None:
        """Wait at most `limit_s` until the service listens, which may still be starting. If it
        does not, the next call raises the reason."""
        with contextlib.suppress(grpc.FutureTimeoutError):
            grpc.channel_ready_future(self._channel).result(timeout=limit_s)

    def submit(self, spec_yaml: str, base_directory: str) -> JobStatus:
        """Register a job; relative paths in it start from `base_directory`."""
        request = coordinator_pb2.SubmitJobRequest(
            spec_yaml=spec_yaml, base_directory=base_directory
        )
        with self._translated(self._opened_s) as limit_s:
            answer = self._stub.SubmitJob(request, timeout=limit_s)
        return wire_jobs.job_status_from_proto(answer)

    def jobs(self, *, timeout_s: float | None = None) -> list[JobStatus]:
        """All jobs by name."""
        with self._translated(timeout_s) as limit_s:
            answer = self._stub.ListJobs(coordinator_pb2.ListJobsRequest(), timeout=limit_s)
        return [wire_jobs.job_status_from_proto(job) for job in answer.jobs]

    def job(self, name: str) -> JobStatus:
        """One job."""
        with self._translated() as limit_s:
            answer = self._stub.GetJob(coordinator_pb2.JobRequest(job=name), timeout=limit_s)
        return wire_jobs.job_status_from_proto(answer)

    def drain(self, name: str) -> JobStatus:
        """Refuse new attempts of a job; the running one may finish."""
        with self._translated() as limit_s:
            answer = self._stub.DrainJob(coordinator_pb2.JobRequest(job=name), timeout=limit_s)
        return wire_jobs.job_status_from_proto(answer)

    def delete(self, name: str) -> None:
        """Forget a job that no trainer uses."""
        with self._translated() as limit_s:
            self._stub.DeleteJob(coordinator_pb2.JobRequest(job=name), timeout=limit_s)

    def recost(self, name: str, cost_json: str, from_step: int | None = None) -> tuple[int, str]:
        """Plan with other coefficients from a step on, by default the first that was never
        planned. Returns that step and the coefficients' version."""
        request = coordinator_pb2.RecostJobRequest(
            job=name, cost_json=cost_json, from_step=from_step
        )
        with self._translated(self._opened_s) as limit_s:
            answer = self._stub.RecostJob(request, timeout=limit_s)
        return answer.from_step, answer.cost_version

    def change_mixture(
        self, name: str, weights: Mapping[str, float], from_step: int | None = None
    ) -> int:
        """Draw by other weights from a step on, by default the first that was never planned.
        Returns that step."""
        request = coordinator_pb2.ChangeMixtureRequest(
            job=name, weights=weights, from_step=from_step
        )
        with self._translated(self._opened_s) as limit_s:
            answer = self._stub.ChangeMixture(request, timeout=limit_s)
        return answer.from_step

    def quarantine(self, name: str) -> list[QuarantineEntry]:
        """The job's samples that were trained with their labels masked."""
        request = coordinator_pb2.JobRequest(job=name)
        with self._translated() as limit_s:
            answers = list(self._stub.ListQuarantine(request, timeout=limit_s))
        return [wire_jobs.quarantine_entry_from_proto(answer, name) for answer in answers]

    def explain(self, name: str, step: int, attempt: int | None = None) -> ExplainedStep:
        """Plan a step of the ledger again, by default of the newest attempt that has it."""
        request = coordinator_pb2.ExplainStepRequest(job=name, step=step, attempt=attempt or 0)
        with self._translated(self._opened_s) as limit_s:
            answer = self._stub.ExplainStep(request, timeout=limit_s)
        return wire_jobs.explanation_from_proto(answer)

    def find_sample(self, name: str, sample_id: int, from_step: int = 0) -> FoundSample:
        """Where a sample lies, and which steps it was in, a bounded way along the ledger."""
        request = coordinator_pb2.FindSampleRequest(
            job=name, sample_id=sample_id, from_step=from_step
        )
        with self._translated(self._opened_s) as limit_s:
            answer = self._stub.FindSample(request, timeout=limit_s)
        return wire_jobs.found_sample_from_proto(answer, sample_id)

    def replay(
        self,
        name: str,
        first_step: int,
        last_step: int,
        attempt: int | None = None,
        *,
        content: bool = False,
    ) -> Iterator[ReplayedStep]:
        """Plan the steps of a range again, and with `content` decode them again too; yields each
        step once it is done. One step may take as long as a call for which a job is opened, or
        `REDECODED_S` with `content`."""
        request = coordinator_pb2.ReplayStepsRequest(
            job=name,
            first_step=first_step,
            last_step=last_step,
            attempt=attempt or 0,
            content=content,
        )
        limit_s = REDECODED_S if content else self._opened_s
        with self._translated(limit_s):
            for answer in _each_within(self._stub.ReplaySteps(request), limit_s):
                yield wire_jobs.replayed_step_from_proto(answer)

    def skip(
        self, name: str, ranges: Sequence[tuple[int, int]], action: SkipAction = "skip"
    ) -> list[SkipRecord]:
        """Have future attempts skip these steps, or train them after all."""
        request = coordinator_pb2.SkipStepsRequest(
            job=name,
            ranges=[coordinator_pb2.StepRange(first_step=a, last_step=b) for a, b in ranges],
            undo=action == "train",
        )
        with self._translated() as limit_s:
            answer = self._stub.SkipSteps(request, timeout=limit_s)
        return [wire_jobs.skip_record_from_proto(each, name) for each in answer.skips]

    def index(self, spec_yaml: str, base_directory: str, source: str, errand: str) -> IndexCall:
        """Have a worker do something for an index of one source of a job file; see
        sources/index_errands.py. Waits for a place, so there is no limit of time."""
        request = coordinator_pb2.IndexRequest(
            spec_yaml=spec_yaml, base_directory=base_directory, source=source, errand=errand
        )
        return IndexCall(self._stub.Index(request), self._translated)

    def workers(self) -> list[WorkerStatus]:
        """The workers as they are now."""
        request = coordinator_pb2.ListWorkersRequest()
        with self._translated() as limit_s:
            answer = self._stub.ListWorkers(request, timeout=limit_s)
        return [wire_jobs.worker_status_from_proto(each) for each in answer.workers]

    def restart_workers(self, workers: Sequence[str] = ()) -> list[str]:
        """Begin to replace these workers, by default all. Returns their names."""
        request = coordinator_pb2.RestartWorkersRequest(workers=workers)
        with self._translated() as limit_s:
            answer = self._stub.RestartWorkers(request, timeout=limit_s)
        return list(answer.workers)

    def health(self, job: str = "", *, timeout_s: float | None = None) -> ServiceHealth:
        """The current state of a running job, by default of all jobs that the caller may see, with
        a sentence on who waits for whom."""
        request = coordinator_pb2.GetHealthRequest(job=job)
        with self._translated(timeout_s) as limit_s:
            answer = self._stub.GetHealth(request, timeout=limit_s)
        return wire_health.health_from_proto(answer)

    def close(self) -> None:
        """Close the connection."""
        self._channel.close()

    def __enter__(self) -> "CoordinatorClient":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @contextlib.contextmanager
    def _translated(self, limit_s: float | None = None) -> Iterator[float]:
        """Gives the limit of a call, by default that of most, and raises its errors."""
        limit_s = limit_s or self._timeout_s
        try:
            yield limit_s
        except grpc.RpcError as error:
            if not is_unreachable(error):
                raise error_of(error) from error
            advice = self._advice(error, limit_s)
            raise ServiceUnreachableError(advice) from error

    def _advice(self, error: grpc.RpcError, timeout_s: float) -> str:
        assert isinstance(error, grpc.Call)
        late = grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED
        if error.code() in late:
            return (
                f"the service at {self._address} did not answer within {timeout_s:g} s. It "
                "may be busy indexing or planning: look at its log, or wait longer."
            )
        advice = self._access.mismatch(self._address, error.details() or "") or (
            "Check that `dataservice serve` runs there, that the address and port are its own, "
            "and that no firewall is between."
        )
        return f"no service answers at {self._address}: {error.details()}. {advice}"


def _each_within(call: Any, limit_s: float) -> Iterator[Any]:
    """The answers of a call. The call is cancelled if an answer does not come within the limit."""
    while True:
        giving_up = threading.Timer(limit_s, call.cancel)
        giving_up.daemon = True
        giving_up.start()
        try:
            answer = next(call, None)
        finally:
            giving_up.cancel()
        if answer is None:
            return
        yield answer
