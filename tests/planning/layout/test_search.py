"""The layout as a whole: small models on few GPUs, judged by the step planner itself."""

from dataclasses import replace

import numpy as np
import pytest

from benchmarks import workloads
from dataservice.core.errors import PlanningError
from dataservice.core.plan_options import PlanOptions
from dataservice.planning.compose import compose_step
from dataservice.planning.layout.model import ModelDescription
from dataservice.planning.layout.replica import states_of
from dataservice.planning.layout.search import LayoutTask, search_layout
from tests.planning.layout.small_models import DECODER, MODEL, VISION, nodes


def task(memory_bytes: float, *, model: ModelDescription = MODEL, count: int = 1) -> LayoutTask:
    batches = tuple(workloads.step_samples(workloads.vlm_sft(96, seed)) for seed in range(2))
    return LayoutTask(model=model, group=nodes(memory_bytes, count), batches=batches)


@pytest.fixture(scope="module")
def roomy():
    return task(80e9), search_layout(task(80e9))


def test_the_best_is_none_slower_than_any_other_and_not_below_the_bound(roomy):
    _, layout = roomy
    assert layout.others
    assert all(layout.best.step_s <= other.step_s for other in layout.others[:8])
    assert 0 < layout.lower_bound_s <= layout.best.step_s


def test_its_seconds_are_those_of_the_step_planners_own_plans(roomy):
    asked, layout = roomy
    replica = layout.best.replica
    topology, memory = replica.topology(asked.group), replica.memory(asked.group)
    options = PlanOptions(
        memory_tokens=min(layout.best.microbatch_tokens, memory.tokens(topology)),
        cost=replica.cost(asked.group),
    )
    seconds = [
        compose_step(batch, step=0, topology=topology, options=options).predicted_s
        for batch in asked.batches
    ]
    assert layout.best.step_s == pytest.approx(np.mean(seconds), rel=1e-12)


def test_every_gpu_is_used_and_every_layer_is_in_one_chunk(roomy):
    asked, layout = roomy
    for candidate in (layout.best, *layout.others):
        replica, parallel = candidate.replica, candidate.replica.parallel
        assert parallel.ranks_per_replica * parallel.replicas == asked.group.gpus
        assert replica.bounds[-1] == len(replica.profile.names)
        assert len(replica.bounds) == parallel.chunks + 1
        assert (np.diff(replica.bounds) > 0).all()
        assert sum(replica.chunk_shares) == pytest.approx(1.0)


def test_every_choice_is_named_beside_what_came_second(roomy):
    _, layout = roomy
    names = [choice.name for choice in layout.choices]
    assert {"tensor_parallel", "pipeline_parallel", "encoder_stage", "recompute_entries"} <= {
        *names
    }
    for choice in layout.choices[:5]:
        assert choice.chosen != choice.runner_up
        assert choice.gain >= 0
        assert choice.runner_up_s == pytest.approx(layout.best.step_s * (1 + choice.gain))


def test_no_stage_holds_more_than_its_memory_where_that_is_tight():
    asked = task(9e9)
    layout = search_layout(asked)
    for candidate in (layout.best, *layout.others):
        replica = candidate.replica
        assert (replica.recompute.peak_bytes <= 9e9).all()
        states = states_of(replica.profile, replica.bounds, replica.parallel)
        assert (states < 9e9).all()
    assert layout.refused


def test_less_memory_never_makes_a_step_shorter(roomy):
    _, layout = roomy
    assert search_layout(task(12e9)).best.step_s >= layout.best.step_s * (1 - 1e-9)


def test_a_model_that_cannot_fit_is_told_by_how_many_bytes_and_how_many_gpus_would_do():
    with pytest.raises(
        PlanningError, match=r"bytes a GPU, [\d,]+ too many. Give at least \d+ GPUs"
    ):
        search_layout(task(1e9))


def test_a_frozen_encoder_asks_for_fewer_seconds():
    frozen = ModelDescription(
        name="frozen",
        decoder=DECODER,
        encoders=(replace(VISION, frozen=True),),
    )
    made = search_layout(task(80e9, model=frozen))
    assert made.best.step_s < search_layout(task(80e9)).best.step_s
    assert made.best.replica.cost(nodes(80e9)).vision.linear_s_per_token > 0


def test_a_text_model_has_no_place_for_encoders_to_choose():
    text = ModelDescription(name="text", decoder=DECODER)
    layout = search_layout(task(80e9, model=text))
    assert "encoder_stage" not in {choice.name for choice in layout.choices}


def test_an_encoder_that_the_index_has_no_lengths_for_is_refused():
    odd = ModelDescription(name="odd", decoder=DECODER, encoders=(replace(VISION, name="lidar"),))
    with pytest.raises(PlanningError, match=r"'lidar'.* vision and audio"):
        task(80e9, model=odd)


def test_the_search_tells_how_far_it_is():
    told = []
    layout = search_layout(task(80e9), progress=lambda *now: told.append(now))
    assert [done for done, _, _ in told] == list(range(1, told[-1][1] + 1))
    assert told[-1][1] == 1 + len(layout.others) + len(layout.refused)
