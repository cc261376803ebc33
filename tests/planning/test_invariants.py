"""A planner's defect never leaves it: whatever is wrong with an answer, its check says so."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.planning import adversarial
from dataservice.core.cost import ContextCost
from dataservice.core.errors import PlanningError
from dataservice.core.plan import StepPlan
from dataservice.core.plan_options import STRATEGIES, PlanOptions
from dataservice.core.topology import Topology
from dataservice.planning import compose
from dataservice.planning.context import degrees, groups, many
from dataservice.planning.context.check import check_waves
from dataservice.planning.context.degrees import degrees_by_dp, degrees_by_threshold
from dataservice.planning.context.groups import (
    plan_context_groups,
    plan_context_waves,
    plan_static_context,
)
from dataservice.planning.context.many import find_many_waves
from dataservice.planning.context.units import make_setting
from dataservice.planning.invariants import check_assignment, check_permutation
from dataservice.planning.loads.partition import ALGORITHMS, partition
from dataservice.planning.packs import isf, wave_assignment
from dataservice.planning.packs.isf import pack_isf
from dataservice.planning.packs.wave_assignment import assign_packs_to_waves
from dataservice.planning.pipeline_parallel import microbatch_order
from dataservice.planning.pipeline_parallel.microbatch_order import order_microbatches
from dataservice.planning.stages import encoders
from dataservice.planning.standalone import (
    conv_loads,
    node_balance,
    node_exchange,
    node_rearrange,
    padded_loads,
)
from dataservice.planning.standalone.conv_loads import balance_conv
from dataservice.planning.standalone.node_balance import balance_nodewise
from dataservice.planning.standalone.node_exchange import compose_exchange
from dataservice.planning.standalone.node_rearrange import rearrange_nodewise
from dataservice.planning.standalone.padded_loads import balance_padded
from dataservice.planning.validate import check_plan
from tests.planning.step_samples import MEMORY, step_samples

COST = ContextCost.flexsp_7b()
TOKENS = np.array([900, 500, 400, 300, 2500, 700, 100, 100])
MACHINE = {"ranks": 6, "memory_tokens": 1000, "cost": COST, "ranks_per_node": 3}
SAMPLES = step_samples(40, 0, longest=2000)
BROKEN = "invariant broken.*defect of the planner; please report"


def step_plan() -> StepPlan:
    return compose.compose_step(
        SAMPLES,
        step=0,
        topology=Topology(world_size=6, replicas_per_node=3),
        options=PlanOptions(memory_tokens=MEMORY),
    )


def changed(array: np.ndarray, at: int, value: int) -> np.ndarray:
    array = array.copy()
    array[at] = value
    return array


@pytest.mark.parametrize(
    ("name", "broken", "words"),
    [
        (
            "pack_samples",
            lambda plan: changed(plan.pack_samples, 0, plan.pack_samples[1]),
            "in two",
        ),
        ("pack_samples", lambda plan: changed(plan.pack_samples, 0, 40), "not drawn"),
        ("pack_samples", lambda plan: plan.pack_samples[:-1], "39 samples of 40"),
        ("pack_offsets", lambda plan: plan.pack_offsets[:-1], "do not cut"),
        ("pack_offsets", lambda plan: changed(plan.pack_offsets, 1, 0), "no samples"),
        ("pack_replicas", lambda plan: changed(plan.pack_replicas, 0, 6), "none of the 6"),
        (
            "pack_replicas",
            lambda plan: changed(plan.pack_replicas, 0, plan.pack_replicas[1]),
            "two",
        ),
        ("replica_offsets", lambda plan: changed(plan.replica_offsets, 1, 0), "no replicas"),
        ("pack_wave", lambda plan: changed(plan.pack_wave, 0, 1), "wave order"),
        ("pack_seconds", lambda plan: plan.pack_seconds[:-1], "no time"),
        ("pack_seconds", lambda plan: plan.pack_seconds * np.nan, "no time"),
        ("predicted_s", lambda plan: np.inf, "no time"),
        ("waves", lambda plan: plan.waves + 1, "waves"),
        ("sample_ids", lambda plan: plan.sample_ids[1:], "39 samples, 40 were drawn"),
        ("sample_tokens", lambda plan: 9 * plan.sample_tokens, "memory budget of 2048"),
        ("sample_loss_tokens", lambda plan: plan.sample_loss_tokens[1:], "sample_loss_tokens"),
        (
            "item_replica",
            lambda plan: changed(plan.item_replica, 0, -1),
            "replica of an item is -1",
        ),
        ("item_position", lambda plan: plan.item_position[1:], "item_position"),
        ("item_sample", lambda plan: changed(plan.item_sample, 0, 40), "sample of an item is 40"),
    ],
)
def test_a_step_plan_with_one_array_wrong_is_refused(name, broken, words):
    plan = step_plan()
    check_plan(plan, memory_tokens=MEMORY, sample_count=40)
    wrong = replace(plan, **{name: broken(plan)})
    with pytest.raises(PlanningError, match=BROKEN) as raised:
        check_plan(wrong, memory_tokens=MEMORY, sample_count=40)
    assert words in str(raised.value)


@pytest.mark.parametrize(
    ("name", "broken"),
    [
        ("sample_offsets", lambda wave: wave.sample_offsets[:-1]),
        ("sample_offsets", lambda wave: wave.sample_offsets + 1),
        ("samples", lambda wave: wave.samples[:-1]),
        ("rank_offsets", lambda wave: wave.rank_offsets[:-1]),
        ("ranks", lambda wave: changed(wave.ranks, 0, wave.ranks[-1])),
        ("ranks", lambda wave: wave.ranks[::-1].copy()),  # a ring is timed where it is
        ("time_s", lambda wave: wave.time_s[:-1]),
        ("time_s", lambda wave: wave.time_s * 1.001),
        ("time_s", lambda wave: wave.time_s * np.nan),
        ("padded_tokens", lambda wave: wave.padded_tokens + 2),
    ],
)
def test_a_wave_with_one_array_wrong_is_refused(name, broken):
    setting = make_setting(ranks=6, memory_tokens=1000, cost=COST, ranks_per_node=4, degrees="any")
    # Degree 3 on a node of 4: turned around, its ring would cross to the node of 2.
    made = plan_context_groups([2500, 900, 800], **{**MACHINE, "ranks_per_node": 4})
    assert made.degrees[0] in (3, 4)
    lengths = np.array([2500, 900, 800])
    check_waves([made], lengths, None, setting)
    with pytest.raises(PlanningError, match=BROKEN):
        check_waves([replace(made, **{name: broken(made)})], lengths, None, setting)


def lose_a_sample(wave):
    return replace(wave, samples=changed(wave.samples, 0, wave.samples[-1]))


def spoil(monkeypatch, module, name, wrong):
    """What `name` of the module answers is `wrong` from now on."""
    right = getattr(module, name)
    monkeypatch.setattr(module, name, lambda *values, **named: wrong(right(*values, **named)))


def spoil_algorithm(monkeypatch):
    right = ALGORITHMS["kk"]
    monkeypatch.setitem(ALGORITHMS, "kk", lambda *values: (right(*values)[0] + 9, False))


ONES = np.ones(6)


@pytest.mark.parametrize(
    ("module", "name", "wrong", "call"),
    [
        (
            groups,
            "solve_one_wave",
            lose_a_sample,
            lambda: plan_context_groups(TOKENS, **MACHINE),
        ),
        (
            groups,
            "best_waves",
            lambda made: (lose_a_sample(made[0]), *made[1:]),
            lambda: plan_context_waves(TOKENS, **MACHINE),
        ),
        (
            groups,
            "solve_waves",
            lambda made: (lose_a_sample(made[0]), *made[1:]),
            lambda: plan_context_waves(np.tile(TOKENS, 4), **MACHINE),
        ),
        (
            groups,
            "solve_waves",
            lambda made: made[1:],
            lambda: plan_context_waves(np.tile(TOKENS, 4), **MACHINE),
        ),
        (
            groups,
            "static_wave",
            lose_a_sample,
            lambda: plan_static_context(TOKENS, degree=3, **MACHINE),
        ),
        (
            many,
            "plan_waves",
            lambda made: (lose_a_sample(made[0]), *made[1:]),
            lambda: find_many_waves([300, 300], **{**MACHINE, "ranks": 1}),  # meets the bound
        ),
        (
            many,
            "cut_many_waves",
            lambda made: (lose_a_sample(made[0]), *made[1:]),
            lambda: find_many_waves([1500] * 8, **MACHINE),
        ),
        (padded_loads, "contiguous_padded", lambda made: (made[0] + 9, made[1]),
         lambda: balance_padded(TOKENS, 3)),
        (conv_loads, "partition", lambda made: replace(made, rank_of=made.rank_of - 9),
         lambda: balance_conv(np.full(8, 5), 3, alpha=1.0, lam=1.0)),
        (node_balance, "partition_segments", lambda made: made + 9,
         lambda: balance_nodewise(ONES, [0, 1, 2, 3, 0, 1], ONES, 4, 2)),
        (node_exchange, "group_stable", lambda made: (made[0] * 0, made[1]),
         lambda: compose_exchange([0, 1, 1], [1, 1, 0], [5, 5, 5])),
        (node_rearrange, "linear_sum_assignment", lambda made: (made[0] * 0, made[1]),
         lambda: rearrange_nodewise(np.eye(4), 2)),
        (isf, "pack_by_best_fit", lambda made: made + 1,
         lambda: pack_isf([5, 5, 99], [1, 1, 1], max_text=9, max_vision=2, iterations=0)),
        (wave_assignment, "group_stable", lambda made: (made[0] * 0, made[1]),  # seems to be best
         lambda: assign_packs_to_waves(np.arange(6.0), replicas=3)),
        (degrees, "check_times", lambda made: np.where(np.arange(3) > 0, made, np.inf),
         lambda: degrees_by_threshold(np.ones((3, 3)), ranks=3)),
        (degrees, "solve_dp", lambda made: made * 0,
         lambda: degrees_by_dp(np.ones((3, 3)), ranks=3)),
        (microbatch_order, "order_by_intervals", lambda made: made * 0,
         lambda: order_microbatches(np.ones((4, 2)), np.ones((4, 2)), algorithm="mmscale")),
    ],
)  # fmt: skip
def test_no_public_planner_hands_out_what_its_algorithm_got_wrong(
    monkeypatch, module, name, wrong, call
):
    call()
    spoil(monkeypatch, module, name, wrong)
    with pytest.raises(PlanningError, match=BROKEN):
        call()


def test_no_partition_leaves_its_ranks_capacity_or_counts(monkeypatch):
    spoil_algorithm(monkeypatch)
    with pytest.raises(PlanningError, match=BROKEN):
        partition([3, 2, 1], 2, algorithm="kk")
    all_on_one = lambda *_: (np.zeros(4, np.int64), False)  # noqa: E731
    monkeypatch.setitem(ALGORITHMS, "kk", all_on_one)
    with pytest.raises(PlanningError, match="a rank holds 10 of 6"):
        partition([3, 3, 2, 2], 2, algorithm="kk", capacity=6)
    with pytest.raises(PlanningError, match="4 items of 2"):
        partition([3, 3, 2, 2], 2, algorithm="kk", equal_count=True)


@pytest.mark.parametrize("strategy", sorted(STRATEGIES))
@pytest.mark.parametrize("pipeline_stages", [1, 2])
def test_no_stage_of_any_strategy_spoils_a_step_plan_unseen(monkeypatch, strategy, pipeline_stages):
    topology = Topology(
        world_size=6 * pipeline_stages,
        ranks_per_replica=pipeline_stages,
        pipeline_stages=pipeline_stages,
        replicas_per_node=3,
    )
    options = PlanOptions(memory_tokens=MEMORY, strategy=strategy)
    make = lambda: compose.compose_step(  # noqa: E731
        SAMPLES, step=3, topology=topology, options=options
    )
    make()
    for where, name, wrong in (
        (compose, "order_waves", lambda made: (changed(made[0], 0, len(made[0])), made[1])),
        (encoders, "dispatch_items", lambda made: made * 0 - 1),
    ):
        with monkeypatch.context() as patch:
            spoil(patch, where, name, wrong)
            with pytest.raises(PlanningError, match=BROKEN):
                make()


def test_what_names_too_much_too_little_or_twice_is_no_assignment_and_no_order():
    check_assignment(np.array([0, 2, 2]), 3, "rank of an item")
    check_permutation(np.array([2, 0, 1]), 3, "order")
    for wrong in ([0, 3], [0, -1]):
        with pytest.raises(PlanningError, match=f"a rank of an item is {wrong[1]} of 3"):
            check_assignment(np.array(wrong), 3, "rank of an item")
    for wrong in ([0, 1], [0, 1, 1], [0, 1, 3]):
        with pytest.raises(PlanningError, match=BROKEN):
            check_permutation(np.array(wrong), 3, "order")


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 1 << 32))
def test_slow_rings_odd_nodes_and_prime_replicas_break_no_plan(seed):
    # One with whole nodes of 8 and rings that are slow between them, and one with anything.
    for configuration in adversarial.configurations(2, seed):
        assert not adversarial.one_wave_fault(configuration)
        assert not adversarial.step_fault(configuration)


@pytest.mark.parametrize(
    ("name", "broken", "words"),
    [
        ("samples", lambda wave: wave.samples[:-1], "not in exactly one group"),
        ("time_s", lambda wave: wave.time_s[:-1], "times"),
        ("time_s", lambda wave: wave.time_s * 1.001, "the plan says"),
        ("ranks", lambda wave: wave.ranks * 0, "some taken or twice"),
        ("ranks", lambda wave: wave.ranks + 1000, "has ranks"),
        ("rank_offsets", lambda wave: wave.rank_offsets // 2, "tokens a rank"),
    ],
)
def test_what_the_benchmark_counts_as_broken_is_seen(monkeypatch, name, broken, words):
    made = adversarial.plan_context_groups

    def spoilt(*values, **named):
        wave = made(*values, **named)
        return replace(wave, **{name: broken(wave)})

    configuration = adversarial.Configuration(
        workload=adversarial.text_only(np.array([2500, 900, 800])),
        replicas=6,
        replicas_per_node=4,
        memory_tokens=1000,
        cost=adversarial.SLOW_RING,
    )
    assert adversarial.one_wave_fault(configuration) == ""
    monkeypatch.setattr(adversarial, "plan_context_groups", spoilt)
    assert words in (adversarial.one_wave_fault(configuration) or "")
