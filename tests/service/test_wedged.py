"""Something hangs in a real service: the rest goes on, health says so in seconds, `status --check`
ends with its code, and SIGTERM ends the service in its time and says by its status what it left."""

import contextlib
import signal
import socket
import sqlite3
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
import yaml
from grpc_health.v1 import health_pb2, health_pb2_grpc

from dataservice.cli.status import UNWELL
from dataservice.operate.stopping import ABANDONED
from dataservice.serving.coordinator_client import CoordinatorClient
from dataservice.serving.health_ports import LIVENESS, READY
from dataservice.serving.status_codes import ServiceUnreachableError
from soak.processes import family
from tests.service import wedged
from tests.service.small import indexed_job, make_corpus
from tests.service.support import Ranks, ServiceProcess, wait_for

pytestmark = pytest.mark.long

UNWELL_AFTER_S = 2.0
STOP_WITHIN_S = 8.0
RANKS = 48  # more than there are threads for planning
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A job file whose index is made."""
    corpus = make_corpus(tmp_path_factory.mktemp("small") / "corpus")
    return indexed_job(corpus)


@contextlib.contextmanager
def serving(home: Path, job: Path, pool: str = "local") -> Iterator[ServiceProcess]:
    """A service with a job, whose parts can be made to hang."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        health = f"127.0.0.1:{free.getsockname()[1]}"
    (home / "wedges").mkdir(parents=True)
    config = home / "service.yaml"
    config.write_text(
        yaml.safe_dump(
            {
                "workers": 1,
                "planning_threads": 1,
                "health_listen": health,
                "unwell_after_s": UNWELL_AFTER_S,
                "stop_within_s": STOP_WITHIN_S,
            }
        )
    )
    service = ServiceProcess(
        home=home,
        pool=pool,
        flags=("--config", str(config)),
        environment={"WEDGES": str(home / "wedges")},
        program=wedged.__name__,
    ).start()
    try:
        service.cli("job", "submit", str(job))
        yield service
    finally:
        service.end()


@pytest.fixture
def service(tmp_path: Path, job: Path) -> Iterator[ServiceProcess]:
    with serving(tmp_path, job) as running:
        yield running


def wedge(service: ServiceProcess, what: str) -> Path:
    """What hangs from now on; unlink it to end that."""
    file = service.home / "wedges" / what
    file.touch()
    return file


def probed(service: ServiceProcess, name: str = READY) -> int:
    """What a probe of Kubernetes is answered."""
    config = yaml.safe_load((service.home / "service.yaml").read_text())
    return answered(config["health_listen"], name)


def answered(address: str, name: str = READY) -> int:
    with grpc.insecure_channel(address) as channel:
        request = health_pb2.HealthCheckRequest(service=name)
        return health_pb2_grpc.HealthStub(channel).Check(request, timeout=5).status


def health(service: ServiceProcess) -> tuple[str, ...]:
    with CoordinatorClient(service.address, timeout_s=5) as client:
        return client.health().troubles


def stopped(service: ServiceProcess, *, signals: int = 1) -> tuple[int, float]:
    """How it ends at SIGTERM, and within how many seconds."""
    assert service.process is not None
    began_s = time.monotonic()
    for _ in range(signals):
        service.process.send_signal(signal.SIGTERM)
        time.sleep(0.3)
    status = service.process.wait(timeout=STOP_WITHIN_S + 20)
    return status, time.monotonic() - began_s


def check(service: ServiceProcess) -> str:
    """`status --check` says that the service is not well; what it prints."""
    began_s = time.monotonic()
    done = service.cli("status", "--check", check=False)
    assert done.returncode == UNWELL, done.stderr
    assert time.monotonic() - began_s < 25, "10 s, and what Python takes to start"
    return done.stdout + done.stderr


def ask_in_vain(service: ServiceProcess) -> None:
    """A question to the store that takes its turn and keeps it."""

    def ask() -> None:
        with (
            CoordinatorClient(service.address, timeout_s=60) as client,
            contextlib.suppress(ServiceUnreachableError),
        ):
            client.quarantine("job")

    threading.Thread(target=ask, daemon=True).start()


def test_a_service_that_is_well_says_so_and_ends_cleanly(service):
    assert (probed(service), probed(service, LIVENESS), answered(service.address)) == (SERVING,) * 3
    assert not health(service)
    service.cli("status", "--check")
    status, _ = stopped(service)
    assert status == 0
    assert not family(service.home)


def test_planning_that_hangs_leaves_all_else_its_threads_and_is_told(service):
    wedge(service, wedged.PLANNING)
    ranks = Ranks(service.address, RANKS, connect_timeout_s=60).start()
    wait_for(lambda: probed(service) == NOT_SERVING)
    assert any("threads for planning" in trouble for trouble in health(service))
    with CoordinatorClient(service.address, timeout_s=5) as client:
        assert client.job("job").samples > 0  # a question to the store
        assert [status.record.name for status in client.jobs()] == ["job"]
    assert "threads for planning" in check(service)
    assert answered(service.address) == NOT_SERVING
    assert probed(service, LIVENESS) == NOT_SERVING  # a restart alone ends it
    status, took_s = stopped(service)
    assert status == ABANDONED
    assert took_s < STOP_WITHIN_S + 8
    log = service.log.read_text()
    assert "AttemptRecords.plan hangs for" in log
    assert "tests/service/wedged.py" in log  # where it stands
    ranks.stopping = True
    assert not family(service.home)


def test_a_store_that_hangs_is_told_without_it(service):
    file = wedge(service, wedged.STORE)
    ask_in_vain(service)
    wait_for(lambda: probed(service) == NOT_SERVING)
    assert health(service)[0].startswith("the state store has not answered for")
    assert "the state store" in check(service)
    file.unlink()
    wait_for(lambda: probed(service) == SERVING)
    service.cli("status", "--check")
    file.touch()
    ask_in_vain(service)
    wait_for(lambda: probed(service) == NOT_SERVING)
    status, took_s = stopped(service)
    assert status == ABANDONED
    assert took_s < STOP_WITHIN_S + 8
    assert "read_late hangs for" in service.log.read_text()


def test_a_state_file_that_another_process_locks_is_told_and_mends_itself(service):
    with contextlib.closing(sqlite3.connect(service.state_dir / "state.db")) as other:
        other.execute("BEGIN IMMEDIATE")
        wait_for(lambda: probed(service) == NOT_SERVING)
        assert probed(service, LIVENESS) == SERVING  # a restart would not help
        assert health(service)[0].startswith("the state store has failed for")
        check(service)
        other.rollback()
    wait_for(lambda: probed(service) == SERVING)
    assert stopped(service)[0] == 0
    assert "database is locked" in service.log.read_text()


def test_an_event_loop_that_is_blocked_is_told_at_the_health_port(service):
    wedge(service, wedged.LOOP)
    wait_for(lambda: probed(service) == NOT_SERVING)
    assert probed(service, LIVENESS) == NOT_SERVING
    assert "did not answer within 6 s" in check(service)
    status, took_s = stopped(service)
    assert status == ABANDONED
    assert took_s < STOP_WITHIN_S + 8
    log = service.log.read_text()
    assert "not well: the event loop has not answered for" in log
    assert log.count("not well: the event loop") == 1
    assert "in hang_again_and_again" in log


def test_a_second_signal_ends_at_once(service):
    wedge(service, wedged.LOOP)
    time.sleep(0.5)
    status, took_s = stopped(service, signals=2)
    assert status == ABANDONED
    assert took_s < STOP_WITHIN_S


def test_no_process_of_ray_outlives_a_service_that_ends_so(tmp_path, job):
    with serving(tmp_path / "ray", job, pool="ray") as service:
        assert len(family(service.home)) > 3
        wedge(service, wedged.LOOP)
        time.sleep(0.5)
        assert stopped(service)[0] == ABANDONED
        wait_for(lambda: not family(service.home), 90.0)  # Ray ends its own as it notices
