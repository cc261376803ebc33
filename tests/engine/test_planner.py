from dataclasses import replace

import numpy as np
import pytest

from benchmarks.cut_microbatches import microbatches_of
from dataservice.core.cursor import Cursor
from dataservice.core.errors import PlanningError
from dataservice.core.memory import MemoryModel
from dataservice.core.plan import StepPlan
from dataservice.core.plan_options import STRATEGIES
from dataservice.core.topology import Topology
from dataservice.engine.planner import check_fits, plan_step
from dataservice.engine.shards import cut_step
from dataservice.planning.encoder_memory.room import EncoderRoom
from dataservice.planning.stages import assign
from dataservice.planning.validate import validate_plan
from dataservice.sources.memory import MemoryCatalog
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
    def lose_a_sample(waves, replicas, seconds):
        seated, report = assign.seat_packs(waves, replicas, seconds)
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
    with pytest.raises(PlanningError, match=r"sample [ab]/\d+ has \d+ tokens; 1 of 1 replicas"):
        check_fits(setup, Topology(world_size=1))
    check_fits(setup, Topology(world_size=4))


def test_an_item_that_no_replica_has_room_for_is_named_before_training():
    """The largest images have 236 patches; a microbatch keeps 512 × 100 bytes."""
    keeps = {"budget_bytes": MEMORY_TOKENS * 100.0, "llm_token_bytes": 100.0}
    roomy, tight = (
        make_setup(memory=MemoryModel(**keeps, vision_token_bytes=of_patch))
        for of_patch in (100.0, 300.0)
    )
    check_fits(roomy, Topology(world_size=4))
    for plan in all_plans(roomy, 4):
        room = EncoderRoom.of(roomy.options.memory, Topology(world_size=4))
        validate_plan(
            plan, memory_tokens=MEMORY_TOKENS, sample_count=len(plan.sample_ids), room=room
        )
    said = r"sample [ab]/\d+ has .*the largest \d\d,\d+.* 51,200 bytes .*Start more ranks"
    with pytest.raises(PlanningError, match=said):
        check_fits(tight, Topology(world_size=4))


def weighed(setup, own, of_sources):
    """The job with these samples' own weights and these sources'."""
    catalog = setup.catalog
    ids = np.arange(catalog.samples)
    sources = {
        name: [
            (ref.key, ref.location, lengths)
            for ref, lengths in catalog.details(ids)
            if ref.source == name
        ]
        for name in catalog.source_names
    }
    return replace(setup, catalog=MemoryCatalog(sources, own), loss_weights=of_sources)


@pytest.mark.parametrize("window", [1, 4])
def test_a_sample_weighs_its_own_weight_times_its_sources_at_any_world_size(window):
    own = np.random.default_rng(2).choice([0.0, 0.25, 1.0, 3.0], 200)
    setup = weighed(make_setup(window_steps=window), own, (0.5, 2.0))
    expected = own * np.where(np.arange(200) < 66, 0.5, 2.0)
    totals = []
    for ranks in (3, 5):
        plans = all_plans(setup, ranks)
        for plan in plans:
            validate_plan(plan, memory_tokens=MEMORY_TOKENS, sample_count=len(plan.sample_ids))
            assert plan.sample_loss_weights.tolist() == expected[plan.sample_ids].tolist()
            assert StepPlan.from_json(plan.to_json()).digest == plan.digest
            by_pack = [
                mb.loss_weights.tolist() == expected[mb.sample_ids].tolist()
                for mb in microbatches_of(cut_step(plan), 1)
            ]
            assert all(by_pack)
        totals.append([plan.weighted_loss_tokens for plan in plans])
    assert totals[0] == pytest.approx(totals[1], rel=1e-12)
    exact = sum(
        expected[i] * tokens
        for plan in plans
        for i, tokens in zip(plan.sample_ids, plan.sample_loss_tokens.tolist(), strict=True)
    )
    assert sum(totals[1]) == pytest.approx(exact, rel=1e-12)


def test_weights_that_are_all_1_change_no_plan():
    plain = make_setup()
    for setup in (weighed(plain, None, (1.0, 1.0)), weighed(plain, np.full(200, 2.0), (0.5, 0.5))):
        for before, now in zip(all_plans(plain, 4), all_plans(setup, 4), strict=True):
            assert now.sample_loss_weights is None
            assert (now.digest, now.to_json()) == (before.digest, before.to_json())


def test_other_weights_are_another_plan_of_the_same_packs():
    plain, weighted = make_setup(), weighed(make_setup(), None, (1.0, 0.5))
    for before, now in zip(all_plans(plain, 4), all_plans(weighted, 4), strict=True):
        assert now.digest != before.digest
        assert replace(now, sample_loss_weights=None).digest == before.digest


@pytest.mark.parametrize("wrong", [np.ones(3), np.full(16, np.nan), np.full(16, -1.0)])
def test_weights_that_cannot_be_stop_at_the_planner(wrong):
    plan = plan_step(make_setup(), Cursor(), Topology(world_size=4)).plan
    with pytest.raises(PlanningError, match="sample_loss_weights are not 16 finite numbers"):
        validate_plan(
            replace(plan, sample_loss_weights=wrong), memory_tokens=MEMORY_TOKENS, sample_count=16
        )
