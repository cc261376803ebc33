"""`dataservice status` on real processes: it names who holds training up, and what would help."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from math import ceil
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import yaml

from dataservice.cli.status import STALLED
from dataservice.observability.diagnosis import HEADROOM
from dataservice.serving.coordinator_client import CoordinatorClient
from tests.service.moody_vision import IMPORT_PATH, NAME
from tests.service.small import indexed_job, make_corpus
from tests.service.support import Ranks, ServiceProcess, serving, wait_for

pytestmark = pytest.mark.long

EPOCHS = 2000
USUAL_STEPS = 30  # so many are behind the window of the last 20, whose seconds are the usual ones
STEP_S = 0.15

RANK = """
import sys, time
from trainer_client import ShardDataset
with ShardDataset(sys.argv[1], job="halting", rank=1, world_size=3) as dataset:
    for shard in dataset:
        time.sleep(0.1)
        dataset.commit(shard.step)
        print(shard.step, flush=True)
"""


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    """One worker of two slots."""
    home = tmp_path_factory.mktemp("status")
    config = home / "service.yaml"
    plain = {"workers": 1, "slots_per_worker": 2, "custom_processors": {NAME: IMPORT_PATH}}
    config.write_text(yaml.safe_dump(plain))
    with serving(home, "local", "--config", str(config)) as running:
        yield running


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("small") / "corpus")


def submitted(
    service: ServiceProcess,
    corpus: Path,
    name: str,
    *,
    job: Mapping[str, Any] = MappingProxyType({}),
    **options: Any,
) -> None:
    """A job of many epochs whose processor has these options; indexed without its delays."""
    vision = {"kind": "custom", "name": NAME, "options": options}
    pipeline = {"tokenizer": "tokenizer", "vision": vision}
    changes = {"pipeline": pipeline, "epochs": EPOCHS, "index": f"index-{name}", **job}
    file = indexed_job(corpus, processors={NAME: IMPORT_PATH}, job=name, **changes)
    service.cli("job", "submit", str(file))


def sentence(service: ServiceProcess, job: str) -> str:
    """What the service says of a job now."""
    with CoordinatorClient(service.address) as client:
        (seen,) = client.health(job).jobs
    return seen.findings[0].text


def status(service: ServiceProcess, *arguments: str, code: int = 0) -> str:
    """What `dataservice status` prints."""
    done = service.cli("status", *arguments, check=False)
    assert done.returncode == code, done.stderr
    return done.stdout


def watched(service: ServiceProcess, job: str) -> list[Any]:
    """Four looks of `dataservice status --watch --json`, which ends by ^C."""
    command = [sys.executable, "-m", "dataservice.cli.main", "status", job, "--watch", "--json"]
    arguments = ["--every", "0.3", "--service", service.address]
    with subprocess.Popen([*command, *arguments], stdout=subprocess.PIPE, text=True) as watching:
        looks = [json.loads(watching.stdout.readline()) for _ in range(4)]
        watching.send_signal(signal.SIGINT)
        assert watching.wait(timeout=20) == 0
    return looks


def test_a_source_that_becomes_slow_is_named_with_its_usual_pace(service, corpus, tmp_path):
    trouble = tmp_path / "the storage of clips is slow"
    submitted(service, corpus, "moody", clip_s=1.0, once=str(trouble))
    ranks = Ranks(service.address, 2, job="moody", pace_s=STEP_S, measured_s=STEP_S).start()
    wait_for(lambda: ranks.steps_done >= USUAL_STEPS)
    wait_for(lambda: sentence(service, "moody").startswith("nobody waits for data"))
    trouble.touch()
    wait_for(lambda: re.search("source `clips` .* is usual", sentence(service, "moody")))
    shown = status(service, "moody")
    ranks.stopping = True
    trouble.unlink()
    ranks.join()
    said = re.search(r"moody: (.*)", shown)[1]
    who = r"(rank [01] waits|ranks 0-1 wait) [\d.]+ s a step"
    why = r"source `clips` decodes at 0\.\d+ of need"
    # Its processor sleeps, which is no work.
    pace = r"[\d.]+ s a sample, [\d.]+ s of it on a CPU, where [\d.]+ s is usual"
    assert re.match(rf"{who}: {why}, {pace}; the rest it waits for a CPU", said), said


def held_up(service: ServiceProcess, job: str) -> tuple[Any, str]:
    """A job whose samples take too long, once that is said: what is told, and the sentence."""
    ranks = Ranks(service.address, 2, job=job, pace_s=STEP_S, measured_s=STEP_S).start()
    wait_for(lambda: ranks.steps_done >= 4)
    wait_for(lambda: re.match("rank.* waits? .*source `", sentence(service, job)), limit_s=60)
    shown = json.loads(status(service, job, "--json", "--check"))
    looks = watched(service, job)
    ranks.stopping = True
    ranks.join()
    assert looks[0]["jobs"][0]["committed_step"] < looks[-1]["jobs"][0]["committed_step"]
    assert shown["fleet"]["busy_slots"] > 0
    (seen,) = shown["jobs"]
    assert any(rank["wait_s"] > 0 for rank in seen["ranks"])
    (found,) = seen["findings"]
    assert found["severity"] == "slow"
    return seen, found["text"]


def seconds_of(job: Any, *kinds: str) -> float:
    return sum(source[kind] for source in job["sources"] for kind in kinds)


def test_samples_that_wait_in_their_slots_are_not_met_with_more_workers(service, corpus):
    submitted(service, corpus, "sleepy", image_s=0.25, clip_s=0.25)
    job, said = held_up(service, "sleepy")
    # 11 of 23 samples sleep 0.25 s, six are in a step: 0.7 s.
    took_s = seconds_of(job, "read_s", "decode_s")
    assert took_s / STEP_S > 4
    assert seconds_of(job, "read_cpu_s", "decode_cpu_s") < took_s / 2
    assert "source `images` decodes at 0." in said
    assert re.search(r" s a sample, [\d.]+ s of it on a CPU; the rest it waits for a CPU", said)
    assert "worker" not in said.replace("workers' hosts", "")


def test_samples_that_keep_cpus_busy_are_met_with_how_many_more_workers_would_do(service, corpus):
    submitted(service, corpus, "busy", image_s=0.25, clip_s=0.25, works=True)
    job, said = held_up(service, "busy")
    cpu_s, took_s = (
        seconds_of(job, *kinds)
        for kinds in (("read_cpu_s", "decode_cpu_s"), ("read_s", "decode_s"))
    )
    assert cpu_s > 0.5  # 0.7 s of CPU a step, as the processor works
    assert "source `images` decodes at 0." in said
    if cpu_s < 0.6 * took_s:
        pytest.skip(f"this machine had no CPU for its slots, and the service says so: {said}")
    assert said.endswith(f"; add {ceil((took_s / STEP_S * HEADROOM - 2) / 2)} workers")


def test_a_client_that_only_reads_is_told_from_a_trainer_in_its_first_steps(service, corpus):
    submitted(service, corpus, "reading", image_s=0.05)
    ranks = Ranks(service.address, 2, job="reading").start()
    wait_for(lambda: "only read" in sentence(service, "reading"), limit_s=60)
    shown = status(service, "reading", "--check")
    ranks.stopping = True
    ranks.join()
    assert "ranks 0-1 only read: each step is asked for as soon as the one before" in shown
    assert "first steps" not in shown


def test_a_stopped_rank_is_named_with_its_process(service, corpus):
    submitted(service, corpus, "halting")
    others = Ranks(service.address, 3, job="halting", pace_s=0.1, elsewhere=[1]).start()
    rank = subprocess.Popen([sys.executable, "-c", RANK, service.address], stdout=subprocess.PIPE)
    try:
        rank.stdout.readline()  # it has trained a step
        rank.send_signal(signal.SIGSTOP)
        wait_for(lambda: "said nothing" in sentence(service, "halting"))
        shown = status(service, "--check", code=STALLED)
        rank.send_signal(signal.SIGCONT)
        wait_for(lambda: "said nothing" not in sentence(service, "halting"))
        status(service, "--check")
        others.stopping = True
        others.join()
    finally:
        rank.kill()
        rank.wait()
        rank.stdout.close()
    said = re.search(r"halting: (.*)", shown)[1]
    assert said.startswith(f"ranks 0 and 2 wait: rank 1 ({os.uname().nodename}:{rank.pid}), at")
    assert re.search(r"(has|had) said nothing for 1\d s: see whether its process is stopped", said)
