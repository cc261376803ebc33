"""Starts a job's ranks, and starts them again when one dies, as torchrun and a person would.

    launch 1 ──rank dies──► all others are killed ──► launch 2 from the newest checkpoint ──► ...

Every rank is a separate process, forked from a server that has already loaded torch, so that it
starts quickly. A rank that ends with an error though it was not killed is recorded as a finding: a
fault of the service must not end a trainer.
"""

import itertools
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from soak import checkpoint
from soak.journal import steps_of_launch
from soak.rank import RankOptions, run_rank

RANKS = multiprocessing.get_context("forkserver")
RANKS.set_forkserver_preload(["soak.rank"])
KILL_LIMIT_S = 30.0
LOOK_S = 0.2
UNASKED_PAUSE_S = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """One start of all ranks, before `start_step`."""

    number: int
    world_size: int
    start_step: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Connection:
    """How trainers reach the service."""

    address: str
    gate: str = ""
    token: str | None = None


class Training:
    """A job in training, from `start` to the end of its data; see the module's docstring.

    Contract. `finished` is set when every rank of a launch has succeeded, when `stop` was called,
    or when the launcher gave up because more than `most_unasked` launches failed though no rank was
    killed; `failure` then says why.
    """

    # One lock for all trainings: an exit code can be read but once, and starting a process looks
    # whether those of any training have ended.
    _changing = threading.RLock()

    def __init__(
        self,
        folder: Path,
        job: str,
        connection: Connection,
        *,
        world_sizes: Sequence[int],
        steps_per_checkpoint: int = 3,
        pace_s: float = 0.05,
        most_unasked: int = 0,
        limits: dict[str, float] | None = None,
    ) -> None:
        """Launch k has `world_sizes[k]` ranks, in a cycle. `limits` are options of RankOptions."""
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.job = job
        self.connection = connection
        self.launches: list[Launch] = []
        self.unasked: list[str] = []
        self.failure: str | None = None
        self.finished = threading.Event()
        self._world_sizes = itertools.cycle(world_sizes)
        self._most_unasked = most_unasked
        self._ranks: list[ForkServerProcess] = []
        self._asked: set[int] = set()
        self._stopping = False
        self._hold = ""
        self._options = RankOptions(
            folder=folder,
            address=connection.address,
            job=job,
            launch=0,
            rank=0,
            world_size=0,
            state=None,
            steps_per_checkpoint=steps_per_checkpoint,
            pace_s=pace_s,
            gate=connection.gate,
            token=connection.token,
            **(limits or {}),
        )
        self._thread = threading.Thread(target=self._run, name=f"train-{job}", daemon=True)

    def start(self) -> "Training":
        """Launch the ranks; returns at once."""
        self._thread.start()
        return self

    def join(self, limit_s: float) -> None:
        """Wait for the end. Raises AssertionError, with the reason, when training failed."""
        ended = self.finished.wait(limit_s)
        if not ended:
            self.stop()
        assert ended, f"{self.job} did not end within {limit_s:.0f} s: {self.describe()}"
        self._thread.join(KILL_LIMIT_S)
        assert self.failure is None, self.failure

    def stop(self) -> None:
        """Kill all ranks and launch no more."""
        self._stopping = True
        self.kill_ranks()
        self._thread.join(KILL_LIMIT_S)

    # ---- faults ------------------------------------------------------------------------

    @property
    def pids(self) -> dict[int, int]:
        """Process ids of the living ranks, by rank."""
        with self._changing:
            ranks = enumerate(self._ranks)
            return {r: rank.pid for r, rank in ranks if rank.pid is not None and rank.is_alive()}

    def kill_ranks(self, *ranks: int) -> bool:
        """Send SIGKILL to those of these ranks, or of all, that live; False if none does."""
        with self._changing:
            chosen = {r: pid for r, pid in self.pids.items() if not ranks or r in ranks}
            self._asked.update(chosen.values())
            for rank in chosen:
                self._ranks[rank].kill()
        return bool(chosen)

    def hold(self, point: str, step: int) -> None:
        """Have all ranks wait at a point of a step: trained, committed or saving. Ranks that wait
        at another point continue to this one."""
        self._hold = point
        unfinished = self.folder / "hold.tmp"
        unfinished.write_text(f"{point} {step}")
        os.replace(unfinished, self.folder / "hold")

    @property
    def held(self) -> bool:
        """Whether all ranks of this launch wait at the hold."""
        if not self.launches:
            return False
        now = self.launches[-1]
        waiting = list(self.folder.glob(f"held-{self._hold}-{now.number}-*"))
        return len(waiting) == now.world_size

    def release(self) -> None:
        """Let the ranks continue."""
        (self.folder / "hold").unlink(missing_ok=True)

    # ---- what has happened ---------------------------------------------------------------

    @property
    def steps(self) -> int:
        """The number of steps, from the job's first, that every rank of this launch has trained."""
        if not self.launches:
            return 0
        now = self.launches[-1]
        done = steps_of_launch(self.folder / "journal", now.number)
        return now.start_step + (min(done.values()) if len(done) == now.world_size else 0)

    def describe(self) -> str:
        """Launches, steps, and the last lines of the ranks' logs."""
        logs = sorted(self.folder.glob("launch-*.log"))
        words = [f"{path.name}: {text}" for path in logs if (text := path.read_text()[-400:])]
        return "\n".join(
            [f"{len(self.launches)} launches, step {self.steps}", *self.unasked, *words[-6:]]
        )

    # ---- the launcher's thread -----------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stopping and not self._launch():
                pass
        except Exception as error:
            self.failure = f"the launcher of {self.job} failed: {error!r}"
        finally:
            self.finished.set()

    def _launch(self) -> bool:
        """Start all ranks and wait until they have ended; returns True when training is over."""
        saved = checkpoint.newest(self.folder / "checkpoints")
        launch = Launch(
            number=len(self.launches) + 1,
            world_size=next(self._world_sizes),
            start_step=saved.step if saved else 0,
        )
        with self._changing:
            self._ranks = [self._rank(launch, rank, saved) for rank in range(launch.world_size)]
            self.launches.append(launch)
            for process in self._ranks:
                process.start()
        if self._stopping:
            self.kill_ranks()
        self._wait_for_ranks()
        with self._changing:
            ended = self._end_all()
        if all(code == 0 for code in ended.values()):
            return True
        return self._judge(launch, ended)

    def _rank(
        self, launch: Launch, rank: int, saved: checkpoint.Checkpoint | None
    ) -> ForkServerProcess:
        options = replace(
            self._options,
            launch=launch.number,
            rank=rank,
            world_size=launch.world_size,
            state=saved.state if saved else None,
        )
        name = f"{self.job}-{launch.number}-{rank}"
        return RANKS.Process(target=run_rank, args=(options,), name=name, daemon=True)

    def _wait_for_ranks(self) -> None:
        """Wait until all ranks have ended well, or one has failed."""
        running = {rank.sentinel: rank for rank in self._ranks}
        while running:
            for sentinel in wait(list(running), timeout=LOOK_S):
                assert isinstance(sentinel, int)
                rank = running.pop(sentinel)
                with self._changing:
                    rank.join()
                if rank.exitcode != 0:
                    return

    def _end_all(self) -> dict[int, int | None]:
        """Kill the remaining ranks, as a launcher does when one has ended; returns exit codes by
        pid."""
        ended: dict[int, int | None] = {}
        for rank in self._ranks:
            assert rank.pid is not None
            if rank.is_alive():
                self._asked.add(rank.pid)
                rank.kill()
            rank.join(KILL_LIMIT_S)
            ended[rank.pid] = rank.exitcode
        return ended

    def _judge(self, launch: Launch, ended: dict[int, int | None]) -> bool:
        unasked = {
            rank: code
            for rank, (pid, code) in enumerate(ended.items())
            if code != 0 and not (code == -signal.SIGKILL and pid in self._asked)
        }
        if unasked:
            said = [self._last_words(launch, rank) for rank in unasked]
            self.unasked.append(f"launch {launch.number}: ranks ended by {unasked}: {said}")
            time.sleep(UNASKED_PAUSE_S)
        if len(self.unasked) > self._most_unasked:
            self.failure = f"ranks that nobody killed ended: {self.describe()}"
            return True
        return False

    def _last_words(self, launch: Launch, rank: int) -> str:
        log = self.folder / f"launch-{launch.number:04d}-rank-{rank:02d}.log"
        return log.read_text()[-600:].strip() if log.exists() else ""
