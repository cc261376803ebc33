"""Indexes the files of a source, one after another here or several at once in processes.

    whole file ────────────────────────────────▶ scan + measure ─────────▶ part
    large file of lines ─▶ pieces ─▶ count lines ─▶ scan + measure each ─▶ join ─▶ part

A file that can be divided between records, at lines or row groups, is shared by the processes;
samples are named by the number of their line, so the lines of all pieces are counted first. Its
part is the one that a single process would have made. A single process divides no file: it would
read lines twice. It goes on behind the pieces that several have left, though.
"""

import logging
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from concurrent.futures import CancelledError, Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from multiprocessing.process import BaseProcess
from multiprocessing.sharedctypes import Synchronized
from threading import Thread
from typing import TypeVar

from dataservice.core import garbage
from dataservice.core.errors import SourceError
from dataservice.sources.file_indexer import (
    FileIndexer,
    IndexTask,
    Result,
    divided_files,
    join_pieces,
)
from dataservice.sources.formats.protocol import FilePiece
from dataservice.sources.index_folder import IndexFolder
from dataservice.sources.index_part import Counter
from dataservice.sources.manifest import LeftOutFile, PartRecord
from dataservice.sources.shared_indexing import (
    Pieces,
    Progress,
    bytes_to_do,
    divided_among,
    index_shared,
)
from dataservice.sources.storage import SourceFile

# Below this size, starting processes costs more than it saves: each loads its own tokenizer.
SMALLEST_POOLED_BYTES = 32 * 2**20
_INTERRUPTED = (
    "interrupted: the files and pieces that are under way are finished first, so that the next run "
    "takes them up, and what is finished is kept. Interrupt again to give them up"
)

Found = TypeVar("Found")

log = logging.getLogger(__name__)


def index_files(
    task: IndexTask,
    files: Sequence[SourceFile],
    workers: int,
    report: Progress,
    left: Pieces,
) -> Iterator[Result]:
    """The result of each file, in the order in which files are finished. Pieces that are `left` of
    files are not made again. Raises SourceError where storage is away or the index cannot be
    written."""
    total_bytes = bytes_to_do(files, left)
    pooled = workers > 1 and total_bytes >= SMALLEST_POOLED_BYTES
    shared: Pieces = {}
    if (pooled or left) and task.samples_per_file is None:
        among = files if pooled else [file for file in files if file.name in left]
        shared = divided_among(workers, among, partial(divided_files, task), left)
    workers = min(workers, len(files) + sum(len(pieces) - 1 for pieces in shared.values()))
    if shared or (pooled and workers > 1):
        yield from _index_in_processes(task, files, shared, workers, report)
    elif files:
        folder = IndexFolder(task.out_dir, task.spec.name)
        indexer = FileIndexer(task, _LocalCounter(report, total_bytes), folder.replace)
        for file in files:
            yield indexer.index(file)


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


def _index_in_processes(
    task: IndexTask,
    files: Sequence[SourceFile],
    shared: Pieces,
    workers: int,
    report: Progress,
) -> Iterator[Result]:
    context = multiprocessing.get_context("spawn")
    counter = _SharedCounter(context.Value("q", 0), context.Value("q", 0))
    closing = context.Value("b", 0)
    others = frozenset(multiprocessing.active_children())
    executor = ProcessPoolExecutor(
        workers, mp_context=context, initializer=_start_process, initargs=(task, counter, closing)
    )
    indexers = _Processes(executor, task, counter, closing, workers, others)
    try:
        yield from index_shared(indexers, files, shared, report)
    except BrokenProcessPool as error:
        raise SourceError(
            f"source {task.spec.name!r}: one of {workers} indexing processes died, perhaps "
            "for want of memory. Run it again with fewer workers; what is finished is kept."
        ) from error


@dataclass(frozen=True, slots=True)
class _Processes:
    """Processes of this machine."""

    executor: ProcessPoolExecutor
    task: IndexTask
    counter: _SharedCounter
    closing: "Synchronized[int]"
    places: int
    others: Set[BaseProcess]  # of this program

    @property
    def done(self) -> tuple[int, int]:
        return self.counter.rows.value, self.counter.size_bytes.value

    def index(self, files: Sequence[SourceFile]) -> "Future[Sequence[Result]]":
        return self._submit(_index_in_process, files)

    def count(self, file: SourceFile, piece: FilePiece) -> "Future[int | LeftOutFile]":
        return self._submit(_count_in_process, file, piece)

    def index_piece(self, file: SourceFile, piece: FilePiece) -> "Future[Result]":
        return self._submit(_index_piece_in_process, file, piece)

    def join(self, file: SourceFile, pieces: Mapping[FilePiece, PartRecord]) -> "Future[Result]":
        return self._submit(_join_in_process, self.task, file, pieces)

    def _submit(self, work: "Callable[..., Found]", *of: object) -> "Future[Found]":
        # A process may be started by it, and has SIGINT blocked until it says that it ignores it.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        try:
            return self.executor.submit(work, *of)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def close(self) -> None:
        self.closing.value = 1  # to calls that processes have been given already
        if isinstance(sys.exc_info()[1], KeyboardInterrupt):
            log.warning(_INTERRUPTED)
        try:
            self.executor.shutdown(wait=True, cancel_futures=True)
        except KeyboardInterrupt:  # once more: what is under way is given up
            for child in {*multiprocessing.active_children()} - self.others:
                child.kill()
            raise


_indexer: FileIndexer | None = None  # of this process of the pool
_closing: "Synchronized[int] | None" = None


def _start_process(task: IndexTask, counter: Counter, closing: "Synchronized[int]") -> None:
    global _indexer, _closing
    # A terminal interrupts the whole group of processes; what one has begun is finished and kept.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    _closing = closing
    Thread(target=_end_with_parent, daemon=True).start()
    garbage.search_seldom()  # rows are many objects, and none is in a cycle
    folder = IndexFolder(task.out_dir, task.spec.name)
    _indexer = FileIndexer(task, counter, folder.replace)


def _end_with_parent() -> None:
    """A run that is killed leaves no process behind, which would write beside the next run."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _of_this_process() -> FileIndexer:
    """Raises CancelledError where the run ends, so that nothing more is begun."""
    assert _indexer is not None
    assert _closing is not None
    if _closing.value:
        raise CancelledError
    return _indexer


def _index_in_process(files: Sequence[SourceFile]) -> Sequence[Result]:
    return [_of_this_process().index(file) for file in files]


def _count_in_process(file: SourceFile, piece: FilePiece) -> int | LeftOutFile:
    return _of_this_process().count(file, piece)


def _index_piece_in_process(file: SourceFile, piece: FilePiece) -> Result:
    return _of_this_process().index_piece(file, piece)


def _join_in_process(
    task: IndexTask, file: SourceFile, pieces: Mapping[FilePiece, PartRecord]
) -> Result:
    return join_pieces(IndexFolder(task.out_dir, task.spec.name), file, pieces)
