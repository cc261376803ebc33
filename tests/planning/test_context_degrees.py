import itertools

import numpy as np
import pytest

from dataservice.core.errors import PlanningError
from dataservice.planning.context.degrees import degrees_by_dp, degrees_by_threshold

SOLVERS = [degrees_by_dp, degrees_by_threshold]


def makespan(times, degrees):
    return max(times[g, d - 1] for g, d in enumerate(degrees))


def random_table(rng, groups, ranks):
    """Falling times, or any times at all; some degrees forbidden."""
    times = rng.uniform(0.1, 1.0, (groups, ranks))
    if rng.random() < 0.5:
        times = rng.lognormal(0, 1, (groups, 1)) / np.arange(1, ranks + 1) + 0.01 * times
    least = rng.integers(1, max(2, ranks // groups + 1), groups)
    times[np.arange(ranks)[None, :] + 1 < least[:, None]] = np.inf
    holes = rng.random(times.shape) < 0.1
    holes[np.arange(groups), least - 1] = False
    return np.where(holes, np.inf, times)


def test_threshold_and_dp_have_the_same_makespan_on_500_tables():
    rng = np.random.default_rng(7)
    for _ in range(500):
        groups = int(rng.integers(1, 12))
        ranks = int(rng.integers(groups, 40))
        times = random_table(rng, groups, ranks)
        by_dp = degrees_by_dp(times, ranks=ranks)
        by_threshold = degrees_by_threshold(times, ranks=ranks)
        assert by_dp.sum() <= ranks
        assert by_threshold.sum() <= ranks
        assert makespan(times, by_dp) == makespan(times, by_threshold)


@pytest.mark.parametrize("solve", SOLVERS)
def test_degrees_are_the_best_of_all(solve):
    rng = np.random.default_rng(3)
    for _ in range(60):
        groups = int(rng.integers(1, 4))
        ranks = int(rng.integers(groups, 8))
        times = random_table(rng, groups, ranks)
        every = itertools.product(range(1, ranks + 1), repeat=groups)
        best = min(makespan(times, d) for d in every if sum(d) <= ranks)
        assert makespan(times, solve(times, ranks=ranks)) == best


@pytest.mark.parametrize("solve", SOLVERS)
def test_groups_that_do_not_fit_are_refused_with_the_ranks_they_need(solve):
    times = np.array([[np.inf, 1.0], [np.inf, 1.0]])
    with pytest.raises(PlanningError, match="need 4 ranks and there are 2"):
        solve(times, ranks=2)


@pytest.mark.parametrize("solve", SOLVERS)
def test_a_group_without_an_allowed_degree_is_named(solve):
    with pytest.raises(PlanningError, match="group 1 has no allowed degree"):
        solve([[1.0, 1.0], [np.inf, np.inf]], ranks=2)


@pytest.mark.parametrize("solve", SOLVERS)
def test_no_groups_need_no_degrees(solve):
    assert solve(np.zeros((0, 4)), ranks=4).tolist() == []


def test_the_table_is_not_changed():
    times = np.array([[4.0, 1.0, 3.0], [2.0, 2.0, 2.0]])
    kept = times.copy()
    for solve in SOLVERS:
        solve(times, ranks=3)
    assert (times == kept).all()


def test_threshold_gives_no_group_more_than_it_needs():
    times = np.array([[8.0, 4.0, 3.0, 2.0], [3.5, 1.0, 1.0, 1.0]])
    assert degrees_by_threshold(times, ranks=4).tolist() == [3, 1]
