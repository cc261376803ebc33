"""The plainest layout beside the chosen one, on one step of the index."""

from dataclasses import replace

import numpy as np
import pytest

from benchmarks import workloads
from dataservice.core.errors import PlanningError
from dataservice.planning.layout.before_after import chunk_layers, time_before_after
from dataservice.planning.layout.search import LayoutTask, search_layout
from tests.planning.layout.small_models import DECODER, MODEL, nodes


@pytest.fixture(scope="module")
def laid():
    batches = tuple(workloads.step_samples(workloads.vlm_sft(96, seed)) for seed in range(2))
    task = LayoutTask(model=MODEL, group=nodes(9e9), batches=batches)
    return task, search_layout(task)


def test_before_has_equal_layers_encoders_on_the_first_stage_and_nothing_balanced(laid):
    before = time_before_after(*laid).before
    parallel = before.replica.parallel
    assert (parallel.virtual_stages, parallel.encoder_stage) == (1, "first")
    assert before.strategy == "packing"
    layers = chunk_layers(before.replica)
    assert sum(layers) == DECODER.layers
    assert max(layers) - min(layers) <= 2, "the head, and the embeddings, are cut as layers are"


def test_after_takes_the_seconds_that_the_search_told(laid):
    task, layout = laid
    one = search_layout(replace(task, batches=task.batches[:1]))
    after = time_before_after(replace(task, batches=task.batches[:1]), one).after
    assert after.timeline.step_s == pytest.approx(one.best.step_s)
    steps = [time_before_after(task, layout, step=k).after.timeline.step_s for k in range(2)]
    assert np.mean(steps) == pytest.approx(layout.best.step_s)


def test_before_has_the_chosen_ranks_and_stages_where_they_fit(laid):
    compared = time_before_after(*laid)
    before, after = compared.before.replica.parallel, compared.after.replica.parallel
    assert before.tensor_ranks == after.tensor_ranks
    assert before.pipeline_stages == after.pipeline_stages
    assert compared.before.timeline.step_s >= compared.after.timeline.step_s


def test_where_no_plain_layout_fits_there_is_none_before(laid):
    task, layout = laid
    spread = [each for each in layout.others if each.replica.parallel.encoder_stage == "spread"]
    assert time_before_after(task, replace(layout, best=spread[0], others=())).before is None


def test_a_step_that_was_not_drawn_is_refused(laid):
    with pytest.raises(PlanningError, match="step is 2; the layout was made for 2 steps"):
        time_before_after(*laid, step=2)
