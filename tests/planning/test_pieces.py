"""Long clips that several replicas encode: nothing is lost, and the step ends sooner."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataservice.core.errors import PlanningError
from dataservice.core.plan import StepPlan
from dataservice.core.sample import LengthTable, Modality
from dataservice.planning import CostModel, PhaseCost, PlanOptions, Topology, compose_step
from dataservice.planning.compose import StepSamples
from dataservice.planning.step_bound import StepBound
from dataservice.planning.step_time import step_seconds
from dataservice.planning.validate import check_items, validate_plan

FRAME_PATCHES, FRAME_TOKENS = 64, 4
COST = CostModel(
    vision=PhaseCost(linear_s_per_token=1e-4, quadratic_s_per_token2=1e-8, item_s=1e-3)
)


def clips_of(frames: list[int], *, unit_frames: int = 1, text: int = 40) -> StepSamples:
    """One clip of so many frames in each sample, behind three tokens of text."""
    count = np.array(frames, dtype=np.int32)
    n = len(count)
    return StepSamples(
        sample_ids=np.arange(n),
        epoch=np.zeros(n, np.int32),
        lengths=LengthTable(
            llm_tokens=count * FRAME_TOKENS + np.int32(text),
            loss_tokens=np.full(n, text, np.int32),
            item_offsets=np.arange(n + 1),
            item_modality=np.full(n, Modality.VISION, np.int8),
            item_encoder_tokens=count * np.int32(FRAME_PATCHES),
            item_llm_tokens=count * np.int32(FRAME_TOKENS),
            item_position=np.full(n, 3, np.int32),
            item_frames=count,
        ),
        unit_frames=unit_frames,
    )


def planned(samples: StepSamples, replicas: int, **options: object) -> StepPlan:
    given = PlanOptions(**{"memory_tokens": 2048, "cost": COST, **options})
    return compose_step(
        samples, step=0, topology=Topology(world_size=replicas, replicas_per_node=4), options=given
    )


frames = st.lists(st.one_of(st.integers(1, 12), st.integers(1, 400)), min_size=1, max_size=24)


@settings(deadline=None, max_examples=60)
@given(frames, st.integers(1, 9), st.sampled_from([1, 2, 3]))
def test_pieces_hold_every_unit_of_every_clip_once(frames, replicas, unit_frames):
    plan = planned(clips_of(frames, unit_frames=unit_frames), replicas)
    validate_plan(plan, memory_tokens=2048, sample_count=len(frames))
    tokens = np.bincount(plan.item_sample, weights=plan.item_llm_tokens, minlength=len(frames))
    patches = np.bincount(plan.item_sample, weights=plan.item_encoder_tokens)
    assert tokens.tolist() == [FRAME_TOKENS * count for count in frames]
    assert patches.tolist() == [FRAME_PATCHES * count for count in frames]
    if plan.item_first_unit is None:
        assert len(plan.item_sample) == len(frames)
        return
    held = np.bincount(plan.item_sample, weights=plan.item_units)
    divides = [count % unit_frames == 0 for count in frames]
    assert [
        count // unit_frames if cut else 1 for count, cut in zip(frames, divides, strict=True)
    ] == held.tolist()
    pairs = list(zip(plan.item_sample.tolist(), plan.item_replica.tolist(), strict=True))
    assert len(set(pairs)) == len(pairs), "a replica has one piece of a clip"


def test_one_giant_clip_is_encoded_by_all_replicas_alike():
    plan = planned(clips_of([1] * 16 + [320]), 8)
    of_replica = np.bincount(plan.item_replica, weights=plan.item_encoder_tokens, minlength=8)
    assert of_replica.max() <= 1.1 * of_replica.mean()


def test_clips_stay_whole_where_their_processor_does_not_say_where_to_cut_them():
    samples = clips_of([1] * 16 + [320])
    whole = planned(replace(samples, unit_frames=0), 8)
    assert whole.item_first_unit is None
    assert whole.item_units is None
    cut = planned(samples, 8)
    assert cut.predicted_s < 0.8 * whole.predicted_s


def test_baselines_leave_clips_whole():
    plan = planned(clips_of([1] * 16 + [320]), 8, strategy="packing")
    assert plan.item_first_unit is None


def test_short_clips_are_not_cut():
    plan = planned(clips_of([4] * 64), 4)
    assert plan.item_first_unit is None


@settings(deadline=None, max_examples=60)
@given(frames, st.integers(1, 6), st.integers(0, 99))
def test_no_way_of_cutting_goes_below_the_bound(frames, replicas, seed):
    samples = clips_of(frames)
    topology = Topology(world_size=replicas, replicas_per_node=4)
    plan = planned(samples, replicas)
    units = samples.lengths.item_units(1)
    options = PlanOptions(memory_tokens=2048, cost=COST)
    bound_s = StepBound(samples.lengths, topology, options, units).given(0.0)
    assert bound_s <= plan.predicted_s * (1 + 1e-9)
    item = np.repeat(np.arange(len(frames)), frames)  # each frame by itself, anywhere
    first = np.concatenate([np.arange(count) for count in frames]).astype(np.int32)
    scattered = replace(
        plan,
        item_sample=item.astype(np.int32),
        item_modality=np.zeros(len(item), np.int8),
        item_encoder_tokens=np.full(len(item), FRAME_PATCHES, np.int32),
        item_llm_tokens=np.full(len(item), FRAME_TOKENS, np.int32),
        item_position=3 + first * FRAME_TOKENS,
        item_units=np.ones(len(item), np.int32),
        item_first_unit=first,
        item_replica=np.random.default_rng(seed).integers(0, replicas, len(item)).astype(np.int32),
    )
    validate_plan(scattered, memory_tokens=2048, sample_count=len(frames))
    assert bound_s <= step_seconds(scattered, topology, COST).total_s * (1 + 1e-9)


def test_frames_that_attend_to_themselves_alone_cost_as_much_together_as_apart():
    cost = PhaseCost(linear_s_per_token=1e-4, quadratic_s_per_token2=1e-6)
    whole, (frame,) = cost.item_seconds([640], [10]), cost.item_seconds([64])
    assert whole[0] == pytest.approx(10 * frame)
    assert cost.item_seconds([640])[0] > whole[0]


@pytest.mark.parametrize("column", ["item_first_unit", "item_position"])
def test_pieces_that_do_not_follow_one_another_are_refused(column):
    plan = planned(clips_of([1] * 16 + [320]), 8)
    assert plan.item_first_unit is not None
    changed = getattr(plan, column).copy()
    changed[-1] += 1
    with pytest.raises(PlanningError, match="a piece of an item does not continue"):
        check_items(replace(plan, **{column: changed}), plan.item_replica)


def test_a_plan_with_pieces_comes_back_from_json_with_its_digest():
    plan = planned(clips_of([1] * 16 + [320]), 8)
    assert StepPlan.from_json(plan.to_json()).digest == plan.digest
