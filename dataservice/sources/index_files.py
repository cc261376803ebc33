"""Indexes the files of a source, one after another here or several at once in processes.

    whole file ────────────────────────────────▶ scan + measure ─────────▶ part
    large file of lines ─▶ pieces ─▶ count lines ─▶ scan + measure each ─▶ join ─▶ part

A file that can be divided between records, at lines or row groups, is shared by the processes;
samples are named by the number of their line, so the lines of all pieces are counted first. Its
part is the one that a single process would have made.
"""

import math
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from heapq import heappop, heappush
from itertools import count
from multiprocessing.sharedctypes import Synchronized
from typing import Any

from dataservice.core.errors import SourceError, StorageAwayError
from dataservice.core.job import SourceSpec
from dataservice.core.limits import DecodeLimits
from dataservice.core.ports import SampleMeasurer
from dataservice.sources.filesystem import translate
from dataservice.sources.formats.protocol import Divisible, FilePiece, ScannedSample
from dataservice.sources.formats.registry import open_format
from dataservice.sources.index_folder import IndexFolder, part_name, piece_name
from dataservice.sources.index_part import Counter, join_parts, write_part
from dataservice.sources.manifest import LeftOutFile, PartRecord, Recipe
from dataservice.sources.storage import SourceFile


class DamagedFilesError(SourceError):
    """Files of a source are damaged; the message says which ones and how."""


MakeMeasurer = Callable[[], SampleMeasurer]
Progress = Callable[[int, int, int], None]  # rows done, bytes done, bytes in all
Result = PartRecord | LeftOutFile

_POLL_S = 0.2
# Below this size, starting processes costs more than it saves: each loads its own tokenizer.
SMALLEST_POOLED_BYTES = 32 * 2**20
# A process has some pieces of a divided file one after another, so that all end together.
_PIECES_A_PROCESS = 4
SMALLEST_PIECE_BYTES = 2**20
_LARGEST_PIECE_BYTES = 2**28


@dataclass(frozen=True, kw_only=True, slots=True)
class IndexTask:
    """The settings that all files of a run share; pickled once to each process."""

    spec: SourceSpec
    out_dir: str
    recipe: Recipe
    make_measurer: MakeMeasurer
    limits: DecodeLimits
    samples_per_file: int | None


def index_files(
    task: IndexTask, files: Sequence[SourceFile], workers: int, progress: Progress | None
) -> Iterator[Result]:
    """The result of each file, in the order in which files are finished. Raises SourceError where
    storage is away or the index cannot be written."""
    total_bytes = sum(file.size_bytes for file in files)
    report = progress or (lambda _rows, _done_bytes, _total_bytes: None)
    report(0, 0, total_bytes)
    pooled = workers > 1 and total_bytes >= SMALLEST_POOLED_BYTES
    shared = _divided(task, files, total_bytes, workers) if pooled else {}
    workers = min(workers, len(files) + sum(len(pieces) - 1 for pieces in shared.values()))
    if pooled and workers > 1:
        yield from _index_in_pool(task, files, shared, workers, report, total_bytes)
    elif files:
        indexer = _FileIndexer(task, _LocalCounter(report, total_bytes))
        for file in files:
            yield indexer.index(file)


def _divided(
    task: IndexTask, files: Sequence[SourceFile], total_bytes: int, workers: int
) -> dict[str, tuple[FilePiece, ...]]:
    """The pieces of the files that are worth dividing, by name."""
    format = open_format(task.spec, task.limits)
    if not isinstance(format, Divisible) or task.samples_per_file is not None:
        return {}
    share_bytes = max(math.ceil(total_bytes / (_PIECES_A_PROCESS * workers)), SMALLEST_PIECE_BYTES)
    found = {}
    for file in files:
        if file.size_bytes <= 2 * share_bytes:
            continue  # processes that take whole files end together all the same
        try:
            with translate(f"source {task.spec.name!r}", file.path, "be read"):
                pieces = format.divided(file, min(share_bytes, _LARGEST_PIECE_BYTES))
        except StorageAwayError:
            raise
        except SourceError:
            continue  # whoever scans it says why
        if len(pieces) > 1:
            found[file.name] = pieces
    return found


class _FileIndexer:
    """Indexes files one after another, with one measurer."""

    def __init__(self, task: IndexTask, counter: Counter) -> None:
        self._task = task
        self._counter = counter
        self._measurer = task.make_measurer()
        self._format = open_format(task.spec, task.limits)
        self._folder = IndexFolder(task.out_dir, task.spec.name)

    def index(self, file: SourceFile) -> Result:
        """Write the part of one file, or say what is wrong with it."""
        return self._write(part_name(file.name), file, self._format.scan)

    def count(self, file: SourceFile, piece: FilePiece) -> int | LeftOutFile:
        """The records of a piece, or what is wrong with its file."""
        try:
            with self._reading(file):
                return self._divisible.records_in(file, piece)
        except DamagedFilesError as error:
            return LeftOutFile(name=file.name, reason=str(error))

    def index_piece(self, file: SourceFile, number: int, piece: FilePiece) -> Result:
        """The same as `index` for one piece of a file, as a part of its own."""
        scan = partial(self._divisible.scan_piece, piece=piece)
        return self._write(piece_name(file.name, number), file, scan, piece)

    def join(self, file: SourceFile, records: Sequence[PartRecord]) -> Result:
        """Write the part of a file whose pieces are indexed, in their order."""
        folder, name = self._folder, part_name(file.name)
        pieces = (folder.open(piece_name(file.name, number)) for number in range(len(records)))
        with (
            translate(folder.owner, f"{folder.path}/{name}", "be made"),
            folder.replace(name) as part,
        ):
            joined = join_parts(part, zip(pieces, records, strict=True))
        folder.remove_pieces([file.name])
        return joined

    @property
    def _divisible(self) -> Divisible:
        assert isinstance(self._format, Divisible), "only such files are divided"
        return self._format

    def _write(
        self,
        name: str,
        file: SourceFile,
        scan: Callable[[SourceFile], Iterator[ScannedSample]],
        piece: FilePiece | None = None,
    ) -> Result:
        try:
            with self._folder.replace(name) as stream:
                return write_part(
                    stream,
                    file=file,
                    samples=self._scanned(file, scan),
                    recipe=self._task.recipe,
                    measurer=self._measurer,
                    counter=self._counter,
                    most_samples=self._task.samples_per_file,
                    between=(piece.start, piece.end) if piece else (0, file.size_bytes),
                )
        except DamagedFilesError as error:
            return LeftOutFile(name=file.name, reason=str(error))

    def _scanned(
        self, file: SourceFile, scan: Callable[[SourceFile], Iterator[ScannedSample]]
    ) -> Iterator[ScannedSample]:
        with self._reading(file):
            yield from scan(file)

    @contextmanager
    def _reading(self, file: SourceFile) -> Iterator[None]:
        """Marks errors of reading the file, to tell them from errors of writing the index."""
        owner = f"source {self._task.spec.name!r}"
        try:
            with translate(owner, file.path, "be read"):
                yield
        except StorageAwayError:
            raise
        except SourceError as error:
            raise DamagedFilesError(str(error).removeprefix(f"{owner}: ")) from error


@dataclass(slots=True)
class _LocalCounter:
    """Counts and reports at once."""

    report: Progress
    total_bytes: int
    rows: int = 0
    size_bytes: int = 0

    def add(self, rows: int, size_bytes: int) -> None:
        self.rows += rows
        self.size_bytes += size_bytes
        self.report(self.rows, self.size_bytes, self.total_bytes)


@dataclass(frozen=True, slots=True)
class _SharedCounter:
    """Counts in memory shared with the process that reports."""

    rows: "Synchronized[int]"
    size_bytes: "Synchronized[int]"

    def add(self, rows: int, size_bytes: int) -> None:
        with self.rows.get_lock():
            self.rows.value += rows
            self.size_bytes.value += size_bytes


Then = Callable[[Any], Sequence[Result]]
_JOIN = -1  # the first place of all: behind it a file is done, and kept


class _Pool:
    """What is to be done in the processes, in its order, and what is to follow it."""

    def __init__(self, executor: ProcessPoolExecutor, workers: int) -> None:
        self._executor = executor
        self._most = 2 * workers  # handed out: what follows from one must not wait behind all
        self._numbers = count()
        self._waiting: list[tuple[int, int, Then, Callable[..., Any], Sequence[object]]] = []
        self._handed_out: dict[Future[Any], Then] = {}

    def submit(self, place: int, then: Then, work: Callable[..., Any], *of: object) -> None:
        """Do `work` in a process, before what has a higher place; `then` gets its result, and gives
        those that are final."""
        heappush(self._waiting, (place, next(self._numbers), then, work, of))

    def finished(self) -> Iterator[Result] | None:
        """What has become final in the next moment; None once all is done. Raises what work
        raised."""
        while self._waiting and len(self._handed_out) < self._most:
            _, _, then, work, of = heappop(self._waiting)
            self._handed_out[self._executor.submit(work, *of)] = then
        return self._next() if self._handed_out else None

    def _next(self) -> Iterator[Result]:
        done, _ = wait(self._handed_out, timeout=_POLL_S, return_when=FIRST_COMPLETED)
        for future in done:
            yield from self._handed_out.pop(future)(future.result())


@dataclass(slots=True)
class _SharedFile:
    """A file that several processes index: counted, then scanned, then joined."""

    file: SourceFile
    pieces: Sequence[FilePiece]
    place: int
    pool: _Pool
    counts: dict[int, int | LeftOutFile] = field(default_factory=dict)
    results: dict[int, Result] = field(default_factory=dict)

    def begin(self) -> None:
        for number, piece in enumerate(self.pieces):
            then = partial(self._counted, number)
            self.pool.submit(self.place, then, _count_in_process, self.file, piece)

    def _counted(self, number: int, records: int | LeftOutFile) -> Sequence[Result]:
        self.counts[number] = records
        if len(self.counts) < len(self.pieces):
            return []
        before = 0
        for place, piece in enumerate(self.pieces):
            found = self.counts[place]
            if isinstance(found, LeftOutFile):
                return [found]
            self.pool.submit(
                self.place,
                partial(self._indexed, place),
                *(_index_piece_in_process, self.file, place),
                replace(piece, records_before=before),
            )
            before += found
        return []

    def _indexed(self, number: int, result: Result) -> Sequence[Result]:
        self.results[number] = result
        if len(self.results) < len(self.pieces):
            return []
        results = [self.results[place] for place in range(len(self.pieces))]
        damaged = [result for result in results if isinstance(result, LeftOutFile)]
        if not damaged:
            self.pool.submit(_JOIN, lambda joined: [joined], _join_in_process, self.file, results)
        return damaged[:1]


def _index_in_pool(
    task: IndexTask,
    files: Sequence[SourceFile],
    shared: dict[str, tuple[FilePiece, ...]],
    workers: int,
    report: Progress,
    total_bytes: int,
) -> Iterator[Result]:
    context = multiprocessing.get_context("spawn")
    counter = _SharedCounter(context.Value("q", 0), context.Value("q", 0))
    with ProcessPoolExecutor(
        workers, mp_context=context, initializer=_start_process, initargs=(task, counter)
    ) as executor:
        pool = _Pool(executor, workers)
        # Largest files first, so that no process works on a large one alone at the end.
        for place, file in enumerate(sorted(files, key=lambda file: -file.size_bytes)):
            if file.name in shared:
                _SharedFile(file, shared[file.name], place, pool).begin()
            else:
                pool.submit(place, lambda result: [result], _index_in_process, file)
        try:
            while (results := pool.finished()) is not None:
                yield from results
                report(counter.rows.value, counter.size_bytes.value, total_bytes)
        except BrokenProcessPool as error:
            raise SourceError(
                f"source {task.spec.name!r}: one of {workers} indexing processes died, perhaps "
                "for want of memory. Run it again with fewer workers; finished files are kept."
            ) from error
        finally:
            executor.shutdown(wait=True, cancel_futures=True)
            IndexFolder(task.out_dir, task.spec.name).remove_pieces(shared)


_indexer: _FileIndexer | None = None  # of this process of the pool


def _start_process(task: IndexTask, counter: Counter) -> None:
    global _indexer
    _indexer = _FileIndexer(task, counter)


def _of_this_process() -> _FileIndexer:
    assert _indexer is not None
    return _indexer


def _index_in_process(file: SourceFile) -> Result:
    return _of_this_process().index(file)


def _count_in_process(file: SourceFile, piece: FilePiece) -> int | LeftOutFile:
    return _of_this_process().count(file, piece)


def _index_piece_in_process(file: SourceFile, number: int, piece: FilePiece) -> Result:
    return _of_this_process().index_piece(file, number, piece)


def _join_in_process(file: SourceFile, records: Sequence[PartRecord]) -> Result:
    return _of_this_process().join(file, records)
