"""All lengths of an index in one file beside its manifest, packed as its parts have them.

INDEX_DIR/SOURCE_NAME/lengths.bin

    cells, one behind the other │ by part, what they are (JSON) │ its size │ "lengths1"

An index of many small parts is opened by this file: to open a part takes as long as to read the
lengths of 10,000 samples. It says nothing that the parts do not. Of a part that it does not know,
or knew with other samples, the part itself is read. What it says is checked as lengths are, and
compared with the parts once these are read.
"""

import json
import logging
import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import IO, NamedTuple

import pyarrow as pa

from dataservice.core.crc32 import crc32
from dataservice.core.errors import IndexStaleError, SourceError
from dataservice.core.limits import DecodeLimits
from dataservice.core.sample import LengthTable
from dataservice.sources.index_folder import IndexFolder, part_name
from dataservice.sources.index_part import ROWS_PER_GROUP
from dataservice.sources.lengths_file import LengthRecords
from dataservice.sources.manifest import AGAIN, Manifest, PartRecord
from dataservice.sources.packed_lengths import pack_lengths, unpack_lengths
from dataservice.sources.part_reader import packed_cells

LENGTHS = "lengths.bin"
_END = struct.Struct("<Q8s")
_FORM = b"lengths1"
_MOST_HEAD_BYTES = 2**28  # of parts by the million
_MOST_CELL_BYTES = 2**26

log = logging.getLogger(__name__)


class Cell(NamedTuple):
    """The lengths of some `rows` one behind the other: where they lie in the file."""

    start: int
    rows: int
    size_bytes: int
    crc32: int


class LengthCells:
    """The cells of one index, by part. Knows none where the file is missing or cannot be read."""

    def __init__(self, folder: IndexFolder) -> None:
        self._folder = folder
        self._parts: dict[str, tuple[str, list[Cell]]] = {}
        try:
            with folder.open(LENGTHS) as stream:
                self._parts = _read_head(stream)
        except FileNotFoundError:
            pass  # of an earlier release
        except (SourceError, OSError, ValueError, TypeError, KeyError, RecursionError) as error:
            path = f"{folder.path}/{LENGTHS}"
            log.warning("%s: %s is not used: %s", folder.owner, path, error or "cut short")

    def of(self, record: PartRecord) -> list[Cell] | None:
        """The cells of a part in their order; None where they are not known."""
        identity, cells = self._parts.get(part_name(record.file.name), ("", []))
        known = identity == record.identity and sum(cell.rows for cell in cells) == record.rows
        return cells if known else None

    def each(self, cells: Sequence[Cell]) -> Iterator[bytes]:
        """The bytes of each of these cells. Raises IndexStaleError where they cannot be read, or
        are not what was written."""
        try:
            with self._folder.open(LENGTHS) as stream:
                for cell in cells:
                    stream.seek(cell.start)
                    data = stream.read(cell.size_bytes)
                    if crc32(data) != cell.crc32:
                        raise ValueError("it has other bytes than were written")
                    yield data
        except (SourceError, OSError, ValueError) as error:
            raise self._damaged(str(error)) from error

    def lengths(self, cells: Sequence[Cell], limits: DecodeLimits) -> list[LengthRecords]:
        """The lengths in these cells, checked. Raises IndexStaleError where they cannot be read, or
        could not be in an index of ours."""
        found = []
        for cell, data in zip(cells, self.each(cells), strict=True):
            try:
                records = unpack_lengths(memoryview(data), limits)
            except ValueError as error:
                raise self._damaged(str(error)) from error
            if records is None or len(records.samples) != cell.rows:
                raise self._damaged("it packs lengths of other rows than it says")
            found.append(records)
        return found

    def compared(
        self, record: PartRecord, groups: Iterable[tuple[pa.Table, LengthTable]]
    ) -> Iterator[pa.Table]:
        """The tables of a part's row groups. Raises IndexStaleError where the part has other
        lengths than its cells pack, if any are known."""
        cells = self.of(record)
        packed = self.each(cells or ())
        for table, lengths in groups:
            if cells is not None and len(lengths) and next(packed, b"") != pack_lengths(lengths):
                raise self._damaged("it packs other lengths than the index's parts have")
            yield table

    def are_whole(self, cells: Sequence[Cell]) -> bool:
        """Whether they are what was written."""
        try:
            for _ in self.each(cells):
                pass
        except IndexStaleError:
            return False
        return True

    def _damaged(self, why: str) -> IndexStaleError:
        return IndexStaleError(
            f"{self._folder.owner}: {self._folder.path}/{LENGTHS} is damaged, or being written "
            f"again ({why}). Remove it, and write the index again: {AGAIN}; the same files give "
            "the same index, and checkpoints fit it."
        )


def write_length_cells(folder: IndexFolder, manifest: Manifest) -> None:
    """Write the cells of all parts: those that are known already are copied, and only parts that
    are new are read. Raises IndexStaleError where one cannot be."""
    known = LengthCells(folder)
    head, at = [], 0
    with folder.replace(LENGTHS) as stream:
        for record in manifest.parts:
            cells = []
            for rows, data in _cells_of(folder, record, known):
                cells.append([rows, len(data), crc32(data)])
                stream.write(data)
                at += len(data)
            head.append([part_name(record.file.name), record.identity, cells])
        text = json.dumps(head).encode()
        stream.write(text + _END.pack(len(text), _FORM))


def _cells_of(
    folder: IndexFolder, record: PartRecord, known: LengthCells
) -> Iterator[tuple[int, bytes]]:
    """The rows and bytes of each cell of a part."""
    cells = known.of(record)
    if cells is None or not known.are_whole(cells):
        return packed_cells(folder, record)
    return zip((cell.rows for cell in cells), known.each(cells), strict=True)


def _read_head(stream: IO[bytes]) -> dict[str, tuple[str, list[Cell]]]:
    """Raises ValueError where it is cut short or was written by another release."""
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
