"""Objects against the schemas of whoever reads them: Kubernetes, and the operators' CRDs."""

import os
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import yaml

from tests.deploy.kustomize import Object

# The oldest that knows sidecar containers without a gate, and the newest that is known.
KUBERNETES = ("1.33", kubernetes_validate.latest_version())
CUSTOM = {"ray.io", "monitoring.coreos.com", "cert-manager.io"}
WITHOUT_SCHEMA = {"kubeflow.org"}
SCHEMAS = Path(
    os.environ.get("DATASERVICE_CRDS")
    or Path(__file__).resolve().parents[3] / "shared" / "k8s-schemas"
)


def mistakes_of(found: Object) -> list[str]:
    """What a schema has against an object. Custom ones pass where their CRDs are not at hand."""
    name = f"{found['kind']} {found['metadata']['name']}"
    group = found["apiVersion"].rpartition("/")[0]
    if group in WITHOUT_SCHEMA:
        return []
    if group in CUSTOM:
        validator = _custom(group, found["kind"], found["apiVersion"].rpartition("/")[2])
        errors = validator.iter_errors(found) if validator else ()
        return [f"{name}: {error.json_path}: {error.message[:300]}" for error in errors]
    said = []
    for version in KUBERNETES:
        try:
            kubernetes_validate.validate(found, version, strict=True)
        except kubernetes_validate.ValidationError as error:
            said.append(f"{name}: Kubernetes {version}: {error.message[:300]}")
    return said


@cache
def _custom(group: str, kind: str, version: str) -> Any:
    for path in sorted(SCHEMAS.glob(f"{group}_*.yaml")):
        crd = yaml.load(path.read_text(), Loader=yaml.CSafeLoader)["spec"]
        if crd["names"]["kind"] != kind:
            continue
        (served,) = [each for each in crd["versions"] if each["name"] == version]
        schema = _closed(served["schema"]["openAPIV3Schema"])
        schema["properties"]["metadata"] = {"type": "object"}
        return jsonschema.Draft202012Validator(schema)
    return None


def _closed(schema: Any) -> Any:
    """A structural schema as JSON Schema that refuses what Kubernetes would drop in silence:
    fields that are not listed."""
    if isinstance(schema, list):
        return [_closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    made = {key: _closed(value) for key, value in schema.items() if not key.startswith("x-")}
    named = isinstance(schema.get("properties"), dict) and schema.get("type") == "object"
    if named and not schema.get("x-kubernetes-preserve-unknown-fields"):
        made.setdefault("additionalProperties", False)
    if made.pop("nullable", False) and isinstance(made.get("type"), str):
        made["type"] = [made["type"], "null"]
    made.pop("format", None)  # int32 and the like: not JSON Schema's
    return made
