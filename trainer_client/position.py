"""The position of a loop: which of the shards handed out count as trained in a saved state.

    handed out  0  1  2  3  4  5     a loop          its position is after
                ────────────────▶    only iterates   the last shard handed out, torch's convention
                                                     for stateful datasets
    taken up    ──────────▶          calls `to`      the last that `Shard.to` was called on
    committed   ───────▶             commits         the last committed

A loop that never commits, and saves a state, means that it has trained every shard it was given;
StatefulDataLoader and accelerate follow this convention and keep a state for each shard. Loaders
that fetch ahead (Lightning's) call `Shard.to` on a shard when its turn comes, which tells the
position. A loop that calls `commit` tells it exactly: once its loader was seen to run ahead,
nothing else counts. Where the position stays uncertain, a warning says so once.
"""

import math
from collections import deque
from dataclasses import dataclass

from trainer_client.errors import StateMismatch
from trainer_client.notices import UncommittedSteps, tell

STATE_VERSION = 1
# Largest number of shards handed out that the first `commit` may still go back by.
MOST_AHEAD = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Position:
    """The step to train next. `cursor` comes from the service; it is empty at the beginning."""

    step: int
    cursor: str


def to_state(position: Position, job: str) -> dict[str, str | int]:
    """The `state_dict` of a job's dataset at this position."""
    return {
        "version": STATE_VERSION,
        "job": job,
        "step": position.step,
        "cursor": position.cursor,
    }


def from_state(state: dict[str, str | int], job: str) -> Position:
    """The position of a `state_dict`. Raises StateMismatch where it is of another job or version,
    or no state of a dataset."""
    if not isinstance(state, dict) or not {"version", "job", "step", "cursor"} <= state.keys():
        raise StateMismatch(
            f"not a state_dict of ShardDataset: {str(state)[:120]}. It has version, job, step "
            "and cursor."
        )
    if state["version"] != STATE_VERSION:
        raise StateMismatch(
            f"the state_dict has version {state['version']}, this client reads version "
            f"{STATE_VERSION}. Resume with the release that wrote it."
        )
    if state["job"] != job:
        raise StateMismatch(
            f"the state_dict belongs to job {state['job']!r}, this dataset to {job!r}. Load the "
            "checkpoint of this job."
        )
    return Position(step=int(state["step"]), cursor=str(state["cursor"]))


class Progress:
    """The position through one loop after another, from what each loop does. For one thread."""

    def __init__(self, start: Position, *, job: str) -> None:
        self._job = job
        self._before = start  # after the last shard that is certainly trained
        self._handed: deque[Position] = deque()  # after each shard of this pass, oldest first
        self._forgotten = -1  # after the last of them that is not kept any more
        self._taken: int | None = None  # after the last shard that a framework took up
        self._committed = start.step  # after the last that `commit` named
        self._counted = start.step  # after the last that a state counted as trained by convention
        self._commits = False  # whether the loop calls `commit`
        self._runs_ahead = False  # whether shards are handed out before they are trained
        self._usual = 0.0  # shards handed out after the committed one, at the last commit
        self._told = False

    @property
    def start(self) -> Position:
        """Where the next pass begins: a shard that is not certainly trained comes again."""
        return self._before

    @property
    def last_handed(self) -> int:
        """The last step that was handed out, or trained before."""
        return (self._handed[-1] if self._handed else self._before).step - 1

    @property
    def by_commit_alone(self) -> bool:
        """Whether asking for the next shard says nothing about the ones before."""
        return self._commits and self._runs_ahead

    def expect_commits(self) -> None:
        """Nothing counts as trained from here on until it is committed."""
        self._commits = self._runs_ahead = True
        self._usual = math.inf

    def begin(self) -> None:
        """A new pass."""
        if self._counted > self._before.step:
            self._tell(
                f"step {self._before.step} comes again, though a state saved before stands behind "
                f"step {self._counted - 1}: the loop was left without a commit. Commit each step "
                "that is trained, or load that state before iterating again."
            )
        self._handed.clear()
        self._forgotten = -1
        self._counted, self._taken = self._before.step, None

    def hand(self, position: Position) -> None:
        """A shard is handed out; `position` is the one after it."""
        self._handed.append(position)
        while not self.by_commit_alone and len(self._handed) > MOST_AHEAD:
            self._forgotten = self._handed.popleft().step

    def ask(self) -> None:
        """The next shard is asked for: those before it count as trained, unless the loader is
        known to run ahead."""
        if self._handed and not self.by_commit_alone:
            self._before = self._handed[-1]

    def take(self, step: int) -> None:
        """A framework moves a shard to where it will train it."""
        if self._taken is not None and step < self._taken:
            return
        if step < self._counted:
            self._tell_counted(step)
        self._taken = step + 1

    def commit(self, step: int) -> bool:
        """A loop says that it has trained `step` and all before it; False if that was known."""
        if step < self._committed or not self._handed:
            return False
        if step + 1 < self._handed[0].step:
            if step < self._forgotten:
                self._tell_forgotten(step)
            return False
        if step < self._counted:
            self._tell_counted(step)
        self._usual = sum(position.step > step + 1 for position in self._handed)
        self._commits = True
        self._runs_ahead |= self._usual > 0
        self._before = max(
            (position for position in self._handed if position.step <= step + 1),
            key=lambda position: position.step,
        )
        self._committed = self._before.step
        while self._handed and self._handed[0].step < self._committed:
            self._handed.popleft()
        return True

    def next_uncommitted(self, count: int) -> int | None:
        """The step of the `count`-th shard handed out after the committed ones, or of the last if
        there are fewer; None if there is none."""
        waiting = [p.step - 1 for p in self._handed if p.step > self._committed][:count]
        return waiting[-1] if waiting else None

    def saved(self) -> Position:
        """The position that a state keeps."""
        ahead = [position for position in self._handed if position.step > self._before.step]
        if self._commits:
            if len(ahead) > self._usual:
                self._tell(
                    f"a state was saved behind step {self._before.step - 1}, but steps up to "
                    f"{ahead[-1].step - 1} have been handed out and not committed: a run resumed "
                    "from it trains them again. Commit a step before saving behind it."
                )
            return self._before
        if self._taken is not None:
            ahead = [position for position in ahead if position.step <= self._taken]
        trained = ahead[-1] if ahead else self._before
        self._counted = max(self._counted, trained.step)
        return trained

    def _tell_counted(self, step: int) -> None:
        self._tell(
            f"step {step} is only trained now, but a state saved before already stands behind step "
            f"{self._counted - 1}, as all that had been handed out counted as trained: a run "
            "resumed from it leaves steps out. Save behind commits alone: commit each step that is "
            "trained, and call expect_commits() before the first if a loader runs ahead."
        )

    def _tell_forgotten(self, step: int) -> None:
        self._tell(
            f"step {step} is committed when step {self.last_handed} is handed out already, and a "
            f"first commit goes back by {MOST_AHEAD} steps at most: it moves nothing, and a run "
            "resumed from a state leaves steps out. Call expect_commits() before the first shard "
            "where a loader runs so far ahead."
        )

    def _tell(self, text: str) -> None:
        if not self._told:
            self._told = True
            tell(UncommittedSteps, f"uncommitted steps of job {self._job!r}: {text}")
