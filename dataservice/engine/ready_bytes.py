"""The decoded bytes that are held ahead of each team's trainers, and when a step may add to them.

Contract. `admit` waits until a step fits below its team's limit, or until the ranks of its job
wait for this very step: so a limit slows planning ahead, and never stops a job. Whoever
admitted or added a step drops it once workers have released it. All calls are on one event loop.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping

from dataservice.core.plan import StepPlan
from dataservice.core.sample import ItemDetails, Modality
from dataservice.core.team import TeamSpec, team_of

TOKEN_BYTES = 12  # input_ids, position_ids, labels
ITEM_BYTES = {Modality.VISION: 1, Modality.AUDIO: 4}  # of one value


def planned_bytes(plan: StepPlan, items: ItemDetails) -> int:
    """Size of a step's packs once decoded, which have these items. It is exact, since shapes are
    planned."""
    of_items = 0
    if len(items.values):
        of_items = sum(
            size_bytes * int(items.values[items.modality == kind].sum())
            for kind, size_bytes in ITEM_BYTES.items()
        )
    return TOKEN_BYTES * int(plan.padded_sample_tokens.sum()) + of_items


class ReadyBytes:
    """Bytes held for each job, and the limits of the teams that have one."""

    def __init__(self, teams: Callable[[], Mapping[str, TeamSpec]] = dict) -> None:
        """`teams` is asked each time: limits may change while steps wait."""
        self._teams = teams
        self._held: dict[str, int] = {}
        self._waiting: Counter[str] = Counter()
        self._changed = asyncio.Condition()

    def held(self, team: str) -> int:
        """Bytes of all the team's jobs."""
        return sum(size for job, size in self._held.items() if team_of(job) == team)

    def holds_back(self, job: str) -> bool:
        """Whether a step of the job waits until its team holds fewer bytes."""
        return self._waiting[job] > 0

    async def admit(self, job: str, size_bytes: int, *, needed: Callable[[], bool]) -> None:
        """Add a step as soon as it fits or is `needed`. When cancelled, nothing is added."""
        async with self._changed:
            self._waiting[job] += 1
            try:
                await self._changed.wait_for(lambda: needed() or self._fits(job, size_bytes))
            finally:
                self._waiting[job] -= 1
            self.add(job, size_bytes)

    def add(self, job: str, size_bytes: int) -> None:
        """Add a step whatever the limit."""
        self._held[job] = self._held.get(job, 0) + size_bytes

    async def drop(self, job: str, size_bytes: int) -> None:
        """Workers have released a step; others may fit now."""
        left_bytes = self._held.pop(job, 0) - size_bytes  # a step without samples has none
        if left_bytes:
            self._held[job] = left_bytes
        await self.look_again()

    async def look_again(self) -> None:
        """Wake those who wait: something changed."""
        async with self._changed:
            self._changed.notify_all()

    def _fits(self, job: str, size_bytes: int) -> bool:
        team = team_of(job)
        spec = self._teams().get(team)
        if spec is None or spec.max_ready_bytes is None:
            return True
        return self.held(team) + size_bytes <= spec.max_ready_bytes
