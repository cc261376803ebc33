"""Where planners break: lengths at which planning took longest, and slow rings between nodes.

Planning must take no longer than the larger of 50 ms and a hundredth of the step that it plans,
whatever the lengths are. And no plan may be broken: each is judged by `validate_plan` and, here, by
a check of its own, which asks `ContextCost` for the seconds of every pack.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from benchmarks import workloads
from benchmarks.harness import Row, Scale, side_by_side, written
from dataservice.core.cost import ContextCost
from dataservice.core.errors import PlanningError
from dataservice.core.layout import padded_tokens
from dataservice.core.memory import MemoryModel
from dataservice.core.plan import StepPlan
from dataservice.core.plan_options import CostModel, PlanOptions
from dataservice.core.topology import Meet, Topology
from dataservice.planning.compose import StepSamples, compose_step
from dataservice.planning.context.groups import ContextPlan, plan_context_groups
from dataservice.planning.validate import validate_plan

MEMORY = 8192
LEAST_S = 0.05  # planning is never too long below this,
SHARE = 0.01  # nor below this share of the step's predicted seconds
CONFIGURATIONS = 40  # random ones for each of a scale's small cases
SLOW_RING = ContextCost(
    attention_s_per_token2=2e-9,
    linear_s_per_token=5e-5,
    group_s=0.02,
    ring_intra_s_per_token=5e-6,
    ring_inter_s_per_token=1e-4,
)
# A step is the shorter, and planning it has the less time, the faster the machine.
COSTS = {
    "7B": ContextCost.flexsp_7b(),
    "slow rings": SLOW_RING,
    "1B": ContextCost(
        attention_s_per_token2=2e-9,
        linear_s_per_token=1e-5,
        group_s=0.005,
        ring_intra_s_per_token=1e-6,
        ring_inter_s_per_token=6e-6,
        ring_hop_s=2e-5,
    ),
}
_ROUNDING = 1e-6

Lengths = NDArray[np.int64]


_MIXES = (
    (workloads.vlm_sft, 512, 64),
    (workloads.video, 512, 64),
    (workloads.vlm_sft, 8000, 640),
    (workloads.video, 8000, 640),
    (workloads.vlm_sft, 153_600, 2560),
    (workloads.video, 153_600, 2560),
)


def text_only(tokens: Lengths, *, name: str = "text") -> workloads.Workload:
    """Samples of these lengths without any encoder item."""
    nothing = np.zeros_like(tokens)
    return workloads.Workload(
        name=name, llm_tokens=tokens, media_llm_tokens=nothing, encoder_tokens=nothing
    )


def _between(low: float, high: float, samples: int) -> Lengths:
    """Lengths spread evenly over low..high times a replica's memory, the ends left out."""
    generator = np.random.default_rng(0)
    return generator.integers(int(low * MEMORY) + 1, int(high * MEMORY), samples)


def _giant(giant_tokens: int, dust: int) -> Lengths:
    return np.concatenate([[giant_tokens], np.full(dust, 3)]).astype(np.int64)


def _bimodal(samples: int) -> Lengths:
    """A tenth are of two replicas' memory, the others of 100 tokens."""
    long = np.random.default_rng(0).random(samples) < 0.1
    return np.where(long, 2 * MEMORY, 100).astype(np.int64)


@dataclass(frozen=True, slots=True)
class Hard:
    """A hard step: how many replicas, what draws its samples (a large one only where it is
    measured), and whether items attend both ways, or memory is counted in bytes of encoders too.
    Replicas may be pipelines of several stages, or meet only at the end of the step."""

    replicas: int
    draw: Callable[[], workloads.Workload]
    both_ways: bool = False
    in_bytes: bool = False
    stages: int = 1
    meet: Meet = "wave"

    @property
    def topology(self) -> Topology:
        return Topology(
            world_size=self.replicas * self.stages,
            ranks_per_replica=self.stages,
            pipeline_stages=self.stages,
            replicas_per_node=8,
            replicas_meet=self.meet,
        )

    def options(self, cost: ContextCost) -> PlanOptions:
        """How it is planned; a replica's bytes hold MEMORY tokens, or four times the patches."""
        memory = MemoryModel(
            budget_bytes=4 * MEMORY, llm_token_bytes=4, vision_token_bytes=1, audio_token_bytes=1
        )
        return PlanOptions(
            memory_tokens=MEMORY,
            cost=CostModel(llm=cost),
            memory=memory if self.in_bytes else None,
            full_attention="items" if self.both_ways else "none",
        )


_HARD = {
    "512 a token over the memory": Hard(64, lambda: text_only(np.full(512, MEMORY + 1))),
    "1,024 a token over the memory": Hard(64, lambda: text_only(np.full(1024, MEMORY + 1))),
    "2,048 a token over the memory": Hard(64, lambda: text_only(np.full(2048, MEMORY + 1))),
    "4,096 a token over half of the memory": Hard(
        64, lambda: text_only(np.full(4096, MEMORY // 2 + 1))
    ),
    "153,600 of 4,097 to 8,191 tokens": Hard(2560, lambda: text_only(_between(0.5, 1.0, 153_600))),
    "512 of 2 to 6 times the memory": Hard(64, lambda: text_only(_between(2.0, 6.0, 512))),
    "2,048 of 2 to 6 times the memory": Hard(64, lambda: text_only(_between(2.0, 6.0, 2048))),
    "20,000 of 2 to 6 times the memory": Hard(2560, lambda: text_only(_between(2.0, 6.0, 20_000))),
    "one of 60 times the memory among 4,000 of 3 tokens": Hard(
        64, lambda: text_only(_giant(60 * MEMORY, 4000))
    ),
    "one of 2,000 times the memory among 153,599 of 3 tokens": Hard(
        2560, lambda: text_only(_giant(2000 * MEMORY, 153_599))
    ),
    "8,192 of 1,000 tokens": Hard(64, lambda: text_only(np.full(8192, 1000))),
    "153,600 of 1,000 tokens": Hard(2560, lambda: text_only(np.full(153_600, 1000))),
    "2,048 bimodal": Hard(64, lambda: text_only(_bimodal(2048))),
    "50,000 bimodal": Hard(2560, lambda: text_only(_bimodal(50_000))),
    "512 vlm-sft with documents, a prime number of replicas": Hard(
        61, lambda: workloads.vlm_long(512)
    ),
    "153,600 vlm-sft, a prime number of replicas": Hard(2557, lambda: workloads.vlm_sft(153_600)),
    "10 of half to 8 times the memory": Hard(2560, lambda: text_only(_between(0.5, 8.0, 10))),
    "10 of 3 tokens": Hard(2560, lambda: text_only(np.full(10, 3))),
    "153,600 video": Hard(2560, lambda: workloads.video(153_600)),
    **{
        f"{count:,} {mix.__name__}, items attend both ways": Hard(
            replicas, partial(mix, count), both_ways=True
        )
        for mix, count, replicas in _MIXES
    },
    **{
        f"{count:,} {mix.__name__}, memory in bytes": Hard(
            replicas, partial(mix, count), in_bytes=True
        )
        for mix, count, replicas in _MIXES
    },
}
HARD = {
    **_HARD,
    **{f"{name}, 4 stages": replace(hard, stages=4) for name, hard in _HARD.items()},
    **{f"{name}, met once": replace(hard, meet="step") for name, hard in _HARD.items()},
}


def hard_lengths(scale: Scale) -> list[Row]:
    """Planning seconds over what is allowed: each of the set at its worst cost, and the worst."""
    rows = []
    for name, hard in HARD.items():
        workload = hard.draw()
        if len(workload) <= scale.packing_samples:
            rows.append(_time_row(f"{name}, {hard.replicas:,} replicas", hard, workload, scale))
    worst = max(rows, key=lambda row: row.figure)
    summary = Row(
        group="hard",
        what=f"planning time over what is allowed, worst of {len(rows)} hard steps of "
        f"{MEMORY:,} tokens a replica",
        figure=worst.figure,
        unit="×",
        limit=1.0,
        explanation=f"It is: {worst.what}. Allowed is the larger of {1e3 * LEAST_S:.0f} ms and "
        f"{SHARE:.0%} of the predicted step.",
    )
    return [summary, *rows]


def _time_row(name: str, hard: Hard, workload: workloads.Workload, scale: Scale) -> Row:
    step, topology = workloads.step_samples(workload), hard.topology
    found: dict[str, float] = {}
    said = []
    for model, cost in COSTS.items():
        planned = partial(compose_step, step, step=0, topology=topology, options=hard.options(cost))
        plan = planned()
        took_s = side_by_side({"plan": planned}, repeats=min(3, scale.repeats))["plan"].processor_s
        allowed_s = max(LEAST_S, SHARE * plan.predicted_s)
        found[model] = took_s / allowed_s
        said.append(
            f"{model}: {written(1e3 * took_s, 'ms')} for {plan.waves} waves of "
            f"{written(plan.predicted_s, 's')} in all"
        )
    return Row(
        group="hard",
        what=f"planning time over what is allowed, {name}",
        figure=max(found.values()),
        unit="×",
        limit=1.0,
        explanation=f"Worst with the cost of {max(found, key=lambda model: found[model])}. "
        f"{'; '.join(said)}.",
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Configuration:
    """One random step: its lengths, the machine, and the seconds of groups."""

    workload: workloads.Workload
    replicas: int
    replicas_per_node: int
    memory_tokens: int
    cost: ContextCost


def configurations(count: int, seed: int = 0) -> Iterator[Configuration]:
    """Half have whole nodes of 8 and rings that are 20 times slower between them; the others any
    number of replicas, prime ones too, any number a node, and any cost."""
    generator = np.random.default_rng(seed)
    for case in range(count):
        if case % 2 == 0:
            replicas, per_node = 8 * int(generator.integers(1, 9)), 8
            cost, memory = SLOW_RING, int(2 ** generator.integers(8, 14))
        else:
            replicas, per_node = (int(generator.integers(1, most)) for most in (48, 12))
            cost, memory = _any_cost(generator), int(generator.integers(64, 4096))
        fill = generator.choice([0.3, 0.7, 0.95, 3.0])  # of the memory of all replicas
        samples = max(1, int(fill * replicas / 2.25))
        tokens = generator.uniform(0.5 * memory, 4 * memory, samples).astype(np.int64)
        if generator.random() < 0.3:  # short ones beside them
            dust = generator.integers(1, memory // 2, samples)
            tokens = np.concatenate([tokens, dust])
        held = PlanOptions(memory_tokens=memory).longest_sample_tokens(replicas)
        tokens = np.clip(tokens, 1, max(held, 1))
        yield Configuration(
            workload=_with_pictures(tokens) if generator.random() < 0.5 else text_only(tokens),
            replicas=replicas,
            replicas_per_node=per_node,
            memory_tokens=memory,
            cost=cost,
        )


def _any_cost(generator: np.random.Generator) -> ContextCost:
    """Each coefficient over some powers of ten; every third has none that is constant."""
    attention, linear, group, ring, between, hop = 10.0 ** generator.uniform(
        [-11, -6, -3, -7, 0, -6], [-7, -3, 0, -3, 2, -3]
    )
    constant = generator.random() < 2 / 3
    return ContextCost(
        attention_s_per_token2=attention,
        linear_s_per_token=linear,
        group_s=group * constant,
        ring_intra_s_per_token=ring,
        ring_inter_s_per_token=ring * between,
        ring_hop_s=hop * constant,
    )


def _with_pictures(tokens: Lengths) -> workloads.Workload:
    """A quarter of each sample's tokens are rows of one picture of four times as many patches."""
    media = tokens // 4
    return workloads.Workload(
        name="pictures", llm_tokens=tokens, media_llm_tokens=media, encoder_tokens=4 * media
    )


def broken_plans(scale: Scale) -> list[Row]:
    """How many random configurations are planned wrongly: one wave alone, and the whole step."""
    count = CONFIGURATIONS * scale.cases
    found: list[str] = []
    too_many = 0
    for case, configuration in enumerate(configurations(count)):
        for judge in (one_wave_fault, step_fault):
            fault = judge(configuration)
            too_many += fault is None
            if fault:
                found.append(f"configuration {case}: {fault}")
    return [
        Row(
            group="broken",
            what="broken or unvalidated plans, "
            f"{count:,} random configurations with slow inter-node rings",
            figure=float(len(found)),
            unit="",
            limit=0.0,
            explanation="Each is planned as one wave and as a step. "
            f"{too_many:,} do not fit one wave, and are refused. "
            + (
                f"The first: {found[0]}"
                if found
                else "By a check that is not the planner's; steps also by `validate_plan`."
            ),
        )
    ]


def one_wave_fault(configuration: Configuration) -> str | None:
    """What is wrong with the plan of one wave; empty where nothing is, None where the samples are
    refused as too many for one."""
    tokens = configuration.workload.llm_tokens
    try:
        wave = plan_context_groups(
            tokens,
            ranks=configuration.replicas,
            memory_tokens=configuration.memory_tokens,
            cost=configuration.cost,
            ranks_per_node=configuration.replicas_per_node,
        )
    except PlanningError as error:
        return None if "plan several waves" in str(error) else f"PlanningError: {error}"
    except Exception as error:  # a defect of the planner, whatever it raises
        return f"{type(error).__name__}: {error}"
    groups = len(wave.time_s)
    return _groups_fault(wave, np.zeros(groups, np.int32), tokens, configuration)


def step_fault(configuration: Configuration) -> str:
    """What is wrong with the plan of the whole step; empty where nothing is."""
    samples = workloads.step_samples(configuration.workload)
    try:
        plan = planned_step(configuration, samples)
        validate_plan(
            plan,
            memory_tokens=configuration.memory_tokens,
            sample_count=len(samples.sample_ids),
        )
    except Exception as error:  # a defect of the planner, whatever it raises
        return f"{type(error).__name__}: {error}"
    wave = ContextPlan(
        samples=plan.pack_samples,
        sample_offsets=plan.pack_offsets,
        ranks=plan.pack_replicas,
        rank_offsets=plan.replica_offsets,
        time_s=plan.pack_seconds,
        padded_tokens=np.zeros(plan.packs, np.int64),
        lower_bound_s=0.0,
    )
    tokens = configuration.workload.llm_tokens
    return _groups_fault(wave, plan.pack_wave, tokens, configuration) or _step_time_fault(plan)


def planned_step(configuration: Configuration, samples: StepSamples) -> StepPlan:
    """The configuration's step, every stage on."""
    return compose_step(
        samples,
        step=0,
        topology=Topology(
            world_size=configuration.replicas,
            replicas_per_node=configuration.replicas_per_node,
        ),
        options=PlanOptions(
            memory_tokens=configuration.memory_tokens, cost=CostModel(llm=configuration.cost)
        ),
    )


def _step_time_fault(plan: StepPlan) -> str:
    """Replicas meet after every wave here, so the step takes no less than its waves' slowest."""
    slowest = np.zeros(plan.waves)
    np.maximum.at(slowest, plan.pack_wave, plan.pack_seconds)
    if plan.predicted_s < slowest.sum() * (1 - _ROUNDING):
        return f"{plan.predicted_s} s predicted, its waves take {slowest.sum()} s"
    return ""


def _groups_fault(
    groups: ContextPlan,
    wave_of: NDArray[np.int32],
    tokens: Lengths,
    configuration: Configuration,
) -> str:
    """Every sample once, no replica twice in a wave, memory, and the seconds of every group."""
    if sorted(groups.samples.tolist()) != list(range(len(tokens))):
        return "a sample is not in exactly one group"
    if not len(groups.time_s) == len(groups.sample_offsets) - 1 == len(groups.rank_offsets) - 1:
        return f"{len(groups.time_s)} times, {len(groups.sample_offsets) - 1} groups"
    busy: set[tuple[int, int]] = set()
    for group, seconds in enumerate(groups.time_s):
        ranks = groups.ranks[groups.rank_offsets[group] : groups.rank_offsets[group + 1]].tolist()
        seats = {(int(wave_of[group]), rank) for rank in ranks}
        if len(seats) < len(ranks) or busy & seats or not seats:
            return f"group {group} has ranks {ranks}, some taken or twice, or none"
        if not 0 <= min(ranks) <= max(ranks) < configuration.replicas:
            return f"group {group} has ranks {ranks} of {configuration.replicas}"
        busy |= seats
        first, last = groups.sample_offsets[group], groups.sample_offsets[group + 1]
        fault = _group_fault(tokens[groups.samples[first:last]], ranks, seconds, configuration)
        if fault:
            return f"group {group} {fault}"
    return ""


def _group_fault(
    held: Lengths, ranks: list[int], seconds: float, configuration: Configuration
) -> str:
    degree, per_node = len(ranks), configuration.replicas_per_node
    if held.size == 0:
        return "holds no sample"
    a_rank = int(padded_tokens(held, degree).sum()) // degree
    if a_rank > configuration.memory_tokens:
        return f"has {a_rank} tokens a rank, the memory is {configuration.memory_tokens}"
    crosses = len({rank // per_node for rank in ranks}) > 1
    takes = configuration.cost.time_s(held, degree, crosses_node=crosses)
    if not abs(takes - seconds) <= _ROUNDING * takes:
        return f"of degree {degree} takes {takes} s, the plan says {seconds}"
    return ""
