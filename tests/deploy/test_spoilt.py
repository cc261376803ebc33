"""The checks themselves: each way to spoil an overlay is noticed, and named."""

from collections.abc import Callable

import pytest

from tests.deploy import agreement, monitoring, network, references, schemas
from tests.deploy.cluster import Cluster, mounted_at
from tests.deploy.kustomize import Object

Spoil = Callable[[Cluster], None]


def said(cluster: Cluster, before: list[Object]) -> list[str]:
    changed = [each for each, old in zip(cluster.objects, before, strict=True) if each != old]
    return [
        *(m for each in changed for m in schemas.mistakes_of(each)),
        *references.mistakes(cluster, references.promised_secrets()),
        *agreement.mistakes(cluster),
        *network.mistakes(cluster),
        *monitoring.mistakes(cluster),
    ]


def coordinator(cluster: Cluster):
    return cluster.find("StatefulSet", "dataservice-coordinator")["spec"]["template"]["spec"]


def worker(cluster: Cluster):
    return cluster.rayclusters[0]["spec"]["workerGroupSpecs"][0]


def policy(cluster: Cluster, name: str):
    return cluster.find("NetworkPolicy", name)["spec"]


def config(old: str, new: str) -> Spoil:
    def spoil(cluster: Cluster) -> None:
        (found,) = [c for c in cluster.of("ConfigMap") if "service.yaml" in c["data"]]
        assert old in found["data"]["service.yaml"]
        found["data"]["service.yaml"] = found["data"]["service.yaml"].replace(old, new)

    return spoil


def of_coordinator(change: Callable[[dict], object]) -> Spoil:
    return lambda cluster: change(coordinator(cluster)) and None


def volume(spec, name):
    (found,) = [each for each in spec["volumes"] if each["name"] == name]
    return found


def mount(spec, name):
    (found,) = [each for each in spec["containers"][0]["volumeMounts"] if each["name"] == name]
    return found


CASES: dict[str, tuple[Spoil, str]] = {
    "a probe of a service that the code does not serve": (
        of_coordinator(lambda s: s["containers"][0]["livenessProbe"]["grpc"].update(service="x.Y")),
        "livenessProbe asks for x.Y",
    ),
    "a probe of the port that speaks TLS": (
        of_coordinator(lambda s: s["containers"][0]["readinessProbe"]["grpc"].update(port=50051)),
        "the kubelet knows no TLS",
    ),
    "a startup probe that gives up too soon": (
        of_coordinator(lambda s: s["containers"][0]["startupProbe"].update(failureThreshold=3)),
        "before a large state is looked through",
    ),
    "too short a grace period": (
        of_coordinator(lambda s: s.update(terminationGracePeriodSeconds=5)),
        "terminationGracePeriodSeconds",
    ),
    "a flag that serve does not have": (
        of_coordinator(lambda s: s["containers"][0]["command"].append("--verbose")),
        "No such option: --verbose",
    ),
    "a flag that ray start does not have": (
        of_coordinator(lambda s: s["initContainers"][1]["command"].append("--no-such-thing")),
        "--no-such-thing",
    ),
    "a secret that nobody makes": (
        of_coordinator(lambda s: volume(s, "tokens")["secret"].update(secretName="nobodys")),
        "nobodys",
    ),
    "a key that the secret does not have": (
        lambda c: c.rayclusters[0]["spec"]["authOptions"].update(secretName="dataservice-tokens"),
        "has no key auth_token",
    ),
    "a secret mounted elsewhere than the config looks": (
        of_coordinator(lambda s: mount(s, "tls").update(mountPath="/etc/elsewhere")),
        "config: tls.certificate_file",
    ),
    "a writable root": (
        of_coordinator(
            lambda s: s["containers"][0]["securityContext"].update(readOnlyRootFilesystem=False)
        ),
        "may write its root filesystem",
    ),
    "a coordinator that cannot see its raylet": (
        of_coordinator(lambda s: s.update(shareProcessNamespace=False)),
        "no shared process namespace",
    ),
    "a misspelt field of a core object": (
        of_coordinator(lambda s: s.update(terminationGracePeriod=5)),
        "terminationGracePeriod",
    ),
    "names that a node's own cache does not answer": (
        lambda c: policy(c, "ask-dns")["egress"][0]["to"].pop(2) and None,
        "cannot ask NodeLocal DNSCache by UDP",
    ),
    "names that OpenShift does not answer": (
        lambda c: policy(c, "ask-dns")["egress"][0]["ports"].pop(3) and None,
        "cannot ask OpenShift's DNS by TCP",
    ),
    "alerts that the operator of Prometheus does not select": (
        lambda c: c.find("PrometheusRule", "dataservice")["metadata"].pop("labels") and None,
        "PrometheusRule has no label `release`",
    ),
    "a config key that does not exist": (config("audit_log:", "audit_logs:"), "audit_logs"),
    "a port that only the config has": (
        config("listen: 0.0.0.0:50051", "listen: 0.0.0.0:50055"),
        "config: listen is port 50055",
    ),
    "worker ports that the policies do not open": (
        config("worker_ports: 20100-20115", "worker_ports: 20100-20120"),
        "cannot reach RayCluster/dataservice at 20116",
    ),
    "a state folder on no volume": (
        config("state_dir: /var/lib/dataservice", "state_dir: /tmp/state"),
        "state_dir does not lie on the volume",
    ),
    "more workers than pods can hold": (config("workers: 16", "workers: 99"), "64 fit"),
    "more decoded bytes than a pod may have": (
        config("held_bytes_per_worker: 4", "held_bytes_per_worker: 9"),
        "workers of a pod may take",
    ),
    "more bytes read ahead than a pod may have": (
        config("workers: 16", "workers: 16\nread_ahead_bytes_per_worker: 9000000000"),
        "workers of a pod may take",
    ),
    "a server name that the certificate does not bear": (
        config("server_name: dataservice", "server_name: loader"),
        "clients ask for loader",
    ),
    "a Ray cluster of another name": (
        lambda c: c.rayclusters[0]["metadata"].update(name="other"),
        "config: ray_address",
    ),
    "another Ray than the image's": (
        lambda c: c.rayclusters[0]["spec"].update(rayVersion="2.9.0"),
        "rayVersion is 2.9.0",
    ),
    "Ray without a token": (
        lambda c: c.rayclusters[0]["spec"]["authOptions"].update(mode="disabled"),
        "Ray asks for no token",
    ),
    "a raylet at another port than policies know": (
        lambda c: worker(c)["rayStartParams"].update({"node-manager-port": "7000"}),
        "Ray's node-manager-port of decode is 7000",
    ),
    "a worker without labels": (
        lambda c: worker(c)["template"]["metadata"]["labels"].update(
            {"app.kubernetes.io/name": "thing"}
        ),
        "NetworkPolicy trainers-to-workers selects no pod",
    ),
    "a policy that lets everybody in": (
        lambda c: policy(c, "trainers-to-coordinator")["ingress"][0].pop("from"),
        "elsewhere can reach StatefulSet/dataservice-coordinator at 50051",
    ),
    "a policy that opens Ray to trainers": (
        lambda c: policy(c, "trainers-to-workers")["ingress"][0]["ports"].append(
            {"protocol": "TCP", "port": 6380}
        ),
        "trainer can reach RayCluster/dataservice at 6380",
    ),
    "no way from the coordinator to its workers": (
        lambda c: policy(c, "coordinator-to-workers").update(egress=[]),
        "StatefulSet/dataservice-coordinator cannot reach RayCluster/dataservice at 20100",
    ),
    "a budget in a way that Kubernetes cannot count": (
        lambda c: c.find("PodDisruptionBudget", "dataservice-worker")["spec"].update(
            minAvailable="50%"
        ),
        "dataservice-worker needs minAvailable",
    ),
    "a budget of all the worker pods there are": (
        config("workers: 16", "workers: 12"),
        "a drain may take no worker pod: minAvailable is 6, 6 are filled",
    ),
    "logs of workers that fill their volume": (
        lambda c: worker(c)["template"]["spec"]["containers"][0]["env"].pop(-2),
        "logs of 4 workers, 4 files of 0 bytes",
    ),
    "a container without the image of the overlay": (
        of_coordinator(lambda spec: spec["initContainers"][0].update(image="dataservice")),
        "give each the image of the overlay",
    ),
    "a Service at a port that the pod does not have": (
        lambda c: c.find("Service", "dataservice")["spec"]["ports"][0].update(targetPort="http"),
        "has no port http",
    ),
    "a role bound to nobody": (
        lambda c: c.of("RoleBinding")[0]["subjects"][0].update(name="nobody"),
        "no ServiceAccount nobody",
    ),
    "a monitor of a port that no Service has": (
        lambda c: c.of("ServiceMonitor")[0]["spec"]["endpoints"][0].update(port="prometheus"),
        "no port prometheus",
    ),
    "a monitor of a port that no pod has": (
        lambda c: c.of("PodMonitor")[0]["spec"]["podMetricsEndpoints"][0].update(port="worker-9"),
        "PodMonitor dataservice-worker: no port worker-9",
    ),
    "worker metrics at ports that the pods do not name": (
        config("worker_metrics_ports: 20200-20203", "worker_metrics_ports: 20200-20204"),
        "config: worker_metrics_ports 20200-20204, the pod has",
    ),
    "more memory for opening jobs than the coordinator has": (
        config("job_opening: {memory_bytes: 4294967296, at_once: 3}", "job_opening: {}"),
        "processes that open jobs may take",
    ),
    "too few ports for the workers of a pod and their successors": (
        config("worker_metrics_ports: 20200-20203", "worker_metrics_ports: 20200-20202"),
        "worker_metrics_ports are fewer than twice the 2 workers of a pod",
    ),
    "spans that nobody lets out": (
        config("# traces:", "traces:"),
        "StatefulSet/dataservice-coordinator cannot reach observability at 4318",
    ),
    "worker metrics that Prometheus cannot reach": (
        lambda c: policy(c, "prometheus-to-workers")["ingress"][0]["ports"][0].update(
            endPort=20202
        ),
        "monitoring cannot reach RayCluster/dataservice at 20203",
    ),
    "worker metrics that trainers can read": (
        lambda c: policy(c, "trainers-to-workers")["ingress"][0]["ports"].append(
            {"protocol": "TCP", "port": 20200}
        ),
        "trainer can reach RayCluster/dataservice at 20200",
    ),
    "an alert on a metric that does not exist": (
        lambda c: c.of("PrometheusRule")[0]["spec"]["groups"][0]["rules"][1].update(
            expr="dataservice_ready_step == 0"
        ),
        "no metric of the code is called dataservice_ready_step",
    ),
    "an alert by a label that the metric lacks": (
        lambda c: c.of("PrometheusRule")[0]["spec"]["groups"][0]["rules"][1].update(
            expr='dataservice_ready_steps{rank="3"} == 0'
        ),
        "dataservice_ready_steps has no label ['rank']",
    ),
    "an alert that is no PromQL": (
        lambda c: c.of("PrometheusRule")[0]["spec"]["groups"][0]["rules"][1].update(expr="rate(("),
        "DataserviceTrainersWait",
    ),
}


@pytest.mark.parametrize("what", CASES)
def test_it_is_noticed(what, production, rendered):
    spoil, expected = CASES[what]
    spoil(production)
    try:
        found = said(production, rendered["production"])
    except ValueError as error:  # the config's own model
        found = [str(error)]
    assert any(expected in line for line in found), found


@pytest.mark.skipif(
    not schemas.SCHEMAS.is_dir(), reason="the CRDs of the operators are not beside this checkout"
)
def test_a_misspelt_field_of_a_custom_object_is_noticed(production, rendered):
    production.rayclusters[0]["spec"]["headGroupSpec"]["rayStartParam"] = {}
    assert any("rayStartParam" in line for line in said(production, rendered["production"]))


def test_a_container_finds_the_innermost_mount(production):
    pod = production.pods["coordinator"]
    found, inside = mounted_at(pod, "coordinator", "/tmp/ray/session")
    assert (found["name"], inside) == ("ray", "session")
    with pytest.raises(LookupError, match="nothing is mounted"):
        mounted_at(pod, "coordinator", "/var/cache")
