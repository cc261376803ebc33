"""torchtitan's own trainer over a real service: its losses, its checkpoints, its HSDP.

What of torchtitan a CPU cannot run is listed in `titan_rank.py`.
"""

import json
import random
import shutil
from pathlib import Path

import pytest
import yaml

from tests.service.conftest import corpus
from tests.service.support import dataservice, serving
from tests.trainer_client.adapters.foreign import TORCHTITAN, installed, run_ranks

__all__ = ["corpus"]

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

RANK = Path(__file__).with_name("titan_rank.py")
WORDS = [
    "the",
    "a",
    "cat",
    "dog",
    "sees",
    "runs",
    "over",
    "moon",
    "under",
    "hill",
    "red",
    "blue",
    "green",
    "and",
    "or",
]


@pytest.fixture(scope="module")
def torchtitan(tmp_path_factory):
    return installed(TORCHTITAN, tmp_path_factory.mktemp("torchtitan"))


@pytest.fixture(scope="module")
def served(corpus, tmp_path_factory):
    """A service with a job of chats of very different lengths, in packs of degree 1."""
    home = tmp_path_factory.mktemp("service")
    draw, lines = random.Random(0), []
    for _ in range(80):
        words = int(min(500, draw.lognormvariate(4, 1))) + 1
        turns = [" ".join(draw.choices(WORDS, k=5)), " ".join(draw.choices(WORDS, k=words))]
        said = zip(("user", "assistant"), turns, strict=True)
        lines.append(json.dumps({"messages": [{"role": r, "content": text} for r, text in said]}))
    (home / "chats.jsonl").write_text("\n".join(lines))
    job = {
        "job": "text",
        "sources": [{"name": "text", "format": "jsonl", "url": str(home / "chats.jsonl")}],
        "index": str(home / "index"),
        "pipeline": {"tokenizer": str(corpus / "tokenizer"), "max_sample_tokens": 1024},
        "batch": {"samples": 12},
        "plan": {"memory_tokens": 1024, "strategy": "packing", "static_degree": 1},
    }
    (home / "job.yaml").write_text(yaml.safe_dump(job))
    with serving(home) as service:
        dataservice("index", str(home / "job.yaml"))
        service.cli("job", "submit", str(home / "job.yaml"))
        yield service, home / "job.yaml", corpus / "tokenizer"


def trained(torchtitan, served, out, *, ranks=1, replicate=1, tensor=1):
    """What each rank says after four steps, with a checkpoint after every second one."""
    service, _, tokenizer = served
    words = ("train", out, service.address, tokenizer, replicate, tensor)
    run_ranks(torchtitan, ranks, RANK, *words)
    return [json.loads((out / f"rank{rank}.json").read_text()) for rank in range(ranks)]


@pytest.fixture(scope="module")
def on_one_rank(torchtitan, served, tmp_path_factory):
    out = tmp_path_factory.mktemp("one")
    return out, trained(torchtitan, served, out)[0]


def test_a_packs_loss_is_that_of_its_samples_one_by_one(on_one_rank):
    _, told = on_one_rank
    assert len(told["alone"]) > 4  # more packs than steps
    for packed, alone in told["alone"]:
        assert packed == pytest.approx(alone, rel=1e-5)


def goes_on(on_one_rank, torchtitan, served, out, **parallel):
    """Steps 3 and 4 from the one rank's checkpoint, with its losses and to its position."""
    begun, told = on_one_rank
    shutil.copytree(begun / "checkpoint" / "step-2", out / "checkpoint" / "step-2")
    expected = {step: told["losses"][step] for step in ("3", "4")}
    for rank in trained(torchtitan, served, out, **parallel):
        assert rank["losses"] == pytest.approx(expected, rel=1e-5)
        assert rank["position"] == told["position"] == 4
    assert (out / "checkpoint" / "step-4" / ".metadata").exists()


def test_hsdp_goes_on_from_one_ranks_checkpoint(on_one_rank, torchtitan, served, tmp_path):
    goes_on(on_one_rank, torchtitan, served, tmp_path, ranks=4, replicate=2)


@pytest.mark.full
def test_tensor_parallel_ranks_go_on_from_it(on_one_rank, torchtitan, served, tmp_path):
    service, file, _ = served
    job = yaml.safe_load(file.read_text())
    file.write_text(yaml.safe_dump({**job, "topology": {"tensor_parallel": 2}}))
    service.cli("job", "submit", str(file))
    goes_on(on_one_rank, torchtitan, served, tmp_path, ranks=2, tensor=2)


def test_what_torchtitan_would_train_differently_is_refused(torchtitan):
    run_ranks(torchtitan, 1, RANK, "refuse")
