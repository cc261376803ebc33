"""The user's own code between the files and the training: indexed, trained, changed."""

import json
from pathlib import Path

import pytest
import yaml

from soak.processes import decoders
from soak.service import dataservice
from tests.cli.support import says
from tests.service.small import SAMPLES, make_corpus, write_job
from tests.service.support import Ranks, serving, wait_for
from trainer_client import ClientError

pytestmark = pytest.mark.long

CODE = '''
WORD = "{word}"


class Tidy:
    """Says another word instead of one, and leaves long texts out."""

    def __init__(self, most_words):
        self.most_words = most_words

    def prepare(self, sample):
        text = sample.record.get("text", "")
        if len(text.split()) > self.most_words:
            return None
        if text:
            sample.record["text"] = text.replace("lazy", WORD)
        return sample
'''


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A corpus, a job that names the code, a config that allows it, and the code."""
    home = make_corpus(tmp_path / "corpus")
    monkeypatch.setenv("PYTHONPATH", str(written(home, "quick").parent), prepend=":")
    (home / "config.yaml").write_text(yaml.safe_dump({"custom_processors": {"tidy": "tidy:Tidy"}}))
    return home


def written(home: Path, word: str) -> Path:
    path = home / "code" / "tidy.py"
    path.parent.mkdir(exist_ok=True)
    path.write_text(CODE.format(word=word))
    return path


def job_of(home: Path, **changes: object) -> str:
    plain = yaml.safe_load(write_job(home).read_text())["pipeline"]
    pipeline = {**plain, "prepare": [{"name": "tidy", "options": {"most_words": 100}}]}
    return str(write_job(home, pipeline=pipeline, **changes))


def indexed(home: Path, **changes: object) -> str:
    path = job_of(home, **changes)
    said = dataservice("index", path, "--config", str(home / "config.yaml"), "--processes", "1")
    says(said.stdout + said.stderr, "'tidy' leaves it out")
    return path


def texts(home: Path, source: str) -> str:
    """The learnt text of a source's samples, as the preview shows them."""
    config = ("--config", str(home / "config.yaml"))
    shown = dataservice(
        "preview", job_of(home), "--source", source, "--json", *config, "--longest=12"
    )
    made = json.loads(shown.stdout)
    return " ".join(piece["text"] for each in made for piece in each["pieces"])


def test_what_the_code_leaves_out_is_never_trained_and_what_it_changes_is_shown(home, tmp_path):
    path = indexed(home)
    assert "lazy" not in texts(home, "texts")
    with serving(tmp_path / "service", "local", "--config", str(home / "config.yaml")) as service:
        service.cli("job", "submit", path)
        ranks = Ranks(service.address, 2).start().join()
        assert ranks.visits == dict.fromkeys(range(SAMPLES - 1), 1)
        (listed,) = json.loads(service.cli("job", "list", "--json").stdout)
        assert not listed.get("bad_samples")


def test_code_that_changed_is_refused_by_workers_and_until_it_is_indexed_again(home, tmp_path):
    path = indexed(home, epochs=50, ready_steps=1)
    with serving(tmp_path / "service", "local", "--config", str(home / "config.yaml")) as service:
        service.cli("job", "submit", path)
        ranks = Ranks(service.address, 1, pace_s=0.2).start()
        wait_for(lambda: ranks.steps_done >= 2)
        written(home, "another")
        for decoder in decoders(service.home):
            decoder.kill()
        with pytest.raises(ClientError, match=r"the prepare .*is not what the job was opened with"):
            ranks.join()
        service.cli("job", "delete", "job")
        refused = service.cli("job", "submit", path, check=False)
        says(refused.stderr + refused.stdout, "dataservice index")
        assert refused.returncode != 0
        service.cli("job", "submit", indexed(home))
