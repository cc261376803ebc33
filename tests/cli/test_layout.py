"""`dataservice layout`, from a model's name and a cluster file to a job that is planned by it."""

import json
from pathlib import Path

import pytest
import yaml

from dataservice.jobs.job_file import read_job
from tests.cli.support import CommandLine, says
from tests.service.small import make_corpus, write_job

TWO_GPUS = """
groups:
  - nodes: 1
    gpus_per_node: 2
    device: {peak_flops: 1.0e+15, memory_bytes: 8.0e+10, memory_bytes_per_s: 3.0e+12}
    inside_bytes_per_s: 4.0e+11
    between_bytes_per_s: 5.0e+10
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, cli: CommandLine) -> Path:
    """A corpus with its index, and a cluster file."""
    made = make_corpus(tmp_path_factory.mktemp("layout") / "corpus")
    cli.ok("index", write_job(made), "--processes", "1")
    (made / "cluster.yaml").write_text(TWO_GPUS)
    return made


def lay_out(cli, home, model, *more, cluster="cluster.yaml"):
    job, out = home / "job.yaml", home / "layout.yaml"
    return cli("layout", model, home / cluster, "--job", job, "--out", out, "--steps", "1", *more)


def test_a_shipped_model_is_laid_out_for_the_samples_of_a_job_that_then_names_the_file(cli, home):
    done = lay_out(cli, home, "qwen2-vl-2b")
    assert done.code == 0, done.said
    says(done.said, "qwen2-vl-2b on 2 GPUs", "tensor_parallel", "over the bound", "layout.yaml")
    told = yaml.safe_load((home / "layout.yaml").read_text())
    assert 0 < told["lower_bound_s"] <= told["step_s"]
    text = write_job(home, job="by-layout", layout="layout.yaml", plan={}).read_text()
    spec = read_job(text, home)
    assert spec.plan.memory_tokens == told["job"]["plan"]["memory_tokens"]
    assert spec.topology.pipeline_parallel == told["job"]["topology"]["pipeline_parallel"]


def test_as_json_it_prints_what_it_writes(cli, home):
    done = lay_out(cli, home, "qwen2-vl-2b", "--json")
    assert done.code == 0, done.said
    assert json.loads(done.out) == yaml.safe_load((home / "layout.yaml").read_text())


def test_a_model_that_does_not_fit_is_told_by_how_many_bytes(cli, home):
    done = lay_out(cli, home, "qwen2.5-vl-72b")
    assert done.code == 1
    says(done.said, "bytes a GPU", "too many", "Give at least")
    assert "Traceback" not in done.said


def test_a_name_that_is_nearly_right_is_suggested(cli, home):
    done = lay_out(cli, home, "qwen2-vl-2")
    assert done.code == 1
    says(done.said, "Did you mean", "qwen2-vl-2b")


def test_a_mix_of_nodes_is_refused_with_the_remedy(cli, home):
    groups = yaml.safe_load(TWO_GPUS)["groups"]
    (home / "mixed.yaml").write_text(yaml.safe_dump({"groups": groups * 2}))
    done = lay_out(cli, home, "qwen2-vl-2b", cluster="mixed.yaml")
    assert done.code == 1
    says(done.said, "2 kinds of nodes", "a file of its own")
