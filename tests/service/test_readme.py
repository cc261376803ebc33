"""What the README shows, run as it stands there."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from dataservice.spec import read_job
from tests.service.support import dataservice, job_file, serving

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()


def block(language: str, after: str) -> str:
    """The first fenced block of a language behind a heading or marker."""
    found = re.search(rf"```{language}\n(.*?)```", README[README.index(after) :], re.DOTALL)
    assert found is not None
    return found.group(1)


def test_its_job_file_is_valid(tmp_path):
    spec = read_job(block("yaml", "## Use it with your data"), tmp_path)
    assert [source.format for source in spec.sources] == ["webdataset", "parquet", "jsonl"]
    assert spec.index == str(tmp_path / "index")


def test_its_trainer_trains_an_epoch(corpus, tmp_path):
    plan = {"memory_tokens": 4096}
    path = job_file(corpus, tmp_path, job="vlm-sft", plan=plan, batch={"samples": 16})
    with serving(tmp_path) as service:
        service.cli("job", "submit", str(path))
        trainer = tmp_path / "train.py"
        text = block("python", "<!-- trainer example -->")
        assert "127.0.0.1:50051" in text
        trainer.write_text(text.replace("127.0.0.1:50051", service.address))
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        done = subprocess.run(
            [*torchrun, "--nproc-per-node", "2", str(trainer)],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=150,
            env={"PYTHONPATH": str(ROOT), "PATH": str(Path(sys.executable).parent)},
        )
        assert done.returncode == 0, done.stderr
        assert (tmp_path / "checkpoint.pt").exists()
        assert '"committed_step": 5' in service.cli("job", "list", "--json").stdout


@pytest.mark.parametrize(
    "command", [["index"], ["serve"], ["job", "submit"], ["explain"], ["status"], ["job", "drain"]]
)
def test_every_command_it_names_has_help_with_an_example(command):
    assert "Example" in dataservice(*command, "--help").stdout


def test_it_links_only_to_files_that_exist():
    links = re.findall(r"\]\(([^)#]+)\)", README)
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_every_test_it_cites_exists():
    cited = set(re.findall(r"`(tests/[\w/]+\.py)`", README))
    assert cited
    assert [name for name in cited if not (ROOT / name).exists()] == []
