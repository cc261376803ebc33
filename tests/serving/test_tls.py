"""TLS of coordinator and workers over real sockets: renewal, mutual TLS, and wrong ends."""

import asyncio
import os
import time
from datetime import datetime
from pathlib import Path

import grpc.aio
import pytest
import trustme
from dataservice_proto.v1 import worker_pb2, worker_pb2_grpc

from dataservice.core.errors import SpecError, TokenError, WorkerLostError
from dataservice.core.orders import PartSpec
from dataservice.core.ports import WorkerInfo
from dataservice.core.tls import ClientTls, TlsSpec
from dataservice.serving.client_access import Access
from dataservice.serving.coordinator_client import CoordinatorClient
from dataservice.serving.server import serve_coordinator, serve_worker
from dataservice.serving.status_codes import ServiceUnreachableError
from dataservice.serving.tls import client_credentials, server_credentials
from dataservice.serving.worker_link import GrpcWorkerLink
from tests.one_order import prepared


class Authority:
    """A CA that writes certificates where a service looks for them."""

    def __init__(self, folder):
        self.folder = folder
        folder.mkdir()
        self.ca = trustme.CA()
        self.ca_file = folder / "ca.pem"
        self.ca.cert_pem.write_to_path(self.ca_file)

    def issue(self, name, host="127.0.0.1", folder=None, **dates):
        """(certificate file, key file) of a host."""
        issued = self.ca.issue_cert(host, **dates)
        certificate, key = (
            (folder or self.folder) / f"{name}{suffix}" for suffix in (".pem", ".key")
        )
        chain = b"".join(pem.bytes() for pem in issued.cert_chain_pems)
        for path, data in ((certificate, chain), (key, issued.private_key_pem.bytes())):
            path.write_bytes(data)
        return {"certificate_file": str(certificate), "key_file": str(key)}


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("tls") / "ours")


@pytest.fixture(scope="module")
def stranger(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("tls") / "theirs")


@pytest.fixture(autouse=True)
def _patient_probe(monkeypatch):
    """The reason of a refusal is asked of a port, which on a busy machine may be slow to say."""
    monkeypatch.setattr("dataservice.serving.tls.PROBE_S", 30.0)


@pytest.fixture
async def serve(api):
    """Serve the coordinator with these certificates; its address."""
    handles = []

    async def serve(spec):
        handles.append(await serve_coordinator(api, "127.0.0.1:0", tls=spec))
        return handles[-1].address

    yield serve
    for handle in handles:
        await handle.stop(0)


async def jobs(address, tls=None, **access):
    """List the jobs with the CLI's client, as a fresh connection."""

    def call():
        with CoordinatorClient(address, timeout_s=30, access=Access(tls=tls, **access)) as client:
            return client.jobs()

    return await asyncio.to_thread(call)


RENEW = "name than the address, or have it renewed if it has expired."


async def refusal(address, tls=None):
    with pytest.raises(ServiceUnreachableError) as refused:
        await jobs(address, tls)
    return str(refused.value)


async def test_a_client_that_trusts_the_authority_is_served(serve, authority, stranger):
    address = await serve(TlsSpec(**authority.issue("plain")))
    assert await jobs(address, ClientTls(ca_file=str(authority.ca_file))) == []
    said = await refusal(address, ClientTls(ca_file=str(stranger.ca_file)))
    assert "CERTIFICATE_VERIFY_FAILED" in said
    assert said.endswith(RENEW)


async def test_a_certificate_of_another_name_is_refused_unless_that_name_is_expected(
    serve, authority
):
    address = await serve(TlsSpec(**authority.issue("named", host="data.test")))
    ours = {"ca_file": str(authority.ca_file)}
    said = await refusal(address, ClientTls(**ours))
    assert "Hostname" in said
    assert said.endswith(RENEW)
    assert await jobs(address, ClientTls(**ours, server_name="data.test")) == []


async def test_ends_that_disagree_on_tls_are_told_which_end_is_which(serve, authority):
    secured = await serve(TlsSpec(**authority.issue("plain")))
    plain = await serve(None)
    assert "The port speaks TLS: give --ca-file" in await refusal(secured)
    said = await refusal(plain, ClientTls(ca_file=str(authority.ca_file)))
    assert "The port speaks no TLS" in said


async def test_mutual_tls_lets_in_only_certificates_of_the_clients_authority(
    serve, authority, stranger
):
    spec = TlsSpec(**authority.issue("mutual"), client_ca_file=str(authority.ca_file))
    address = await serve(spec)
    ours = {"ca_file": str(authority.ca_file)}
    assert await jobs(address, ClientTls(**ours, **authority.issue("client"))) == []
    said = await refusal(address, ClientTls(**ours))
    assert "The service wants a certificate: give --cert-file and --key-file" in said
    said = await refusal(address, ClientTls(**ours, **stranger.issue("client")))
    assert "does not accept the certificate" in said


async def test_a_renewed_certificate_is_taken_up_and_a_broken_one_is_not(
    serve, authority, stranger, tmp_path, caplog
):
    spec = TlsSpec(**authority.issue("server", folder=tmp_path))
    address = await serve(spec)
    old, new = (ClientTls(ca_file=str(each.ca_file)) for each in (authority, stranger))
    assert await jobs(address, old) == []
    # Half a renewal: the certificate is there, its key is not yet.
    renewed = stranger.issue("renewed")
    os.replace(renewed["certificate_file"], spec.certificate_file)
    assert await jobs(address, old) == []
    assert "the certificate in use stays" in caplog.text
    os.replace(renewed["key_file"], spec.key_file)
    assert await jobs(address, new) == []
    await refusal(address, old)
    os.unlink(spec.key_file)
    assert await jobs(address, new) == []


async def test_a_renewed_certificate_is_taken_up_once_it_can_be_read_though_it_looks_as_before(
    serve, authority, stranger, tmp_path, caplog
):
    spec = TlsSpec(**authority.issue("server", folder=tmp_path))
    address = await serve(spec)
    old, new = (ClientTls(ca_file=str(each.ca_file)) for each in (authority, stranger))
    stranger.issue("server", folder=tmp_path)
    whole = overwritten(spec.key_file, b"none")
    assert await jobs(address, old) == await jobs(address, old) == []
    assert caplog.text.count("the certificate in use stays") == 1
    overwritten(spec.key_file, whole)
    assert await jobs(address, new) == []


def overwritten(file: str, content: bytes) -> bytes:
    """Put this content at the beginning of a file that looks as before; what it had."""
    place = Path(file)
    seen, before = place.stat(), place.read_bytes()
    place.write_bytes(content + before[len(content) :])
    os.utime(place, ns=(seen.st_atime_ns, seen.st_mtime_ns))
    return before


@pytest.mark.parametrize("begins", [2000, 2100])
async def test_a_certificate_that_is_not_valid_now_is_told_with_its_dates_and_may_be_renewed(
    serve, authority, tmp_path, caplog, begins
):
    dates = {"not_before": datetime(begins, 1, 2), "not_after": datetime(begins + 1, 3, 4)}
    address = await serve(TlsSpec(**authority.issue("server", folder=tmp_path, **dates)))
    assert f"valid from {begins}-01-02 00:00:00+00:00 to {begins + 1}-03-04" in caplog.text
    caplog.clear()
    authority.issue("server", folder=tmp_path)
    assert await jobs(address, ClientTls(ca_file=str(authority.ca_file))) == []
    assert "no client will connect" not in caplog.text


def test_files_that_are_no_certificate_are_named_before_anything_is_served(authority, tmp_path):
    whole = authority.issue("whole")
    other = authority.issue("other")
    (tmp_path / "text.pem").write_text("no certificate")
    for files, told in [
        ({**whole, "key_file": str(tmp_path / "absent")}, "absent cannot be read"),
        ({**whole, "key_file": other["key_file"]}, "are no certificate with its key"),
        ({**whole, "certificate_file": str(tmp_path / "text.pem")}, "are no certificate"),
        ({**whole, "client_ca_file": str(tmp_path / "absent")}, "absent cannot be read"),
    ]:
        with pytest.raises(SpecError, match=told):
            server_credentials(TlsSpec(**files))
    with pytest.raises(SpecError, match="Give both for mutual TLS"):
        client_credentials(ClientTls(certificate_file="a.pem"))


# ---- workers ------------------------------------------------------------------------------


@pytest.fixture
async def serve_secured(host, make):
    """Serve a worker behind these certificates."""
    workers = []

    async def serve(spec):
        worker = await serve_worker(
            host,
            worker=make.worker,
            listen="127.0.0.1:0",
            secret=make.secret,
            tls=spec,
            grace_s=0.0,
        )
        workers.append(worker)
        return WorkerInfo(worker=make.worker, address=worker.address, slots=2)

    yield serve
    for worker in workers:
        await worker.stop()


async def test_the_coordinator_commands_workers_by_mutual_tls(serve_secured, authority, make):
    spec = TlsSpec(
        **authority.issue("worker", host="worker.test"),
        ca_file=str(authority.ca_file),
        client_ca_file=str(authority.ca_file),
        server_name="worker.test",
    )
    worker = await serve_secured(spec)
    link = GrpcWorkerLink(make.secret, tls=spec.client)
    assert (await prepared(link, worker, make.order())).key == make.order().key
    await link.close()
    for tls in (None, ClientTls(ca_file=str(authority.ca_file), server_name="worker.test")):
        stranger = GrpcWorkerLink(make.secret, tls=tls)
        with pytest.raises(WorkerLostError):
            await prepared(stranger, worker, make.order())
        await stranger.close()


async def test_a_worker_is_commanded_while_a_file_of_the_coordinator_is_away(
    serve_secured, authority, make, tmp_path
):
    spec = TlsSpec(**authority.issue("away"))
    ca_file = tmp_path / "ca.pem"
    ca_file.write_bytes(authority.ca_file.read_bytes())
    link = GrpcWorkerLink(make.secret, tls=ClientTls(ca_file=str(ca_file)))
    await prepared(link, await serve_secured(spec), make.order())
    ca_file.unlink()
    replaced = await serve_secured(spec)
    assert (await prepared(link, replaced, make.order())).key == make.order().key
    await link.close()


async def test_a_ticket_that_was_changed_to_another_team_s_pack_fetches_nothing(
    worker, host, make, channel_to
):
    await host.prepare(make.order())
    stub = worker_pb2_grpc.WorkerStub(channel_to(worker.address))
    shown = make.fetch(make.ticket(PartSpec(key=make.order().key, cp_rank=0)))
    granted = shown.ticket

    async def fetch(ticket):
        call = stub.Fetch(worker_pb2.FetchRequest(ticket=ticket, proof=shown.proof))
        return await call.read()

    def changed(change):
        ticket = worker_pb2.Ticket.FromString(granted.SerializeToString())
        change(ticket)
        return ticket

    assert (await fetch(granted)).header.size_bytes > 0
    for change in (
        lambda t: setattr(t, "job", "audio/b"),
        lambda t: setattr(t, "sequence_pack", b"\x01"),
        lambda t: setattr(t, "sequence_member", b"\x01"),
        lambda t: t.workers.append("worker-9"),
        lambda t: setattr(t, "rank", 1),
        lambda t: setattr(t, "holder", "0" * 32),
        lambda t: setattr(t, "expires_unix_s", int(time.time()) + 10**6),
        lambda t: setattr(t, "signature", bytes(32)),
        lambda t: setattr(t, "sequences", 2),
    ):
        with pytest.raises(grpc.aio.AioRpcError, match="signature") as refused:
            await fetch(changed(change))
        assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED


# ---- tokens without TLS -------------------------------------------------------------------


async def test_the_command_line_sends_no_token_in_the_clear_to_another_machine(coordinator):
    access = {"token": lambda: "s3cret"}
    assert await jobs(coordinator, **access) == []
    with pytest.raises(TokenError, match=r"in the clear.*--plaintext-token"):
        await jobs("10.0.0.7:50051", **access)
    allowed = Access(**access, plaintext_token=True)
    assert allowed.authorization("10.0.0.7:50051") == (("authorization", "Bearer s3cret"),)
