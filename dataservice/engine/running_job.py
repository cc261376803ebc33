"""A job with its attempts, as the coordinator holds it in memory."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from dataservice.core.errors import NotFoundError, ServiceError
from dataservice.core.job import JobRecord
from dataservice.core.job_setup import JobSetup
from dataservice.engine.attempt import Attempt
from dataservice.engine.launches import Launches
from dataservice.engine.loop import AttemptLoop
from dataservice.engine.tasks import SharedWork
from dataservice.engine.versions import VersionHistory


@dataclass(slots=True, kw_only=True)
class RunningJob:
    """A job with its attempts: those that form, by launch, and the one that runs. `setups` has the
    job under each version of its file that is in use. `setting_up` opens and restores it, and
    `checking` checks whether the index is current, by the version of its file. `history`
    is of its file's versions. `deleted` is for ranks that still ask then."""

    record: JobRecord
    setups: dict[int, JobSetup] = field(default_factory=dict)
    forming: dict[str, Attempt] = field(default_factory=dict)
    launches: Launches = field(default_factory=Launches)
    attempt: Attempt | None = None
    loop: AttemptLoop | None = None
    restored: bool = False
    opening: asyncio.Lock = field(default_factory=asyncio.Lock)
    changing: asyncio.Lock = field(default_factory=asyncio.Lock)
    beginning: asyncio.Lock = field(default_factory=asyncio.Lock)
    planning: asyncio.Lock = field(default_factory=asyncio.Lock)
    setting_up: SharedWork[JobSetup] = field(default_factory=SharedWork)
    checking: SharedWork[None] = field(default_factory=SharedWork)
    history: VersionHistory = field(default_factory=VersionHistory)
    deleted: bool = False

    @property
    def setup(self) -> JobSetup | None:
        """The job under the newest version of its file, if it is open."""
        return self.setups.get(self.record.spec_version)

    def forming_of(self, launch: str) -> Attempt | None:
        """The attempt that a launch's ranks wait for."""
        attempt = self.forming.get(launch)
        return None if attempt is None or attempt.over else attempt

    @property
    def newest_forming(self) -> Attempt | None:
        """The attempt that began to form last, of those that still form."""
        return next((each for each in reversed(self.forming.values()) if not each.over), None)

    @property
    def attempts(self) -> list[Attempt]:
        """Those that form, and the one that runs."""
        running = [] if self.attempt is None else [self.attempt]
        return [*self.forming.values(), *running]

    @property
    def clients(self) -> list[str]:
        """The trainers that hold ranks of it."""
        return [client for each in self.attempts if not each.over for client in each.clients]

    @asynccontextmanager
    async def change(self) -> AsyncIterator[None]:
        """Holds `changing` for a change that is stored under its name. Raises NotFoundError where
        it was deleted while that was waited for: another job may bear its name by now."""
        async with self.changing:
            if self.deleted:
                raise was_deleted(self.record.name)
            yield

    def forget(self, reason: ServiceError) -> None:
        """It is registered no more: whoever still asks for it is told why."""
        self.deleted = True
        for attempt in self.attempts:  # a rank may have come meanwhile
            attempt.end(reason)

    def keep_setups(self, running: int) -> None:
        """Forget the versions that no attempt uses, but for the newest."""
        kept = {running, self.record.spec_version}
        kept.update(each.spec_version for each in self.forming.values())
        self.setups = {v: setup for v, setup in self.setups.items() if v in kept}


def was_deleted(name: str) -> NotFoundError:
    """What ranks of a deleted job are told."""
    return NotFoundError(f"job {name!r} was deleted. Submit it again to train.")
