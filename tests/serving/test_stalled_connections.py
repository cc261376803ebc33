"""Peers that come to a TLS port and never finish to connect, over real sockets."""

import socket
from contextlib import ExitStack

import grpc.aio
import pytest
import trustme
from grpc_health.v1 import health_pb2, health_pb2_grpc

from dataservice.core.tls import ClientTls, TlsSpec
from dataservice.serving.channels import Admission
from dataservice.serving.server import serve_coordinator, serve_worker
from dataservice.serving.tls import client_credentials
from tests.waiting import until

STALLED = 300
# A ClientHello of 512 bytes, of which the first few come.
HALF_A_HELLO = bytes.fromhex("16030102000100 01fc0303")


@pytest.fixture(scope="module")
def tls(tmp_path_factory):
    folder, ca = tmp_path_factory.mktemp("tls"), trustme.CA()
    issued = ca.issue_cert("127.0.0.1")
    issued.private_key_pem.write_to_path(folder / "tls.key")
    for pem in issued.cert_chain_pems:
        pem.write_to_path(folder / "tls.crt", append=True)
    ca.cert_pem.write_to_path(folder / "ca.crt")
    return TlsSpec(
        certificate_file=str(folder / "tls.crt"),
        key_file=str(folder / "tls.key"),
        ca_file=str(folder / "ca.crt"),
    )


@pytest.fixture(params=["coordinator", "worker"])
async def serve(request, api, host, make, tls):
    """Serve one of the two TLS ports; its address."""
    ends = []

    async def serve(admission):
        shared = {"tls": tls, "admission": admission}
        if request.param == "coordinator":
            served = await serve_coordinator(api, "127.0.0.1:0", **shared)
            ends.append(lambda: served.stop(0))
        else:
            served = await serve_worker(
                host,
                worker=make.worker,
                listen="127.0.0.1:0",
                secret=make.secret,
                grace_s=0.0,
                **shared,
            )
            ends.append(served.stop)
        return served.address

    yield serve
    for end in ends:
        await end()


@pytest.fixture
def stall():
    """Open connections that say `said` and no more."""
    with ExitStack() as opened:

        def stall(address, count, said=b""):
            host, _, port = address.rpartition(":")
            stalled = []
            for _ in range(count):
                each = opened.enter_context(socket.create_connection((host, int(port))))
                each.sendall(said)
                each.setblocking(False)
                stalled.append(each)
            return stalled

        yield stall


def still_open(stalled):
    def is_open(each):
        try:
            while each.recv(4096):
                pass
        except BlockingIOError:
            return True
        except ConnectionError:
            return False
        return False

    return [each for each in stalled if is_open(each)]


async def answers(address, tls):
    """Whether a client that connects now is answered."""
    credentials = client_credentials(ClientTls(ca_file=tls.ca_file))
    async with grpc.aio.secure_channel(address, credentials) as channel:
        request = health_pb2.HealthCheckRequest()
        answer = await health_pb2_grpc.HealthStub(channel).Check(
            request, timeout=30, wait_for_ready=True
        )
    return answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_300_that_stall_are_cut_off_and_who_connects_meanwhile_is_served(serve, stall, tls):
    """Half of them say nothing, and half say half a ClientHello."""
    # A busy machine may take seconds to open so many.
    address = await serve(Admission(handshake_s=5.0))
    stalled = [each for said in (b"", HALF_A_HELLO) for each in stall(address, STALLED // 2, said)]
    assert len(still_open(stalled)) == STALLED
    assert await answers(address, tls)
    await until(lambda: not still_open(stalled), limit_s=60)


async def test_no_more_connect_at_once_than_a_port_bears_and_a_rank_gets_in_behind_them(
    serve, stall, tls
):
    address = await serve(Admission(handshake_s=120.0, connections=100))
    stalled = stall(address, STALLED)
    await until(lambda: len(still_open(stalled)) <= 100)
    address = await serve(Admission(handshake_s=2.0, connections=100))
    stall(address, STALLED)
    assert await answers(address, tls)  # it tries again until those are cut off


def test_by_default_stalled_peers_leave_a_process_some_of_its_files(monkeypatch):
    def bears(files):
        monkeypatch.setattr("resource.getrlimit", lambda _: (files, files))
        return dict(Admission().options())

    assert bears(1024)["grpc.max_allowed_incoming_connections"] == 768
    assert bears(2**20)["grpc.max_allowed_incoming_connections"] == 131_072
    assert bears(-1)["grpc.max_allowed_incoming_connections"] == 131_072
    assert bears(1024)["grpc.server_handshake_timeout_ms"] == 20_000
