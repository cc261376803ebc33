import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataservice.core.errors import PlanningError
from dataservice.planning.standalone.node_balance import balance_nodewise
from dataservice.planning.standalone.node_rearrange import rearrange_nodewise


def traffic(volume, permutation, ranks_per_node):
    """Largest volume a rank sends to or receives from other nodes, and the total."""
    placed = np.zeros_like(volume)
    placed[:, permutation] = volume
    node = np.arange(len(volume)) // ranks_per_node
    crossing = np.where(node[:, None] != node[None, :], placed, 0.0)
    return max(crossing.sum(axis=1).max(), crossing.sum(axis=0).max()), crossing.sum()


def balanced_volume(ranks, items, seed=0):
    """Volumes of a random spread of items that started evenly."""
    generator = np.random.default_rng(seed)
    volume = np.zeros((ranks, ranks))
    home = np.repeat(np.arange(ranks), items)
    np.add.at(
        volume, (home, generator.integers(0, ranks, home.size)), generator.lognormal(size=home.size)
    )
    return volume


@pytest.mark.parametrize("method", ["auto", "ilp", "search"])
@pytest.mark.parametrize(("ranks", "ranks_per_node"), [(4, 4), (4, 2), (8, 2), (12, 4), (5, 1)])
def test_batches_are_permuted_and_the_traffic_is_what_is_reported(method, ranks, ranks_per_node):
    volume = balanced_volume(ranks, 5, seed=ranks)
    plan = rearrange_nodewise(volume, ranks_per_node, method=method)
    assert sorted(plan.permutation) == list(range(ranks))
    largest, total = traffic(volume, plan.permutation, ranks_per_node)
    assert plan.inter_node_max == pytest.approx(largest)
    assert plan.inter_node_volume == pytest.approx(total)
    assert plan.lower_bound <= plan.inter_node_max
    stay, _ = traffic(volume, np.arange(ranks), ranks_per_node)
    assert plan.inter_node_max <= stay * (1 + 1e-9) or method == "search"


def test_the_integer_program_equals_brute_force():
    for seed in range(6):
        volume = balanced_volume(6, 3, seed)
        best = min(
            traffic(volume, np.array(permutation), 2)[0]
            for permutation in itertools.permutations(range(6))
        )
        plan = rearrange_nodewise(volume, 2, method="ilp")
        assert plan.inter_node_max == pytest.approx(best)
        assert plan.lower_bound == pytest.approx(best, rel=1e-4)
        search = rearrange_nodewise(volume, 2, method="search")
        assert search.lower_bound <= best * (1 + 1e-9)
        assert search.inter_node_max <= best * 1.25


def test_batches_that_belong_together_go_home():
    # Batch j was made wholly from rank (j + 3) mod 8: a renumbering removes all traffic.
    volume = np.roll(np.eye(8) * 7.0, 3, axis=0)
    plan = rearrange_nodewise(volume, 4)
    assert plan.inter_node_max == 0
    np.testing.assert_array_equal(plan.permutation, (np.arange(8) + 3) % 8)


@settings(max_examples=40, deadline=None)
@given(
    items=st.integers(0, 120),
    nodes=st.integers(1, 5),
    ranks_per_node=st.integers(1, 4),
    tolerance=st.sampled_from([0.0, 0.005, 0.5]),
    seed=st.integers(0, 100),
)
def test_nodewise_balance_conserves_items_and_counts_what_crosses(
    items, nodes, ranks_per_node, tolerance, seed
):
    generator = np.random.default_rng(seed)
    ranks = nodes * ranks_per_node
    costs, volume = generator.lognormal(3, 1, (2, items))
    home = generator.integers(0, ranks, items)
    plan = balance_nodewise(costs, home, volume, ranks, ranks_per_node, tolerance=tolerance)
    assert plan.rank_of.shape == (items,)
    np.testing.assert_allclose(
        plan.loads, np.bincount(plan.rank_of, weights=costs, minlength=ranks)
    )
    away = plan.rank_of // ranks_per_node != home // ranks_per_node
    assert plan.inter_node_volume == pytest.approx(volume[away].sum())
    assert plan.lower_bound <= plan.loads.max()


def test_little_crosses_nodes_at_tight_balance():
    shares = []
    for seed in range(5):
        generator = np.random.default_rng(seed)
        tiles = generator.choice([1, 3, 5], 128 * 75, p=[0.70, 0.14, 0.16])
        tokens = 256 * tiles + generator.lognormal(np.log(267) - 0.18, 0.6, tiles.size)
        home = np.repeat(np.arange(128), 75)
        plan = balance_nodewise(tokens, home, tokens, 128, 8)
        assert plan.loads.max() / plan.loads.mean() <= 1.005
        shares.append(plan.inter_node_share)
    assert np.mean(shares) <= 0.01


def test_balanced_nodes_move_nothing():
    home = np.repeat(np.arange(8), 10)
    plan = balance_nodewise(np.ones(80), home, np.ones(80), 8, 4)
    assert plan.inter_node_volume == 0
    assert plan.loads.tolist() == [10] * 8


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: rearrange_nodewise(np.ones((2, 3)), 1), "shape"),
        (lambda: rearrange_nodewise(np.ones((6, 6)), 4), "6 ranks do not fill nodes of 4"),
        (lambda: rearrange_nodewise(-np.ones((2, 2)), 1), "negative"),
        (lambda: rearrange_nodewise(np.ones((2, 2)), 1, method="luck"), "luck"),
        (lambda: balance_nodewise([1], [2], [1], 2, 1), "home_rank runs from 2"),
        (lambda: balance_nodewise([1], [0, 1], [1], 2, 1), "one of each an item"),
        (lambda: balance_nodewise([1], [0], [1], 2, 1, tolerance=-1), "tolerance is -1"),
        (lambda: balance_nodewise([-1], [0], [1], 2, 1), r"costs\[0\] is -1"),
    ],
)
def test_bad_input_says_what_is_wrong(call, words):
    with pytest.raises(PlanningError, match=words):
        call()
