"""The demo's audit and tables: whether every promise was kept, and how much balancing gained."""

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from dataservice.core.cursor import Cursor
from dataservice.core.job_setup import JobSetup
from dataservice.core.plan import StepPlan
from dataservice.core.plan_options import PlanOptions, Strategy
from dataservice.core.sample import Modality
from dataservice.engine.planner import draw_step, plan_step
from dataservice.jobs.setup import job_records, open_job
from dataservice.planning.loads.problem import dist_ratio
from dataservice.planning.validate import validate_plan

RANKS = 4
WARM_STEPS = 3  # the first steps of a start wait for the pipeline to fill
STRATEGIES: dict[str, Strategy] = {
    "random batching": "random",
    "length grouping": "length_grouped",
    "packing only": "packing",
    "full plan": "full",
}


def open_demo(job_file: Path) -> JobSetup:
    """The demo's job, opened as the service opens it."""
    record = job_records(job_file.read_text(), str(job_file.parent))[0]
    return open_job(record, custom_processors={})


def steps_of_epoch(job_file: Path) -> int:
    """Number of steps of the job."""
    return sum(1 for _ in plans(open_demo(job_file)))


def plans(setup: JobSetup, options: PlanOptions | None = None) -> Iterable[StepPlan]:
    """The plan of every step, with the job's own options or with `options`."""
    setup = setup if options is None else replace(setup, options=options)
    topology = setup.topology(RANKS)
    cursor = Cursor()
    while (planned := plan_step(setup, cursor, topology)) is not None:
        yield planned.plan
        cursor = planned.next_cursor


def print_report(home: Path, job_file: Path, console: Console) -> list[str]:
    """Print the tables; returns the broken promises, an empty list when all held."""
    setup = open_demo(job_file)
    history = surviving_history(home / "train")
    rank0 = history[0]
    console.print(loss_table(rank0))
    console.print(strategy_table(setup))
    console.print(run_table(history))
    return [
        *audit_visits(setup, history),
        *audit_digests(setup, history),
        *audit_training(rank0),
        *audit_invariants(setup),
    ]


# ---- what was trained ---------------------------------------------------------------------

Row = dict[str, Any]


def surviving_history(folder: Path) -> dict[int, list[Row]]:
    """Rows of each rank along the surviving checkpoints: from its first step on, a later attempt's
    rows replace those of earlier attempts, since its checkpoint does not contain them."""
    history = {}
    for rank in range(RANKS):
        rows = [json.loads(line) for line in _whole_lines(folder / f"rank{rank}.jsonl")]
        first = {a: min(r["step"] for r in rows if r["attempt"] == a) for a in attempts(rows)}
        history[rank] = [
            row
            for row in rows
            if all(row["step"] < start for a, start in first.items() if a > row["attempt"])
        ]
    return history


def attempts(rows: list[Row]) -> list[int]:
    """The attempts that trained, in order."""
    return sorted({row["attempt"] for row in rows})


def _whole_lines(path: Path) -> list[str]:
    """The complete lines of a log: a killed rank may leave a partial last line, of a step that does
    not count."""
    return [line for line in path.read_text().splitlines() if line.endswith("}")]


# ---- audits -------------------------------------------------------------------------------


def audit_visits(setup: JobSetup, history: dict[int, list[Row]]) -> list[str]:
    """Every sample of the epoch was trained exactly once."""
    visits = Counter(s for rows in history.values() for row in rows for s in row["sample_ids"])
    lost = setup.catalog.samples - len(visits)
    twice = sum(1 for count in visits.values() if count > 1)
    return [f"{lost} samples were never trained, {twice} more than once"] if lost or twice else []


def audit_digests(setup: JobSetup, history: dict[int, list[Row]]) -> list[str]:
    """In every step, all ranks saw the same plan, and planning it again from scratch gives the
    same."""
    made_now = {plan.step: plan.digest for plan in plans(setup)}
    seen = {row["step"]: row["digest"] for row in history[0]}
    broken = [
        f"rank {rank} trained other plans than rank 0"
        for rank, rows in history.items()
        if {row["step"]: row["digest"] for row in rows} != seen
    ]
    if seen != made_now:
        broken.append("the plans trained are not the plans that the cursors give")
    return broken


def audit_training(rows: list[Row]) -> list[str]:
    """The loss fell, enough steps were trained, and degrees 1, 2 and 3 all occurred."""
    broken = []
    losses = [row["loss"] for row in rows]
    first, last = np.mean(losses[:5]), np.mean(losses[-5:])
    if not last < first:
        broken.append(f"the loss did not fall: {first:.3f} at first, {last:.3f} at last")
    if len(rows) < 30:
        broken.append(f"{len(rows)} steps were trained; the demo promises 30")
    degrees = {degree for row in rows for degree in row["degrees"]}
    if not {1, 2, 3} <= degrees:
        broken.append(f"CP degrees {sorted(degrees)} occurred; 1, 2 and 3 should")
    if len(attempts(rows)) < 2:
        broken.append("the training was not resumed by a second attempt")
    return broken


def audit_invariants(setup: JobSetup) -> list[str]:
    """Every invariant of the design that can be checked on plans holds in every step."""
    topology = setup.topology(RANKS)
    cursor = Cursor()
    while (drawn := draw_step(setup, cursor)) is not None:
        planned = plan_step(setup, cursor, topology)
        assert planned is not None
        validate_plan(
            planned.plan,
            memory_tokens=setup.options.memory_tokens,
            sample_count=len(drawn[0].sample_ids),
        )
        cursor = planned.next_cursor
    return []


# ---- tables -------------------------------------------------------------------------------


def loss_table(rows: list[Row]) -> Table:
    """The loss, averaged over sections of the run."""
    table = Table(title="loss")
    for name in ("steps", "attempts", "loss"):
        table.add_column(name, justify="right")
    for stretch in np.array_split(np.arange(len(rows)), 6):
        part = [rows[i] for i in stretch]
        table.add_row(
            f"{part[0]['step']}-{part[-1]['step']}",
            "-".join(str(a) for a in attempts(part)),
            f"{np.mean([row['loss'] for row in part]):.3f}",
        )
    return table


@dataclass(frozen=True, kw_only=True, slots=True)
class Balance:
    """One strategy's figures over all steps."""

    degrees: str
    predicted_s: float
    pad_ratio: float
    dist_llm: float
    dist_vision: float
    load_gap: float


def strategy_table(setup: JobSetup) -> Table:
    """The same steps under each strategy."""
    longest = int(setup.catalog.lengths(np.arange(setup.catalog.samples)).llm_tokens.max())
    table = Table(title="the same steps, predicted, under each strategy (means over steps)")
    names = ("strategy", "CP", "step s", "speed", "pad", "dist LLM", "dist vision", "load gap")
    for name in names:
        table.add_column(name, justify="left" if name == "strategy" else "right")
    base_s = 0.0
    for title, strategy in STRATEGIES.items():
        balance = balance_of(setup, strategy, longest)
        base_s = base_s or balance.predicted_s
        table.add_row(
            title,
            balance.degrees,
            f"{balance.predicted_s:.3f}",
            f"{base_s / balance.predicted_s:.2f}x",
            f"{balance.pad_ratio:.1%}",
            f"{balance.dist_llm:.3f}",
            f"{balance.dist_vision:.3f}",
            f"{balance.load_gap:.1%}",
        )
    return table


def balance_of(setup: JobSetup, strategy: Strategy, longest_tokens: int) -> Balance:
    """Plan every step with a strategy. A static degree must be large enough for the job's longest
    sample."""
    options = replace(setup.options, strategy=strategy)
    if options.stages.context == "static":
        options = replace(options, static_degree=options.static_degree_for(longest_tokens, RANKS))
    made = list(plans(setup, options))
    degrees = sorted({int(degree) for plan in made for degree in plan.pack_degree})
    return Balance(
        degrees=f"{degrees[0]}-{degrees[-1]}" if len(degrees) > 1 else str(degrees[0]),
        predicted_s=float(np.mean([plan.predicted_s for plan in made])),
        pad_ratio=float(np.mean([pad_of(plan, options) for plan in made])),
        dist_llm=float(np.mean([ratio for plan in made for ratio in llm_ratios(plan)])),
        dist_vision=float(np.mean([ratio for plan in made for ratio in vision_ratios(plan)])),
        load_gap=float(np.mean([load_gap(plan) for plan in made])),
    )


def pad_of(plan: StepPlan, options: PlanOptions) -> float:
    """Padding as a share of all tokens computed."""
    tokens = plan.sample_tokens.astype(np.int64)
    if options.stages.pack in ("padded", "padded_by_length"):
        pack = plan.pack_of_sample
        longest = np.zeros(plan.packs, dtype=np.int64)
        np.maximum.at(longest, pack, tokens)
        paid = int(longest[pack].sum())
    else:
        paid = int(plan.pack_tokens.sum())
    return 1.0 - int(tokens.sum()) / paid


def llm_ratios(plan: StepPlan) -> list[float]:
    """DistRatio of LLM tokens over replicas, for each wave."""
    held = np.zeros((plan.waves, plan.replicas))
    wave = np.repeat(plan.pack_wave, plan.pack_degree)
    share = np.repeat(plan.pack_tokens / plan.pack_degree, plan.pack_degree)
    held[wave, plan.pack_replicas] = share
    return [dist_ratio(tokens) for tokens in held]


def vision_ratios(plan: StepPlan) -> list[float]:
    """DistRatio of vision encoder tokens over replicas, for each wave that has any."""
    encoded = np.zeros((plan.waves, plan.replicas))
    chosen = plan.item_modality == Modality.VISION
    wave = plan.pack_wave[plan.pack_of_sample[plan.item_sample]]
    np.add.at(encoded, (wave[chosen], plan.item_replica[chosen]), plan.item_encoder_tokens[chosen])
    return [dist_ratio(tokens) for tokens in encoded if tokens.any()]


def load_gap(plan: StepPlan) -> float:
    """The extra time of the waves, relative to evenly spread work of the decoder."""
    slowest = np.zeros(plan.waves)
    np.maximum.at(slowest, plan.pack_wave, plan.pack_seconds)
    spread = float((plan.pack_seconds * plan.pack_degree).sum()) / plan.replicas
    return float(slowest.sum()) / spread - 1.0


def run_table(history: dict[int, list[Row]]) -> Table:
    """The run's measurements: visits, degrees, waiting for data."""
    rows = [row for rank_rows in history.values() for row in rank_rows]
    warm = [row for row in rows if _is_warm(row, history[0])]
    waited = sum(row["wait_s"] for row in warm) / sum(row["wait_s"] + row["step_s"] for row in warm)
    visits = Counter(s for row in rows for s in row["sample_ids"])
    degrees = Counter(d for row in history[0] for d in row["degrees"])
    table = Table(title="the run", show_header=False)
    table.add_row("steps along the surviving history", str(len(history[0])))
    table.add_row("attempts", str(len(attempts(rows))))
    table.add_row("samples trained", f"{len(visits)}, each {_times(visits)}")
    table.add_row("steps with CP degree", ", ".join(f"{d}: {degrees[d]}" for d in sorted(degrees)))
    table.add_row("mean step", f"{np.mean([row['step_s'] for row in warm]):.3f} s")
    table.add_row("waiting for data, share of step time", f"{waited:.2%}")
    return table


def _is_warm(row: Row, rank0: list[Row]) -> bool:
    first = min(r["step"] for r in rank0 if r["attempt"] == row["attempt"])
    return bool(row["step"] >= first + WARM_STEPS)


def _times(visits: Counter[int]) -> str:
    counts = sorted(set(visits.values()))
    return "exactly once" if counts == [1] else f"{counts} times"
