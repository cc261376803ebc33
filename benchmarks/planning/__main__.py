"""Every bar of the planner, measured: `python -m benchmarks.planning`.

python -m benchmarks.planning              everything, many minutes, and a results file
python -m benchmarks.planning --quick      everything on smaller inputs, some minutes
python -m benchmarks.planning --only plan  some rows (may be repeated)
"""

import argparse
import datetime
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from benchmarks.harness import FULL, QUICK, Row, Scale, hardware, slug
from benchmarks.planning import (
    adversarial,
    context,
    layout_allocation,
    layout_bubble_run,
    layout_bubbles,
    layout_stages,
    loads,
    nodes,
    packs,
    pipeline,
    speed,
    steps,
)
from benchmarks.planning.growth import grow, growth_to_text
from benchmarks.planning.papers.rebuilt import papers
from benchmarks.report import print_rows, rows_to_markdown, verdict, write_report
from dataservice.operate.freed_memory import keep_for_next_step
from dataservice.planning.layout.warm import warm_layouts
from dataservice.planning.warm import warm_up

RESULTS = Path(__file__).resolve().parents[1] / "results"

Measure = Callable[[Scale], list[Row]]
QUALITY: dict[str, Measure] = {
    "small": loads.small_cases,
    "lognormal": loads.lognormal_gaps,
    "tiles": loads.tile_gaps,
    "padded": loads.padded_batches,
    "packing": packs.packing,
    "degrees": context.degree_solver,
    "context": context.context_plans,
    "order": pipeline.microbatch_orders,
    "nodes": nodes.nodewise,
    "steps": steps.whole_steps,
    "dispatch": nodes.dispatch_gaps,
    "layout": layout_stages.layouts,
    "bubbles": layout_bubbles.bubbles,
    "broken": adversarial.broken_plans,
}
SPEED: dict[str, Measure] = {
    "plan": speed.whole_plans,
    "check": speed.structure_check,
    "solver": speed.degree_solver,
    "isf": speed.packers,
    "partition": speed.partition_rows,
    "order-speed": speed.orders,
    "layout-speed": layout_stages.layout_speed,
    "bubble-speed": layout_bubbles.bubble_speed,
    "hard": adversarial.hard_lengths,
    "allocation": layout_allocation.allocations,
    "bubble-run": layout_bubble_run.bubble_runs,
}
PAPERS: dict[str, Measure] = {"papers": papers}
GROWTH = "growth"
ELSEWHERE = ("bubble-run",)  # in processes of their own, whose processor time is not this one's


def main(arguments: list[str]) -> None:
    """Measure, print, and write the results of a full run. A missed bar is said, not an error:
    times depend on the machine."""
    options = _options(arguments)
    scale = QUICK if options.quick else FULL
    chosen = set(options.only or [*QUALITY, *SPEED, *PAPERS, GROWTH])
    console = Console()
    if not console.is_terminal:
        console.width = 140
    load_before = os.getloadavg()[0]
    console.print(f"{hardware()}; compiling kernels …")
    warm_up()
    warm_layouts()
    keep_for_next_step()  # as the service does, which plans step after step
    begin, used = time.perf_counter(), time.process_time()
    elsewhere_s = 0.0
    rows: list[Row] = []
    parts: list[str] = []
    for title, measures in (
        ("Speed", SPEED),
        ("Quality", QUALITY),
        ("Speed-ups of the papers", PAPERS),
    ):
        found: list[Row] = []
        for name in filter(chosen.__contains__, measures):
            began_s = time.perf_counter()
            found += measures[name](scale)
            elsewhere_s += time.perf_counter() - began_s if name in ELSEWHERE else 0.0
        if found:
            print_rows(console, title, found)
            parts.append(rows_to_markdown(title, found))
        rows += found
    if GROWTH in chosen:
        text = growth_to_text(grow(scale))
        console.print(text, markup=False, highlight=False)
        parts.append(f"## Growth\n\n```\n{text}\n```\n")
    took = time.perf_counter() - begin
    cores = (time.process_time() - used) / (took - elsewhere_s)
    console.print(verdict(rows), f"\n{took:.0f} s, {cores:.2f} cores to be had", markup=False)
    if options.output or not (options.quick or options.only):
        head = _head(options.date, load_before, cores, verdict(rows))
        name = f"planning_{slug(hardware())}_{options.date}"
        path = write_report(options.output or RESULTS, name, [head, *parts])
        console.print(f"written to {path}", highlight=False)


def _options(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.planning", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="smaller inputs, no results file")
    parser.add_argument(
        "--only",
        action="append",
        choices=[*QUALITY, *SPEED, *PAPERS, GROWTH],
        help="some rows only",
    )
    parser.add_argument("--output", type=Path, help="folder of the results file")
    parser.add_argument(
        "--date", default=datetime.date.today().isoformat(), help="date in the file's name"
    )
    return parser.parse_args(arguments)


def _head(date: str, load: float, cores: float, summary: str) -> str:
    return f"""# Planning, {date}

`python -m benchmarks.planning` on {hardware()}. Everything but `bubble-run` runs in one
thread, kernels compiled before. Times are processor time, what one core of its own takes, the best
of several rounds in which ours and the others take turns; the wall's time is in the explanation.
Load average {load:.1f} when it began, and {cores:.2f} cores were to be had: other work on the
machine makes wall times longer, and processor times a little. ×k: how many times ours the other
takes.
Papers' figures were taken on their authors' machines. Workloads are made by
`benchmarks/workloads.py`, others' methods by `benchmarks/rivals.py` and `benchmarks/exact.py`;
one row alone: `python -m benchmarks.planning --only GROUP`.

{summary}
"""


if __name__ == "__main__":
    main(sys.argv[1:])
