"""A job file that changes under a real service: what is taken, from when on, and what is not."""

import json
from pathlib import Path

import pytest

from tests.cli.support import CommandLine
from tests.service.small import SAMPLES, make_corpus, write_job
from tests.service.support import Ranks, ServiceProcess
from trainer_client import CursorMismatch

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("home") / "corpus")


def submitted(cli: CommandLine, service: ServiceProcess, path: Path) -> str:
    cli.service = service.address
    cli.ok("index", path, "--processes", "1")
    return cli.ok("job", "submit", path).said


def replayed_as_recorded(cli: CommandLine, job: str, attempts: int) -> None:
    """Every step of the ledger plans again to its digest, else the command exits 3."""
    for attempt in range(1, attempts + 1):
        (shown,) = json.loads(cli.ok("job", "show", job, "--json").out)
        assert shown["attempt"] >= attempt
        first = 0 if attempt == 1 else 2
        last = 1 if attempt < attempts else shown["planned_step"]
        cli.ok("job", "replay", job, "--steps", f"{first}-{last}", "--attempt", str(attempt))


def test_another_memory_limit_batch_and_number_of_epochs_are_taken_and_the_rest_is_kept(
    home, cli, service
):
    submitted(cli, service, write_job(home, job="grown"))
    cli.ok("job", "skip", "grown", "30-31")
    first = Ranks(service.address, 2, job="grown").start(stop_after=2).join()
    changed = write_job(
        home,
        job="grown",
        batch={"samples": 4},
        plan={"memory_tokens": 640},
        epochs=2,
        ready_steps=2,
    )
    said = submitted(cli, service, changed)
    assert "version 2 of the job file takes effect with the next attempt" in said
    assert "attempt 1 goes on by version 1" in said
    shown = cli.ok("job", "show", "grown").said
    assert "plan.memory_tokens: 512 → 640" in shown
    assert "batch.samples: 6 → 4" in shown
    assert "epochs: 1 → 2" in shown
    (plain,) = json.loads(cli.ok("job", "show", "grown", "--json").out)
    assert [skip["first_step"] for skip in plain["skips"]] == [30]
    service.stop()
    service.start()
    second = Ranks(service.address, 2, job="grown").start(state=first.state).join()
    assert {len(shards) for shards in second.shards.values()} == {9}  # 34 samples by 4
    assert first.visits + second.visits == dict.fromkeys(range(SAMPLES), 2)
    replayed_as_recorded(cli, "grown", 2)
    assert "version 2 of the job file takes effect" not in cli.ok("job", "show", "grown").said


def test_the_same_content_under_another_root_goes_on_from_its_checkpoint(tmp_path, cli, service):
    there, elsewhere = make_corpus(tmp_path / "there"), tmp_path / "elsewhere"
    submitted(cli, service, write_job(there, job="moved"))
    first = Ranks(service.address, 2, job="moved").start(stop_after=2).join()
    service.stop()
    there.rename(elsewhere)
    service.start()
    said = submitted(cli, service, write_job(elsewhere, job="moved"))
    assert "version 2 of the job file takes effect with the next attempt" in said
    rest = Ranks(service.address, 2, job="moved").start(state=first.state).join()
    assert first.visits + rest.visits == dict.fromkeys(range(SAMPLES), 1)
    replayed_as_recorded(cli, "moved", 2)


def test_other_samples_are_refused_by_key_and_the_job_stays(home, cli, service):
    submitted(cli, service, write_job(home, job="kept"))
    first = Ranks(service.address, 2, job="kept").start(stop_after=2).join()
    said = cli.refused("job", "submit", write_job(home, job="kept", seed=7))
    assert "seed: 0 → 7" in said
    assert "Checkpoints of the job would not fit" in said
    assert "under another name, as a run from the beginning" in said
    rest = Ranks(service.address, 2, job="kept").start(state=first.state).join()
    assert first.visits + rest.visits == dict.fromkeys(range(SAMPLES), 1)


def test_an_altered_checkpoint_and_that_of_another_job_are_refused(home, cli, service):
    submitted(cli, service, write_job(home, job="one"))
    submitted(cli, service, write_job(home, job="other", seed=3))
    state = Ranks(service.address, 2, job="one").start(stop_after=2).join().state
    plain = json.loads(str(state["cursor"]))
    assert plain["step"] == 2
    altered = {**state, "cursor": json.dumps({**plain, "position": plain["position"] + 7})}
    with pytest.raises(CursorMismatch, match="was changed after it was saved"):
        Ranks(service.address, 2, job="one").start(state=altered).join()
    stolen = {**state, "job": "other"}
    with pytest.raises(CursorMismatch, match=r"made in sample order .* it is of another job"):
        Ranks(service.address, 2, job="other").start(state=stolen).join()
