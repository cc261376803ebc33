"""A service whose workers are yet to start answers whoever comes, and says so; what asks for data
waits. One whose workers cannot start ends, and says why."""

import signal
from pathlib import Path

import psutil
import pytest
import yaml

from dataservice.operate.stopping import ABANDONED
from dataservice.serving.health_ports import LIVENESS, READY
from soak.cluster import cluster, free_port
from soak.processes import family, title
from tests.health import SERVING, told
from tests.service.small import SAMPLES, indexed_job, make_corpus
from tests.service.support import (
    Ranks,
    ServiceProcess,
    free_ports,
    metrics_addresses,
    scraped,
    wait_for,
)

pytestmark = [pytest.mark.xdist_group("ray"), pytest.mark.long]

STAFFED = "serving with "
RAY_LIMIT_S = 90.0  # of its own 30, on a busy machine


def config(home: Path, **more: object) -> tuple[str, str]:
    path = home / "service.yaml"
    path.write_text(yaml.safe_dump(more))
    return "--config", str(path)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A job file whose index is made."""
    return indexed_job(make_corpus(tmp_path_factory.mktemp("small") / "corpus"))


def test_whoever_comes_before_the_workers_is_answered_and_told_what_is_waited_for(job, tmp_path):
    """The cluster has one CPU, and the worker takes two: it starts once there is another node."""
    health = f"127.0.0.1:{free_port()}"
    with cluster(tmp_path / "ray", (1,), {}) as ray:
        service = ServiceProcess(
            home=tmp_path / "ray",
            pool="ray",
            environment=ray.environment,
            flags=config(
                tmp_path,
                ray_address=ray.address,
                slots_per_worker=2,
                workers=1,
                metrics_listen="127.0.0.1:0",
                health_listen=health,
            ),
        )
        try:
            service.start(workers=False)
            assert [told(health, of) for of in (READY, LIVENESS)] == [SERVING] * 2
            service.cli("job", "submit", str(job))
            ranks = Ranks(service.address, 2).start()
            waits = "no worker of 1 is alive; 1 of 1 workers are being started"
            wait_for(lambda: waits in service.cli("status").stdout)
            assert "the workers: 1 of 1 workers are being started" in service.cli("status").stdout
            assert "worker-" not in service.cli("workers", "list").stdout
            (address,) = metrics_addresses(service)
            assert scraped(address)["dataservice_workers", frozenset()] == 0
            assert STAFFED not in service.log.read_text()

            ray.add(2)
            ranks.join()
            assert ranks.visits == dict.fromkeys(range(SAMPLES), 1)
            assert f"{STAFFED}1 of 1 workers" in service.log.read_text()
            service.stop()
        finally:
            service.end()


def test_sigterm_while_ray_starts_ends_the_service_and_ray(tmp_path):
    service = ServiceProcess(home=tmp_path, pool="ray")
    try:
        service.start(workers=False).stop()
        assert STAFFED not in service.log.read_text()
        wait_for(lambda: not family(tmp_path))
    finally:
        service.end()


def test_sigterm_ends_a_service_whose_ray_does_not_come_up(tmp_path):
    """The process of Ray that is waited for is stopped. If Ray's own code then waits for it, which
    lets no Python run meanwhile, that ends the process, after half a minute."""
    service = ServiceProcess(home=tmp_path, pool="ray", flags=("--workers", "1"))
    try:
        service.start(workers=False)

        def raylets() -> list[psutil.Process]:
            return [each for each in family(tmp_path) if "raylet/raylet" in title(each)]

        wait_for(raylets)
        for raylet in raylets():
            raylet.send_signal(signal.SIGSTOP)
        assert service.process is not None
        service.process.send_signal(signal.SIGTERM)
        status = service.process.wait(timeout=RAY_LIMIT_S)
        assert status in (ABANDONED, 1, -signal.SIGABRT)
        assert ("Ray does not answer" in service.log.read_text()) == (status == ABANDONED)
        assert STAFFED not in service.log.read_text()
        wait_for(lambda: not family(tmp_path))
    finally:
        service.end()


@pytest.mark.parametrize("pool", ["local", "ray"])
def test_a_service_whose_workers_cannot_start_ends_and_says_why(tmp_path, pool):
    """The only port that a worker may have is another's, that of the service itself."""
    port = free_ports(1)
    service = ServiceProcess(
        home=tmp_path,
        pool=pool,
        address=f"127.0.0.1:{port}",
        flags=config(tmp_path, workers=1, worker_ports=f"{port}-{port}"),
    )
    try:
        with pytest.raises(AssertionError, match=f"cannot listen on 127.0.0.1:{port}"):
            service.start()
        assert service.process is not None
        assert service.process.returncode == 1
        wait_for(lambda: not family(tmp_path))
    finally:
        service.end()
