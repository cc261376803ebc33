"""How far a job is through each of its sources: counted when someone looks, not at every step.

    ledger ─► cursor behind the last committed step ─┐
    mixture ─► samples of each source before it ─────┼─► JobProgress
    store ─► bad samples of the steps up to it ──────┘

The cursor alone says what is drawn. So the figures are the same after a restart, on any number of
ranks, and in an attempt that goes on from a checkpoint.

Contract. Whoever looks waits WAIT_S at most; what is counted goes on, and is there when they look
again. Until then they see the figures of the last look, which name their step. A look costs the
same at any step. Nothing is kept but numbers by source. An error leaves the figures as they were,
and is logged.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from dataservice.core.cursor import Cursor
from dataservice.core.errors import ServiceError
from dataservice.core.health import JobProgress, SourceProgress
from dataservice.core.job_setup import JobSetup
from dataservice.core.state_store import StateStore
from dataservice.engine.attempt import Attempt
from dataservice.engine.planner import pass_over
from dataservice.engine.running_job import RunningJob
from dataservice.engine.tasks import cancel_all
from dataservice.engine.threads import in_counting

log = logging.getLogger(__name__)

WAIT_S = 1.0


@dataclass(kw_only=True, slots=True)
class _Known:
    """What is known of one job: `progress` in an attempt, `at` which step and bad samples on record
    it was begun to be counted. The attempt is told by its number and by when its job was made;
    itself it would be kept alive."""

    attempt: tuple[float, int]
    progress: JobProgress | None = None
    at: tuple[int, int] | None = None
    counting: asyncio.Task[None] | None = None


class ProgressView:
    """The progress of jobs, for whoever looks."""

    def __init__(self, store: StateStore) -> None:
        self._store = store
        self._known: dict[str, _Known] = {}

    async def of(
        self, jobs: Iterable[RunningJob], running: Mapping[str, RunningJob]
    ) -> dict[str, JobProgress]:
        """The progress of these jobs by name, of those whose progress is known. What was counted
        of jobs that are not `running` any more is forgotten."""
        for name in self._known.keys() - running.keys():
            if (counting := self._known.pop(name).counting) is not None:
                counting.cancel()
        looked = {job.record.name: known for job in jobs if (known := self._look(job)) is not None}
        tasks = [known.counting for known in looked.values() if known.counting is not None]
        if tasks:
            await asyncio.wait(tasks, timeout=WAIT_S)
        return {name: known.progress for name, known in looked.items() if known.progress}

    async def stop(self) -> None:
        """Count no more."""
        await cancel_all(*(known.counting for known in self._known.values()))

    def _look(self, job: RunningJob) -> _Known | None:
        """What is known of a job, and is being counted where that is not the newest."""
        attempt, loop = job.attempt, job.loop
        setup = None if attempt is None else job.setups.get(attempt.spec_version)
        if attempt is None or not attempt.complete or loop is None or setup is None:
            return None  # until it is complete, the loop may be that of the attempt before
        name, now = job.record.name, (loop.committed_step, loop.quarantined)
        numbered = (job.record.created_unix_s, attempt.number)
        known = self._known.get(name)
        if known is None or known.attempt != numbered:
            known = self._known[name] = _Known(attempt=numbered)
        if known.counting is not None and known.counting.done():
            known.counting = None
        if known.counting is None and known.at != now:
            known.counting = asyncio.create_task(self._count(known, setup, attempt, now))
        return known

    async def _count(
        self, known: _Known, setup: JobSetup, attempt: Attempt, now: tuple[int, int]
    ) -> None:
        step, _ = now
        try:
            progress = await in_counting(_counted, self._store, setup, attempt, step)
        except ServiceError as error:
            log.warning("its progress was not counted: %s", error, extra=attempt.about)
            return
        except Exception:  # whoever looks sees the rest
            log.exception("its progress was not counted", extra=attempt.about)
            return
        known.at, known.progress = now, progress


def _counted(store: StateStore, setup: JobSetup, attempt: Attempt, step: int) -> JobProgress:
    return _progress(setup, step, *_recorded(store, attempt, step))


def _recorded(store: StateStore, attempt: Attempt, step: int) -> tuple[Cursor, Mapping[str, int]]:
    """The cursor of the last planned step up to this one, and the bad samples by source of the
    steps that led to it: an attempt goes on from its start, which an earlier one had reached."""
    entry = store.last_entry(attempt.job, attempt.number, before=step + 1)
    masked: Counter[str] = Counter()
    for each in reversed(store.attempts(attempt.job)):
        if each.attempt <= attempt.number and step >= 0:
            masked.update(store.quarantined_by_source(attempt.job, each.attempt, last_step=step))
            step = min(step, Cursor.from_json(each.start_cursor).step - 1)
    return attempt.start if entry is None else Cursor.from_json(entry.cursor), masked


def _progress(setup: JobSetup, step: int, behind: Cursor, masked: Mapping[str, int]) -> JobProgress:
    cursor, stream = pass_over(setup, behind, to_step=step + 1), setup.stream
    drawn = stream.drawn(cursor)
    figures = zip(
        setup.catalog.source_names,
        (drawn.so_far - drawn.before_epoch).tolist(),
        (drawn.through_epoch - drawn.before_epoch).tolist(),
        drawn.so_far.tolist(),
        drawn.in_all.tolist(),
        strict=True,
    )
    return JobProgress(
        step=step,
        epoch=min(cursor.epoch, stream.epochs - 1),  # behind the last one everything is drawn
        epochs=stream.epochs,
        sources=tuple(
            SourceProgress(
                source=source,
                epoch_drawn=epoch_drawn,
                epoch_samples=epoch_samples,
                drawn=drawn_so_far,
                samples=samples,
                masked=masked.get(source, 0),
            )
            for source, epoch_drawn, epoch_samples, drawn_so_far, samples in figures
        ),
    )
