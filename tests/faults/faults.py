"""What can go wrong, done to real processes and real connections.

A fault is a context: it strikes when entered and heals when left.
"""

import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial

import psutil

from soak import processes
from soak.cluster import Node
from soak.training import Training
from tests.faults import disk
from tests.faults.stage import Stage, wait_for

PAUSE_S = 1.0
STALLED_S = 10.0  # ranks give a stream up after 4
LONG_PAUSE_S = 45.0  # keepalive gives up after 20 at the service, after 30 at the ranks
DELAY_S = 0.1

Strike = Callable[[Stage, Training], AbstractContextManager[None]]


@dataclass(frozen=True, kw_only=True)
class Fault:
    """`outlasted`: training must come to its end while the fault lasts. So many `unasked`
    launches may fail where the service cannot hide the fault; trainers are `told` then."""

    strike: Strike
    outlasted: bool = False
    unasked: int = 0
    told: str = ""


@contextmanager
def worker_killed(stage: Stage, training: Training) -> Iterator[None]:
    """One worker is gone without a goodbye."""
    kill(processes.workers(stage.service.home)[:1])
    yield


@contextmanager
def worker_stopped(stage: Stage, training: Training) -> Iterator[None]:
    """One worker stands still, its connections open, and comes back when it was replaced."""
    with stopped(processes.workers(stage.service.home)[:1]):
        yield


@contextmanager
def decoder_killed(stage: Stage, training: Training) -> Iterator[None]:
    """Every decoding process is gone; in the decoding phase, those in the midst of a sample."""
    kill(processes.decoders(stage.service.home))
    yield


@contextmanager
def decoder_stopped(stage: Stage, training: Training) -> Iterator[None]:
    """One decoding process stands still until training has ended."""
    with stopped(processes.decoders(stage.service.home)[:1]):
        yield


@contextmanager
def nursery_killed(stage: Stage, training: Training) -> Iterator[None]:
    """The process that forks a worker's decoders is gone, and they with it."""
    kill(processes.nurseries(stage.service.home)[:1])
    yield


@contextmanager
def coordinator_killed(stage: Stage, training: Training) -> Iterator[None]:
    """The coordinator is gone and is started again over its state."""
    stage.service.kill()
    yield
    stage.service.start()


@contextmanager
def coordinator_stopped(stage: Stage, training: Training, *, pause_s: float) -> Iterator[None]:
    """The coordinator stands still."""
    with stopped([psutil.Process(stage.service.pid)]):
        yield
        time.sleep(pause_s)


@contextmanager
def rank_killed(stage: Stage, training: Training) -> Iterator[None]:
    """One rank dies; its launcher ends the others and starts all from the checkpoint."""
    before = len(training.launches)
    training.kill_ranks(1)
    yield
    wait_for("ranks are launched again", lambda: len(training.launches) > before)


@contextmanager
def rank_stopped(stage: Stage, training: Training, *, pause_s: float) -> Iterator[None]:
    """One rank stands still."""
    with stopped([psutil.Process(training.pids[1])]):
        yield
        time.sleep(pause_s)


@contextmanager
def all_ranks_killed(stage: Stage, training: Training) -> Iterator[None]:
    """Every rank dies at once."""
    before = len(training.launches)
    training.kill_ranks()
    yield
    wait_for("ranks are launched again", lambda: len(training.launches) > before)


@contextmanager
def all_ranks_stopped(stage: Stage, training: Training, *, pause_s: float) -> Iterator[None]:
    """Every rank stands still."""
    with stopped([psutil.Process(pid) for pid in training.pids]):
        yield
        time.sleep(pause_s)


@contextmanager
def coordinator_cut(stage: Stage, training: Training) -> Iterator[None]:
    """Connections to the coordinator are reset, and refused for a moment."""
    stage.gate.cut(stage.is_coordinator)
    try:
        yield
        time.sleep(PAUSE_S)
    finally:
        stage.gate.heal()


@contextmanager
def coordinator_silent(stage: Stage, training: Training, *, pause_s: float) -> Iterator[None]:
    """The network drops what goes between the ranks and the coordinator."""
    stage.gate.silence(stage.is_coordinator)
    try:
        yield
        time.sleep(pause_s)
    finally:
        stage.gate.heal()


@contextmanager
def workers_cut(stage: Stage, training: Training) -> Iterator[None]:
    """Connections to all workers are reset, and refused for a moment."""
    stage.gate.cut(stage.is_worker)
    try:
        yield
        time.sleep(PAUSE_S)
    finally:
        stage.gate.heal()


@contextmanager
def workers_silent(stage: Stage, training: Training) -> Iterator[None]:
    """The network drops what goes between the ranks and all workers, for longer than ranks wait
    for a stream."""
    stage.gate.silence(stage.is_worker)
    try:
        yield
        time.sleep(STALLED_S)
    finally:
        stage.gate.heal()


@contextmanager
def worker_silent(stage: Stage, training: Training) -> Iterator[None]:
    """The network drops what goes between the ranks and one worker, for good; the
    coordinator still reaches it."""
    silenced = next(a for a in stage.gate.connected if stage.is_worker(a))
    stage.gate.silence(lambda address: address == silenced)
    try:
        yield
    finally:
        stage.gate.heal()


@contextmanager
def network_slow(stage: Stage, training: Training) -> Iterator[None]:
    """Everything comes later."""
    stage.gate.delay(lambda _: True, DELAY_S)
    try:
        yield
    finally:
        stage.gate.heal()


@contextmanager
def disk_full(stage: Stage, training: Training) -> Iterator[None]:
    """The disk of the state directory is full until trainers have been told so, or did not
    notice."""
    disk.fill(stage.service.state_dir)
    try:
        yield
        wait_for(
            "trainers are told that the disk is full",
            lambda: bool(training.unasked) or training.finished.is_set(),
            limit_s=60.0,
        )
    finally:
        disk.free(stage.service.state_dir)


@contextmanager
def node_killed(stage: Stage, training: Training) -> Iterator[None]:
    """A Ray node with its worker is gone at once; another is started in its place."""
    node = node_in_use(stage)
    node.kill()
    yield
    node.start()


@contextmanager
def node_stopped(stage: Stage, training: Training) -> Iterator[None]:
    """A Ray node with its worker stands still until training has ended."""
    node = node_in_use(stage)
    node.signal(signal.SIGSTOP)
    try:
        yield
    finally:
        node.signal(signal.SIGCONT)


def node_in_use(stage: Stage) -> Node:
    """A node of the stage's cluster on which a worker runs."""
    assert stage.cluster is not None, "this fault needs a stage with a Ray cluster"
    at_work = {process.pid for process in processes.workers(stage.service.home)}
    return next(
        node for node in stage.cluster.nodes if at_work & {process.pid for process in node.family}
    )


FAULTS: dict[str, Fault] = {
    "worker-killed": Fault(strike=worker_killed),
    "worker-stopped": Fault(strike=worker_stopped, outlasted=True),
    "decoder-killed": Fault(strike=decoder_killed),
    "decoder-stopped": Fault(strike=decoder_stopped, outlasted=True),
    "nursery-killed": Fault(strike=nursery_killed),
    "coordinator-killed": Fault(strike=coordinator_killed),
    "coordinator-stopped": Fault(strike=partial(coordinator_stopped, pause_s=PAUSE_S)),
    "coordinator-stopped-long": Fault(strike=partial(coordinator_stopped, pause_s=LONG_PAUSE_S)),
    "node-killed": Fault(strike=node_killed),
    "node-stopped": Fault(strike=node_stopped, outlasted=True),
    "rank-killed": Fault(strike=rank_killed),
    "rank-stopped": Fault(strike=partial(rank_stopped, pause_s=PAUSE_S)),
    "rank-stopped-long": Fault(strike=partial(rank_stopped, pause_s=LONG_PAUSE_S)),
    "all-ranks-killed": Fault(strike=all_ranks_killed),
    "all-ranks-stopped": Fault(strike=partial(all_ranks_stopped, pause_s=PAUSE_S)),
    "all-ranks-stopped-long": Fault(strike=partial(all_ranks_stopped, pause_s=LONG_PAUSE_S)),
    "coordinator-cut-off": Fault(strike=coordinator_cut),
    "coordinator-silent": Fault(strike=partial(coordinator_silent, pause_s=PAUSE_S)),
    "coordinator-silent-long": Fault(strike=partial(coordinator_silent, pause_s=LONG_PAUSE_S)),
    "workers-cut-off": Fault(strike=workers_cut),
    "workers-silent": Fault(strike=workers_silent),
    "worker-silent": Fault(strike=worker_silent, outlasted=True),
    "network-slow": Fault(strike=network_slow, outlasted=True),
    "disk-full": Fault(strike=disk_full, unasked=40, told="Free space on its disk"),
}


def kill(found: Sequence[psutil.Process]) -> None:
    """SIGKILL to processes that must exist."""
    assert found, "there is no such process to kill"
    for process in found:
        processes.send(process, signal.SIGKILL)


@contextmanager
def stopped(found: Sequence[psutil.Process]) -> Iterator[None]:
    """SIGSTOP, and SIGCONT at the end."""
    assert found, "there is no such process to stop"
    for process in found:
        processes.send(process, signal.SIGSTOP)
    try:
        yield
    finally:
        for process in found:
            processes.send(process, signal.SIGCONT)
