"""What only a cluster asks of the servers: a known range of ports, and health in the clear."""

import socket

import pytest

from dataservice.core.errors import SpecError
from dataservice.operate.config import ServiceConfig
from dataservice.serving.server import serve_worker

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


@pytest.mark.parametrize("ports", ["0-10", "200-100", "65000-70000", "20100"])
def test_a_range_of_ports_that_is_none_is_refused(ports):
    with pytest.raises(ValueError, match="worker_ports"):
        ServiceConfig(worker_ports=ports)
