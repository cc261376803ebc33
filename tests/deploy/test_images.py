import json
import re
import subprocess
import sys
import tomllib

import pytest

from tests.deploy.cluster import DEPLOY, Cluster
from tests.deploy.images import ROOT, Dockerfile, Ignored, mistakes
from tests.deploy.kustomize import containers_of

SERVICE = Dockerfile(text=(DEPLOY / "images" / "service.Dockerfile").read_text())
TRAINER = Dockerfile(text=(DEPLOY / "images" / "trainer.Dockerfile").read_text())
IGNORED = Ignored((ROOT / ".dockerignore").read_text())
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.mark.parametrize("file", [SERVICE, TRAINER], ids=["service", "trainer"])
def test_an_image_is_pinned_rootless_and_copies_what_is_there(file):
    assert list(mistakes(file, IGNORED)) == []


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("python:3.11.14-slim-bookworm", "python:latest", "not pinned"),
        ("USER 10001:10001", "USER dataservice", "not a number"),
        ("COPY protos ./protos", "COPY proto ./protos", "COPY proto: it does not exist"),
        ("COPY protos ./protos", "COPY tests ./tests", "COPY tests: .dockerignore keeps it out"),
        ("COPY protos ./protos", "ADD https://example.com/x /x", "ADD"),
        ("COPY --from=build", "COPY --from=builder", "no such stage"),
        (" -c constraints.txt", "", "versions are not those"),
        ("PIP_NO_CACHE_DIR=1", "API_TOKEN=1", "a secret would stay"),
        ("image.version=", "image.v=", "no label"),
    ],
)
def test_what_is_wrong_with_an_image_is_noticed(old, new, said):
    assert old in SERVICE.text
    spoilt = Dockerfile(text=SERVICE.text.replace(old, new))
    assert any(said in line for line in mistakes(spoilt, IGNORED)), list(mistakes(spoilt, IGNORED))


@pytest.mark.parametrize(
    ("path", "kept_out"),
    [
        ("dataservice/app.py", False),
        ("deploy/images/requirements.py", False),
        ("deploy/base/service.yaml", True),
        (".git/config", True),
        (".venv/bin/python", True),
        ("dataservice/core/__pycache__/plan.cpython-311.pyc", True),
        ("secret", True),
    ],
)
def test_a_build_is_sent_the_code_and_nothing_else(path, kept_out):
    assert IGNORED.holds(path) == kept_out


def test_the_service_image_installs_every_dependency_but_torch():
    lines = requirements("service", "s3", "--without", "torch")
    everything = PROJECT["dependencies"] + PROJECT["optional-dependencies"]["service"] + ["s3fs"]
    assert lines == [line for line in everything if not line.startswith("torch")]
    pins = {
        line.partition("==")[0].lower().replace("_", "-")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
    }
    names = {
        re.match(r"[\w-]+", line)[0].lower().replace("_", "-") for line in [*lines, "setuptools"]
    }
    assert names <= pins


def test_a_package_that_cannot_be_left_out_is_named():
    with pytest.raises(subprocess.CalledProcessError) as failed:
        requirements("service", "--without", "tensorflow")
    assert "cannot leave out ['tensorflow']" in failed.value.stderr


def requirements(*arguments: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, str(DEPLOY / "images" / "requirements.py"), *arguments],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return done.stdout.splitlines()


def test_the_service_imports_no_torch():
    """What the image leaves out."""
    script = (
        "import sys; sys.modules['torch'] = None\n"
        "import dataservice.app, dataservice.cli.main, dataservice.workers.ray_pool"
    )
    subprocess.run([sys.executable, "-c", script], check=True, cwd=ROOT)


def test_programs_and_paths_of_the_manifests_are_those_of_the_image(overlay: Cluster):
    scripts = set(PROJECT["scripts"]) | {"ray"}
    assert json.loads(SERVICE.values("ENTRYPOINT")[-1]) == ["dataservice"]
    environment = dict(
        pair.split("=", 1)
        for value in SERVICE.values("ENV")
        for pair in re.findall(r"\S+=\S*", value)
    )
    kernels = overlay.pods["coordinator"].container("kernels")["command"]
    assert kernels[-1] == environment["NUMBA_CACHE_DIR"]
    assert f"COPY --from=build {kernels[-2]} {kernels[-2]}" in SERVICE.text
    assert f"NUMBA_CACHE_DIR={kernels[-2]}" in SERVICE.text
    user = int(SERVICE.values("USER")[-1].partition(":")[0])
    for pod in overlay.pods.values():
        assert pod.spec["securityContext"]["runAsUser"] == user
    for container in containers_of(overlay.objects):
        if "command" in container:
            assert container["command"][0] in scripts | {"cp", "python"}
        assert "latest" not in container["image"]


def test_the_kernels_are_compiled_for_one_processor_at_build_and_run():
    """Numba's cache is void on another processor, and while features are the host's."""
    stages = SERVICE.text.split("# ---- run")
    for stage in stages:
        assert "NUMBA_CPU_NAME=${CPU_NAME}" in stage
        assert 'NUMBA_CPU_FEATURES=""' in stage
    assert "-m dataservice.warm" in stages[0]
    assert (ROOT / "dataservice" / "warm.py").exists()


def test_exposed_ports_are_those_of_the_config(overlay: Cluster):
    config = overlay.config
    listening = [config.listen, config.health_listen, config.metrics_listen]
    assert SERVICE.values("EXPOSE")[-1].split() == [each.rpartition(":")[2] for each in listening]
