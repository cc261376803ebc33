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
DECODER_PROGRAM = "dataservice.workers.nursery_program decoder"
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
    """The decoder processes: each is forked by a nursery, which runs the same program."""
    running = _decoder_programs(home)
    return [process for process in running.values() if _parent(process) in running]


def nurseries(home: Path) -> list[psutil.Process]:
    """The processes that fork decoders, one per worker."""
    running = _decoder_programs(home)
    return [process for process in running.values() if _parent(process) not in running]


def _decoder_programs(home: Path) -> dict[int, psutil.Process]:
    return {p.pid: p for p in family(home) if DECODER_PROGRAM in title(p)}


def _parent(process: psutil.Process) -> int:
    with contextlib.suppress(psutil.Error):
        return int(process.ppid())
    return 0


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
