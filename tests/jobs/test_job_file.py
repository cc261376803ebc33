"""What a job file makes of its paths, and of its validation."""

from pathlib import Path

import pytest
import yaml

from dataservice.core.errors import SpecError
from dataservice.jobs.job_file import job_from_json, read_job
from dataservice.sources.roots import Roots

JOB = {
    "job": "job",
    "sources": [{"name": "texts", "format": "jsonl", "url": "texts.jsonl"}],
    "index": "index",
    "pipeline": {"tokenizer": "tokenizer"},
    "batch": {"samples": 2},
    "plan": {"memory_tokens": 100},
}


def job_with(vision: dict[str, object]) -> str:
    return yaml.safe_dump({**JOB, "pipeline": {"tokenizer": "tokenizer", "vision": vision}})


def test_the_folder_of_an_image_processor_stands_beside_the_job_file(tmp_path):
    text = job_with({"kind": "transformers", "folder": "model", "patch": 14})
    spec = read_job(text, tmp_path, Roots.of([str(tmp_path)], "team"))
    assert spec.pipeline.vision.folder == str(tmp_path / "model")


def test_a_folder_or_a_link_in_it_that_leads_outside_the_roots_is_refused(tmp_path):
    team, secret = tmp_path / "team", tmp_path / "other.json"
    (team / "model").mkdir(parents=True)
    secret.write_text("{}")
    roots = Roots.of([str(team)], "team")
    with pytest.raises(SpecError, match=r"a file of vision\.folder is .* does not read"):
        read_job(job_with({"kind": "transformers", "folder": "../x", "patch": 14}), team, roots)
    inside = job_with({"kind": "transformers", "folder": "model", "patch": 14})
    Path(team / "model" / "preprocessor_config.json").symlink_to(secret)
    with pytest.raises(SpecError, match=r"preprocessor_config\.json', which this service does not"):
        read_job(inside, team, roots)


@pytest.mark.parametrize(
    "naming", [{"layout": "it"}, {"plan": {"cost": "it"}}, {"plan": {"memory": "it"}}]
)
def test_a_file_that_becomes_a_link_once_its_path_was_checked_is_not_read(
    tmp_path, monkeypatch, naming
):
    team, secret = tmp_path / "team", tmp_path / "other.yaml"
    team.mkdir()
    secret.write_text("secret: of-another-team: x")
    roots = Roots.of([str(team)], "team")
    require = Roots.require

    def checked(self, *asked):
        require(self, *asked)
        (team / "it").unlink(missing_ok=True)
        (team / "it").symlink_to(secret)

    monkeypatch.setattr(Roots, "require", checked)
    (team / "it").write_text("memory: {}")
    with pytest.raises(SpecError, match="this service does not read there") as refused:
        read_job(yaml.safe_dump({**JOB, **naming}), team, roots)
    assert "of-another-team" not in str(refused.value)


HELD_OUT = {"name": "held-out", "format": "jsonl", "url": "held-out.jsonl"}


def with_validation(**changes: object) -> str:
    return yaml.safe_dump({**JOB, "validation": {"sources": [HELD_OUT]}, **changes})


def test_a_file_with_validation_stands_for_two_jobs(tmp_path):
    file = read_job(with_validation(epochs=3, seed=7, weights="tokens", ready_steps=2), tmp_path)
    training, held_out = file.jobs
    assert (training.job, held_out.job) == ("job", "job:validation")
    assert [source.url for source in held_out.sources] == [str(tmp_path / "held-out.jsonl")]
    assert (training.epochs, held_out.epochs) == (3, 1)
    assert (training.weights, held_out.weights) == ("tokens", "passes")
    for shared in ("index", "plan", "seed", "topology", "batch", "ready_steps", "error_budget"):
        assert getattr(held_out, shared) == getattr(training, shared)
    assert [job_from_json(job.model_dump_json()) for job in file.jobs] == [training, held_out]
    assert "validation" not in training.model_dump(), "the job is what it is without validation"


def test_validation_has_a_batch_of_its_own_and_no_augmentation(tmp_path):
    pipeline = {"tokenizer": "tokenizer", "augment": [{"name": "flip"}]}
    validation = {"sources": [HELD_OUT], "batch": {"tokens": 512}}
    training, held_out = read_job(
        with_validation(pipeline=pipeline, validation=validation), tmp_path
    ).jobs
    assert (training.batch.samples, held_out.batch.tokens) == (2, 512)
    assert (len(training.pipeline.augment), len(held_out.pipeline.augment)) == (1, 0)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"validation": {"sources": [{**HELD_OUT, "name": "texts"}]}}, "'texts'.*occur twice"),
        ({"validation": {"batch": {"samples": 2}}}, r"validation\.sources: required, and missing"),
        ({"validation": {"sources": [{**HELD_OUT, "weight": 0}]}}, "'held-out' have weight 0"),
        ({"sources": [{**HELD_OUT, "name": "a", "weight": 0}]}, "the sources 'a' have weight 0"),
        ({"validation": {"sources": []}}, r"validation\.sources: it is an empty list"),
        ({"job": "job:validation"}, "letters, digits, dots, dashes and underscores"),
        (
            {"mixture_changes": [{"from_epoch": 1, "weights": {"held-out": 2}}]},
            "none of the sources",
        ),
    ],
)
def test_a_validation_that_cannot_be_is_refused(tmp_path, changes, said):
    with pytest.raises(SpecError, match=said):
        read_job(with_validation(**changes), tmp_path)


def test_held_out_sources_lie_under_the_roots_too(tmp_path):
    outside = {**HELD_OUT, "url": "/etc/passwd"}
    roots = Roots.of([str(tmp_path)], "team")
    with pytest.raises(SpecError, match="the url of source 'held-out'"):
        read_job(with_validation(validation={"sources": [outside]}), tmp_path, roots)


MEMORY = {"budget_bytes": 70e9, "states_bytes": 30e9, "llm_token_bytes": 1e6}


def with_plan(plan: dict[str, object], **changes: object) -> str:
    return yaml.safe_dump({**JOB, "plan": plan, **changes})


def test_memory_in_bytes_becomes_tokens_in_the_job_s_topology(tmp_path):
    text = with_plan({"memory": {**MEMORY, "vision_token_bytes": 5e4}})
    assert read_job(text, tmp_path).planned.memory_tokens == 40_000
    piped = with_plan({"memory": MEMORY}, topology={"pipeline_parallel": 4})
    (spec,) = read_job(piped, tmp_path).jobs
    assert spec.planned.memory_tokens == 10_000
    assert job_from_json(spec.model_dump_json()).planned == spec.planned


def test_of_memory_tokens_and_memory_one_is_to_be_dropped(tmp_path):
    text = with_plan({"memory": MEMORY, "memory_tokens": 8192})
    with pytest.raises(SpecError, match=r"drop memory_tokens, as memory leaves 40000 tokens.* or"):
        read_job(text, tmp_path)


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        ({}, r"or plan\.memory in bytes"),
        ({"memory": {**MEMORY, "states_bytes": 90e9}}, r"leaves no room for one token"),
        ({"memory": {**MEMORY, "llm_bytes": 1}}, r"did you mean llm_token_bytes"),
        ({"memory": {"budget_bytes": 1e9}}, r"memory\.llm_token_bytes: required"),
    ],
)
def test_memory_that_cannot_be_is_told(tmp_path, plan, said):
    with pytest.raises(SpecError, match=said):
        read_job(with_plan(plan), tmp_path)


def test_encoders_that_are_spread_over_stages_have_no_limit_of_a_microbatch(tmp_path):
    topology = {"pipeline_parallel": 2, "encoder_stage": "spread"}
    read_job(with_plan({"memory": MEMORY}, topology=topology), tmp_path)
    text = with_plan({"memory": {**MEMORY, "audio_token_bytes": 1}}, topology=topology)
    with pytest.raises(SpecError, match=r"encoder_stage is spread.*encoder_stage to first or own"):
        read_job(text, tmp_path)


@pytest.mark.parametrize(
    ("topology", "said"),
    [
        ({"encoder_stage": "cut"}, r"encoder_stage is cut.*vision_shares of 0"),
        ({"vision_shares": [1, 1]}, r"encoder_stage is first, with vision_shares of 2"),
        ({"features_ahead": True}, r"features_ahead with pipeline_parallel 2"),
        (
            {"encoder_stage": "cut", "vision_shares": [1]},
            r"vision_shares is \[1.0\].*2 model chunks",
        ),
    ],
)
def test_a_pipeline_whose_keys_contradict_one_another_is_refused(tmp_path, topology, said):
    with pytest.raises(SpecError, match=said):
        read_job(
            with_plan({"memory_tokens": 8}, topology={"pipeline_parallel": 2, **topology}), tmp_path
        )


def test_cut_encoders_reach_the_planner_by_their_parts(tmp_path):
    topology = {"pipeline_parallel": 2, "encoder_stage": "cut", "vision_shares": [3, 1]}
    spec = read_job(with_plan({"memory_tokens": 8}, topology=topology), tmp_path)
    assert spec.topology.layout.encoder_shares == ((0.75, 0.25), (1.0, 0.0))
