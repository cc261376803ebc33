"""Jobs are opened in a few threads, which teams take turns at.

    asked for: submitted, a rank waits ──► FairThreads ──► a process of its own
    after a restart, for nobody yet ──► gap ──┘

Opening a job reads what its team wrote, and may take up to the operator's limit. So no team has all
of the threads, and they do nothing else. A job that nobody waits for is opened only in a thread
that would have stayed free: whoever asks for another one finds no queue of those before it.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import ParamSpec, TypeVar

from dataservice.core.errors import ConflictError, QuotaError
from dataservice.core.team import NO_TEAM, TeamSpec, full_name, team_of
from dataservice.engine.fair_threads import FairThreads
from dataservice.engine.tasks import detach
from dataservice.engine.waiters import Waiters

MOST_WAITING = 64

Given = ParamSpec("Given")
Result = TypeVar("Result")


class Openings:
    """Runs what opens jobs, in threads of its own. Used on one event loop."""

    def __init__(self, *, at_once: int, teams: Callable[[], Mapping[str, TeamSpec]] = dict) -> None:
        """`teams` is asked each time: weights may change."""
        self._closed = False
        self._threads = FairThreads(
            "opening", threads=at_once, teams=teams, for_all=False, may_hang=True
        )
        self._submitted: Counter[str] = Counter()
        self._taken: Counter[str] = Counter()  # begun, waiting, or in a gap
        self._in_gaps: set[str] = set()
        self._one_over = Waiters()

    async def run(
        self, team: str, work: Callable[Given, Result], *args: Given.args, **more: Given.kwargs
    ) -> Result:
        """The result of a team's `work`, which is not cancelled with its caller once begun. Raises
        what the work raises, and QuotaError where too many calls of the team wait already."""
        if self._submitted[team] >= MOST_WAITING:
            raise QuotaError(
                f"{MOST_WAITING} jobs of this team wait to be opened, and no more may. Try again "
                "once they are."
            )
        call, name = partial(work, *args, **more), full_name(team, "")
        return await asyncio.shield(self._begun(name, call, self._submitted, self._taken))

    async def run_registered(self, job: str, work: Callable[[], Result]) -> Result:
        """The same for a job that is registered, whose openings take turns: as many may wait as the
        team has jobs, as they do when a service starts again under all their ranks."""
        counted = () if job in self._in_gaps else (self._taken,)
        return await asyncio.shield(self._begun(job, work, *counted))

    @asynccontextmanager
    async def gap(self, job: str) -> AsyncIterator[None]:
        """Begins once an opening of this registered job would begin at once; one within does."""
        team = team_of(job)
        while not self._has_room(team):
            await self._one_over.next_change()
        self._taken[team] += 1
        self._in_gaps.add(job)
        try:
            yield
        finally:
            self._in_gaps.remove(job)
            self._is_over(team, self._taken)

    def most_of(self, team: str) -> int:
        """How many openings of a team go on at once."""
        return self._threads.most_of(team)

    def close(self) -> None:
        """Begin nothing any more. Does not wait for what has begun."""
        self._closed = True

    def _begun(
        self, job: str, work: Callable[[], Result], *counted: Counter[str]
    ) -> asyncio.Task[Result]:
        team = team_of(job)
        for counts in counted:
            counts[team] += 1
        task = detach(self._threads.run(job, partial(self._unless_closed, work)))
        task.add_done_callback(lambda _: self._is_over(team, *counted))
        return task

    def _is_over(self, team: str, *counted: Counter[str]) -> None:
        for counts in counted:
            counts[team] -= 1
            if not counts[team]:
                del counts[team]
        self._one_over.wake()

    def _unless_closed(self, work: Callable[[], Result]) -> Result:
        if self._closed:
            raise ConflictError("the service is stopping. Ask again once it is back.")
        return work()

    def _has_room(self, team: str) -> bool:
        in_all = sum(map(self._threads_of, self._taken))
        return self._threads_of(team) < self.most_of(team) and in_all < self.most_of(NO_TEAM)

    def _threads_of(self, team: str) -> int:
        """How many threads a team has or will have once it may: its submissions are one job."""
        submitted = self._submitted[team]
        asked = min(submitted, self._threads.most_of_job(team)) + self._taken[team] - submitted
        return min(asked, self.most_of(team))
