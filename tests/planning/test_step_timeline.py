"""The bars of a planned step are those of the simulator, and add up to the evaluator's seconds."""

import numpy as np
import pytest

from benchmarks import workloads
from dataservice.core.cost import StepCost
from dataservice.core.plan_options import CostModel, PlanOptions
from dataservice.core.topology import Topology
from dataservice.planning.compose import compose_step
from dataservice.planning.step_timeline import MOST_REPLICAS, WORK, step_timeline

COST = CostModel(
    step=StepCost(gradient_s=0.25, feature_intra_s_per_token=1e-6, feature_inter_s_per_token=1e-6)
)
PIPELINES = [
    {"world_size": 4, "ranks_per_replica": 4, "pipeline_stages": 4},
    {"world_size": 8, "ranks_per_replica": 4, "pipeline_stages": 4, "virtual_stages": 2},
    {"world_size": 8, "ranks_per_replica": 4, "pipeline_stages": 4, "encoder_stage": "own"},
    {"world_size": 8, "ranks_per_replica": 4, "pipeline_stages": 4, "encoder_stage": "spread"},
    {"world_size": 16, "ranks_per_replica": 2, "pipeline_stages": 2, "encoders_train": False},
]


def planned(topology: Topology, samples: int = 48):
    options = PlanOptions(memory_tokens=8192, cost=COST)
    batch = workloads.step_samples(workloads.vlm_sft(samples, 1))
    plan = compose_step(batch, step=0, topology=topology, options=options)
    return plan, step_timeline(plan, topology, COST)


def of(bars, work):
    return bars.work == WORK.index(work)


@pytest.mark.parametrize("meet", ["step", "wave"])
@pytest.mark.parametrize("shape", PIPELINES)
def test_no_two_bars_of_a_stage_overlap_and_all_lie_within_the_step(shape, meet):
    plan, timeline = planned(Topology(replicas_meet=meet, **shape))
    bars = timeline.bars
    assert timeline.step_s == pytest.approx(plan.predicted_s)
    assert bars.start_s.min() >= 0
    assert bars.end_s.max() == pytest.approx(timeline.step_s)
    for lane in range(len(timeline.lanes)):
        mine = bars.where(bars.lane == lane)
        order = np.argsort(mine.start_s)
        assert (mine.end_s[order][:-1] <= mine.start_s[order][1:] + 1e-9).all()


@pytest.mark.parametrize("meet", ["step", "wave"])
@pytest.mark.parametrize("shape", PIPELINES)
def test_a_microbatch_is_encoded_first_and_goes_through_the_stages_in_both_directions(shape, meet):
    _, timeline = planned(Topology(replicas_meet=meet, **shape))
    bars = timeline.bars
    for microbatch in range(int(bars.microbatch.max()) + 1):
        mine = bars.where(bars.microbatch == microbatch)
        forward, backward = mine.where(of(mine, "forward")), mine.where(of(mine, "backward"))
        assert forward.end_s.max() <= backward.start_s.min() + 1e-9
        encoding = mine.where(of(mine, "encoder_forward"))
        assert (encoding.end_s <= forward.start_s.min() + 1e-9).all()
        returning = mine.where(of(mine, "encoder_backward"))
        assert (returning.start_s >= backward.end_s.max() - 1e-9).all()


def test_a_pipeline_of_one_replica_ends_with_the_step_but_for_the_sum_of_gradients():
    _, timeline = planned(Topology(**PIPELINES[0]))
    bars = timeline.bars
    gradients = of(bars, "gradients")
    assert bars.end_s[~gradients].max() == pytest.approx(timeline.step_s - 0.25)
    assert bars.seconds[gradients] == pytest.approx([0.25] * 4)


def test_the_idle_part_is_what_the_bars_leave():
    _, timeline = planned(Topology(**PIPELINES[0]))
    busy = sum(timeline.bars.seconds) / (4 * timeline.step_s)
    assert timeline.idle == pytest.approx(1 - busy)
    assert 0 < timeline.idle < 1


def test_encoders_that_are_frozen_have_no_backward_bars():
    _, timeline = planned(Topology(**PIPELINES[4]))
    assert of(timeline.bars, "encoder_forward").any()
    assert not of(timeline.bars, "encoder_backward").any()


def test_encoders_spread_over_all_stages_run_before_the_pipeline_and_after_it():
    _, timeline = planned(Topology(replicas_meet="step", **PIPELINES[3]))
    bars = timeline.bars
    before, after = (
        bars.where(of(bars, "encoder_forward")),
        bars.where(of(bars, "encoder_backward")),
    )
    decoding = bars.where(of(bars, "forward") | of(bars, "backward"))
    assert len(before.lane) == len(after.lane) == 4
    assert before.end_s.max() <= decoding.start_s.min() + 1e-9
    assert after.start_s.min() >= decoding.end_s.max() - 1e-9


def test_with_one_stage_the_lanes_are_replicas_and_no_more_of_them_than_an_eye_follows():
    _, few = planned(Topology(world_size=4, replicas_meet="step"))
    assert few.lanes == ("replica 0", "replica 1", "replica 2", "replica 3")
    _, many = planned(Topology(world_size=40, replicas_meet="step"), samples=200)
    assert len(many.lanes) == len(set(many.lanes)) == MOST_REPLICAS
    assert set(many.bars.lane.tolist()) == set(range(MOST_REPLICAS))
