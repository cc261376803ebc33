"""A step with its encoders in the bubbles of the pipeline, beside the same step without: measured.

    python -m benchmarks.planning --only bubble-run

Two stages, each a process on a core of its own with one thread, over gloo, train the demo's model.
Layers are timed in steps that warm up; `schedule_bubbles` makes a schedule of those seconds, and
its list of actions is what the stages run. In every turn each way runs once, in an order that
changes from turn to turn, so that other work on the machine hits all alike. The quickest turn of a
way counts, since other work only adds time; medians stand beside. A step is whole: comparing plans
and summing gradients, those of encoders over the stages among them, count.

first    encoders in the first chunk, as without any layout
around   encoders over both stages, before the pipeline fills and after it drains
bubbles  the planner's list
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import QUICK, Peer, Row, Scale

RANK = "benchmarks.planning.layout_bubble_rank"  # apart, as it loads torch
STAGES, MICROBATCHES = 2, 4
TURNS, QUICK_TURNS = 400, 60


def bubble_runs(scale: Scale) -> list[Row]:
    """The quickest step of every way, as a part of the step in bubbles."""
    found = measured(QUICK_TURNS if scale is QUICK else TURNS)
    least = {way: min(seconds) for way, seconds in found["seconds"].items()}
    median = {way: float(np.median(seconds)) for way, seconds in found["seconds"].items()}
    explanation = (
        f"2 stages, a core each, {MICROBATCHES} microbatches; simulated from the measured seconds "
        f"of actions {found['simulated']['bubbles']:.3g} s and {found['simulated']['around']:.3g} "
        f"s around; medians {_listed(median)}"
    )
    return [
        Row(
            group="bubble-run",
            what=f"a measured step with encoders in bubbles, over one with encoders {where}",
            figure=least["bubbles"] / least[way],
            unit="×",
            limit=1.0,
            peers=(Peer(name="by medians", figure=median["bubbles"] / median[way]),),
            explanation=f"{_listed(least)}; {explanation}",
        )
        for way, where in (("first", "on the first stage"), ("around", "around the pipeline"))
    ]


def _listed(seconds: Mapping[str, float]) -> str:
    return ", ".join(f"{way} {1e3 * each:.1f} ms" for way, each in seconds.items())


def measured(turns: int) -> dict[str, Any]:
    """Seconds of the turns of each way, and what is simulated; by processes of its own."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(STAGES)]
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        ranks = ["-m", RANK, "--answer", str(answer), "--turns", str(turns)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run([sys.executable, *torchrun, *ranks], check=True, env=environment)
        found: dict[str, Any] = json.loads(answer.read_text())
    return found
