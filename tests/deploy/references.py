"""Checks inside an overlay: whatever one object says of another is so."""

import re
from collections.abc import Iterator

from tests.deploy.cluster import DEPLOY, Cluster, Pod, mounted_at, selects
from tests.deploy.kustomize import Object

CERTIFICATE_KEYS = {"tls.crt", "tls.key", "ca.crt"}
ROW = re.compile(r"^\| `([a-z0-9-]+)` \| (`[^|]+`) \|", re.MULTILINE)


def promised_secrets(readme: str | None = None) -> dict[str, set[str]]:
    """The Secrets and ConfigMaps that the README has the operator make, with their keys."""
    text = readme if readme is not None else (DEPLOY / "README.md").read_text()
    return {name: set(re.findall(r"`([^`]+)`", keys)) for name, keys in ROW.findall(text)}


def mistakes(cluster: Cluster, promised: dict[str, set[str]]) -> list[str]:
    """Every reference that leads nowhere."""
    return [
        *_volumes(cluster, promised),
        *_environments(cluster, promised),
        *_mounts(cluster),
        *_accounts(cluster),
        *_services(cluster),
        *_selectors(cluster),
        *_probes(cluster),
        *_namespaces(cluster),
        *_hardening(cluster),
    ]


def secrets_of(cluster: Cluster, promised: dict[str, set[str]]) -> dict[str, set[str]]:
    """The Secrets that will be there, with their keys."""
    made = {each["spec"]["secretName"]: CERTIFICATE_KEYS for each in cluster.of("Certificate")}
    return promised | made


def _config_maps(cluster: Cluster, promised: dict[str, set[str]]) -> dict[str, set[str]]:
    return promised | {m["metadata"]["name"]: set(m["data"]) for m in cluster.of("ConfigMap")}


def _volumes(cluster: Cluster, promised: dict[str, set[str]]) -> Iterator[str]:
    secrets, maps = secrets_of(cluster, promised), _config_maps(cluster, promised)
    claims = {each["metadata"]["name"] for each in cluster.of("PersistentVolumeClaim")}
    for pod in cluster.pods.values():
        for volume in pod.volumes.values():
            for kind, key, known in (
                ("secret", "secretName", secrets),
                ("configMap", "name", maps),
                ("persistentVolumeClaim", "claimName", claims),
            ):
                if kind in volume and volume[kind][key] not in known:
                    yield f"{pod.owner}: volume {volume['name']}: no {kind} {volume[kind][key]}"


def _environments(cluster: Cluster, promised: dict[str, set[str]]) -> Iterator[str]:
    secrets = secrets_of(cluster, promised)
    wanted: list[tuple[str, str, str | None]] = []
    for pod in cluster.pods.values():
        for container in pod.containers:
            for variable in container.get("env", ()):
                if ref := variable.get("valueFrom", {}).get("secretKeyRef"):
                    wanted.append((f"{pod.owner} {variable['name']}", ref["name"], ref["key"]))
            for source in container.get("envFrom", ()):
                wanted.append((pod.owner, source["secretRef"]["name"], None))
    for ray in cluster.rayclusters:
        auth, owner = ray["spec"]["authOptions"], ray["metadata"]["name"]
        wanted.append((f"authOptions of {owner}", auth["secretName"], "auth_token"))
        if redis := ray["spec"].get("gcsFaultToleranceOptions"):
            ref = redis["redisPassword"]["valueFrom"]["secretKeyRef"]
            wanted.append((f"Redis of {owner}", ref["name"], ref["key"]))
    for owner, name, key in wanted:
        if name not in secrets:
            yield f"{owner}: no Secret {name}"
        elif key is not None and key not in secrets[name]:
            yield f"{owner}: Secret {name} has no key {key}, only {sorted(secrets[name])}"


def _mounts(cluster: Cluster) -> Iterator[str]:
    for pod in cluster.pods.values():
        for container in pod.containers:
            for mount in container.get("volumeMounts", ()):
                if mount["name"] not in pod.volumes:
                    yield f"{pod.owner}: {container['name']} mounts no volume {mount['name']}"


def _accounts(cluster: Cluster) -> Iterator[str]:
    accounts = {each["metadata"]["name"]: each for each in cluster.of("ServiceAccount")}
    roles = {each["metadata"]["name"] for each in cluster.of("Role")}
    bound = set()
    for binding in cluster.of("RoleBinding"):
        if binding["roleRef"]["name"] not in roles:
            yield f"RoleBinding {binding['metadata']['name']}: no Role {binding['roleRef']['name']}"
        for subject in binding["subjects"]:
            bound.add(subject["name"])
            if subject["name"] not in accounts:
                yield f"RoleBinding: no ServiceAccount {subject['name']}"
            elif subject["namespace"] != accounts[subject["name"]]["metadata"]["namespace"]:
                yield f"RoleBinding: {subject['name']} is not in {subject['namespace']}"
    for pod in cluster.pods.values():
        name = pod.spec.get("serviceAccountName")
        if name is not None and name not in accounts:
            yield f"{pod.owner}: no ServiceAccount {name}"
        if name not in bound and pod.spec.get("automountServiceAccountToken") is not False:
            yield f"{pod.owner}: carries an API token that nothing needs"


def _services(cluster: Cluster) -> Iterator[str]:
    for service in cluster.of("Service"):
        name = service["metadata"]["name"]
        chosen = [
            pod
            for pod in cluster.pods.values()
            if selects({"matchLabels": service["spec"]["selector"]}, pod.labels)
        ]
        if not chosen:
            yield f"Service {name} selects no pod"
        for pod in chosen:
            for port in service["spec"]["ports"]:
                target = port.get("targetPort", port["port"])
                if target not in pod.ports and target not in pod.ports.values():
                    yield f"Service {name}: {pod.owner} has no port {target}"
                elif pod.ports.get(target, target) != port["port"]:
                    yield f"Service {name}: port {port['port']} leads to {pod.ports[target]}"
    for kept in cluster.of("StatefulSet"):
        try:
            governing = cluster.find("Service", kept["spec"]["serviceName"])
        except LookupError as error:
            yield f"StatefulSet: {error}"
            continue
        if governing["spec"].get("clusterIP") != "None":
            yield f"Service {kept['spec']['serviceName']} must be headless"


def _selectors(cluster: Cluster) -> Iterator[str]:
    pods = list(cluster.pods.values())
    chosen: list[tuple[str, Object]] = [
        (f"{each['kind']} {each['metadata']['name']}", each["spec"][key])
        for kind, key in (
            ("PodDisruptionBudget", "selector"),
            ("NetworkPolicy", "podSelector"),
            ("StatefulSet", "selector"),
        )
        for each in cluster.of(kind)
    ]
    for name, selector in chosen:
        if not any(selects(selector, pod.labels) for pod in pods):
            yield f"{name} selects no pod"
    for budget in cluster.of("PodDisruptionBudget"):
        for pod in pods:
            ours = selects(budget["spec"]["selector"], pod.labels)
            # Without a scale subresource Kubernetes cannot count what a share is of.
            if ours and not isinstance(budget["spec"].get("minAvailable"), int):
                yield f"PodDisruptionBudget {budget['metadata']['name']} needs minAvailable"
    for pod in pods:
        for spread in pod.spec.get("topologySpreadConstraints", ()):
            if not selects(spread["labelSelector"], pod.labels):
                yield f"{pod.owner}: spreads pods that are not its own"
    for monitor in cluster.of("ServiceMonitor"):
        services = [
            each
            for each in cluster.of("Service")
            if selects(monitor["spec"]["selector"], each["metadata"].get("labels", {}))
        ]
        ports = {port["name"] for each in services for port in each["spec"]["ports"]}
        for endpoint in monitor["spec"]["endpoints"]:
            if endpoint["port"] not in ports:
                yield f"ServiceMonitor {monitor['metadata']['name']}: no port {endpoint['port']}"
    for monitor in cluster.of("PodMonitor"):
        chosen = [pod for pod in pods if selects(monitor["spec"]["selector"], pod.labels)]
        ports = {name for pod in chosen for name in pod.ports}
        for endpoint in monitor["spec"]["podMetricsEndpoints"]:
            if endpoint["port"] not in ports:
                yield f"PodMonitor {monitor['metadata']['name']}: no port {endpoint['port']}"


def _probes(cluster: Cluster) -> Iterator[str]:
    for pod in cluster.pods.values():
        for container in pod.containers:
            own = {p["name"]: p["containerPort"] for p in container.get("ports", ())}
            for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
                how = container.get(kind, {})
                port = (how.get("grpc") or how.get("tcpSocket") or {}).get("port")
                if port is not None and port not in own and port not in own.values():
                    yield f"{pod.owner}: {kind} of {container['name']} asks port {port}"


def _namespaces(cluster: Cluster) -> Iterator[str]:
    names = {each["metadata"]["name"] for each in cluster.of("Namespace")}
    for each in cluster.objects:
        if each["kind"] != "Namespace" and each["metadata"].get("namespace") not in names:
            yield f"{each['kind']} {each['metadata']['name']} is in no namespace of the overlay"


def _hardening(cluster: Cluster) -> Iterator[str]:
    """What the namespaces' `restricted` level asks, a read-only root, and bounded memory."""
    for pod in cluster.pods.values():
        if not pod.spec.get("securityContext", {}).get("runAsNonRoot"):
            yield f"{pod.owner}: may run as root"
        for container in pod.containers:
            name, context = container["name"], container.get("securityContext", {})
            if not context.get("readOnlyRootFilesystem"):
                yield f"{pod.owner}: {name} may write its root filesystem"
            if context.get("allowPrivilegeEscalation") is not False:
                yield f"{pod.owner}: {name} may gain privileges"
            if context.get("capabilities", {}).get("drop") != ["ALL"]:
                yield f"{pod.owner}: {name} keeps capabilities"
            resources = container.get("resources", {})
            if "memory" not in resources.get("limits", {}) or "cpu" not in resources["requests"]:
                yield f"{pod.owner}: {name} has no memory limit or asks for no CPU"
            yield from _temporary(pod, name)


def _temporary(pod: Pod, container: str) -> Iterator[str]:
    try:
        volume, _ = mounted_at(pod, container, "/tmp")
    except LookupError as error:
        yield str(error)
        return
    if "emptyDir" not in volume or volume["readOnly"]:
        yield f"{pod.owner}: {container} cannot write /tmp"
