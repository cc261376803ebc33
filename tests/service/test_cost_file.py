"""The cost file: what calibration writes, a job reads; and what is said of one that is wrong."""

import json
from pathlib import Path

import pytest
import yaml

from dataservice.core.cost import ContextCost, PhaseCost
from dataservice.core.errors import SpecError
from dataservice.core.memory import MemoryModel
from dataservice.core.plan_options import CostModel
from dataservice.jobs.cost_file import (
    Coefficients,
    CostFile,
    HeldOut,
    MeasuredOn,
    read_cost_file,
    write_cost_file,
)
from dataservice.jobs.job_file import job_from_json, read_job

LLM = ContextCost(
    attention_s_per_token2=1 / 3 * 1e-8, linear_s_per_token=1e-05, group_s=0.03, ring_hop_s=1e-3
)
MADE = CostFile(
    measured=MeasuredOn(
        when="2025-01-01T00:00:00+00:00", model="demo.model:DemoModel", hardware="a CPU", ranks=4
    ),
    held_out={"llm": HeldOut(count=6, mean=0.02, median=0.01, largest=0.05)},
    cost=Coefficients(llm=LLM, vision=PhaseCost(linear_s_per_token=2e-5)),
)
JOB = {
    "job": "job",
    "sources": [{"name": "texts", "format": "jsonl", "url": "texts.jsonl"}],
    "index": "index",
    "pipeline": {"tokenizer": "tokenizer"},
    "batch": {"samples": 6},
    "plan": {"memory_tokens": 512, "cost": "cost.yaml"},
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write_cost_file(tmp_path / "cost.yaml", MADE)
    return tmp_path / "cost.yaml"


def test_a_file_is_read_as_it_was_written_under_its_version(path):
    read = read_cost_file(path)
    assert read.cost == MADE.cost
    assert read.held_out == MADE.held_out
    assert read.measured == MADE.measured
    assert read.version == CostModel(llm=LLM, vision=MADE.cost.vision).version


def test_a_job_that_names_a_file_keeps_its_coefficients(path):
    (spec,) = read_job(yaml.safe_dump(JOB), path.parent).jobs
    assert spec.plan.cost == MADE.cost.model
    assert spec.plan.cost.audio == CostModel().audio  # was not measured: the default
    path.unlink()
    assert job_from_json(spec.model_dump_json()).plan.cost.version == MADE.cost.model.version


def test_coefficients_in_the_job_file_itself_still_do(path):
    plain = {**JOB, "plan": {"memory_tokens": 512, "cost": MADE.cost.model.to_dict()}}
    assert read_job(json.dumps(plain), path.parent).plan.cost == MADE.cost.model


def test_coefficients_that_were_edited_under_their_version_are_refused(path):
    path.write_text(path.read_text().replace("group_s: 0.03", "group_s: 0.05"))
    with pytest.raises(SpecError, match=r"they were edited.*calibrate again"):
        read_cost_file(path)


def test_a_file_without_a_version_is_taken_as_it_is(path):
    plain = yaml.safe_load(path.read_text())
    path.write_text(yaml.safe_dump({"cost": {"llm": {**plain["cost"]["llm"], "group_s": 0.05}}}))
    assert read_cost_file(path).cost.llm.group_s == 0.05


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("format: 9\ncost: {}", "format 9; this release reads 1"),
        (
            "cost: {llm: {attention_s_per_token2: 1}}",
            "line 1, cost.llm.linear_s_per_token: required",
        ),
        ("cost: {llm: {attention_s_per_token2: -1, linear_s_per_token: 1}}", "at least 0"),
        ("costs: {}", r"line 1, costs: .*did you mean cost\?"),
        ("- a\n- b", "holds a list; it must be a mapping"),
        ("a: [", "not YAML: line 1, .*Close the bracket"),
        ("a: 1", "`dataservice calibrate` writes a new one"),
    ],
)
def test_a_file_that_is_none_is_named_with_what_is_wrong(path, text, said):
    path.write_text(text)
    with pytest.raises(SpecError, match=said) as error:
        read_job(yaml.safe_dump(JOB), path.parent)
    assert "cost.yaml" in str(error.value)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(SpecError, match=r"cost\.yaml cannot be read"):
        read_job(yaml.safe_dump(JOB), tmp_path)


def test_a_cost_model_comes_back_from_its_dictionary():
    assert CostModel.from_dict(MADE.cost.model.to_dict()) == MADE.cost.model
    assert CostModel.from_dict({}) == CostModel()
    with pytest.raises(ValueError, match="no phase video"):
        CostModel.from_dict({"video": {}})


MEMORY = MemoryModel(budget_bytes=7e10, states_bytes=3e10, llm_token_bytes=1e6)


def test_a_job_that_names_a_file_for_its_memory_keeps_the_bytes(path):
    write_cost_file(path, MADE.model_copy(update={"memory": MEMORY}))
    assert "memory: cost.yaml" in path.read_text()
    plan = {"cost": "cost.yaml", "memory": "cost.yaml"}
    (spec,) = read_job(yaml.safe_dump({**JOB, "plan": plan}), path.parent).jobs
    assert spec.plan.memory == MEMORY
    path.unlink()
    assert job_from_json(spec.model_dump_json()).planned.memory_tokens == 40_000


def test_a_file_without_memory_is_named_with_what_else_to_do(path):
    plan = {"memory": "cost.yaml"}
    with pytest.raises(SpecError, match=r"cost\.yaml, which has no memory.*plan\.memory_tokens"):
        read_job(yaml.safe_dump({**JOB, "plan": plan}), path.parent)
