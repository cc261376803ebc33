"""Threads for the heavy work of jobs, shared fairly between teams.

    run(job, work) ──► queue of its team ──► lowest tag ──► thread ──► result

Contract. Teams take turns by the seconds that their work has taken, over their weights, and the
jobs of one team by theirs (see core/fair_share.py); work of one job begins in the order in which it
came. Where there are several threads, no team has all of them, so that the work of others need not
wait for its own; and where work may hang, no job has all that its team may have. Work whose caller
is cancelled before it begins is never begun; once begun it goes on to its end, for a thread cannot
be stopped. All calls are on one event loop.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from dataservice.core.fair_share import FairShare, Run
from dataservice.core.team import NO_TEAM, TeamSpec, team_of
from dataservice.core.threads import CallThreads

Result = TypeVar("Result")


@dataclass(kw_only=True, slots=True, eq=False)
class _Team:
    """A team's waiting work by job, how many works of each job are `running`, the order of its
    `jobs`, and the seconds that the last work of each job took."""

    waiting: dict[str, deque[tuple[Callable[[], Any], asyncio.Future[Any]]]]
    jobs: FairShare[str]
    last_s: dict[str, float]
    running: Counter[str]


class FairThreads:
    """A number of `threads`, which teams take turns at."""

    def __init__(
        self,
        name: str,
        *,
        threads: int,
        teams: Callable[[], Mapping[str, TeamSpec]] = dict,
        for_all: bool = True,
        may_hang: bool = False,
    ) -> None:
        """`teams` is asked each time: weights may change. `for_all` is as of `CallThreads`. Work
        that `may_hang` waits for what others answer, such as storage."""
        self._calls = CallThreads(name, threads, for_all=for_all)
        self._threads = self._free = threads
        self._specs = teams
        self._may_hang = may_hang
        self._shares: FairShare[str] = FairShare()
        self._teams: dict[str, _Team] = {}

    async def run(self, job: str, work: Callable[[], Result]) -> Result:
        """Do a job's work when its turn comes. Raises what the work raises."""
        future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        name = team_of(job)
        team = self._teams.get(name)
        if team is None:
            team = self._teams[name] = _Team(
                waiting={}, jobs=FairShare(), last_s={}, running=Counter()
            )
        team.waiting.setdefault(job, deque()).append((work, future))
        self._note(name, team, job)
        self._fill()
        return await future

    def most_of(self, team: str) -> int:
        """How many threads a team may have at once."""
        return self._threads if team == NO_TEAM else max(1, self._threads - 1)

    def most_of_job(self, team: str) -> int:
        """How many threads one job of a team may have at once."""
        return max(1, self.most_of(team) - self._may_hang)

    def close(self) -> None:
        """Begin nothing more. What runs goes on to its end."""
        self._calls.close()

    def _note(self, name: str, team: _Team, job: str) -> None:
        """Something changed for a job. It, or its team, counts as without work while it has as many
        threads as it may, so that waiting for more earns it no credit."""
        if job in team.waiting and team.running[job] < self.most_of_job(name):
            team.jobs.wants(job)
        else:
            team.jobs.rests(job)
        if team.jobs.wanting and team.running.total() < self.most_of(name):
            self._shares.wants(name, weight=self._specs().get(name, TeamSpec()).weight)
        else:
            self._shares.rests(name)
        if not team.waiting and not team.running:
            self._teams.pop(name, None)

    def _fill(self) -> None:
        now_s = asyncio.get_running_loop().time()
        while self._free and (name := self._shares.lowest(now_s)) is not None:
            team = self._teams[name]
            job = team.jobs.lowest(now_s)
            assert job is not None, "a team that wants a turn has a job that does"
            work, future = team.waiting[job].popleft()
            if not team.waiting[job]:
                del team.waiting[job]
            if not future.done():
                self._begin(name, job, work, future)
            self._note(name, team, job)

    def _begin(
        self, name: str, job: str, work: Callable[[], Any], future: asyncio.Future[Any]
    ) -> None:
        loop, team = asyncio.get_running_loop(), self._teams[name]
        run = Run(started_s=loop.time(), charged_s=team.last_s.get(job, 0.0))
        self._shares.begin(name, run)
        team.jobs.begin(job, run)
        self._free -= 1
        team.running[job] += 1
        running = self._calls.begin(work)
        running.add_done_callback(partial(self._ended, name, job, run, future))

    def _ended(
        self, name: str, job: str, run: Run, future: asyncio.Future[Any], ran: asyncio.Future[Any]
    ) -> None:
        team, now_s = self._teams[name], asyncio.get_running_loop().time()
        seconds = team.last_s[job] = now_s - run.started_s
        self._shares.end(name, run, seconds)
        team.jobs.end(job, run, seconds)
        self._free += 1
        team.running -= Counter([job])  # drops what is zero
        self._note(name, team, job)
        self._fill()
        if ran.cancelled():
            future.cancel()
        elif (error := ran.exception()) is None:
            if not future.done():
                future.set_result(ran.result())
        elif not future.done():  # else whoever asked is gone
            future.set_exception(error)
