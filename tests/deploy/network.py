"""Who may reach whom, as the NetworkPolicies of an overlay say."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from ipaddress import ip_address, ip_network
from urllib.parse import urlsplit

from tests.deploy.cluster import Cluster, Pod, selects
from tests.deploy.kustomize import Object


@dataclass(frozen=True, kw_only=True)
class Peer:
    """A pod and the labels of its namespace; or what lies outside of any, at an address."""

    name: str
    namespace: str
    namespace_labels: dict[str, str]
    labels: dict[str, str]
    address: str = ""


# Who answers names in a cluster, by what runs there, and at which ports of a pod or node.
NAME_SERVERS = {
    53: (
        Peer(
            name="CoreDNS",
            namespace="kube-system",
            namespace_labels={"kubernetes.io/metadata.name": "kube-system"},
            labels={"k8s-app": "kube-dns"},
        ),
        Peer(
            name="NodeLocal DNSCache",
            namespace="",
            namespace_labels={},
            labels={},
            address="169.254.20.10",
        ),
    ),
    5353: (
        Peer(
            name="OpenShift's DNS",
            namespace="openshift-dns",
            namespace_labels={"kubernetes.io/metadata.name": "openshift-dns"},
            labels={"dns.operator.openshift.io/daemonset-dns": "default"},
        ),
    ),
}


def peer(cluster: Cluster, pod: Pod) -> Peer:
    """A pod of the overlay."""
    labels = cluster.find("Namespace", pod.namespace)["metadata"]["labels"]
    name = {"kubernetes.io/metadata.name": pod.namespace}
    return Peer(
        name=pod.owner,
        namespace=pod.namespace,
        namespace_labels=labels | name,
        labels=pod.labels,
    )


def stranger(namespace: str, **labels: str) -> Peer:
    """A pod of another namespace, with these labels on the namespace."""
    named = {key.replace("__", "/").replace("_io", ".io"): value for key, value in labels.items()}
    name = {"kubernetes.io/metadata.name": namespace}
    return Peer(name=namespace, namespace=namespace, namespace_labels=named | name, labels={})


def reaches(cluster: Cluster, source: Peer, target: Peer, port: int, protocol: str = "TCP") -> bool:
    """Whether both ends let a connection pass."""
    policies = cluster.of("NetworkPolicy")
    return _lets(policies, "Ingress", target, source, (protocol, port)) and _lets(
        policies, "Egress", source, target, (protocol, port)
    )


def _lets(policies: list[Object], way: str, own: Peer, other: Peer, port: tuple[str, int]) -> bool:
    mine = [
        policy["spec"]
        for policy in policies
        if policy["metadata"]["namespace"] == own.namespace
        and way in policy["spec"]["policyTypes"]
        and selects(policy["spec"]["podSelector"], own.labels)
    ]
    if not mine:
        return True
    end = "from" if way == "Ingress" else "to"
    return any(
        _is_one_of(rule.get(end), own, other) and _has_port(rule.get("ports"), port)
        for spec in mine
        for rule in spec.get(way.lower(), ())
    )


def _is_one_of(peers: list[Object] | None, own: Peer, other: Peer) -> bool:
    if peers is None:
        return True
    for each in peers:
        if block := each.get("ipBlock"):  # selects no pod's address, only those outside
            if other.address and ip_address(other.address) in ip_network(block["cidr"]):
                return True
            continue
        space = each.get("namespaceSelector")
        here = (
            other.namespace == own.namespace
            if space is None
            else selects(space, other.namespace_labels)
        )
        if here and selects(each.get("podSelector", {}), other.labels):
            return True
    return False


def _has_port(ports: list[Object] | None, port: tuple[str, int]) -> bool:
    if ports is None:
        return True
    protocol, number = port
    return any(
        each["protocol"] == protocol and each["port"] <= number <= each.get("endPort", each["port"])
        for each in ports
    )


def mistakes(cluster: Cluster) -> Iterator[str]:
    """Connections that the service needs and are shut, or that are open and should not be."""
    config = cluster.config
    pods = {name: peer(cluster, pod) for name, pod in cluster.pods.items()}
    coordinator, head, worker = pods["coordinator"], pods["ray-head"], pods["worker"]
    trainer = Peer(
        name="trainer",
        namespace="training",
        namespace_labels={"dataservice.io/trainers": "true"},
        labels={},
    )
    passer_by = stranger("elsewhere")
    prometheus = stranger("monitoring")
    grpc, health, metrics = (
        int((listen or ":0").rpartition(":")[2])
        for listen in (config.listen, config.health_listen, config.metrics_listen)
    )
    serving = port_range(config.worker_ports or "0-0")
    counted = port_range(config.worker_metrics_ports or "0-0")
    ray = [6379, *ray_ports(cluster)]
    scraped, workers_scraped = (bool(cluster.of(kind)) for kind in ("ServiceMonitor", "PodMonitor"))

    def check(source: Peer, target: Peer, ports: Iterable[int], wanted: bool) -> Iterator[str]:
        for port in ports:
            if reaches(cluster, source, target, port) != wanted:
                said = "cannot reach" if wanted else "can reach"
                yield f"network: {source.name} {said} {target.name} at {port}"

    for source in pods.values():
        for port, servers in NAME_SERVERS.items():
            for server in servers:
                for protocol in ("UDP", "TCP"):
                    if not reaches(cluster, source, server, port, protocol):
                        yield f"network: {source.name} cannot ask {server.name} by {protocol}"
        elsewhere = replace(NAME_SERVERS[53][1], name="another address", address="169.254.169.254")
        yield from check(source, elsewhere, [53], False)

    yield from check(trainer, coordinator, [grpc], True)
    yield from check(trainer, worker, serving, True)
    yield from check(coordinator, worker, serving, True)
    yield from check(trainer, coordinator, [health, metrics, *ray], False)
    yield from check(trainer, worker, [*ray, *counted], False)
    yield from check(trainer, head, [*ray, *serving, 8265, 10001], False)
    for target in (coordinator, head, worker):
        closed = [grpc, health, metrics, *serving, *counted, *ray]
        yield from check(passer_by, target, closed, False)
        yield from check(prometheus, target, [grpc, *serving, *ray], False)
        for source in (coordinator, head, worker):
            yield from check(source, target, ray, True)
    yield from check(prometheus, coordinator, [metrics], scraped)
    yield from check(prometheus, worker, counted, workers_scraped)
    if options := cluster.rayclusters[0]["spec"].get("gcsFaultToleranceOptions"):
        host, _, port = options["redisAddress"].rpartition(":")
        redis = stranger(host.split(".")[1])
        yield from check(head, redis, [int(port)], True)
        yield from check(worker, redis, [int(port)], False)
    if config.traces:
        told = urlsplit(config.traces)
        assert told.hostname is not None
        assert told.port is not None
        collector = stranger(told.hostname.split(".")[1])
        yield from check(coordinator, collector, [told.port], True)
        yield from check(worker, collector, [told.port], True)
        yield from check(head, collector, [told.port], False)


def port_range(text: str) -> range:
    """`20100-20115` as the ports that it names."""
    first, _, last = text.partition("-")
    return range(int(first), int(last) + 1)


def ray_ports(cluster: Cluster) -> list[int]:
    """Ports of every Ray node but the head's own, as the RayCluster sets them: those that other
    nodes call, and both ends of the range of Ray's worker processes."""
    params = cluster.rayclusters[0]["spec"]["headGroupSpec"]["rayStartParams"]
    names = ("node-manager-port", "object-manager-port", "min-worker-port", "max-worker-port")
    return [int(params[name]) for name in names]
