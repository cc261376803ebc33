from dataclasses import replace

import numpy as np
import pytest

from dataservice.core.cursor import Cursor
from dataservice.core.errors import PlanningError
from dataservice.core.plan import StepPlan
from dataservice.core.plan_options import STRATEGIES
from dataservice.core.topology import Topology
from dataservice.engine.planner import check_fits, plan_step
from dataservice.planning.stages import assign
from dataservice.planning.validate import validate_plan
from tests.engine.support import MEMORY_TOKENS, all_plans, make_setup


@pytest.mark.parametrize("strategy", sorted(STRATEGIES))
@pytest.mark.parametrize("ranks", [3, 4, 6])
def test_every_strategy_keeps_every_invariant_in_every_step(strategy, ranks):
    setup = make_setup(strategy=strategy)
    plans = all_plans(setup, ranks)
    for plan in plans:
        validate_plan(plan, memory_tokens=MEMORY_TOKENS, sample_count=len(plan.sample_ids))
    visited = np.concatenate([plan.sample_ids for plan in plans])
    assert sorted(visited.tolist()) == list(range(200))


def test_a_broken_plan_of_any_step_stops_at_the_planner(monkeypatch):
    def lose_a_sample(waves, replicas):
        seated, report = assign.seat_packs(waves, replicas)
        samples = seated[0].samples.copy()
        samples[0] = samples[-1]
        return (replace(seated[0], samples=samples), *seated[1:]), report

    monkeypatch.setitem(assign.ASSIGNMENTS, "balanced", lose_a_sample)
    setup = make_setup()
    for step in range(1, 16):
        with pytest.raises(PlanningError, match=r"invariant broken: .*please report"):
            plan_step(setup, Cursor(step=step), Topology(world_size=4))


@pytest.mark.parametrize("window", [1, 4])
def test_the_same_samples_fall_in_the_same_step_at_any_world_size(window):
    steps = [
        [sorted(plan.sample_ids.tolist()) for plan in all_plans(make_setup(window_steps=window), n)]
        for n in (3, 4, 5)
    ]
    assert steps[0] == steps[1] == steps[2]


def test_a_step_planned_again_from_its_cursor_is_the_same_plan():
    setup, topology = make_setup(window_steps=3), Topology(world_size=4)
    cursor, made = Cursor(), []
    while (planned := plan_step(setup, cursor, topology)) is not None:
        made.append(planned)
        cursor = planned.next_cursor
    for planned in reversed(made):
        again = plan_step(make_setup(window_steps=3), planned.cursor, topology)
        assert again is not None
        assert again.plan.digest == planned.plan.digest
        assert again.next_cursor == planned.next_cursor


def test_a_window_makes_steps_of_more_equal_work():
    def spread(window: int) -> float:
        tokens = [
            plan.sample_tokens.sum() for plan in all_plans(make_setup(window_steps=window), 4)
        ]
        return float(np.std(tokens[:12]) / np.mean(tokens[:12]))

    assert spread(6) < spread(1)


def test_a_plan_prints_and_parses_to_the_same_digest():
    plan = all_plans(make_setup(), 4)[0]
    again = StepPlan.from_json(plan.to_json())
    assert again.digest == plan.digest
    assert again.stages == plan.stages


def test_the_full_plan_is_predicted_no_slower_than_any_baseline():
    def predicted(strategy: str) -> float:
        return sum(plan.predicted_s for plan in all_plans(make_setup(strategy=strategy), 4))

    full = predicted("full")
    assert all(full <= predicted(other) for other in STRATEGIES if other != "full")


def test_a_sample_longer_than_all_replicas_together_is_named_before_training():
    setup = make_setup()
    with pytest.raises(PlanningError, match=r"sample [ab]/\d+ has \d+ tokens; 1 replicas"):
        check_fits(setup, Topology(world_size=1))
    check_fits(setup, Topology(world_size=4))
