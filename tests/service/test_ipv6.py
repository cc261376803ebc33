"""The whole path over ::1: a real service and its workers, a rank, the command line and the
scrapers, in the clear and by TLS."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme
import yaml
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.ipv6 import needs_ipv6
from tests.service.small import SAMPLES, indexed_job, make_corpus
from tests.service.support import (
    Ranks,
    ServiceProcess,
    free_ports,
    metrics_addresses,
    scraped,
    wait_for,
)
from trainer_client import Tls

pytestmark = [needs_ipv6, pytest.mark.long]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = make_corpus(tmp_path_factory.mktemp("ipv6") / "corpus")
    return indexed_job(home)


@pytest.fixture
def secured(tmp_path: Path) -> dict[str, Any]:
    """TLS whose certificate bears nothing but the address."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    issued = authority.issue_cert("::1")
    chain = b"".join(pem.bytes() for pem in issued.cert_chain_pems)
    (tmp_path / "tls.pem").write_bytes(chain)
    issued.private_key_pem.write_to_path(tmp_path / "tls.key")
    files = {"certificate_file": tmp_path / "tls.pem", "key_file": tmp_path / "tls.key"}
    return {name: str(path) for name, path in (files | {"ca_file": tmp_path / "ca.pem"}).items()}


@pytest.fixture(params=[pytest.param("ray", marks=pytest.mark.full), "local by TLS"])
def service(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ServiceProcess]:
    pool, _, by_tls = request.param.partition(" by ")
    first = free_ports(5, "::1")
    plain = {
        "workers": 2,
        "worker_host": "::1",
        "worker_metrics_ports": f"{first}-{first + 3}",
        "metrics_listen": "[::1]:0",
        "health_listen": f"[::1]:{first + 4}",
    }
    if by_tls:
        plain["tls"] = request.getfixturevalue("secured")
    (tmp_path / "service.yaml").write_text(yaml.safe_dump(plain))
    flags = ("--config", str(tmp_path / "service.yaml"))
    running = ServiceProcess(home=tmp_path, pool=pool, flags=flags, address="[::1]:0")
    try:
        yield running.start()
    finally:
        running.end()


def test_a_job_is_trained_over_ipv6(service: ServiceProcess, job: Path, tmp_path: Path):
    by_tls = (tmp_path / "ca.pem").exists()
    flags = ("--ca-file", str(tmp_path / "ca.pem")) if by_tls else ()
    service.cli("job", "submit", str(job), *flags)
    tls = Tls(ca_file=tmp_path / "ca.pem") if by_tls else None
    ranks = Ranks(service.address, 2, tls=tls).start().join()
    assert sorted(ranks.visits) == list(range(SAMPLES))
    wait_for(lambda: "2 of 2 workers" in service.cli("status", *flags).stdout)
    assert "[::1]:" in service.cli("workers", "list", *flags).stdout

    assert all(address.startswith("[::1]:") for address in metrics_addresses(service))
    for address in metrics_addresses(service):
        assert scraped(address)
    config = yaml.safe_load((tmp_path / "service.yaml").read_text())
    with grpc.insecure_channel(config["health_listen"]) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        serving = health_pb2.HealthCheckResponse.SERVING
        wait_for(lambda: stub.Check(health_pb2.HealthCheckRequest()).status == serving)
    assert "not well" not in service.log.read_text()


def test_the_command_line_says_how_an_ipv6_address_is_written(service: ServiceProcess):
    bare = service.address.replace("[", "").replace("]", "")
    asked = ServiceProcess(home=service.home, address=bare).cli("status", check=False)
    assert asked.returncode == 1
    assert f"Write {service.address}." in asked.stderr
