"""Reports to the service, every few seconds, that this rank is alive and what it waits.

    loop ─▶ DataWait (seconds waited, steps begun) ─▶ Heartbeat ─┬▶ along with a question for a step
                                                                 └▶ Report, where none is asked

Thousands of ranks ask for a step every few seconds anyway, and a call of its own costs the service
as much as all else that it does for a rank. So a question takes the next report along once half of
its time has passed, and a thread sends what is due and has found no question.

A report is soon out of date, so one that fails is not repeated, and nothing here ever raises into
training. The thread is a daemon, and ends with the run.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import grpc
from dataservice_proto.v1 import coordinator_pb2, coordinator_pb2_grpc

from trainer_client.interruptible import await_end
from trainer_client.session import Session

CALL_S = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Waited:
    """Seconds that a loop has waited for data until now, as a Report gives them."""

    step: int
    steps: int
    waited_s: float
    waiting_s: float


class DataWait:
    """Measures the seconds that the training loop waits for data. The loop writes it; any thread
    may read it.

    The wait for the first step does not count: it is the time of opening the job.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._step = -1
        self._steps = 0
        self._waited_s = 0.0
        self._since_s: float | None = None

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """The loop waits while the body runs."""
        began_s = time.monotonic()
        with self._lock:
            self._since_s = began_s
        try:
            yield
        finally:
            with self._lock:
                self._since_s = None
                self._waited_s += time.monotonic() - began_s

    def begin(self, step: int) -> None:
        """The loop was given this step."""
        with self._lock:
            if self._steps == 0:
                self._waited_s = 0.0
            self._step, self._steps = step, self._steps + 1

    def now(self) -> Waited:
        """The seconds waited until now."""
        with self._lock:
            waiting_s = 0.0 if self._since_s is None else time.monotonic() - self._since_s
            return Waited(
                step=self._step,
                steps=self._steps,
                waited_s=self._waited_s,
                waiting_s=waiting_s if self._steps else 0.0,
            )


class Heartbeat:
    """Reports every `every_s` seconds until `stop` is set, never when it is 0; along with questions
    where the service reads reports there."""

    def __init__(
        self,
        channel: grpc.Channel,
        session: Session,
        waits: DataWait,
        *,
        every_s: float,
        with_questions: bool,
        stop: threading.Event,
    ) -> None:
        self._stub = coordinator_pb2_grpc.CoordinatorStub(channel)
        self._session = session
        self._waits = waits
        self._every_s = every_s
        self._with_questions = with_questions and every_s > 0
        self._stop = stop
        # From the first report on the rank's silence means something: it is sent at once, or goes
        # along with the first question.
        self._due_s = time.monotonic() + (every_s / 2 if with_questions else 0.0)
        self._thread = threading.Thread(target=self._run, name="shard-heartbeat", daemon=True)
        if every_s > 0:
            self._thread.start()

    def along(self) -> coordinator_pb2.ReportRequest | None:
        """The report for a question to take along, if one is soon due."""
        now_s = time.monotonic()
        if not self._with_questions or now_s < self._due_s - self._every_s / 2:
            return None
        self._due_s = now_s + self._every_s
        return self._report()

    def close(self) -> None:
        """Nothing to wake: the thread waits for `stop`."""

    def join(self, timeout_s: float) -> None:
        """Wait for the thread; call after `stop` was set and the channel closed."""
        await_end(self._thread, timeout_s)

    def _run(self) -> None:
        while not self._stop.wait(max(0.0, self._due_s - time.monotonic())):
            if time.monotonic() < self._due_s:
                continue  # one has gone along meanwhile
            self._due_s = time.monotonic() + self._every_s
            lease = self._session.lease
            if lease is not None:
                request = self._report()
                request.session = lease.session
                # gRPC raises ValueError on a closed channel.
                with suppress(grpc.RpcError, ValueError):
                    self._stub.Report(request, timeout=CALL_S)

    def _report(self) -> coordinator_pb2.ReportRequest:
        now = self._waits.now()
        return coordinator_pb2.ReportRequest(
            step=now.step, steps=now.steps, waited_s=now.waited_s, waiting_s=now.waiting_s
        )
