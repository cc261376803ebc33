"""Runs a loader, and counts the seconds of the processor of all its processes in steady state."""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import yaml

from soak.processes import END_LIMIT_S, NURSERY_PROGRAM, WORKER_TITLE, family, title
from soak.service import ROOT, ServiceProcess, child_environment, dataservice

ROLES = {
    NURSERY_PROGRAM: "decoders",
    WORKER_TITLE: "workers",
    "cli.main serve": "coordinator",
    "benchmarks.data.programs": "client",
}


@dataclass(frozen=True, kw_only=True)
class Span:
    """A run in steady state: pictures delivered, seconds on the wall, and seconds of the processor
    by role."""

    pictures: int
    wall_s: float
    cpu_s: dict[str, float] = field(default_factory=dict)

    @property
    def cpu_ms(self) -> float:
        """Milliseconds of the processor a picture."""
        return 1000 * sum(self.cpu_s.values()) / self.pictures

    @property
    def pictures_per_s(self) -> float:
        """Delivered on this machine's cores."""
        return self.pictures / self.wall_s

    def role_ms(self, role: str) -> float:
        """Milliseconds a picture of one role's processes."""
        return 1000 * self.cpu_s.get(role, 0.0) / self.pictures


def measured(home: Path, command: Sequence[str], *, warm: int, pictures: int) -> Span:
    """Run a program that prints how many pictures it has delivered. What it does up to `warm` of
    them is not counted; then `pictures` are. The program is ended, not what it started."""
    with delivered_until(home, command) as until:
        begun = until(warm)
        before, began_s = _cpu(home), time.monotonic()
        ended = until(begun + pictures)
        wall_s, after = time.monotonic() - began_s, _cpu(home)
    spent = {role: after[role] - before.get(role, 0.0) for role in after}
    return Span(pictures=ended - begun, wall_s=wall_s, cpu_s=spent)


@contextmanager
def delivered_until(home: Path, command: Sequence[str]) -> Iterator[Callable[[int], int]]:
    """Run such a program: what is given waits until it has delivered so many, and says how many."""
    own = home / f"run-{time.monotonic_ns()}"
    own.mkdir()
    log = (own / "log").open("wb")
    with log, subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=log, text=True, cwd=ROOT,
        env=child_environment(home),
    ) as process:  # fmt: skip
        try:
            assert process.stdout is not None
            counts = map(int, process.stdout)
            yield lambda wanted: _reached(counts, wanted, own)
        finally:
            process.terminate()  # Streaming removes what it has in shared memory
            try:
                process.wait(END_LIMIT_S)
            except subprocess.TimeoutExpired:
                process.kill()


def _reached(counts: Iterator[int], wanted: int, own: Path) -> int:
    for count in counts:
        if count >= wanted:
            return count
    raise RuntimeError(f"the program ended early:\n{(own / 'log').read_text()[-3000:]}")


def _cpu(home: Path) -> dict[str, float]:
    """Seconds of the processor of the family of `home`, by role."""
    spent: dict[str, float] = {}
    for process in family(home):
        try:
            role = role_of(title(process))
            times = process.cpu_times()
        except psutil.Error:
            continue
        own = times.user + times.system + times.children_user + times.children_system
        spent[role] = spent.get(role, 0.0) + own
    return spent


def role_of(command: str) -> str:
    """Whose process one of this command line is."""
    return next((role for part, role in ROLES.items() if part in command), "others")


@contextmanager
def service_over(
    home: Path, *, pool: str, workers: int, config: Path | None = None
) -> Iterator[ServiceProcess]:
    """This service with `workers` of one slot, and the job over the pictures of `home`."""
    flags: tuple[str, ...] = ("--workers", str(workers), "--slots-per-worker", "1")
    flags += ("--config", str(config)) if config else ()
    service = ServiceProcess(home=home, pool=pool, flags=flags).start()
    try:
        job = home / "job.yaml"
        if not (home / yaml.safe_load(job.read_text())["index"]).exists():
            dataservice("index", str(job))
        service.cli("job", "submit", str(job))
        (home / "address").write_text(service.address)
        (home / "job").write_text("pictures")
        yield service
    finally:
        try:
            service.stop()  # it removes its temporary files
        finally:
            service.end()


def environment(cache: Path, packages: Sequence[str]) -> Path | None:
    """The Python of a virtual environment with these packages, made once; None where they do not
    install."""
    folder = cache / packages[0].split("=")[0]
    python = folder / "bin" / "python"
    made = folder / "installed.json"
    if made.exists() and json.loads(made.read_text()) == list(packages):
        return python
    install = [str(python), "-m", "pip", "install", "--quiet", *packages]
    for command in ([sys.executable, "-m", "venv", "--clear", str(folder)], install):
        if subprocess.run(command, check=False).returncode:
            return None
    made.write_text(json.dumps(list(packages)))
    return python
