"""Whole plans of random steps: every invariant, under every strategy, on any shape of cluster."""

from dataclasses import fields, replace
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import workloads
from benchmarks.planning.adversarial import COSTS, text_only
from dataservice.core.cost import ContextCost, PhaseCost
from dataservice.core.errors import PlanningError
from dataservice.core.memory import MemoryModel
from dataservice.core.plan import StepPlan
from dataservice.core.plan_options import STRATEGIES, CostModel, PlanOptions
from dataservice.core.sample import Modality
from dataservice.core.topology import Topology
from dataservice.planning.compose import StepSamples, compose_step
from dataservice.planning.pipeline_parallel.simulator import simulate_1f1b
from dataservice.planning.stages.dispatch import (
    dispatch_items,
    encoder_items,
    encoding_bounds,
)
from dataservice.planning.stages.pack import step_limits
from dataservice.planning.validate import validate_plan
from tests.planning.step_samples import MEMORY, step_samples, text_samples


def plan(samples: StepSamples, replicas: int, node: int | None, **options: object) -> StepPlan:
    return compose_step(
        samples,
        step=0,
        topology=Topology(world_size=replicas, replicas_per_node=node),
        options=PlanOptions(**{"memory_tokens": MEMORY, **options}),
    )


@settings(max_examples=40, deadline=None)
@given(
    n=st.integers(1, 120),
    replicas=st.sampled_from([2, 3, 4, 8, 12, 20]),
    node=st.sampled_from([None, 1, 3, 4, 8]),
    seed=st.integers(0, 100),
    options=st.sampled_from(
        [{"strategy": name} for name in STRATEGIES]
        + [
            {"pack": "balanced"},
            {"pack": "joint"},
            {"pack": "isf"},
            {"pack": "bfd"},
            {"context": "power_of_two"},
            {"pack": "balanced", "context": "power_of_two"},
            {"assign": "as_packed", "dispatch": "home"},
        ]
    ),
)
def test_every_plan_keeps_every_invariant(n, replicas, node, seed, options):
    samples = step_samples(n, seed, longest=2000)
    made = plan(samples, replicas, node, **options)
    validate_plan(made, memory_tokens=MEMORY, sample_count=n)
    assert made.digest == plan(samples, replicas, node, **options).digest
    for report in made.stages:
        assert report.after >= report.lower_bound * (1 - 1e-9) or report.stage == "group"


@pytest.mark.parametrize("longest", [300, 700])
def test_the_bound_of_a_step_is_one_of_all_plans_however_this_one_was_restricted(longest):
    llm = ContextCost(attention_s_per_token2=0.0, linear_s_per_token=1e-3, group_s=0.01)
    cost = CostModel(llm=llm)
    restricted: list[dict[str, object]] = [{"context": "power_of_two"}]
    restricted += [{"pack": pack} for pack in ("isf", "bfd", "padded")]
    restricted += [{"strategy": name} for name in STRATEGIES]
    for seed in range(6):
        rng = np.random.default_rng(seed)
        tokens = [longest, *rng.integers(20, 200, int(rng.integers(1, 12))).tolist()]
        plans = [
            plan(text_samples(tokens), 5, None, memory_tokens=200, cost=cost, **options)
            for options in ({}, *restricted)
        ]
        fastest_s = min(made.predicted_s for made in plans)
        for made in plans:
            assert made.stages[-1].stage == "step"
            assert made.stages[-1].lower_bound <= fastest_s * (1 + 1e-9)


@pytest.mark.parametrize("replicas", [1, 2])
def test_packs_by_isf_leave_room_for_what_encoders_keep(replicas):
    samples, topology = step_samples(60, 0, longest=400), Topology(world_size=replicas)
    memory = MemoryModel(budget_bytes=2.0e6, llm_token_bytes=1000.0, vision_token_bytes=300.0)
    options = PlanOptions(memory=memory, pack="isf").over(topology)
    of_job = step_limits(samples.lengths, options, method="search")
    made = compose_step(samples, step=0, topology=topology, options=options, limits=of_job)
    validate_plan(made, memory_tokens=options.memory_tokens, sample_count=60)


def test_a_static_ring_that_crosses_nodes_is_timed_as_one():
    samples = step_samples(60, 5, longest=5000)
    samples.lengths.llm_tokens[0] = 3 * MEMORY - 100
    costs = [
        ContextCost(attention_s_per_token2=1e-9, linear_s_per_token=1e-5, ring_inter_s_per_token=s)
        for s in (0.0, 1e-2)
    ]
    for node, crossing in ((4, {1, 2}), (3, set())):  # four groups of 3 among nodes
        fast, slow = (
            plan(samples, 12, node, strategy="packing", static_degree=3, cost=CostModel(llm=cost))
            for cost in costs
        )
        assert set(fast.pack_degree.tolist()) == {3}
        pairs = zip(fast.groups(0), slow.groups(0), strict=True)
        slower = {g.replicas[0] // 3 for before, g in pairs if g.seconds > before.seconds}
        assert slower == crossing


@pytest.mark.parametrize(
    ("longest", "replicas", "options", "said"),
    [
        (2200, 4, {"strategy": "packing", "static_degree": 1}, "degree 1 holds at most 2048"),
        (900, 4, {"strategy": "packing", "static_degree": 8}, "is 8, and there are 4 replicas"),
        (9000, 6, {"context": "power_of_two"}, "9000 tokens; 4 replicas .* to about 2252,"),
    ],
)
def test_a_sample_that_no_allowed_degree_holds_is_refused_in_words(
    longest, replicas, options, said
):
    samples = step_samples(20, 3, longest=1000)
    samples.lengths.llm_tokens[4] = longest
    with pytest.raises(PlanningError, match=said):
        plan(samples, replicas, None, **options)


def test_what_options_hold_is_what_their_widest_group_holds():
    held = {
        "dynamic": PlanOptions(memory_tokens=MEMORY),
        "power of two": PlanOptions(memory_tokens=MEMORY, context="power_of_two"),
        "static": PlanOptions(memory_tokens=MEMORY, strategy="packing"),
        "of degree 2": PlanOptions(memory_tokens=MEMORY, strategy="packing", static_degree=2),
    }
    degrees = {name: options.longest_sample_tokens(6) / MEMORY for name, options in held.items()}
    assert degrees == {"dynamic": 6, "power of two": 4, "static": 6, "of degree 2": 2}


@pytest.mark.parametrize("degree", [1, 2, 7, 128])
def test_a_degree_of_the_baselines_that_holds_too_little_does_not_end_a_full_plan(degree):
    samples = step_samples(60, 3, longest=5000)
    samples.lengths.llm_tokens[4] = 5000
    made = plan(samples, 8, None, static_degree=degree)
    validate_plan(made, memory_tokens=MEMORY, sample_count=60)


@pytest.mark.parametrize("node", [None, 8])
def test_a_large_step_keeps_every_invariant(node):
    samples = step_samples(20_000, 0, longest=8000)
    made = plan(samples, 160, node)
    validate_plan(made, memory_tokens=MEMORY, sample_count=20_000)


def test_groups_that_a_node_holds_stay_inside_one():
    made = plan(step_samples(4000, 1, longest=12_000), 48, 8)
    crossing = [
        group
        for wave in range(made.waves)
        for group in made.groups(wave)
        if group.degree <= 8 and len({replica // 8 for replica in group.replicas}) > 1
    ]
    assert not crossing


@pytest.mark.parametrize(("replicas", "node"), [(16, 4), (12, 8), (10, None), (6, 16)])
def test_encoders_are_balanced_in_every_phase_and_near_their_text(replicas, node):
    samples = step_samples(2000, 2, longest=500)
    options = PlanOptions(memory_tokens=1 << 20, dispatch="home")
    made = compose_step(
        samples,
        step=0,
        topology=Topology(world_size=replicas, replicas_per_node=node),
        options=options,
    )
    items = encoder_items(made, options.cost)
    assert items.home.tolist() == made.item_replica.tolist()
    bound_s = encoding_bounds(items, replicas)
    machine = {"replicas": replicas, "replicas_per_node": node}
    spread = dispatch_items(items, bound_s, **machine, algorithm="balanced")
    loads = np.zeros((items.phases, replicas))
    np.add.at(loads, (items.phase, spread), items.seconds)
    assert (loads.max(axis=1) <= 1.02 * loads.mean(axis=1)).all()
    at_home = (spread // (node or replicas) == items.home // (node or replicas)).mean()
    assert at_home > 0.9


def test_a_digest_tells_any_two_plans_apart():
    made = plan(step_samples(60, 3, longest=2000), 4, None)
    items = len(made.item_sample)
    made = replace(
        made,
        sample_loss_weights=np.full(60, 0.5),
        item_units=np.ones(items, np.int32),
        item_first_unit=np.zeros(items, np.int32),
    )
    seen = {made.digest}
    for field in fields(made):
        value = getattr(made, field.name)
        if field.name in ("stages", "time"):
            continue
        if isinstance(value, np.ndarray):
            other = value.copy()
            other[-1] += 1
        else:
            other = value + type(value)(1)
        seen.add(replace(made, **{field.name: other}).digest)
    assert len(seen) == len(fields(made)) - 1, (
        "all but the reports and the time, and the plan's own"
    )


def shortest_order(seconds: np.ndarray, *, stages: int, virtual_stages: int) -> float:
    """Makespan of the best of all orders of waves, whose chunks take equally long."""
    chunks = stages * virtual_stages
    forward = np.repeat(seconds[:, None] / 3 / chunks, chunks, axis=1)
    return min(
        simulate_1f1b(
            forward[list(order)], 2 * forward[list(order)], virtual_stages=virtual_stages
        ).makespan_s
        for order in permutations(range(len(seconds)))
    )


@pytest.mark.parametrize("seed", range(4))
def test_waves_of_an_interleaved_job_are_in_the_simulator_s_best_order(seed):
    samples = step_samples(70, seed, longest=2000)
    made = {}
    for virtual_stages in (1, 2):
        topology = Topology(
            world_size=8, ranks_per_replica=2, pipeline_stages=2, virtual_stages=virtual_stages
        )
        free = PhaseCost(linear_s_per_token=0.0)
        options = PlanOptions(
            memory_tokens=MEMORY,
            pack="balanced",
            context="power_of_two",
            cost=CostModel(vision=free, audio=free),
        )
        planned = compose_step(samples, step=0, topology=topology, options=options)
        (report,) = [stage for stage in planned.stages if stage.stage == "order"]
        seconds = np.array(
            [max(g.seconds for g in planned.groups(w)) for w in range(planned.waves)]
        )
        assert 3 <= planned.waves <= 7, "few enough to try every order"
        best_s = shortest_order(seconds, stages=2, virtual_stages=virtual_stages)
        assert report.after == pytest.approx(best_s, rel=1e-12)
        assert report.lower_bound == pytest.approx(seconds.sum() / 2)
        made[virtual_stages] = report.after
    assert made[2] < made[1], "interleaving shortens the bubble"


def test_what_a_batch_of_items_takes_by_itself_counts_once_a_wave():
    samples = step_samples(30, 4, longest=2000)
    plain, launched = CostModel(), replace(CostModel(), vision=PhaseCost(
        linear_s_per_token=1.2e-5, item_s=1e-3, batch_s=0.5))  # fmt: skip
    before, after = (plan(samples, 4, None, cost=cost, pack="joint") for cost in (plain, launched))
    assert (before.item_replica == after.item_replica).all()
    pack_of = np.repeat(np.arange(len(before.pack_wave)), np.diff(before.pack_offsets))
    wave_of = np.empty(30, int)
    wave_of[before.pack_samples] = before.pack_wave[pack_of]
    waves = len(set(wave_of[before.item_sample[before.item_modality == Modality.VISION]]))
    assert waves > 1
    assert after.predicted_s - before.predicted_s == pytest.approx(0.5 * waves)
    assert before.cost_version != after.cost_version


def few_images(order: np.ndarray) -> StepSamples:
    """512 samples in this order, of which one in eight has an image that takes eight times as long
    as its text."""
    generator = np.random.default_rng(0)
    has_image = np.arange(512) < 64
    return workloads.step_samples(
        workloads.Workload(
            name="few images",
            llm_tokens=generator.integers(850, 1000, 512)[order],
            media_llm_tokens=np.where(has_image, 20, 0)[order],
            encoder_tokens=np.where(has_image, generator.integers(6000, 8000, 512), 0)[order],
        )
    )


LINEAR = CostModel(
    llm=ContextCost(attention_s_per_token2=0.0, linear_s_per_token=1e-4),
    vision=PhaseCost(linear_s_per_token=1e-4),
)


@pytest.mark.parametrize("order", [np.arange(512), np.random.default_rng(1).permutation(512)])
def test_heavy_items_share_waves_however_their_samples_were_drawn(order):
    made = plan(few_images(order), 64, None, memory_tokens=1000, cost=LINEAR)
    validate_plan(made, memory_tokens=1000, sample_count=512)
    assert np.unique(made.pack_wave[encoder_items(made, LINEAR).pack]).size == 1
    assert made.stages[-1].gap < 0.02


@pytest.mark.parametrize("order", [np.arange(512), np.random.default_rng(1).permutation(512)])
def test_replicas_that_meet_once_a_step_encode_as_much_over_all_waves(order):
    topology = Topology(world_size=16, replicas_meet="step")
    made = compose_step(
        few_images(order),
        step=0,
        topology=topology,
        options=PlanOptions(memory_tokens=1000, cost=LINEAR),
    )
    validate_plan(made, memory_tokens=1000, sample_count=512)
    assert made.stages[-1].gap < 0.03


@pytest.mark.parametrize(
    ("mix", "cost"), [("vlm_sft", "7B"), ("long_text", "1B"), ("vlm_long", "7B")]
)
def test_more_memory_than_a_step_needs_makes_no_pipeline_slower(mix, cost):
    """`memory_tokens` is a limit: where it holds a whole step, microbatches are still small."""
    samples = workloads.step_samples(getattr(workloads, mix)(128, 1))
    topology = Topology(world_size=64, ranks_per_replica=8, pipeline_stages=8, replicas_per_node=8)
    took_s = [
        compose_step(
            samples,
            step=0,
            topology=topology,
            options=PlanOptions(memory_tokens=tokens, cost=CostModel(llm=COSTS[cost])),
        ).predicted_s
        for tokens in (8192, 32_768, 131_072)
    ]
    assert max(took_s) <= 1.05 * min(took_s)


@pytest.mark.parametrize("replicas", [1, 8, 64])
@pytest.mark.parametrize("tokens", [[1], [3, 3, 3], [1] * 50, [2, 9, 1]])
def test_a_pipeline_of_next_to_no_tokens_is_planned(tokens, replicas):
    samples = workloads.step_samples(text_only(np.array(tokens)))
    topology = Topology(world_size=4 * replicas, ranks_per_replica=4, pipeline_stages=4)
    for memory_tokens in (9, 8192):
        plan = compose_step(
            samples,
            step=0,
            topology=topology,
            options=PlanOptions(memory_tokens=memory_tokens, cost=CostModel(llm=COSTS["7B"])),
        )
        validate_plan(plan, memory_tokens=memory_tokens, sample_count=len(tokens))
