"""A Ray cluster of several nodes on this machine, started by `ray start`: each node can fail
separately.

head     the cluster's directory (GCS); no CPUs, so no worker is placed on it
node k   its CPUs are where workers live; killed, stopped and started one by one
"""

import contextlib
import random
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from soak import processes
from soak.service import child_environment

START_LIMIT_S = 60.0
STORE_BYTES = 80 * 2**20  # the least that Ray accepts; we put nothing there
HOST = "127.0.0.1"


@dataclass
class Node:
    """One node: `ray start --block` and its child processes."""

    home: Path
    arguments: tuple[str, ...]
    log: Path
    environment: dict[str, str]
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> "Node":
        """Start it and wait until it is part of the cluster."""
        ray = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block"]
        with self.log.open("ab") as sink:
            since = sink.tell()
            self.process = subprocess.Popen(
                [*ray, *self.arguments],
                stdout=sink,
                stderr=subprocess.STDOUT,
                env={**child_environment(self.home), **self.environment},
            )
        deadline_s = time.monotonic() + START_LIMIT_S
        while b"Ray runtime started" not in self.log.read_bytes()[since:]:
            given_up = self.process.poll() is not None or time.monotonic() > deadline_s
            assert not given_up, f"no Ray node: {self.log.read_text()[-2000:]}"
            time.sleep(0.05)
        return self

    @property
    def family(self) -> list[psutil.Process]:
        """The node's processes, its workers among them; the youngest come last."""
        assert self.process is not None
        with contextlib.suppress(psutil.NoSuchProcess):
            top = psutil.Process(self.process.pid)
            return [top, *top.children(recursive=True)]
        return []

    def signal(self, number: signal.Signals) -> None:
        """Signal every process of the node at once, as if it were a machine."""
        for process in self.family:
            processes.send(process, number)

    def kill(self) -> None:
        """Send SIGKILL to the whole node."""
        assert self.process is not None
        self.signal(signal.SIGKILL)
        self.process.wait(START_LIMIT_S)


@dataclass
class Cluster:
    """A head and its nodes, marked with `home` like the service that joins them. The service must
    be started with the same `environment`, which has Ray's token."""

    home: Path
    port: int
    environment: dict[str, str]
    head: Node
    nodes: list[Node] = field(default_factory=list)

    @property
    def address(self) -> str:
        """The address at which a service joins."""
        return f"{HOST}:{self.port}"

    def add(self, cpus: int) -> Node:
        """Start one more node."""
        log = self.home / f"ray-node-{len(self.nodes)}.log"
        arguments = ("--address", self.address, "--num-cpus", str(cpus), *_COMMON)
        node = Node(home=self.home, arguments=arguments, log=log, environment=self.environment)
        self.nodes.append(node.start())
        return self.nodes[-1]

    def stop(self) -> None:
        """Send SIGTERM to every node, as `ray stop` does, the head last; this must end them."""
        for node in (*self.nodes, self.head):
            if node.process is not None and node.process.poll() is None:
                node.process.terminate()
                node.process.wait(START_LIMIT_S)


_COMMON = (
    *("--node-ip-address", HOST),
    *("--object-store-memory", str(STORE_BYTES)),
    *("--dashboard-agent-listen-port", "0"),
    *("--metrics-export-port", "0"),
    "--disable-usage-stats",
)


@contextlib.contextmanager
def cluster(
    home: Path, node_cpus: Sequence[int], environment: Mapping[str, str]
) -> Iterator[Cluster]:
    """A cluster with one node for each number of CPUs in `node_cpus`; all of it is killed at the
    end of the block. Workers inherit `environment`."""
    home.mkdir(parents=True, exist_ok=True)
    temp_dir = Path(tempfile.mkdtemp(prefix="ray-"))  # Ray's sockets need a short path
    port = free_port()
    arguments = (
        *("--head", "--port", str(port)),
        *("--num-cpus", "0"),
        *("--temp-dir", str(temp_dir)),
        *("--include-dashboard", "false"),
        *_COMMON,
    )
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    inherited = {**environment, **token}
    head = Node(home=home, arguments=arguments, log=home / "ray-head.log", environment=inherited)
    made = Cluster(home=home, port=port, environment=inherited, head=head)
    try:
        head.start()
        for cpus in node_cpus:
            made.add(cpus)
        yield made
    finally:
        processes.end_family(home)
        for node in (head, *made.nodes):
            if node.process is not None:
                node.process.wait(START_LIMIT_S)
        shutil.rmtree(temp_dir, ignore_errors=True)


def free_port() -> int:
    """A port that is free now, for a process that binds it in some seconds: below those that the
    system gives to whoever asks for any, so that no connection takes it meanwhile."""
    while True:
        port = random.randrange(28000, 32000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((HOST, port))
            return port
