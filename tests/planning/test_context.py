import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.exact import best_context_waves
from benchmarks.planning.context import small_case
from benchmarks.workloads import video
from dataservice.core.cost import ContextCost
from dataservice.core.errors import PlanningError
from dataservice.core.layout import padded_tokens
from dataservice.planning.context import exact
from dataservice.planning.context.groups import (
    plan_context_groups,
    plan_context_waves,
    plan_static_context,
)

COST = ContextCost.flexsp_7b()
# A ring across nodes is slower than doing without: units leave groups that had to cross.
SLOW_BETWEEN_NODES = [
    ContextCost(
        attention_s_per_token2=1e-6,
        linear_s_per_token=1e-4,
        ring_intra_s_per_token=1e-6,
        ring_inter_s_per_token=1e-2,
    ),
    ContextCost(
        attention_s_per_token2=5e-9,
        linear_s_per_token=1.84e-4,
        group_s=0.629,
        ring_intra_s_per_token=5e-6,
        ring_inter_s_per_token=1e-3,
        ring_hop_s=2e-5,
    ),
]
FREE_RING = ContextCost(attention_s_per_token2=5e-9, linear_s_per_token=2e-4, group_s=0.5)


def long_text(rng, count, longest):
    tokens = rng.lognormal(5.95, 1.26, count)
    tail = rng.random(count) < 0.03
    tokens[tail] = 2000 * rng.pareto(1.1, tail.sum()) + 2000
    return np.clip(tokens, 16, longest).astype(np.int64)


def check_wave(plan, tokens, *, ranks, memory, cost, node=None, share=None, power=False):
    """Every promise of one wave, from its arrays, in plain Python."""
    node = node or ranks
    used = []
    for group in plan.groups:
        members = tokens[group.samples]
        padded = padded_tokens(members, group.degree)
        crosses = len({r // node for r in group.ranks}) > 1
        shares = None if share is None else share[group.samples]
        assert group.degree == len(group.ranks) >= 1
        assert len(group.samples) >= 1
        assert not power or group.degree & (group.degree - 1) == 0
        assert group.padded_tokens == padded.sum() <= memory * group.degree
        expected = cost.time_s(members, group.degree, shares, crosses)
        assert group.time_s == pytest.approx(expected, rel=1e-9)
        used += group.ranks
    assert len(set(used)) == len(used) <= ranks
    assert all(0 <= r < ranks for r in used)
    assert plan.makespan_s >= plan.lower_bound_s * (1 - 1e-9)


def visited(waves):
    return sorted(np.concatenate([wave.samples for wave in waves]).tolist())


@settings(max_examples=60, deadline=None)
@given(
    tokens=st.lists(st.integers(1, 3000), min_size=0, max_size=40),
    ranks=st.integers(1, 12),
    memory=st.integers(300, 4000),
    node=st.sampled_from([None, 1, 3, 4]),
    degrees=st.sampled_from(["any", "power_of_two"]),
    solver=st.sampled_from(["threshold", "dp"]),
    seed=st.integers(0, 3),
)
def test_waves_hold_every_sample_once_within_memory_and_ranks(
    tokens, ranks, memory, node, degrees, solver, seed
):
    lengths = np.array(tokens, dtype=np.int64)
    share = np.random.default_rng(seed).random(lengths.size)
    machine = {
        "ranks": ranks,
        "memory_tokens": memory,
        "cost": COST,
        "full_attention": share,
        "ranks_per_node": node,
        "solver": solver,
        "degrees": degrees,
    }
    widths = [d for d in range(1, ranks + 1) if degrees == "any" or d & (d - 1) == 0]
    if any(all(padded_tokens([t], d)[0] > memory * d for d in widths) for t in tokens):
        with pytest.raises(PlanningError, match="replicas of"):
            plan_context_waves(lengths, **machine)
        return
    plan = plan_context_waves(lengths, **machine)
    for wave in plan.waves:
        check_wave(
            wave,
            lengths,
            ranks=ranks,
            memory=memory,
            cost=COST,
            node=node,
            share=share,
            power=degrees == "power_of_two",
        )
    if tokens:
        assert visited(plan.waves) == list(range(len(tokens)))
        assert plan.makespan_s >= plan.lower_bound_s * (1 - 1e-9)


def test_a_group_that_all_its_samples_left_has_no_ranks_and_no_time(monkeypatch):
    monkeypatch.setattr(exact, "WAVE_LOOKS", 0)  # as if they were too many to try
    tokens = np.array([241, 229, 62, 40, 297])
    machine = {"ranks": 7, "memory_tokens": 256, "cost": SLOW_BETWEEN_NODES[0]}
    plan = plan_context_groups(tokens, ranks_per_node=3, **machine)
    check_wave(plan, tokens, ranks=7, memory=256, cost=SLOW_BETWEEN_NODES[0], node=3)
    assert visited([plan]) == [0, 1, 2, 3, 4]
    assert plan.degrees.sum() < 7, "the ranks of the empty group are idle"


@pytest.mark.parametrize("cost", SLOW_BETWEEN_NODES)
@pytest.mark.parametrize("node", [4, 8])
def test_steps_of_long_samples_and_slow_networks_hold_every_promise(cost, node):
    memory = 1024
    for seed in range(129):  # the 36 and the 480 steps, over both costs and nodes
        rng = np.random.default_rng(seed)
        tokens = (memory * rng.uniform(0.5, 4, int(rng.integers(3, 48)))).astype(np.int64)
        ranks = int(rng.integers(5, 33))
        plan = plan_context_waves(
            tokens, ranks=ranks, memory_tokens=memory, cost=cost, ranks_per_node=node
        )
        for wave in plan.waves:
            check_wave(wave, tokens, ranks=ranks, memory=memory, cost=cost, node=node)
        assert visited(plan.waves) == list(range(len(tokens)))


def partitions(items):
    if not items:
        yield []
        return
    head, *rest = items
    for parts in partitions(rest):
        for at in range(len(parts)):
            yield [*parts[:at], [head, *parts[at]], *parts[at + 1 :]]
        yield [[head], *parts]


def best_wave(tokens, ranks, memory, cost):
    best = np.inf
    for parts in partitions(list(range(len(tokens)))):
        for degrees in itertools.product(range(1, ranks + 1), repeat=len(parts)):
            if sum(degrees) > ranks:
                continue
            times = []
            for part, d in zip(parts, degrees, strict=True):
                if padded_tokens(tokens[part], d).sum() > memory * d:
                    break
                times.append(cost.time_s(tokens[part], d))
            else:
                best = min(best, max(times))
    return best


def test_a_wave_is_close_to_the_best_of_all_groupings_on_small_cases():
    rng = np.random.default_rng(5)
    ratios = []
    for _ in range(40):
        tokens = rng.integers(500, 20_000, 5)
        best = best_wave(tokens, 4, 16_000, COST)
        if not np.isfinite(best):
            continue
        plan = plan_context_groups(tokens, ranks=4, memory_tokens=16_000, cost=COST)
        check_wave(plan, tokens, ranks=4, memory=16_000, cost=COST)
        assert plan.lower_bound_s <= best * (1 + 1e-9)
        ratios.append(plan.makespan_s / best)
    assert len(ratios) > 25
    assert np.mean(ratios) < 1.02


def small_cases(count, seed=0):
    """Tokens and machine: memory tight or loose, nodes of any size, rings between them slow."""
    rng = np.random.default_rng(seed)
    for _ in range(count):
        tokens, setting = small_case(rng)
        yield tokens, setting, best_context_waves(tokens, **setting)


def test_few_samples_on_few_ranks_get_the_best_of_all_waves():
    for tokens, setting, best_s in small_cases(150):
        made = plan_context_waves(tokens, **setting)
        assert made.makespan_s == pytest.approx(best_s, rel=1e-9)
        assert made.lower_bound_s == pytest.approx(best_s, rel=1e-9)
        for wave in made.waves:
            node, memory = setting["ranks_per_node"], setting["memory_tokens"]
            cost, ranks = setting["cost"], setting["ranks"]
            check_wave(wave, tokens, ranks=ranks, memory=memory, cost=cost, node=node)
        assert visited(made.waves) == list(range(len(tokens)))


def test_waves_that_are_not_all_tried_come_near_the_best_once_mended(monkeypatch):
    """Each step here is small enough to try all waves; the search for more samples has to plan it,
    with the groups of each wave tried (as of samples of a wave), and without."""
    monkeypatch.setattr(exact, "STEP_LOOKS", 0)
    for looks, mean, worst in ((exact.WAVE_LOOKS, 1.002, 1.25), (0, 1.006, 2.1)):
        monkeypatch.setattr(exact, "WAVE_LOOKS", looks)
        over = []
        for tokens, setting, best_s in small_cases(300):
            made = plan_context_waves(tokens, **setting)
            assert made.lower_bound_s <= best_s * (1 + 1e-9)
            over.append(made.makespan_s / best_s)
        assert min(over) >= 1 - 1e-9
        assert np.mean(over) <= mean
        assert max(over) <= worst


@pytest.mark.parametrize(("seed", "most_gap"), [(4, 0.015), (5, 0.04), (8, 0.04)])
def test_waves_are_as_few_as_memory_allows_where_it_is_nearly_full(seed, most_gap):
    """Three waves of a memory that is 91, 99.7 and 95 % full; in the last, two of the samples are
    a sixth of a wave each, and the bound knows both."""
    tokens = video(512, seed).llm_tokens
    machine = {"ranks": 64, "memory_tokens": 8192, "cost": COST, "ranks_per_node": 8}
    plan = plan_context_waves(tokens, **machine)
    for wave in plan.waves:
        check_wave(wave, tokens, ranks=64, memory=8192, cost=COST, node=8)
    assert visited(plan.waves) == list(range(512))
    assert len(plan.waves) == 3
    assert plan.makespan_s <= (1 + most_gap) * plan.lower_bound_s


def test_a_wave_is_never_slower_than_any_static_degree():
    for seed in range(12):
        tokens = long_text(np.random.default_rng(seed), 96, 60_000)
        machine = {"ranks": 16, "memory_tokens": 16_384, "cost": COST, "ranks_per_node": 8}
        plan = plan_context_groups(tokens, **machine)
        for degree in (1, 2, 4, 8, 16):
            try:
                static = plan_static_context(tokens, degree=degree, **machine)
            except PlanningError:
                continue
            assert visited(static.waves) == list(range(96))
            assert plan.makespan_s <= static.makespan_s * (1 + 1e-9)


def test_long_text_stays_near_the_bound_at_64_replicas():
    ratios = []
    for seed in range(8):
        tokens = long_text(np.random.default_rng(seed), 512, 100_000)
        plan = plan_context_groups(
            tokens, ranks=64, memory_tokens=65_536, cost=COST, ranks_per_node=8
        )
        check_wave(plan, tokens, ranks=64, memory=65_536, cost=COST, node=8)
        ratios.append(plan.makespan_s / plan.lower_bound_s)
    assert np.mean(ratios) <= 1.03


def test_both_solvers_plan_alike():
    for seed in range(10):
        tokens = long_text(np.random.default_rng(seed), 64, 40_000)
        plans = [
            plan_context_groups(tokens, ranks=16, memory_tokens=32_768, cost=COST, solver=solver)
            for solver in ("threshold", "dp")
        ]
        assert plans[0].makespan_s == pytest.approx(plans[1].makespan_s, rel=1e-9)


def test_one_long_sample_takes_every_replica_when_rings_are_free():
    plan = plan_context_groups([64_000], ranks=7, memory_tokens=10_000, cost=FREE_RING)
    assert plan.groups[0].degree == 7
    assert plan.makespan_s == pytest.approx(FREE_RING.time_s([64_000], 7))


def test_the_same_input_gives_the_same_plan_and_is_not_changed():
    tokens = long_text(np.random.default_rng(1), 200, 50_000)
    kept = tokens.copy()
    first, second = (
        plan_context_waves(tokens, ranks=12, memory_tokens=9000, cost=COST) for _ in range(2)
    )
    assert (tokens == kept).all()
    for a, b in zip(first.waves, second.waves, strict=True):
        assert a.samples.tolist() == b.samples.tolist()
        assert a.ranks.tolist() == b.ranks.tolist()


def test_packs_stay_whole_and_alone():
    rng = np.random.default_rng(2)
    tokens = rng.integers(100, 900, 300)
    tokens[0] = 9000
    packs = np.arange(300) // 4 + 1
    packs[0] = 0
    plan = plan_context_waves(tokens, ranks=8, memory_tokens=4096, cost=COST, packs=packs)
    seen = []
    for wave in plan.waves:
        check_wave(wave, tokens, ranks=8, memory=4096, cost=COST)
        for group in wave.groups:
            (pack,) = set(packs[group.samples].tolist())
            assert (packs == pack).sum() == len(group.samples)
            seen.append(pack)
    assert sorted(seen) == sorted(set(packs.tolist()))


def test_a_pack_limit_below_memory_is_kept():
    tokens = np.full(40, 700)
    plan = plan_context_waves(
        tokens, ranks=4, memory_tokens=100_000, max_pack_tokens=2100, cost=COST
    )
    for wave in plan.waves:
        check_wave(wave, tokens, ranks=4, memory=2100, cost=COST)
    assert len(plan.waves) == 4


def test_a_lone_giant_does_not_hold_up_the_rest():
    tokens = np.array([300_000] + [1500] * 300)
    plan = plan_context_waves(tokens, ranks=32, memory_tokens=16_384, cost=COST, ranks_per_node=8)
    assert plan.makespan_s <= 1.25 * plan.lower_bound_s


def test_static_groups_have_their_degree_and_lose_to_waves():
    tokens = long_text(np.random.default_rng(4), 300, 30_000)
    machine = {"ranks": 16, "memory_tokens": 8192, "cost": COST, "ranks_per_node": 4}
    dynamic = plan_context_waves(tokens, **machine)
    static = plan_static_context(tokens, degree=4, **machine)
    for wave in static.waves:
        check_wave(wave, tokens, ranks=16, memory=8192, cost=COST, node=4)
        assert set(wave.degrees.tolist()) == {4}
    assert visited(static.waves) == list(range(300))
    assert dynamic.makespan_s <= static.makespan_s


MACHINE = {"ranks": 4, "memory_tokens": 1000, "cost": COST}


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda: plan_context_waves([10, 9000], **MACHINE),
            r"sample 1 has 9000 tokens; 4 replicas of 1000 tokens hold 4000.*give 9 replicas",
        ),
        (lambda: plan_context_groups([900] * 9, **MACHINE), "need 9 replicas.*there are 4"),
        (lambda: plan_context_groups([9], ranks=0, memory_tokens=1, cost=COST), "ranks is 0"),
        (
            lambda: plan_context_groups([9], ranks=1, memory_tokens=0, cost=COST),
            "memory_tokens is 0",
        ),
        (lambda: plan_context_groups([9], **MACHINE, ranks_per_node=0), "ranks_per_node is 0"),
        (lambda: plan_context_groups([9], **MACHINE, solver="magic"), "'magic'"),
        (lambda: plan_context_groups([9], **MACHINE, degrees="odd"), "'odd'"),
        (lambda: plan_context_waves([9, 0], **MACHINE), "sample 1 has 0 tokens"),
        (lambda: plan_context_waves([9, 9], **MACHINE, packs=[0]), "pack of each sample"),
        (lambda: plan_context_waves([9, 9], **MACHINE, packs=[0, -1]), "-1"),
        (lambda: plan_static_context([9], **MACHINE, degree=3), "degree is 3"),
        (lambda: plan_static_context([3500], **MACHINE, degree=2), "at least 4"),
    ],
)
def test_what_cannot_be_planned_is_refused_with_value_limit_and_remedy(call, words):
    with pytest.raises(PlanningError, match=words):
        call()


def test_no_samples_make_no_waves():
    assert plan_context_waves([], **MACHINE).waves == ()
    assert plan_context_groups([], **MACHINE).groups == ()
