"""Encoder items over replicas: the bound holds, phases end near it, and nothing is lost."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import workloads
from dataservice.core.plan_options import PlanOptions
from dataservice.core.topology import Topology
from dataservice.planning.compose import compose_step
from dataservice.planning.nodes import level
from dataservice.planning.nodes.level import fill_node
from dataservice.planning.nodes.phases import phase_bounds, phase_loads, spread_phases


def spread(tokens, phase, home, *, ranks, ranks_per_node, tolerance=5e-3):
    """(rank of each item, seconds) for one second an item and ten a token."""
    tokens, phase = np.asarray(tokens, np.int32), np.asarray(phase)
    costs = 10.0 * tokens + 1.0
    whole, phases = np.ones(tokens.size, np.int32), int(phase.max()) + 1
    rank_of = spread_phases(
        phase,
        costs,
        tokens,
        np.asarray(home, np.int32),
        tokens,
        bounds=phase_bounds(phase, costs, tokens, whole, costs, phases, ranks),
        ranks=ranks,
        ranks_per_node=ranks_per_node,
        tolerance=tolerance,
    )
    return rank_of, costs


def least_largest_load(costs, ranks):
    """Smallest largest load of all assignments."""
    loads = [
        np.bincount(ranks_of, weights=costs, minlength=ranks).max()
        for ranks_of in product(range(ranks), repeat=len(costs))
    ]
    return min(loads)


@settings(max_examples=60, deadline=None)
@given(
    tiles=st.lists(st.sampled_from([1, 3, 5]), min_size=1, max_size=7),
    unit=st.sampled_from([1, 4, 256]),
    item_s=st.sampled_from([0.0, 1.0, 50.0]),
    linear=st.sampled_from([0.0, 1e-14, 1e-2]),
    squared=st.sampled_from([0.0, 1e-14, 1e-3]),
    ranks=st.integers(1, 3),
)
def test_no_assignment_is_below_the_bound_of_a_phase(tiles, unit, item_s, linear, squared, ranks):
    tokens = np.array(tiles, np.int32) * np.int32(unit)
    costs = linear * tokens + squared * tokens.astype(float) ** 2 + item_s
    (bound,) = phase_bounds(
        np.zeros(len(tiles), np.int64),
        costs,
        tokens,
        np.ones(len(tiles), np.int32),
        costs,
        1,
        ranks,
    )
    assert bound <= least_largest_load(costs, ranks) * (1 + 1e-9)


def test_a_tile_is_not_divided_over_replicas():
    # 9 tiles over 8 replicas: one of them holds two, whatever the mean says.
    tokens = np.full(9, 1024, np.int32)
    costs = tokens * 1.0
    (bound,) = phase_bounds(np.zeros(9, np.int64), costs, tokens, np.ones(9, np.int32), costs, 1, 8)
    assert bound == 2048


@settings(max_examples=40, deadline=None)
@given(
    clips=st.lists(st.tuples(st.integers(1, 4), st.sampled_from([2, 3])), min_size=1, max_size=3),
    item_s=st.sampled_from([0.0, 1.0, 7.0]),
    ranks=st.integers(1, 3),
)
def test_no_way_of_cutting_clips_is_below_the_bound_of_a_phase(clips, item_s, ranks):
    units, size = np.array(clips, np.int32).T
    unit_s = np.where(size == 2, 2.0, 3.5)
    clip_of = np.repeat(np.arange(len(clips)), units)
    least = np.inf
    for ranks_of in product(range(ranks), repeat=clip_of.size):
        loads = np.bincount(ranks_of, weights=unit_s[clip_of], minlength=ranks)
        pieces = set(zip(clip_of.tolist(), ranks_of, strict=True))
        np.add.at(loads, [rank for _, rank in pieces], item_s)
        least = min(least, loads.max())
    (bound,) = phase_bounds(
        np.zeros(len(clips), np.int64), units * unit_s + item_s, units * size, units,
        unit_s + item_s, 1, ranks,
    )  # fmt: skip
    assert bound <= least * (1 + 1e-9)


def test_a_bound_counts_tiles_and_items_together():
    # Two replicas, 9 tiles in 7 items. One has 5 tiles: in three items they take 62, and in two the
    # other had 4 tiles in 5 items.
    tokens = np.array([1, 1, 1, 1, 1, 1, 3], np.int32)
    costs = 10.0 * tokens + 4.0
    bounds = phase_bounds(np.zeros(7, np.int64), costs, tokens, np.ones(7, np.int32), costs, 1, 2)
    assert costs.sum() / 2 == 59
    assert bounds[0] == pytest.approx(62, rel=1e-3)
    assert least_largest_load(costs, 2) == 62


@pytest.mark.parametrize("token_s", [0.0, 1e-14, 1e-9])
def test_items_whose_tokens_weigh_next_to_nothing_are_bounded_by_their_number_at_once(token_s):
    """As `calibrate` fits an encoder of which each item takes as long; the bound never came."""
    tokens = np.random.default_rng(0).integers(1, 40, 62).astype(np.int32)
    costs = token_s * tokens + 4.0
    ones, phase = np.ones(62, np.int32), np.zeros(62, np.int64)
    (bound,) = phase_bounds(phase, costs, tokens, ones, costs, 1, 19)
    assert bound == pytest.approx(16.0)  # four items


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(1, 200),
    phases=st.integers(1, 3),
    ranks=st.integers(1, 40),
    ranks_per_node=st.sampled_from([1, 3, 8, 40]),
    tolerance=st.sampled_from([0.0, 0.005, 0.5]),
    crowded=st.booleans(),
    seed=st.integers(0, 100),
)
def test_every_item_gets_a_replica_and_no_phase_is_worse_than_at_home(
    n, phases, ranks, ranks_per_node, tolerance, crowded, seed
):
    generator = np.random.default_rng(seed)
    tokens = generator.choice([1, 3, 5], n)
    phase = generator.integers(0, phases, n)
    home = generator.integers(0, max(1, ranks // 4) if crowded else ranks, n)
    made, costs = spread(
        tokens, phase, home, ranks=ranks, ranks_per_node=ranks_per_node, tolerance=tolerance
    )
    assert made.min() >= 0
    assert made.max() < ranks
    again, _ = spread(
        tokens, phase, home, ranks=ranks, ranks_per_node=ranks_per_node, tolerance=tolerance
    )
    np.testing.assert_array_equal(made, again)
    loads = phase_loads(phase, costs, made, int(phase.max()) + 1, ranks)
    assert loads.sum() == pytest.approx(costs.sum())
    at_home = phase_loads(phase, costs, home.astype(np.int32), int(phase.max()) + 1, ranks)
    assert (loads.max(axis=1) <= at_home.max(axis=1) * (1 + 1e-9)).all()


@settings(max_examples=80, deadline=None)
@given(
    costs=st.lists(st.floats(0.1, 100), min_size=1, max_size=60),
    ranks=st.integers(1, 12),
    slack=st.floats(1.0, 2.0),
)
def test_a_filled_node_is_never_worse_than_a_greedy_one(costs, ranks, slack):
    fell = np.sort(np.array(costs))[::-1].copy()
    greedy = np.zeros(ranks)
    for cost in fell:
        greedy[greedy.argmin()] += cost
    rank_at = np.empty(fell.size, np.int64)
    largest = fill_node(fell, ranks, slack * fell.sum() / ranks, rank_at)
    loads = np.bincount(rank_at, weights=fell, minlength=ranks)
    assert loads.max() == largest  # which is worked out before any rank is named
    assert largest <= greedy.max() * (1 + 1e-9)


def test_the_rank_with_most_tiles_holds_few_items():
    # 17 tiles over 2 ranks of at most 9 tiles: a second an item tells which rank has the ninth.
    tiles = np.array([5, 3, 1, 1, 1, 1, 1, 1, 1, 1, 1], float)
    fell = 10 * tiles + 1
    rank_at = np.empty(fell.size, np.int64)
    largest = fill_node(fell, 2, 94.0, rank_at)
    assert largest == 93.0


def test_a_node_without_small_items_hands_on_what_does_not_fit():
    # Three nodes of two ranks; the first holds an odd number of equal items, the others have room.
    tokens = [4] * 7 + [4] * 5 + [4] * 5 + [4] * 5 + [4] * 6
    home = [0] * 7 + [2] * 5 + [4] * 5 + [6] * 5 + [8] * 6
    made, _ = spread(tokens, [0] * 28, home, ranks=10, ranks_per_node=2, tolerance=0.5)
    assert np.bincount(made, minlength=10).max() == 3


def phase_gap(seed):
    """How far a phase of unequal tiles on four nodes of four ranks ends above its bound."""
    rng = np.random.default_rng(seed)
    tiles = rng.choice([1, 3, 5, 13], int(rng.integers(60, 200))).astype(np.int32)
    node, costs = rng.integers(0, 4, tiles.size), 10.0 * tiles + 1.0
    alone, one = np.zeros(tiles.size, np.int64), np.ones(tiles.size, np.int32)
    (bound,) = phase_bounds(alone, costs, tiles, one, costs, 1, 16)
    begins = np.append(0, np.cumsum(np.bincount(node, minlength=4)))
    falling = costs[np.lexsort((-costs, node))]
    rank_at = np.empty(tiles.size, np.int32)
    # As Python, so that the number of lower caps is read anew.
    level.level_phase.py_func(falling, begins, bound, 16, 4, rank_at)
    return np.bincount(rank_at, weights=falling, minlength=16).max() / bound - 1


def test_lower_caps_end_a_phase_nearer_its_bound_and_never_further(monkeypatch):
    with_them = np.array([phase_gap(seed) for seed in range(12)])
    monkeypatch.setattr(level, "LOWER_CAPS", 0)
    without = np.array([phase_gap(seed) for seed in range(12)])
    assert (with_them <= without).all()
    assert (with_them < without).sum() >= 4
    assert with_them.mean() < 0.95 * without.mean()


@pytest.mark.parametrize(
    ("mix", "memory", "most_gap"),
    [(workloads.vlm_sft, 8192, 0.011), (workloads.vlm_long, 32_768, 0.016)],
)
def test_encoders_of_a_step_end_near_their_bound(mix, memory, most_gap):
    plan = compose_step(
        workloads.step_samples(mix(38_400, 0)),
        step=0,
        topology=Topology(world_size=640, replicas_per_node=8),
        options=PlanOptions(memory_tokens=memory),
    )
    (report,) = [stage for stage in plan.stages if stage.stage == "dispatch vision"]
    assert report.gap <= most_gap
