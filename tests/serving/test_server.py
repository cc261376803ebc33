import asyncio
import socket
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from dataservice.core.errors import SpecError
from dataservice.serving.server import serve_coordinator, serve_worker
from tests.ipv6 import needs_ipv6

COORDINATOR = "dataservice_proto.v1.Coordinator"
WORKER = "dataservice_proto.v1.Worker"


async def test_port_zero_picks_a_free_port_and_reports_it(coordinator):
    host, _, port = coordinator.rpartition(":")
    assert host == "127.0.0.1"
    assert int(port) > 0


async def test_a_server_on_every_interface_reports_a_name_that_others_can_reach(api):
    handle = await serve_coordinator(api, "0.0.0.0:0")
    assert handle.address.startswith(f"{socket.gethostname()}:")
    await handle.stop(0)
    handle = await serve_coordinator(api, "0.0.0.0:0", advertise_host="node7")
    assert handle.address.startswith("node7:")
    await handle.stop(0)


@needs_ipv6
@pytest.mark.parametrize("listen", ["[::]:0", "0.0.0.0:0", "*:0", ":0"])
async def test_a_server_on_every_interface_is_reached_over_both_families(api, channel_to, listen):
    handle = await serve_coordinator(api, listen)
    port = handle.listens.rpartition(":")[2]
    for host in ("127.0.0.1", "[::1]"):
        stub = health_pb2_grpc.HealthStub(channel_to(f"{host}:{port}"))
        answer = await stub.Check(health_pb2.HealthCheckRequest())
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
    await handle.stop(0)


@needs_ipv6
@pytest.mark.parametrize("advertised", ["::1", "[::1]"])
async def test_an_ipv6_host_is_reported_in_brackets(api, channel_to, advertised):
    handle = await serve_coordinator(api, "[::]:0", advertise_host=advertised)
    assert handle.address.startswith("[::1]:")
    stub = health_pb2_grpc.HealthStub(channel_to(handle.address))
    await stub.Check(health_pb2.HealthCheckRequest())
    await handle.stop(0)


@pytest.mark.parametrize("service", ["", COORDINATOR])
async def test_health_says_that_the_coordinator_serves(coordinator, channel_to, service):
    stub = health_pb2_grpc.HealthStub(channel_to(coordinator))
    answer = await stub.Check(health_pb2.HealthCheckRequest(service=service))
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_all_ranks_of_a_large_job_may_call_while_the_service_is_busy(coordinator):
    """gRPC by itself cancels calls where more than a thousand wait to be taken up."""
    calls = 3000
    with grpc.insecure_channel(coordinator) as channel:
        stub = health_pb2_grpc.HealthStub(channel)

        def begun():
            futures = [stub.Check.future(health_pb2.HealthCheckRequest()) for _ in range(calls)]
            time.sleep(1.0)  # until they have arrived
            return futures

        with ThreadPoolExecutor(1) as elsewhere:
            futures = elsewhere.submit(begun).result()  # and this loop, which serves, does nothing
        found = await asyncio.to_thread(lambda: Counter(str(future.code()) for future in futures))
    assert found == {"StatusCode.OK": calls}


async def test_health_watchers_are_told_that_a_server_stops(api, channel_to):
    handle = await serve_coordinator(api, "127.0.0.1:0")
    watch = health_pb2_grpc.HealthStub(channel_to(handle.address)).Watch(
        health_pb2.HealthCheckRequest(service=COORDINATOR)
    )
    assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
    await handle.health.enter_graceful_shutdown()
    assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
    watch.cancel()
    await handle.stop(0)


async def test_reflection_lists_the_services(coordinator, worker, channel_to):
    for address, service in ((coordinator, COORDINATOR), (worker.address, WORKER)):
        stub = reflection_pb2_grpc.ServerReflectionStub(channel_to(address))
        call = stub.ServerReflectionInfo()
        await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        names = [each.name for each in (await call.read()).list_services_response.service]
        await call.done_writing()
        assert {service, "grpc.health.v1.Health"} <= set(names)


async def test_a_port_in_use_is_refused_rather_than_shared(api, coordinator):
    with pytest.raises(SpecError, match=f"cannot listen on {coordinator}"):
        await serve_coordinator(api, coordinator)


OUT_OF_FILES = """
import os
from concurrent import futures
import grpc
from dataservice.core.errors import SpecError
from dataservice.serving.binding import bind

server = grpc.server(futures.ThreadPoolExecutor(1))
for _ in range(100):  # gRPC's threads may close a file between
    try:
        while True:
            os.open(os.devnull, os.O_RDONLY)
    except OSError:
        pass
    try:
        bind(server, "127.0.0.1:0", None)
    except SpecError as error:
        os.write(1, str(error).encode())
        break
os._exit(0)
"""


def test_a_process_that_may_open_no_more_files_does_not_blame_the_port():
    few = ["prlimit", "--nofile=64", sys.executable, "-c", OUT_OF_FILES]
    said = subprocess.run(few, capture_output=True, timeout=60, check=True).stdout
    assert b"Too many open files. Raise the limit of open files (`ulimit -n`" in said


@pytest.mark.parametrize("listen", ["50051", "localhost:", "localhost:http", "localhost:70000"])
async def test_a_listen_address_that_is_none_is_refused(api, listen):
    with pytest.raises(SpecError, match="is not host:port"):
        await serve_coordinator(api, listen)


async def test_messages_above_four_megabytes_are_refused(coordinator, channel_to):
    call = channel_to(coordinator).unary_unary(f"/{COORDINATOR}/GetJob")
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await call(b"\x0a" + b"x" * (5 * 2**20))
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_what_is_behind_a_worker_is_closed_after_its_port(host, make):
    closed = []
    served = await serve_worker(
        host,
        worker=make.worker,
        listen="127.0.0.1:0",
        secret=make.secret,
        on_stopped=lambda: closed.append(True),
    )
    await served.stop()
    assert closed == [True]
