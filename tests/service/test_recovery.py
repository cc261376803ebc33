"""Processes are killed by real signals; the audit is per sample."""

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.service.support import Ranks, explained, job_file, serving, wait_for
from trainer_client import Fenced


@pytest.fixture(scope="module")
def undisturbed(corpus, tmp_path_factory):
    """The digests of an epoch in which nothing happens."""
    home = tmp_path_factory.mktemp("undisturbed")
    with serving(home) as service:
        service.cli("job", "submit", str(job_file(corpus, home)))
        ranks = Ranks(service.address, 3).start().join()
    return ranks.digests, ranks.visits


@pytest.mark.parametrize("how", ["SIGKILL", "SIGTERM"])
def test_trainers_go_on_when_the_service_is_replaced_under_them(corpus, tmp_path, undisturbed, how):
    with serving(tmp_path) as service:
        service.cli("job", "submit", str(job_file(corpus, tmp_path)))
        ranks = Ranks(service.address, 3, pace_s=0.1).start()
        wait_for(lambda: ranks.steps_done >= 3)
        if how == "SIGKILL":
            service.kill()
        else:
            service.stop()
        service.start()
        ranks.join()
        assert (ranks.digests, ranks.visits) == undisturbed
        assert explained(service, 1)["plan_digest"] == ranks.digests[1]


def test_plans_are_the_same_however_often_the_service_restarts(corpus, tmp_path, undisturbed):
    digests, state = {}, None
    with serving(tmp_path) as service:
        service.cli("job", "submit", str(job_file(corpus, tmp_path)))
        for stop_after in (2, 4, 6):
            ranks = Ranks(service.address, 3).start(state=state, stop_after=stop_after).join()
            digests |= ranks.digests
            state = ranks.state
            service.stop()
            service.start()
    assert digests == {step: undisturbed[0][step] for step in range(6)}


def test_killed_trainers_resume_at_another_world_size_and_visit_each_sample_once(
    corpus, tmp_path, undisturbed
):
    with serving(tmp_path) as service:
        service.cli("job", "submit", str(job_file(corpus, tmp_path)))
        visits: Counter[int] = Counter()
        first = Ranks(service.address, 4).start(stop_after=4).join()
        for shards in first.shards.values():
            assert [shard.step for shard in shards] == [0, 1, 2, 3]
        visits += first.visits
        second = Ranks(service.address, 3).start(state=first.state).join()
        visits += second.visits
        assert visits == undisturbed[1]
        assert {shard.attempt for shard in second.shards[0]} == {2}


def test_a_trainer_killed_by_sigkill_frees_its_ranks(corpus, tmp_path):
    script = (
        "import sys, time\n"
        "from trainer_client import ShardDataset\n"
        "with ShardDataset(sys.argv[1], job='job', rank=0, world_size=1) as ds:\n"
        "    for shard in ds:\n"
        "        print(shard.step, flush=True)\n"
        "        time.sleep(60)\n"
    )
    path = job_file(corpus, tmp_path, plan={"memory_tokens": 16384})
    with serving(tmp_path) as service:
        service.cli("job", "submit", str(path))
        trainer = subprocess.Popen(
            [sys.executable, "-c", script, service.address], stdout=subprocess.PIPE
        )
        assert trainer.stdout is not None
        with trainer.stdout:
            assert trainer.stdout.readline() == b"0\n"
        trainer.kill()
        trainer.wait()
        began_s = time.monotonic()
        ranks = Ranks(service.address, 1).start(stop_after=2).join()
        assert ranks.shards[0][0].attempt == 2
        assert time.monotonic() - began_s < 30.0


def test_a_worker_killed_by_sigkill_costs_nothing_but_time(corpus, tmp_path, undisturbed):
    with serving(tmp_path, pool="ray") as service:
        service.cli("job", "submit", str(job_file(corpus, tmp_path)))
        ranks = Ranks(service.address, 3, pace_s=0.1).start()
        wait_for(lambda: ranks.steps_done >= 2)
        assert service.process is not None
        os.kill(worker_processes(service.process.pid)[0], signal.SIGKILL)
        ranks.join()
        assert (ranks.digests, ranks.visits) == undisturbed


def worker_processes(service: int) -> list[int]:
    """Process ids of the Ray actors below the service."""
    parents = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = status.read_text()
        except OSError:
            continue
        parents[int(text.split()[0])] = int(text.rpartition(")")[2].split()[1])

    def below(pid: int) -> bool:
        while pid in parents and pid != service:
            pid = parents[pid]
        return pid == service

    named = [pid for pid in parents if b"WorkerProcess" in command_line(pid)]
    return sorted(pid for pid in named if below(pid))


def command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def test_a_newer_start_of_the_job_fences_ranks_that_lost_their_connection(corpus, tmp_path):
    with serving(tmp_path) as service:
        service.cli("job", "submit", str(job_file(corpus, tmp_path)))
        old = Ranks(service.address, 3, pace_s=0.2).start()
        wait_for(lambda: old.steps_done >= 1)
        service.kill()  # the old ranks keep trying; the new ones come first
        old_address, service.address = service.address, ""
        service.start()
        Ranks(service.address, 3).start(stop_after=1).join()
        service.stop()
        service.address = old_address
        service.start()
        with pytest.raises(Fenced, match="attempt 1"):
            old.join()
