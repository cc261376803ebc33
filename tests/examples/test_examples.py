"""The examples as a reader would start them: torchrun, a real service, several world sizes."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
import torch.distributed as dist
import yaml
from transformers import (
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLImageProcessorPil,
)

from dataservice.jobs.indexing import index_job
from dataservice.jobs.job_file import read_job
from tests.examples.ranks import main
from tests.forking import forking
from tests.service.support import job_file, serving

# A busy machine takes a minute to start four ranks, and the first test of a run makes the corpus.
pytestmark = pytest.mark.long

ROOT = Path(__file__).resolve().parents[2]
STEPS = 5
LIMIT_S = 240.0
LINE = re.compile(r"^step (\d+)  loss (\S+) .* CP degrees ([\d ]+)$", re.MULTILINE)


def torchrun(ranks, module, service, *arguments):
    """Run ranks as a reader would, to the end; what they printed."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(ranks), "-m", module, "--service", service.address]
    done = subprocess.run(
        [*command, "--job", "job", *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def forked(ranks, module, service, *arguments, job="job"):
    """The same from processes in which torch is imported already."""
    context = forking()
    # Ours, as an agent's under torchrun: nobody else can take the port before the ranks meet there.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with TemporaryDirectory() as folder:
        said = [Path(folder) / f"rank{rank}" for rank in range(ranks)]
        processes = []
        for rank in range(ranks):
            environment = {
                "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks,
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port, "OMP_NUM_THREADS": 1,
                "TORCHELASTIC_USE_AGENT_STORE": True,
            }  # fmt: skip
            given = ["--service", service.address, "--job", job, *map(str, arguments)]
            environment = {name: str(value) for name, value in environment.items()}
            processes.append(
                context.Process(target=main, args=(module, given, environment, said[rank]))
            )
        for process in processes:
            process.start()
        deadline = time.monotonic() + LIMIT_S
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
            process.kill()
            process.join()
        texts = [path.read_text() for path in said]
        ended = [process.exitcode for process in processes]
        assert ended == [0] * ranks, f"{ended}: {texts[0][-4000:]}"
        return texts[0]


def curve(printed):
    """Loss by step, and all CP degrees."""
    lines = LINE.findall(printed)
    degrees = {int(degree) for _, _, of in lines for degree in of.split()}
    return {int(step): float(loss) for step, loss, _ in lines}, degrees


@pytest.fixture(scope="module")
def service(corpus, tmp_path_factory):
    home = tmp_path_factory.mktemp("examples")
    with serving(home) as running:
        running.cli("job", "submit", str(job_file(corpus, home)))
        yield running


@pytest.fixture(scope="module")
def plain(service, tmp_path_factory):
    """Losses of the demo's trainer, whose model nobody wraps."""
    out = tmp_path_factory.mktemp("plain")
    forked(4, "demo.train", service, "--out", out, "--max-steps", STEPS)
    records = [json.loads(line) for line in (out / "rank0.jsonl").read_text().splitlines()]
    return {record["step"]: record["loss"] for record in records}


@pytest.mark.parametrize(
    ("module", "start", "before", "after"),
    [("examples.train_ddp", torchrun, 3, 4), ("examples.train_fsdp2", forked, 4, 3)],
)
def test_an_example_has_the_loss_curve_of_an_unwrapped_model_on_changing_ranks(
    service, plain, tmp_path, module, start, before, after
):
    options = ("--checkpoint", tmp_path / "checkpoint", "--steps-per-checkpoint", 2)
    first, degrees = curve(start(before, module, service, *options, "--max-steps", 3))
    assert first == pytest.approx({step: plain[step] for step in range(3)}, rel=1e-5)
    assert max(degrees) > 1
    resumed, _ = curve(forked(after, module, service, *options, "--max-steps", STEPS))
    assert resumed == pytest.approx({step: plain[step] for step in range(2, STEPS)}, rel=1e-5)


@pytest.fixture(scope="module")
def qwen_vl(corpus, tmp_path_factory):
    """A tiny Qwen2.5-VL with random weights, as a repository has it."""
    folder = tmp_path_factory.mktemp("qwen2_5_vl")
    torch.manual_seed(0)
    size = {"hidden_size": 32, "intermediate_size": 48}
    config = Qwen2_5_VLConfig(
        text_config={
            **size,
            "vocab_size": 4096,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "rope_parameters": {
                "rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]
            },
        },
        vision_config={
            **size, "depth": 2, "num_heads": 2, "out_hidden_size": 32, "fullatt_block_indexes": [1]
        },
    )  # fmt: skip
    Qwen2_5_VLForConditionalGeneration(config).save_pretrained(folder)
    Qwen2VLImageProcessorPil().save_pretrained(folder)
    return folder


def test_a_model_of_transformers_has_one_loss_curve_on_any_number_of_ranks(
    service, corpus, qwen_vl, tmp_path
):
    plain = yaml.safe_load((corpus / "job.yaml").read_text())
    changes = {
        "sources": [source for source in plain["sources"] if source["name"] in ("images", "text")],
        "pipeline": {
            **plain["pipeline"],
            "audio": None,
            "vision": {"kind": "qwen2_5_vl"},
            "positions": "auto",
        },
        "plan": {**plain["plan"], "memory_tokens": 4096},  # two ranks hold the longest sample
        "index": str(tmp_path / "index"),
    }
    path = job_file(corpus, tmp_path, job="qwen", **changes)
    index_job(read_job(path.read_text(), tmp_path), custom_processors={})
    service.cli("job", "submit", str(path))
    options = ("--model", qwen_vl, "--checkpoint", tmp_path / "saved", "--steps-per-checkpoint", 2)
    module = "examples.train_transformers"
    first, _ = curve(forked(2, module, service, *options, "--max-steps", 2, job="qwen"))
    rest, _ = curve(forked(3, module, service, *options, "--max-steps", 4, job="qwen"))
    whole = forked(3, module, service, "--model", qwen_vl, "--max-steps", 4, job="qwen")
    undisturbed, degrees = curve(whole)
    assert {**first, **rest} == pytest.approx(undisturbed, rel=1e-5)
    assert set(rest) == {2, 3}
    assert max(degrees) > 1


LAID_OUT = """\
format: 1
job:
  topology: {{pipeline_parallel: 2, encoder_stage: {place}, stage_shares: [0.5, 0.5]}}
  plan:
    cost:
      llm: {{attention_s_per_token2: 1.0e-9, linear_s_per_token: 1.0e-5}}
      vision: {{linear_s_per_token: 1.0e-5}}
      audio: {{linear_s_per_token: 1.0e-5}}
stages:
- stage: 0
  layers: [{encoders}decoder.embedding, decoder.0]
  full: [decoder.0]
- stage: 1
  layers: [decoder.1, decoder.head]
"""


@pytest.mark.parametrize("place", ["first", "spread"])
def test_a_pipeline_by_a_layout_file_has_the_loss_curve_and_draws_its_last_step(
    service, corpus, plain, tmp_path, place
):
    encoders = "vision.0, vision.1, vision.projector, audio.0, " if place == "first" else ""
    (tmp_path / "layout.yaml").write_text(LAID_OUT.format(place=place, encoders=encoders))
    laid_out = {"layout": str(tmp_path / "layout.yaml"), "topology": {}}
    plan = {"memory_tokens": 3456}  # two replicas hold the longest sample
    path = job_file(corpus, tmp_path, job=place, plan=plan, **laid_out)
    service.cli("job", "submit", str(path))
    options = ("--layout", tmp_path / "layout.yaml", "--max-steps", 2)
    printed = forked(4, "examples.train_pipeline", service, *options, job=place)
    lines = re.findall(r"^step (\d+)  loss (\S+) ", printed, re.MULTILINE)
    found = {int(step): float(loss) for step, loss in lines}
    # Behind the second step they part: the demo's trainer clips gradients.
    assert found == pytest.approx({step: plain[step] for step in range(2)}, rel=1e-5)
    drawn = printed[printed.index("stage 0  measured") :].splitlines()
    assert [line[:18].split()[-1] for line in drawn[:6]] == [
        "measured",
        "simulated",
        "predicted",
    ] * 2
    marks = set("".join(line[18:] for line in drawn[:6]))
    assert marks & set("0123456789")
    assert marks & set("abcdefghij")
    assert ("E" in marks) == (place == "spread")


@pytest.mark.parametrize(
    "name", ["train_ddp.py", "train_fsdp2.py", "train_pipeline.py", "train_transformers.py"]
)
def test_an_example_stays_short(name):
    assert len((ROOT / "examples" / name).read_text().splitlines()) < 120
