"""What ranks take of the files and sockets that processes may open, and who says so in time."""

import contextlib
import os
import re
import threading
import time
from pathlib import Path

import grpc
import psutil
import pytest
from dataservice_proto.columns import VERSION
from dataservice_proto.v1 import coordinator_pb2, coordinator_pb2_grpc

from dataservice.engine.connection_capacity import A_NEAR_RANK, A_RANK, A_WORKER, AT_REST
from dataservice.serving.coordinator_client import CoordinatorClient
from tests.service.support import Ranks, ServiceProcess, job_file, wait_for

pytestmark = pytest.mark.long

PROGRAM = "tests.service.limited"


def descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def limit(pid: int) -> int:
    text = Path(f"/proc/{pid}/limits").read_text()
    return int(re.search(r"Max open files +(\d+)", text)[1])


def called(service: ServiceProcess, name: str) -> list[int]:
    """The service's processes whose command line has this name."""
    found = []
    for process in psutil.Process(service.pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
            if name in " ".join(process.cmdline()):
                found.append(process.pid)
    return found


def least_open(pids: list[int]) -> list[int]:
    """What each process has open all the while: files that are read, samples that are handed over
    and connections of the command line come and go. Workers are slow to close them where others
    keep the cores busy, so that this looks on until nothing has been closed for two seconds."""
    counts = [descriptors(pid) for pid in pids]
    fell_s = time.monotonic()
    while time.monotonic() - fell_s < 2:
        time.sleep(0.02)
        least = [min(count, descriptors(pid)) for count, pid in zip(counts, pids, strict=True)]
        if least != counts:
            counts, fell_s = least, time.monotonic()
    return counts


@pytest.mark.parametrize("pool", ["local", pytest.param("ray", marks=pytest.mark.full)])
def test_limits_are_raised_and_a_rank_takes_what_it_is_counted_as(corpus, tmp_path, pool):
    flags = ("--workers", "2")
    service = ServiceProcess(home=tmp_path, pool=pool, flags=flags, program=PROGRAM)
    service.environment["NOFILE"] = "700:5000"
    try:
        service.start()
        workers = called(service, "_WorkerProcess")  # as Ray calls its actors
        assert len(workers) == (2 if pool == "ray" else 0)
        # What forks, and two decoders.
        wait_for(lambda: len(called(service, "nursery_program")) >= 3)
        nurseries = called(service, "nursery_program")
        assert {limit(pid) for pid in [service.pid, *workers, *nurseries]} == {5000}
        at_rest, *at_workers = least_open([service.pid, *workers])
        assert at_rest <= AT_REST + 2 * A_WORKER
        assert all(count <= AT_REST for count in at_workers)
        service.cli("job", "submit", str(job_file(corpus, tmp_path, epochs=1000)))

        # The many are first: Ray opens an epoll with two sockets in a worker some time, for good.
        many = connected(service, workers, 7)
        few = connected(service, workers, 3)
        print(f"{pool}: at rest {at_rest}, with 7 ranks {many}, with 3 {few}")
        inside = 2 if pool == "local" else 0
        at_worker = A_RANK + A_NEAR_RANK
        assert many[0] - few[0] <= 4 * (A_RANK + inside * at_worker)
        assert all(b - a <= 4 * at_worker for a, b in zip(few[1:], many[1:], strict=True))
    finally:
        service.end()


def connected(service: ServiceProcess, workers: list[int], ranks: int) -> list[int]:
    """What the coordinator and each worker have open while so many ranks train, each of which has
    long come to fetch from every worker."""
    training = Ranks(service.address, ranks, pace_s=0.05).start()
    wait_for(lambda: len(training.shards) == ranks)
    wait_for(lambda: min(map(len, training.shards.values())) >= 20)
    counts = least_open([service.pid, *workers])
    training.stop_at_one_step()
    return counts


def test_ranks_that_will_find_no_room_are_said_as_the_first_comes_and_once(corpus, tmp_path):
    service = ServiceProcess(home=tmp_path, flags=("--workers", "1"), program=PROGRAM)
    service.environment["NOFILE"] = "600:600"
    try:
        service.start()
        service.cli("job", "submit", str(job_file(corpus, tmp_path)))
        said = (
            r"300 ranks need about 8\d\d open files and sockets at the coordinator, which may have "
            r"600: the last ranks are not let in. Raise its hard limit to 8\d\d or more"
        )
        with claims(service, world_size=300, ranks=2):
            wait_for(lambda: re.search(said, service.log.read_text()))
            with CoordinatorClient(service.address) as client:
                (seen,) = client.health("job").jobs
            assert [each.severity for each in seen.findings if re.match(said, each.text)] == [
                "slow"
            ]
        assert len(re.findall(said, service.log.read_text())) == 1

        def all_is_said() -> bool:
            return not re.search(said, service.cli("status").stdout.replace("\n", " "))

        wait_for(all_is_said)
    finally:
        service.end()


class claims:
    """Some ranks of a large attempt: they open, and wait for the others."""

    def __init__(self, service: ServiceProcess, *, world_size: int, ranks: int) -> None:
        self._channel = grpc.insecure_channel(service.address)
        stub = coordinator_pb2_grpc.CoordinatorStub(self._channel)
        for rank in range(ranks):
            request = coordinator_pb2.OpenSessionRequest(
                columns=VERSION, job="job", rank=rank, world_size=world_size, client=f"host:{rank}"
            )
            stream = stub.OpenSession(request)
            threading.Thread(target=_drain, args=(stream,), daemon=True).start()

    def __enter__(self) -> "claims":
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()


def _drain(stream) -> None:
    with contextlib.suppress(grpc.RpcError):
        list(stream)
