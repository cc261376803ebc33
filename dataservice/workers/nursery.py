"""The worker's hold on the nursery: the process that forks its decoders.

Contract.
  fork     gives a live decoder. A nursery that is gone, or does not answer in time, is killed
           with all its decoders and started anew; WorkerLostError when that fails too.
  end      kills the decoder, whatever it is doing, and says how it ended. Never raises.
  close    kills nursery and decoders.

Safe to call from several threads; they take turns at the nursery, which answers in
milliseconds.
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

from dataservice.core.errors import WorkerLostError
from dataservice.workers.decoder_messages import receive
from dataservice.workers.pipelines import PipelineFactory

START_LIMIT_S = 60.0
ANSWER_LIMIT_S = 10.0
DEATH_WAIT_S = 5.0
GIVE_UP_S = 1.0
FORK_TRIES = 5
RETRY_PAUSE_S = 0.2
PROGRAM = "dataservice.workers.decoder_process"


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderProcess:
    """A live decoder: `orders` is its socket; `process` a descriptor of it, which names this
    very process even after its number is used again."""

    process_id: int
    process: int
    orders: socket.socket

    def kill(self) -> None:
        """SIGKILL, if it still lives."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.process, signal.SIGKILL)

    @property
    def ended(self) -> bool:
        """It has died."""
        return bool(ends_within(self.process, 0.0))


class Nursery:
    """Starts and ends decoder processes."""

    def __init__(self, factory: PipelineFactory, *, memory_bytes: int | None = None) -> None:
        self._hello = pickle.dumps((factory, memory_bytes))
        self._lock = threading.Lock()
        self._program: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._closed = False

    def start(self) -> None:
        """Start the nursery; it has loaded its libraries when this returns. Call it from a
        thread that lives as long as the decoders shall: the kernel ends them with it."""
        with self._lock:
            if self._control is None:
                self._start()

    def fork(self) -> DecoderProcess:
        """A new decoder."""
        failure = ""
        for _ in range(FORK_TRIES):
            with self._lock:
                try:
                    made = self._fork()
                except OSError as error:
                    made = str(error)
                    self._stop()
            if isinstance(made, DecoderProcess):
                return made
            failure = made
            time.sleep(RETRY_PAUSE_S)
        raise WorkerLostError(
            f"no decoder process can be started: {failure}. Look at this machine's limits of "
            "processes and memory, and in the worker's log."
        )

    def end(self, decoder: DecoderProcess) -> str:
        """Make sure that the decoder is dead; how it died, in words."""
        decoder.kill()
        status = None
        if ends_within(decoder.process, DEATH_WAIT_S):
            status = self._status(decoder.process_id)
        os.close(decoder.process)
        decoder.orders.close()
        return _in_words(status)

    def refuse(self) -> None:
        """Start no decoder any more. A nursery that keeps somebody waiting is killed."""
        self._closed = True
        program = self._program
        if self._lock.acquire(timeout=GIVE_UP_S):
            self._lock.release()
        elif program is not None:
            program.kill()

    def close(self) -> None:
        """Kill the nursery, and its decoders with it."""
        with self._lock:
            self._closed = True
            self._stop()

    def _fork(self) -> DecoderProcess | str:
        """A decoder, or why the nursery could not fork. OSError when there is no nursery."""
        if self._closed:
            raise WorkerLostError("this worker has been stopped.")
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
        return DecoderProcess(process_id=answer, process=descriptors[0], orders=ours)

    def _start(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._program = subprocess.Popen(
                # -P: what lies in the current directory is no module of ours.
                [sys.executable, "-P", "-m", PROGRAM, str(theirs.fileno()), str(os.getpid())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=_environment(),
            )
        self._control = ours
        try:
            ours.settimeout(START_LIMIT_S)
            ours.send(self._hello)
            refusal = json.loads(ours.recv(2**16) or b'"it ended at once"')
        except OSError as error:
            refusal = str(error)
        if refusal:
            self._stop()
            raise WorkerLostError(
                f"decoder processes cannot start: {refusal}. What makes readers and decoders must "
                "be importable in a fresh Python process; look in the worker's log."
            )
        ours.settimeout(ANSWER_LIMIT_S)

    def _status(self, process_id: int) -> int | None:
        with self._lock:
            try:
                status, _ = self._exchange({"reap": process_id}, [])
            except OSError:
                self._stop()  # an answer that came late would be taken for the next one
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
    """Ours, with our module path; and one thread a library, since a slot is one CPU."""
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1"}
    return {**threads, **os.environ, "PYTHONPATH": path}


def ends_within(process: int, limit_s: float) -> bool:
    """Whether the process of this descriptor is dead by then."""
    poll = select.poll()
    poll.register(process, select.POLLIN)
    return bool(poll.poll(limit_s * 1000))


def _in_words(status: int | None) -> str:
    if status is None:
        return "was killed"
    if status >= 0:
        return f"ended by itself with status {status}"
    name = signal.Signals(-status).name
    hint = ": by hand, or for want of memory" if name == "SIGKILL" else ""
    return f"died of {name}{hint}"
