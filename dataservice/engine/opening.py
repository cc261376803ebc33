"""Jobs are opened: those of one team one after another, of a few teams at a time.

Opening a job reads what its team wrote, and may take up to the operator's limit. A team that
submits many jobs waits for its own; these threads do nothing else, so that no other request waits
for them.
"""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable
from functools import partial
from typing import ParamSpec, TypeVar

from dataservice.core.errors import ConflictError, QuotaError
from dataservice.engine.tasks import detach
from dataservice.engine.threads import in_opening

AT_ONCE = in_opening.threads
MOST_WAITING = 64

Given = ParamSpec("Given")
Result = TypeVar("Result")


class Openings:
    """Runs what opens jobs, in threads of its own. Used on one event loop."""

    def __init__(self) -> None:
        self._closed = False
        self._own_turn: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._free = asyncio.Semaphore(AT_ONCE)
        self._waiting: Counter[str] = Counter()

    async def run(
        self, team: str, work: Callable[Given, Result], *args: Given.args, **more: Given.kwargs
    ) -> Result:
        """The result of a team's `work`, which is not cancelled with its caller once begun. Raises
        what the work raises, and QuotaError where too many calls of the team wait already."""
        if self._waiting[team] >= MOST_WAITING:
            raise QuotaError(
                f"{MOST_WAITING} jobs of this team wait to be opened, and no more may. Try again "
                "once they are."
            )
        self._waiting[team] += 1
        opening = detach(self._run(team, partial(work, *args, **more)))
        opening.add_done_callback(lambda _: self._no_longer_waits(team))
        return await asyncio.shield(opening)

    async def run_registered(self, team: str, work: Callable[[], Result]) -> Result:
        """The same for a job that is registered, whose openings take turns: as many may wait as the
        team has jobs, as they do when a service starts again under all their ranks."""
        return await asyncio.shield(detach(self._run(team, work)))

    async def _run(self, team: str, work: Callable[[], Result]) -> Result:
        async with self._own_turn[team], self._free:
            if self._closed:
                raise ConflictError("the service is stopping. Ask again once it is back.")
            return await in_opening(work)

    def _no_longer_waits(self, team: str) -> None:
        self._waiting[team] -= 1
        if not self._waiting[team]:
            del self._waiting[team]

    def close(self) -> None:
        """Begin nothing any more. Does not wait for what has begun."""
        self._closed = True
