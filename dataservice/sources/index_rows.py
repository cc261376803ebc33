"""The rows of the parts of an index: all of them checked, their lengths alone, or a few of them.

    read         lengths and details of all, one part's digests compared with its manifest's
    lengths      what draws need, at once: a twentieth of the time
    details      what else there is, read and checked as by `read`
    some         the details of a few rows, by the row groups that hold them

Lengths that come first have their values and counts checked; digests, and sizes before they are
decompressed, only when all is read. So they are to be read in a process that may die.
"""

import os
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from operator import itemgetter

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from dataservice.core.limits import DecodeLimits
from dataservice.core.sample import LengthTable
from dataservice.sources.detail_file import DetailFile, DetailWriter
from dataservice.sources.index_folder import IndexFolder
from dataservice.sources.index_part import ROWS_PER_GROUP
from dataservice.sources.length_cells import Cell, LengthCells
from dataservice.sources.length_records import LengthRecords
from dataservice.sources.lengths_file import LengthsFile
from dataservice.sources.manifest import PartRecord
from dataservice.sources.part_reader import (
    ROWS_A_SHARE,
    part_lengths,
    read_part,
    read_part_rows,
)
from dataservice.sources.parts_in_order import READERS, in_order

SHARES = 4 * READERS  # of a few rows, read at once
LEAST_ROWS = 64  # of such a share: neighbours of which both need a row group each read it

_Group = tuple[IndexFolder, PartRecord, pa.Table, LengthTable]


@dataclass(frozen=True, kw_only=True, slots=True)
class IndexRows:
    """The rows of these parts, in this order. Files that are made lie in a `folder`, see
    `unnamed_file`. Memory is a few row groups of some parts. What reads raises IndexStaleError
    where a part is missing, damaged or not the manifest's."""

    parts: tuple[tuple[IndexFolder, PartRecord], ...]
    limits: DecodeLimits

    def __len__(self) -> int:
        return sum(record.rows for _, record in self.parts)

    def read(self, folder: str | None = None) -> tuple[int, DetailFile]:
        """A descriptor of the file of lengths, which the caller closes, and the details."""
        rows = in_order([partial(read_part, *part, self.limits) for part in self.parts])
        lengths_file = LengthsFile(len(self), folder)
        with closing(rows), closing(lengths_file), DetailWriter(folder) as writer:
            for table, lengths in rows:
                lengths_file.write(LengthRecords.of(lengths))
                writer.write(table)
            return lengths_file.finish(), writer.finish()

    def details(self, folder: str | None = None) -> DetailFile:
        """The details of all rows."""
        groups = in_order([partial(_part_groups, *part, self.limits) for part in self.parts])
        with closing(groups):
            return _written(self._compared(groups), folder)

    def lengths(self, folder: str | None = None) -> int:
        """A descriptor of the file of lengths, which the caller closes."""
        shares = [*self._shares()]
        readers = READERS
        if all(of.is_local for of, _ in self.parts):  # more than computes at once is in the way
            readers = min(READERS, len(os.sched_getaffinity(0)))
        with closing(LengthsFile(len(self), folder)) as file, ThreadPoolExecutor(readers) as pool:
            turn: Future[None] = Future()
            turn.set_result(None)
            writing = []
            for share in shares:
                after: Future[None] = Future()
                writing.append(pool.submit(_write, share, file, turn, after))
                turn = after
            try:
                for written in writing:
                    written.result()
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
            return file.finish()

    def some(self, rows: NDArray[np.int64], folder: str | None = None) -> DetailFile:
        """The details of some rows, which rise."""
        # Of rows that were drawn, nearly each lies in a row group of its own, which takes
        # milliseconds: shares are read at once, each as far as it goes.
        each = min(max(LEAST_ROWS, -(-len(rows) // SHARES)), ROWS_PER_GROUP)
        shares = (
            partial(read_part_rows, *part, own[at : at + each], self.limits)
            for part, own in self._by_part(rows)
            for at in range(0, len(own), each)
        )
        return _written(in_order(shares, ahead=each), folder)

    def _cells(self) -> dict[IndexFolder, LengthCells]:
        return {folder: LengthCells(folder) for folder in dict.fromkeys(of for of, _ in self.parts)}

    def _compared(self, groups: Iterator[_Group]) -> Generator[pa.Table, None, None]:
        """The tables of these row groups, whose lengths are those that were read before."""
        known = self._cells()
        for folder, own in groupby(groups, key=itemgetter(0)):
            yield from known[folder].compared(group[1:] for group in own)

    def _shares(self) -> Iterator[Callable[[], Sequence[LengthRecords]]]:
        """Shares of the lengths, one behind the other; each reads its own."""
        known = self._cells()
        parts = [(folder, record, known[folder].of(record)) for folder, record in self.parts]
        for (folder, unknown), alike in groupby(parts, key=lambda part: (part[0], part[2] is None)):
            if unknown:
                for _, record, _ in alike:
                    yield from part_lengths(folder, record, self.limits)
            else:
                for cells in _some(cell for _, _, own in alike for cell in own or ()):
                    yield partial(known[folder].lengths, cells, self.limits)

    def _by_part(
        self, rows: NDArray[np.int64]
    ) -> Iterator[tuple[tuple[IndexFolder, PartRecord], NDArray[np.int64]]]:
        starts = np.cumsum([0, *(record.rows for _, record in self.parts)])
        cuts = np.searchsorted(rows, starts)
        for part, start, first, end in zip(self.parts, starts, cuts, cuts[1:], strict=False):
            if first < end:
                yield part, rows[first:end] - start


def _some(cells: Iterable[Cell]) -> Iterator[list[Cell]]:
    """These cells, so many together as a share has rows."""
    together: list[Cell] = []
    rows = 0
    for cell in cells:
        together.append(cell)
        rows += cell.rows
        if rows >= ROWS_A_SHARE:
            yield together
            together, rows = [], 0
    if together:
        yield together


def _write(
    read: Callable[[], Sequence[LengthRecords]],
    file: LengthsFile,
    turn: "Future[None]",
    after: "Future[None]",
) -> None:
    """Read a share of the lengths and write it, all in one thread: what was read is still near.
    Shares take places in the file in `turn`; how many bytes the ones before take is not known
    earlier."""
    try:
        blocks = read()
        turn.result()
        places = [file.place(records) for records in blocks]
    except BaseException as error:
        after.set_exception(error)
        raise
    after.set_result(None)
    for records, place in zip(blocks, places, strict=True):
        file.put(records, place)


def _part_groups(folder: IndexFolder, record: PartRecord, limits: DecodeLimits) -> Iterator[_Group]:
    for table, lengths in read_part(folder, record, limits):
        yield folder, record, table, lengths


def _written(tables: Generator[pa.Table, None, None], folder: str | None) -> DetailFile:
    with closing(tables), DetailWriter(folder) as writer:
        for table in tables:
            writer.write(table)
        return writer.finish()
