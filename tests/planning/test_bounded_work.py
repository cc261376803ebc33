"""The worst lengths cost a small multiple of the usual: work is limited in operations, counted."""

import numpy as np
import pytest

from benchmarks import workloads
from benchmarks.planning.adversarial import text_only
from dataservice.core.cost import ContextCost, PhaseCost
from dataservice.core.memory import MemoryModel
from dataservice.core.plan_options import CostModel, PlanOptions
from dataservice.core.sample import LengthTable
from dataservice.core.topology import Topology
from dataservice.planning import compose
from dataservice.planning.compose import StepSamples, compose_step
from dataservice.planning.context import many, many_cut, step_waves
from dataservice.planning.context.groups import plan_context_waves
from dataservice.planning.context.many import find_many_waves
from dataservice.planning.context.units import (
    degree_after,
    make_setting,
    make_units,
    unit_seconds,
)
from dataservice.planning.loads.greedy import greedy
from dataservice.planning.loads.partition import partition
from dataservice.planning.loads.problem import build_problem
from dataservice.planning.stages import group as group_stage

MEMORY = 4096
COST = ContextCost.flexsp_7b()
MACHINE = {"ranks": 64, "memory_tokens": MEMORY, "cost": COST, "ranks_per_node": 8}
WORST = {
    "a token more than a rank holds": np.full(512, MEMORY + 1),
    "two to six times what a rank holds": np.random.default_rng(0).integers(
        2 * MEMORY, 6 * MEMORY, 2048
    ),
    "more than half of all ranks each": np.full(200, 33 * MEMORY),
    "two of three fit a rank": np.full(4096, 6 * MEMORY // 10),
    "a giant among dust": np.concatenate([[60 * MEMORY], np.full(4000, 3)]),
}


def plan_step(lengths, pack):
    n = len(lengths)
    samples = StepSamples(
        sample_ids=np.arange(n),
        epoch=np.zeros(n, np.int32),
        lengths=LengthTable(
            llm_tokens=lengths.astype(np.int32),
            loss_tokens=lengths.astype(np.int32),
            item_offsets=np.zeros(n + 1, np.int64),
            item_modality=np.zeros(0, np.int8),
            item_encoder_tokens=np.zeros(0, np.int32),
            item_llm_tokens=np.zeros(0, np.int32),
            item_position=np.zeros(0, np.int32),
        ),
    )
    return compose_step(
        samples,
        step=0,
        topology=Topology(world_size=64, replicas_per_node=8),
        options=PlanOptions(memory_tokens=MEMORY, pack=pack),
    )


class Counted:
    """Counts the calls of a function of a module, and sums up what `size` says of each."""

    def __init__(self, monkeypatch, module, name, size=lambda *values: 1):
        self.calls = self.size = 0
        function = getattr(module, name)

        def counted(*values, **named):
            self.calls += 1
            self.size += size(*values)
            return function(*values, **named)

        monkeypatch.setattr(module, name, counted)


@pytest.mark.parametrize("lengths", WORST.values(), ids=WORST)
def test_few_numbers_of_waves_are_tried_whatever_the_lengths(monkeypatch, lengths):
    levels = Counted(monkeypatch, many, "one_level")
    others = Counted(monkeypatch, many, "two_levels")
    solved = Counted(monkeypatch, many_cut, "_wave")
    made = find_many_waves(lengths, **MACHINE)
    assert levels.calls <= 8
    assert others.calls <= 8 * 3
    assert solved.calls <= 4 * len(made.waves), "three cuts at most"
    assert sorted(np.concatenate([w.samples for w in made.waves])) == list(range(len(lengths)))


def test_waves_that_memory_alone_asks_for_are_found_without_trying_all_between(monkeypatch):
    tries = Counted(monkeypatch, many, "one_level")
    made = find_many_waves(np.full(4096, 6 * MEMORY // 10), **MACHINE)
    assert len(made.waves) == 64, "one sample a rank, where 39 waves have the memory"
    assert tries.calls <= 4


def test_samples_that_no_rank_holds_are_planned_near_the_bound_by_both_planners():
    lengths = WORST["two to six times what a rank holds"]
    many_made, few_made = (
        plan(lengths, **MACHINE) for plan in (find_many_waves, plan_context_waves)
    )
    assert many_made.makespan_s <= 1.04 * many_made.lower_bound_s
    assert few_made.makespan_s <= 1.02 * few_made.lower_bound_s


def test_no_more_than_so_many_samples_are_ever_planned_as_few_are(monkeypatch):
    as_few = Counted(monkeypatch, group_stage, "plan_context_waves")
    longer = np.random.default_rng(0).integers(2 * MEMORY, 6 * MEMORY, 8193)
    plan_step(longer, "auto")
    assert as_few.calls == 0


def test_no_more_than_so_many_waves_are_solved_to_compare_cuts(monkeypatch):
    solved = Counted(monkeypatch, step_waves, "solve_wave")
    lengths = np.random.default_rng(0).integers(MEMORY, 2 * MEMORY, 2400) + 1
    made = plan_context_waves(lengths, **{**MACHINE, "ranks": 3})
    assert len(made.waves) > 1024
    assert solved.calls < 1.5 * len(made.waves), "no second cut into as many waves is solved"


def test_few_waves_are_solved_to_mend_a_cut(monkeypatch):
    solved = Counted(monkeypatch, step_waves, "solve_one_wave")
    rng = np.random.default_rng(3)
    steps = 8
    for _ in range(steps):
        lengths = rng.integers(100, 3 * MEMORY, 64)
        plan_context_waves(lengths, **{**MACHINE, "ranks": 12, "ranks_per_node": 5})
    assert steps < solved.calls <= 33 * steps


@pytest.mark.parametrize("pack", ["auto", "balanced", "joint"])
@pytest.mark.parametrize("worst", ["a token more than a rank holds", "two of three fit a rank"])
def test_a_whole_step_of_the_worst_lengths_is_planned_once_by_each_planner(
    monkeypatch, pack, worst
):
    lengths = WORST[worst]
    joint = Counted(monkeypatch, group_stage, "plan_context_waves")
    plan = plan_step(lengths, pack)
    assert joint.calls <= 1
    (group,) = [stage for stage in plan.stages if stage.stage == "group"]
    assert group.after <= (1.4 if pack == "balanced" else 1.3) * group.lower_bound


SLOW_RING = ContextCost(
    attention_s_per_token2=1e-15,
    linear_s_per_token=1e-4,
    ring_intra_s_per_token=5e-5,
    ring_inter_s_per_token=5e-5,
)


@pytest.mark.parametrize(("over", "least"), [(1.0005, 1000), (1.01, 90), (1.5, 2)])
def test_the_degree_that_meets_a_target_is_found_without_looking_at_all_below(over, least):
    setting = make_setting(
        ranks=2560, memory_tokens=1 << 20, cost=SLOW_RING, ranks_per_node=None, degrees="any"
    )
    units = make_units(np.array([1 << 30]), None, SLOW_RING)
    every = [unit_seconds(units, 0, degree, setting) for degree in range(1, 2561)]
    target_s = over * min(every)
    degree, looks = 1, 1
    while degree <= 2560 and every[degree - 1] > target_s:
        degree = degree_after(units, 0, degree, target_s, setting)
        looks += 1
    assert degree == 1 + next(d for d, seconds in enumerate(every) if seconds <= target_s)
    assert degree >= least
    assert looks <= 32
    assert degree_after(units, 0, 1, 0.9 * min(every), setting) > 1
    assert degree_after(units, 0, 2560, target_s, setting) == 2561


def test_plans_in_bytes_are_compared_only_while_the_step_is_worth_it(monkeypatch):
    """A step of clips, by a usual model and by one that hardly works."""
    memory = MemoryModel(
        budget_bytes=4 * MEMORY, llm_token_bytes=4, vision_token_bytes=1, audio_token_bytes=1
    )
    samples = workloads.step_samples(workloads.video(20_000, 0))
    hardly = ContextCost(
        attention_s_per_token2=1e-14, linear_s_per_token=1e-9, group_s=1e-6,
        ring_intra_s_per_token=1e-10, ring_inter_s_per_token=1e-9, ring_hop_s=1e-9,
    )  # fmt: skip
    nothing = CostModel(llm=hardly, vision=PhaseCost(linear_s_per_token=1e-9))
    tried = []
    for cost in (nothing, CostModel(llm=COST)):
        grouped = Counted(
            monkeypatch,
            compose,
            "waves_in_room",
            lambda *values: values[2].options.strategy == "full",
        )
        compose_step(
            samples,
            step=0,
            topology=Topology(world_size=2560, replicas_per_node=8),
            options=PlanOptions(memory_tokens=MEMORY, memory=memory, cost=cost),
        )
        tried.append(grouped.size)
    assert tried == [1, 1 + 2], "its own waves alone, and those with more room for clips"


SOON = ContextCost(
    attention_s_per_token2=1e-12, linear_s_per_token=1e-7, group_s=1e-5,
    ring_intra_s_per_token=1e-8, ring_inter_s_per_token=1e-7, ring_hop_s=1e-7,
)  # fmt: skip


@pytest.mark.parametrize(("stages", "meet"), [(4, "wave"), (1, "step"), (4, "step")])
def test_a_large_step_is_planned_by_no_more_waves_than_it_is_worth(monkeypatch, stages, meet):
    """Half a memory each, so that smaller microbatches take wide groups and many waves."""
    samples = workloads.step_samples(text_only(np.full(8192, MEMORY // 2 + 1)))
    topology = Topology(
        world_size=64 * stages,
        ranks_per_replica=stages,
        pipeline_stages=stages,
        replicas_per_node=8,
        replicas_meet=meet,
    )
    waves, step_s = [], []
    for cost in (SOON, COST):
        formed = Counted(
            monkeypatch,
            compose,
            "group_packs",
            lambda packed: packed.options.strategy == "full",
        )
        plan = compose_step(
            samples,
            step=0,
            topology=topology,
            options=PlanOptions(memory_tokens=MEMORY, cost=CostModel(llm=cost)),
        )
        waves.append(formed.size)
        step_s.append(plan.predicted_s)
    assert step_s[0] < 5.0 < step_s[1], "one worth 50 ms at most, and one that is worth more"
    if stages == 1:
        assert waves == [1, 1], "items at home have the waves of the plan itself"
    else:
        assert waves[0] == 1 < waves[1]


def test_baselines_that_work_too_much_are_not_formed_where_replicas_meet_once(monkeypatch):
    """Padded to their longest, and in rings of all that the longest needs."""
    samples = workloads.step_samples(workloads.vlm_long(2000))
    formed = Counted(
        monkeypatch,
        compose,
        "group_packs",
        lambda packed: packed.options.strategy in compose.BASELINES,
    )
    topology = Topology(world_size=64, replicas_per_node=8, replicas_meet="step")
    compose_step(samples, step=0, topology=topology, options=PlanOptions(memory_tokens=MEMORY))
    assert formed.size == 0


def test_an_item_passes_over_full_ranks_only_so_often():
    full, empty, small = 1024, 1024, 12_000
    costs = np.concatenate([np.full(full, 1.0), np.full(small, 0.9)])
    sizes = np.concatenate([np.full(full, 100.0), np.full(small, 1.0)])
    machine = {"equal_count": False, "capacity": 100.0, "sizes": sizes}
    assert greedy(build_problem(costs, full + empty, **machine)) is None
    made = partition(costs, full + empty, capacity=100.0, sizes=sizes)
    held = np.bincount(made.rank_of, weights=sizes, minlength=full + empty)
    assert held.max() <= 100.0
    few = slice(0, full + 4000)
    machine["sizes"] = sizes[few]
    assert greedy(build_problem(costs[few], full + empty, **machine)) is not None
