"""The paths that a job file names: made absolute, and refused outside the roots."""

from pathlib import Path

import pytest
import yaml

from dataservice.core.errors import SpecError
from dataservice.jobs.job_file import read_job
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
