"""Finds the processes of a service: its workers, their decoders, and Ray.

A service and all processes that it starts carry a mark of its home in their environment, so that
even a process that outlives its parents can be recognised as the service's.
"""

import contextlib
import os
import signal
import time
from pathlib import Path

import psutil

MARK = "SOAK_HOME"
WORKER_TITLE = "WorkerProcess"
NURSERY_PROGRAM = "dataservice.workers.nursery_program"
END_LIMIT_S = 20.0


def mark(home: Path) -> dict[str, str]:
    """The environment that marks a service's processes."""
    return {MARK: str(home)}


def family(home: Path) -> list[psutil.Process]:
    """Every living process that bears the mark of `home`, or descends from one that does."""
    parents: dict[int, int] = {}
    living: dict[int, psutil.Process] = {}
    marked = set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.status() == psutil.STATUS_ZOMBIE:
                continue
            parents[process.pid] = process.ppid()
            living[process.pid] = process
            if process.environ().get(MARK) == str(home):
                marked.add(process.pid)

    def belongs(pid: int | None) -> bool:
        while pid in parents:
            if pid in marked:
                return True
            pid = parents[pid]
        return False

    return [living[pid] for pid in sorted(living) if belongs(pid)]


def workers(home: Path) -> list[psutil.Process]:
    """The processes of Ray actors that serve packs."""
    return [process for process in family(home) if WORKER_TITLE in title(process)]


def decoders(home: Path) -> list[psutil.Process]:
    """The decoder processes: each is forked by a nursery, and has a name of its own."""
    return named(home, "decoder")


def nurseries(home: Path) -> list[psutil.Process]:
    """The processes that have forked decoders: of a pool of Ray, one per worker."""
    forking = set()
    for decoder in decoders(home):
        with contextlib.suppress(psutil.Error):
            forking.add(decoder.ppid())
    return [process for process in family(home) if process.pid in forking]


def named(home: Path, name: str) -> list[psutil.Process]:
    """The processes that bear this name, as those that a nursery forks do."""
    found = []
    for process in family(home):
        with contextlib.suppress(psutil.Error):  # it may end while it is looked at
            if process.name() == name:
                found.append(process)
    return found


def send(process: psutil.Process, number: signal.Signals) -> bool:
    """Signal a process; False when it is gone."""
    try:
        os.kill(process.pid, number)
    except ProcessLookupError:
        return False
    return True


def end_family(home: Path) -> None:
    """Send SIGKILL to the family's remaining processes until none is left."""
    deadline_s = time.monotonic() + END_LIMIT_S
    while left := family(home):
        assert time.monotonic() < deadline_s, f"these do not end: {left}"
        for process in left:
            send(process, signal.SIGKILL)
        time.sleep(0.05)


def title(process: psutil.Process) -> str:
    """Its command line."""
    with contextlib.suppress(psutil.Error):
        return " ".join(process.cmdline()) or process.name()
    return "?"
