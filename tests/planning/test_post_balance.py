import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataservice.core.errors import PlanningError
from dataservice.planning.standalone.conv_loads import balance_conv
from dataservice.planning.standalone.padded_loads import balance_padded
from dataservice.planning.standalone.quadratic_loads import balance_quadratic


def optimum(lengths, ranks, cost):
    """Smallest largest batch cost over all assignments; the first item may stay on rank 0."""
    best = np.inf
    for rest in itertools.product(range(ranks), repeat=len(lengths) - 1):
        batches = [[] for _ in range(ranks)]
        for length, rank in zip(lengths, (0, *rest), strict=True):
            batches[rank].append(length)
        best = min(best, max(cost(batch) for batch in batches if batch))
    return best


def padded(alpha, beta):
    return lambda batch: alpha * len(batch) * max(batch) + beta * len(batch) * max(batch) ** 2


def test_padded_balance_equals_brute_force():
    generator = np.random.default_rng(11)
    for case in range(250):
        ranks = int(generator.integers(1, 5))
        count = int(generator.integers(1, 9 if ranks < 4 else 8))
        lengths = generator.integers(0, 40, count)
        if case % 2:
            lengths = generator.lognormal(3, 1, count)
        alpha, beta = 1.0, (0.0, 0.01, 0.5)[case % 3]
        plan = balance_padded(lengths, ranks, alpha=alpha, beta=beta)
        best = optimum(lengths.tolist(), ranks, padded(alpha, beta))
        assert plan.max_load == pytest.approx(best, rel=1e-12)
        assert plan.lower_bound == pytest.approx(best, rel=1e-12)


@settings(max_examples=80, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 3000), min_size=1, max_size=80),
    ranks=st.integers(1, 20),
    beta=st.sampled_from([0.0, 1e-3]),
)
def test_padded_loads_are_those_of_the_batches_and_no_rank_idles_needlessly(lengths, ranks, beta):
    plan = balance_padded(lengths, ranks, beta=beta)
    counts = np.bincount(plan.rank_of, minlength=ranks)
    for rank in range(ranks):
        batch = [length for length, at in zip(lengths, plan.rank_of, strict=True) if at == rank]
        assert plan.loads[rank] == pytest.approx(padded(1.0, beta)(batch) if batch else 0.0)
    assert np.count_nonzero(counts) == min(ranks, len(lengths))


def test_quadratic_balance_minimises_the_sum_it_is_judged_by():
    generator = np.random.default_rng(5)
    for _ in range(40):
        lengths = generator.integers(1, 60, 7)
        plan = balance_quadratic(lengths, 3, alpha=1.0, beta=0.1)
        best = optimum(lengths.tolist(), 3, lambda b: sum(b) + 0.1 * sum(x * x for x in b))
        assert plan.max_load == pytest.approx(best)


def test_conv_balance_is_close_to_brute_force_and_above_its_certificate():
    generator = np.random.default_rng(6)
    ratios = []
    for case in range(60):
        lengths = generator.integers(1, 60, int(generator.integers(1, 8)))
        lam = (0.0, 0.01, 0.3)[case % 3]
        plan = balance_conv(lengths, 3, alpha=1.0, lam=lam)
        best = optimum(lengths.tolist(), 3, lambda b, lam=lam: sum(b) + lam * len(b) * max(b) ** 2)
        assert plan.lower_bound <= best * (1 + 1e-9)
        ratios.append(plan.max_load / best)
    assert min(ratios) >= 1 - 1e-9
    assert max(ratios) <= 1.12
    assert np.mean(ratios) <= 1.01


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 3000), min_size=1, max_size=60),
    ranks=st.integers(1, 12),
    lam=st.sampled_from([0.0, 1e-3, 1.0]),
)
def test_conv_loads_are_those_of_the_batches(lengths, ranks, lam):
    plan = balance_conv(lengths, ranks, alpha=1.0, lam=lam)
    for rank in range(ranks):
        batch = [length for length, at in zip(lengths, plan.rank_of, strict=True) if at == rank]
        cost = sum(batch) + lam * len(batch) * max(batch) ** 2 if batch else 0.0
        assert plan.loads[rank] == pytest.approx(cost)
    assert plan.lower_bound <= plan.max_load


def test_conv_balance_is_near_its_bound_with_many_items():
    lengths = np.random.default_rng(0).lognormal(6, 0.6, 1920)
    assert balance_conv(lengths, 30, alpha=1.0, lam=1e-4).gap < 0.05


@pytest.mark.parametrize(
    "call",
    [
        lambda lengths, ranks: balance_padded(lengths, ranks),
        lambda lengths, ranks: balance_quadratic(lengths, ranks, alpha=1.0, beta=0.1),
        lambda lengths, ranks: balance_conv(lengths, ranks, alpha=1.0, lam=0.1),
    ],
)
def test_bad_lengths_and_ranks_are_refused(call):
    with pytest.raises(PlanningError, match=r"lengths\[1\] is -3"):
        call([1, -3], 2)
    with pytest.raises(PlanningError, match="ranks is 0"):
        call([1], 0)
    assert call([], 2).loads.tolist() == [0, 0]


def test_bad_coefficients_are_refused():
    with pytest.raises(PlanningError, match="beta is nan"):
        balance_padded([1], 1, beta=np.nan)
    with pytest.raises(PlanningError, match="lam is -1"):
        balance_conv([1], 1, alpha=1.0, lam=-1)
