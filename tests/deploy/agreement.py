"""Checks of an overlay against the code: config, commands, ports, health, metrics, sizes."""

import inspect
import re
from collections.abc import Iterator
from typing import Any

import click
import typer.exceptions
import typer.main
from dataservice_proto.v1 import coordinator_pb2
from ray import __version__ as RAY_VERSION
from ray.scripts.scripts import cli as ray_cli
from torch.distributed.run import get_args_parser

from dataservice.app import Service
from dataservice.cli.main import app
from dataservice.operate.fleet import OWN_ADDRESS
from dataservice.serving.health_ports import LIVENESS
from dataservice.workers.pool import PoolConfig
from dataservice.workers.recycled_memory import KEPT_BYTES
from tests.deploy.cluster import Cluster, Pod, mounted_at
from tests.deploy.kustomize import Object
from tests.deploy.network import port_range
from tests.deploy.references import promised_secrets, secrets_of

COORDINATOR = coordinator_pb2.DESCRIPTOR.services_by_name["Coordinator"].full_name
UNITS = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
STATE_LIMIT_S = 300.0  # for a state that fills its volume to be looked through, copied, made anew
VARIABLE = re.compile(r"\$\(\w+\)")  # filled in by Kubernetes; numbers, where we use them
# KubeRay's names of ports that our checks and policies know by number.
RAY_PARAMETERS_IN_COMMON = (
    "node-manager-port", "object-manager-port", "runtime-env-agent-port",
    "dashboard-agent-grpc-port", "dashboard-agent-listen-port", "metrics-export-port",
    "min-worker-port", "max-worker-port", "object-store-memory",
)  # fmt: skip


def mistakes(cluster: Cluster) -> Iterator[str]:
    """Where the overlay and the code disagree."""
    yield from _commands(cluster)
    yield from _listening(cluster)
    yield from _files(cluster)
    yield from _health(cluster)
    yield from _ray(cluster)
    yield from _sizes(cluster)
    yield from _logs(cluster)
    yield from _drains(cluster)
    yield from _images(cluster)
    yield from _certificate(cluster)


# ---- commands -------------------------------------------------------------------------------


def parse(command: list[str]) -> str | None:
    """What the real program has against a command line, None if it takes it."""
    program, *words = (VARIABLE.sub("0", word) for word in command)
    groups = {"dataservice": typer.main.get_command(app), "ray": ray_cli}
    if program == "torchrun":
        try:
            get_args_parser().parse_args(words)
        except SystemExit:
            return f"torchrun does not take {words}"
        return None
    if program == "python":
        compile(words[1], "a manifest", "exec")
        return None
    if program not in groups:
        return None if program in ("cp",) else f"{program} is no program of the image"
    group: Any = groups[program]
    try:
        name, chosen, rest = group.resolve_command(group.make_context(program, [*words]), words)
        chosen.make_context(name, rest)
    except (click.ClickException, typer.exceptions.TyperException) as error:
        return f"{program} {' '.join(words)}: {error.format_message()}"
    return None


def _commands(cluster: Cluster) -> Iterator[str]:
    for pod in cluster.pods.values():
        for container in pod.containers:
            if "command" in container and (said := parse(container["command"])):
                yield f"{pod.owner}: {container['name']}: {said}"


def start_flags(parameters: Object) -> list[str]:
    """rayStartParams as KubeRay writes them into a command line."""
    return [
        f"--{key}" if value == "true" else f"--{key}={value}" for key, value in parameters.items()
    ]


# ---- config ---------------------------------------------------------------------------------


def _listening(cluster: Cluster) -> Iterator[str]:
    config, pods = cluster.config, cluster.pods
    ports = pods["coordinator"].ports
    for key, name in (
        ("listen", "grpc"),
        ("health_listen", "health"),
        ("metrics_listen", "metrics"),
    ):
        host, _, port = (getattr(config, key) or "").rpartition(":")
        if port != str(ports.get(name)):
            yield f"config: {key} is port {port}, the container's {name} is {ports.get(name)}"
        if host not in ("0.0.0.0", "[::]"):
            yield f"config: {key} listens at {host}, where no other pod reaches it"
    if config.worker_host != OWN_ADDRESS:
        yield f"config: worker_host is {config.worker_host}, so workers hide from other pods"
    if config.worker_ports is None:
        yield "config: worker_ports is not set, so workers listen where no policy lets anyone in"
    elif pods["worker"].ports["grpc"] != port_range(config.worker_ports)[0]:
        yield f"config: worker_ports {config.worker_ports} begin elsewhere than the pod's grpc port"
    counted = {p for name, p in pods["worker"].ports.items() if name.startswith("worker-")}
    if counted != set(port_range(config.worker_metrics_ports or "1-0")):
        yield f"config: worker_metrics_ports {config.worker_metrics_ports}, the pod has {counted}"
    (ray,) = cluster.rayclusters
    head = f"{ray['metadata']['name']}-head-svc:{pods['ray-head'].ports['gcs-server']}"
    if config.ray_address != head:
        yield f"config: ray_address is {config.ray_address}, KubeRay's Service is {head}"
    for pod in pods.values():
        for container in pod.containers:
            for word in container.get("command", ()):
                if word.startswith("--address=") and word != f"--address={head}":
                    yield f"{pod.owner}: {container['name']} joins {word}, not {head}"


def _files(cluster: Cluster) -> Iterator[str]:
    config, pods = cluster.config, cluster.pods
    secret_files = {"secret_file": config.secret_file, "tokens_file": config.tokens_file}
    tls = config.tls
    if tls is None or config.tokens_file is None or config.insecure:
        yield "config: tls and tokens_file must be set"
        return
    of_tls = {
        f"tls.{key}": getattr(tls, key)
        for key in ("certificate_file", "key_file", "ca_file", "client_ca_file")
    }
    for key, path in (secret_files | of_tls).items():
        if path is not None:
            yield from _is_secret(cluster, pods["coordinator"], "coordinator", key, path)
    for key, path in of_tls.items():
        if path is not None:
            yield from _is_secret(cluster, pods["worker"], "ray-worker", key, path)
    for key in ("state_dir", "audit_log"):
        try:
            volume, _ = mounted_at(pods["coordinator"], "coordinator", getattr(config, key))
        except LookupError as error:
            yield f"config: {key}: {error}"
            continue
        if "claimTemplate" not in volume or volume["readOnly"]:
            yield f"config: {key} does not lie on the volume that is kept"


def _is_secret(cluster: Cluster, pod: Pod, container: str, key: str, path: str) -> Iterator[str]:
    try:
        volume, inside = mounted_at(pod, container, path)
        keys = secrets_of(cluster, promised_secrets())[volume["secret"]["secretName"]]
    except LookupError as error:
        yield f"config: {key}: {error}"
        return
    if inside not in keys:
        yield f"config: {key} is {path}, but the Secret has {sorted(keys)}"


# ---- health, Ray, sizes ---------------------------------------------------------------------


def _health(cluster: Cluster) -> Iterator[str]:
    pod, config = cluster.pods["coordinator"], cluster.config
    container = pod.container("coordinator")
    for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
        asked = container.get(kind, {}).get("grpc", {})
        served = LIVENESS if kind == "livenessProbe" else COORDINATOR
        if asked.get("service") != served:
            yield f"{kind} asks for {asked.get('service')}, the code serves {served}"
        if asked.get("port") != pod.ports["health"]:
            yield f"{kind} asks port {asked.get('port')}: the kubelet knows no TLS"
    startup = container["startupProbe"]
    patience_s = startup["periodSeconds"] * startup["failureThreshold"]
    if patience_s < STATE_LIMIT_S:
        yield f"startupProbe gives up after {patience_s} s, before a large state is looked through"
    grace_s = inspect.signature(Service.stop).parameters["grace_s"].default
    clean_s = grace_s + PoolConfig(workers=1).stop_timeout_s + 15
    if config.stop_within_s < clean_s:
        yield f"config: stop_within_s is below the {clean_s:g} s that stopping may take"
    needed_s = config.stop_within_s + 5
    if pod.spec["terminationGracePeriodSeconds"] < needed_s:
        yield f"terminationGracePeriodSeconds is below the {needed_s:g} s that stopping may take"


def _ray(cluster: Cluster) -> Iterator[str]:
    (ray,) = cluster.rayclusters
    spec = ray["spec"]
    if spec["rayVersion"] != RAY_VERSION:
        yield f"rayVersion is {spec['rayVersion']}, the image has {RAY_VERSION}"
    if spec["authOptions"].get("mode") != "token":
        yield "Ray asks for no token"
    if spec.get("enableInTreeAutoscaling"):  # by the image of the head, so says KubeRay
        autoscaler = ["ray", "kuberay-autoscaler", "--cluster-name=a", "--cluster-namespace=b"]
        if said := parse(autoscaler):
            yield said
    head = spec["headGroupSpec"]["rayStartParams"]
    if head.get("num-cpus") != "0":
        yield "Ray may place decoding on its head"
    groups = [
        ("head", head),
        *((g["groupName"], g["rayStartParams"]) for g in spec["workerGroupSpecs"]),
    ]
    (raylet,) = [c for c in cluster.pods["coordinator"].containers if c["name"] == "raylet"]
    flags = dict(w[2:].split("=", 1) for w in raylet["command"] if w.startswith("--") and "=" in w)
    groups.append(("the coordinator's raylet", flags))
    for name, given in groups:
        if said := parse(
            ["ray", "start", *start_flags(given), *(["--head"] if given is head else [])]
        ):
            yield f"rayStartParams of {name}: {said}"
        for key in RAY_PARAMETERS_IN_COMMON:
            if given.get(key) != head.get(key):
                yield f"Ray's {key} of {name} is {given.get(key)}, the head's is {head.get(key)}"
    coordinator = cluster.pods["coordinator"]
    for container in ("coordinator", "raylet"):
        names = {each["name"] for each in coordinator.container(container).get("env", ())}
        if not {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN"} <= names:
            yield f"{container} shows Ray no token"
        volume, _ = mounted_at(coordinator, container, "/tmp/ray")
        if volume["name"] != "ray":
            yield f"{container} does not share Ray's sockets"
    if not coordinator.spec.get("shareProcessNamespace"):
        yield "the coordinator cannot find its raylet: no shared process namespace"


def _sizes(cluster: Cluster) -> Iterator[str]:
    config, (ray,) = cluster.config, cluster.rayclusters
    (group,) = ray["spec"]["workerGroupSpecs"]
    autoscaled = ray["spec"].get("enableInTreeAutoscaling")
    per_pod = _workers_a_pod(cluster)
    most = per_pod * (group["maxReplicas"] if autoscaled else group["replicas"])
    if config.workers > most:
        yield f"{config.workers} workers are asked for, and {most} fit"
    if len(port_range(config.worker_ports or "1-1")) < 2 * per_pod:
        yield f"worker_ports are fewer than twice the {per_pod} workers of a pod"
    if len(port_range(config.worker_metrics_ports or "1-1")) < 2 * per_pod:
        yield f"worker_metrics_ports are fewer than twice the {per_pod} workers of a pod"
    container = cluster.pods["worker"].container("ray-worker")
    limit = in_bytes(container["resources"]["limits"]["memory"])
    processes = config.slots_per_worker + 1  # one reads ahead for all decoders
    handed_over = config.slots_per_worker * 2 * KEPT_BYTES + config.read_ahead_bytes_per_worker
    decoding = processes * (config.decode_memory_bytes or 0) + handed_over
    needed = per_pod * (config.held_bytes_per_worker + decoding)
    if config.decode_memory_bytes is None or needed > limit:
        yield f"workers of a pod may take {needed} bytes, its limit is {limit}"
    container = cluster.pods["coordinator"].container("coordinator")
    limit = in_bytes(container["resources"]["limits"]["memory"])
    needed = config.job_opening.at_once * config.job_opening.memory_bytes
    if needed >= limit:
        yield f"processes that open jobs may take {needed} bytes, the pod's limit is {limit}"


def _logs(cluster: Cluster) -> Iterator[str]:
    """Ray rotates what its workers write only where it is told to."""
    pod = cluster.pods["worker"]
    container = pod.container("ray-worker")
    given = {each["name"]: each.get("value") for each in container["env"]}
    volume, _ = mounted_at(pod, "ray-worker", "/tmp/ray")
    files = 1 + int(given.get("RAY_ROTATION_BACKUP_COUNT") or 0)
    each = int(given.get("RAY_ROTATION_MAX_BYTES") or 0)
    workers = 2 * _workers_a_pod(cluster)  # a renewed one beside its successor
    room = in_bytes(volume["emptyDir"]["sizeLimit"])
    if not each or 2 * workers * files * each > room:
        yield f"logs of {workers} workers, {files} files of {each} bytes, have {room} bytes"


def _drains(cluster: Cluster) -> Iterator[str]:
    """A node can be drained: of the pods that all workers fill, one may go."""
    filled = -(-cluster.config.workers // _workers_a_pod(cluster))
    for budget in cluster.of("PodDisruptionBudget"):
        least, whose = budget["spec"]["minAvailable"], budget["metadata"]["name"]
        if whose == "dataservice-worker" and isinstance(least, int) and least >= filled:
            yield f"a drain may take no worker pod: minAvailable is {least}, {filled} are filled"


def _images(cluster: Cluster) -> Iterator[str]:
    """Every container of ours runs one image, that of the overlay."""
    images = {each["image"] for pod in cluster.pods.values() for each in pod.containers}
    ours = {image for image in images if "dataservice" in image}
    if len(ours) != 1 or not all(":" in image.rpartition("/")[2] for image in images):
        yield f"containers run {sorted(images)}; give each the image of the overlay"


def _workers_a_pod(cluster: Cluster) -> int:
    (ray,) = cluster.rayclusters
    (group,) = ray["spec"]["workerGroupSpecs"]
    return int(group["rayStartParams"]["num-cpus"]) // cluster.config.slots_per_worker


def in_bytes(quantity: str) -> int:
    """A quantity of memory."""
    number, unit = re.fullmatch(r"(\d+)([KMGT]i)", quantity).groups()  # type: ignore[union-attr]
    return int(number) * UNITS[unit]


def _certificate(cluster: Cluster) -> Iterator[str]:
    tls = cluster.config.tls
    assert tls is not None
    (certificate,) = [
        c for c in cluster.of("Certificate") if c["spec"]["secretName"] == "dataservice-tls"
    ]
    names = certificate["spec"]["dnsNames"]
    service = cluster.find("Service", "dataservice")["metadata"]
    for name in (tls.server_name, f"{service['name']}.{service['namespace']}.svc"):
        if name not in names:
            yield f"the certificate bears {names}, clients ask for {name}"
