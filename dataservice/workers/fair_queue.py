"""Samples that wait for a slot of a worker, and which is decoded next.

    teams, by weight ──► jobs of the team, equally ──► packs by step, then place in the step

The queue shares slot-seconds fairly between teams, and between the jobs of one team (see
core/fair_share.py); within a job, the sample that its trainers need first comes first. It is
work-conserving: a slot stays empty only when nothing waits, or when every waiting sample belongs to
a team at its own `limit`.

A limit is a token bucket: it fills with `limit` slot-seconds per second and slot, up to a small
burst, and decoding empties it. Pure: the caller supplies the time.

Reading ahead has a queue of the same kind, whose places are reads (see read_ahead.py).
"""

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from dataservice.core.fair_share import FairShare, Run
from dataservice.core.orders import PackKey, PackOrder, PackSample
from dataservice.core.sample import SampleLengths
from dataservice.core.team import TeamShare, team_of
from dataservice.workers.read_sample import ReadSample

BURST_S = 1.0
SHORTEST_PAUSE_S = 0.001
FIRST_GUESS_S = 1e-4  # seconds a token, until one sample has been measured
MEMORY = 0.98  # weight of a sample in the mean, relative to that of the sample after it


@dataclass(frozen=True, kw_only=True, slots=True)
class TeamLoad:
    """A team's samples that wait for a slot, and the slot-seconds spent on the team so far."""

    team: str
    queued: int
    decode_s: float


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Task:
    """A sample of a pack, to be decoded. `place` is its place in the pack. `read` is the sample as
    it was read ahead, which took `ahead_s`; `in_slot` says that its slot is to read it."""

    key: PackKey
    place: int
    sample: PackSample
    pipeline: str
    read: ReadSample | None = None
    ahead_s: float = 0.0
    in_slot: bool = False


def tasks_of(order: PackOrder) -> list[Task]:
    """The samples of a pack, in its order."""
    return [
        Task(key=order.key, place=place, sample=sample, pipeline=order.pipeline)
        for place, sample in enumerate(order.samples)
    ]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Begun:
    """A task that has a slot."""

    task: Task
    run: Run


@dataclass(kw_only=True, slots=True)
class _Speed:
    """Decayed mean of seconds a token."""

    seconds: float = 0.0
    tokens: float = 0.0

    def learn(self, tokens: float, seconds: float) -> None:
        self.seconds = MEMORY * self.seconds + seconds
        self.tokens = MEMORY * self.tokens + tokens


@dataclass(kw_only=True, slots=True)
class _Line:
    """A job's packs in the order in which they are needed. Withdrawn packs leave the heap when they
    reach its top."""

    packs: dict[PackKey, deque[Task]] = field(default_factory=dict)
    heap: list[tuple[int, int, str]] = field(default_factory=list)
    job: str

    def first(self) -> deque[Task]:
        """Tasks of the first pack. The job must have a pack."""
        while (tasks := self.packs.get(self._key())) is None:
            heapq.heappop(self.heap)
        return tasks

    def add(self, key: PackKey, tasks: Iterable[Task]) -> None:
        there = self.packs.get(key)
        if there is not None:
            there.extend(tasks)
            return
        self.packs[key] = deque(tasks)
        heapq.heappush(self.heap, (key.step, key.pack, key.plan_digest))

    def _key(self) -> PackKey:
        step, pack, digest = self.heap[0]
        return PackKey(job=self.job, step=step, plan_digest=digest, pack=pack)


@dataclass(kw_only=True, slots=True)
class _Team:
    name: str
    share: TeamShare
    bucket_s: float
    filled_s: float
    queued: int = 0
    decode_s: float = 0.0
    speed: _Speed = field(default_factory=_Speed)
    jobs: FairShare[str] = field(default_factory=FairShare)
    lines: dict[str, _Line] = field(default_factory=dict)


class FairQueue:
    """Orders go in, samples come out one by one. Times come from any monotonic clock. Nothing
    comes out of a team that may not begin now, by `may_begin`."""

    def __init__(self, *, slots: int, may_begin: Callable[[str], bool] = lambda team: True) -> None:
        self._slots = slots
        self._may_begin = may_begin
        self._teams: dict[str, _Team] = {}
        self._shares: FairShare[str] = FairShare()
        self._speed = _Speed()

    @property
    def queued(self) -> int:
        """Samples that wait for a slot."""
        return sum(team.queued for team in self._teams.values())

    def push(self, order: PackOrder, now_s: float) -> None:
        """Add a pack's samples. The order's `share` is the team's share from now on."""
        self.add(order.key, tasks_of(order), order.share, now_s)

    def add(self, key: PackKey, tasks: Sequence[Task], share: TeamShare, now_s: float) -> None:
        """Add samples of a pack, of which others may be here or have been."""
        name = team_of(key.job)
        team = self._teams.get(name)
        if team is None:
            burst_s = self._burst_s(share)
            team = self._teams[name] = _Team(
                name=name, share=share, bucket_s=burst_s, filled_s=now_s
            )
        team.share = share
        if tasks:
            team.lines.setdefault(key.job, _Line(job=key.job)).add(key, tasks)
            team.jobs.wants(key.job)
            team.queued += len(tasks)

    def withdraw(self, key: PackKey) -> Sequence[Task]:
        """Forget the samples of this pack that have no slot yet, if there are any; they are
        returned."""
        team = self._teams.get(team_of(key.job))
        line = team.lines.get(key.job) if team is not None else None
        if team is None or line is None or key not in line.packs:
            return ()
        tasks = line.packs.pop(key)
        team.queued -= len(tasks)
        self._close_empty(team, line)
        return tasks

    def next(
        self, now_s: float, *, only: Callable[[Task, float], bool] = lambda task, seconds: True
    ) -> Begun | None:
        """The sample to decode now; its team is charged the estimated seconds. None when no sample
        may be decoded now, or when `only`, which gets the task and the estimate, refuses it."""
        for team in self._teams.values():
            self._throttle(team, now_s)
        name = self._shares.lowest(now_s)
        if name is None:
            return None
        team = self._teams[name]
        job = team.jobs.lowest(now_s)
        assert job is not None, "a team that waits has a job that waits"
        line = team.lines[job]
        tasks = line.first()
        estimate_s = self._estimate_s(team, tasks[0])
        if not only(tasks[0], estimate_s):
            return None
        task = tasks.popleft()
        run = Run(started_s=now_s, charged_s=estimate_s)
        self._shares.begin(name, run)
        team.jobs.begin(job, run)
        team.bucket_s -= run.charged_s
        team.queued -= 1
        if not tasks:
            del line.packs[task.key]
            self._close_empty(team, line)
        return Begun(task=task, run=run)

    def done(self, begun: Begun, seconds: float) -> None:
        """The sample kept its slot for this many seconds; its team and its job are charged for
        them."""
        key, run = begun.task.key, begun.run
        team = self._teams[team_of(key.job)]
        self._shares.end(team.name, run, seconds)
        team.jobs.end(key.job, run, seconds)
        team.bucket_s += run.charged_s - seconds
        team.decode_s += seconds
        tokens = decode_tokens(begun.task.sample.lengths)
        for speed in (team.speed, self._speed):
            speed.learn(tokens, seconds)

    def give_back(self, begun: Begun) -> None:
        """The sample has not used its slot, for which nobody is charged; it is not queued again."""
        key, run = begun.task.key, begun.run
        team = self._teams[team_of(key.job)]
        self._shares.end(team.name, run, 0.0)
        team.jobs.end(key.job, run, 0.0)
        team.bucket_s += run.charged_s

    def pause_s(self, now_s: float) -> float | None:
        """Seconds until a team at its limit may continue; None when no team waits at its limit."""
        pauses = [
            -self._allowance_s(team, now_s) / (team.share.limit * self._slots)
            for team in self._teams.values()
            if team.queued and self._allowance_s(team, now_s) <= 0
        ]
        return max(SHORTEST_PAUSE_S, min(pauses)) if pauses else None

    def teams(self) -> tuple[TeamLoad, ...]:
        """Every team that has been served here."""
        return tuple(
            TeamLoad(team=team.name, queued=team.queued, decode_s=team.decode_s)
            for team in self._teams.values()
        )

    def _throttle(self, team: _Team, now_s: float) -> None:
        """Treats a team at its limit as one without work, so that waiting earns it no credit."""
        if team.queued and self._may_begin(team.name) and self._allowance_s(team, now_s) > 0:
            self._shares.wants(team.name, weight=team.share.weight)
        else:
            self._shares.rests(team.name)

    def _allowance_s(self, team: _Team, now_s: float) -> float:
        """Slot-seconds that the team may take now. Fills its bucket up to now."""
        if team.share.limit >= 1:
            return float("inf")
        gained_s = (now_s - team.filled_s) * team.share.limit * self._slots
        team.bucket_s = min(self._burst_s(team.share), team.bucket_s + gained_s)
        team.filled_s = now_s
        return team.bucket_s

    def _burst_s(self, share: TeamShare) -> float:
        return BURST_S * share.limit * self._slots

    def _estimate_s(self, team: _Team, task: Task) -> float:
        tokens = decode_tokens(task.sample.lengths)
        for speed in (team.speed, self._speed):
            if speed.tokens > 0:
                return tokens * speed.seconds / speed.tokens
        return tokens * FIRST_GUESS_S

    def _close_empty(self, team: _Team, line: _Line) -> None:
        if not line.packs:
            del team.lines[line.job]
            team.jobs.rests(line.job)


def decode_tokens(lengths: SampleLengths) -> float:
    """The cost of decoding a sample, in tokens: pixels and sound dominate, text is cheap."""
    return lengths.llm_tokens + 4.0 * sum(item.encoder_tokens for item in lengths.items)
