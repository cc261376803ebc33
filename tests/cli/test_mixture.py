"""A job's mixture before it trains, and the progress of each source while it does, as the commands
show them of a real service."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli.support import CommandLine, says
from tests.service.small import CLIPS, IMAGES, TEXTS, make_corpus, write_job
from tests.service.support import Ranks, ServiceProcess, serving, wait_for

HELD = {"images": IMAGES, "clips": CLIPS, "texts": TEXTS}
WEIGHTS = {"images": 1, "clips": 2, "texts": 0.5}
EPOCHS = 3
DRAWN = {source: round(EPOCHS * WEIGHTS[source] * HELD[source]) for source in HELD}
BATCH = 6
STEPS = 5


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A job over three sources of different weights; it has no index yet."""
    home = make_corpus(tmp_path_factory.mktemp("mixture") / "corpus")
    formats = {"images": "webdataset", "clips": "jsonl", "texts": "jsonl"}
    urls = {"images": "images/*.tar", "clips": "clips/clips.jsonl", "texts": "texts/*.jsonl"}
    sources = [
        {"name": name, "format": formats[name], "url": urls[name], "weight": WEIGHTS[name]}
        for name in HELD
    ]
    return write_job(home, sources=sources, epochs=EPOCHS, batch={"samples": BATCH})


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    with serving(tmp_path_factory.mktemp("service")) as running:
        yield running


def tree(text: str) -> dict[str, list[str]]:
    """The rows of a tree by what they name: the job, and its sources behind their branches."""
    lines = [line.replace("├─", "").replace("└─", "").split() for line in text.splitlines()]
    return {words[0]: words[1:] for words in lines if words and words[0] in ("job", *HELD)}


def trained(
    cli: CommandLine, service: ServiceProcess, file: Path, ranks: int, **options: Any
) -> Ranks:
    """Ranks that have trained the job, once all that they did is committed."""
    cli.ok("index", file, "--processes", "1")
    cli.ok("job", "submit", file, "--service", service.address)
    return Ranks(service.address, ranks).start(**options).join()


def progress_of(cli: CommandLine, service: ServiceProcess, step: int) -> dict[str, dict[str, int]]:
    """The progress of the job by source, once it is that behind this step."""

    def seen() -> Any:
        out = cli.ok("status", "job", "--json", "--service", service.address).out
        (job,) = json.loads(out)["jobs"]
        return job["progress"] or {"step": None}

    wait_for(lambda: seen()["step"] == step)
    return {each.pop("source"): each for each in seen()["sources"]}


def test_a_mixture_is_shown_before_and_after_its_job_is_submitted(cli, file, service):
    said = cli.refused("preview", file, "--mixture")
    says(said, "source 'images' has no complete index", "dataservice index")
    indexed = tree(cli.ok("index", file, "--processes", "1").out.partition("mixture, 3 epochs")[2])
    assert list(indexed) == ["job", *HELD]
    seen = {source: words[-1] for source, words in indexed.items() if source != "job"}
    assert seen == {"images": "3", "clips": "6", "texts": "1.5"}
    assert tree(cli.ok("preview", file, "--mixture").out) == indexed
    before = cli.ok("preview", file).out
    says(before, "mixture, 3 epochs", "what is learnt")
    assert "mixture, 3 epochs" not in cli.ok("preview", file, "--source", "texts").out

    at = ("--service", service.address)
    cli.ok("job", "submit", file, *at)
    assert tree(cli.ok("job", "show", "job", *at).out.partition("mixture")[2]) == indexed
    told = json.loads(cli.ok("preview", file, "--mixture", "--json").out)
    (shown,) = json.loads(cli.ok("job", "show", "job", "--json", *at).out)
    assert {"job": "job", **shown["mixture"]} == told
    assert {each["source"]: each["samples"] for each in told["sources"]} == HELD
    assert told["epoch_samples"] == IMAGES + 2 * CLIPS + TEXTS / 2
    assert told["epoch_tokens"] == sum(each["epoch_tokens"] for each in told["sources"])
    for share in ("sample_percent", "token_percent"):
        assert sum(each[share] for each in told["sources"]) == pytest.approx(100)
    (listed,) = json.loads(cli.ok("job", "list", "--json", *at).out)
    assert "mixture" not in listed


def test_the_mixture_has_no_samples_to_choose(cli, file):
    for more in (("--random", "2"), ("--source", "texts"), ("--out", "page.html")):
        says(cli.refused("preview", file, "--mixture", *more), "--mixture shows all sources")


def test_status_counts_what_is_drawn_of_each_source(cli, file, service):
    trained(cli, service, file, 2, stop_after=STEPS)
    progress = progress_of(cli, service, STEPS - 1)
    assert sum(each["drawn"] for each in progress.values()) == STEPS * BATCH
    assert {source: each["samples"] for source, each in progress.items()} == DRAWN
    said = cli.ok("status", "job", "--service", service.address).said
    says(said, f"job: samples drawn, step {STEPS - 1} trained, epoch 2 of {EPOCHS}")
    for source, each in progress.items():
        says(said, f"{source} {each['epoch_drawn']} {each['epoch_samples']}")


@pytest.mark.long
def test_progress_is_the_same_after_a_restart_and_goes_on_with_other_ranks(cli, file, service):
    ranks = trained(cli, service, file, 2, stop_after=STEPS)
    before = progress_of(cli, service, STEPS - 1)
    service.kill()
    service.start()
    assert progress_of(cli, service, STEPS - 1) == before
    trained(cli, service, file, 3, state=ranks.state)
    after = progress_of(cli, service, -(-sum(DRAWN.values()) // BATCH) - 1)
    assert {source: each["drawn"] for source, each in after.items()} == DRAWN
    assert sum(each["masked"] for each in after.values()) == 0
