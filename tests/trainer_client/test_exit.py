"""Processes that end in the middle of a loop: at once, and without a word of the client's."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

LIMIT_S = 120.0  # a process imports torch before all else
START = """
import sys
from trainer_client import ShardDataset
dataset = ShardDataset(sys.argv[1], job="vlm-sft", rank=0, world_size=2)
shards = iter(dataset)
print(next(shards).step, flush=True)
"""


@contextmanager
def started(service, program) -> Iterator[subprocess.Popen]:
    process = subprocess.Popen(
        [sys.executable, "-c", program, service.address],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def test_a_process_and_its_fork_end_though_the_loop_did_not(service):
    with started(service, START + "import os\nsys.exit(7 if os.fork() else 0)") as process:
        out, err = process.communicate(timeout=LIMIT_S)
    assert (out, process.returncode) == ("0\n", 7)
    assert "Traceback" not in err


def test_an_interrupt_ends_a_loop_that_waits_for_data(make_service):
    service = make_service(steps=50)
    service.coordinator.edit = lambda shard: service.coordinator.planned.clear()  # behind step 0
    with started(service, START + "for _ in shards: pass") as process:
        assert process.stdout.readline() == "0\n"
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=LIMIT_S)
    assert err.rstrip().endswith("KeyboardInterrupt")
