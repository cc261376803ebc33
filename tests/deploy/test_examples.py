import ast
import inspect
import os
import re
import sqlite3
import subprocess
import sys
from contextlib import closing

import pytest
import yaml

from dataservice.operate.tokens_file import TokensFile
from dataservice.sources.roots import Roots
from tests.deploy import references
from tests.deploy.agreement import parse
from tests.deploy.cluster import DEPLOY, Cluster, mounted_at, selects
from tests.deploy.conftest import EXAMPLES
from tests.deploy.kustomize import render
from tests.deploy.procedure import commands_of, copy_state_out, restore_state
from trainer_client import ShardDataset, Tls

FIRST_STEPS = "From an empty namespace to the first shard"
KILLED_COORDINATOR = """
import os, pathlib, signal, sys
from dataservice.core.job import JobRecord
from dataservice.state.sqlite import SqliteStateStore
folder, job = sys.argv[1:]
SqliteStateStore(pathlib.Path(folder)).put_job(
    JobRecord(name=job, spec_json="{}", index_fingerprint="of its index")
)
os.kill(os.getpid(), signal.SIGKILL)
"""
TRAINERS = {"torchrun-job": "trainer", "pytorchjob": "pytorch"}


@pytest.fixture(params=TRAINERS)
def trainer(request):
    """(objects, pod, container) of each variant; the pods of a variant are alike."""
    cluster = Cluster(render(EXAMPLES[request.param]))
    (pod,) = {pod.owner: pod for pod in cluster.pods.values()}.values()
    return cluster, pod, pod.container(TRAINERS[request.param])


def environment(container):
    return {each["name"]: each.get("value") for each in container["env"]}


def test_trainers_reach_the_service_by_its_address_and_name(trainer, production):
    _, _, container = trainer
    service = production.find("Service", "dataservice")
    meta, (port,) = service["metadata"], service["spec"]["ports"]
    address = f"{meta['name']}.{meta['namespace']}.svc:{port['port']}"
    assert environment(container)["DATASERVICE_ADDRESS"] == address
    script = (DEPLOY / "examples" / "trainer" / "train.py").read_text()
    assert f'server_name="{production.config.tls.server_name}"' in script


def test_trainers_live_where_the_network_policies_let_them_in(trainer, production):
    cluster, pod, _ = trainer
    labels = cluster.find("Namespace", pod.namespace)["metadata"]["labels"]
    rule = production.find("NetworkPolicy", "trainers-to-coordinator")["spec"]["ingress"][0]
    assert selects(rule["from"][0]["namespaceSelector"], labels)


def test_files_that_the_script_reads_are_mounted(trainer):
    _, pod, container = trainer
    promised = references.promised_secrets()
    given = environment(container)
    for name in ("DATASERVICE_TOKEN_FILE", "DATASERVICE_CA_FILE"):
        volume, key = mounted_at(pod, container["name"], given[name])
        source = volume.get("secret", {}).get("secretName") or volume["configMap"]["name"]
        assert key in promised[source]
    script = next(word for word in container["command"] if word.endswith(".py"))
    volume, key = mounted_at(pod, container["name"], script)
    assert volume["configMap"]["name"] == "vlm-sft-script"
    assert key == "train.py"
    assert "persistentVolumeClaim" in mounted_at(pod, container["name"], given["CHECKPOINT_DIR"])[0]


def test_the_script_calls_the_client_as_it_is_and_sets_every_variable_it_reads(trainer):
    _, _, container = trainer
    tree = ast.parse((DEPLOY / "examples" / "trainer" / "train.py").read_text())
    calls = {
        n.func.id: n
        for n in ast.walk(tree)
        if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)
    }
    for client in (ShardDataset, Tls):
        known = set(inspect.signature(client).parameters)
        assert {each.arg for each in calls[client.__name__].keywords} <= known
    read = {
        n.slice.value
        for n in ast.walk(tree)
        if isinstance(n, ast.Subscript) and ast.unparse(n.value) == "os.environ"
    }
    assert read - {"LOCAL_RANK"} <= set(environment(container))


def test_torchrun_takes_its_command_line(trainer):
    assert parse(trainer[2]["command"]) is None


def test_a_jobs_pods_find_the_first_of_them():
    cluster = Cluster(render(EXAMPLES["torchrun-job"]))
    (job,), (service,) = cluster.of("Job"), cluster.of("Service")
    spec, (pod,) = job["spec"], cluster.pods.values()
    flags = dict(w[2:].split("=", 1) for w in pod.container("trainer")["command"] if "=" in w)
    name = service["metadata"]["name"]
    assert pod.spec["subdomain"] == name
    assert flags["master-addr"] == f"{job['metadata']['name']}-0.{name}"
    assert int(flags["nnodes"]) == spec["completions"] == spec["parallelism"]
    assert int(flags["master-port"]) == service["spec"]["ports"][0]["port"]
    assert selects({"matchLabels": service["spec"]["selector"]}, pod.labels)
    gpus = pod.container("trainer")["resources"]["limits"]["nvidia.com/gpu"]
    assert int(flags["nproc-per-node"]) == gpus


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_ask_for_nothing_that_nobody_makes(name, production):
    cluster = Cluster(render(EXAMPLES[name]))
    if name in ("index-job", "restore-state"):  # these join the service's namespace
        claims = [f"state-{s['metadata']['name']}-0" for s in production.of("StatefulSet")]
        cluster.objects += production.of("Namespace") + production.of("PersistentVolumeClaim")
        cluster.objects += [
            {
                "kind": "PersistentVolumeClaim",
                "metadata": {"name": each, "namespace": "dataservice"},
            }
            for each in claims
        ]
    assert references.mistakes(cluster, references.promised_secrets()) == []


def test_the_index_job_runs_a_command_that_there_is():
    (pod,) = Cluster(render(EXAMPLES["index-job"])).pods.values()
    assert parse(pod.container("index")["command"]) is None


def test_a_team_of_the_first_steps_may_read_where_they_put_its_data(production):
    made = " ".join(word for words in commands_of(FIRST_STEPS) for word in words)
    (team,) = re.findall(r"token new --team (\S+)", made)
    (pod,) = Cluster(render(EXAMPLES["index-job"])).pods.values()
    (job_file,) = [each for each in pod.container("index")["command"] if each.endswith(".yaml")]
    told = re.findall(r"`(/data/\S+?)(?:/…)?`", (DEPLOY / "README.md").read_text())
    roots = Roots.of(production.config.roots, team)
    for path in (job_file, *told):
        roots.require(path, "a path of the example")


def test_the_first_steps_make_a_file_with_the_teams_token_alone(tmp_path):
    lines = [" ".join(words) for words in commands_of(FIRST_STEPS)]
    made = [line for line in lines if re.search("token new|vision.txt", line)]
    script = f"dataservice() {{ '{sys.executable}' -m dataservice.cli.main \"$@\"; }}\n"
    subprocess.run(
        ["sh", "-ec", script + "\n".join(made)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(DEPLOY.parent)},
        check=True,
    )
    printed = [(tmp_path / name).read_text() for name in ("operator.txt", "vision.txt")]
    entries = [entry for each in printed for entry in yaml.safe_load(each.partition("\n")[2])]
    (tmp_path / "tokens.yaml").write_text(yaml.safe_dump(entries))
    token = (tmp_path / "token").read_text().strip()
    assert TokensFile(tmp_path / "tokens.yaml")(token).team == "vision"


def registered(state):
    with closing(sqlite3.connect(state)) as connection:
        return [name for (name,) in connection.execute("SELECT name FROM jobs ORDER BY name")]


def test_restoring_keeps_the_whole_state_of_a_killed_coordinator_for_its_owner_alone(tmp_path):
    command = [sys.executable, "-c", KILLED_COORDINATOR, str(tmp_path)]
    subprocess.run([*command, "before"], cwd=DEPLOY.parent)
    copying = next(words for words in commands_of("Upgrade") if "python" in words)
    copy_state_out(copying, tmp_path)
    for upgrade in ("first", "second"):  # what was kept the time before is no part of it
        subprocess.run([*command, upgrade], cwd=DEPLOY.parent)
        assert (tmp_path / "state.db-wal").stat().st_size > 0
        restore_state(tmp_path)
        assert not (tmp_path / "state.db-wal").exists()
        for name in ("before-upgrade.db", "state.db", "state.too-new.db"):
            assert (tmp_path / name).stat().st_mode & 0o077 == 0, name
        assert registered(tmp_path / "state.too-new.db") == ["before", upgrade]
        assert registered(tmp_path / "state.db") == ["before"]
