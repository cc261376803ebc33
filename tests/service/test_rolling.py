"""In a Ray that outlives the service, workers go on without it, and are renewed under a job."""

import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from soak.cluster import cluster
from tests.service.support import Ranks, ServiceProcess, job_file, wait_for

FLAGS = ("--workers", "2")


@pytest.fixture
def service(tmp_path: Path) -> Iterator[ServiceProcess]:
    """A service in a real Ray of two nodes, with room for one worker more than it has."""
    with cluster(tmp_path, (2, 1), {}) as ray:
        made = ServiceProcess(home=tmp_path, pool="ray", environment=ray.environment)
        made.flags = ("--ray-address", ray.address, *FLAGS)
        yield made.start()
        made.end()


def workers_of(service: ServiceProcess) -> dict[str, str]:
    """The address of each worker by name."""
    listed = json.loads(service.cli("workers", "list", "--json").stdout)
    return {each["worker"]: each["address"] for each in listed}


def listens(address: str) -> bool:
    host, _, port = address.rpartition(":")
    with socket.socket() as asked:
        return asked.connect_ex((host, int(port))) == 0


def test_workers_outlive_coordinators_and_are_renewed_under_a_job(corpus, tmp_path, service):
    service.cli("job", "submit", str(job_file(corpus, tmp_path)))
    samples = json.loads(service.cli("job", "list", "--json").stdout)[0]["samples"]
    first = workers_of(service)
    ranks = Ranks(service.address, 3, pace_s=0.3).start()
    for end in (service.kill, service.stop):
        before = ranks.steps_done
        wait_for(lambda before=before: ranks.steps_done >= before + 2)
        end()
        service.start()
        assert workers_of(service) == first
    said = service.cli("workers", "restart").stdout
    assert "worker-0.1 is replaced\nworker-1.1 is replaced\n" in said
    last = workers_of(service)
    assert set(last) == {"worker-0.2", "worker-1.2"}
    ranks.join(120.0)
    assert len(ranks.visits) == samples
    assert set(ranks.visits.values()) == {1}
    assert "is lost" not in service.log.read_text()

    service.stop()
    service.flags = (*service.flags, "--stop-workers")
    service.start()
    assert workers_of(service) == last
    service.stop()
    assert not any(map(listens, last.values()))
