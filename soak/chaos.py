"""Random faults for the soak, each on real processes or connections, drawn from a seed."""

import random
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import psutil

from soak import processes
from soak.cluster import Cluster
from soak.gate import Gate
from soak.service import ServiceProcess
from soak.training import Training

LONGEST_PAUSE_S = 2.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """The processes and connections that may be hit now. `hit` names the job whose ranks were hit,
    if the fault hit one job's ranks."""

    service: ServiceProcess
    gate: Gate
    cluster: Cluster | None
    trainings: Sequence[Training]
    rng: random.Random
    hit: list[str] = field(default_factory=list)

    def one_training(self) -> Training:
        """The job to hit."""
        chosen = self.rng.choice(self.trainings)
        self.hit.append(chosen.job)
        return chosen


Strike = Callable[[Target], bool]
"""Hit something; False when there was nothing to hit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """A kind of fault, and how often it is drawn. `kills`: it ends a process by SIGKILL;
    `spares_coordinator`: it does not hit the coordinator."""

    strike: Strike
    weight: float
    kills: bool = True
    spares_coordinator: bool = True


def _kill_one(target: Target, found: Sequence[psutil.Process]) -> bool:
    return bool(found) and processes.send(target.rng.choice(found), signal.SIGKILL)


def worker(target: Target) -> bool:
    """Send SIGKILL to a worker."""
    return _kill_one(target, processes.workers(target.service.home))


def decoder(target: Target) -> bool:
    """Send SIGKILL to a decoder process."""
    return _kill_one(target, processes.decoders(target.service.home))


def nursery(target: Target) -> bool:
    """Send SIGKILL to the process that forks a worker's decoders."""
    return _kill_one(target, processes.nurseries(target.service.home))


def coordinator(target: Target) -> bool:
    """Send SIGKILL to the coordinator, and start it again at once."""
    target.service.kill()
    target.service.start()
    return True


def ray_node(target: Target) -> bool:
    """Send SIGKILL to all processes of a Ray node, and start another in its place."""
    if target.cluster is None:
        return False
    node = target.rng.choice(target.cluster.nodes)
    node.kill()
    node.start()
    return True


def one_rank(target: Target) -> bool:
    """Send SIGKILL to one rank of one job."""
    training = target.one_training()
    living = [*training.pids]
    return bool(living) and training.kill_ranks(target.rng.choice(living))


def all_ranks(target: Target) -> bool:
    """Send SIGKILL to every rank of one job."""
    return target.one_training().kill_ranks()


def worker_pause(target: Target) -> bool:
    """Send SIGSTOP to a worker, and SIGCONT a moment later."""
    found = processes.workers(target.service.home)
    return bool(found) and _pause(target, target.rng.choice(found))


def rank_pause(target: Target) -> bool:
    """Send SIGSTOP to a rank, and SIGCONT a moment later."""
    pids = [*target.one_training().pids.values()]
    try:
        return bool(pids) and _pause(target, psutil.Process(target.rng.choice(pids)))
    except psutil.NoSuchProcess:
        return False


def coordinator_pause(target: Target) -> bool:
    """Send SIGSTOP to the coordinator, and SIGCONT a moment later."""
    return _pause(target, psutil.Process(target.service.pid))


def coordinator_cut(target: Target) -> bool:
    """Reset and refuse connections to the coordinator for a moment."""
    return _cut(target, lambda address: address == target.service.address)


def workers_cut(target: Target) -> bool:
    """Reset and refuse connections to the workers for a moment."""
    return _cut(target, lambda address: address != target.service.address)


def network_silence(target: Target) -> bool:
    """Let nothing pass between trainers and service for a moment, and close nothing."""
    target.gate.silence(lambda _: True)
    time.sleep(target.rng.uniform(0.1, LONGEST_PAUSE_S))
    target.gate.heal()
    return True


KINDS: dict[str, Kind] = {
    "rank": Kind(strike=one_rank, weight=24),
    "all ranks": Kind(strike=all_ranks, weight=10),
    "worker": Kind(strike=worker, weight=16),
    "decoder": Kind(strike=decoder, weight=20),
    "nursery": Kind(strike=nursery, weight=6),
    "Ray node": Kind(strike=ray_node, weight=3),
    "coordinator": Kind(strike=coordinator, weight=8, spares_coordinator=False),
    "worker paused": Kind(strike=worker_pause, weight=3, kills=False),
    "rank paused": Kind(strike=rank_pause, weight=3, kills=False),
    "coordinator paused": Kind(strike=coordinator_pause, weight=2, kills=False),
    "coordinator cut off": Kind(strike=coordinator_cut, weight=3, kills=False),
    "workers cut off": Kind(strike=workers_cut, weight=3, kills=False),
    "network silent": Kind(strike=network_silence, weight=2, kills=False),
}


def draw(rng: random.Random, *, spare_coordinator: bool) -> str:
    """Draw the next kind of fault."""
    names = [
        name for name, kind in KINDS.items() if kind.spares_coordinator or not spare_coordinator
    ]
    return rng.choices(names, [KINDS[name].weight for name in names])[0]


def _pause(target: Target, process: psutil.Process) -> bool:
    if not processes.send(process, signal.SIGSTOP):
        return False
    time.sleep(target.rng.uniform(0.1, LONGEST_PAUSE_S))
    return processes.send(process, signal.SIGCONT)


def _cut(target: Target, which: Callable[[str], bool]) -> bool:
    target.gate.cut(which)
    time.sleep(target.rng.uniform(0.0, LONGEST_PAUSE_S / 2))
    target.gate.heal()
    return True
