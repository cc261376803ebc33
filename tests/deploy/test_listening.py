"""What only a cluster asks of the servers: a known range of ports, and health in the clear."""

import socket

import grpc
import grpc.aio
import pytest
import trustme
from grpc_health.v1 import health_pb2, health_pb2_grpc

from dataservice.core.errors import SpecError
from dataservice.serving.server import serve_health, serve_worker
from dataservice.spec import ServiceConfig

HOST = "127.0.0.1"
WORKER = "dataservice_proto.v1.Worker"


async def worker(listen: str, **more):
    return await serve_worker(object(), worker="w", listen=listen, secret=b"s" * 32, **more)


def two_free_ports() -> int:
    """The first of two neighbours that are both free."""
    for first in range(23000, 23900, 7):
        with socket.socket() as one, socket.socket() as two:
            try:
                one.bind((HOST, first))
                two.bind((HOST, first + 1))
            except OSError:
                continue
            return first
    raise AssertionError("no two free ports are neighbours")


async def test_workers_of_one_host_share_out_a_range_of_ports():
    first = two_free_ports()
    listen = f"{HOST}:{first}-{first + 1}"
    workers = [await worker(listen) for _ in range(2)]
    try:
        assert [each.address for each in workers] == [f"{HOST}:{first}", f"{HOST}:{first + 1}"]
        with pytest.raises(SpecError, match=f"cannot listen on {listen}"):
            await worker(listen)
    finally:
        for each in workers:
            await each.stop()


async def test_health_is_told_in_the_clear_beside_a_port_that_speaks_tls():
    issued = trustme.CA().issue_cert("dataservice")
    credentials = grpc.ssl_server_credentials(
        [(issued.private_key_pem.bytes(), issued.cert_chain_pems[0].bytes())]
    )
    served = await worker(f"{HOST}:0", credentials=credentials)
    first = two_free_ports()
    probed = await serve_health(served.handle.health, f"{HOST}:{first}")
    request = health_pb2.HealthCheckRequest(service=WORKER)
    try:
        async with grpc.aio.insecure_channel(served.address) as channel:
            with pytest.raises(grpc.aio.AioRpcError):
                await health_pb2_grpc.HealthStub(channel).Check(request, timeout=5)
        async with grpc.aio.insecure_channel(f"{HOST}:{first}") as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            assert (await stub.Check(request)).status == health_pb2.HealthCheckResponse.SERVING
            await served.stop()
            assert (await stub.Check(request)).status == health_pb2.HealthCheckResponse.NOT_SERVING
            other = channel.unary_unary(f"/{WORKER}/StreamPart")
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await other(b"")
            assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
    finally:
        await probed.stop(None)
        await served.stop()


@pytest.mark.parametrize("ports", ["0-10", "200-100", "65000-70000", "20100"])
def test_a_range_of_ports_that_is_none_is_refused(ports):
    with pytest.raises(ValueError, match="worker_ports"):
        ServiceConfig(worker_ports=ports)
