"""The moments at which a fault strikes: each holds the system there, by a deterministic hook.

planning   a plan is made, its record waits for the ledger's lock, the ranks wait for it
decoding   a worker is in the midst of decoding an image, the ranks wait for it
streaming  part of a step's bytes has reached a rank, the rest is on its way
commit     all ranks have trained a step and sent their commits, the ledger has none yet
"""

import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from soak.training import Training
from tests.faults.stage import STEP, Stage, wait_for

STARVED_S = 0.4
ARRIVAL_S = 0.2
PART_BYTES = 4000  # well inside a step's bytes for one rank

Phase = Callable[[Stage, Training], AbstractContextManager[None]]


@contextmanager
def planning(stage: Stage, training: Training) -> Iterator[None]:
    """The next plan cannot be recorded."""
    hold(training)
    with locked(stage.ledger):
        training.release()
        starve(training)
        yield


@contextmanager
def decoding(stage: Stage, training: Training) -> Iterator[None]:
    """Workers wait inside a decoder."""
    hold(training)  # else all of the short epoch may be decoded before the gate is closed
    stage.decoding.close()
    training.release()
    try:
        wait_for("a decoder waits", lambda: bool(stage.decoding.waiting))
        yield
    finally:
        stage.decoding.open()


@contextmanager
def streaming(stage: Stage, training: Training) -> Iterator[None]:
    """A stream to a rank stands still in its midst."""
    hold(training)  # else the ranks may have received all before the gate is set
    stage.gate.hold(stage.is_worker, PART_BYTES)
    training.release()
    try:
        wait_for("a stream is held", stage.gate.holds)
        yield
    finally:
        stage.gate.release()


@contextmanager
def commit(stage: Stage, training: Training) -> Iterator[None]:
    """Commits are under way and cannot be recorded."""
    hold(training)
    with locked(stage.ledger):
        training.hold("committed", STEP)
        wait_for("commits are sent", lambda: training.held)
        time.sleep(ARRIVAL_S)
        try:
            yield
        finally:
            training.release()


PHASES: dict[str, Phase] = {
    "planning": planning,
    "decoding": decoding,
    "streaming": streaming,
    "commit": commit,
}


def hold(training: Training) -> None:
    """Return once all ranks stand behind step STEP, which none of them has committed."""
    training.hold("trained", STEP)
    wait_for(f"step {STEP} is trained", lambda: training.held)


@contextmanager
def locked(ledger: Path) -> Iterator[None]:
    """Hold the lock of the ledger's file, as another writer would."""
    connection = sqlite3.connect(ledger, isolation_level=None)
    try:
        connection.execute("BEGIN IMMEDIATE")
        yield
        connection.execute("ROLLBACK")
    finally:
        connection.close()


def starve(training: Training) -> None:
    """Return once the ranks have used up what was planned."""
    seen, since_s = training.steps, time.monotonic()
    while time.monotonic() - since_s < STARVED_S:
        if (now := training.steps) != seen:
            seen, since_s = now, time.monotonic()
        time.sleep(0.02)
