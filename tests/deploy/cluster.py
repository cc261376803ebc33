"""A rendered overlay as the checks look at it: its pods, what they mount, and its config."""

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import yaml

from dataservice.operate.config import ServiceConfig
from tests.deploy.kustomize import Object, containers_of

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
CONFIG_FILE = "service.yaml"


@dataclass(frozen=True, kw_only=True)
class Pod:
    """A pod template, with the labels that its pods will bear. `owner` is kind/name."""

    owner: str
    namespace: str
    labels: dict[str, str]
    spec: Object
    claims: tuple[str, ...] = ()

    @property
    def containers(self) -> list[Object]:
        return containers_of(self.spec)

    def container(self, name: str) -> Object:
        (found,) = [each for each in self.containers if each["name"] == name]
        return found

    @property
    def ports(self) -> dict[str, int]:
        """Named container ports of all containers."""
        return {p["name"]: p["containerPort"] for c in self.containers for p in c.get("ports", ())}

    @property
    def volumes(self) -> dict[str, Object]:
        own = {each["name"]: each for each in self.spec.get("volumes", ())}
        return own | {claim: {"name": claim, "claimTemplate": claim} for claim in self.claims}


class Cluster:
    """All objects of one overlay."""

    def __init__(self, objects: list[Object]) -> None:
        self.objects = copy.deepcopy(objects)

    def of(self, kind: str) -> list[Object]:
        return [each for each in self.objects if each["kind"] == kind]

    def find(self, kind: str, name: str) -> Object:
        """The object. Raises LookupError."""
        for each in self.of(kind):
            if each["metadata"]["name"] == name:
                return each
        raise LookupError(f"there is no {kind} {name}")

    @cached_property
    def pods(self) -> dict[str, Pod]:
        """By component, or by owner's name where the labels name none."""
        return {
            pod.labels.get("app.kubernetes.io/component", pod.owner): pod for pod in self._all()
        }

    @cached_property
    def config(self) -> ServiceConfig:
        """What the coordinator reads: validated by the code's own model."""
        pod = self.pods["coordinator"]
        command = pod.container("coordinator")["command"]
        mount, key = mounted_at(pod, "coordinator", command[command.index("--config") + 1])
        data = self.find("ConfigMap", mount["configMap"]["name"])["data"]
        return ServiceConfig.model_validate(yaml.safe_load(data[key]))

    @property
    def rayclusters(self) -> list[Object]:
        return self.of("RayCluster")

    def _all(self) -> Iterator[Pod]:
        for each in self.objects:
            meta, spec = each["metadata"], each.get("spec", {})
            namespace = meta.get("namespace", "default")
            if each["kind"] in ("StatefulSet", "Job", "Deployment"):
                claims = [c["metadata"]["name"] for c in spec.get("volumeClaimTemplates", ())]
                yield _pod(each, namespace, spec["template"], claims=tuple(claims))
            elif each["kind"] == "RayCluster":
                yield _pod(each, namespace, spec["headGroupSpec"]["template"], group="headgroup")
                for group in spec["workerGroupSpecs"]:
                    yield _pod(each, namespace, group["template"], group=group["groupName"])
            elif each["kind"] == "PyTorchJob":
                for replica in spec["pytorchReplicaSpecs"].values():
                    yield _pod(each, namespace, replica["template"])


def _pod(
    owner: Object,
    namespace: str,
    template: Object,
    *,
    group: str = "",
    claims: tuple[str, ...] = (),
) -> Pod:
    labels = dict(template.get("metadata", {}).get("labels", {}))
    if group:  # what KubeRay adds
        labels |= {"ray.io/cluster": owner["metadata"]["name"], "ray.io/group": group}
    return Pod(
        owner=f"{owner['kind']}/{owner['metadata']['name']}",
        namespace=namespace,
        labels=labels,
        spec=template["spec"],
        claims=claims,
    )


def mounted_at(pod: Pod, container: str, path: str) -> tuple[Object, str]:
    """The volume in which a container finds a path, and the path inside it. Raises LookupError."""
    mounts = pod.container(container).get("volumeMounts", ())
    holding = [m for m in mounts if f"{path}/".startswith(m["mountPath"].rstrip("/") + "/")]
    if not holding:
        raise LookupError(f"{pod.owner}: nothing is mounted where {container} has {path}")
    mount = max(holding, key=lambda m: len(m["mountPath"]))
    volume = pod.volumes.get(mount["name"])
    if volume is None:
        raise LookupError(f"{pod.owner}: {container} mounts {mount['name']}, which is no volume")
    inside = path.removeprefix(mount["mountPath"]).strip("/")
    return {**volume, "readOnly": mount.get("readOnly", False)}, inside


def selects(selector: Object, labels: dict[str, str]) -> bool:
    """A label selector of Kubernetes; an empty one selects everything."""
    if any(labels.get(key) != value for key, value in selector.get("matchLabels", {}).items()):
        return False
    for want in selector.get("matchExpressions", ()):
        assert want["operator"] == "In", want
        if labels.get(want["key"]) not in want["values"]:
            return False
    return True
