"""Several files are indexed at once, large ones in pieces, by whoever is an `Indexers`.

Contract. What is final is given at once, and is in the index's folder. However it ends, everything
that was begun is over; pieces that are whole stay in the folder until their file is joined, and the
next run takes them up, however that divides the file.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field, replace
from functools import partial
from heapq import heappop, heappush
from itertools import count, pairwise
from typing import Any, Protocol

from dataservice.sources.file_indexer import Result
from dataservice.sources.formats.protocol import FilePiece
from dataservice.sources.index_folder import IndexFolder
from dataservice.sources.manifest import LeftOutFile, PartRecord, Recipe
from dataservice.sources.storage import SourceFile

Progress = Callable[[int, int, int], None]  # rows done, bytes done, bytes in all

_POLL_S = 0.2
# Each has some pieces of a divided file one after another, so that all end together.
_PIECES_A_PLACE = 4
SMALLEST_PIECE_BYTES = 2**20
BATCH_BYTES = 64 * 2**20
MOST_FILES = 256  # of a batch, however small

Pieces = Mapping[str, Mapping[FilePiece, PartRecord | None]]
"""Pieces of files in their order, by name, each with its part if an earlier run has left it."""


class Indexers(Protocol):
    """Who indexes several files at once. What is begun gives a future of its result, which raises
    SourceError where storage is away or the index cannot be written. Parts and pieces are in the
    index's folder by then; what a file is damaged by is a result."""

    @property
    def places(self) -> int:
        """How many files or pieces are indexed at once."""
        ...

    @property
    def done(self) -> tuple[int, int]:
        """Rows and bytes that are done."""
        ...

    def index(self, files: Sequence[SourceFile]) -> "Future[Sequence[Result]]":
        """Index these files, one after another."""
        ...

    def count(self, file: SourceFile, piece: FilePiece) -> "Future[int | LeftOutFile]":
        """Count the records of a piece."""
        ...

    def index_piece(self, file: SourceFile, piece: FilePiece) -> "Future[Result]":
        """Index a piece of a file, as a part of its own."""
        ...

    def join(self, file: SourceFile, pieces: Mapping[FilePiece, PartRecord]) -> "Future[Result]":
        """Join the parts of a file's pieces, in their order."""
        ...

    def close(self) -> None:
        """Begin nothing more, and wait until nothing is written any more."""
        ...


Divide = Callable[[Sequence[SourceFile], int], Mapping[str, tuple[FilePiece, ...]]]
"""Gives the pieces, of about so many bytes, of the files that can be divided, by name."""


class Elsewhere(Protocol):
    """Indexes a source in place of this process, which then opens none of its files."""

    @property
    def places(self) -> int:
        """How many files or pieces are indexed at once, once the source has been listed."""
        ...

    def listed(self) -> tuple[Sequence[SourceFile], Recipe]:
        """The files of the source, sorted by name, and how they are indexed. Raises SourceError."""
        ...

    def divided(
        self, files: Sequence[SourceFile], piece_bytes: int
    ) -> Mapping[str, tuple[FilePiece, ...]]:
        """The pieces of those of these files that can be divided, by name."""
        ...

    def indexers(self, folder: IndexFolder) -> Indexers:
        """Who indexes files that were listed, and writes their parts into the folder."""
        ...


def index_elsewhere(
    elsewhere: Elsewhere,
    folder: IndexFolder,
    files: Sequence[SourceFile],
    report: Progress,
    left: Pieces,
) -> Iterator[Result]:
    """The result of each file, in the order in which files are finished. Small files are given away
    together. Raises what `elsewhere` raises."""
    shared = divided_among(elsewhere.places, files, elsewhere.divided, left)
    indexers = elsewhere.indexers(folder)
    return index_shared(indexers, files, shared, report, batch_bytes=BATCH_BYTES)


def unheard(rows: int, done_bytes: int, total_bytes: int) -> None:
    """Progress that nobody wants to hear of."""


def bytes_to_do(files: Sequence[SourceFile], pieces: Pieces) -> int:
    """Bytes of these files, without those of pieces whose part is there."""
    parts = [part for of_file in pieces.values() for part in of_file.items()]
    done_bytes = sum(piece.end - piece.start for piece, record in parts if record)
    return sum(file.size_bytes for file in files) - done_bytes


def divided_among(places: int, files: Sequence[SourceFile], divide: Divide, left: Pieces) -> Pieces:
    """The pieces of the files worth dividing: at most two files for each place, as those who index
    whole files end together all the same; and of those of which pieces are `left`."""
    to_do_bytes = bytes_to_do(files, left)
    piece_bytes = max(math.ceil(to_do_bytes / (_PIECES_A_PLACE * places)), SMALLEST_PIECE_BYTES)
    large = [file for file in files if file.size_bytes > 2 * piece_bytes or file.name in left]
    found = divide(large, piece_bytes) if large else {}
    pieces: dict[str, Mapping[FilePiece, PartRecord | None]] = {}
    for file in large:
        kept, divided = left.get(file.name, {}), found.get(file.name, ())
        if kept or divided:
            among = _between(kept, divided, file.size_bytes)
            pieces[file.name] = {piece: kept.get(piece) for piece in among}
    return pieces


def _between(
    left: Iterable[FilePiece], divided: Sequence[FilePiece], size_bytes: int
) -> Iterator[FilePiece]:
    """The pieces that are left, as they are, and what lies between them as it is divided now. So
    two runs need not divide a file alike: wherever a piece begins or ends, a record does."""
    starts, done = [piece.start for piece in divided], 0
    for piece in (*left, FilePiece(start=size_bytes, end=size_bytes)):
        inside = starts[bisect_right(starts, done) : bisect_left(starts, piece.start)]
        edges = pairwise((done, *inside, piece.start))
        yield from (FilePiece(start=start, end=end) for start, end in edges if start < end)
        if piece.start < size_bytes:
            yield piece
        done = piece.end


Then = Callable[[Any], Sequence[Result]]
_JOIN = -1  # the first place of all: behind it a file is done, and kept


class _Pool:
    """What is to be done by the indexers, in its order, and what is to follow it."""

    def __init__(self, places: int) -> None:
        self._most = 2 * places  # handed out: what follows from one must not wait behind all
        self._numbers = count()
        self._waiting: list[tuple[int, int, Then, Callable[[], Future[Any]]]] = []
        self._handed_out: dict[Future[Any], Then] = {}

    def submit(
        self, place: int, then: Then, begin: Callable[..., Future[Any]], *of: object
    ) -> None:
        """Begin something before what has a higher place; `then` gets its result, and gives those
        that are final."""
        beginning: Callable[[], Future[Any]] = partial(begin, *of)
        heappush(self._waiting, (place, next(self._numbers), then, beginning))

    def finished(self) -> Iterator[Result] | None:
        """What has become final in the next moment; None once all is done. Raises what work
        raised."""
        while self._waiting and len(self._handed_out) < self._most:
            _, _, then, begin = heappop(self._waiting)
            self._handed_out[begin()] = then
        return self._next() if self._handed_out else None

    def _next(self) -> Iterator[Result]:
        done, _ = wait(self._handed_out, timeout=_POLL_S, return_when=FIRST_COMPLETED)
        for future in done:
            yield from self._handed_out.pop(future)(future.result())


@dataclass(slots=True)
class _SharedFile:
    """A file that is indexed in pieces: counted, then scanned, then joined. `results` are there
    already of some."""

    file: SourceFile
    pieces: list[FilePiece]
    place: int
    pool: _Pool
    indexers: Indexers
    results: dict[FilePiece, Result]
    counts: dict[int, int | LeftOutFile] = field(default_factory=dict)
    uncounted: int = 0

    def begin(self) -> None:
        for number, (piece, behind) in enumerate(pairwise(self.pieces)):
            if behind not in self.results:  # otherwise its name says what lies before it
                then = partial(self._counted, number)
                self.pool.submit(self.place, then, self.indexers.count, self.file, piece)
                self.uncounted += 1
        if not self.uncounted:
            self._index()

    def _counted(self, number: int, records: int | LeftOutFile) -> Sequence[Result]:
        self.counts[number] = records
        return self._index() if len(self.counts) == self.uncounted else []

    def _index(self) -> Sequence[Result]:
        before = 0
        for number, piece in enumerate(self.pieces):
            if piece in self.results:
                before = piece.records_before
            else:
                piece = self.pieces[number] = replace(piece, records_before=before)
                then = partial(self._indexed, piece)
                self.pool.submit(self.place, then, self.indexers.index_piece, self.file, piece)
            found = self.counts.get(number, 0)
            if isinstance(found, LeftOutFile):
                return [found]
            before += found
        return self._join()

    def _indexed(self, piece: FilePiece, result: Result) -> Sequence[Result]:
        self.results[piece] = result
        return self._join()

    def _join(self) -> Sequence[Result]:
        if len(self.results) < len(self.pieces):
            return []
        results = {piece: self.results[piece] for piece in self.pieces}
        damaged = [each for each in results.values() if isinstance(each, LeftOutFile)]
        if not damaged:
            self.pool.submit(_JOIN, lambda joined: [joined], self.indexers.join, self.file, results)
        return damaged[:1]


def index_shared(
    indexers: Indexers,
    files: Sequence[SourceFile],
    shared: Pieces,
    report: Progress,
    *,
    batch_bytes: int = 0,
) -> Iterator[Result]:
    """The same, of files of which some are `shared` in pieces."""
    total_bytes = bytes_to_do(files, shared)
    pool = _Pool(indexers.places)
    # Largest files first, so that none is worked on alone at the end.
    ordered = sorted(files, key=lambda file: -file.size_bytes)
    whole = []
    for place, file in enumerate(ordered):
        if pieces := shared.get(file.name):
            done: dict[FilePiece, Result] = {piece: part for piece, part in pieces.items() if part}
            _SharedFile(file, list(pieces), place, pool, indexers, done).begin()
        else:
            whole.append((place, file))
    for place, batch in _batches(whole, batch_bytes):
        pool.submit(place, lambda results: results, indexers.index, batch)
    try:
        while (results := pool.finished()) is not None:
            yield from results
            report(*indexers.done, total_bytes)
    finally:
        indexers.close()


def _batches(
    files: Sequence[tuple[int, SourceFile]], batch_bytes: int
) -> Iterator[tuple[int, list[SourceFile]]]:
    """Files with their places in batches of about so many bytes, each with its first place."""
    batch: list[SourceFile] = []
    first = size_bytes = 0
    for place, file in files:
        full = size_bytes + file.size_bytes > batch_bytes or len(batch) == MOST_FILES
        if batch and full:
            yield first, batch
            batch, size_bytes = [], 0
        first = first if batch else place
        batch.append(file)
        size_bytes += file.size_bytes
    if batch:
        yield first, batch
