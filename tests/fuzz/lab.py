"""Runs cases in a process of its own and watches it: crashes, hangs, memory.

A case is a task's name and its input. The process tells the number of the case it is about to
try, so that one which kills it is known; the next process goes on behind it.
"""

import contextlib
import importlib
import os
import resource
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.sharedctypes import Synchronized
from typing import Any, Literal

from tests.forking import forking

MIB = 2**20
# Far above what a case may take, and below what would disturb the machine.
PROCESS_LIMIT_BYTES = 6 * 2**30
_POLL_S = 0.05
_SILENCE_LIMIT_S = 170.0

Verdict = Literal["fine", "refused", "wrong", "crashed", "hung"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """`verdict` fine: it worked and its oracle held; refused: a deliberate error. `said` is the
    error, or what was wrong; `peak_bytes` is memory above that before the case."""

    verdict: Verdict
    said: str = ""
    peak_bytes: int = 0

    @property
    def bad(self) -> bool:
        return self.verdict not in ("fine", "refused")


def run_cases(
    task: str, cases: Sequence[Any], *, cpu_limit_s: float = 20.0, setting: object = None
) -> list[Outcome]:
    """The outcome of every case of `module:function`, called as function(setting)(case). The
    first call may take its time; a case that computes for longer than the limit has hung."""
    outcomes: list[Outcome] = []
    while len(outcomes) < len(cases):
        outcomes += _run_until_death(task, cases[len(outcomes) :], cpu_limit_s, setting)
    return outcomes


def _run_until_death(
    task: str, cases: Sequence[Any], cpu_limit_s: float, setting: object
) -> list[Outcome]:
    context = forking()
    ours, theirs = context.Pipe()
    begun = context.Value("q", -1)
    process = context.Process(target=_serve, args=(theirs, begun, task, cases, setting))
    process.start()
    theirs.close()
    outcomes: list[Outcome] = []
    verdict: Verdict = "crashed"
    watch = _Watch(process.pid or 0, cpu_limit_s)
    try:
        while len(outcomes) < len(cases):
            if not ours.poll(_POLL_S):
                if begun.value >= 0 and watch.is_hung(begun.value):
                    verdict = "hung"
                    break
                continue
            outcomes += ours.recv()
    except EOFError:
        pass
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid or 0, signal.SIGKILL)
        process.join()
        ours.close()
    if len(outcomes) < len(cases):
        if begun.value < 0:
            raise RuntimeError(f"{task} could not begin; see its traceback above")
        lost = begun.value - len(outcomes)  # finished, and not told in time
        outcomes += [Outcome(verdict="fine", said="told nobody")] * lost
        outcomes.append(Outcome(verdict=verdict, said=f"exit code {process.exitcode}"))
    return outcomes


class _Watch:
    """Seconds of computing since a case began: a busy machine makes nothing hang."""

    def __init__(self, process_id: int, cpu_limit_s: float) -> None:
        self._stat = f"/proc/{process_id}/stat"
        self._limit_s = cpu_limit_s
        self._case = -1
        self._since = (0.0, 0.0)

    def is_hung(self, case: int) -> bool:
        try:
            with open(self._stat) as stream:
                fields = stream.read().rpartition(")")[2].split()
        except OSError:
            return False
        cpu_s = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        if case != self._case:
            self._case, self._since = case, (cpu_s, time.monotonic())
        computing, silent = cpu_s - self._since[0], time.monotonic() - self._since[1]
        return computing > self._limit_s or silent > _SILENCE_LIMIT_S


# ---- in the process -----------------------------------------------------------------------


def _serve(
    pipe: Connection,
    begun: "Synchronized[int]",
    task: str,
    cases: Sequence[Any],
    setting: object,
) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_DATA, (PROCESS_LIMIT_BYTES, PROCESS_LIMIT_BYTES))
    module, _, name = task.partition(":")
    attempt: Callable[[Any], str | None] = getattr(importlib.import_module(module), name)(setting)
    outcomes: list[Outcome] = []
    told_s = time.monotonic()
    for number, case in enumerate(cases):
        begun.value = number
        outcomes.append(_tried(attempt, case))
        if time.monotonic() - told_s > _POLL_S or outcomes[-1].bad:
            pipe.send(outcomes)
            outcomes, told_s = [], time.monotonic()
    pipe.send(outcomes)


def _tried(attempt: Callable[[Any], str | None], case: Any) -> Outcome:
    verdict: Verdict = "fine"
    said = ""
    with _peak() as peak:
        try:
            refusal = attempt(case)
            if refusal is not None:
                verdict, said = "refused", refusal
        except Exception:
            verdict, said = "wrong", traceback.format_exc()[-4000:]
    return Outcome(verdict=verdict, said=said, peak_bytes=peak[0])


@contextlib.contextmanager
def _peak() -> Iterator[list[int]]:
    """Most memory that was resident during the body, above that before it."""
    with open("/proc/self/clear_refs", "w") as stream:
        stream.write("5")
    before = _status("VmRSS")
    peak = [0]
    yield peak
    peak[0] = _status("VmHWM") - before


def _status(name: str) -> int:
    with open("/proc/self/status") as stream:
        line = next(line for line in stream if line.startswith(name))
    return int(line.split()[1]) * 1024
