"""How long planning takes: every bar of speed, on one core, kernels compiled, best of several.

Peers do the same work on the same input and take turns with ours. Papers' figures come from their
own machines and are printed as such, never as a ratio.
"""

from collections.abc import Callable
from dataclasses import asdict
from functools import partial

import numpy as np
import prtpy  # type: ignore[import-untyped]

from benchmarks import exact, rivals, workloads
from benchmarks.harness import Row, Scale, side_by_side, timed_row
from benchmarks.planning.context import machine
from benchmarks.planning.loads import PRTPY, prtpy_max
from dataservice.core.plan_options import PlanOptions
from dataservice.core.topology import Topology
from dataservice.planning import isf_limits, order_microbatches, pack_bfd, pack_isf, partition
from dataservice.planning.compose import compose_step
from dataservice.planning.context.degrees import degrees_by_dp, degrees_by_threshold
from dataservice.planning.validate import check_plan

FIRST_FIT_SAMPLES = 200_000  # looks at every open bin: quadratic within its groups of 100,000


def whole_plans(scale: Scale) -> list[Row]:
    """A whole step: draw order in, `StepPlan` out, every stage on, encoders dispatched."""
    rows = []
    for mix, samples, replicas, memory_tokens, limit, paper in (
        (workloads.vlm_sft, 153_600, 2560, 8192, 30.0, "OrchMLLM 53.9 ms, all overhead"),
        (workloads.vlm_long, 153_600, 2560, 32_768, 40.0, ""),
        (workloads.video, 153_600, 2560, 8192, 60.0, ""),
        (workloads.vlm_long, 512, 64, 32_768, 5.0, "DHP 921 ms, all scheduling"),
        (workloads.vlm_sft, 512, 64, 8192, 5.0, ""),
    ):
        workload = mix(samples, 0)
        step = workloads.step_samples(workload)
        options = PlanOptions(memory_tokens=memory_tokens)
        topology = Topology(world_size=replicas, replicas_per_node=8)
        plan = compose_step(step, step=0, topology=topology, options=options)
        gaps = ", ".join(
            f"{stage.stage} {100 * stage.gap:.2f} %"
            for stage in plan.stages
            if stage.stage in ("group", "dispatch vision")
        )
        rows.append(
            timed_row(
                {"whole": partial(compose_step, step, step=0, topology=topology, options=options)},
                group="plan",
                what=f"whole plan, {workload.name}, {samples:,} samples, {replicas:,} replicas of "
                f"{memory_tokens:,} tokens, 8 a node, CP on",
                limit=limit,
                repeats=scale.repeats,
                paper=paper,
                explanation=f"Waves: {plan.waves}, packs: {plan.packs:,}; over the lower bound: "
                f"{gaps}.",
            )
        )
    return rows


def structure_check(scale: Scale) -> list[Row]:
    """The check of a plan's structure, which every plan goes through when it is made."""
    samples, replicas, memory_tokens = 153_600, 2560, 8192
    workload = workloads.vlm_sft(samples, 0)
    plan = compose_step(
        workloads.step_samples(workload),
        step=0,
        topology=Topology(world_size=replicas, replicas_per_node=8),
        options=PlanOptions(memory_tokens=memory_tokens),
    )
    checking = partial(check_plan, plan, memory_tokens=memory_tokens, sample_count=samples)
    return [
        timed_row(
            {"check_plan": checking},
            group="check",
            what=f"structure check of a plan, {workload.name}, {samples:,} samples, "
            f"{replicas:,} replicas",
            limit=1.0,
            repeats=scale.repeats,
            explanation=f"{plan.packs:,} packs in {plan.waves} waves, {len(plan.item_replica):,} "
            "items: every sample once, no replica twice a wave, memory, every item on a replica.",
        )
    ]


def degree_solver(scale: Scale) -> list[Row]:
    """Degrees of given groups alone, at DHP's size and at one where O(groups·N²) tells."""
    mix = workloads.vlm_long(512)
    setting = machine(16_384)
    groups, least = rivals.dhp_groups(mix.llm_tokens, ranks=64, memory_tokens=16_384)
    table = rivals.degree_table(
        mix.llm_tokens,
        groups,
        least,
        ranks=64,
        cost=setting["cost"],
        ranks_per_node=setting["ranks_per_node"],
    )
    small: dict[str, Callable[[], object]] = {
        "threshold": partial(degrees_by_threshold, table, ranks=64),
        "2D-DP, compiled": partial(degrees_by_dp, table, ranks=64),
        "scipy's integer program": partial(exact.solver_degrees, table, 64),
    }
    wide = np.random.default_rng(0).lognormal(0, 1, (500, 1)) / np.arange(1, 1025) + 1e-3
    large: dict[str, Callable[[], object]] = {
        "threshold": partial(degrees_by_threshold, wide, ranks=1024),
        "2D-DP, compiled": partial(degrees_by_dp, wide, ranks=1024),
    }
    return [
        timed_row(
            small,
            group="solver",
            what=f"degree solver, {mix.name}, 512 samples in {len(groups)} groups, 64 replicas",
            limit=0.5,
            repeats=scale.repeats,
            paper="DHP 86 ms",
            explanation="All find the same makespan. The table of times is given, and "
            "checked each time.",
        ),
        timed_row(
            large,
            group="solver",
            what="degree solver, 500 groups of falling times, 1,024 replicas",
            limit=None,
            repeats=min(scale.repeats, 3),
            explanation="The dynamic program is O(groups·N²).",
        ),
    ]


def packers(scale: Scale) -> list[Row]:
    """ISF over a whole data set, and text packing as axolotl's sampler does it."""
    mix = workloads.vlm_sft(scale.isf_samples)
    text, vision = mix.llm_tokens, mix.encoder_tokens
    limits = isf_limits(text, vision)
    isf = timed_row(
        {"ISF": lambda: pack_isf(text, vision, **asdict(limits), iterations=10)},
        group="isf",
        what=f"ISF, vlm-sft, {len(mix):,} samples, 10 iterations, levelling included",
        limit=1000.0,
        repeats=min(scale.repeats, 4),
        paper="OmniBal tens of s",
    )
    few = min(FIRST_FIT_SAMPLES, scale.isf_samples)
    lengths = np.minimum(workloads.long_text(few).llm_tokens, 8192)
    none = np.zeros_like(lengths)
    rivals.first_fit_decreasing(lengths[:100], 8192)  # compiles
    bins = int(rivals.first_fit_decreasing(lengths, 8192).max()) + 1
    ours = pack_bfd(lengths, none, max_text=8192, max_vision=0).packs
    full = [100 * float(lengths.sum()) / (8192 * packs) for packs in (ours, bins)]
    few_lengths = lengths[: min(few, 5000)]
    small = side_by_side(
        {
            "ours": lambda: pack_bfd(few_lengths, none[:5000], max_text=8192, max_vision=0),
            "prtpy": lambda: prtpy.pack(
                prtpy.packing.first_fit_decreasing, 8192, few_lengths.tolist()
            ),
        },
        repeats=min(scale.repeats, 3),
    )
    slower = small["prtpy"].processor_s / small["ours"].processor_s
    return [
        isf,
        timed_row(
            {
                "best fit": lambda: pack_bfd(lengths, none, max_text=8192, max_vision=0),
                "numba first-fit decreasing": lambda: rivals.first_fit_decreasing(lengths, 8192),
            },
            group="isf",
            what=f"text packed to 8,192 tokens, long-text, {few:,} samples",
            limit=None,
            repeats=min(scale.repeats, 4),
            paper="axolotl 1M samples in 2.2 s, 99.7 % full",
            explanation=f"{full[0]:.2f} % full, first-fit {full[1]:.2f} %. prtpy's first-fit on "
            f"{few_lengths.size:,} samples takes {slower:.0f} times as long as ours on the same.",
        ),
    ]


def partitions(scale: Scale) -> list[Row]:
    """1,920 lognormal items over the ranks of MMScale's table."""
    costs = np.random.default_rng(0).lognormal(6, 0.6, 1920)
    as_list = costs.tolist()
    rows = []
    for ranks in (30, 60, 120):
        calls: dict[str, Callable[[], object]] = {
            "auto": partial(partition, costs, ranks),
            "greedy alone": partial(partition, costs, ranks, algorithm="greedy"),
            "greedy in Python": partial(rivals.greedy_loads, as_list, ranks, falling=True),
            "prtpy greedy": partial(prtpy_max, PRTPY["prtpy greedy"], costs, ranks),
            "prtpy KK": partial(prtpy_max, PRTPY["prtpy KK"], costs, ranks),
            "KK of verl": partial(rivals.differencing, as_list, ranks),
        }
        gap = 100 * partition(costs, ranks).gap
        rows.append(
            timed_row(
                calls,
                group="partition",
                what=f"partition, 1,920 lognormal items over {ranks} ranks, auto",
                limit=3.0,
                repeats=scale.repeats,
                paper="MMScale 1.8–1.9 ms for plain greedy",
                explanation=f"Certified gap {gap:.4f} %.",
            )
        )
    return rows


def exact_partition(scale: Scale) -> list[Row]:
    """A small partition, beside exact solvers that prove their answer."""
    costs = np.random.default_rng(3).lognormal(5, 1, 10)
    return [
        timed_row(
            {
                "auto": lambda: partition(costs, 3),
                "scipy's integer program": lambda: exact.solver_max_load(costs, 3),
                "prtpy complete greedy": lambda: prtpy_max(
                    prtpy.partitioning.complete_greedy, costs, 3
                ),
            },
            group="partition",
            what="partition to proven optimality, 10 lognormal items over 3 ranks",
            limit=None,
            repeats=min(scale.repeats, 3),
            explanation="Up to 14 items are searched exhaustively after greedy and refinement.",
        )
    ]


def orders(scale: Scale) -> list[Row]:
    """The microbatches of one replica at MMScale's sizes, 10 stages."""
    rows = []
    for replicas, limit in ((30, 5.9), (60, 3.0), (120, 1.7)):
        count = 1920 // replicas
        forward = np.random.default_rng(0).lognormal(0, 0.8, (count, 10))
        rows.append(
            timed_row(
                {
                    "search": partial(order_microbatches, forward, 2 * forward),
                    "MMScale Alg. 3, compiled": partial(
                        order_microbatches, forward, 2 * forward, algorithm="mmscale"
                    ),
                },
                group="order-speed",
                what=f"microbatch order, 1,920 samples at DP {replicas}: {count} microbatches × "
                "10 stages",
                limit=limit,
                repeats=scale.repeats,
                paper=f"MMScale {({30: 5.87, 60: 3.02, 120: 1.71})[replicas]} ms",
                explanation="The search spends a fixed number of simulated operations on quality "
                "(see the rows of order); Alg. 3 alone is the plain heuristic.",
            )
        )
    return rows


def partition_rows(scale: Scale) -> list[Row]:
    return [*partitions(scale), *exact_partition(scale)]
