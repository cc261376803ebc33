"""The program of a nursery: `python -m dataservice.workers.nursery_program SOCKET PARENT`.

    owner ──starts──► nursery ──forks──► child ◄══ orders, answers ══► owner
                         └─────forks──► child ◄══ orders, answers ══► owner

The *nursery* is a fresh process with none of its owner's sockets, threads or memory. It loads what
its children run once and then only forks: a child starts in milliseconds and shares the loaded
libraries. The nursery runs no user's code or data itself, so nothing makes it hang or crash. A
*child* runs a program that an owner handed over, such as `decoder_process.DecoderProgram`, on its
own socket.

Contract.
  Ending       Nursery and children end when the owner's sockets close, and the kernel kills each
               when the thread that started it ends: none outlives its owner, however the owner
               dies.
  Signals      SIGINT and SIGTERM are ignored: they reach the whole process group, and the owner
               still has to finish its streams.
  Memory       When a child's own memory (heap and stacks, not memory files) exceeds `memory_bytes`,
               an allocation fails; only the sample or job in hand is lost. RLIMIT_DATA sets the
               limit: it is exact, and the failure can still be reported. Watching the resident size
               would react too late, and a limit on the address space would count memory that
               libraries only reserve. When the machine runs out of memory, the kernel kills
               children first.
"""

import base64
import contextlib
import ctypes
import faulthandler
import gc
import json
import os
import pickle
import resource
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from dataservice.core.kept_heap import keep_freed
from dataservice.workers.decoder_messages import receive

Program = Callable[[socket.socket], None]
"""What a child does: serve its socket until the owner closes it. It is pickled once."""

REQUEST_LIMIT_BYTES = 176 * 1024  # what one message of such a socket may hold
LOWEST_PRIORITY = 19  # a child's niceness that lets training go first
OUT_OF_MEMORY_SCORE = 900  # of 1000; the owner keeps its own
LONGEST_TRACEBACK = 64 * 1024  # characters: a quoted message may be of any length
_KEPT_HEAP_BYTES = 64 * 2**20
_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    """Fork children on request until the owner is gone."""
    control_descriptor, owner = sys.argv[1:]
    _name_process("nursery")
    keep_freed(_KEPT_HEAP_BYTES)
    control = socket.socket(fileno=int(control_descriptor))
    _end_with_parent(int(owner))
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    _Nursery(control).serve()


class _Nursery:
    """Answers `load` with nothing, or the reason why it could not load what `hello` says; `fork`
    with the process id of a child that runs what was loaded by that key, and a descriptor of it;
    `reap` with the exit status of this process, or null while it has not ended."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._loaded: dict[str, tuple[str, Program, int | None]] = {}
        self._ending: set[int] = set()

    def serve(self) -> None:
        """Serve until the owner is gone; the kernel then kills the children that still run."""
        while True:
            data, descriptors = receive(self._control, REQUEST_LIMIT_BYTES)
            if not data:
                return
            request = json.loads(data)
            if "fork" in request:
                self._fork(request["fork"], descriptors[0])
            elif "load" in request:
                self._answer(self._load(request["load"], request["hello"]))
            else:
                self._answer(self._reap(request["reap"]))

    def _load(self, key: str, hello: str) -> str:
        """It comes from the owner that started us, and is made by the operator's own code."""
        try:
            self._loaded[key] = pickle.loads(base64.b64decode(hello))
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        gc.collect()
        gc.freeze()  # what is loaded stays in pages that all children share
        return ""

    def _fork(self, key: str, orders: int) -> None:
        for process_id in tuple(self._ending):  # children that took long to end
            self._reap(process_id)
        nursery = os.getpid()
        try:
            process_id = os.fork()
        except OSError as error:
            os.close(orders)
            self._answer(str(error))
            return
        if process_id == 0:
            self._control.close()
            _end_with_parent(nursery)
            _run(socket.socket(fileno=orders), *self._loaded[key])
        os.close(orders)
        process = os.pidfd_open(process_id)
        socket.send_fds(self._control, [json.dumps(process_id).encode()], [process])
        os.close(process)

    def _reap(self, process_id: int) -> int | None:
        done, status = os.waitpid(process_id, os.WNOHANG)
        if done == 0:
            self._ending.add(process_id)
            return None
        self._ending.discard(process_id)
        return os.waitstatus_to_exitcode(status)

    def _answer(self, answer: object) -> None:
        self._control.send(json.dumps(answer).encode())


def _end_with_parent(parent: int) -> None:
    """Have the kernel kill this process when the thread that started it ends."""
    _libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:  # it was gone before we asked
        os._exit(1)


def _name_process(name: str) -> None:
    """Set the name that ps and top show."""
    _libc.prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)


def _run(orders: socket.socket, name: str, program: Program, memory_bytes: int | None) -> NoReturn:
    """The whole life of a child."""
    status = 1
    try:
        _name_process(name)
        faulthandler.enable()  # a crash in C leaves its Python lines in the owner's log
        with contextlib.suppress(OSError):
            score = Path("/proc/self/oom_score_adj")
            score.write_text(str(max(int(score.read_text()), OUT_OF_MEMORY_SCORE)))
        if memory_bytes is not None:
            resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))
        program(orders)
        status = 0
    except OSError:
        pass  # the owner closed the socket while we answered
    except BaseException:
        sys.stderr.write(traceback.format_exc()[-LONGEST_TRACEBACK:])
    finally:
        os._exit(status)  # the nursery's own code lies above


if __name__ == "__main__":
    main()
