"""Something hangs in a real service: the rest goes on, health says so in seconds, `status --check`
ends with its code, and SIGTERM ends the service in its time and says by its status what it left."""

import contextlib
import signal
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from dataservice.cli.status import UNWELL
from dataservice.operate.stopping import ABANDONED
from dataservice.serving.coordinator_client import CoordinatorClient
from dataservice.serving.health_ports import LIVENESS, READY
from dataservice.serving.status_codes import ServiceUnreachableError
from soak.cluster import free_port
from soak.processes import family
from tests.health import NOT_SERVING, SERVING, told
from tests.service import wedged
from tests.service.small import indexed_job, make_corpus
from tests.service.support import Ranks, ServiceProcess, wait_for

pytestmark = pytest.mark.long

UNWELL_AFTER_S = 4.0  # signs are looked at each second, and a machine that is busy halts for some
STOP_WITHIN_S = 8.0
LIMIT_S = 60.0  # of what takes seconds where the machine has nothing else to do
RANKS = 48  # more than there are threads for planning


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A job file whose index is made."""
    corpus = make_corpus(tmp_path_factory.mktemp("small") / "corpus")
    return indexed_job(corpus)


@contextlib.contextmanager
def serving(home: Path, job: Path, pool: str = "local") -> Iterator[ServiceProcess]:
    """A service with a job, whose parts can be made to hang."""
    (home / "wedges").mkdir(parents=True)
    config = home / "service.yaml"
    config.write_text(
        yaml.safe_dump(
            {
                "workers": 1,
                "planning_threads": 1,
                "health_listen": f"127.0.0.1:{free_port()}",
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


def wedged_loop(service: ServiceProcess) -> None:
    """Returns once the event loop hangs."""
    file = wedge(service, wedged.LOOP)
    wait_for(file.with_suffix(".hangs").exists)


def probed(service: ServiceProcess, name: str = READY) -> int:
    """What a probe of Kubernetes is answered."""
    config = yaml.safe_load((service.home / "service.yaml").read_text())
    return told(config["health_listen"], name)


def unwell(service: ServiceProcess) -> None:
    """Returns once probes are answered so."""
    wait_for(lambda: probed(service) == NOT_SERVING, LIMIT_S)


def well(service: ServiceProcess) -> None:
    """The same of a service that is well."""
    wait_for(lambda: probed(service) == SERVING, LIMIT_S)


def health(service: ServiceProcess) -> tuple[str, ...]:
    with CoordinatorClient(service.address, timeout_s=LIMIT_S) as client:
        return client.health().troubles


def stopped(service: ServiceProcess, *signals: signal.Signals) -> int:
    """How it ends at these signals, by default at SIGTERM. What hangs does so for good: that it
    ends at all is by its own limit, whose seconds are not measured on a machine that is busy."""
    assert service.process is not None
    for each in signals or (signal.SIGTERM,):
        service.process.send_signal(each)
    return service.process.wait(timeout=STOP_WITHIN_S + LIMIT_S)


def check(service: ServiceProcess) -> str:
    """`status --check` says that the service is not well; what it prints. It ends by its own
    limits though the service hangs for good."""
    done = service.cli("status", "--check", check=False)
    assert done.returncode == UNWELL, done.stderr
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
    assert (probed(service), probed(service, LIVENESS), told(service.address, READY)) == (
        SERVING,
    ) * 3
    assert not health(service)
    service.cli("status", "--check")
    assert stopped(service) == 0
    wait_for(lambda: not family(service.home))


def test_planning_that_hangs_leaves_all_else_its_threads_and_is_told(service):
    wedge(service, wedged.PLANNING)
    ranks = Ranks(service.address, RANKS, connect_timeout_s=60).start()
    wait_for(lambda: any("threads for planning" in trouble for trouble in health(service)), LIMIT_S)
    unwell(service)
    with CoordinatorClient(service.address, timeout_s=LIMIT_S) as client:
        assert client.job("job").samples > 0  # a question to the store
        assert [status.record.name for status in client.jobs()] == ["job"]
    assert "threads for planning" in check(service)
    assert told(service.address, READY) == NOT_SERVING
    assert probed(service, LIVENESS) == NOT_SERVING  # a restart alone ends it
    assert stopped(service) == ABANDONED
    log = service.log.read_text()
    assert "AttemptRecords.plan hangs for" in log
    assert "tests/service/wedged.py" in log  # where it stands
    ranks.stopping = True
    wait_for(lambda: not family(service.home))


def test_a_store_that_hangs_is_told_without_it(service):
    file = wedge(service, wedged.STORE)
    ask_in_vain(service)
    unwell(service)
    assert health(service)[0].startswith("the state store has not answered for")
    assert "the state store" in check(service)
    file.unlink()
    well(service)
    service.cli("status", "--check")
    file.touch()
    ask_in_vain(service)
    unwell(service)
    assert stopped(service) == ABANDONED
    assert "read_late hangs for" in service.log.read_text()


def test_a_state_file_that_another_process_locks_is_told_and_mends_itself(service):
    with contextlib.closing(sqlite3.connect(service.state_dir / "state.db")) as other:
        other.execute("BEGIN IMMEDIATE")
        unwell(service)
        assert probed(service, LIVENESS) == SERVING  # a restart would not help
        assert health(service)[0].startswith("the state store has failed for")
        check(service)
        other.rollback()
    well(service)
    assert stopped(service) == 0
    assert "database is locked" in service.log.read_text()


def test_an_event_loop_that_is_blocked_is_told_at_the_health_port(service):
    wedged_loop(service)
    unwell(service)
    assert probed(service, LIVENESS) == NOT_SERVING
    assert "did not answer within 6 s" in check(service)
    assert stopped(service) == ABANDONED
    log = service.log.read_text()
    assert f"the {STOP_WITHIN_S:g} s for stopping are over" in log
    assert "not well: the event loop has not answered for" in log
    assert log.count("not well: the event loop") == 1
    assert "in hang_again_and_again" in log


def test_a_second_signal_ends_at_once(service):
    wedged_loop(service)
    assert service.process is not None
    # Both are there when it goes on, as where the machine halts it for a moment. Two of a kind
    # would be one signal.
    service.process.send_signal(signal.SIGSTOP)
    status = stopped(service, signal.SIGTERM, signal.SIGINT, signal.SIGCONT)
    assert status == ABANDONED
    assert "a second signal came" in service.log.read_text()


def test_no_process_of_ray_outlives_a_service_that_ends_so(tmp_path, job):
    with serving(tmp_path / "ray", job, pool="ray") as service:
        assert len(family(service.home)) > 3
        wedged_loop(service)
        assert stopped(service) == ABANDONED
        wait_for(lambda: not family(service.home))  # Ray ends its own as it notices
