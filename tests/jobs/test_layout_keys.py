"""A job that names a layout file has its topology and plan from there, but for what it says."""

from dataclasses import replace

import pytest
import yaml

from benchmarks import workloads
from dataservice.core.errors import SpecError
from dataservice.jobs.job_file import read_job
from dataservice.jobs.laid_out import (
    layout_fields,
    module_layout_fields,
    write_actions,
    write_layout,
)
from dataservice.planning.layout.actions import format_actions, parse_actions
from dataservice.planning.layout.module_layout import lay_out_modules
from dataservice.planning.layout.replica import PLACES
from dataservice.planning.layout.search import LayoutTask, search_layout
from tests.planning.layout.small_models import MODEL, nodes

JOB = """
job: laid-out
sources: [{name: a, format: jsonl, url: a.jsonl}]
index: index/
pipeline: {tokenizer: tokenizer/}
batch: {samples: 16}
layout: layout.yaml
"""


@pytest.fixture(scope="module")
def found():
    batches = (workloads.step_samples(workloads.vlm_sft(64, 3)),)
    task = LayoutTask(model=MODEL, group=nodes(80e9), batches=batches)
    return task, search_layout(task)


@pytest.fixture
def folder(tmp_path, found):
    write_layout(tmp_path / "layout.yaml", layout_fields(*found))
    return tmp_path


def read(folder, more=""):
    return read_job(JOB + more, folder)


def test_a_job_has_the_seconds_tokens_and_stages_of_its_layout(folder, found):
    task, layout = found
    spec = read(folder)
    replica = layout.best.replica
    assert spec.plan.cost == replica.cost(task.group)
    held = replica.held_tokens(task.group, layout.best.microbatch_tokens)
    assert spec.plan.memory_tokens == held
    assert spec.topology.layout.over(task.group.gpus) == replica.topology(task.group)


def test_what_the_job_says_itself_stands_above_its_layout(folder):
    spec = read(folder, "plan: {memory_tokens: 1000, strategy: packing}\nseed: 3\n")
    assert (spec.plan.memory_tokens, spec.plan.strategy) == (1000, "packing")


def test_bytes_take_the_place_of_the_layouts_tokens(folder):
    memory = "{budget_bytes: 1000000, llm_token_bytes: 10}"
    spec = read(folder, f"plan: {{memory: {memory}}}\n")
    assert spec.plan.memory_tokens == 0


def test_the_stored_job_needs_no_layout_file(folder):
    (training,) = read(folder).jobs
    (folder / "layout.yaml").unlink()
    assert "layout" not in training.model_dump()
    assert training.plan.memory_tokens > 0


def test_every_layer_is_in_one_chunk_of_the_file(folder, found):
    _, layout = found
    plain = yaml.safe_load((folder / "layout.yaml").read_text())
    layers = [name for chunk in plain["stages"] for name in chunk["layers"]]
    replica = layout.best.replica
    assert tuple(layers) == replica.profile.names[replica.bounds[0] :]


def in_place(found, place):
    """The layout with its best candidate that has encoders there."""
    task, layout = found
    every = (layout.best, *layout.others)
    best = next(each for each in every if each.choices["encoder_stage"] == place)
    return task, replace(layout, best=best)


@pytest.mark.parametrize("place", PLACES)
def test_a_job_reads_the_layout_of_every_place_of_encoders(tmp_path, found, place):
    task, layout = in_place(found, place)
    write_layout(tmp_path / "layout.yaml", layout_fields(task, layout))
    replica, spec = layout.best.replica, read(tmp_path)
    assert spec.topology.layout.over(task.group.gpus) == replica.topology(task.group)
    assert spec.plan.cost == replica.cost(task.group)


def test_encoders_in_bubbles_have_their_actions_in_a_file_beside(tmp_path, found):
    task, layout = in_place(found, "bubbles")
    beside = write_actions(tmp_path / "layout.yaml", layout)
    assert beside == tmp_path / "layout.actions"
    fields = layout_fields(task, layout)["bubbles"]
    text = beside.read_text()
    actions = parse_actions(text)
    assert format_actions(actions) == text
    encoding = actions.encoder == 0
    assert set(actions.microbatch[encoding].tolist()) == set(range(fields["microbatches"]))
    assert actions.layer[encoding].max() == len(fields["layers"]["vision"]) - 1
    assert actions.layer[~encoding].max() == len(fields["layers"]["decoder"]) - 1
    assert len(fields["pipeline_of"]) == fields["microbatches"]
    assert fields["backbone_s"] <= fields["step_s"] == pytest.approx(actions.end_s.max())


def test_encoders_elsewhere_have_no_actions(tmp_path, found):
    _, layout = in_place(found, "first")
    assert write_actions(tmp_path / "layout.yaml", layout) is None


def test_a_layout_of_modules_on_their_own_gpus_is_refused_with_what_to_do(tmp_path, found):
    task, _ = found
    made = lay_out_modules(task.model, task.group, task.batches)
    write_layout(tmp_path / "layout.yaml", module_layout_fields(task.model, task.group, made))
    with pytest.raises(SpecError, match=r"GPUs of its own.*leave `layout` out"):
        read(tmp_path)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("format: 7\njob: {}\n", r"format 7; this release reads 1"),
        ("format: 1\njob: {plan: {}}\n", r"no `job` with `topology` and `plan`"),
        ("[1, 2]\n", r"layout file"),
    ],
)
def test_a_file_that_is_no_layout_is_refused_by_name(tmp_path, text, told):
    (tmp_path / "layout.yaml").write_text(text)
    with pytest.raises(SpecError, match=told):
        read(tmp_path)


def test_a_layout_that_is_not_there_is_named(tmp_path):
    with pytest.raises(SpecError, match=r"layout\.yaml"):
        read(tmp_path)
