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

from collections.abc import Mapping

import numpy as np

from benchmarks.harness import QUICK, Peer, Row, Scale, answer_of_ranks

RANK = "benchmarks.planning.layout_bubble_rank"  # apart, as it loads torch
STAGES, MICROBATCHES = 2, 4
TURNS, QUICK_TURNS = 400, 60


def bubble_runs(scale: Scale) -> list[Row]:
    """The quickest step of every way, as a part of the step in bubbles."""
    turns = QUICK_TURNS if scale is QUICK else TURNS
    found = answer_of_ranks(RANK, STAGES, "--turns", str(turns))
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
