import subprocess
import sys

import pytest

from tests.deploy import agreement, monitoring, network, references, schemas
from tests.deploy.cluster import CONFIG_FILE, DEPLOY, Cluster, mounted_at
from tests.deploy.conftest import EXAMPLES, OVERLAYS
from tests.deploy.kustomize import build, kubectl, render, render_with_kubectl

FOLDERS = OVERLAYS | EXAMPLES


def by_name(objects):
    return {(each["kind"], each["metadata"]["name"]): each for each in objects}


@pytest.mark.skipif(kubectl() is None, reason="this machine has no kubectl to compare with")
@pytest.mark.parametrize("name", FOLDERS)
def test_our_renderer_makes_what_kubectl_makes(name):
    ours, theirs = build(FOLDERS[name]), render_with_kubectl(FOLDERS[name])
    assert by_name(ours) == by_name(theirs)
    assert len(ours) == len(theirs)


def test_a_kustomize_feature_beyond_our_renderer_is_refused(tmp_path):
    (tmp_path / "kustomization.yaml").write_text("replicas: [{name: a, count: 2}]")
    with pytest.raises(NotImplementedError, match="replicas"):
        build(tmp_path)


@pytest.mark.parametrize("name", FOLDERS)
def test_every_core_object_fits_the_schemas_of_kubernetes(name):
    said = [
        m for each in render(FOLDERS[name]) if not custom(each) for m in schemas.mistakes_of(each)
    ]
    assert said == []


@pytest.mark.skipif(
    not schemas.SCHEMAS.is_dir(), reason="the CRDs of the operators are not beside this checkout"
)
def test_every_custom_object_fits_its_definition(overlay):
    objects = [each for each in overlay.objects if custom(each)]
    assert {"RayCluster", "Certificate"} <= {each["kind"] for each in objects}
    assert [m for each in objects for m in schemas.mistakes_of(each)] == []


def custom(found):
    return found["apiVersion"].partition("/")[0] in schemas.CUSTOM


def test_what_objects_say_of_one_another_is_so(overlay):
    assert references.mistakes(overlay, references.promised_secrets()) == []


def test_overlays_agree_with_the_code(overlay):
    assert list(agreement.mistakes(overlay)) == []


def test_the_network_lets_through_what_is_needed_and_nothing_else(overlay):
    assert list(network.mistakes(overlay)) == []


def test_where_all_data_lies_in_an_object_store_no_volume_is_mounted_on_many_nodes(rendered):
    cluster = Cluster(rendered["production-object-store"])
    assert cluster.of("PersistentVolumeClaim") == []
    claims = [
        (claim["metadata"]["name"], claim["spec"]["accessModes"])
        for kept in cluster.of("StatefulSet")
        for claim in kept["spec"]["volumeClaimTemplates"]
    ]
    assert claims == [("state", ["ReadWriteOnce"])]
    for pod in cluster.pods.values():
        assert not [v for v in pod.volumes.values() if "persistentVolumeClaim" in v]


@pytest.mark.parametrize("component", ["coordinator", "worker"])
def test_tokenizers_are_fetched_from_an_object_store_before_a_pod_starts(
    rendered, component, tmp_path
):
    pod = Cluster(rendered["production-object-store"]).pods[component]
    fetching = pod.container("tokenizers")
    *command, url, to = fetching["command"]
    volume, _ = mounted_at(pod, "tokenizers", to)
    assert (volume["name"], volume["readOnly"]) == ("data", False)
    assert fetching in pod.spec["initContainers"]
    assert url.startswith("s3://")
    stored, got = tmp_path / "stored", tmp_path / "data"
    (stored / "shared" / "qwen").mkdir(parents=True)
    (stored / "shared" / "qwen" / "tokenizer.json").write_text("{}")
    got.mkdir()
    assert command[0] == "python"
    subprocess.run([sys.executable, *command[1:], stored.as_uri(), str(got)], check=True)
    assert (got / "shared" / "qwen" / "tokenizer.json").read_text() == "{}"


def test_spans_get_out_with_the_component_where_the_config_names_a_collector(rendered):
    cluster = Cluster(rendered["with_all_components"])
    (found,) = [each for each in cluster.of("ConfigMap") if CONFIG_FILE in each["data"]]
    found["data"][CONFIG_FILE] = found["data"][CONFIG_FILE].replace("# traces:", "traces:")
    assert cluster.config.traces == "http://otel-collector.observability.svc:4318"
    assert list(network.mistakes(cluster)) == []


def test_alerts_and_dashboard_read_metrics_that_the_code_has(overlay):
    assert list(monitoring.mistakes(overlay)) == []


def test_production_watches_what_the_readme_sends_people_to(production):
    text = (DEPLOY / "README.md").read_text()
    known = monitoring.series_of_code()
    told = {word for word in text.split("`") if word.startswith("dataservice_")}
    assert told
    assert told <= set(known)
    watched = {
        name for _, each in monitoring.expressions(production) for name, _ in monitoring.used(each)
    }
    assert told - {"up"} <= watched


def test_the_autoscaler_may_do_what_it_does_and_no_more(overlay):
    (role,) = overlay.of("Role")
    allowed = {
        (r, verb) for rule in role["rules"] for r in rule["resources"] for verb in rule["verbs"]
    }
    # ray.autoscaler's KubeRay provider reads pods, and reads and patches its RayCluster.
    assert allowed == {
        ("pods", "get"), ("pods", "list"), ("pods", "watch"),
        ("rayclusters", "get"), ("rayclusters", "patch"),
    }  # fmt: skip
    (ray,) = overlay.rayclusters
    assert role["rules"][1]["resourceNames"] == [ray["metadata"]["name"]]
    (binding,) = overlay.of("RoleBinding")
    assert [s["name"] for s in binding["subjects"]] == [
        overlay.pods["ray-head"].spec["serviceAccountName"]
    ]


def test_every_secret_and_knob_of_production_is_in_the_readme(production):
    text = (DEPLOY / "README.md").read_text()
    for found in production.of("Secret"):
        pytest.fail(f"a Secret is committed: {found['metadata']['name']}")
    for mark in ("grep -rn SITE", "deploy/examples/index-job", "deploy/examples/restore-state"):
        assert mark in text
    for folder in ("base", "components", "overlays", "examples", "images"):
        assert (DEPLOY / folder).is_dir()
        assert f"({folder})" in text
