"""The owner's side of a nursery: the process that forks the owner's children (a worker's decoders,
or the processes that open jobs for the coordinator).

Contract.
  fork     gives a live child. A nursery that is gone or does not answer in time is killed with all
           its children and started again; when that fails too, `fork` raises WorkerLostError.
  end      kills the child, whatever it is doing, and says how it ended. Never raises. Whether the
           child's nursery had died before it is known then.
  close    kills the children; nothing starts behind it, `start` and `fork` raise WorkerLostError.

Owners in one process may share one nursery: it loads their libraries once, and ends with the last
owner. Safe to call from several threads; they take turns, and the nursery answers in milliseconds
but for the first child of an owner, for which it loads what that runs.
"""

import base64
import contextlib
import hashlib
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
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

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
Result = TypeVar("Result")


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
    `memory_bytes` of its own. They are forked by `process`, which other owners may share, or by one
    that is for them alone."""

    def __init__(
        self,
        program: Program,
        *,
        name: str,
        memory_bytes: int | None = None,
        process: "NurseryProcess | None" = None,
    ) -> None:
        self._hello = base64.b64encode(pickle.dumps((name, program, memory_bytes))).decode()
        self._key = hashlib.sha256(self._hello.encode()).hexdigest()
        self._name = name
        self._process = process or NurseryProcess()
        self._its_turn = False
        self._children: dict[int, ForkedProcess] = {}  # by their descriptor
        self._children_lock = threading.Lock()
        self._closed = False

    def start(self) -> None:
        """Start the nursery; it has loaded what its children run when this returns. Raises
        WorkerLostError."""
        self._tried(self._ready)

    def fork(self) -> ForkedProcess:
        """A new child. Raises WorkerLostError."""
        return self._tried(self._fork)

    def end(self, child: ForkedProcess) -> str:
        """Make sure that the child is dead; how it died, in words."""
        child.kill()
        status = None
        if ends_within(child.process, DEATH_WAIT_S):
            status = self._status(child)
        with self._children_lock:
            self._children.pop(child.process, None)
        os.close(child.process)
        child.orders.close()
        return _in_words(status)

    def refuse(self) -> None:
        """Start no more children. A nursery that a thread of this owner is waiting for is
        killed."""
        self._closed = True
        if self._process.lock.acquire(timeout=GIVE_UP_S):
            self._process.lock.release()
        elif self._its_turn:  # else the thread finds out that it is closed
            self._process.kill()

    def close(self) -> None:
        """Kill the children, and the nursery unless it is another owner's too: if one of those has
        it load something, it does not wait for that."""
        self._closed = True
        self._process.leave(self)
        with self._turn(), self._children_lock:
            for child in self._children.values():
                child.kill()

    @contextlib.contextmanager
    def _turn(self) -> Iterator[bool]:
        """Take the lock. An owner that is closed waits for its own threads only: whether it has
        it."""
        while not (taken := self._process.lock.acquire(timeout=GIVE_UP_S)):
            if self._closed and not self._its_turn:
                break
        if taken:
            self._its_turn = True
        try:
            yield taken
        finally:
            if taken:
                self._its_turn = False
                if self._closed:
                    self._process.leave(self)
                self._process.settle()
                self._process.lock.release()

    def _tried(self, work: Callable[[], Result | str]) -> Result:
        """What this does, in as many tries as it may take; it raises OSError, or says why it could
        not be done."""
        failure = ""
        for _ in range(FORK_TRIES):
            with self._turn():
                try:
                    made = work()
                except OSError as error:
                    made = str(error)
                    self._process.stop()
            if not isinstance(made, str):
                return made
            failure = made
            time.sleep(RETRY_PAUSE_S)
        raise WorkerLostError(
            f"no {self._name} process can be started: {failure}. Look at this machine's limits of "
            "processes and memory, and in the log."
        )

    def _ready(self) -> None:
        """Have the nursery running, with what the children run loaded. Raises OSError where there
        is no nursery, WorkerLostError."""
        if self._closed:
            raise WorkerLostError("it has been stopped.")
        self._process.enter(self)
        try:
            refusal = self._process.load(self._key, self._hello)
        except TimeoutError as error:
            self._process.stop()
            refusal = str(error)
        if refusal:
            self._process.leave(self)
            raise WorkerLostError(
                f"{self._name} processes cannot start: {refusal}. What they run must be importable "
                "in a fresh Python process; look in the log."
            )

    def _fork(self) -> ForkedProcess | str:
        """A child, or the reason why the nursery could not fork. Raises OSError when there is no
        nursery, WorkerLostError."""
        self._ready()
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                answer, descriptors = self._process.ask({"fork": self._key}, [theirs.fileno()])
        except BaseException:
            ours.close()
            raise
        if not descriptors:
            ours.close()
            return str(answer)
        assert self._process.program is not None  # it has just answered
        child = ForkedProcess(
            process_id=answer, process=descriptors[0], orders=ours, nursery=self._process.program
        )
        with self._children_lock:
            self._children[child.process] = child
        return child

    def _status(self, child: ForkedProcess) -> int | None:
        with self._turn() as taken:
            if not taken or child.nursery is not self._process.program:
                return None  # the next nursery is no parent of it, and would fail to reap it
            try:
                status, _ = self._process.ask({"reap": child.process_id})
            except OSError:
                self._process.stop()  # a late answer would be taken for the next request's
                return None
        return status if isinstance(status, int) else None


class NurseryProcess:
    """The process of a nursery, for one owner or several of this process: it runs while one of them
    has it open. They call all but `kill` and `leave` while they hold `lock`."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.program: subprocess.Popen[bytes] | None = None
        """The process that runs now, if one does."""
        self._control: socket.socket | None = None
        self._ended = threading.Event()
        self._open: set[Nursery] = set()
        self._loaded: set[str] = set()

    def kill(self) -> None:
        """End the process whoever holds the lock; who waits for its answer gets an error."""
        if (program := self.program) is not None:
            program.kill()

    def enter(self, owner: Nursery) -> None:
        """Have the process running, also for this owner. Raises OSError."""
        self._open.add(owner)
        if self._control is None:
            self._start()

    def leave(self, owner: Nursery) -> None:
        """This owner has it open no more."""
        self._open.discard(owner)

    def settle(self) -> None:
        """End the process unless somebody has it open."""
        if not self._open:
            self.stop()

    def load(self, key: str, hello: str) -> str:
        """Have the process load what children run, if it has not, to be known by this key; why it
        could not, or nothing. Raises OSError where there is no process."""
        if key in self._loaded:
            return ""
        refusal, _ = self.ask({"load": key, "hello": hello}, limit_s=START_LIMIT_S)
        if not refusal:
            self._loaded.add(key)
        return str(refusal)

    def ask(
        self,
        request: dict[str, Any],
        passed: Sequence[int] = (),
        *,
        limit_s: float = ANSWER_LIMIT_S,
    ) -> tuple[Any, list[int]]:
        """Its answer, with descriptors. Raises OSError where there is no process."""
        if self._control is None:
            raise OSError("the nursery is gone")
        self._control.settimeout(limit_s)
        socket.send_fds(self._control, [json.dumps(request).encode()], passed)
        data, descriptors = receive(self._control, 2**16)
        if not data:
            raise OSError("the nursery is gone")
        return json.loads(data), descriptors

    def stop(self) -> None:
        """Kill the process, and all children with it."""
        if self._control is not None:
            self._control.close()
        if self.program is not None:
            self.program.kill()
            self.program.wait()
        self._ended.set()
        self._control = self.program = None
        self._loaded.clear()

    def _start(self) -> None:
        """The kernel ends a nursery with the thread that started it: it has one of its own."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._ended = threading.Event()
        begun: Future[subprocess.Popen[bytes]] = Future()
        run = partial(_run, theirs, begun, self._ended)
        with theirs:
            threading.Thread(target=run, name="nursery", daemon=True).start()
            try:
                self.program = begun.result()
            except BaseException:
                ours.close()
                raise
        self._control = ours


def _run(
    control: socket.socket, begun: "Future[subprocess.Popen[bytes]]", ended: threading.Event
) -> None:
    """Start a nursery, and stay until it is ended."""
    try:
        program = subprocess.Popen(
            # -P: Python must not import modules from the current directory.
            [sys.executable, "-P", "-m", PROGRAM, str(control.fileno()), str(os.getpid())],
            pass_fds=[control.fileno()],
            stdin=subprocess.DEVNULL,
            env=_environment(),
        )
    except BaseException as error:
        begun.set_exception(error)
        return
    begun.set_result(program)
    ended.wait()


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
