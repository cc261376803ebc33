"""TLS and tokens, over real connections."""

import grpc
import pytest
import trustme

from trainer_client import BadArgument, ServiceUnreachable, Tls
from trainer_client.transport import GrpcTransport


@pytest.fixture(scope="module")
def authority():
    return trustme.CA()


@pytest.fixture
def ca_file(authority, tmp_path):
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    return tmp_path / "ca.pem"


@pytest.fixture
def serve_tls(authority, service):
    """Start the scripted service again behind TLS, asking clients for certificates or not."""

    def serve(*, mutual=False, signed_by=authority):
        issued = signed_by.issue_cert("data.test")
        chain = b"".join(pem.bytes() for pem in issued.cert_chain_pems)
        credentials = grpc.ssl_server_credentials(
            [(issued.private_key_pem.bytes(), chain)],
            root_certificates=authority.cert_pem.bytes() if mutual else None,
            require_client_auth=mutual,
        )
        for name in list(service.addresses):
            service.kill(name)
        service.coordinator.claims.clear()
        for name in list(service.addresses):
            service.start(name, credentials)
        return service

    return serve


@pytest.fixture(autouse=True)
def no_token_in_the_environment(monkeypatch):
    for name in ("DATASERVICE_TOKEN", "DATASERVICE_TOKEN_FILE", "DATASERVICE_PLAINTEXT_TOKEN"):
        monkeypatch.delenv(name, raising=False)


def refusal(dataset):
    with pytest.raises(ServiceUnreachable) as refused:
        next(iter(dataset))
    return str(refused.value)


def test_coordinator_and_workers_are_reached_over_tls(serve_tls, ca_file):
    dataset = serve_tls().dataset(tls=Tls(ca_file=ca_file, server_name="data.test"))
    assert [shard.step for shard in dataset] == [0, 1, 2, 3]


def test_mutual_tls_shows_the_client_s_certificate_and_asks_for_one_without(
    serve_tls, authority, ca_file, tmp_path
):
    mine = authority.issue_cert("trainer.test")
    mine.private_key_pem.write_to_path(tmp_path / "key.pem")
    for pem in mine.cert_chain_pems:
        pem.write_to_path(tmp_path / "cert.pem", append=True)
    service = serve_tls(mutual=True)
    files = {"certificate_file": tmp_path / "cert.pem", "key_file": tmp_path / "key.pem"}
    shown = Tls(ca_file=ca_file, server_name="data.test", **files)
    assert [shard.step for shard in service.dataset(tls=shown)] == [0, 1, 2, 3]
    without = Tls(ca_file=ca_file, server_name="data.test")
    said = refusal(service.dataset(tls=without, connect_timeout_s=0.5))
    assert "wants a client's certificate: pass tls=Tls(" in said


def test_a_tls_file_that_is_away_for_a_moment_ends_no_training(serve_tls, ca_file):
    service = serve_tls()
    tls = Tls(ca_file=ca_file, server_name="data.test")
    trained = []
    for shard in service.dataset(tls=tls, prefetch_steps=1):
        trained.append(shard.step)
        if shard.step == 0:
            ca_file.unlink()
            service.kill("w0")  # the one in its place is connected anew
    assert trained == [0, 1, 2, 3]


def test_a_service_that_comes_back_under_another_authority_is_rejoined(serve_tls, ca_file):
    service = serve_tls()
    tls = Tls(ca_file=ca_file, server_name="data.test")
    trained = []
    for shard in service.dataset(tls=tls, prefetch_steps=1, timeout_s=20.0):
        trained.append(shard.step)
        if shard.step == 0:
            fresh = trustme.CA()
            fresh.cert_pem.write_to_path(ca_file)
            serve_tls(signed_by=fresh)
    assert trained == [0, 1, 2, 3]
    assert service.coordinator.opens[-1].rejoin_attempt == 1


def test_a_certificate_for_another_name_is_refused(serve_tls, ca_file):
    said = refusal(serve_tls().dataset(tls=Tls(ca_file=ca_file), connect_timeout_s=0.5))
    assert "does not accept the service's certificate" in said
    assert "server_name" in said


def test_plaintext_to_a_tls_port_says_that_it_speaks_tls(serve_tls):
    assert "The port speaks TLS: pass tls=" in refusal(serve_tls().dataset(connect_timeout_s=0.5))


def test_tls_to_a_plaintext_port_says_that_it_speaks_none(service, ca_file):
    said = refusal(service.dataset(tls=Tls(ca_file=ca_file), connect_timeout_s=0.5))
    assert "The port speaks no TLS: leave tls out" in said


def test_a_port_where_nobody_answers_says_what_to_check(service):
    service.kill("coordinator")
    assert "Check that `dataservice serve` runs" in refusal(service.dataset(connect_timeout_s=0.3))


def sent(service):
    """The authorization of each session that was opened."""
    return [metadata.get("authorization") for metadata in service.coordinator.metadata]


def test_a_token_travels_with_calls_to_the_coordinator(service):
    shards = iter(service.dataset(token="s3cret"))
    next(shards)
    assert sent(service) == ["Bearer s3cret"]
    shards.close()


def test_a_token_comes_from_the_environment_where_none_is_given(service, monkeypatch, tmp_path):
    def opens():
        shards = iter(service.dataset())
        next(shards)
        shards.close()

    opens()
    monkeypatch.setenv("DATASERVICE_TOKEN", "of-the-environment\n")
    opens()
    (tmp_path / "token").write_text("of-a-file\n")
    monkeypatch.setenv("DATASERVICE_TOKEN_FILE", str(tmp_path / "token"))
    opens()
    assert sent(service) == [None, "Bearer of-the-environment", "Bearer of-a-file"]


def test_a_token_that_is_replaced_in_its_file_is_used_at_the_next_call(service, tmp_path):
    path = tmp_path / "token"
    path.write_text("old")
    dataset = service.dataset(token_file=path)
    for token in ("old", "new", None):
        path.unlink() if token is None else path.write_text(token)
        shards = iter(dataset)
        next(shards)
        shards.close()
    assert sent(service) == ["Bearer old", "Bearer new", "Bearer new"]


def test_a_token_is_used_while_its_file_holds_none(service, tmp_path):
    path = tmp_path / "token"
    path.write_text("old")
    dataset = service.dataset(token_file=path)
    for content in (b"new\nold\n", b"", b"\xff", b"two words"):
        path.write_bytes(content)
        shards = iter(dataset)
        next(shards)
        shards.close()
    assert sent(service) == ["Bearer old"] * 4


def test_a_token_may_be_given_with_the_end_of_its_line(service):
    shards = iter(service.dataset(token="s3cret\n"))
    next(shards)
    assert sent(service) == ["Bearer s3cret"]
    shards.close()


@pytest.mark.parametrize("given", ["two words", "first\nsecond", "“quoted”"])
def test_what_is_no_token_is_refused_before_anything_is_opened(service, given):
    with pytest.raises(BadArgument, match="no token: give one line of ASCII"):
        service.dataset(token=given)


@pytest.mark.parametrize("content", ["", "two words", "first\nsecond"])
def test_a_file_that_holds_no_token_is_refused_before_anything_is_opened(
    service, tmp_path, content
):
    (tmp_path / "token").write_text(content)
    with pytest.raises(BadArgument, match="must hold one token and nothing else"):
        service.dataset(token_file=tmp_path / "token")


def test_a_token_is_not_sent_in_the_clear_to_another_machine(monkeypatch, ca_file):
    for address in ("data.test:50051", "10.0.0.7:50051", "[2001:db8::1]:50051"):
        with pytest.raises(BadArgument, match=r"in the clear.*DATASERVICE_PLAINTEXT_TOKEN=1"):
            GrpcTransport(token="s3cret").channel(address, authorised=True)
    allowed = [
        GrpcTransport(token="s3cret", plaintext_token=True).channel("10.0.0.7:1", authorised=True),
        GrpcTransport(token="s3cret", tls=Tls(ca_file=ca_file)).channel(
            "10.0.0.7:1", authorised=True
        ),
        GrpcTransport(token="s3cret").channel("10.0.0.7:1", authorised=False),
        GrpcTransport(token="s3cret").channel("localhost:1", authorised=True),
        GrpcTransport(token="s3cret").channel("[::1]:1", authorised=True),
    ]
    monkeypatch.setenv("DATASERVICE_PLAINTEXT_TOKEN", "1")
    allowed.append(GrpcTransport(token="s3cret").channel("10.0.0.7:1", authorised=True))
    for channel in allowed:
        channel.close()


def test_files_that_are_missing_are_named(service, tmp_path):
    with pytest.raises(BadArgument, match=r"absent.pem: No such file"):
        next(iter(service.dataset(tls=Tls(ca_file=tmp_path / "absent.pem"))))
    with pytest.raises(BadArgument, match="give both"):
        Tls(certificate_file="a.pem")
    with pytest.raises(BadArgument, match=r"token file .*absent: No such file"):
        service.dataset(token_file=tmp_path / "absent")
    with pytest.raises(BadArgument, match="give one of them"):
        service.dataset(token="a", token_file="b")


def test_the_thread_that_reads_a_worker_takes_its_messages_itself():
    """No thread of gRPC's hands them over; a coordinator's streams have callbacks, and keep it."""
    transport = GrpcTransport()
    kinds = {}
    for authorised in (False, True):
        with transport.channel("127.0.0.1:1", authorised=authorised) as channel:
            kinds[authorised] = type(channel.unary_stream("/bench/Bytes")).__name__
    assert kinds == {
        False: "_SingleThreadedUnaryStreamMultiCallable",
        True: "_UnaryStreamMultiCallable",
    }
