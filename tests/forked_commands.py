"""Forks the services and commands of tests from a server of this process (see command_server.py),
which starts with the first of them."""

import atexit
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import IO

from soak.service import PROGRAM, ROOT, Process, start_anew

START_LIMIT_S = 600.0  # where the kernels are still to be compiled


class ForkedCommand:
    """`dataservice ARGUMENTS` as a process, by the names of `subprocess.Popen`."""

    def __init__(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        output: IO[bytes],
        error: IO[bytes],
    ) -> None:
        self.args = list(arguments)
        self.returncode: int | None = None
        self._status, status = os.pipe2(os.O_CLOEXEC)
        try:
            self.pid = _server().fork(
                self.args, environment, (output.fileno(), error.fileno(), status)
            )
        finally:
            os.close(status)

    def poll(self) -> int | None:
        """Its exit status, or minus the number of the signal that ended it; None while it runs."""
        return self._wait(0.0)

    def wait(self, timeout: float | None = None) -> int:
        """The same when it has ended. Raises TimeoutExpired."""
        returned = self._wait(timeout)
        if returned is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return returned

    def _wait(self, timeout: float | None) -> int | None:
        if self.returncode is None and select.select([self._status], [], [], timeout)[0]:
            self.returncode = json.loads(os.read(self._status, 64))
            os.close(self._status)
        return self.returncode

    def send_signal(self, sig: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, sig)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def start(
    arguments: Sequence[str],
    environment: Mapping[str, str],
    output: IO[bytes],
    error: IO[bytes],
    program: str = PROGRAM,
) -> Process:
    """As `soak.service.start_anew`, but by a fork where it is the program that is loaded here, and
    its environment names no other folders of modules."""
    folders = {ROOT, *map(Path, os.environ.get("PYTHONPATH", "").split(os.pathsep))}
    named = set(map(Path, environment.get("PYTHONPATH", "").split(os.pathsep)))
    if program != PROGRAM or not named <= {Path(), *folders}:
        return start_anew(arguments, environment, output, error, program)
    return ForkedCommand(arguments, environment, output, error)


class _Server:
    def __init__(self) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._one_at_a_time = threading.Lock()
        self._control.settimeout(START_LIMIT_S)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.command_server", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                cwd=ROOT,  # a test may have gone elsewhere
                env={**os.environ, "COLUMNS": "200"},
            )
        atexit.register(self._end)

    def _end(self) -> None:
        self._control.close()
        self._process.wait()

    def fork(
        self, arguments: Sequence[str], environment: Mapping[str, str], descriptors: Sequence[int]
    ) -> int:
        """The process id of one more command."""
        request = {
            "arguments": list(arguments),
            "environment": dict(environment),
            "folder": os.getcwd(),
        }
        with self._one_at_a_time:
            socket.send_fds(self._control, [json.dumps(request).encode()], descriptors)
            answer = self._control.recv(64)
        if not answer:
            raise AssertionError(f"the server of commands ended with {self._process.wait()}")
        return int(json.loads(answer))


@cache
def _server() -> _Server:
    return _Server()
