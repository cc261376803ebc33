"""The threads in which steps are planned and their samples looked up.

    cursor ──planners──► samples drawn ──fetchers──► their rows at hand ──planners──► step
                                           └─ only of an index that is still being read

Planners are for all teams, and a team's storage may hang: none of them waits for it. Fetchers do.
Where an index is at hand, nothing is asked of them, as others may have them wait.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from dataservice.core.cursor import Cursor
from dataservice.core.job_setup import JobSetup
from dataservice.engine.fair_threads import FairThreads
from dataservice.engine.planner import drawn_ids

Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True, slots=True)
class StepThreads:
    """Both kinds of threads, each shared fairly by the teams."""

    planners: FairThreads
    fetchers: FairThreads

    async def plan(self, setup: JobSetup, cursor: Cursor, planning: Callable[[], Result]) -> Result:
        """What `planning` makes of the step at `cursor` where nothing but its plan is wanted. That
        asks for more than lengths only where the job weighs its loss."""
        if setup.loss_weights:
            await self.fetch(setup, cursor)
        return await self.planners.run(setup.record.name, planning)

    async def fetch(self, setup: JobSetup, cursor: Cursor) -> None:
        """Have all at hand that can be asked of the samples of the step at `cursor`."""
        job, catalog = setup.record.name, setup.catalog
        if not catalog.at_hand:
            ids = await self.planners.run(job, partial(drawn_ids, setup, cursor))
            await self.fetchers.run(job, partial(catalog.fetch, ids))

    async def look_up(self, setup: JobSetup, asking: Callable[[], Result]) -> Result:
        """The result of `asking` the job's index for more than lengths."""
        threads = self.planners if setup.catalog.at_hand else self.fetchers
        return await threads.run(setup.record.name, asking)

    def close(self) -> None:
        """Begin nothing more. What runs goes on to its end."""
        self.planners.close()
        self.fetchers.close()
