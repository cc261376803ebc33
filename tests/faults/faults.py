"""What can go wrong, done to real processes and real connections.

A fault is a context: it strikes when entered and heals when left.
"""

import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

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
Which = Callable[[Path], Sequence[psutil.Process]]
Whom = Callable[[Stage, str], bool]


@dataclass(frozen=True, kw_only=True)
class Fault:
    """`outlasted`: training must come to its end while the fault lasts. So many `unasked`
    launches may fail where the service cannot hide the fault; trainers are `told` then."""

    strike: Strike
    outlasted: bool = False
    unasked: int = 0
    told: str = ""


@contextmanager
def killed(
    stage: Stage, training: Training, *, which: Which, most: int | None = None
) -> Iterator[None]:
    """Processes of the service are gone without a goodbye."""
    kill(which(stage.service.home)[:most])
    yield


@contextmanager
def one_stopped(stage: Stage, training: Training, *, which: Which) -> Iterator[None]:
    """A process of the service stands still, its connections open, until training has ended."""
    with stopped(which(stage.service.home)[:1]):
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
def ranks_killed(stage: Stage, training: Training, *, ranks: Sequence[int] = ()) -> Iterator[None]:
    """These ranks die, or all; the launcher ends what is left and starts all from the
    checkpoint."""
    before = len(training.launches)
    training.kill_ranks(*ranks)
    yield
    wait_for("ranks are launched again", lambda: len(training.launches) > before)


@contextmanager
def ranks_stopped(
    stage: Stage, training: Training, *, ranks: slice, pause_s: float
) -> Iterator[None]:
    """These ranks stand still."""
    with stopped([psutil.Process(pid) for pid in [*training.pids.values()][ranks]]):
        yield
        time.sleep(pause_s)


@contextmanager
def cut(stage: Stage, training: Training, *, whom: Whom) -> Iterator[None]:
    """Connections of the ranks are reset, and refused for a moment."""
    stage.gate.cut(partial(whom, stage))
    with healed(stage, PAUSE_S):
        yield


@contextmanager
def silent(stage: Stage, training: Training, *, whom: Whom, pause_s: float) -> Iterator[None]:
    """The network drops what goes to and from the ranks."""
    stage.gate.silence(partial(whom, stage))
    with healed(stage, pause_s):
        yield


@contextmanager
def worker_silent(stage: Stage, training: Training) -> Iterator[None]:
    """The network drops what goes between the ranks and one worker, for good; the
    coordinator still reaches it."""
    silenced = next(a for a in stage.gate.connected if stage.is_worker(a))
    stage.gate.silence(lambda address: address == silenced)
    with healed(stage):
        yield


@contextmanager
def network_slow(stage: Stage, training: Training) -> Iterator[None]:
    """Everything comes later."""
    stage.gate.delay(lambda _: True, DELAY_S)
    with healed(stage):
        yield


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


ONE, ALL = slice(1, 2), slice(None)
FAULTS: dict[str, Fault] = {
    "worker-killed": Fault(strike=partial(killed, which=processes.workers, most=1)),
    "worker-stopped": Fault(strike=partial(one_stopped, which=processes.workers), outlasted=True),
    "decoder-killed": Fault(strike=partial(killed, which=processes.decoders)),
    "decoder-stopped": Fault(strike=partial(one_stopped, which=processes.decoders), outlasted=True),
    "nursery-killed": Fault(strike=partial(killed, which=processes.nurseries, most=1)),
    "coordinator-killed": Fault(strike=coordinator_killed),
    "coordinator-stopped": Fault(strike=partial(coordinator_stopped, pause_s=PAUSE_S)),
    "coordinator-stopped-long": Fault(strike=partial(coordinator_stopped, pause_s=LONG_PAUSE_S)),
    "node-killed": Fault(strike=node_killed),
    "node-stopped": Fault(strike=node_stopped, outlasted=True),
    "rank-killed": Fault(strike=partial(ranks_killed, ranks=(1,))),
    "rank-stopped": Fault(strike=partial(ranks_stopped, ranks=ONE, pause_s=PAUSE_S)),
    "rank-stopped-long": Fault(strike=partial(ranks_stopped, ranks=ONE, pause_s=LONG_PAUSE_S)),
    "all-ranks-killed": Fault(strike=ranks_killed),
    "all-ranks-stopped": Fault(strike=partial(ranks_stopped, ranks=ALL, pause_s=PAUSE_S)),
    "all-ranks-stopped-long": Fault(strike=partial(ranks_stopped, ranks=ALL, pause_s=LONG_PAUSE_S)),
    "coordinator-cut-off": Fault(strike=partial(cut, whom=Stage.is_coordinator)),
    "coordinator-silent": Fault(strike=partial(silent, whom=Stage.is_coordinator, pause_s=PAUSE_S)),
    "coordinator-silent-long": Fault(
        strike=partial(silent, whom=Stage.is_coordinator, pause_s=LONG_PAUSE_S)
    ),
    "workers-cut-off": Fault(strike=partial(cut, whom=Stage.is_worker)),
    "workers-silent": Fault(strike=partial(silent, whom=Stage.is_worker, pause_s=STALLED_S)),
    "worker-silent": Fault(strike=worker_silent, outlasted=True),
    "network-slow": Fault(strike=network_slow, outlasted=True),
    "disk-full": Fault(strike=disk_full, unasked=40, told="Free space on its disk"),
}


@contextmanager
def healed(stage: Stage, pause_s: float = 0.0) -> Iterator[None]:
    """What was done to the network is undone, at the earliest after a pause."""
    try:
        yield
        time.sleep(pause_s)
    finally:
        stage.gate.heal()


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
