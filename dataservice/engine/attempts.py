"""The attempts of jobs: formed while ranks open, made durable, begun, restored, rejoined.

    forming ──all ranks──► recorded ──► older one fenced ──► loop started ──► complete
                              ▲                                                  ▲
                 a newer coordinator restores the last one ──────────────────────┘

Contract. An attempt is durable before anyone is told of it. Attempts of one job begin one after
another; a newer complete attempt fences the older one, whose ranks get FencedError. After a
restart of the coordinator the last attempt of each job is restored complete, and its ranks
rejoin it one by one where they were.
"""

import asyncio
import logging
import time
from collections.abc import Sequence

from dataservice.core.cursor import Cursor
from dataservice.core.errors import ConflictError, FencedError, ServiceError
from dataservice.core.job import AttemptRecord, SkipRecord
from dataservice.core.topology import Topology
from dataservice.engine.attempt import Attempt, Claim
from dataservice.engine.jobs import RunningJob
from dataservice.engine.loop import AttemptLoop, LoopPorts
from dataservice.engine.setup import JobSetup
from dataservice.engine.skips import Skips
from dataservice.engine.vitals import Vitals

log = logging.getLogger(__name__)


class Attempts:
    """Begins and restores attempts; each job's own are in its `RunningJob`."""

    def __init__(self, ports: LoopPorts, vitals: Vitals) -> None:
        self._ports = ports
        self._store = ports.store
        self._vitals = vitals

    def forming(
        self, job: RunningJob, rank: int, client: str, topology: Topology, cursor: Cursor
    ) -> Attempt:
        """The attempt that a rank may join now: one that forms, or a new one. Raises
        ConflictError where the job drains, RankClaimedError."""
        if job.record.state == "draining":
            raise ConflictError(
                f"job {job.record.name!r} is draining and takes no new attempt. Submit it under "
                "another name to train again."
            )
        if job.attempt is not None and not job.attempt.over:
            job.attempt.refuse_if_claimed(rank, client)
        if job.forming is None or job.forming.over:
            number = job.attempt.number + 1 if job.attempt is not None else 1
            job.forming = Attempt(
                job=job.record.name, number=number, topology=topology, start=cursor
            )
        return job.forming

    async def begin_for_all(self, job: RunningJob, attempt: Attempt) -> None:
        """Begin whatever becomes of the rank that came last: the others wait for it too."""

        async def begin() -> None:
            async with job.beginning:
                await self._begin(job, attempt)

        task = asyncio.create_task(begin())
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        await asyncio.shield(task)

    async def _begin(self, job: RunningJob, attempt: Attempt) -> None:
        """All ranks are here: make the attempt durable, fence the older, start its loop."""
        try:
            skips = await asyncio.to_thread(self._record, attempt)
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
        self._vitals.attempt_begun(attempt.job)
        if older is not None:
            log.info("fenced by attempt %d", attempt.number, extra=older.about)
            older.end(
                FencedError(
                    f"attempt {older.number} of job {attempt.job!r} was replaced by attempt "
                    f"{attempt.number}. Only the newest start of a job may train; stop this one."
                )
            )
        if old_loop is not None:
            await old_loop.stop()  # receipts of its packs are its own until then
        assert job.setup is not None, "an attempt forms only for a job that is open"
        job.loop = self._make_loop(job, job.setup, attempt, skips)
        job.loop.start(attempt.start)
        attempt.complete_now()

    def _record(self, attempt: Attempt) -> list[SkipRecord]:
        """Make the attempt durable, under the number that the store has for it; gives the
        job's skips, which are settled for this number once it is taken."""
        last = self._store.last_attempt(attempt.job)
        attempt.number = 1 if last is None else last.attempt + 1
        self._store.put_attempt(
            AttemptRecord(
                job=attempt.job,
                attempt=attempt.number,
                world_size=attempt.topology.world_size,
                start_cursor=attempt.start.to_json(),
                opened_unix_s=time.time(),
            )
        )
        return self._store.skips(attempt.job)

    async def restore(self, job: RunningJob, setup: JobSetup, last: AttemptRecord) -> None:
        """Bring back the attempt that ran last, complete; its ranks rejoin it one by one."""
        name, store = job.record.name, self._store
        entry = await asyncio.to_thread(store.last_entry, name, last.attempt)
        committed = await asyncio.to_thread(store.last_committed_step, name, last.attempt)
        start = Cursor.from_json(last.start_cursor)
        attempt = Attempt(
            job=name,
            number=last.attempt,
            topology=setup.topology(last.world_size),
            start=start,
            trained_step=max(committed, start.step - 1),
        )
        attempt.complete_now()
        skips = await asyncio.to_thread(store.skips, name)
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
        self, job: RunningJob, rank: int, world_size: int, client: str, number: int
    ) -> tuple[Attempt, Claim]:
        """A rank is back in the attempt that it was in. Raises FencedError, ConflictError,
        RankClaimedError."""
        attempt = job.attempt
        if attempt is None or attempt.number != number or attempt.over:
            newest = 0 if attempt is None else attempt.number
            raise FencedError(
                f"{client} comes back to attempt {number} of job {job.record.name!r}, which is "
                f"over; the newest is {newest}. Restart the trainers from their checkpoint."
            )
        if world_size != attempt.topology.world_size:
            raise ConflictError(
                f"attempt {number} has world size {attempt.topology.world_size}, {client} came "
                f"back with {world_size}."
            )
        held = attempt.claims.get(rank)
        if held is not None and held.client != client:
            attempt.refuse_if_claimed(rank, client)
        assert job.loop is not None, "an attempt that is complete has its loop"
        job.loop.wake()
        return attempt, attempt.claim(rank, client)
