import shutil
from pathlib import Path

import pytest
import yaml
from filelock import FileLock

from dataservice.job_setup import index_job
from dataservice.spec import read_job
from demo.corpus import make_corpus
from demo.tokenizer import train_tokenizer

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
