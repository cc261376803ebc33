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
SAID_WITHIN_S = 120.0  # figures are means over 20 steps, and a machine that is busy spoils some

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


def says(service: ServiceProcess, job: str, begin: str) -> tuple[Any, str]:
    """Wait until `status` says of a job what begins so; what it tells then, and the sentence."""
    heard: list[tuple[Any, str]] = []

    def heard_it() -> bool:
        done = service.cli("status", job, "--json", "--check", check=False)
        shown = json.loads(done.stdout)
        heard.append((shown, shown["jobs"][0]["findings"][0]["text"]))
        return done.returncode == 0 and re.match(begin, heard[-1][1]) is not None

    try:
        wait_for(heard_it, limit_s=SAID_WITHIN_S)
    except AssertionError:
        raise AssertionError(f"it never said {begin!r}, and last {heard[-1][1]!r}") from None
    return heard[-1]


def watched(service: ServiceProcess, job: str) -> list[Any]:
    """Looks of `dataservice status --watch --json`, which ends by ^C: four, and more until a step
    is committed."""
    command = [sys.executable, "-m", "dataservice.cli.main", "status", job, "--watch", "--json"]
    arguments = ["--every", "0.3", "--service", service.address]
    with subprocess.Popen([*command, *arguments], stdout=subprocess.PIPE, text=True) as watching:
        looks = [json.loads(watching.stdout.readline())]
        while len(looks) < 4 or committed(looks[-1]) == committed(looks[0]):
            looks.append(json.loads(watching.stdout.readline()))
        watching.send_signal(signal.SIGINT)
        assert watching.wait(timeout=60) == 0
    return looks


def committed(look: Any) -> int:
    return int(look["jobs"][0]["committed_step"])


def test_a_source_that_becomes_slow_is_named_with_its_usual_pace(service, corpus, tmp_path):
    trouble = tmp_path / "the storage of clips is slow"
    submitted(service, corpus, "moody", clip_s=1.0, once=str(trouble))
    ranks = Ranks(service.address, 2, job="moody", pace_s=STEP_S, measured_s=STEP_S).start()
    wait_for(lambda: ranks.steps_done >= USUAL_STEPS, SAID_WITHIN_S)
    usual = "nobody waits for data"
    wait_for(lambda: sentence(service, "moody").startswith(usual), SAID_WITHIN_S)
    trouble.touch()
    who = r"(rank [01] waits|ranks 0-1 wait) [\d.]+ s a step"
    why = r"source `clips` decodes at 0\.\d+ of need"
    # Its processor sleeps, which is no work.
    pace = r"[\d.]+ s a sample, [\d.]+ s of it on a CPU, where [\d.]+ s is usual"
    says(service, "moody", rf"{who}: {why}, {pace}; the rest it waits for a CPU")
    trouble.unlink()
    ranks.stop_at_one_step()


def held_up(service: ServiceProcess, job: str, why: str) -> tuple[Any, str]:
    """A job whose samples take too long, once that is said: what is told, and the sentence."""
    ranks = Ranks(service.address, 2, job=job, pace_s=STEP_S, measured_s=STEP_S).start()
    wait_for(lambda: ranks.steps_done >= 4, SAID_WITHIN_S)
    shown, _ = says(service, job, f"rank.* waits? .*{why}")
    looks = watched(service, job)
    ranks.stop_at_one_step()
    assert committed(looks[0]) < committed(looks[-1])
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
    waits = r"decodes at 0\..* s a sample, [\d.]+ s of it on a CPU; the rest it waits for a CPU"
    job, said = held_up(service, "sleepy", f"source `images` {waits}")
    # 11 of 23 samples sleep 0.25 s, six are in a step: 0.7 s.
    took_s = seconds_of(job, "read_s", "decode_s")
    assert took_s / STEP_S > 4
    assert seconds_of(job, "read_cpu_s", "decode_cpu_s") < took_s / 2
    assert "worker" not in said.replace("workers' hosts", "")


def test_samples_that_keep_cpus_busy_are_met_with_how_many_more_workers_would_do(service, corpus):
    submitted(service, corpus, "busy", image_s=0.25, clip_s=0.25, works=True)
    job, said = held_up(service, "busy", r"source `images` decodes at 0\.")
    cpu_s, took_s = (
        seconds_of(job, *kinds)
        for kinds in (("read_cpu_s", "decode_cpu_s"), ("read_s", "decode_s"))
    )
    assert cpu_s > 0.5  # 0.7 s of CPU a step, as the processor works
    if cpu_s < 0.6 * took_s:
        pytest.skip(f"this machine had no CPU for its slots, and the service says so: {said}")
    assert said.endswith(f"; add {ceil((took_s / STEP_S * HEADROOM - 2) / 2)} workers")


def test_a_client_that_only_reads_is_told_from_a_trainer_in_its_first_steps(service, corpus):
    submitted(service, corpus, "reading", image_s=0.05)
    ranks = Ranks(service.address, 2, job="reading").start()
    reads = "ranks 0-1 only read: each step is asked for as soon as the one before"
    _, said = says(service, "reading", reads)
    ranks.stop_at_one_step()
    assert "first steps" not in said


def test_a_stopped_rank_is_named_with_its_process(service, corpus):
    submitted(service, corpus, "halting")
    others = Ranks(service.address, 3, job="halting", pace_s=0.1, elsewhere=[1]).start()
    rank = subprocess.Popen([sys.executable, "-c", RANK, service.address], stdout=subprocess.PIPE)
    try:
        rank.stdout.readline()  # it has trained a step
        rank.send_signal(signal.SIGSTOP)
        wait_for(lambda: "said nothing" in sentence(service, "halting"), SAID_WITHIN_S)
        shown = status(service, "--check", code=STALLED)
        rank.send_signal(signal.SIGCONT)
        # It may have been cut off, and then has left for a moment.
        again = ("status", "--check")
        wait_for(lambda: service.cli(*again, check=False).returncode == 0, SAID_WITHIN_S)
        assert "said nothing" not in sentence(service, "halting")
        others.stop_at_one_step()
    finally:
        rank.kill()
        rank.wait()
        rank.stdout.close()
    said = re.search(r"halting: (.*)", shown)[1]
    assert said.startswith(f"ranks 0 and 2 wait: rank 1 ({os.uname().nodename}:{rank.pid}), at")
    quiet = r"(has|had) said nothing for [1-9]\d+ s"  # from 10 on, however late we look
    assert re.search(rf"{quiet}: see whether its process is stopped", said)
