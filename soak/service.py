"""`dataservice serve` as a process: started and stopped as an operator would, or killed."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from soak.processes import end_family, mark

ROOT = Path(__file__).resolve().parent.parent
START_LIMIT_S = 90.0
STOP_LIMIT_S = 30.0
COMMAND_LIMIT_S = 120.0


@dataclass
class ServiceProcess:
    """A service over a state folder of its own. `flags` are further ones of `serve`,
    `environment` is added to this process's own; `token` is shown by `cli`."""

    home: Path
    pool: str = "local"
    flags: tuple[str, ...] = ()
    address: str = ""
    environment: dict[str, str] = field(default_factory=dict)
    token: str | None = None
    process: subprocess.Popen[bytes] | None = None
    starts: int = 0

    @property
    def log(self) -> Path:
        """What the service that runs now, or ran last, has printed."""
        return self.home / "service.log"

    @property
    def pid(self) -> int:
        """The process that serves now."""
        assert self.process is not None, "it was never started"
        return self.process.pid

    @property
    def state_dir(self) -> Path:
        """Where its state lies."""
        return self.home / "state"

    def start(self) -> "ServiceProcess":
        """Start it, at the address it had before if any, and wait until it serves."""
        listen = self.address or "127.0.0.1:0"
        arguments = ["serve", "--listen", listen, "--state-dir", str(self.state_dir)]
        arguments += ["--pool", self.pool, *self.flags]
        if self.log.exists():
            self.log.rename(self.home / f"service.{self.starts}.log")
        self.starts += 1
        with self.log.open("wb") as sink:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "dataservice.cli.main", *arguments],
                stdout=sink,
                stderr=subprocess.STDOUT,
                env={**child_environment(self.home), **self.environment},
            )
        deadline_s = time.monotonic() + START_LIMIT_S
        while time.monotonic() < deadline_s and self.process.poll() is None:
            for line in self.log.read_text().splitlines():
                if line.startswith("serving at "):
                    self.address = line.split()[2]
                    return self
            time.sleep(0.05)
        self._abort()
        raise AssertionError(f"the service did not start:\n{self.log.read_text()}")

    def stop(self) -> None:
        """SIGTERM, as Kubernetes does; it must end by itself and cleanly."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(timeout=STOP_LIMIT_S) == 0, self.log.read_text()

    def kill(self) -> None:
        """SIGKILL: no goodbye."""
        assert self.process is not None
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(timeout=STOP_LIMIT_S)

    def _abort(self) -> None:
        """SIGABRT: the log then ends with where each thread stood."""
        assert self.process is not None
        self.process.send_signal(signal.SIGABRT)
        self.process.wait(timeout=STOP_LIMIT_S)

    def end(self) -> None:
        """SIGKILL to the service and to whatever came of it, wherever it is now."""
        self.kill()
        end_family(self.home)

    def cli(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """`dataservice ARGUMENTS --service <this one>`."""
        return dataservice(*arguments, "--service", self.address, check=check)


def child_environment(home: Path) -> dict[str, str]:
    """For processes of a service at `home`: marked as its own, and able to import what its
    config names from here, wherever they start."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, "PYTHONFAULTHANDLER": "1", **mark(home)}


def dataservice(*arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run the command line in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "dataservice.cli.main", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "COLUMNS": "200"},
        timeout=COMMAND_LIMIT_S,
    )
    assert not check or done.returncode == 0, done.stderr
    return done
