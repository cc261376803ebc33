"""A service whose third worker finds no port, until one is free."""

import socket
from pathlib import Path

import pytest
import yaml

from tests.service.support import (
    Ranks,
    ServiceProcess,
    free_ports,
    job_file,
    metrics_addresses,
    scraped,
    wait_for,
)

pytestmark = pytest.mark.long


@pytest.fixture
def taken():
    """A port that is in use, behind two that are free."""
    with socket.create_server(("127.0.0.1", free_ports(3) + 2)) as found:
        yield found


def config(home: Path, taken: socket.socket, **changes: object) -> tuple[str, str]:
    """Three workers, for which there are three ports, one of them taken."""
    last = taken.getsockname()[1]
    plain = {
        "workers": 3,
        "worker_ports": f"{last - 2}-{last}",
        "metrics_listen": "127.0.0.1:0",
        **changes,
    }
    (home / "service.yaml").write_text(yaml.safe_dump(plain))
    return "--config", str(home / "service.yaml")


def counted(service: ServiceProcess) -> tuple[float, float]:
    """Workers that serve and workers wanted, as Prometheus is told."""
    (address,) = metrics_addresses(service)
    series = scraped(address)
    names = ("dataservice_workers", "dataservice_wanted_workers")
    return tuple(series[name, frozenset()] for name in names)  # type: ignore[return-value]


def test_a_service_trains_with_the_workers_there_are_and_says_which_are_missing(
    corpus, tmp_path, taken
):
    service = ServiceProcess(home=tmp_path, flags=config(tmp_path, taken))
    try:
        service.start()
        assert "with 2 of 3 workers" in service.log.read_text()
        service.cli("job", "submit", str(job_file(corpus, tmp_path)))
        ranks = Ranks(service.address, 3).start(stop_after=2).join()
        assert ranks.steps_done == 2
        said = service.cli("status").stdout
        assert "2 of 3 workers, " in said
        assert "the workers: 1 of 3 workers are missing and tried again every " in said
        assert f"cannot listen on 127.0.0.1:{taken.getsockname()[1] - 2}-" in said
        wait_for(lambda: counted(service) == (2, 3))

        taken.close()
        wait_for(lambda: "3 of 3 workers, " in service.cli("status").stdout)
        assert "missing" not in service.cli("status").stdout
        wait_for(lambda: counted(service) == (3, 3))
    finally:
        service.end()


def test_below_min_workers_the_service_does_not_start(tmp_path, taken):
    service = ServiceProcess(home=tmp_path, flags=config(tmp_path, taken, min_workers=3))
    try:
        with pytest.raises(AssertionError, match=r"2 of 3 workers serve, and min_workers is 3: .*"):
            service.start()
    finally:
        service.end()
