"""The attempts of jobs: formed while ranks open, made durable, begun, restored, rejoined.

    forming ──all ranks──► recorded ──► older one fenced ──► loop started ──► complete
                              ▲                                                  ▲
                 a newer coordinator restores the last one ──────────────────────┘

Contract. An attempt is durable before anyone is told of it. It forms of one launch's ranks;
several launches may form theirs at once. Attempts of one job begin one after another; a newer
complete attempt fences the older one, and those that form of older launches, whose ranks get
FencedError. An older launch begins none while a newer one trains: launches are ordered by when
the service first saw them. Ranks whose launch has no name form attempts among themselves. After a
restart of the coordinator the last attempt of each job is restored complete, and its ranks
rejoin it one by one where they were.
"""

import logging
import time
from collections.abc import Sequence

from dataservice.core.cursor import Cursor
from dataservice.core.errors import ConflictError, FencedError, QuotaError, ServiceError
from dataservice.core.job import AttemptRecord, SkipRecord
from dataservice.core.job_setup import JobSetup
from dataservice.core.topology import Topology
from dataservice.core.whereabouts import Whereabouts
from dataservice.engine.attempt import Attempt, Claim
from dataservice.engine.job_statistics import JobStatistics
from dataservice.engine.loop import AttemptLoop, LoopPorts
from dataservice.engine.running_job import RunningJob, was_deleted
from dataservice.engine.skips import Skips
from dataservice.engine.tasks import to_its_end
from dataservice.engine.threads import in_store

log = logging.getLogger(__name__)

MOST_ATTEMPTS = 20_000
"""Attempts of one job: each is recorded for as long as the job is there."""
MOST_FORMING = 64
"""Launches of one job that may wait for their ranks at once: a restart that overtakes another has
two."""


class Attempts:
    """Begins and restores attempts; each job's own are in its `RunningJob`."""

    def __init__(self, ports: LoopPorts, statistics: JobStatistics) -> None:
        self._ports = ports
        self._store = ports.store
        self._statistics = statistics

    def forming(
        self,
        job: RunningJob,
        rank: int,
        client: str,
        setup: JobSetup,
        topology: Topology,
        cursor: Cursor,
        launch: str,
    ) -> Attempt:
        """The attempt that a rank may join now: one that forms of its launch, or a new one.
        Raises ConflictError where the job drains, RankClaimedError where another client holds the
        rank, FencedError where a newer launch trains, QuotaError where too many form, NotFoundError
        where the job was deleted since the rank asked."""
        if job.deleted:
            raise was_deleted(job.record.name)
        if job.record.state == "draining":
            raise ConflictError(
                f"job {job.record.name!r} is draining and takes no new attempt. Submit its "
                "job file again with `dataservice job submit JOB.yaml`, and it does."
            )
        running = job.attempt
        if running is not None and not running.over:
            if running.launch == launch or not (running.launch and launch):
                running.refuse_if_claimed(rank, client)
            _require_newest(job, launch, client)
        job.launches.see(launch)
        live = [each for each in job.forming.values() if not each.over]
        if not any(job.launches.replaces(each.launch, launch) for each in live):
            job.launches.renew(launch)
        attempt = job.forming_of(launch)
        if attempt is None:
            if len(live) >= MOST_FORMING:
                raise QuotaError(
                    f"{len(live)} starts of job {job.record.name!r} wait for ranks already, and no "
                    "more may. Stop trainers whose other ranks do not come."
                )
            attempt = job.forming[launch] = Attempt(
                job=job.record.name,
                number=running.number + 1 if running is not None else 1,
                topology=topology,
                start=cursor,
                launch=launch,
                spec_version=setup.record.spec_version,
            )
        return attempt

    @to_its_end
    async def begin_for_all(self, job: RunningJob, attempt: Attempt) -> None:
        """Begin the attempt, also where the rank that came last is gone: the others wait too."""
        async with job.beginning:
            await self._begin(job, attempt)

    async def _begin(self, job: RunningJob, attempt: Attempt) -> None:
        """All ranks are here: make the attempt durable, fence the older, start its loop."""
        try:
            if job.deleted:  # another job may bear its name by now
                raise was_deleted(job.record.name)
            _require_newest(job, attempt.launch, attempt.who)
            skips = await in_store(self._record, attempt)
        except ServiceError as error:
            raise attempt.end(error) from error
        log.info(
            "attempt opened by %d ranks at step %d",
            attempt.topology.world_size,
            attempt.start.step,
            extra=attempt.about,
        )
        older, old_loop = job.attempt, job.loop
        job.attempt = attempt
        self._statistics.attempt_begun(attempt.job)
        if older is not None:
            log.info("fenced by attempt %d (%s)", attempt.number, attempt.who, extra=older.about)
            older.end(_replaced(older, f"attempt {older.number}", attempt))
        for launch, forming in list(job.forming.items()):
            if job.launches.replaces(attempt.launch, launch):
                del job.forming[launch]
                forming.end(_replaced(forming, "an attempt that was forming", attempt))
        if old_loop is not None:
            await old_loop.stop()  # receipts of its packs are its own until then
        if attempt.over:  # all this took too long for its ranks, which were told so
            return
        job.keep_setups(attempt.spec_version)
        job.loop = self._make_loop(job, job.setups[attempt.spec_version], attempt, skips)
        job.loop.start(attempt.start)
        attempt.complete_now()

    def _record(self, attempt: Attempt) -> list[SkipRecord]:
        """Make the attempt durable, under the next number of the store. Returns the job's skips,
        which are settled for this number once it is taken."""
        last = self._store.last_attempt(attempt.job)
        attempt.number = 1 if last is None else last.attempt + 1
        if attempt.number > MOST_ATTEMPTS:
            raise QuotaError(
                f"job {attempt.job!r} has begun {MOST_ATTEMPTS:,} times, and no more is recorded. "
                "Delete it and submit it again; it goes on from its trainer's checkpoint."
            )
        self._store.put_attempt(
            AttemptRecord(
                job=attempt.job,
                attempt=attempt.number,
                world_size=attempt.topology.world_size,
                start_cursor=attempt.start.to_json(),
                opened_unix_s=time.time(),
                spec_version=attempt.spec_version,
                launch=attempt.launch,
            )
        )
        return self._store.skips(attempt.job)

    async def restore(self, job: RunningJob, setup: JobSetup, last: AttemptRecord) -> None:
        """Bring back the attempt that ran last, complete; its ranks rejoin it one by one. `setup`
        is of the version that it began with."""
        name, store = job.record.name, self._store
        for each in await in_store(store.attempts, name):
            job.launches.renew(each.launch)
        entry = await in_store(store.last_entry, name, last.attempt)
        committed = await in_store(store.last_committed_step, name, last.attempt)
        start = Cursor.from_json(last.start_cursor)
        attempt = Attempt(
            job=name,
            number=last.attempt,
            topology=setup.topology(last.world_size),
            start=start,
            trained_step=max(committed, start.step - 1),
            launch=last.launch,
            spec_version=last.spec_version,
        )
        attempt.complete_now()
        skips = await in_store(store.skips, name)
        cursor = attempt.start if entry is None else Cursor.from_json(entry.cursor)
        job.attempt = attempt
        job.loop = self._make_loop(job, setup, attempt, skips)
        job.loop.take_up(
            cursor,
            recorded_step=-1 if entry is None else entry.step,
        )

    def _make_loop(
        self, job: RunningJob, setup: JobSetup, attempt: Attempt, skips: Sequence[SkipRecord]
    ) -> AttemptLoop:
        return AttemptLoop(
            setup,
            attempt,
            ports=self._ports,
            planning=job.planning,
            skips=Skips(skips, attempt=attempt.number),
        )

    def rejoin(
        self,
        job: RunningJob,
        rank: int,
        world_size: int,
        client: str,
        number: int,
        launch: str,
        where: Whereabouts,
    ) -> tuple[Attempt, Claim]:
        """A rank is back in the attempt that it was in. Raises FencedError where that attempt is
        over or of another launch, ConflictError where the world size is another, WorldSizeError
        where the rank is outside it, RankClaimedError where another client holds the rank."""
        attempt = job.attempt
        if attempt is None or attempt.number != number or attempt.over:
            newest = 0 if attempt is None else attempt.number
            raise FencedError(
                f"{client} comes back to attempt {number} of job {job.record.name!r}, which is "
                f"over; the newest is {newest}. Restart the trainers from their checkpoint."
            )
        if launch != attempt.launch:
            raise FencedError(
                f"{client} (launch {launch or 'without a name'}) comes back to attempt {number} "
                f"of job {job.record.name!r}, which is of another start ({attempt.who}). Restart "
                "the trainers from their checkpoint."
            )
        if world_size != attempt.topology.world_size:
            raise ConflictError(
                f"attempt {number} has world size {attempt.topology.world_size}, {client} came "
                f"back with {world_size}."
            )
        attempt.topology.replica_of(rank)
        held = attempt.claims.get(rank)
        if held is not None and held.client != client:
            attempt.refuse_if_claimed(rank, client)
        assert job.loop is not None, "an attempt that is complete has its loop"
        job.loop.wake()
        return attempt, attempt.claim(rank, client, where)


def _require_newest(job: RunningJob, launch: str, who: str) -> None:
    """Raises FencedError where a newer launch trains."""
    running = job.attempt
    if running is None or running.over or not running.connected:
        return
    if job.launches.replaces(running.launch, launch):
        raise FencedError(
            f"launch {launch} of job {job.record.name!r} ({who}) was replaced by attempt "
            f"{running.number} ({running.who}), which trains. Only the newest start of a job may "
            "train; stop this one, or stop that one first."
        )


def _replaced(older: Attempt, what: str, newer: Attempt) -> FencedError:
    return FencedError(
        f"{what} of job {older.job!r} ({older.who}) was replaced by attempt {newer.number} "
        f"({newer.who}). Only the newest start of a job may train; stop this one."
    )
