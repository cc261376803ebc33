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
from collections.abc import Mapping
from functools import cache

from soak.service import PROGRAM, ROOT, Command, Process, start_anew

START_LIMIT_S = 600.0  # where the kernels are still to be compiled


class ForkedCommand:
    """A command as a process, by the names of `subprocess.Popen`."""

    def __init__(self, command: Command) -> None:
        self.args = list(command.arguments)
        self.returncode: int | None = None
        self._status, status = os.pipe2(os.O_CLOEXEC)
        try:
            self.pid = _server().fork(command, status)
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


def start(command: Command) -> Process:
    """As `soak.service.start_anew`, but by a fork where it is the program that is loaded here, and
    its environment names no other folders of modules."""
    known = {"", str(ROOT), *_module_folders(os.environ)}
    if command.program == PROGRAM and known.issuperset(_module_folders(command.environment)):
        return ForkedCommand(command)
    return start_anew(command)


def _module_folders(environment: Mapping[str, str]) -> list[str]:
    return environment.get("PYTHONPATH", "").split(os.pathsep)


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

    def fork(self, command: Command, status: int) -> int:
        """The process id of one more command, whose exit status is written to a descriptor."""
        request = {
            "arguments": list(command.arguments),
            "environment": dict(command.environment),
            "folder": os.getcwd(),
        }
        descriptors = [command.output.fileno(), command.error.fileno(), status]
        with self._one_at_a_time:
            socket.send_fds(self._control, [json.dumps(request).encode()], descriptors)
            answer = self._control.recv(64)
        if not answer:
            raise AssertionError(f"the server of commands ended with {self._process.wait()}")
        return int(json.loads(answer))


@cache
def _server() -> _Server:
    return _Server()
