"""The quarantine in state.db, and its counts, which are kept in memory.

Whoever looks at a job asks how much of it is in quarantine, again and again, while all jobs' steps
wait for the same store. So an entry is counted once:

    samples:  a table has each sample once, since entries name one again in each epoch; its rows are
              counted once, then add_quarantine adds those that it brings
    sources:  counted up to a step of an attempt; the next question counts the steps behind it,
              and add_quarantine takes back the steps, few, that it adds to

Contract. Only this process writes state.db, so what is kept is what a query would count. A count
of many entries is made in pieces, between which other calls have their turn; its answer is that of
the moment of its last piece. Kept are numbers by source and attempt, and none by sample.
"""

import json
import logging
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import IO

from dataservice.core.job import QuarantineEntry
from dataservice.core.state_store import MOST_QUARANTINED
from dataservice.state.sqlite_file import SqliteFile

log = logging.getLogger(__name__)

# Entries counted in one turn: some 5 ms.
PIECE_ENTRIES = 10_000
REMOVED_AT_ONCE = 2000  # which takes longer
# Seconds between two pieces: without any, the thread that counts takes the next turn, too.
REST_S = 0.001
# Steps from one to another of an attempt, in the order of the table.
_STEPS = "FROM quarantine WHERE job = ? AND attempt = ? AND step BETWEEN ? AND ?"
# In one statement: around each, other threads take the interpreter from whoever waits for it.
_INSERT_SAMPLES = (
    "INSERT OR IGNORE INTO quarantined_samples SELECT ?, sample.value FROM json_each(?) AS sample"
)
# The first entries, and then the first samples, that a job has.
_REMOVED = tuple(
    f"DELETE FROM {table} WHERE job = :job AND {key} IN "
    f"(SELECT {columns} FROM {table} WHERE job = :job ORDER BY {columns} LIMIT :most)"
    for table, key, columns in (
        ("quarantine", "(attempt, step, sample_id)", "attempt, step, sample_id"),
        ("quarantined_samples", "sample_id", "sample_id"),
    )
)


@dataclass(slots=True)
class _Steps:
    """The entries of an attempt by source, in its steps up to this one."""

    through_step: int = -1
    entries: Counter[str] = field(default_factory=Counter)


class SqliteQuarantine(SqliteFile):
    """The quarantine's part of the port StateStore."""

    def __init__(self, directory: Path, *, held: IO[str] | None = None) -> None:
        super().__init__(directory, held=held)
        # Of the jobs that were added to: the entries that are kept.
        self._kept: dict[str, int] = {}
        # Of the jobs that were asked for.
        self._samples: dict[str, int] = {}
        self._steps: defaultdict[str, dict[int, _Steps]] = defaultdict(dict)
        # Held over a whole count: of two at once, each might undo the other's pieces. Taken before
        # the turn, never within one.
        self._counting = threading.Lock()

    def add_quarantine(self, entries: Sequence[QuarantineEntry]) -> None:
        """Append all entries or none; the first entry of a (job, attempt, step, sample_id) is kept.
        Of a job that has MOST_QUARANTINED, further samples are only counted. Raises NotFoundError
        when there is no such job."""
        samples: defaultdict[str, set[int]] = defaultdict(set)
        for entry in entries:
            samples[entry.job].add(entry.sample_id)
        with self._turn:
            brought, kept = {}, {}
            with self._transaction() as db:
                for name in samples:
                    self._require_job(db, name)
                    if name not in self._kept:
                        counted = "SELECT COUNT(*) FROM quarantine WHERE job = ?"
                        self._kept[name] = self._number(counted, name)
                self._take_back_steps(entries)
                for name in samples:
                    room = max(MOST_QUARANTINED - self._kept[name], 0)
                    added = db.executemany(
                        "INSERT OR IGNORE INTO quarantine VALUES (?, ?, ?, ?, ?, ?, ?)",
                        [astuple(entry) for entry in entries if entry.job == name][:room],
                    )
                    kept[name] = max(added.rowcount, 0)
                for name, ids in samples.items():
                    rows = db.execute(_INSERT_SAMPLES, (name, json.dumps(sorted(ids))))
                    brought[name] = rows.rowcount
            for name in brought.keys() & self._samples.keys():  # now that they are on disk
                self._samples[name] += brought[name]
            for name, count in kept.items():
                if count and self._kept[name] < MOST_QUARANTINED <= self._kept[name] + count:
                    log.warning(
                        "%s has %s entries in quarantine; samples that are masked from here on are "
                        "counted and not listed",
                        *(name, f"{MOST_QUARANTINED:,}"),
                    )
                self._kept[name] += count

    def quarantine(
        self, job: str, *, behind: QuarantineEntry | None = None, most: int | None = None
    ) -> list[QuarantineEntry]:
        """Entries of a job by (attempt, step, sample_id): those behind one, at most so many."""
        place = (-1, -1, -1) if behind is None else (behind.attempt, behind.step, behind.sample_id)
        return self._select(
            QuarantineEntry,
            "FROM quarantine WHERE job = ? AND (attempt, step, sample_id) > (?, ?, ?) "
            "ORDER BY attempt, step, sample_id LIMIT ?",
            *(job, *place, -1 if most is None else most),
        )

    def quarantine_of_step(self, job: str, attempt: int, step: int) -> list[QuarantineEntry]:
        """The entries of one step of one attempt by sample_id."""
        return self._select(
            QuarantineEntry,
            "FROM quarantine WHERE job = ? AND attempt = ? AND step = ? ORDER BY sample_id",
            job,
            attempt,
            step,
        )

    def quarantined_samples(self, job: str) -> int:
        """Number of samples that have an entry."""
        with self._turn:
            if job not in self._samples:
                rows = "SELECT COUNT(*) FROM quarantined_samples WHERE job = ?"
                self._samples[job] = self._number(rows, job)
            return self._samples[job]

    def quarantined_by_source(self, job: str, attempt: int, *, last_step: int) -> dict[str, int]:
        """The number of entries of each source in an attempt's steps up to this one, of sources
        that have any."""
        with self._counting:
            while (counted := self._count_steps(job, attempt, last_step)) is None:
                rest()
        return counted

    def _count_steps(self, job: str, attempt: int, last_step: int) -> dict[str, int] | None:
        """Count the next steps, some thousand entries together; the answer once there are none."""
        with self._turn:
            counted = self._steps[job].setdefault(attempt, _Steps())
            if last_step < counted.through_step:  # a later attempt went back behind it
                counted = self._steps[job][attempt] = _Steps()
            if last_step > counted.through_step:
                first = counted.through_step + 1
                ends = self._rows(
                    f"SELECT step {_STEPS} ORDER BY step LIMIT 1 OFFSET ?",
                    *(job, attempt, first, last_step, PIECE_ENTRIES - 1),
                )
                last = ends[0][0] if ends else last_step
                counted.entries += self._entries(job, attempt, first, last)
                counted.through_step = last
            return dict(counted.entries) if counted.through_step >= last_step else None

    def _take_back_steps(self, entries: Sequence[QuarantineEntry]) -> None:
        """Have no step counted that these entries are added to: so it need not be known which of
        them are new, nor whether they will be on disk."""
        first: dict[tuple[str, int], int] = {}
        for entry in entries:
            place = (entry.job, entry.attempt)
            first[place] = min(entry.step, first.get(place, entry.step))
        for (job, attempt), step in first.items():
            counted = self._steps[job].get(attempt, _Steps())
            if step <= counted.through_step:
                counted.entries -= self._entries(job, attempt, step, counted.through_step)
                counted.through_step = step - 1

    def _entries(self, job: str, attempt: int, first: int, last: int) -> Counter[str]:
        query = f"SELECT source, COUNT(*) {_STEPS} GROUP BY source"
        return Counter(dict(self._rows(query, job, attempt, first, last)))

    def empty_quarantine(self, job: str) -> None:
        """Remove a job's entries in pieces, between which others have their turn: at once, they
        would take as much room again in the write-ahead log, which a full disk does not have."""
        for rows in _REMOVED:
            while self._remove_piece(rows, job):
                rest()

    def _remove_piece(self, rows: str, job: str) -> bool:
        with self._turn:
            with self._transaction() as db:
                removed = db.execute(rows, {"job": job, "most": REMOVED_AT_ONCE}).rowcount
            self._forget_counts(job)
            return bool(removed == REMOVED_AT_ONCE)

    def _forget_counts(self, job: str) -> None:
        """Of a job that is deleted."""
        self._kept.pop(job, None)
        self._samples.pop(job, None)
        self._steps.pop(job, None)


def rest() -> None:
    """Let others have their turn."""
    time.sleep(REST_S)
