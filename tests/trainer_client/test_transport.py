"""TLS and tokens, over real connections."""

import grpc
import pytest
import trustme

from trainer_client import BadArgument, ServiceUnreachable, Tls


@pytest.fixture(scope="module")
def authority():
    return trustme.CA()


@pytest.fixture
def ca_file(authority, tmp_path):
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    return tmp_path / "ca.pem"


@pytest.fixture
def tls_service(authority, service):
    issued = authority.issue_cert("data.test")
    chain = b"".join(pem.bytes() for pem in issued.cert_chain_pems)
    credentials = grpc.ssl_server_credentials([(issued.private_key_pem.bytes(), chain)])
    for name in list(service.addresses):
        service.kill(name)
        service.start(name, credentials)
    return service


def test_coordinator_and_workers_are_reached_over_tls(tls_service, ca_file):
    dataset = tls_service.dataset(tls=Tls(ca_file=ca_file, server_name="data.test"))
    assert [shard.step for shard in dataset] == [0, 1, 2, 3]


def test_a_certificate_for_another_name_is_refused(tls_service, ca_file):
    dataset = tls_service.dataset(tls=Tls(ca_file=ca_file), connect_timeout_s=0.5)
    with pytest.raises(ServiceUnreachable, match="TLS"):
        next(iter(dataset))


def test_plaintext_to_a_tls_port_says_to_check_tls(tls_service):
    with pytest.raises(ServiceUnreachable, match="both sides agree on TLS"):
        next(iter(tls_service.dataset(connect_timeout_s=0.5)))


def test_a_token_travels_with_calls_to_the_coordinator(service):
    shards = iter(service.dataset(token="s3cret"))
    next(shards)
    assert service.coordinator.metadata[0]["authorization"] == "Bearer s3cret"
    shards.close()


def test_tls_files_that_are_missing_are_named(service, tmp_path):
    with pytest.raises(BadArgument, match=r"absent.pem: No such file"):
        next(iter(service.dataset(tls=Tls(ca_file=tmp_path / "absent.pem"))))
    with pytest.raises(BadArgument, match="give both"):
        Tls(certificate_file="a.pem")
