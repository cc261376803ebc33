"""Names that one must type are whole in every table, in terminals and in pipes."""

import os
import subprocess
import sys
from dataclasses import replace
from io import StringIO

import pytest
from rich.console import RenderableType

from dataservice.cli.show import job_table
from dataservice.cli.show_health import health_view
from dataservice.cli.show_records import quarantine_table
from dataservice.cli.terminal import Terminal
from dataservice.core.health import Diagnosed, FleetHealth, JobHealth, ServiceHealth, SourceHealth
from dataservice.core.job import JobRecord, QuarantineEntry
from dataservice.engine.api import JobStatus

NAME = "team-vision/qwen3-vl-32b-sft-stage-2-long-context[v2]-with-ocr-heavy-mixture-2026-01-31"
FLEET = FleetHealth(workers=1, wanted_workers=1, slots=1, slots_per_worker=1, busy_slots=0.0)


def job() -> RenderableType:
    record = JobRecord(name=NAME, spec_json="", index_fingerprint="")
    return job_table([JobStatus(record=record, samples=1_234_567_890, committed_step=100_000)])


def status(name: str = NAME, source: str = "ocr") -> list[RenderableType]:
    progress = SourceHealth(
        source=source, samples=8, read_s=0.5, decode_s=2.5, read_cpu_s=0.25, decode_cpu_s=1.5,
        usual_s=0.125,
    )  # fmt: skip
    health = JobHealth(
        job=name, attempt=2, world_size=12, missing_ranks=(), forming_s=0.0, draining=False,
        ended=False, committed_step=43, planned_step=47, ready_steps=4, decoded_steps=1,
        window_steps=5, steps=20, step_s=1.5, plan_s=0.25, share_slots=6.0, ranks=(),
        sources=(progress,), steps_per_s=0.5, samples_per_s=128.0,
    )  # fmt: skip
    seen = ServiceHealth(jobs=(Diagnosed(health=health, findings=()),), fleet=FLEET)
    return list(health_view(seen, detailed=True))


def quarantined() -> RenderableType:
    entry = QuarantineEntry(
        job="vlm", attempt=1, step=7, sample_id=3, source=NAME, key="k",
        reason="image 'a.jpg' is 9,000×7,000 pixels; the limit max_image_pixels is 50,000,000",
    )  # fmt: skip
    return quarantine_table([entry, replace(entry, sample_id=4)])


TABLES = {
    "job list": lambda: [job()],
    "status": status,
    "sources": lambda: status("vlm", NAME),
    "quarantine": lambda: [quarantined()],
}


def printed(parts: list[RenderableType], **terminal: object) -> str:
    out = StringIO()
    console = Terminal(file=out, **terminal)
    for part in parts:
        console.print(part, highlight=False)
    return out.getvalue()


def first_cells(text: str) -> str:
    """What stands in the first column, line after line."""
    return "".join(line.split()[0] for line in text.splitlines() if line[1:2].strip())


@pytest.mark.parametrize("width", [30, 60, 80, 120])
@pytest.mark.parametrize("table", TABLES)
def test_a_long_name_goes_on_in_the_next_line_of_a_terminal(table, width):
    said = printed(TABLES[table](), width=width, force_terminal=True, color_system=None)
    assert NAME in first_cells(said)


@pytest.mark.parametrize("table", TABLES)
def test_a_name_is_on_one_line_in_a_pipe(table, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    assert NAME in printed(TABLES[table]())


def test_the_numbers_of_a_job_are_whole_at_80_columns():
    said = printed([job()], width=80)
    assert all(part in said for part in ("1234567890", "100000", "committed"))
    assert "…" not in said


def test_the_quarantine_shows_the_numbers_of_a_reason():
    """They say what would have to change: a limit, or the sample."""
    said = printed([quarantined()], width=300)
    assert "is 9,000×7,000 pixels; the limit max_image_pixels is 50,000,000" in said
    assert "#" not in said


def test_a_width_that_is_asked_for_is_kept_in_a_pipe(monkeypatch):
    monkeypatch.setenv("COLUMNS", "72")
    assert max(map(len, printed([job()]).splitlines())) <= 72
    code = "from dataservice.cli.terminal import Terminal; print(Terminal().width)"
    for columns, width in (({"COLUMNS": "72"}, 72), ({}, 10_000)):
        environment = {key: value for key, value in os.environ.items() if key != "COLUMNS"}
        done = subprocess.run(
            [sys.executable, "-c", code], env={**environment, **columns}, capture_output=True
        )
        assert int(done.stdout) == width
