"""A job over storage that asks for a secret, with code of its team's that looks for it."""

import ast
import json
import os
from pathlib import Path

import pytest
import yaml

from tests.service.small import TEXTS, make_corpus, write_job
from tests.service.spy import ON, found_in_memory
from tests.service.support import Ranks, dataservice, serving
from tests.web_store import WebStore, running

pytestmark = pytest.mark.long

SECRET = ("hunter2-of-", "the-lake")
AMBIENT = ("hunter3-of-", "the-service")
ENVIRONMENT = "AWS_SECRET_ACCESS_KEY"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A corpus, and a service that has a secret in a file and one in its environment."""
    monkeypatch.setenv(ENVIRONMENT, "".join(AMBIENT))
    home = make_corpus(tmp_path / "corpus")
    lake = home / "lake.yaml"
    lake.touch(mode=0o600)
    lake.write_text(yaml.safe_dump({"headers": {"Authorization": f"Bearer {''.join(SECRET)}"}}))
    (home / "out").mkdir()
    return home


def config(home: Path, store: WebStore) -> tuple[str, str]:
    path = home / "service.yaml"
    profile = {"roots": [store.url], "options_file": str(home / "lake.yaml")}
    plain = {
        "storage_profiles": {"lake": profile},
        "custom_processors": {"spy": "tests.service.spy:Spy"},
    }
    path.write_text(yaml.safe_dump(plain))
    return "--config", str(path)


def job(home: Path, store: WebStore, *, code: bool) -> str:
    """A job over the texts in the store."""
    options = {"out": str(home / "out"), "secrets": {"lake": [*SECRET], "ambient": [*AMBIENT]}}
    own = {"prepare": [{"name": "spy", "options": options}]} if code else {}
    source = {
        "name": "texts",
        "format": "jsonl",
        "url": f"{store.url}/texts/texts.jsonl",
        "storage_profile": "lake",
    }
    pipeline = {"tokenizer": "tokenizer", **own}
    plan = {"memory_tokens": 2048}
    return str(write_job(home, sources=[source], pipeline=pipeline, plan=plan))


def test_the_spy_finds_what_is_there() -> None:
    held = "".join(SECRET).encode()
    assert found_in_memory(*(half.encode() for half in SECRET)) >= 1, held


@pytest.mark.parametrize(
    ("pool", "code"),
    [("local", False), pytest.param("local", True, marks=pytest.mark.full), ("ray", True)],
)
def test_a_job_trains_from_a_profiles_storage_and_its_code_never_holds_the_secret(
    home, tmp_path, pool, code
):
    with running(WebStore(home, "".join(SECRET))) as store:
        path, flags = job(home, store, code=code), config(home, store)
        dataservice("index", path, *flags)
        (home / "out" / ON).touch()
        with serving(tmp_path / "service", pool, *flags) as service:
            service.cli("job", "submit", path)
            ranks = Ranks(service.address, 2).start().join()
            shown = service.cli("job", "show", "job", "--json").stdout
        assert ranks.visits == dict.fromkeys(range(TEXTS), 1)
        assert json.loads(shown)[0]["quarantine"] == []
    builders, preparers = (
        {mark.suffix for mark in (home / "out").glob(f"{when}.[0-9]*")}
        for when in ("builds", "prepares")
    )
    assert bool(preparers) == code
    assert bool(builders - preparers) == code, "those that opened the job are among them"
    for mark in (home / "out").glob("*.[0-9]*"):
        assert ast.literal_eval(mark.read_text()) == {"lake": 0, "ambient": 0}, mark.name
    secret = "".join(SECRET)
    assert secret not in shown
    kept = [file for file in (tmp_path / "service").rglob("*") if file.is_file()]
    assert kept
    assert not [file for file in kept if secret.encode() in file.read_bytes()]
    assert os.environ[ENVIRONMENT] not in service.log.read_text()
