"""Predicted over measured seconds of a step's phases: the demo's model on two CPU cores.

    python -m benchmarks.measured [--out FILE]

Two ranks, each on a core of its own with one thread, over gloo. They measure the model as
`dataservice calibrate` does, fit the cost model with its functions, plan steps of other samples
with that cost, and train them by the runtime, half of them by plans that leave ranks waiting. For
each phase the table has the seconds that the evaluator predicts, those that the ranks report, and
the one over the other; bar: within 10 %, on the mean of ranks and steps.

A short calibration makes the plans. Then every round of a longer one is followed by one turn of all
steps, so that other work on the machine hits both alike, and its cost prices the plans again. Of a
phase's turns the low quantile counts, as of the calibration's repeats; waiting and the whole step
are those of the quickest quarter of the turns. `--clock wall` needs a machine without other work:
the load when it began and ended stands above the table. `--clock cpu` counts CPU seconds of the
ranks, in training and in measuring, so that other work shows less; it has no waiting, which takes
no CPU.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from itertools import product
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from benchmarks.harness import answer_of_ranks, hardware, judged
from benchmarks.planned_shards import Contents, shard_of
from dataservice.core.plan import StepPlan
from dataservice.core.plan_options import CostModel, PlanOptions, Strategy
from dataservice.core.sample import LengthTable, Modality
from dataservice.core.topology import Topology
from dataservice.engine.shards import cut_step
from dataservice.jobs.calibrate import MeasurementFile, calibrate
from dataservice.planning.compose import StepSamples, compose_step
from dataservice.planning.step_time import rank_seconds, step_seconds
from demo.model import MERGE, PATCH, ROW_SAMPLES, DemoModel, ModelConfig
from trainer_client.runtime import GroupPool, run_step
from trainer_client.runtime.clock import host_time
from trainer_client.runtime.measure import LOW_QUANTILE, measure, parser
from trainer_client.runtime.phases import PHASES, WAITING
from trainer_client.shard import Shard

RANKS = 2
BAR = 0.10
MEMORY_TOKENS = 1536
SAMPLES = 12
STRATEGIES: tuple[Strategy, ...] = ("full", "packing")
"""The second leaves encoders at home and packs as they come, so that ranks wait."""
LENGTHS = (96, 192, 384, 512, 768, 1024, 1536, 2048)
ITEM_TOKENS = (64, 128, 192, 256, 384, 512, 768, 1024)
WHOLE = "step"
FIRST_SEED = 1000
QUICKEST = 4  # one turn in so many counts for the whole step
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
FLAGS = ("repeats", "steps", "clock")
TIMEOUT_S = 300.0
TOPOLOGY = Topology(world_size=RANKS, replicas_meet="step")


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseRow:
    """Seconds of one phase a step, on the mean of ranks and steps; `median_s` of the median
    turn; `by_rank` is predicted over measured for each rank."""

    phase: str
    predicted_s: float
    measured_s: float
    median_s: float
    by_rank: tuple[float, ...]

    @property
    def ratio(self) -> float:
        """Predicted over measured."""
        return self.predicted_s / self.measured_s

    @property
    def is_met(self) -> bool:
        """Whether the ratio is within the bar."""
        return abs(self.ratio - 1) <= BAR


# ---- the samples ----------------------------------------------------------------------------


def make_samples(seed: int) -> tuple[StepSamples, list[Contents]]:
    """Text of long-tailed lengths with up to two pictures or recordings in it."""
    rng = np.random.default_rng(seed)
    held = [_sample(rng, k) for k in range(SAMPLES)]
    items = [item for sample in held for item in sample.items]
    per_row = {"vision": MERGE**2, "audio": ModelConfig().audio_pool}
    rows = np.array([_rows(name, value) for name, value, _ in items], np.int32)
    lengths = LengthTable(
        llm_tokens=np.array([len(s.ids) for s in held], np.int32),
        loss_tokens=np.array([int((s.labels != -100).sum()) for s in held], np.int32),
        item_offsets=np.cumsum([0, *(len(s.items) for s in held)]).astype(np.int64),
        item_modality=np.array([Modality[name.upper()] for name, *_ in items], np.int8),
        item_encoder_tokens=rows * np.array([per_row[name] for name, *_ in items], np.int32),
        item_llm_tokens=rows,
        item_position=np.array([position for *_, position in items], np.int32),
    )
    ids, epoch = np.arange(SAMPLES, dtype=np.int64), np.zeros(SAMPLES, np.int32)
    return StepSamples(sample_ids=ids, epoch=epoch, lengths=lengths), held


def _sample(rng: np.random.Generator, number: int) -> Contents:
    items, position = [], 2
    for _ in range(rng.integers(0, 3)):
        name, value = _picture(rng) if rng.random() < 0.6 else _recording(rng)
        items.append((name, value, position))
        position += _rows(name, value) + 1
    tokens = position + 8 + int(min(rng.lognormal(5.3, 0.8), 2 * MEMORY_TOKENS - 1500))
    ids = torch.from_numpy(rng.integers(0, ModelConfig().vocabulary, tokens))
    labels = ids.masked_fill(torch.from_numpy(rng.random(tokens) < 0.3), -100)
    return Contents(id=number, ids=ids, labels=labels, items=items)


def _picture(rng: np.random.Generator) -> tuple[str, torch.Tensor]:
    high, wide = (rng.integers(3, 14, 2) * PATCH * MERGE).tolist()
    return "vision", torch.from_numpy(rng.integers(0, 256, (1, high, wide, 3), dtype=np.uint8))


def _recording(rng: np.random.Generator) -> tuple[str, torch.Tensor]:
    rows = int(rng.integers(50, 500))
    values = rng.standard_normal(rows * ModelConfig().audio_pool * ROW_SAMPLES)
    return "audio", torch.from_numpy(values.astype(np.float32))


def _rows(name: str, value: torch.Tensor) -> int:
    """Feature rows of an item."""
    if name == "audio":
        return len(value) // (ModelConfig().audio_pool * ROW_SAMPLES)
    return value.shape[1] * value.shape[2] // (PATCH * MERGE) ** 2


# ---- one rank -------------------------------------------------------------------------------


def rank_main(options: argparse.Namespace) -> None:
    """Measure, fit, plan and train; the first rank writes the rows."""
    rank = int(os.environ["RANK"])
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_S))
    torch.manual_seed(0)
    model = DemoModel()
    with GroupPool(timeout_s=TIMEOUT_S) as pool, host_time(CLOCKS[options.clock]):
        first = calibrated(model, pool, 1)
        plans, shards = plan_steps(first, options.steps, rank)
        turns: list[NDArray[np.float64]] = []
        cost = calibrated(
            model,
            pool,
            options.repeats,
            after_round=lambda _: turns.append(train(model, pool, shards)),
        )
    plans = [priced(plan, cost) for plan in plans]
    spent = np.array(turns[1:])  # the first warms up
    if rank == 0:
        rows = list(compare(plans, spent, cost))
        said = {
            "rows": [asdict(row) for row in rows],
            "plans": in_words(plans),
            "cost": json.dumps(cost.to_dict()),
        }
        options.answer.write_text(json.dumps(said))
    dist.destroy_process_group()


def calibrated(
    model: DemoModel,
    pool: GroupPool,
    repeats: int,
    *,
    after_round: Callable[[int], None] = lambda number: None,
) -> CostModel:
    """The cost model of this machine, as `dataservice calibrate` fits it; the same on all ranks."""
    numbers = ("--lengths", *map(str, LENGTHS), "--item-tokens", *map(str, ITEM_TOKENS))
    path = ("--model", "demo.model:DemoModel", "--out", "nowhere", "--repeats", str(repeats))
    options = parser().parse_args([*path, *numbers])
    found = measure(model, pool, options, tell=_tell(pool), after_round=after_round)
    about = {"format": 1, "when": "", "model": "demo", "hardware": hardware(), "ranks": RANKS}
    made = calibrate(MeasurementFile.model_validate({**about, "measurements": found}))
    return made.file.cost.model


def _tell(pool: GroupPool) -> Callable[[str], None]:
    def tell(line: str) -> None:
        if pool.replica == 0 and "0/" in line:
            print(line, file=sys.stderr, flush=True)

    return tell


def plan_steps(cost: CostModel, steps: int, rank: int) -> tuple[list[StepPlan], list[Shard]]:
    """Every batch under every strategy: the plans, which the first rank makes, and this rank's
    shards."""
    batches = [make_samples(FIRST_SEED + seed) for seed in range(steps)]
    told: list[str | None] = [None] * (steps * len(STRATEGIES))
    if rank == 0:
        for step, ((samples, _), strategy) in enumerate(product(batches, STRATEGIES)):
            options = PlanOptions(memory_tokens=MEMORY_TOKENS, cost=cost, strategy=strategy)
            plan = compose_step(samples, step=step, topology=TOPOLOGY, options=options)
            told[step] = plan.to_json()
    dist.broadcast_object_list(told, src=0)
    plans = [StepPlan.from_json(text) for text in told if text is not None]
    held = [contents for _, contents in batches for _ in STRATEGIES]
    shards = [shard_of(cut_step(p), of, rank) for p, of in zip(plans, held, strict=True)]
    return plans, shards


def train(model: DemoModel, pool: GroupPool, shards: Sequence[Shard]) -> NDArray[np.float64]:
    """Seconds [steps, ranks, phases] of every step once."""
    spent = np.zeros((len(shards), RANKS, len(PHASES)))
    for step, shard in enumerate(shards):
        model.zero_grad()
        seconds = run_step(model, shard, pool).phase_s
        own = torch.tensor([seconds[phase] for phase in PHASES], dtype=torch.float64)
        spent[step] = torch.stack(pool.everyone.gather(own, action="collecting")).numpy()
    return spent


# ---- the comparison -------------------------------------------------------------------------


def compare(
    plans: Sequence[StepPlan], spent: NDArray[np.float64], cost: CostModel
) -> Iterator[PhaseRow]:
    """A row for each phase, and one for the whole step."""
    # [steps, ranks, phases]
    low = np.quantile(spent, LOW_QUANTILE, axis=0)
    count = max(1, len(spent) // QUICKEST)
    quickest = np.argsort(spent.sum(axis=3).mean(axis=2), axis=0)[:count]
    calm = np.take_along_axis(spent, quickest[:, :, None, None], axis=0).mean(axis=0)
    predicted = np.array([predicted_seconds(plan, cost) for plan in plans])
    for place, phase in enumerate(PHASES):
        found = calm if phase == WAITING else low
        yield _row(phase, predicted[..., place], found[..., place], spent[..., place])
    yield _row(WHOLE, predicted.sum(axis=2), calm.sum(axis=2), spent.sum(axis=3))


def _row(
    phase: str,
    predicted: NDArray[np.float64],
    measured: NDArray[np.float64],
    turns: NDArray[np.float64],
) -> PhaseRow:
    """From seconds [steps, ranks], and [turns, steps, ranks]."""
    return PhaseRow(
        phase=phase,
        predicted_s=float(predicted.mean()),
        measured_s=float(measured.mean()),
        median_s=float(np.median(turns, axis=0).mean()),
        by_rank=tuple((predicted.sum(axis=0) / measured.sum(axis=0)).tolist()),
    )


def priced(plan: StepPlan, cost: CostModel) -> StepPlan:
    """The same plan at another cost."""
    degrees = plan.pack_degree.tolist()
    seconds = [
        cost.llm.time_s(plan.sample_tokens[plan.samples_of(pack)], degree)
        for pack, degree in enumerate(degrees)
    ]
    again = replace(plan, pack_seconds=np.array(seconds))
    time = step_seconds(again, TOPOLOGY, cost)
    return replace(again, predicted_s=time.total_s, time=time)


def predicted_seconds(plan: StepPlan, cost: CostModel) -> NDArray[np.float64]:
    """Seconds [ranks, phases] as the evaluator has them."""
    assert plan.time is not None
    ranks = np.array(rank_seconds(plan, TOPOLOGY, cost))[:, 0].T
    waiting = plan.time.total_s - ranks.sum(axis=1)
    return np.column_stack([ranks, waiting])


def in_words(plans: Sequence[StepPlan]) -> str:
    """What was planned."""
    waves = [plan.waves for plan in plans]
    degrees = np.bincount(np.concatenate([plan.pack_degree for plan in plans]), minlength=3)
    return (
        f"{len(plans)} steps of {SAMPLES} samples, {min(waves)} to {max(waves)} waves, "
        f"{degrees[1]} packs on one rank and {degrees[2]} on both"
    )


def to_markdown(rows: Sequence[PhaseRow], about: str, clock: str) -> str:
    """The run as a results file."""
    lines = [
        "# Phases of a step: predicted over measured seconds",
        "",
        f"`python -m benchmarks.measured --clock {clock}` on {hardware()}, 2 ranks with a core "
        f"each, gloo. {about}.",
        "",
        "| phase | predicted | measured | ratio | bar | | by rank | median turn |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        by_rank = ", ".join(f"{ratio:.2f}" for ratio in row.by_rank)
        lines.append(
            f"| {row.phase} | {1e3 * row.predicted_s:.2f} ms | {1e3 * row.measured_s:.2f} ms "
            f"| {row.ratio:.3f} | ± {BAR:.0%} | {judged(row.is_met)} | {by_rank} "
            f"| {1e3 * row.median_s:.2f} ms |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Start the ranks, and print what the first of them found."""
    made = argparse.ArgumentParser(prog="python -m benchmarks.measured", description=__doc__)
    made.add_argument("--out", type=Path, help="write the table to this file too")
    made.add_argument("--repeats", type=int, default=8, help="rounds, and turns of each step")
    made.add_argument("--steps", type=int, default=4, help="batches")
    made.add_argument("--clock", choices=CLOCKS, default="wall")
    made.add_argument("--answer", type=Path, help=argparse.SUPPRESS)  # a rank's
    options = made.parse_args()
    load_before = os.getloadavg()[0]
    if options.answer is not None:
        rank_main(options)
        return
    numbers = [f"--{name}={getattr(options, name)}" for name in FLAGS]
    found = answer_of_ranks("benchmarks.measured", RANKS, *numbers)
    rows = [PhaseRow(**row) for row in found["rows"]]
    if options.clock == "cpu":
        rows = [row for row in rows if row.phase not in (WAITING, WHOLE)]
    loads = f"Load average {load_before:.1f} when it began, {os.getloadavg()[0]:.1f} when it ended"
    text = to_markdown(rows, f"{found['plans']}. {loads}", options.clock)
    print(text)
    print(found["cost"])
    if options.out:
        options.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
