"""A world of real processes for the runtime's tests."""

import runpy
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.forking import forking
from tests.trainer_client.runtime.recorded_transport import Recorder

RANK_MAIN = Path(__file__).with_name("rank_main.py")
LIMIT_S = 160.0  # below the time-out of a test, whose message would not name the ranks


class WorldFailed(AssertionError):
    pass


def run_world(
    scenario: Callable[..., Any],
    size: int,
    folder: Path,
    *arguments: Any,
    backend_ready: bool = True,
) -> dict[int, Any]:
    """Run ``scenario(rank, size, *arguments)`` in ``size`` processes; rank → what it returned.

    The store lives in this process, as torchrun's agent keeps it outside the ranks. Ranks that
    end without an answer (killed by the scenario) are left out.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = forking()
    order = {
        "file": scenario.__code__.co_filename,
        "name": scenario.__name__,
        "size": size,
        "port": store.port,
        "folder": str(folder),
        "arguments": arguments,
        "backend_ready": backend_ready,
        "path": sys.path,
    }
    ranks = [
        context.Process(
            target=runpy.run_path, args=(str(RANK_MAIN), {"ORDER": {**order, "rank": rank}})
        )
        for rank in range(size)
    ]
    for process in ranks:
        process.start()
    deadline = time.monotonic() + LIMIT_S
    for process in ranks:
        process.join(max(0.0, deadline - time.monotonic()))
    hung = [rank for rank, process in enumerate(ranks) if process.is_alive()]
    for rank in hung:
        ranks[rank].kill()
        ranks[rank].join()
    if hung:
        raise WorldFailed(f"ranks {hung} did not end within {LIMIT_S} s")
    ends = ", ".join(f"rank {rank}: {process.exitcode}" for rank, process in enumerate(ranks))
    return _answers(folder, size, ends)


def _answers(folder: Path, size: int, ends: str) -> dict[int, Any]:
    failed = [path for rank in range(size) if (path := folder / f"rank{rank}.failed").exists()]
    if failed:
        # In the order in which they failed: what the first says is most often the cause.
        failed.sort(key=lambda path: path.stat().st_mtime_ns)
        said = "\n".join(f"{path.stem}:\n{path.read_text()}" for path in failed)
        raise WorldFailed(f"{said}\nProcesses ended with {ends}.")
    answers = {}
    for rank in range(size):
        answer = folder / f"rank{rank}.pt"
        if answer.exists():
            answers[rank] = torch.load(answer, weights_only=False)
    return answers


@pytest.fixture
def world(tmp_path: Path) -> Callable[..., dict[int, Any]]:
    def run(scenario: Callable[..., Any], size: int, *arguments: Any, **options: Any) -> Any:
        return run_world(scenario, size, tmp_path, *arguments, **options)

    return run


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorder]:
    """Ranks that run alone; what they would have posted is noted."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the tensors are tiny
    yield Recorder(monkeypatch)
    torch.set_num_threads(threads)
