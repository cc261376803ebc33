"""What `kubectl kustomize` makes of a folder, where there is no kubectl.

Exactly the features that deploy/ uses: resources, components, configMapGenerator with the hash
behind its names, images, labels, namespace, and patches both by strategic merge (an object may be
deleted whole) and by JSON pointer. `test_overlays.py` compares it with kubectl object by object
wherever kubectl is. Anything else in a kustomization is refused by name.
"""

import copy
import hashlib
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import yaml

Object = dict[str, Any]
KEYS = {
    "apiVersion", "kind", "resources", "components", "configMapGenerator", "images", "labels",
    "namespace", "patches",
}  # fmt: skip
CLUSTER_WIDE = {"Namespace", "ClusterRole", "ClusterRoleBinding", "ClusterIssuer"}
# Lists of core objects that are merged entry by entry, and by which key.
MERGE_KEYS = {
    "containers": "name", "initContainers": "name", "volumes": "name", "env": "name",
    "volumeMounts": "mountPath", "ports": "containerPort",
}  # fmt: skip


def kubectl() -> str | None:
    """kubectl, if this machine has one."""
    return shutil.which("kubectl")


def render(folder: Path) -> list[Object]:
    """All objects of an overlay, by kubectl where there is one."""
    if kubectl() is None:
        return build(folder)
    return render_with_kubectl(folder)


def render_with_kubectl(folder: Path) -> list[Object]:
    """`kubectl kustomize FOLDER`."""
    done = subprocess.run(
        [kubectl() or "kubectl", "kustomize", str(folder)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return [found for found in yaml.safe_load_all(done.stdout) if found]


def build(folder: Path) -> list[Object]:
    """The Python equivalent."""
    objects = _accumulate(folder, [])
    _add_hashes(objects)
    return objects


def _accumulate(folder: Path, objects: list[Object]) -> list[Object]:
    plain = yaml.safe_load((folder / "kustomization.yaml").read_text())
    if unknown := set(plain) - KEYS:
        raise NotImplementedError(f"{folder}: {sorted(unknown)} is beyond this renderer")
    own: list[Object] = []
    for name in plain.get("resources", ()):
        place = folder / name
        own += _accumulate(place, []) if place.is_dir() else _documents(place)
    objects = [*objects, *own]
    for each in plain.get("configMapGenerator", ()):
        _generate(folder, each, objects)
    for name in plain.get("components", ()):
        objects = _accumulate(folder / name, objects)
    for patch in plain.get("patches", ()):
        _patch(folder, patch, objects)
    for found in objects:
        _transform(plain, found)
    return objects


def _documents(path: Path) -> list[Object]:
    # Through JSON, for what YAML's anchors share must be changed apart.
    return [json.loads(json.dumps(each)) for each in yaml.safe_load_all(path.read_text()) if each]


def _generate(folder: Path, plain: Object, objects: list[Object]) -> None:
    data = {Path(name).name: (folder / name).read_text() for name in plain["files"]}
    options = plain.get("options", {})
    if plain.get("behavior") == "replace":
        (old,) = [found for found in objects if is_named(found, "ConfigMap", plain["name"])]
        old["data"] = data
        return
    meta: Object = {"name": plain["name"]}
    if options.get("labels"):
        meta["labels"] = dict(options["labels"])
    made = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta, "data": data}
    if not options.get("disableNameSuffixHash"):
        made["#hash"] = True  # until _add_hashes
    objects.append(made)


def _transform(plain: Object, found: Object) -> None:
    meta = found["metadata"]
    if "namespace" in plain and found["kind"] not in CLUSTER_WIDE:
        meta["namespace"] = plain["namespace"]
    for labels in plain.get("labels", ()):
        meta.setdefault("labels", {}).update(labels["pairs"])
    for image in plain.get("images", ()):
        for container in containers_of(found):
            if container.get("image", "").partition(":")[0] == image["name"]:
                container["image"] = f"{image.get('newName', image['name'])}:{image['newTag']}"


# ---- patches --------------------------------------------------------------------------------


def _patch(folder: Path, patch: Object, objects: list[Object]) -> None:
    text = patch["patch"] if "patch" in patch else (folder / patch["path"]).read_text()
    for document in yaml.safe_load_all(text):
        if isinstance(document, list):
            target = patch["target"]
            found = [each for each in objects if is_named(each, target["kind"], target["name"])]
            assert found, f"{folder}: nothing to patch is called {target}"
            for each in found:
                for step in document:
                    _json_step(each, step)
        else:
            kind, name = document["kind"], document["metadata"]["name"]
            (found_one,) = [each for each in objects if is_named(each, kind, name)]
            if document.get("$patch") == "delete":
                objects.remove(found_one)
            else:
                _merge(found_one, document)


def _json_step(found: Object, step: Object) -> None:
    """One step of RFC 6902."""
    *path, last = [part.replace("~1", "/").replace("~0", "~") for part in _parts(step["path"])]
    at: Any = found
    for part in path:
        at = at[int(part)] if isinstance(at, list) else at[part]
    value = copy.deepcopy(step.get("value"))
    if isinstance(at, list):
        where = len(at) if last == "-" else int(last)
        at[where : where + (step["op"] != "add")] = [] if step["op"] == "remove" else [value]
    elif step["op"] == "remove":
        del at[last]
    else:
        assert step["op"] == "add" or last in at, f"{step['path']} is not there to be replaced"
        at[last] = value


def _parts(path: str) -> list[str]:
    return path.removeprefix("/").split("/")


def _merge(into: Object, patch: Object) -> None:
    """Strategic merge of a core object."""
    for key, value in patch.items():
        if value is None:
            into.pop(key, None)
        elif isinstance(value, dict) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        elif isinstance(value, list) and key in MERGE_KEYS and isinstance(into.get(key), list):
            into[key] = _merge_lists(into[key], value, MERGE_KEYS[key])
        else:
            into[key] = copy.deepcopy(value)


def _merge_lists(into: list[Object], patch: list[Object], by: str) -> list[Object]:
    """The patch's entries come first, in the patch's order: so does kustomize."""
    rest = {entry[by]: entry for entry in into}
    merged = []
    for entry in patch:
        found = rest.pop(entry[by], {})
        _merge(found, entry)
        merged.append(found)
    return [*merged, *rest.values()]


# ---- names of generated objects -------------------------------------------------------------


def _add_hashes(objects: list[Object]) -> None:
    names: dict[str, str] = {}
    for found in objects:
        if found.pop("#hash", False):
            old = found["metadata"]["name"]
            names[old] = found["metadata"]["name"] = f"{old}-{_digest(found)}"
    for found in objects:
        # Kustomize follows names in the objects it knows, and a custom one is not of them.
        if found["kind"] == "StatefulSet":
            for volume in found["spec"]["template"]["spec"]["volumes"]:
                if "configMap" in volume:
                    name = volume["configMap"]["name"]
                    volume["configMap"]["name"] = names.get(name, name)


def _digest(config_map: Object) -> str:
    # The name is left out of it, as kustomize does.
    plain = {"data": config_map["data"], "kind": "ConfigMap", "name": ""}
    text = json.dumps(plain, separators=(",", ":"), sort_keys=True, ensure_ascii=False)
    for sign in "<>&":  # as Go's encoder writes them
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    digest = hashlib.sha256(text.encode()).hexdigest()[:10]
    return digest.translate(str.maketrans("013ae", "ghkmt"))


# ---- finding things -------------------------------------------------------------------------


def is_named(found: Object, kind: str, name: str) -> bool:
    """Whether this is the object."""
    return bool(found["kind"] == kind and found["metadata"]["name"] == name)


def containers_of(plain: Any) -> list[Object]:
    """Every container that stands anywhere in an object."""
    if isinstance(plain, list):
        return [each for entry in plain for each in containers_of(entry)]
    if not isinstance(plain, dict):
        return []
    own = [*(plain.get("initContainers") or ()), *(plain.get("containers") or ())]
    deeper = [each for value in plain.values() for each in containers_of(value)]
    return own + [each for each in deeper if not any(each is mine for mine in own)]


def without_hash(name: str) -> str:
    """A generated name as it is written in the sources."""
    return re.sub(r"-[bcdfghkmt2-9]{10}$", "", name)
