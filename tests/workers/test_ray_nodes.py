"""Workers on several Ray nodes: real ones, on this machine, that die as machines do."""

import contextlib
import os
import shutil
import signal
import tempfile
from functools import partial
from pathlib import Path

import pytest
import ray
from ray.cluster_utils import Cluster

from dataservice.workers.ray_pool import (
    SMALLEST_OBJECT_STORE_BYTES,
    RayPoolConfig,
    RayWorkerPool,
    start_ray,
)
from tests.waiting import until
from tests.workers.served import ask, serve

pytestmark = [pytest.mark.xdist_group("ray"), pytest.mark.long]


@pytest.fixture
def cluster():
    """A head that runs no workers. Ray's sockets need a short path."""
    directory = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
    if ray.is_initialized():
        ray.shutdown()
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    Path("/tmp/ray").mkdir(exist_ok=True)  # Ray keeps an address there, whatever `temp_dir` is
    made = Cluster()
    add_node(made, num_cpus=0, temp_dir=directory)
    yield made
    ray.shutdown()
    made.shutdown()
    shutil.rmtree(directory, ignore_errors=True)


def add_node(cluster, **options):
    options |= {"object_store_memory": SMALLEST_OBJECT_STORE_BYTES, "include_dashboard": False}
    return start_ray(partial(cluster.add_node, **options))


def processes_of(node):
    """The processes of a node: its raylet and all below."""
    raylets = [each.process for each in node.all_processes["raylet"]]
    pids = {each.pid for each in raylets}
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            text = stat.read_text()
            parents[int(text.split()[0])] = int(text.rpartition(")")[2].split()[1])
    while more := {pid for pid, parent in parents.items() if parent in pids} - pids:
        pids |= more
    return pids


async def test_workers_of_a_node_that_dies_go_on_at_another(cluster, monkeypatch):
    nodes = [add_node(cluster, num_cpus=1) for _ in range(2)]
    cluster.wait_for_nodes()
    config = RayPoolConfig(
        workers=2,
        address=cluster.address,
        cpus_per_worker=0.5,
        health_interval_s=0.2,
        silent_after_s=60.0,  # a busy machine's silence is no news here
        log_to_driver=False,
        namespace="service-a",
        outlive=True,
    )
    pool = RayWorkerPool(serve=serve, config=config)
    await pool.start()
    before = pool.workers()
    at = {each.worker: (await ask(each.address))[1] for each in before}
    lost = next(node for node in nodes if processes_of(node) & set(at.values()))
    victims = processes_of(lost)
    gone = [each for each in before if at[each.worker] in victims]
    for pid in victims:
        with contextlib.suppress(ProcessLookupError):  # one that has just ended
            os.kill(pid, signal.SIGKILL)
    await until(
        lambda: len(pool.workers()) == 2 and not set(gone) & set(pool.workers()), limit_s=90
    )
    left = next(node for node in nodes if node is not lost)
    after = [(await ask(each.address))[1] for each in pool.workers()]
    assert set(after) <= processes_of(left)
    assert [each for each in pool.workers() if each in before] == [
        each for each in before if each not in gone
    ]
    cluster.remove_node(lost, allow_graceful=False)
    await pool.stop()
