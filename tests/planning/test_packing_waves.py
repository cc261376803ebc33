import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataservice.core.errors import PlanningError
from dataservice.planning.packs.wave_assignment import (
    assign_packs_to_waves,
    bound_wave_cost,
    total_wave_cost,
)


@settings(max_examples=80, deadline=None)
@given(
    packs=st.integers(0, 70),
    phases=st.integers(1, 3),
    replicas=st.integers(1, 20),
    seed=st.integers(0, 1000),
)
def test_waves_hold_at_most_one_pack_a_replica(packs, phases, replicas, seed):
    costs = np.random.default_rng(seed).lognormal(0, 1, (packs, phases))
    wave_of = assign_packs_to_waves(costs, replicas=replicas)
    counts = np.bincount(wave_of, minlength=-(-packs // replicas))
    assert counts.sum() == packs
    assert counts.size == -(-packs // replicas)
    if packs:
        assert counts.max() <= replicas
        assert counts.min() >= 1
    total = total_wave_cost(costs, wave_of)
    assert total >= bound_wave_cost(costs, replicas=replicas) * (1 - 1e-12)
    assert total <= total_wave_cost(costs, np.arange(packs) // replicas) * (1 + 1e-12)


def test_one_phase_is_exact():
    costs = np.random.default_rng(2).lognormal(0, 1, 60)
    wave_of = assign_packs_to_waves(costs, replicas=8)
    assert total_wave_cost(costs, wave_of) == pytest.approx(bound_wave_cost(costs, replicas=8))


def test_two_phases_are_close_to_brute_force():
    ratios = []
    for seed in range(30):
        costs = np.random.default_rng(seed).lognormal(0, 0.5, (6, 2))
        best = min(
            total_wave_cost(costs, np.isin(np.arange(6), half).astype(int))
            for half in itertools.combinations(range(6), 3)
        )
        found = total_wave_cost(costs, assign_packs_to_waves(costs, replicas=3))
        ratios.append(found / best)
    assert np.mean(ratios) < 1.005
    assert max(ratios) < 1.05


def test_bad_costs_are_refused():
    with pytest.raises(PlanningError, match="negative"):
        assign_packs_to_waves([[1.0, -1.0]], replicas=2)
    with pytest.raises(PlanningError, match=r"\[packs, phases\]"):
        assign_packs_to_waves(np.ones((2, 2, 2)), replicas=2)
    with pytest.raises(PlanningError, match="ranks is 0"):
        assign_packs_to_waves([1.0], replicas=0)
