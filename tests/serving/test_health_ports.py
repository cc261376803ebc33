"""Health where it is told, and the request by which the service sees that its own port works."""

import asyncio

import grpc
import pytest
import trustme
from grpc_health.v1 import health_pb2, health_pb2_grpc

from dataservice.core.tls import TlsSpec
from dataservice.serving.health_ports import LIVENESS, READY, HealthPort, OwnRequest
from dataservice.serving.server import serve_coordinator
from dataservice.serving.status_codes import ServiceUnreachableError
from tests.health import NOT_SERVING, SERVING, told
from tests.ipv6 import needs_ipv6


@pytest.fixture
def port():
    port = HealthPort("127.0.0.1:0")
    yield port
    port.stop()


def written(tmp_path, *names, ca=None):
    """A certificate for these names and its key, as files."""
    issued = (ca or trustme.CA()).issue_cert(*names)
    certificate, key = tmp_path / "tls.crt", tmp_path / "tls.key"
    certificate.write_bytes(b"".join(part.bytes() for part in issued.cert_chain_pems))
    key.write_bytes(issued.private_key_pem.bytes())
    return TlsSpec(certificate_file=str(certificate), key_file=str(key))


def test_a_health_port_tells_ready_and_alive_apart(port):
    assert [told(port.address, name) for name in ("", READY, LIVENESS)] == [SERVING] * 3
    port.tell(False, True)
    assert told(port.address, READY) == NOT_SERVING
    assert told(port.address, LIVENESS) == SERVING
    port.tell(False, False)
    assert told(port.address, LIVENESS) == NOT_SERVING


def test_a_health_port_answers_nothing_else(port):
    with (
        grpc.insecure_channel(port.address) as channel,
        pytest.raises(grpc.RpcError) as refused,
    ):
        channel.unary_unary(f"/{READY}/GetJob")(b"", timeout=30)
    assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_a_health_port_answers_while_the_event_loop_is_blocked(port):
    assert told(port.address, READY) == SERVING  # asked by the loop's own thread, which waits


async def test_the_main_port_says_what_it_is_told(api, channel_to):
    handle = await serve_coordinator(api, "127.0.0.1:0")
    stub = health_pb2_grpc.HealthStub(channel_to(handle.address))
    request = health_pb2.HealthCheckRequest(service=READY)
    await handle.tell_health(ready=False)
    assert (await stub.Check(request)).status == NOT_SERVING
    await handle.tell_health(ready=True)
    assert (await stub.Check(request)).status == SERVING
    await handle.stop(0)


@pytest.mark.parametrize("names", [("dataservice",), ("*.example.com", "a.b"), ("10.1.2.3",)])
async def test_a_request_to_our_own_port_needs_no_trust_but_in_our_certificate(
    api, tmp_path, names
):
    tls = written(tmp_path, *names)
    handle = await serve_coordinator(api, "0.0.0.0:0", tls=tls)
    await asyncio.to_thread(OwnRequest(handle.listens, tls=tls, limit_s=30))
    await handle.stop(0)


@needs_ipv6
@pytest.mark.parametrize("listen", ["[::1]:0", "[::]:0"])
async def test_a_request_to_our_own_port_works_over_ipv6_with_its_certificate(
    api, tmp_path, listen
):
    tls = written(tmp_path, "2001:db8::7")
    handle = await serve_coordinator(api, listen, tls=tls)
    assert handle.listens.startswith(listen[:-1])
    await asyncio.to_thread(OwnRequest(handle.listens, tls=tls, limit_s=30))
    await handle.stop(0)


@needs_ipv6
def test_a_health_port_is_reached_over_ipv6():
    port = HealthPort("[::1]:0")
    assert told(port.address, READY) == SERVING
    port.stop()


async def test_a_request_to_our_own_port_shows_a_certificate_where_one_is_wanted(api, tmp_path):
    ca = trustme.CA()
    plain = written(tmp_path, "dataservice", ca=ca)
    (tmp_path / "ca.crt").write_bytes(ca.cert_pem.bytes())
    tls = TlsSpec(
        certificate_file=plain.certificate_file,
        key_file=plain.key_file,
        client_ca_file=str(tmp_path / "ca.crt"),
    )
    handle = await serve_coordinator(api, "127.0.0.1:0", tls=tls)
    await asyncio.to_thread(OwnRequest(handle.listens, tls=tls, limit_s=30))
    await handle.stop(0)


async def test_a_port_that_does_not_answer_fails_the_request_in_its_time(api):
    """Without that time the request would wait for the loop, which waits for the request."""
    handle = await serve_coordinator(api, "127.0.0.1:0")
    request = OwnRequest(handle.listens, tls=None, limit_s=0.5)
    with pytest.raises(ServiceUnreachableError, match="DEADLINE_EXCEEDED"):
        request()  # in the loop's thread: the loop is blocked
    await handle.stop(0)
    with pytest.raises(ServiceUnreachableError, match=r"UNAVAILABLE|DEADLINE"):
        await asyncio.to_thread(request)
