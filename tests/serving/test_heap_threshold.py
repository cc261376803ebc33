"""Memory of messages: ranks and workers keep it from one to the next."""

import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from benchmarks.data import part_path

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        platform.libc_ver()[0] != "glibc", reason="another C library keeps what it likes"
    ),
]

RANK = """
import resource, sys
from benchmarks.data import part_path

receive = part_path.parts(sys.argv[1], same_node=False)
for _ in range(4):  # each thread that receives has a heap of its own
    receive()
print("warm", flush=True)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(int(sys.argv[2])):
    receive()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
PACKS, PAGE_BYTES = 8, 4096


class Faults(NamedTuple):
    """Pages that the kernel mapped while PACKS packs went over gRPC, a page of them."""

    rank: float
    worker: float


def mapped(process):
    """Minor faults of a process until now, of all its threads."""
    return int(Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[7])


def faults(**environment):
    command = [sys.executable, "-c", RANK]
    with (
        part_path.sender("worker") as (address, worker),
        subprocess.Popen(
            [*command, address, str(PACKS)],
            cwd=Path(__file__).parents[2],
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            text=True,
        ) as rank,
    ):
        assert rank.stdout.readline() == "warm\n"
        before = mapped(worker)
        by_rank = int(rank.stdout.readline())
        by_worker = mapped(worker) - before
    pages = PACKS * part_path.PACK_BYTES / PAGE_BYTES
    return Faults(by_rank / pages, by_worker / pages)


def test_a_message_takes_the_memory_of_those_before():
    found = faults()
    assert found.rank < 0.5  # none but what heaps grow by where a thread fell behind: 0 to 0.12
    assert found.worker < 0.02


def test_a_threshold_that_the_process_was_given_is_left_as_it_is():
    assert faults(MALLOC_TRIM_THRESHOLD_="131072").rank > 1.0
