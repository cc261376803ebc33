"""Old entries of the ledger as Parquet files, `ledger/NAME.parquet` beside state.db.

A file holds entries of one job by attempt and step, and is never changed once it has its name,
which is random and never given again. Which files there are stands in state.db: one that it does
not name (of a crash, or of a state whose backup was restored) is not read, and stays: the state
that names it may be put back.
"""

import os
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import fields
from operator import attrgetter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from dataservice.core.errors import StateError
from dataservice.core.job import LedgerEntry
from dataservice.core.private_files import make_private

FOLDER = "ledger"
ROWS_PER_GROUP = 4096  # what is read for one entry
_JOB = b"dataservice.job"
# Of what was read last, a megabyte each: whoever replays a range reads step after step, in several
# attempts.
_KEPT_GROUPS = 16
_HALF = ".parquet.part"
_COLUMNS: list[tuple[str, pa.DataType]] = [
    ("attempt", pa.int64()),
    ("step", pa.int64()),
    ("cursor", pa.string()),
    ("plan_digest", pa.string()),
    ("world_size", pa.int64()),
    ("cost_version", pa.string()),
    ("planned_unix_s", pa.float64()),
    ("committed_unix_s", pa.float64()),
    ("predicted_s", pa.float64()),
    ("measured_s", pa.float64()),
    ("content", pa.binary()),
]
_SCHEMA = pa.schema(_COLUMNS)
assert {*_SCHEMA.names, "job"} == {field.name for field in fields(LedgerEntry)}


class LedgerFiles:
    """The files of one state directory. Its user takes turns."""

    def __init__(self, directory: Path) -> None:
        self._folder = directory / FOLDER
        self._groups: OrderedDict[tuple[str, int], tuple[str, pa.Table]] = OrderedDict()

    def write(self, name: str, entries: Sequence[LedgerEntry]) -> None:
        """Write entries of one job, which are sorted by attempt and step; when this returns, they
        are on disk. Raises StateError where they cannot be written."""
        path = self._path(name)
        making = path.with_name(f"{name}{_HALF}")
        columns = [
            pa.array([*map(attrgetter(name), entries)], type=kind) for name, kind in _COLUMNS
        ]
        schema = _SCHEMA.with_metadata({_JOB: entries[0].job.encode()})
        table = pa.Table.from_arrays(columns, schema=schema)
        try:
            self._folder.mkdir(mode=0o700, exist_ok=True)
            make_private(making)
            with making.open("wb") as stream:
                pq.write_table(table, stream, compression="zstd", row_group_size=ROWS_PER_GROUP)
                stream.flush()
                os.fsync(stream.fileno())
            making.replace(path)
            _sync(self._folder)
        except OSError as error:
            with suppress(OSError):
                making.unlink()
            raise StateError(
                f"old entries of the ledger cannot be written to {path}: {error.strerror}. They "
                "stay in state.db. Free space on its disk, or make the folder writable."
            ) from error

    def entry(self, name: str, row: int, place: tuple[str, int, int]) -> LedgerEntry:
        """The entry in this row of a file, which is of this job, attempt and step. Raises
        StateError where the file is missing or damaged."""
        group, within = divmod(row, ROWS_PER_GROUP)
        path = self._path(name)
        try:
            job, rows = self._group(name, group)
            found = [LedgerEntry(job=job, **each) for each in rows.slice(within, 1).to_pylist()]
        except (OSError, ValueError, TypeError, pa.ArrowException) as error:
            raise StateError(f"{path} is missing or damaged ({error}). {_REMEDY}") from error
        if [(each.job, each.attempt, each.step) for each in found] != [place]:
            job, attempt, step = place
            seen = f"row {row} is not step {step} of attempt {attempt} of job {job!r}"
            raise StateError(f"{path} is damaged: {seen}. {_REMEDY}")
        return found[0]

    def remove(self, names: Sequence[str]) -> None:
        """Remove the files of jobs that are deleted. One that cannot be removed is read no more."""
        for name in names:
            with suppress(OSError):
                self._path(name).unlink(missing_ok=True)
        self._groups.clear()

    def half_written(self) -> list[Path]:
        """The files that are being written, or that a crash has left so."""
        with suppress(OSError):  # such as where none was ever written
            return [path for path in self._folder.iterdir() if path.name.endswith(_HALF)]
        return []

    def _group(self, name: str, group: int) -> tuple[str, pa.Table]:
        """The job of a file, and some of its rows."""
        place = (name, group)
        if place not in self._groups:
            with pq.ParquetFile(self._path(name)) as file:
                job = (file.schema_arrow.metadata or {}).get(_JOB, b"").decode()
                self._groups[place] = (job, file.read_row_group(group, use_threads=False))
            if len(self._groups) > _KEPT_GROUPS:
                self._groups.popitem(last=False)
        self._groups.move_to_end(place)
        return self._groups[place]

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}.parquet"


_REMEDY = (
    "It holds steps that were trained long ago, so training goes on; to explain or replay them, "
    "restore the file from a backup of the state directory."
)


def load_arrow() -> None:
    """Load what Arrow loads with the first values of Python that it gets, such as pandas where that
    is installed: half a second, not to be taken from anybody's turn."""
    pa.array([None])


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
