"""What every benchmark shares: a row, best-of-k timing side by side, hardware, fitted growth."""

import gc
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

_TURN_S = 2e-3


@dataclass(frozen=True, kw_only=True, slots=True)
class Peer:
    """The same work done by another: `figure` in the row's unit, on the same input."""

    name: str
    figure: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One figure against its bar.

    `what` names workload, n and ranks; `group` is what `--only` of the planner's program takes to
    run it again. `limit` is the bar in the figure's unit (None: no bar was set), an upper one
    unless `at_least`.
    `paper` is a published figure, from other hardware.
    """

    group: str
    what: str
    figure: float
    unit: str
    limit: float | None = None
    at_least: bool = False
    peers: tuple[Peer, ...] = ()
    paper: str = ""
    explanation: str = ""

    @property
    def met(self) -> bool | None:
        """Whether the figure is within its bar; None without one."""
        if self.limit is None:
            return None
        return self.figure >= self.limit if self.at_least else self.figure <= self.limit

    @property
    def bar(self) -> str:
        """The bar in words."""
        if self.limit is None:
            return "–"
        return f"{'≥' if self.at_least else '≤'} {written(self.limit, self.unit)}"

    def peer_text(self, peer: Peer) -> str:
        """A peer's figure; for times also how many times ours it is."""
        text = f"{peer.name} {written(peer.figure, self.unit)}"
        if self.unit in ("ms", "s") and self.figure > 0:
            ratio = peer.figure / self.figure
            text += f" (×{ratio:,.0f})" if ratio >= 100 else f" (×{ratio:.2g})"
        return text


def judged(met: bool | None) -> str:
    """The verdict on a bar in words; a dash where there is none."""
    return "–" if met is None else "met" if met else "NOT MET"


def written(value: float, unit: str) -> str:
    """A figure with three significant digits and its unit."""
    if value == 0 or (float(value).is_integer() and abs(value) < 1e6):
        text = f"{value:.0f}"
    elif abs(value) < 1e-4:
        text = f"{value:.1e}"
    else:
        digits = max(0, 2 - int(np.floor(np.log10(abs(value)))))
        text = f"{value:.{digits}f}"
    return f"{text} {unit}".rstrip()


@dataclass(frozen=True, kw_only=True, slots=True)
class Scale:
    """How much work a run does. `cases` random small cases, of which `exact_cases` also go to an
    exact solver; `seeds` per averaged figure; `repeats` per timing; sizes of the large runs."""

    cases: int
    exact_cases: int
    seeds: int
    repeats: int
    packing_samples: int
    isf_samples: int
    growth_replicas: tuple[int, ...]


FULL = Scale(
    cases=500,
    exact_cases=30,
    seeds=16,
    repeats=15,
    packing_samples=300_000,
    isf_samples=1_200_000,
    growth_replicas=(64, 128, 256, 512, 1024, 2560, 5000, 10_000),
)
QUICK = Scale(
    cases=60,
    exact_cases=4,
    seeds=3,
    repeats=4,
    packing_samples=60_000,
    isf_samples=1_200_000,
    growth_replicas=(64, 256, 1024, 2560),
)
TINY = Scale(
    cases=8,
    exact_cases=1,
    seeds=1,
    repeats=1,
    packing_samples=20_000,
    isf_samples=4_000,
    growth_replicas=(8, 16),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """Best seconds of one call: of the processor, and by the clock on the wall."""

    processor_s: float = np.inf
    wall_s: float = np.inf


def side_by_side(
    calls: Mapping[str, Callable[[], object]], *, repeats: int, most_s: float = 3.0
) -> dict[str, Timing]:
    """Best of each call over `repeats` rounds, the calls taking turns in each round.

    Taking turns lets a busy moment of the machine hit all alike. A call that has used `most_s`
    in all is left out of further rounds. Where there are more rounds than one, one comes before
    that only warms up: kernels that only a rival or one workload needs are compiled in it.
    """
    best = dict.fromkeys(calls, Timing())
    spent = dict.fromkeys(calls, 0.0)
    with no_collection():
        if repeats > 1:
            for call in calls.values():
                call()
        for _ in range(repeats):
            for name, call in calls.items():
                if spent[name] < most_s:
                    took, turn_s = _turn(call)
                    best[name] = _better(best[name], took)
                    spent[name] += turn_s
    return best


def _turn(call: Callable[[], object]) -> tuple[Timing, float]:
    """The best of as many calls as fit in two milliseconds, at least one; and the turn's length.

    What the call before left in the caches would otherwise decide how long a short one takes.
    """
    best = Timing()
    begin = now = time.perf_counter()
    while now == begin or now - begin < _TURN_S:
        wall, used = time.perf_counter(), time.process_time()
        call()
        took = Timing(processor_s=time.process_time() - used, wall_s=time.perf_counter() - wall)
        best = _better(best, took)
        now = time.perf_counter()
    return best, now - begin


def _better(one: Timing, other: Timing) -> Timing:
    return Timing(
        processor_s=min(one.processor_s, other.processor_s), wall_s=min(one.wall_s, other.wall_s)
    )


@contextmanager
def no_collection() -> Iterator[None]:
    """No garbage collection inside: it would land on whoever happens to run."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def timed_row(
    calls: Mapping[str, Callable[[], object]],
    *,
    group: str,
    what: str,
    limit: float | None,
    repeats: int,
    paper: str = "",
    explanation: str = "",
) -> Row:
    """A row in milliseconds of one core: the first call is ours, the others are its peers.

    Processor time is what a core of its own would take, also when other work keeps the machine
    busy: everything timed here computes in one thread and waits for nothing. The wall's time
    stands in the explanation.
    """
    best = side_by_side(calls, repeats=repeats)
    ours, *others = best
    return Row(
        group=group,
        what=what,
        figure=1e3 * best[ours].processor_s,
        unit="ms",
        limit=limit,
        peers=tuple(Peer(name=name, figure=1e3 * best[name].processor_s) for name in others),
        paper=paper,
        explanation=f"{explanation} Wall: {written(1e3 * best[ours].wall_s, 'ms')}.".strip(),
    )


def hardware() -> str:
    """Processor and number of cores, as the system names them."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
        if names:
            model = names[0].split(":", 1)[1].strip()
    return f"{model}, {os.cpu_count()} cores"


def slug(text: str) -> str:
    """For file names: lower case, words joined by dashes."""
    kept = "".join(c if c.isalnum() else " " for c in text.lower())
    return "-".join(kept.split())


def fitted_exponent(sizes: ArrayLike, seconds: ArrayLike) -> float:
    """Slope of log seconds over log size, by least squares: 1 is linear."""
    slope, _ = np.polyfit(np.log(np.asarray(sizes, float)), np.log(np.asarray(seconds, float)), 1)
    return float(slope)


def bars(values: ArrayLike, width: int = 28) -> list[str]:
    """Each value as a bar, the largest `width` characters long."""
    heights = np.asarray(values, float)
    return ["█" * max(1, round(width * value / heights.max())) for value in heights]


def answer_of_ranks(module: str, ranks: int, *arguments: str) -> dict[str, Any]:
    """What a module's first rank writes to its `--answer`. torchrun starts the ranks, each with one
    thread."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        subprocess.run(
            [sys.executable, *torchrun, "-m", module, "--answer", str(answer), *arguments],
            check=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        found: dict[str, Any] = json.loads(answer.read_text())
    return found


def publish(text: str, out: Path | None) -> None:
    """Print a table, and write it to a file if one is given."""
    print(text)
    if out is not None:
        out.write_text(text, encoding="utf-8")
