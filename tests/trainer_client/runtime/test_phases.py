"""What a rank's seconds went to: the phases of its plan, and waiting told apart from work."""

from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import pytest

from dataservice.core.plan import StepTime
from tests.trainer_client.runtime.random_steps import (
    make_model,
    make_shard,
    random_plan,
    random_samples,
)
from trainer_client.runtime import GroupPool, run_step
from trainer_client.runtime.phases import END, PHASES, START, Place, StepTimes
from trainer_client.shard import Group, LaterGroups, PlanSummary, Wave


def test_the_phases_that_a_rank_reports_are_those_that_its_plan_predicts():
    predicted = StepTime(
        total_s=1, vision_s=0, audio_s=0, exchange_s=0, llm_s=1, gradient_s=0
    ).phase_s
    assert tuple(predicted) == PHASES
    assert sum(predicted.values()) == 1


def two_waves() -> PlanSummary:
    """A pack on both replicas of two, then one on each."""

    def group(pack, *replicas):
        return Group(pack=pack, replicas=replicas, tokens=8, predicted_s=1.0)

    groups = ((group(0, 0, 1),), (group(1, 0), group(2, 1)))
    waves = tuple(Wave(index=k, groups=of_wave, idle=()) for k, of_wave in enumerate(groups))
    return PlanSummary(
        digest="0" * 32, replicas=2, samples=3, loss_tokens=8, predicted_s=2.0, waves=waves,
        stages=(),
    )  # fmt: skip


def nobody_asks():
    raise AssertionError("the groups of a large step are not asked for to compare seconds")


def large_step() -> PlanSummary:
    """As `two_waves`, where a rank knows its own packs alone; their pack has another number among
    all than among those that are shared."""
    later = LaterGroups(nobody_asks, wave_count=2, ring_count=3, rings={7: 1})
    return replace(two_waves(), waves=later, stages=later)


def compared(rank, size):
    return compared_in(two_waves(), 0, rank)


def compared_in_a_large_step(rank, size):
    return compared_in(large_step(), 7, rank)


def compared_in(plan, pack, rank):
    """Seconds as if by a clock: the second replica comes late to all but the last exchange."""
    seconds = (
        {
            ("other", START): 3.0,
            ("vision_forward", None): 1.0,
            ("exchange", Place("vision", 0, "forward")): 5.0,
            ("llm_forward", Place("llm", pack, "forward")): 4.0,
            ("llm_forward", None): 2.0,
            ("exchange", Place("audio", 1, "backward")): 1.0,
            ("gradients", END): 6.0,
            ("bubble", None): 0.5,
        },
        {
            ("other", START): 1.0,
            ("vision_forward", None): 6.0,
            ("exchange", Place("vision", 0, "forward")): 2.0,
            ("llm_forward", Place("llm", pack, "forward")): 3.0,
            ("llm_forward", None): 7.0,
            ("exchange", Place("audio", 1, "backward")): 3.0,
            ("gradients", END): 2.0,
        },
    )
    with GroupPool(timeout_s=60) as pool:
        clock = SimpleNamespace(on_stream=False, seconds=lambda: seconds[rank])
        return StepTimes(clock, plan, pool.everyone).phase_s


@pytest.mark.parametrize("work", [compared, compared_in_a_large_step])
def test_whoever_comes_last_waits_for_nobody_and_the_others_wait_for_it(world, work):
    first, second = (world(work, 2)[rank] for rank in range(2))
    assert first == {
        "vision": 1.0,
        "audio": 0.0,
        "exchange": 2.0 + 1.0,
        "llm": 3.0 + 2.0,
        "gradients": 1.0 + 2.0,
        "waiting": 2.0 + 3.0 + 1.0 + 4.0 + 0.5,
    }
    assert second == {
        "vision": 6.0,
        "audio": 0.0,
        "exchange": 2.0 + 1.0,
        "llm": 3.0 + 7.0,
        "gradients": 1.0 + 2.0,
        "waiting": 2.0,
    }


def a_step(rank, size, seed, ahead):
    samples = random_samples(seed)
    shard = make_shard(samples, random_plan(samples, size, (1, 2, 3), seed), size, rank, seed)
    with GroupPool(timeout_s=60) as pool:
        result = run_step(make_model(()), shard, pool, features_ahead=ahead)
        return result.phase_s, result.seconds


@pytest.mark.parametrize(("seed", "ahead"), [(0, False), (1, True)])
def test_phases_of_a_step_add_up_to_its_seconds_on_every_rank(world, seed, ahead):
    for spent, seconds in world(a_step, 3, seed, ahead).values():
        assert tuple(spent) == PHASES
        assert min(spent.values()) >= 0
        assert 0.9 * seconds <= sum(spent.values()) <= seconds
    waits = [spent["waiting"] for spent, _ in world(a_step, 3, seed, ahead).values()]
    assert all(a != b for a, b in pairwise(waits)), "each waits for others"
