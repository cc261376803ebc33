"""Real torchruns against a real service: launches never share an attempt."""

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from dataservice.serving.coordinator_client import CoordinatorClient
from soak.service import ROOT
from tests.service.support import free_ports, job_file, serving, wait_for

RANK = Path(__file__).with_name("launched_rank.py")
LIMIT_S = 180.0
# A dozen processes import torch.
pytestmark = pytest.mark.long
PLAN = {"memory_tokens": 4096}  # two ranks hold the longest sample


@contextmanager
def torchruns(*commands: list[str]) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Agents of torchrun, each on a host of its own as far as it knows."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    agents = [
        subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", *command],
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for command in commands
    ]
    try:
        yield agents
    finally:
        for agent in agents:
            agent.terminate()  # its ranks go with it
        for agent in agents:
            agent.wait(60.0)


def agents_of(how: str, *program: str, more: tuple[str, ...] = ()) -> list[list[str]]:
    """The commands of one launch of two ranks: on one host, or statically on two."""
    if how == "one host":
        return [["--nproc-per-node", "2", *more, *program]]
    port = str(free_ports(1))
    return [
        ["--nnodes", "2", "--node-rank", str(node), "--nproc-per-node", "1",
         "--master-addr", "127.0.0.1", "--master-port", port, *more, *program]
        for node in range(2)
    ]  # fmt: skip


def told(folder: Path, launch: str, rank: int) -> list[dict[str, Any]]:
    path = folder / f"{launch}-{rank}.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def standing(address: str) -> tuple[int, tuple[int, ...]]:
    """The attempt that runs, and the ranks that the one that forms waits for."""
    with CoordinatorClient(address) as client:
        (job,) = client.health("job").jobs
        return client.job("job").attempt, job.health.missing_ranks


def over(folder: Path, launch: str, rank: int) -> bool:
    return any("ended" in each or "error" in each for each in told(folder, launch, rank))


@pytest.mark.parametrize(
    ("how", "group"),
    [
        ("one host", False),
        pytest.param("two hosts", False, marks=pytest.mark.full),
        ("two hosts", True),
    ],
)
def test_ranks_of_two_launches_that_open_in_turns_never_train_together(
    corpus, tmp_path, how, group
):
    with serving(tmp_path) as service:
        service.cli("job", "submit", str(job_file(corpus, tmp_path, plan=PLAN)))
        launches = [
            agents_of(how, str(RANK), service.address, str(tmp_path), name, *["--group"] * group)
            for name in "XY"
        ]
        (tmp_path / "X.hold").touch()  # or it might be through before Y begins
        with torchruns(*launches[0], *launches[1]):
            ranks = [(name, rank) for name in "XY" for rank in range(2)]
            wait_for(lambda: all(told(tmp_path, *rank) for rank in ranks), LIMIT_S)
            ids = {told(tmp_path, *rank)[0]["run_id"] for rank in ranks}
            assert len(ids) == (2 if how == "one host" else 1)
            assert how == "one host" or ids == {"none"}
            for name, rank, seen in (
                ("X", 0, (0, (1,))), ("Y", 1, (0, (0,))), ("X", 1, (1, (0,))), ("Y", 0, (2, ())),
            ):  # fmt: skip
                (tmp_path / f"{name}-{rank}.open").touch()
                wait_for(lambda seen=seen: standing(service.address) == seen, LIMIT_S)
            (tmp_path / "X.hold").unlink()
            wait_for(lambda: all(over(tmp_path, *rank) for rank in ranks), LIMIT_S)
        shown = json.loads(service.cli("job", "show", "job", "--json").stdout)[0]
    steps = {rank: [t for t in told(tmp_path, *rank) if "step" in t] for rank in ranks}
    for rank in range(2):
        assert {t["attempt"] for t in steps["Y", rank]} == {2}
        assert {t["attempt"] for t in steps["X", rank]} <= {1}
        (error,) = [t for t in told(tmp_path, "X", rank) if "error" in t]
        assert error["error"] == "Fenced"
        assert "was replaced by attempt 2" in error["said"]
    trained = Counter(i for r in range(2) for t in steps["Y", r] for i in t["samples"])
    assert set(trained.values()) == {1}
    assert len(trained) == shown["samples"]


@pytest.mark.parametrize("how", [pytest.param("one host", marks=pytest.mark.full), "two hosts"])
def test_ranks_that_torchrun_restarts_are_an_attempt_and_lose_and_repeat_nothing(
    corpus, tmp_path, how
):
    with serving(tmp_path) as service:
        service.cli("job", "submit", str(job_file(corpus, tmp_path, plan=PLAN)))
        for rank in range(2):
            (tmp_path / f"X-{rank}.open").touch()
        program = [str(RANK), service.address, str(tmp_path), "X", "--break-at", "2"]
        agents = agents_of(how, *program, more=("--max-restarts", "1"))
        with torchruns(*agents):
            wait_for(lambda: all(over(tmp_path, "X", rank) for rank in range(2)), LIMIT_S)
        shown = json.loads(service.cli("job", "show", "job", "--json").stdout)[0]
    trained: Counter[int] = Counter()
    for rank in range(2):
        lines = told(tmp_path, "X", rank)
        assert lines[-1] == {"ended": True, "restarts": 1}
        steps = [t for t in lines if "step" in t]
        assert [t["step"] for t in steps if t["attempt"] == 1] == [0, 1, 2]
        assert steps[3] == {**steps[3], "step": 2, "attempt": 2}
        trained.update(
            i for t in steps if (t["step"], t["attempt"]) != (2, 1) for i in t["samples"]
        )
    assert set(trained.values()) == {1}
    assert len(trained) == shown["samples"]
