"""`dataservice index --on service`: a real service, real workers of Ray, and what is killed."""

import contextlib
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from dataservice.sources.index_folder import LENGTHS, part_name
from dataservice.sources.part_sums import SUMS
from soak.processes import named, workers
from soak.service import ROOT
from tests.service.small import make_corpus, write_job, write_jsonl
from tests.service.support import ServiceProcess, dataservice, serving, wait_for

pytestmark = pytest.mark.long

LINES = 8000
LIMIT_S = 240  # processes of the lowest priority wait for all others of the machine
ENDED_S = 20.0  # on a busy machine a worker took more than three seconds to end what had answered
LARGE = f"texts/{part_name('large.jsonl')}"


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    with serving(tmp_path_factory.mktemp("ray"), "ray", "--workers", "2") as running:
        yield running


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small corpus, one large file of lines in it, and `here`: its index as made here."""
    home = make_corpus(tmp_path_factory.mktemp("corpus"))
    rng = random.Random(7)
    words = ["the", "quick", "brown", "dog"]
    records = [{"id": f"l{k}", "text": " ".join(rng.choices(words, k=90))} for k in range(LINES)]
    write_jsonl(home / "texts" / "large.jsonl", records)
    dataservice("index", str(write_job(home, index="here")))
    return home


@pytest.fixture
def job(home: Path, request: pytest.FixtureRequest) -> Path:
    return write_job(home, job=request.node.name.replace("_", "-")[:40], index=request.node.name)


@pytest.fixture
def begin(service: ServiceProcess, job: Path) -> Iterator[Callable[[], "subprocess.Popen[str]"]]:
    """Begins to index the job on the service; whatever still runs is ended with the test."""
    arguments = ["index", str(job), "--on", "service", "--service", service.address, "--json"]
    with contextlib.ExitStack() as begun:

        def begin() -> "subprocess.Popen[str]":
            running = subprocess.Popen(
                [sys.executable, "-m", "dataservice.cli.main", *arguments],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
            )
            begun.enter_context(running)
            begun.callback(running.kill)
            return running

        yield begin


def pieces(index: Path) -> list[Path]:
    return list(index.glob("texts/part-*.parquet.*-*-*[0-9]"))


def summaries(text: str) -> dict[str, Any]:
    return {each["source"]: each for each in json.loads(text)}


def require_alike(home: Path, index: Path) -> None:
    """Both indexes have the same files, bit by bit; of the large one, which was indexed in pieces,
    the record of its samples' digests is the same, and its lengths are packed as it has them. Sums
    of parts are of a run behind another."""
    files = [
        {
            str(path.relative_to(folder)): path.read_bytes()
            for path in folder.rglob("*")
            if path.is_file() and path.name != SUMS
        }
        for folder in (home / "here", index)
    ]
    assert files[0].keys() == files[1].keys()
    otherwise = {name for name in files[0] if files[0][name] != files[1][name]}
    assert otherwise == {LARGE, f"texts/{LENGTHS}"}
    assert "texts/manifest.json" in files[0], "which has the digest of each part"


def test_a_worker_that_is_killed_costs_what_it_was_at(service, home, job, begin):
    index = home / yaml.safe_load(job.read_text())["index"]
    running = begin()
    wait_for(lambda: pieces(index) or running.poll() is not None, LIMIT_S)
    assert running.poll() is None, "it is in the midst of it"
    indexer = wait_for(lambda: stopped_at_work(service), LIMIT_S)
    assert indexer is not None
    above = indexer.parents()
    next(worker for worker in workers(service.home) if worker in above).kill()
    out, err = running.communicate(timeout=LIMIT_S)
    assert running.returncode == 0, err
    assert "It is asked again." in err
    assert indexer not in indexers(service), "it has ended with its worker"
    assert summaries(out)["texts"]["rows"] == LINES + 12
    require_alike(home, index)
    wait_for(lambda: "2 workers" in service.cli("status").stdout, LIMIT_S)


def test_a_command_that_is_killed_is_resumed_by_the_next(service, home, job, begin):
    index = home / yaml.safe_load(job.read_text())["index"]
    running = begin()
    wait_for(lambda: pieces(index) or running.poll() is not None, LIMIT_S)
    assert running.poll() is None, "it is in the midst of it"
    running.kill()
    running.communicate()
    left = pieces(index)
    wait_for(lambda: not indexers(service), LIMIT_S)
    done = begin()
    out, err = done.communicate(timeout=LIMIT_S)
    assert done.returncode == 0, err
    assert summaries(out)["images"]["files_reused"] == 2
    assert summaries(out)["texts"]["pieces_reused"] == len(left) > 0
    require_alike(home, index)


def indexers(service: ServiceProcess) -> list[psutil.Process]:
    """The processes that carry out an errand."""
    return named(service.home, "indexer")


def stopped_at_work(service: ServiceProcess) -> psutil.Process | None:
    """An indexer that is stopped in its midst, so that its worker has something to answer for. One
    that has answered all is soon ended by its worker, stopped or not. No other goes on meanwhile.
    """
    stopped = []
    for each in indexers(service):
        with contextlib.suppress(psutil.NoSuchProcess):
            each.suspend()
            stopped.append(each)
    time.sleep(ENDED_S)
    living = indexers(service)
    at_work = [each for each in stopped if each in living]
    for each in at_work[1:]:
        each.resume()
    return at_work[0] if at_work else None


def test_a_service_reads_for_an_index_what_it_would_read_for_the_job(home, tmp_path):
    roots = {"allowed_roots": [str(home)], "pool": "local", "workers": 1}
    config = tmp_path / "service.yaml"
    config.write_text(yaml.safe_dump(roots))
    outside = tmp_path / "outside.jsonl"
    outside.write_text('{"text": "the quick dog"}\n')
    with serving(tmp_path / "s", "local", "--config", str(config)) as service:
        sources = [{"name": "texts", "format": "jsonl", "url": str(outside)}]
        refused = write_job(home, job="refused", index="refused", sources=sources)
        for asked in (("index", str(refused), "--on", "service"), ("job", "submit", str(refused))):
            done = service.cli(*asked, check=False)
            assert done.returncode == 1
            assert "which this service does not read. It reads under" in done.stderr
        sources[0]["url"] = "texts/texts.jsonl"
        accepted = write_job(home, job="accepted", index="accepted", sources=sources)
        service.cli("index", str(accepted), "--on", "service")
        service.cli("job", "submit", str(accepted))


def test_a_dry_run_is_made_here(home):
    done = dataservice("index", str(home / "job.yaml"), "--on", "service", "--dry-run", check=False)
    assert done.returncode == 1
    assert "--dry-run measures on this machine. Leave --on service out." in done.stderr
