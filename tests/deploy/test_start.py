"""The coordinator of an overlay, started for real: its command, its config, Ray by the rendered
flags and with a token, TLS and tokens of teams; then the example's trainer, from first shard to
checkpoint. Only paths, ports and addresses are of this machine.
"""

import json
import os
import random
import re
import secrets
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme
import yaml
from grpc_health.v1 import health_pb2, health_pb2_grpc

from dataservice.jobs.indexing import index_job
from dataservice.jobs.job_file import read_job
from dataservice.operate.tokens_file import make_token
from demo.tokenizer import train_tokenizer
from tests.deploy.agreement import start_flags
from tests.deploy.cluster import DEPLOY, Cluster
from tests.deploy.network import port_range
from tests.waiting import wait_for

HOST = "127.0.0.2"  # Ray would replace 127.0.0.1 by this machine's own address
START_LIMIT_S = 120.0
ROOT = DEPLOY.parent
CLI = [sys.executable, "-m", "dataservice.cli.main"]


@pytest.fixture
def dev(rendered) -> Cluster:
    return Cluster(rendered["dev"])


# Not of those that the kernel gives to whoever asks for any, between our choice and its use; nor of
# those that this and other tests name.
PORTS = iter(random.sample(range(12_000, 19_000), 2_000))


def free_ports(count: int) -> list[int]:
    found: list[int] = []
    while len(found) < count:
        port = next(PORTS)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("", port))  # Ray listens on every address
            found.append(port)
    return found


@contextmanager
def running(
    command: list[str], log: Path, env: dict[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    """A process in a session of its own; whatever is left of that is killed in the end."""
    with log.open("wb") as sink:
        process = subprocess.Popen(
            command, stdout=sink, stderr=sink, env=env, cwd=ROOT, start_new_session=True
        )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(timeout=3)  # a Ray node would drain for half a minute
        except subprocess.TimeoutExpired:
            process.kill()
        for left in of_session(process.pid):
            with suppress(ProcessLookupError):
                os.kill(left, signal.SIGKILL)
        process.wait()


def of_session(leader: int) -> list[int]:
    """Processes of a session, the leader not among them."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            process, _, rest = stat.read_text().partition(" ")
            if int(rest.rpartition(")")[2].split()[3]) == leader != int(process):
                found.append(int(process))
    return found


def ray_start(flags: list[str], first_port: int, **changes: str) -> list[str]:
    """`ray start` by the overlay's flags: ports of this machine, one range a node."""
    given = dict(flag[2:].partition("=")[::2] for flag in flags if flag.startswith("--"))
    names = [name for name in given if name.endswith("-port") and not name.endswith("worker-port")]
    given |= dict(zip(names, map(str, free_ports(len(names))), strict=True))
    given |= {"min-worker-port": str(first_port), "max-worker-port": str(first_port + 99)}
    given |= {"node-ip-address": HOST, "block": ""} | changes
    words = [f"--{name}={value}" if value else f"--{name}" for name, value in given.items()]
    return [str(Path(sys.executable).with_name("ray")), "start", *words]


@contextmanager
def ray_cluster(dev: Cluster, home: Path, env: dict[str, str]) -> Iterator[str]:
    """Head and one more node: the coordinator's raylet, with the CPUs of a worker pod."""
    (ray,) = dev.rayclusters
    group = ray["spec"]["workerGroupSpecs"][0]
    (port,) = free_ports(1)
    address = f"{HOST}:{port}"
    head = start_flags(ray["spec"]["headGroupSpec"]["rayStartParams"])
    node = dev.pods["coordinator"].container("raylet")["command"]
    cpus = {"num-cpus": group["rayStartParams"]["num-cpus"]}
    temp = f"/tmp/r{secrets.token_hex(3)}"  # Ray's sockets allow no long path
    command = [*ray_start(head, 21000, port=str(port)), "--head", f"--temp-dir={temp}"]
    with running(command, home / "head.log", env):
        # A node gives up where the head is not there in time, as it may not be on a busy machine.
        wait_for(lambda: listens(port), START_LIMIT_S)
        with running(ray_start(node, 21200, address=address, **cpus), home / "node.log", env):
            yield address


def listens(port: int) -> bool:
    with socket.socket() as asked:
        return asked.connect_ex((HOST, port)) == 0


def local_config(dev: Cluster, home: Path, ray_address: str) -> dict[str, Any]:
    """The rendered service.yaml with its folders under `home`, and free ports."""
    (config_map,) = [c for c in dev.of("ConfigMap") if "service.yaml" in c["data"]]
    text = config_map["data"]["service.yaml"]
    for folder in ("/etc/dataservice", "/var/lib/dataservice", "/data"):
        text = re.sub(rf"(?<![\w/]){folder}", f"{home}{folder}", text)
    plain: dict[str, Any] = yaml.safe_load(text)
    for key, port in zip(("listen", "health_listen", "metrics_listen"), free_ports(3), strict=True):
        plain[key] = f"{HOST}:{port}"
    return {**plain, "ray_address": ray_address}


def make_secrets(home: Path) -> str:
    """What the README has the operator make, and cert-manager; returns the team's token."""
    folders = {name: home / "etc/dataservice" / name for name in ("tls", "tokens", "worker-secret")}
    for folder in (*folders.values(), home / "var/lib/dataservice"):
        folder.mkdir(parents=True)
    authority = trustme.CA()
    issued = authority.issue_cert("dataservice")
    issued.private_key_pem.write_to_path(folders["tls"] / "tls.key")
    issued.cert_chain_pems[0].write_to_path(folders["tls"] / "tls.crt")
    authority.cert_pem.write_to_path(folders["tls"] / "ca.crt")
    (folders["worker-secret"] / "secret").write_bytes(secrets.token_bytes(32))
    (folders["worker-secret"] / "secret").chmod(0o440)
    token, record = make_token(team="vision", role="team")
    entry = record.model_dump(mode="json", exclude_none=True)
    (folders["tokens"] / "tokens.yaml").write_text(yaml.safe_dump([entry]))
    return token


def make_job(home: Path) -> Path:
    """A small job of text under /data, indexed."""
    data = home / "data" / "vision" / "vlm-sft"
    data.mkdir(parents=True)
    lines = [{"id": f"t{k}", "text": "the quick brown fox jumps " * (k + 1)} for k in range(12)]
    (data / "text.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    train_tokenizer(data, data / "tokenizer")
    plain = {
        "job": "vlm-sft",
        "sources": [{"name": "text", "format": "jsonl", "url": "text.jsonl"}],
        "index": "index",
        "pipeline": {"tokenizer": "tokenizer"},
        "batch": {"samples": 4},
        "plan": {"memory_tokens": 512},
    }
    path = data / "job.yaml"
    path.write_text(yaml.safe_dump(plain))
    index_job(read_job(path.read_text(), data), custom_processors={})
    return path


def wait_until_serving(
    address: str, service: str, process: subprocess.Popen[bytes], log: Path
) -> None:
    """Ask as the kubelet does, in plaintext, until the answer is SERVING."""
    deadline_s = time.monotonic() + START_LIMIT_S
    with grpc.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        while time.monotonic() < deadline_s and process.poll() is None:
            try:
                answer = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=10)
                if answer.status == health_pb2.HealthCheckResponse.SERVING:
                    return
            except grpc.RpcError:
                pass  # nobody is there yet
            time.sleep(0.2)
    raise AssertionError(log.read_text()[-4000:])


@pytest.mark.long
def test_the_rendered_coordinator_feeds_the_example_trainer_and_stops_in_time(dev, tmp_path):
    token, job = make_secrets(tmp_path), make_job(tmp_path)
    pod = dev.pods["coordinator"]
    container = pod.container("coordinator")
    env = os.environ | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    with ray_cluster(dev, tmp_path, env) as ray_address:
        config = local_config(dev, tmp_path, ray_address)
        (tmp_path / "service.yaml").write_text(yaml.safe_dump(config))
        program, *words = container["command"]
        assert program == "dataservice"
        words[words.index("--config") + 1] = str(tmp_path / "service.yaml")
        command = [*CLI, *words]
        log = tmp_path / "coordinator.log"
        with running(command, log, env) as coordinator:
            probe = container["readinessProbe"]["grpc"]
            wait_until_serving(config["health_listen"], probe["service"], coordinator, log)
            pattern = r"worker-0\.1 serves at \S+:(\d+)"
            served = wait_for(lambda: re.search(pattern, log.read_text()), START_LIMIT_S)
            assert int(served[1]) in port_range(config["worker_ports"])
            (first, *_) = port_range(config["worker_metrics_ports"])
            with urllib.request.urlopen(f"http://{HOST}:{first}/metrics", timeout=30) as answer:
                assert 'dataservice_worker_decoding_slots{worker="worker-0.1"} 2.0' in (
                    answer.read().decode()
                )

            ca = tmp_path / "etc/dataservice/tls/ca.crt"
            (tmp_path / "token").write_text(token)
            submit(job, config["listen"], ca, tmp_path / "token")
            said = train(dev, config["listen"], ca, tmp_path)
            assert "step 0: waited" in said
            assert "step 2: waited" in said  # twelve samples, four a step
            assert (tmp_path / "checkpoint.pt").exists()

            coordinator.send_signal(signal.SIGTERM)
            grace_s = pod.spec["terminationGracePeriodSeconds"]
            assert coordinator.wait(timeout=grace_s) == 0, log.read_text()[-4000:]


def submit(job: Path, address: str, ca: Path, token: Path) -> None:
    """As the README's step 8 says."""
    options = ["--token-file", str(token), "--ca-file", str(ca), "--server-name", "dataservice"]
    done = subprocess.run(
        [*CLI, "job", "submit", str(job), "--service", address, *options],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr


def train(dev: Cluster, address: str, ca: Path, home: Path) -> str:
    """The example's script as its only rank; its output."""
    (port,) = free_ports(1)
    environment = {
        "DATASERVICE_ADDRESS": address,
        "DATASERVICE_JOB": "vlm-sft",
        "DATASERVICE_TOKEN_FILE": str(home / "token"),
        "DATASERVICE_CA_FILE": str(ca),
        "CHECKPOINT_DIR": str(home),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
    }
    done = subprocess.run(
        [sys.executable, str(DEPLOY / "examples" / "trainer" / "train.py")],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout
