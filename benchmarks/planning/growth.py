"""How planning time grows from 64 to 10,000 replicas, 60 samples a replica."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from benchmarks import workloads
from benchmarks.harness import Scale, bars, fitted_exponent, side_by_side
from dataservice.core.plan_options import PlanOptions
from dataservice.core.topology import Topology
from dataservice.planning import ContextCost, partition, plan_context_waves
from dataservice.planning.compose import compose_step
from dataservice.planning.context.many import find_many_waves

SAMPLES_PER_REPLICA = 60
# OrchMLLM, all overhead in milliseconds at 60 samples a GPU.
PAPER_MS = {64: 16.7, 128: 18.5, 256: 21.3, 512: 24.6, 1024: 31.4, 2560: 53.9}


@dataclass(frozen=True, kw_only=True, slots=True)
class Growth:
    """Milliseconds of one core that a planner takes at each number of replicas.

    `exponent` is fitted over all samples, `upper_exponent` over the upper half of the sizes;
    `reference` is what n·log n itself fits to. `note` says what bends the curve.
    """

    what: str
    replicas: tuple[int, ...]
    milliseconds: tuple[float, ...]
    exponent: float
    upper_exponent: float
    reference: float
    note: str
    paper_ms: tuple[float | None, ...] = ()

    @property
    def samples(self) -> tuple[int, ...]:
        return tuple(SAMPLES_PER_REPLICA * count for count in self.replicas)


def grow(scale: Scale) -> list[Growth]:
    """Whole plan, partition and context planning over the replicas of the scale."""
    return [
        _series(
            "whole plan (vlm-sft, every stage)",
            _whole_plan,
            scale,
            note="up to 8,192 samples several groupings of each wave are tried",
            paper=True,
        ),
        _series(
            "partition (vlm-sft, auto)",
            _partition,
            scale,
            note="below 16,384 items the certified gap aimed at is 20 times tighter",
        ),
        _series(
            "context waves, groupings tried (vlm-sft with documents)",
            _context,
            scale,
            note="below 20,000 samples more cuts into waves are tried",
        ),
        _series(
            "context waves in one pass (vlm-sft with documents)",
            _context_of_many,
            scale,
            note="what the whole plan takes beyond 8,192 samples",
        ),
    ]


def _series(
    what: str,
    prepare: Callable[[int], Callable[[], object]],
    scale: Scale,
    *,
    note: str,
    paper: bool = False,
) -> Growth:
    calls = {str(replicas): prepare(replicas) for replicas in scale.growth_replicas}
    best = side_by_side(calls, repeats=min(scale.repeats, 5), most_s=4.0)
    samples = SAMPLES_PER_REPLICA * np.array(scale.growth_replicas)
    seconds = [best[name].processor_s for name in calls]
    half = (len(seconds) - 1) // 2
    return Growth(
        what=what,
        replicas=scale.growth_replicas,
        milliseconds=tuple(1e3 * value for value in seconds),
        exponent=fitted_exponent(samples, seconds),
        upper_exponent=fitted_exponent(samples[half:], seconds[half:]),
        note=note,
        reference=fitted_exponent(samples, samples * np.log(samples)),
        paper_ms=tuple(PAPER_MS.get(count) for count in scale.growth_replicas) if paper else (),
    )


def _whole_plan(replicas: int) -> Callable[[], object]:
    step = workloads.step_samples(workloads.vlm_sft(SAMPLES_PER_REPLICA * replicas))
    topology = Topology(world_size=replicas, replicas_per_node=8)
    options = PlanOptions(memory_tokens=8192)
    return lambda: compose_step(step, step=0, topology=topology, options=options)


def _partition(replicas: int) -> Callable[[], object]:
    tokens = workloads.vlm_sft(SAMPLES_PER_REPLICA * replicas).llm_tokens
    costs = ContextCost.flexsp_7b().work_s(tokens)
    return lambda: partition(costs, replicas)


def _context(replicas: int) -> Callable[[], object]:
    tokens = workloads.vlm_long(SAMPLES_PER_REPLICA * replicas).llm_tokens
    return partial(plan_context_waves, tokens, **_machine(replicas))


def _context_of_many(replicas: int) -> Callable[[], object]:
    tokens = workloads.vlm_long(SAMPLES_PER_REPLICA * replicas).llm_tokens
    return partial(find_many_waves, tokens, **_machine(replicas))


def _machine(replicas: int) -> dict[str, Any]:
    return {
        "ranks": replicas,
        "memory_tokens": 32_768,
        "cost": ContextCost.flexsp_7b(),
        "ranks_per_node": 8,
    }


def growth_to_text(series: list[Growth]) -> str:
    """A table and a plot in characters for each series."""
    return "\n\n".join(_plot(growth) for growth in series)


def _plot(growth: Growth) -> str:
    """Bars are time over n·log n: level where growth is n·log n, falling where it is less."""
    samples = np.array(growth.samples, float)
    unit_ns = 1e6 * np.array(growth.milliseconds) / (samples * np.log2(samples))
    lines = [
        f"{growth.what}: time ~ n^{growth.exponent:.2f}, in the upper half of the sizes "
        f"n^{growth.upper_exponent:.2f}; n·log n itself fits n^{growth.reference:.2f}",
        f"({growth.note})",
        f"{'replicas':>9} {'samples':>9} {'ms':>9} {'paper ms':>9}  ns per sample and log2 n",
    ]
    papers = growth.paper_ms or (None,) * len(growth.replicas)
    for count, n, took, paper, each, bar in zip(
        growth.replicas, growth.samples, growth.milliseconds, papers, unit_ns, bars(unit_ns),
        strict=True,
    ):  # fmt: skip
        published = f"{paper:.1f}" if paper else ""
        lines.append(f"{count:>9,} {n:>9,} {took:>9.2f} {published:>9}  {each:6.1f} {bar}")
    return "\n".join(lines)
