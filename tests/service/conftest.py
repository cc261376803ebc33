import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from filelock import FileLock

from dataservice.jobs.indexing import index_job
from dataservice.jobs.job_file import read_job
from demo.corpus import make_corpus
from demo.tokenizer import train_tokenizer
from tests.cli.support import CommandLine, command_line
from tests.service.support import ServiceProcess, serving

DEMO_JOB = Path(__file__).resolve().parents[2] / "demo" / "job.yaml"


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's corpus in small, indexed once for all test processes: job.yaml lies in it."""
    shared = tmp_path_factory.getbasetemp()
    if shared.name.startswith("popen"):
        shared = shared.parent
    home = shared / "service-corpus"
    with FileLock(shared / "service-corpus.lock"):
        if not (home / "job.yaml").exists():
            shutil.rmtree(home, ignore_errors=True)
            make_corpus(home / "corpus", seed=1, scale=0.12)
            train_tokenizer(home / "corpus", home / "tokenizer")
            plain = yaml.safe_load(DEMO_JOB.read_text())
            plain.update({"job": "job", "batch": {"samples": 8}, "ready_steps": 3})
            plain["plan"]["memory_tokens"] = 2304  # three ranks hold the longest sample
            spec = read_job(yaml.safe_dump(plain), home)
            index_job(spec, custom_processors={})
            (home / "job.yaml").write_text(yaml.safe_dump(spec.model_dump(mode="json")))
    return home


@pytest.fixture(scope="module")
def cli() -> Iterator[CommandLine]:
    """The command, which knows no service yet."""
    with command_line() as run:
        yield run


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    """A service as it is without a configuration, for all tests of a file."""
    with serving(tmp_path_factory.mktemp("service")) as running:
        yield running
