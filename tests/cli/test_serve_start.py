"""A service that starts says what it does, as it goes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

STEPS = (
    "starting 1 worker",
    "loading the planner and the codecs",
    "starting the process that opens jobs",
    "compiling the planner",
    "taking up the jobs that are registered",
)


def started(state: Path, *flags: str, stderr: int) -> None:
    """A service that serves, and is ended."""
    arguments = ["--listen", "127.0.0.1:0", "--state-dir", str(state), "--pool", "local"]
    command = [sys.executable, "-m", "dataservice.cli.main", "serve", "--workers", "1"]
    with subprocess.Popen(
        [*command, *arguments, *flags], stdout=subprocess.PIPE, stderr=stderr, text=True
    ) as service:
        assert service.stdout is not None
        assert any(line.startswith("serving at ") for line in service.stdout)
        service.terminate()
        service.stdout.read()
        assert service.wait(timeout=60) == 0


def in_order(lines: list[str]) -> list[str]:
    """The lines that tell of STEPS, one each, in that order."""
    told = [next((line for line in lines if step in line), step) for step in STEPS]
    assert [line for line in lines if any(step in line for step in STEPS)] == told
    return told


@pytest.mark.long
@pytest.mark.parametrize("flags", [(), ("--log-json",)], ids=["text", "json"])
def test_a_log_has_each_part_of_a_start_in_its_own_format(tmp_path, flags):
    log = tmp_path / "log"
    with log.open("wb") as sink:
        started(tmp_path / "state", *flags, stderr=sink.fileno())
    for line in in_order(log.read_text().splitlines()):
        if flags:
            assert '"level": "INFO", "logger": "dataservice.app", "message": "' in line
        else:
            assert " INFO dataservice.app: " in line


def test_the_reason_why_a_service_ends_is_a_record_of_its_log(tmp_path):
    (tmp_path / "file").touch()
    state = ["--state-dir", str(tmp_path / "file" / "state"), "--log-json"]
    command = [sys.executable, "-m", "dataservice.cli.main", "serve", "--pool", "local", *state]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    records = [json.loads(line) for line in done.stderr.splitlines()]
    assert records[-1]["level"] == "ERROR"
    assert "cannot be written" in records[-1]["message"]


@pytest.mark.long
def test_a_terminal_gets_short_lines_with_the_seconds_passed(tmp_path):
    ours, theirs = os.openpty()
    try:
        started(tmp_path / "state", stderr=theirs)
    finally:
        os.close(theirs)
    shown = b""
    while True:
        try:
            part = os.read(ours, 65536)
        except OSError:  # all that was written has been read
            break
        shown += part
    os.close(ours)
    for line in in_order(shown.decode().splitlines()):
        assert "INFO" not in line
        assert " s  " in line
        assert line.rstrip("\x1b[0m").endswith(" ...")
