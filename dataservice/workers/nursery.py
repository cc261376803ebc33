"""The owner's side of a nursery: the process that forks the owner's children (a worker's decoders,
or the processes that open jobs for the coordinator).

Contract.
  fork     gives a live child. A nursery that is gone or does not answer in time is killed with all
           its children and started again; when that fails too, `fork` raises WorkerLostError.
  end      kills the child, whatever it is doing, and says how it ended. Never raises. Whether the
           child's nursery had died before it is known then.
  close    kills nursery and children; nothing starts behind it, `start` and `fork` raise
           WorkerLostError.

Safe to call from several threads; they take turns, and the nursery answers in milliseconds.
"""

import contextlib
import json
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from typing import Any

from dataservice.core.credentials import without_credentials
from dataservice.core.errors import WorkerLostError
from dataservice.workers.decoder_messages import receive
from dataservice.workers.nursery_program import Program

START_LIMIT_S = 60.0
ANSWER_LIMIT_S = 10.0
DEATH_WAIT_S = 5.0
GIVE_UP_S = 1.0
FORK_TRIES = 5
RETRY_PAUSE_S = 0.2
PROGRAM = "dataservice.workers.nursery_program"


@dataclass(frozen=True, kw_only=True, slots=True)
class ForkedProcess:
    """A live child: `orders` is its socket; `process` a descriptor of it, which names this
    very process even after its number is used again; `nursery` the process that forked it."""

    process_id: int
    process: int
    orders: socket.socket
    nursery: subprocess.Popen[bytes]

    def kill(self) -> None:
        """SIGKILL, if it still lives."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.process, signal.SIGKILL)

    @property
    def ended(self) -> bool:
        """Whether it has died."""
        return bool(ends_within(self.process, 0.0))

    @property
    def orphaned(self) -> bool:
        """Of one that `end` was called for: whether its nursery is gone, which ended it too."""
        return self.nursery.poll() is not None


class Nursery:
    """Starts and ends processes that run `program`, each under `name` and with at most
    `memory_bytes` of its own."""

    def __init__(self, program: Program, *, name: str, memory_bytes: int | None = None) -> None:
        self._hello = pickle.dumps((program, memory_bytes))
        self._name = name
        self._lock = threading.Lock()
        self._program: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._closed = False

    def start(self) -> None:
        """Start the nursery; it has loaded its libraries when this returns. Call it from a thread
        that outlives the children: the kernel ends them together with that thread."""
        with self._lock:
            if self._control is None:
                self._require_open()
                self._start()

    def fork(self) -> ForkedProcess:
        """A new child."""
        failure = ""
        for _ in range(FORK_TRIES):
            with self._lock:
                try:
                    made = self._fork()
                except OSError as error:
                    made = str(error)
                    self._stop()
            if isinstance(made, ForkedProcess):
                return made
            failure = made
            time.sleep(RETRY_PAUSE_S)
        raise WorkerLostError(
            f"no {self._name} process can be started: {failure}. Look at this machine's limits of "
            "processes and memory, and in the log."
        )

    def end(self, child: ForkedProcess) -> str:
        """Make sure that the child is dead; how it died, in words."""
        child.kill()
        status = None
        if ends_within(child.process, DEATH_WAIT_S):
            status = self._status(child)
        os.close(child.process)
        child.orders.close()
        return _in_words(status)

    def refuse(self) -> None:
        """Start no more children. A nursery that a thread is waiting for is killed."""
        self._closed = True
        if self._lock.acquire(timeout=GIVE_UP_S):
            self._lock.release()
        elif (program := self._program) is not None:  # else `_start` finds out that it is closed
            program.kill()

    def close(self) -> None:
        """Kill the nursery, and its children with it."""
        with self._lock:
            self._closed = True
            self._stop()

    def _fork(self) -> ForkedProcess | str:
        """A child, or the reason why the nursery could not fork. Raises OSError when there is no
        nursery."""
        self._require_open()
        if self._control is None:
            self._start()
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                answer, descriptors = self._exchange({"fork": True}, [theirs.fileno()])
        except BaseException:
            ours.close()
            raise
        if not descriptors:
            ours.close()
            return str(answer)
        assert self._program is not None  # it has just answered
        return ForkedProcess(
            process_id=answer, process=descriptors[0], orders=ours, nursery=self._program
        )

    def _require_open(self) -> None:
        if self._closed:
            raise WorkerLostError("it has been stopped.")

    def _start(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._program = subprocess.Popen(
                # -P: Python must not import modules from the current directory.
                [
                    sys.executable,
                    "-P",
                    "-m",
                    PROGRAM,
                    self._name,
                    str(theirs.fileno()),
                    str(os.getpid()),
                ],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=_environment(),
            )
        self._control = ours
        if self._closed:
            self._stop()
            self._require_open()
        try:
            ours.settimeout(START_LIMIT_S)
            ours.send(self._hello)
            refusal = json.loads(ours.recv(2**16) or b'"it ended at once"')
        except OSError as error:
            refusal = str(error)
        if refusal:
            self._stop()
            raise WorkerLostError(
                f"{self._name} processes cannot start: {refusal}. What they run must be importable "
                "in a fresh Python process; look in the log."
            )
        ours.settimeout(ANSWER_LIMIT_S)

    def _status(self, child: ForkedProcess) -> int | None:
        with self._lock:
            if child.nursery is not self._program:
                return None  # the next nursery is no parent of it, and would fail to reap it
            try:
                status, _ = self._exchange({"reap": child.process_id}, [])
            except OSError:
                self._stop()  # a late answer would be taken for the next request's answer
                return None
        return status if isinstance(status, int) else None

    def _exchange(self, request: dict[str, Any], passed: list[int]) -> tuple[Any, list[int]]:
        if self._control is None:
            raise OSError("the nursery is gone")
        socket.send_fds(self._control, [json.dumps(request).encode()], passed)
        data, descriptors = receive(self._control, 2**16)
        if not data:
            raise OSError("the nursery is gone")
        return json.loads(data), descriptors

    def _stop(self) -> None:
        if self._control is not None:
            self._control.close()
        if self._program is not None:
            self._program.kill()
            self._program.wait()
        self._control = self._program = None


def _environment() -> dict[str, str]:
    """This process's environment without credentials, which its owner hands to those children that
    need them; with our module path, and one thread per library: a slot is one CPU."""
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1"}
    return {**threads, **without_credentials(os.environ), "PYTHONPATH": path}


def ends_within(process: int, limit_s: float) -> bool:
    """Whether the process behind this descriptor ends within `limit_s`."""
    poll = select.poll()
    poll.register(process, select.POLLIN)
    return bool(poll.poll(limit_s * 1000))


def _in_words(status: int | None) -> str:
    if status is None:
        return "was killed"
    if status >= 0:
        return f"ended by itself with status {status}"
    known = {each.value: each.name for each in signal.Signals}  # of real-time ones not all
    name = known.get(-status, f"signal {-status}")
    hint = ": by hand, or for want of memory" if name == "SIGKILL" else ""
    return f"died of {name}{hint}"
