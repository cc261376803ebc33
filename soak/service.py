"""`dataservice serve` as a process: started and stopped as an operator would, or killed."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Protocol

from soak.processes import end_family, mark

ROOT = Path(__file__).resolve().parent.parent
START_LIMIT_S = 180.0  # more than worker_start_timeout_s and the coordinator's own start
STOP_LIMIT_S = 30.0
COMMAND_LIMIT_S = 300.0  # a job is opened at the lowest priority
PROGRAM = "dataservice.cli.main"


class Process(Protocol):
    """What is needed of a process that was started, by the names of `subprocess.Popen`."""

    pid: int
    returncode: int | None

    def poll(self) -> int | None:
        """Its exit status; None while it runs."""

    def wait(self, timeout: float) -> int:
        """Its exit status, when it has ended. Raises TimeoutExpired."""

    def send_signal(self, sig: int) -> None:
        """Signal it unless it has ended."""

    def kill(self) -> None:
        """Send SIGKILL."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """What a process runs: `program ARGUMENTS`, with this environment, and where it writes."""

    arguments: Sequence[str]
    environment: Mapping[str, str]
    output: IO[bytes]
    error: IO[bytes]
    program: str = PROGRAM


def start_anew(command: Command) -> Process:
    """By a Python of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", command.program, *command.arguments],
        stdout=command.output,
        stderr=command.error,
        env=command.environment,
    )


start: Callable[[Command], Process] = start_anew  # tests fork


@dataclass
class ServiceProcess:
    """A service with its own state folder. `flags` are further flags of `serve`, `environment` is
    added to this process's environment, and `program` is the module that is run."""

    home: Path
    pool: str = "local"
    flags: tuple[str, ...] = ()
    address: str = ""
    environment: dict[str, str] = field(default_factory=dict)
    program: str = PROGRAM
    process: Process | None = None
    starts: int = 0

    @property
    def log(self) -> Path:
        """The log of the current service, or of the last one."""
        return self.home / "service.log"

    @property
    def pid(self) -> int:
        """Process id of the current service."""
        assert self.process is not None, "it was never started"
        return self.process.pid

    @property
    def state_dir(self) -> Path:
        """The folder of its state."""
        return self.home / "state"

    def start(self, *, workers: bool = True) -> "ServiceProcess":
        """Start it, at its former address if it had one, and wait until it serves, and until its
        `workers` do."""
        self.address = self.address or self._kept_address()
        arguments = ["serve", "--listen", self.address, "--state-dir", str(self.state_dir)]
        arguments += ["--pool", self.pool, *self.flags]
        if self.log.exists():
            self.log.rename(self.home / f"service.{self.starts}.log")
        self.starts += 1
        environment = {**child_environment(self.home), **self.environment}
        with self.log.open("wb") as sink:
            self.process = start(
                Command(
                    arguments=arguments,
                    environment=environment,
                    output=sink,
                    error=sink,
                    program=self.program,
                )
            )
        deadline_s = time.monotonic() + START_LIMIT_S
        while time.monotonic() < deadline_s and self.process.poll() is None:
            for line in self.log.read_text().splitlines():
                if line.startswith("serving at "):
                    self.address = line.split()[2]
                if line.startswith("serving with " if workers else "serving at "):
                    return self
            time.sleep(0.05)
        self._abort()
        raise AssertionError(f"the service did not start:\n{self.log.read_text()}")

    def _kept_address(self) -> str:
        """An address that is this service's also while it is down. A socket that is bound, and
        never listens, keeps the system from giving the port to another process, and lets the
        service listen on it."""
        kept = socket.socket()
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        kept.bind(("127.0.0.1", 0))
        weakref.finalize(self, kept.close)
        return f"127.0.0.1:{kept.getsockname()[1]}"

    def stop(self) -> None:
        """Send SIGTERM, as Kubernetes does; the service must then end by itself, and cleanly."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(timeout=STOP_LIMIT_S) == 0, self.log.read_text()

    def kill(self) -> None:
        """Send SIGKILL."""
        assert self.process is not None
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(timeout=STOP_LIMIT_S)

    def _abort(self) -> None:
        """Send SIGABRT: the log then ends with the stack of each thread."""
        assert self.process is not None
        self.process.send_signal(signal.SIGABRT)
        self.process.wait(timeout=STOP_LIMIT_S)

    def end(self) -> None:
        """Send SIGKILL to the service and all processes that it has started."""
        self.kill()
        end_family(self.home)

    def cli(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """`dataservice ARGUMENTS --service <this one>`."""
        return dataservice(*arguments, "--service", self.address, check=check)


def child_environment(home: Path) -> dict[str, str]:
    """The environment for processes of a service at `home`: it marks them as the service's, and
    lets them import the modules that its config names, whatever their working directory."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, "PYTHONFAULTHANDLER": "1", **mark(home)}


def dataservice(*arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run the command line in a separate process."""
    environment = {**os.environ, "COLUMNS": "200"}
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as error:
        process = start(
            Command(arguments=arguments, environment=environment, output=output, error=error)
        )
        try:
            returned = process.wait(timeout=COMMAND_LIMIT_S)
        finally:
            process.kill()
        output.seek(0)
        error.seek(0)
        printed, told = output.read().decode(), error.read().decode()
    assert not check or returned == 0, told
    return subprocess.CompletedProcess([PROGRAM, *arguments], returned, printed, told)
