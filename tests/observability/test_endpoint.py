import socket
import urllib.error
import urllib.request

import pytest

from dataservice.core.errors import SpecError
from dataservice.observability.endpoint import serve_metrics
from dataservice.observability.metrics import PrometheusMetrics
from dataservice.operate.config import read_config
from tests.ipv6 import needs_ipv6


def scrape(address: str) -> str:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=30) as answer:
        return answer.read().decode()


def test_series_are_scraped_until_the_endpoint_stops():
    metrics = PrometheusMetrics()
    endpoint = serve_metrics(metrics.registry, "127.0.0.1:0")
    metrics.step_committed("a")
    assert 'dataservice_committed_steps_total{job="a"} 1.0' in scrape(endpoint.address)
    endpoint.stop()
    assert not endpoint.thread.is_alive()
    with pytest.raises(urllib.error.URLError):
        scrape(endpoint.address)


@needs_ipv6
@pytest.mark.parametrize(
    ("listen", "hosts"),
    [
        ("[::1]:0", ["[::1]"]),
        ("[::]:0", ["[::1]", "127.0.0.1"]),
        ("0.0.0.0:0", ["[::1]", "127.0.0.1"]),
    ],
)
def test_series_are_scraped_over_ipv6(listen, hosts):
    endpoint = serve_metrics(PrometheusMetrics().registry, listen)
    assert endpoint.address.startswith(listen[:-1])
    port = endpoint.address.rpartition(":")[2]
    for host in hosts:
        assert "dataservice_" in scrape(f"{host}:{port}")
    endpoint.stop()


def test_two_services_in_one_process_keep_their_series_apart():
    one, other = PrometheusMetrics(), PrometheusMetrics()
    one.step_committed("a")
    endpoint = serve_metrics(other.registry, "127.0.0.1:0")
    assert 'job="a"' not in scrape(endpoint.address)
    endpoint.stop()


def test_a_port_in_use_is_named_with_the_remedy():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(SpecError, match=f"cannot serve metrics at {listen}: .* choose another"):
            serve_metrics(PrometheusMetrics().registry, listen)


def test_a_host_that_does_not_exist_is_named():
    with pytest.raises(SpecError, match=r"cannot serve metrics at no\.such\.host\.invalid:0"):
        serve_metrics(PrometheusMetrics().registry, "no.such.host.invalid:0")


def test_a_range_gives_the_first_port_that_is_free():
    registry = PrometheusMetrics().registry
    with socket.create_server(("127.0.0.1", 0)) as taken:
        first = taken.getsockname()[1]
        endpoint = serve_metrics(registry, f"127.0.0.1:{first}-{first + 3}")
        assert first < int(endpoint.address.rpartition(":")[2]) <= first + 3
        endpoint.stop()
        refused = f"cannot serve metrics at 127.0.0.1:{first}-{first}: .* each worker takes one"
        with pytest.raises(SpecError, match=refused):
            serve_metrics(registry, f"127.0.0.1:{first}-{first}")


@pytest.mark.parametrize("listen", ["9090", "127.0.0.1:", "127.0.0.1:70000"])
def test_an_address_without_a_port_is_refused_with_the_config(listen):
    with pytest.raises(SpecError, match=r"metrics_listen: .*host:port, such as"):
        read_config(None, {"metrics_listen": listen})


def test_who_connects_and_asks_nothing_is_cut_off(monkeypatch):
    monkeypatch.setattr("dataservice.observability.endpoint.REQUEST_S", 0.2)
    endpoint = serve_metrics(PrometheusMetrics().registry, "127.0.0.1:0")
    host, _, port = endpoint.address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=30) as silent:
        assert silent.recv(1) == b""
    # Who asks on a busy machine may be as slow as that.
    monkeypatch.setattr(endpoint.server.RequestHandlerClass, "timeout", 30)
    assert "dataservice_" in scrape(endpoint.address)
    endpoint.stop()
