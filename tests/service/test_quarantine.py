"""A dead source stops its job and says so; repaired, its trainers go on from their checkpoint."""

import csv
import json
import os
import shutil
from pathlib import Path

import pytest

from tests.cli.support import CommandLine
from tests.service.small import CLIPS, IMAGES, SAMPLES, make_corpus, spoil, write_job
from tests.service.support import Ranks, ServiceProcess, wait_for
from trainer_client import RequestRefused

pytestmark = pytest.mark.long

BUDGET = {"rate": 0.2, "window_samples": 20, "min_bad_samples": 3}


@pytest.fixture
def home(tmp_path: Path, cli: CommandLine, service: ServiceProcess) -> Path:
    cli.service = service.address
    return make_corpus(tmp_path / "corpus")


def register(cli: CommandLine, home: Path, job: str, **changes: object) -> None:
    path = write_job(home, job=job, error_budget=BUDGET, **changes)
    cli.ok("index", path, "--processes", "1")
    cli.ok("job", "submit", path)


def refused(ranks: Ranks) -> list[str]:
    """What each rank of an attempt that must fail was told."""
    with pytest.raises(RequestRefused):
        ranks.join()
    assert len(ranks.errors) == ranks.world_size
    return [str(error) for error in ranks.errors.values()]


def test_a_dead_source_is_named_to_every_rank_and_a_repair_loses_and_repeats_nothing(
    home, cli, service, tmp_path
):
    register(cli, home, "dead", ready_steps=1)
    first = Ranks(service.address, 2, job="dead").start(stop_after=1).join()
    tars = sorted((home / "images").glob("*.tar"))
    kept = {tar: (tar.read_bytes(), tar.stat()) for tar in tars}
    for tar in tars:
        spoil(tar, lambda data: bytes(len(data)))
    for said in refused(Ranks(service.address, 2, job="dead").start(state=first.state)):
        assert "source 'images' of job 'dead': 3 of its last" in said
        assert "its error budget is 20.0% of 20, from 3 on" in said
        assert "Reasons: " in said
        assert "images-0.tar" in said or "images-1.tar" in said
        assert "`dataservice job quarantine dead`" in said
        assert "restart the trainers from their checkpoint" in said

    assert (
        "attempt 2 ended: source 'images' of job 'dead': 3 of" in cli.ok("job", "show", "dead").said
    )

    table = cli.ok("job", "quarantine", "dead", "--source", "images").said
    assert "images" in table
    assert "clips" not in table
    assert "quarantine" in cli.ok("job", "quarantine", "dead", "--source", "clips").said
    misspelt = cli.refused("job", "quarantine", "dead", "--source", "image")
    assert "job 'dead' has no source 'image'; its sources are images, clips, texts" in misspelt

    def alike() -> bool:
        entries = json.loads(cli.ok("job", "quarantine", "dead", "--json").out)
        assert len(entries) >= 3
        assert {entry["source"] for entry in entries} == {"images"}
        cli.ok("job", "quarantine", "dead", "--out", tmp_path / "bad.csv")
        with (tmp_path / "bad.csv").open(newline="") as stream:
            keys = [row["key"] for row in csv.DictReader(stream)]
        cli.ok("job", "quarantine", "dead", "--out", tmp_path / "bad.jsonl")
        lines = (tmp_path / "bad.jsonl").read_text().splitlines()
        found = [json.loads(line) for line in lines]
        return (keys, found) == ([entry["key"] for entry in entries], entries)

    wait_for(alike)  # what was under way as the attempt ended may be put on record meanwhile
    assert "must end in .jsonl or .csv" in cli.refused(
        "job", "quarantine", "dead", "--out", tmp_path / "bad.txt"
    )

    for tar, (data, stat) in kept.items():  # the repair
        tar.write_bytes(data)
        os.utime(tar, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    rest = Ranks(service.address, 3, job="dead").start(state=first.state).join()
    assert first.visits + rest.visits == dict.fromkeys(range(SAMPLES), 1)


def test_a_higher_budget_is_taken_from_the_same_job_submitted_again(home, cli, service):
    register(cli, home, "lenient")
    for tar in (home / "images").glob("*.tar"):
        spoil(tar, lambda data: bytes(len(data)))
    refused(Ranks(service.address, 2, job="lenient").start())
    cli.ok("job", "submit", write_job(home, job="lenient", error_budget={"rate": 1.0}))
    ranks = Ranks(service.address, 2, job="lenient").start().join()
    assert ranks.visits == dict.fromkeys(range(SAMPLES), 1)

    def masked() -> set[int]:
        entries = json.loads(cli.ok("job", "quarantine", "lenient", "--json").out)
        return {entry["sample_id"] for entry in entries if entry["attempt"] == 2}

    # Ranks may have a step, and have trained it, before its receipts are on record.
    wait_for(lambda: len(masked()) == IMAGES)
    said = cli.refused("job", "submit", write_job(home, job="lenient", seed=7))
    assert "it would train other samples" in said


def test_a_source_that_goes_away_while_training_stops_the_job_too(home, cli, service):
    sources = [
        {"name": "clips", "format": "jsonl", "url": "clips/clips.jsonl", "weight": 8},
        {"name": "texts", "format": "jsonl", "url": "texts/*.jsonl"},
    ]
    register(cli, home, "gone", sources=sources, batch={"samples": 2}, ready_steps=1)
    ranks = Ranks(service.address, 2, job="gone", hold_at=1).start()
    wait_for(lambda: ranks.held)
    shutil.move(home / "clips", home / "away")
    ranks.release()
    for said in refused(ranks):
        assert "source 'clips' of job 'gone'" in said
        assert "its file cannot be read" in said or "clips" in said
    shutil.move(home / "away", home / "clips")
    visits = Ranks(service.address, 2, job="gone").start().join().visits
    assert visits == {n: 8 if n < CLIPS else 1 for n in range(SAMPLES - IMAGES)}
