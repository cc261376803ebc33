"""Coordinators and workers come and go under running trainers: restarts, an upgrade, a rollback.

The upgrade and the rollback are those of deploy/README.md, command by command. Real processes
stand for the pods: the coordinator, and the nodes of a real Ray on which its workers live.
"""

import json
import os
import re
import shlex
import shutil
import socket
import sqlite3
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from dataservice.core.errors import StateError
from dataservice.state.sqlite import SqliteStateStore
from soak.cluster import Cluster, cluster
from soak.service import ROOT
from tests.deploy.procedure import commands_of, copy_state_out, restore_state
from tests.service.conftest import corpus
from tests.service.support import (
    Ranks,
    ServiceProcess,
    job_file,
    metrics_addresses,
    scraped,
    wait_for,
)

pytestmark = pytest.mark.long

__all__ = ["corpus"]

# What the next release has of its own: another version, and one more table in its state.
NEXT_RELEASE = """
from importlib import metadata
told = metadata.version
metadata.version = lambda name: "99.0.0" if name == "multimodal-dataservice" else told(name)
from dataservice.state import schema
schema.MIGRATIONS = (*schema.MIGRATIONS, "CREATE TABLE news (told TEXT NOT NULL) STRICT;")
"""
WORKERS = 2
EPOCHS = 3  # enough to last through an upgrade


@dataclass
class Operator:
    """Does to processes what kubectl would do to the pods they stand for."""

    service: ServiceProcess
    ray: Cluster
    between: Callable[[], None] = lambda: None
    release: dict[str, str] = field(default_factory=dict)
    held: bool = False
    applied_while_held: bool = False
    done: list[str] = field(default_factory=list)

    def follow(self, commands: list[list[str]], *, release: dict[str, str]) -> list[str]:
        """Do them one by one, with the image of this release once it is applied."""
        self.done = []
        for words in commands:
            line = shlex.join(words)
            chosen = [act for pattern, act in self._acts(release) if re.search(pattern, line)]
            assert chosen, f"the procedure says {line}; tell this test what that does"
            chosen[0](words)
        return self.done

    def _acts(self, release: dict[str, str]) -> list[tuple[str, Callable[[list[str]], None]]]:
        def apply(_: list[str]) -> None:
            self.release = release
            self.applied_while_held = self.held
            if not self.held:
                self.renew_coordinator()

        return [
            (r"exec dataservice-coordinator-0 .* python -c ", self._in_the_pod),
            (r"patch statefulset dataservice-coordinator .*", self._update_strategy),
            (r"apply -k deploy/overlays/production$", apply),
            (r"delete job restore-state --ignore-not-found$", lambda _: None),
            (r"apply -k deploy/examples/restore-state$", self._restore),
            (r"get pods -l .*ray.io/group=decode", lambda _: None),
            (r"delete POD$", lambda _: self.renew_nodes()),
            (r"scale statefulset dataservice-coordinator --replicas 0", lambda _: self._stop()),
            (r"rollout status statefulset/dataservice-coordinator", lambda _: self._serves()),
            (r"wait --for delete pod/dataservice-coordinator-0", lambda _: self._is_gone()),
            (r"wait --for condition=complete job/restore-state", lambda _: None),
        ]

    def _update_strategy(self, words: list[str]) -> None:
        strategy = json.loads(words[-1])["spec"]["updateStrategy"]
        self.held = strategy["type"] == "OnDelete"
        if self.held:  # what Kubernetes has filled in by itself does not go with OnDelete
            assert strategy["rollingUpdate"] is None
        elif self.applied_while_held:
            self.applied_while_held = False
            self.renew_coordinator()

    def _in_the_pod(self, words: list[str]) -> None:
        copy_state_out(words, self.service.state_dir)
        self.done.append("state copied")

    def _restore(self, _: list[str]) -> None:
        self._is_gone()
        restore_state(self.service.state_dir)
        self.done.append("state restored")

    def renew_nodes(self) -> None:
        """Each node is deleted, and another of the release that is applied takes its place."""
        before = workers_of(self.service)
        for number, node in enumerate(self.ray.nodes):
            node.kill()
            environment = {**self.ray.environment, **self.release}
            self.ray.nodes[number] = replace(node, environment=environment).start()
        wait_for(lambda: len(workers_of(self.service).keys() - before) == WORKERS)
        self.done.append("workers")
        self.between()

    def renew_coordinator(self) -> None:
        """The StatefulSet starts its pod again, by the template that it has now."""
        if self._runs:
            self._stop()
        self.service.environment = {**self.ray.environment, **self.release}
        self.service.start()
        self.done.append("coordinator")
        self.between()

    @property
    def _runs(self) -> bool:
        assert self.service.process is not None
        return self.service.process.poll() is None

    def _stop(self) -> None:
        self.service.stop()

    def _serves(self) -> None:
        assert not self.held, "kubectl refuses to tell the status of updates under OnDelete"
        assert self._runs
        assert listens(self.service.address)

    def _is_gone(self) -> None:
        assert not self._runs


@pytest.fixture(scope="module")
def ray(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A real Ray that asks for a token, with room for one worker more than the service has."""
    home = tmp_path_factory.mktemp("service")
    with cluster(home, (3,), {}) as made:
        yield made


@pytest.fixture(scope="module")
def stranger(
    ray: Cluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator["Future[ServiceProcess]"]:
    """A service with another token, which tries to join the Ray while the other tests run: Ray
    asks for many seconds before it gives up."""
    environment = {**ray.environment, "RAY_AUTH_TOKEN": "bad0" * 16}
    made = ServiceProcess(
        home=tmp_path_factory.mktemp("stranger"),
        pool="ray",
        environment={**environment, "RAY_gcs_rpc_server_connect_timeout_s": "1"},
    )
    made.flags = ("--ray-address", ray.address, "--workers", "1")
    with ThreadPoolExecutor(1) as aside:
        yield aside.submit(made.start)
    made.end()


@pytest.fixture(scope="module")
def service(ray: Cluster, stranger: object) -> Iterator[ServiceProcess]:
    made = ServiceProcess(home=ray.home, pool="ray", environment=ray.environment)
    made.flags = (
        *("--ray-address", ray.address, "--workers", str(WORKERS)),
        *("--metrics-listen", "127.0.0.1:0"),
    )
    yield made.start()
    made.end()


@pytest.fixture(scope="module")
def next_release(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment in which every Python process is one of the next release."""
    home = tmp_path_factory.mktemp("next-release")
    (home / "sitecustomize.py").write_text(NEXT_RELEASE)
    return {"PYTHONPATH": os.pathsep.join([str(home), str(ROOT)])}


def workers_of(service: ServiceProcess) -> dict[str, str]:
    """The address of each worker by name."""
    listed = json.loads(service.cli("workers", "list", "--json").stdout)
    return {each["worker"]: each["address"] for each in listed}


def found_packs(service: ServiceProcess) -> float:
    """How many packs this coordinator did not have to have decoded."""
    series = scraped(metrics_addresses(service)[-1])
    return series.get(("dataservice_found_packs_total", frozenset({("job", "job")})), 0.0)


def listens(address: str) -> bool:
    host, _, port = address.rpartition(":")
    with socket.socket() as asked:
        return asked.connect_ex((host, int(port))) == 0


def schema_version(state: Path) -> int:
    with closing(sqlite3.connect(state)) as connection:
        (version,) = connection.execute("SELECT MAX(version) FROM migrations").fetchone()
        return int(version)


def trained_on(ranks: Ranks) -> None:
    """Wait until the ranks have trained a step more."""
    before = ranks.steps_done
    wait_for(lambda: ranks.steps_done > before or ranks.errors)
    assert not ranks.errors


def test_workers_outlive_coordinators_and_are_renewed_under_a_job(corpus, tmp_path, service):
    service.cli("job", "submit", str(job_file(corpus, tmp_path, epochs=EPOCHS)))
    samples = json.loads(service.cli("job", "list", "--json").stdout)[0]["samples"]
    first = workers_of(service)
    ranks = Ranks(service.address, 3, pace_s=0.3, hold_at=2).start()
    for end in (service.kill, service.stop):
        wait_for(lambda: ranks.held or ranks.errors)
        end()
        service.start()
        assert workers_of(service) == first
        wait_for(lambda: found_packs(service) > 0)
        ranks.release(ranks.hold_at + 2)
    wait_for(lambda: ranks.held or ranks.errors)
    ranks.release()
    said = service.cli("workers", "restart").stdout
    # A successor that takes long to start is given up, and its worker drains before the next.
    replaced = dict(re.findall(r"(worker-[01]\.1) is replaced by (worker-[01]\.[2-9])", said))
    assert set(replaced) == {"worker-0.1", "worker-1.1"}
    assert set(workers_of(service)) == set(replaced.values())
    ranks.join()
    assert len(ranks.visits) == samples
    assert set(ranks.visits.values()) == {EPOCHS}
    assert "is lost" not in service.log.read_text()


def test_the_upgrade_and_its_rollback_lose_nothing_in_the_order_that_is_written(
    corpus, tmp_path, service, ray, next_release
):
    service.cli("job", "submit", str(job_file(corpus, tmp_path, job="upgraded", epochs=EPOCHS)))
    state = service.state_dir / "state.db"
    known = schema_version(state)
    ranks = Ranks(service.address, 3, job="upgraded", pace_s=1.5).start()
    trained_on(ranks)
    operator = Operator(service=service, ray=ray, between=lambda: trained_on(ranks))
    (service.state_dir / "before-upgrade.db").write_text("of the upgrade before this one")
    done = operator.follow(commands_of("Upgrade"), release=next_release)
    assert done == ["state copied", "workers", "coordinator"]
    assert not operator.held
    assert schema_version(state) == known + 1
    assert schema_version(service.state_dir / "before-upgrade.db") == known
    said = service.log.read_text()
    # A worker that is busy may take too long to introduce itself, and is replaced for that.
    assert re.search("coordinator (was started with other settings|does not answer): it is", said)
    assert "goes on serving" not in said
    upgraded = workers_of(service)
    trained_on(ranks)
    ranks.stop_at_one_step()

    service.flags = (*service.flags, "--stop-workers")
    operator.between = lambda: None
    done = operator.follow(commands_of("Rollback"), release={})
    assert done == ["state restored", "coordinator", "workers"]
    assert schema_version(state) == known
    shutil.copy(service.state_dir / "state.too-new.db", tmp_path / "state.db")
    with pytest.raises(StateError, match=f"version {known + 1}; this release knows up to {known}"):
        SqliteStateStore(tmp_path)
    again = Ranks(service.address, 4, job="upgraded").start(state=ranks.state).join()
    visits = ranks.visits + again.visits
    assert set(visits.values()) == {EPOCHS}
    assert len(visits) == json.loads(service.cli("job", "list", "--json").stdout)[0]["samples"]
    rolled_back = workers_of(service)
    assert not set(rolled_back.values()) & set(upgraded.values())

    service.stop()  # with --stop-workers nothing is left
    assert not any(map(listens, rolled_back.values()))


def test_a_service_with_another_token_does_not_get_into_the_ray(ray, stranger):
    refused = f"Ray at {ray.address} cannot be used.*RAY_AUTH_TOKEN"
    with pytest.raises(AssertionError, match=refused):
        stranger.result()
