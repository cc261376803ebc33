"""Waves of many samples: nothing lost, memory and ranks kept, close to the bound."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataservice.core.cost import ContextCost
from dataservice.core.errors import PlanningError
from dataservice.planning.context.groups import ContextWaves, plan_context_waves
from dataservice.planning.context.many import find_many_waves

COST = ContextCost.flexsp_7b()


def mixture(n: int, seed: int, long_share: float) -> np.ndarray:
    """Images with some text, and a share of long documents."""
    rng = np.random.default_rng(seed)
    tokens = 256 * rng.choice([1, 3, 5], n, p=[0.7, 0.14, 0.16])
    tokens += np.maximum(rng.lognormal(5.4, 0.6, n).astype(int), 8)
    document = np.minimum(np.exp(rng.normal(8.5, 1.2, n)).astype(int) + 1, 200_000)
    return np.where(rng.random(n) < long_share, document, tokens)


def planned(tokens, **machine) -> ContextWaves:
    """As the group stage plans many samples."""
    return find_many_waves(tokens, **machine) or plan_context_waves(tokens, **machine)


def check(made: ContextWaves, tokens: np.ndarray, ranks: int, memory: int, node: int) -> None:
    samples = np.concatenate([wave.samples for wave in made.waves])
    assert sorted(samples.tolist()) == list(range(len(tokens)))
    for wave in made.waves:
        assert wave.degrees.sum() <= ranks
        assert len(set(wave.ranks.tolist())) == len(wave.ranks)
        assert wave.ranks.min() >= 0
        assert wave.ranks.max() < ranks
        assert (np.diff(wave.degrees) <= 0).all()
        for group in wave.groups:
            unit = 2 * group.degree if group.degree > 1 else 1
            padded = -(-tokens[group.samples] // unit) * unit
            assert group.padded_tokens == padded.sum() <= memory * group.degree
            crosses = len({rank // node for rank in group.ranks}) > 1
            seconds = COST.time_s(tokens[group.samples], group.degree, crosses_node=crosses)
            assert group.time_s == pytest.approx(seconds)
    assert made.lower_bound_s <= made.makespan_s * (1 + 1e-9)


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(1, 400),
    ranks=st.integers(1, 24),
    node=st.integers(1, 9),
    memory=st.sampled_from([4096, 9000, 32_768]),
    long_share=st.sampled_from([0.0, 0.05, 0.5]),
    degrees=st.sampled_from(["any", "power_of_two"]),
    seed=st.integers(0, 50),
)
def test_every_sample_is_in_one_group_within_memory(
    n, ranks, node, memory, long_share, degrees, seed
):
    held = memory * (ranks if degrees == "any" else 1 << (ranks.bit_length() - 1))
    tokens = np.minimum(mixture(n, seed, long_share), max(held - 2 * ranks, 1))
    made = planned(
        tokens,
        ranks=ranks,
        memory_tokens=memory,
        cost=COST,
        ranks_per_node=node,
        degrees=degrees,
    )
    check(made, tokens, ranks, memory, node)


@pytest.mark.parametrize(
    ("long_share", "memory", "most_gap"),
    [(0.0, 8192, 0.005), (0.05, 32_768, 0.03), (0.05, 65_536, 0.03)],
)
def test_many_samples_end_near_the_bound(long_share, memory, most_gap):
    tokens = mixture(60 * 160, 0, long_share)
    made = planned(tokens, ranks=160, memory_tokens=memory, cost=COST, ranks_per_node=8)
    check(made, tokens, 160, memory, 8)
    assert made.makespan_s <= made.lower_bound_s * (1 + most_gap)


def test_groups_that_a_node_holds_do_not_cross_nodes():
    tokens = mixture(60 * 160, 1, 0.05)
    made = planned(tokens, ranks=160, memory_tokens=32_768, cost=COST, ranks_per_node=8)
    for wave in made.waves:
        for group in wave.groups:
            nodes = {rank // 8 for rank in group.ranks}
            assert len(nodes) == -(-group.degree // 8)


def test_tight_memory_is_met_by_first_fit_rather_than_by_a_wave_more():
    tokens = np.full(1000, 333)
    tokens[::2] = 667
    made = planned(tokens, ranks=50, memory_tokens=1000, cost=COST)
    assert len(made.waves) == 10


def test_the_same_samples_give_the_same_waves():
    tokens = mixture(3000, 2, 0.05)
    first, second = (
        planned(tokens, ranks=48, memory_tokens=32_768, cost=COST, ranks_per_node=8)
        for _ in range(2)
    )
    for one, other in zip(first.waves, second.waves, strict=True):
        assert one.samples.tolist() == other.samples.tolist()
        assert one.ranks.tolist() == other.ranks.tolist()


def test_a_sample_that_nothing_holds_is_named():
    with pytest.raises(PlanningError, match="has 9000 tokens; 2 replicas of 4096 tokens"):
        planned([9000, 10], ranks=2, memory_tokens=4096, cost=COST)


def test_no_samples_make_no_waves():
    assert planned([], ranks=2, memory_tokens=10, cost=COST).waves == ()
