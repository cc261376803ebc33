"""What `dataservice status` prints: a line for the workers, a row a job, a sentence a finding."""

import io
import json
import os
import socket
import subprocess
import sys
from dataclasses import replace
from itertools import islice

import pytest
from rich.console import Console
from typer.testing import CliRunner

from dataservice.cli.main import app
from dataservice.cli.show_health import health_json, health_view, worst
from dataservice.cli.status import ANSWER_S, CHECK_S, UNWELL, looks_at
from dataservice.core.health import (
    Diagnosed,
    Finding,
    FleetHealth,
    JobHealth,
    JobProgress,
    RankHealth,
    ServiceHealth,
    SourceHealth,
    SourceProgress,
)
from dataservice.serving.coordinator_client import CoordinatorClient
from dataservice.serving.status_codes import ServiceUnreachableError

FLEET = FleetHealth(workers=3, wanted_workers=4, slots=6, slots_per_worker=2, busy_slots=5.5)


def a_job(job="vlm", *, severity="slow", text="rank 1 waits: source `ocr` decodes at 0.6 of need"):
    ranks = tuple(
        RankHealth(
            rank=rank, client=f"node:{rank}", live=rank != 3, received_step=44, committed_step=43,
            quiet_s=1.5, wait_s=rank / 4,
        )
        for rank in range(12)
    )  # fmt: skip
    source = SourceHealth(
        source="ocr", samples=8, read_s=0.5, decode_s=2.5, read_cpu_s=0.25, decode_cpu_s=1.5,
        usual_s=0.125,
    )  # fmt: skip
    health = JobHealth(
        job=job, attempt=2, world_size=12, missing_ranks=(), forming_s=0.0, draining=False,
        ended=False, committed_step=43, planned_step=47, ready_steps=4, decoded_steps=1,
        window_steps=5, steps=20, step_s=1.5, plan_s=0.25, share_slots=6.0, ranks=ranks,
        sources=(source,), steps_per_s=0.5, samples_per_s=128.0,
    )  # fmt: skip
    return Diagnosed(health=health, findings=(Finding(severity=severity, text=text),))


def shown(*jobs, detailed=False, fleet=FLEET):
    console = Console(width=80, force_terminal=False)
    with console.capture() as captured:
        for part in health_view(ServiceHealth(jobs=jobs, fleet=fleet), detailed=detailed):
            console.print(part)
    return captured.get()


def test_why_workers_are_missing_is_said_also_without_a_job():
    lines = shown(fleet=replace(FLEET, shortfall="1 of 4 workers are missing: no room"))
    assert lines.splitlines()[1] == "the workers: 1 of 4 workers are missing: no room"


def test_bytes_that_workers_sent_are_said_with_the_share_through_memory():
    sent = replace(FLEET, grpc_bytes=3 * 10**9, same_node_bytes=9 * 10**9)
    first = shown(fleet=sent).splitlines()[0]
    assert first == "3 of 4 workers, 5.5 of 6 slots busy, 12.0 GB sent, 75% through memory"
    little = shown(fleet=replace(FLEET, grpc_bytes=1_400_000)).splitlines()[0]
    assert little.endswith(", 1.4 MB sent, 0% through memory")


def test_workers_come_first_then_a_row_a_job_then_what_holds_it_up():
    text = shown(a_job(), a_job("asr", severity="info", text="nobody waits for data"))
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert lines[0] == "3 of 4 workers, 5.5 of 6 slots busy"
    assert "vlm slow 11/12 43 47 1/5 0.5 128 2.8" in lines
    assert "asr running 11/12 43 47 1/5 0.5 128 2.8" in lines
    assert "vlm: rank 1 waits: source `ocr` decodes at 0.6 of need" in lines
    assert "usual" not in text


def test_one_job_is_shown_with_its_sources_and_the_ranks_that_wait_most():
    lines = [" ".join(line.split()) for line in shown(a_job(), detailed=True).splitlines()]
    assert "ocr 8.0 0.5 2.5 1.75 0.38 0.12 0" in lines
    ranks = [line.split()[0] for line in lines if "node:" in line]
    assert ranks == ["3", "11", "10", "9", "8", "7", "6", "5"]


def test_progress_by_source_is_shown_of_jobs_that_are_trained_and_of_the_one_asked_for():
    sources = (
        SourceProgress(
            source="ocr", epoch_drawn=1500, epoch_samples=6000, drawn=7500, samples=12000, masked=17
        ),
        SourceProgress(source="rare", epoch_drawn=0, epoch_samples=0, drawn=1, samples=2),
    )
    progress = JobProgress(step=43, epoch=1, epochs=2, sources=sources)
    trained = a_job()
    trained = replace(trained, health=replace(trained.health, progress=progress))
    lines = [" ".join(line.split()) for line in shown(trained).splitlines()]
    assert "vlm: samples drawn, step 43 trained, epoch 2 of 2" in lines
    assert "ocr 1,500 6,000 25.0 7,500 12,000 62.5 17" in lines
    assert "rare 0 0 - 1 2 50.0 0" in lines
    idle = replace(trained, health=replace(trained.health, ranks=()))
    assert "samples drawn" not in shown(idle)
    assert "samples drawn" in shown(idle, detailed=True)


def test_a_service_without_jobs_says_how_to_submit_one():
    assert "no job is registered; see `dataservice job submit --help`" in shown()


def test_the_gravest_finding_decides():
    jobs = [a_job(severity=severity) for severity in ("info", "stalled", "slow")]
    assert worst(jobs) == "stalled"
    assert worst([]) == "info"


def test_json_has_every_number_on_one_line_where_a_program_follows():
    health = ServiceHealth(jobs=(a_job(),), fleet=FLEET)
    line = health_json(health, indent=None)
    assert "\n" not in line
    (job,) = json.loads(line)["jobs"]
    assert job["ranks"][1]["wait_s"] == 0.25
    assert job["findings"] == [
        {"severity": "slow", "text": "rank 1 waits: source `ocr` decodes at 0.6 of need"}
    ]


class ComingAndGoing:
    """A service that is away every other time."""

    def __init__(self, *, there):
        self.there = there

    def health(self, job):
        self.there = not self.there
        if self.there:
            raise ServiceUnreachableError("no service answers")
        return ServiceHealth(jobs=(), fleet=FLEET)


def test_watching_goes_on_while_the_service_restarts():
    looks = looks_at(ComingAndGoing(there=True), "", 0.0)
    seen = [type(look).__name__ for look in islice(looks, 3)]
    assert seen == ["ServiceHealth", "ServiceUnreachableError", "ServiceHealth"]


def test_watching_a_service_that_never_was_there_is_an_error():
    with pytest.raises(ServiceUnreachableError):
        next(looks_at(ComingAndGoing(there=False), "", 0.0))


def test_what_of_the_service_does_not_work_is_said_first():
    troubles = ("the state store has not answered for 12 s",)
    seen = ServiceHealth(jobs=(a_job(),), fleet=FLEET, troubles=troubles)
    console = Console(width=80, file=io.StringIO())
    console.print(next(health_view(seen, detailed=False)))
    text = console.file.getvalue()
    assert text.startswith("the service: the state store has not answered for 12 s; see its log")
    assert json.loads(health_json(seen))["troubles"] == list(troubles)


@pytest.mark.parametrize("listening", [True, False])
def test_a_check_of_what_does_not_answer_ends_with_its_code(listening):
    """A port that takes connections and says nothing, and one that nobody listens on."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        if listening:
            silent.listen()
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        done = subprocess.run(
            [sys.executable, "-m", "dataservice.cli.main", "status", "--check"],
            env={**os.environ, "DATASERVICE_ADDRESS": address},
            capture_output=True,
            text=True,
            timeout=120,
        )
    assert done.returncode == UNWELL, done.stderr
    assert "not well:" in done.stderr


def test_a_check_ends_in_time_whatever_hangs(monkeypatch):
    """Its own end is set before the service is asked, which has less time than that."""
    happened = []

    class Timer:
        """Stands for a thread that ends the process."""

        def __init__(self, seconds, end):
            self.start = lambda: happened.append(f"ends in {seconds:g} s")
            self.cancel = lambda: happened.append("goes on")

    def health(client, job, *, timeout_s):
        happened.append(f"asked for {timeout_s:g} s")
        raise ServiceUnreachableError("no service answers")

    monkeypatch.setattr("dataservice.cli.status.threading.Timer", Timer)
    monkeypatch.setattr(CoordinatorClient, "health", health)
    done = CliRunner().invoke(app, ["status", "--check"])
    assert done.exit_code == UNWELL
    assert happened == [f"ends in {CHECK_S:g} s", f"asked for {ANSWER_S:g} s", "goes on"]
    assert ANSWER_S < CHECK_S
