"""Sources that are added to a job that has trained: on a real service, with what ranks received."""

import json
import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.cli.support import CommandLine, says
from tests.service.small import SAMPLES, make_corpus, write_job, write_jsonl
from tests.service.support import Ranks, ServiceProcess, differing_bytes, serving, wait_for
from trainer_client import ClientError

pytestmark = pytest.mark.long
EPOCHS = 4
MORE = 10
BATCH = 6  # samples of a step, as write_job has it
IMAGES = {"name": "images", "format": "webdataset", "url": "images/images-*.tar"}
CLIPS = {"name": "clips", "format": "jsonl", "url": "clips/clips.jsonl"}
TEXTS = {"name": "texts", "format": "jsonl", "url": "texts/*.jsonl"}
ADDED = {"name": "more", "format": "jsonl", "url": "more/*.jsonl", "weight": 0}
BEFORE = (IMAGES, CLIPS, TEXTS)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """The corpus, and a folder of texts that no job has read."""
    made, rng = make_corpus(tmp_path / "corpus"), Random(3)
    (made / "more").mkdir()
    words = ["a", "further", "text", "that", "came", "when", "the", "job", "was", "running"]
    texts = [
        {"id": f"more-{k}", "text": " ".join(rng.choices(words, k=rng.randint(20, 60)))}
        for k in range(MORE)
    ]
    write_jsonl(made / "more" / "more.jsonl", texts)
    return made


@pytest.fixture
def service(tmp_path: Path) -> Iterator[ServiceProcess]:
    with serving(tmp_path / "service") as running:
        yield running


def file_of(home: Path, *sources: dict[str, Any], **changes: Any) -> Path:
    return write_job(home, sources=list(sources), epochs=EPOCHS, **changes)


def submitted(cli: CommandLine, service: ServiceProcess, file: Path) -> str:
    cli.service = service.address
    cli.ok("index", file, "--processes", "1")
    return cli.ok("job", "submit", file).said


def steps_before(ranks: Ranks, step: int) -> dict[int, Counter[int]]:
    """The samples of each step before this one."""
    steps = {shard.step for got in ranks.shards.values() for shard in got if shard.step < step}
    return {each: ranks.visits_in({each}) for each in steps}


def untouched(home: Path, cli: CommandLine, tmp_path: Path) -> Ranks:
    """What is trained where nothing is ever added."""
    with serving(tmp_path / "untouched") as service:
        submitted(cli, service, file_of(home, *BEFORE))
        return Ranks(service.address, 2).start().join()


def test_a_source_added_to_a_running_job_is_brought_in_and_drawn_once_a_pass(
    home: Path, cli: CommandLine, service: ServiceProcess, tmp_path: Path
) -> None:
    expected = untouched(home, cli, tmp_path)
    submitted(cli, service, file_of(home, *BEFORE))
    ranks = Ranks(service.address, 2, hold_at=3).start(stop_after=4)
    wait_for(lambda: ranks.held)
    grown = file_of(home, *BEFORE, ADDED)
    cli.ok("index", grown, "--processes", "1")
    said = cli.ok("job", "submit", grown).said
    says(said, "version 2 of the job file takes effect with the next attempt")
    ranks.release()
    first = ranks.join()
    says(cli.ok("job", "show", "job").said, "sources.more.url: -")

    # On from the checkpoint, on other ranks, as if it were not there; until it is brought in.
    second = Ranks(service.address, 3).start(state=first.state, stop_after=6).join()
    told = json.loads(cli.ok("job", "mixture", "job", "--weight", "more=1", "--json").out)
    brought = told["from_step"]
    assert brought >= 6
    service.kill()
    service.start()
    cli.service = service.address
    last = Ranks(service.address, 2).start(state=second.state).join()
    for each in (first, second, last):
        assert steps_before(each, brought).items() <= steps_before(expected, brought).items()
    assert steps_before(last, brought).keys() == set(range(6, brought))
    on_two_ranks = {**first.digests, **last.digests}
    assert {step: on_two_ranks[step] for step in on_two_ranks if step < brought} == {
        step: expected.digests[step] for step in on_two_ranks if step < brought
    }
    assert on_two_ranks[brought] != expected.digests[brought]
    after = last.visits_in({brought})
    assert max(after) >= SAMPLES, "its samples come behind all others"

    visits = first.visits + second.visits + last.visits
    assert {sample: visits[sample] for sample in range(SAMPLES)} == dict.fromkeys(
        range(SAMPLES), EPOCHS
    )
    times = [visits[SAMPLES + sample] for sample in range(MORE)]
    assert max(times) - min(times) <= 1
    epochs_left = EPOCHS - brought * BATCH / SAMPLES
    assert sum(times) == math.floor(MORE * epochs_left + 0.5)
    for each in (first, second, last):
        assert differing_bytes(each, grown) == []
    for attempt, steps in ((1, "0-3"), (2, "4-5"), (3, f"6-{last.steps_done - 1}")):
        cli.ok("job", "replay", "job", "--steps", steps, "--attempt", str(attempt), "--content")
    shown = json.loads(cli.ok("explain", "job", "--step", str(brought), "--json").out)
    assert any(key.startswith("more/more-") for key in shown["samples"])
    (health,) = json.loads(cli.ok("status", "job", "--json").out)["jobs"]
    drawn = {each["source"]: each["drawn"] for each in health["progress"]["sources"]}
    assert drawn["more"] == sum(times)


def test_the_ranks_that_train_get_it_without_a_restart(
    home: Path, cli: CommandLine, service: ServiceProcess
) -> None:
    submitted(cli, service, file_of(home, *BEFORE))
    ranks = Ranks(service.address, 2, hold_at=2).start()
    wait_for(lambda: ranks.held)
    grown = file_of(home, *BEFORE, ADDED)
    cli.ok("index", grown, "--processes", "1")
    cli.ok("job", "submit", grown)
    told = json.loads(cli.ok("job", "mixture", "job", "--weight", "more=1", "--json").out)
    ranks.release()
    ranks.join()
    assert all(
        (max(ranks.visits_in({step})) >= SAMPLES) == (step >= told["from_step"])
        for step in range(ranks.steps_done - 1)
    )
    assert {sample: ranks.visits[sample] for sample in range(SAMPLES)} == dict.fromkeys(
        range(SAMPLES), EPOCHS
    )
    assert differing_bytes(ranks, grown) == []
    cli.ok("job", "replay", "job", "--steps", f"0-{ranks.steps_done - 1}", "--content")


def test_a_change_in_the_file_brings_it_in_with_an_epoch(
    home: Path, cli: CommandLine, service: ServiceProcess
) -> None:
    submitted(cli, service, file_of(home, *BEFORE))
    first = Ranks(service.address, 2).start(stop_after=3).join()
    change = {"from_epoch": 2, "weights": {"more": 1}}
    submitted(cli, service, file_of(home, *BEFORE, ADDED, mixture_changes=[change]))
    rest = Ranks(service.address, 4).start(state=first.state).join()
    visits = first.visits + rest.visits
    assert visits == {
        sample: EPOCHS if sample < SAMPLES else EPOCHS - 2 for sample in range(SAMPLES + MORE)
    }


def refused(cli: CommandLine, file: Path, *why: str) -> None:
    cli.ok("index", file, "--processes", "1")
    said = cli.refused("job", "submit", file)
    for each in (*why, "Checkpoints of the job would not fit"):
        says(said, each)


def test_every_other_change_of_sources_is_refused_with_what_to_do(
    home: Path, cli: CommandLine, service: ServiceProcess
) -> None:
    submitted(cli, service, file_of(home, *BEFORE))
    first = Ranks(service.address, 2).start(stop_after=2).join()
    says(
        cli.refused("job", "submit", file_of(home, *BEFORE, ADDED)),
        "source 'more' has no complete index",
    )
    behind = "keep them in their places, and put new ones behind them all"
    refused(cli, file_of(home, IMAGES, ADDED, CLIPS, TEXTS), behind)
    refused(cli, file_of(home, CLIPS, IMAGES, TEXTS), behind)
    refused(cli, file_of(home, IMAGES, TEXTS), "Source 'clips' is missing", "Put it back")
    refused(cli, file_of(home, IMAGES, CLIPS, {**TEXTS, "name": "words"}), "'texts' is missing")
    refused(
        cli,
        file_of(home, *BEFORE, {**ADDED, "weight": 0.5}),
        "Source 'more' is new and has weight 0.5: give it weight 0, and bring it in",
    )
    submitted(cli, service, file_of(home, *BEFORE, ADDED))
    refused(cli, file_of(home, *BEFORE), "Source 'more' is missing")

    # Once it was added, its content is held to as that of any other.
    for path in (home / "texts" / "texts.jsonl", home / "more" / "more.jsonl"):
        kept = path.read_bytes()
        path.write_bytes(kept.replace(b"a", b"e"))
        refused(cli, file_of(home, *BEFORE, ADDED, {**ADDED, "name": "again"}))
        with pytest.raises(ClientError, match="over other samples"):
            Ranks(service.address, 2).start(state=first.state).join()
        path.write_bytes(kept)
    cli.ok("index", file_of(home, *BEFORE, ADDED), "--processes", "1")
    rest = Ranks(service.address, 2).start(state=first.state).join()
    assert first.visits + rest.visits == dict.fromkeys(range(SAMPLES), EPOCHS)


def test_a_job_deleted_and_submitted_anew_with_all_sources_takes_the_checkpoint_of_before(
    home: Path, cli: CommandLine, service: ServiceProcess
) -> None:
    submitted(cli, service, file_of(home, *BEFORE))
    first = Ranks(service.address, 2).start(stop_after=2).join()
    cli.ok("job", "delete", "job")
    submitted(cli, service, file_of(home, *BEFORE, ADDED))
    rest = Ranks(service.address, 2).start(state=first.state).join()
    assert first.visits + rest.visits == dict.fromkeys(range(SAMPLES), EPOCHS)
