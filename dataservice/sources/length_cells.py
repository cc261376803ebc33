"""All lengths of an index in one file beside its manifest, packed as its parts have them.

INDEX_DIR/SOURCE_NAME/lengths.bin

    cells, one behind the other │ by part, what they are (JSON) │ its size │ "lengths" and the form

An index of many small parts is opened by this file: to open a part takes as long as to read the
lengths of 10,000 samples. It says nothing that the parts do not. Of a part that it does not know,
or knew with other samples, the part itself is read. What it says is checked as lengths are, and
compared with the parts once these are read.
"""

import hashlib
import json
import logging
import struct
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby, islice
from operator import itemgetter
from typing import IO, Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from dataservice.core.crc32 import crc32
from dataservice.core.errors import IndexStaleError, SourceError
from dataservice.core.limits import DecodeLimits
from dataservice.core.sample import LengthTable
from dataservice.sources.index_folder import LENGTHS, IndexFolder, part_name
from dataservice.sources.index_part import ROWS_PER_GROUP
from dataservice.sources.length_records import LengthRecords, columns_of
from dataservice.sources.manifest import AGAIN, Manifest, PartRecord
from dataservice.sources.packed_lengths import FORM, packed_columns, unpack_lengths
from dataservice.sources.part_reader import packed_cells

_END = struct.Struct("<Q8s")
_FORM = f"lengths{FORM}".encode()
_MOST_HEAD_BYTES = 2**25  # of 300,000 parts, or of a billion samples
_MOST_CELL_BYTES = 2**26

log = logging.getLogger(__name__)


class Cell(NamedTuple):
    """The lengths of some `rows` one behind the other: where they lie in the file."""

    start: int
    rows: int
    size_bytes: int
    crc32: int


class LengthCells:
    """The cells of one index, by part. Knows none where there is no such file, or none that can be
    read, which the log says. Raises SourceError where its storage does not answer."""

    def __init__(self, folder: IndexFolder) -> None:
        self._folder = folder
        self._parts: dict[str, tuple[str, list[Cell]]] = {}
        try:
            with folder.open(LENGTHS) as stream:
                self._parts = _read_head(stream)
        except FileNotFoundError:
            pass  # of an earlier release
        except (OSError, ValueError, TypeError, OverflowError, RecursionError, struct.error) as e:
            path = f"{folder.path}/{LENGTHS}"
            log.warning("%s: %s is not used: %s", folder.owner, path, e or "cut short")

    def of(self, record: PartRecord) -> list[Cell] | None:
        """The cells of a part in their order; None where they are not known."""
        identity, cells = self._parts.get(part_name(record.file.name), ("", []))
        known = identity == record.identity and sum(cell.rows for cell in cells) == record.rows
        return cells if known else None

    def are_of(self, records: Sequence[PartRecord]) -> bool:
        """Whether they are of these very parts in this order."""
        names = [part_name(record.file.name) for record in records]
        return [*self._parts] == names and None not in map(self.of, records)

    def are_whole(self, records: Sequence[PartRecord]) -> bool:
        """Whether all cells of these parts, as far as they are known, are what was written."""
        try:
            for _ in self.each(cell for record in records for cell in self.of(record) or ()):
                pass
        except IndexStaleError:
            return False
        return True

    def each(self, cells: Iterable[Cell]) -> Iterator[bytes]:
        """The bytes of each of these cells. Raises IndexStaleError where they are not what was
        written, SourceError where the storage does not answer."""
        with self._in_words(), self._folder.open(LENGTHS) as stream:
            for cell in cells:
                yield _bytes_of(stream, cell)

    def reader(self) -> Callable[[Sequence[Cell]], Iterator[bytes]]:
        """Gives the bytes of cells as `each` does, some at a time, all along one stream."""
        due: deque[Cell] = deque()
        data = self.each(iter(due.popleft, None))

        def read(cells: Sequence[Cell]) -> Iterator[bytes]:
            due.extend(cells)
            return islice(data, len(cells))

        return read

    def lengths(self, cells: Sequence[Cell], limits: DecodeLimits) -> list[LengthRecords]:
        """The lengths in these cells, checked. Raises as `each` does, and IndexStaleError where
        they could not be in an index of ours."""
        found = []
        with self._in_words():
            for cell, data in zip(cells, self.each(cells), strict=True):
                records = unpack_lengths(memoryview(data), limits)
                if records is None or len(records.llm_tokens) != cell.rows:
                    raise ValueError("it packs lengths of other rows than it says")
                found.append(records)
        return found

    def compared(
        self, groups: Iterable[tuple[PartRecord, pa.Table, LengthTable]]
    ) -> Iterator[pa.Table]:
        """The tables of these row groups, in the order of the index. Raises IndexStaleError where a
        part turns out to have other lengths than its cells pack, however its rows are divided."""
        read = self.reader()
        for record, own in groupby(groups, key=itemgetter(0)):
            cells = self.of(record)
            theirs, ours = _Digest(), _Digest()
            for _, table, lengths in own:
                if cells:
                    theirs.add(columns_of(lengths))
                yield table
            with self._in_words():
                for data in read(cells or ()):
                    ours.add(packed_columns(data))
                if cells and ours.value != theirs.value:
                    raise ValueError("it packs other lengths than the index's parts have")

    @contextmanager
    def _in_words(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError) as error:
            raise IndexStaleError(
                f"{self._folder.owner}: {self._folder.path}/{LENGTHS} is damaged, or being written "
                f"again ({error}). Open the job again; if it repeats, remove that file and write "
                f"the index again: {AGAIN}; the same files give the same index, and checkpoints "
                "fit it."
            ) from error


def write_length_cells(folder: IndexFolder, manifest: Manifest) -> None:
    """Write the cells of all parts: those that are known already are copied, and only parts that
    are new are read. Where the file cannot be written, jobs open by the parts, and the log says so.
    Raises IndexStaleError where a part cannot be read."""
    distrusted: set[str] = set()
    try:
        known = LengthCells(folder)
        if known.are_of(manifest.parts) and known.are_whole(manifest.parts):
            return None
        while True:
            try:
                return _write(folder, manifest.parts, known, distrusted)
            except _OtherBytesError as error:
                distrusted.add(error.part)
    except IndexStaleError:
        raise
    except (SourceError, OSError) as error:
        log.warning("%s: jobs over it take longer to open: %s", folder.owner, error)


class _OtherBytesError(Exception):
    """Cells of this part are not what was written once."""

    def __init__(self, part: str) -> None:
        super().__init__(part)
        self.part = part


def _write(
    folder: IndexFolder,
    records: Sequence[PartRecord],
    known: LengthCells,
    distrusted: Collection[str],
) -> None:
    """Raises _OtherBytesError where cells of a part cannot be copied that is not `distrusted`."""
    head: list[tuple[str, str, list[tuple[int, int, int]]]] = []
    read = known.reader()
    with folder.replace(LENGTHS) as stream:
        for record in records:
            name, written = part_name(record.file.name), []
            copied = None if name in distrusted else known.of(record)
            try:
                if copied is None:
                    cells = packed_cells(folder, record)
                else:
                    cells = zip((cell.rows for cell in copied), read(copied), strict=True)
                for rows, cell in cells:
                    written.append((rows, len(cell), crc32(cell)))
                    stream.write(cell)
            except IndexStaleError as error:
                if copied is None:
                    raise
                raise _OtherBytesError(name) from error
            head.append((name, record.identity, written))
        text = json.dumps(head).encode()
        stream.write(text + _END.pack(len(text), _FORM))


class _Digest:
    """Of lengths, however their rows are divided."""

    def __init__(self) -> None:
        self._streams: list[Any] = []

    def add(self, columns: Collection[NDArray[Any]]) -> None:
        self._streams = self._streams or [hashlib.blake2b() for _ in columns]
        for stream, column in zip(self._streams, columns, strict=True):
            stream.update(np.ascontiguousarray(column, dtype="<i4"))

    @property
    def value(self) -> list[bytes]:
        return [stream.digest() for stream in self._streams]


def _bytes_of(stream: IO[bytes], cell: Cell) -> bytes:
    if stream.tell() != cell.start:
        stream.seek(cell.start)
    data = stream.read(cell.size_bytes)
    if crc32(data) != cell.crc32:
        raise ValueError("it has other bytes than were written")
    return data


def _read_head(stream: IO[bytes]) -> dict[str, tuple[str, list[Cell]]]:
    """Raises ValueError and the like where it is cut short or another release wrote it."""
    end = stream.seek(-_END.size, 2)
    size_bytes, form = _END.unpack(stream.read(_END.size))
    if form != _FORM:
        raise ValueError("another release wrote it, or it is cut short")
    if size_bytes > min(end, _MOST_HEAD_BYTES):
        raise ValueError(f"its head has {size_bytes:,} bytes")
    stream.seek(end - size_bytes)
    found: dict[str, tuple[str, list[Cell]]] = {}
    at = 0
    for name, identity, cells in json.loads(stream.read(size_bytes)):
        own = []
        for rows, cell_bytes, checksum in cells:
            cell = Cell(at, int(rows), int(cell_bytes), int(checksum))
            if not (0 < cell.rows <= ROWS_PER_GROUP and 0 < cell.size_bytes <= _MOST_CELL_BYTES):
                raise ValueError(f"a cell of {rows} rows and {cell_bytes} bytes")
            own.append(cell)
            at += cell.size_bytes
        found[str(name)] = str(identity), own
    if at != end - size_bytes:
        raise ValueError("its cells have another size than its head says")
    return found
