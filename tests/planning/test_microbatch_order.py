import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataservice.core.errors import PlanningError
from dataservice.planning.pipeline_parallel.microbatch_order import order_microbatches
from dataservice.planning.pipeline_parallel.simulator import simulate_1f1b


def makespan(forward, backward, order, chunks=1):
    return simulate_1f1b(forward, backward, order=order, virtual_stages=chunks).makespan_s


def unequal(seed, count, stages):
    """Every microbatch and stage has its own lognormal time; backward is twice forward."""
    forward = np.random.default_rng(seed).lognormal(0, 0.8, (count, stages))
    return forward, 2 * forward


@settings(deadline=None, max_examples=40)
@given(
    count=st.integers(1, 24),
    stages=st.integers(1, 6),
    chunks=st.integers(1, 3),
    algorithm=st.sampled_from(["search", "mmscale"]),
    seed=st.integers(0, 50),
)
def test_an_order_names_every_microbatch_once(count, stages, chunks, algorithm, seed):
    forward, backward = unequal(seed, count, stages * chunks)
    kept = forward.copy()
    order = order_microbatches(forward, backward, virtual_stages=chunks, algorithm=algorithm)
    assert order.dtype == np.int32
    assert sorted(order.tolist()) == list(range(count))
    assert (forward == kept).all()


@pytest.mark.parametrize(("count", "stages"), [(6, 3), (6, 4), (7, 3)])
def test_the_search_finds_the_best_of_all_orders(count, stages):
    for seed in range(4):
        forward, backward = unequal(seed, count, stages)
        every = itertools.permutations(range(count))
        best = min(makespan(forward, backward, order) for order in every)
        found = makespan(forward, backward, order_microbatches(forward, backward))
        assert found <= best * 1.001


def test_the_search_is_never_worse_than_the_paper_or_the_given_order():
    for seed in range(10):
        for chunks in (1, 2):
            forward, backward = unequal(seed, 12, 4 * chunks)
            found, paper = (
                makespan(
                    forward,
                    backward,
                    order_microbatches(
                        forward, backward, virtual_stages=chunks, algorithm=algorithm
                    ),
                    chunks,
                )
                for algorithm in ("search", "mmscale")
            )
            assert found <= paper
            assert found <= makespan(forward, backward, None, chunks)


def test_the_search_beats_the_paper_by_a_twentieth_on_unequal_stages():
    gains = []
    for seed in range(5):
        forward, backward = unequal(seed, 32, 10)
        found, paper = (
            makespan(forward, backward, order_microbatches(forward, backward, algorithm=name))
            for name in ("search", "mmscale")
        )
        gains.append(paper / found - 1)
    assert np.mean(gains) >= 0.05


def test_the_paper_opens_with_the_smallest_and_closes_with_the_next_smallest():
    forward, backward = unequal(3, 16, 4)
    order = order_microbatches(forward, backward, algorithm="mmscale")
    sizes = (forward + backward).sum(axis=1)
    rising = np.argsort(sizes)
    assert order[0] == rising[0]
    assert set(order[-3:].tolist()) == set(rising[1:4].tolist())


def test_the_paper_fills_the_first_interval_with_the_closest_forwards():
    # Stage 0 waits 9 s for the first backward; of the middle three, 4 + 5 fill it exactly.
    forward = np.array(
        [[1, 1, 1], [4, 4, 4], [8, 8, 8], [5, 5, 5], [9, 9, 9], [2, 2, 2], [2, 2, 2]]
    )
    backward = np.full((7, 3), 3.5)
    order = order_microbatches(forward.astype(float), backward, algorithm="mmscale")
    assert order[0] == 0
    assert sorted(order[1:3].tolist()) == [1, 3]


def test_the_same_input_and_seed_give_the_same_order():
    forward, backward = unequal(9, 20, 5)
    orders = [order_microbatches(forward, backward).tolist() for _ in range(2)]
    assert orders[0] == orders[1]


def test_an_unknown_algorithm_is_refused():
    with pytest.raises(PlanningError, match="'best'"):
        order_microbatches(np.ones((2, 2)), np.ones((2, 2)), algorithm="best")


def test_a_search_without_operations_keeps_its_best_start():
    forward, backward = unequal(2, 16, 4)
    order = order_microbatches(forward, backward, operations=0)
    paper = order_microbatches(forward, backward, algorithm="mmscale")
    assert makespan(forward, backward, order) <= makespan(forward, backward, paper)
