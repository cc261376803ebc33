"""Builds the index of one source: every file is walked once, every sample measured.

    list files → skip files whose part is current → scan + measure → parts → manifest

Success: the manifest is written last, so an index without one is not complete. Failure of a
file (truncated, unreadable) stops the run with its SourceError; parts that are finished stay
and are not done again. Cancellation (KeyboardInterrupt) likewise. A sample that cannot be
measured stops nothing: it is listed in the manifest with its reason.
"""

import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing.sharedctypes import Synchronized

from dataservice.core.errors import SourceError
from dataservice.core.job import SourceSpec
from dataservice.core.limits import DEFAULT_LIMITS, DecodeLimits
from dataservice.core.ports import SampleMeasurer
from dataservice.sources.formats.registry import list_files, open_format
from dataservice.sources.index_folder import MANIFEST, IndexFolder, part_name
from dataservice.sources.index_part import Counter, read_record, write_part
from dataservice.sources.manifest import Manifest, PartRecord, Recipe, SkippedSample
from dataservice.sources.storage import SourceFile

MakeMeasurer = Callable[[], SampleMeasurer]
Progress = Callable[[int, int, int], None]  # rows done, bytes done, bytes in all

_POLL_S = 0.2
# Below this, starting processes costs more than it saves: each loads a tokenizer of its own.
_SMALLEST_POOLED_BYTES = 32 * 2**20
_SHOWN_REASONS = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class IndexSummary:
    """What indexing one source gave. `files_reused` had a current part already; `rows` and
    `skipped` count those files too."""

    source: str
    rows: int
    files: int
    files_reused: int
    skipped: tuple[SkippedSample, ...]
    fingerprint: str
    seconds: float


def build_index(
    spec: SourceSpec,
    *,
    out_dir: str,
    make_measurer: MakeMeasurer,
    workers: int = 1,
    progress: Progress | None = None,
    limits: DecodeLimits = DEFAULT_LIMITS,
) -> IndexSummary:
    """Index `spec` into `out_dir/<source name>/`; what is current already is kept.

    Args:
        out_dir: a path or an fsspec URL, shared by the sources of a job.
        make_measurer: makes the measurer; with `workers` > 1 it must be picklable, as each
            process (started by spawn) makes its own.
        workers: processes; files are shared out among them.
        progress: told (rows done, bytes done, bytes in all) now and then, in this thread.
        limits: what a sample may ask of the reader; the measurer has been made with the same.

    Raises:
        SourceError: a file is missing, damaged or unreadable, the index cannot be written, or
            not one sample could be measured.
    """
    started_s = time.monotonic()
    files = list_files(spec)
    folder = IndexFolder(out_dir, spec.name)
    _require_apart(spec, folder, files)
    folder.create()
    recipe = Recipe.of(spec, make_measurer().fingerprint)
    records = {file.path: record for file, record in _current_parts(folder, files, recipe)}
    reused = len(records)
    task = _Task(
        spec=spec, out_dir=out_dir, recipe=recipe, make_measurer=make_measurer, limits=limits
    )
    todo = [file for file in files if file.path not in records]
    for record in _index_files(task, todo, workers, progress):
        records[record.file.path] = record
    manifest = Manifest(
        source=spec.name, recipe=recipe, parts=tuple(records[file.path] for file in files)
    )
    skipped = tuple(s for part in manifest.parts for s in part.skipped)
    _require_samples(spec, manifest, skipped)
    with folder.replace(MANIFEST) as stream:
        stream.write(manifest.to_json().encode())
    folder.remove_others({part_name(file.path) for file in files})
    return IndexSummary(
        source=spec.name,
        rows=manifest.rows,
        files=len(files),
        files_reused=reused,
        skipped=skipped,
        fingerprint=manifest.fingerprint,
        seconds=time.monotonic() - started_s,
    )


def _current_parts(
    folder: IndexFolder, files: Sequence[SourceFile], recipe: Recipe
) -> Iterator[tuple[SourceFile, PartRecord]]:
    """Files whose part was made from these very bytes by this very recipe."""
    for file in files:
        try:
            with folder.open(part_name(file.path)) as stream:
                record = read_record(stream)
        except FileNotFoundError:
            continue
        if record is not None and record.file == file and record.recipe == recipe:
            yield file, record


def _require_apart(spec: SourceSpec, folder: IndexFolder, files: Sequence[SourceFile]) -> None:
    """A Parquet source that is a folder would else take its own index for data."""
    inside = [file.path for file in files if file.path.startswith(f"{folder.path}/")]
    if inside:
        raise SourceError(
            f"source {spec.name!r}: its url {spec.url!r} takes in its own index, such as "
            f"{inside[0]}. Keep the index in a directory outside of the source."
        )


def _require_samples(
    spec: SourceSpec, manifest: Manifest, skipped: Sequence[SkippedSample]
) -> None:
    if manifest.rows:
        return
    if not skipped:
        raise SourceError(
            f"source {spec.name!r} is empty: its {len(manifest.parts)} files at {spec.url!r} hold "
            f"no {spec.format} sample. Correct the source's url or format."
        )
    reasons = "; ".join(f"{s.key}: {s.reason}" for s in skipped[:_SHOWN_REASONS])
    raise SourceError(
        f"source {spec.name!r}: not one of its {len(skipped)} samples can be used. The first: "
        f"{reasons} Correct the source's format or the job's processors."
    )


# ---- one file, here or in another process -------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class _Task:
    """What is the same for all files of a run; pickled to each process once."""

    spec: SourceSpec
    out_dir: str
    recipe: Recipe
    make_measurer: MakeMeasurer
    limits: DecodeLimits


class _FileIndexer:
    """Indexes files one after another, with one measurer."""

    def __init__(self, task: _Task, counter: Counter) -> None:
        self._task = task
        self._counter = counter
        self._measurer = task.make_measurer()
        self._format = open_format(task.spec, task.limits)
        self._folder = IndexFolder(task.out_dir, task.spec.name)

    def index(self, file: SourceFile) -> PartRecord:
        """Write the part of one file."""
        with self._folder.replace(part_name(file.path)) as stream:
            return write_part(
                stream,
                file=file,
                samples=self._format.scan(file),
                recipe=self._task.recipe,
                measurer=self._measurer,
                counter=self._counter,
            )


def _index_files(
    task: _Task, files: Sequence[SourceFile], workers: int, progress: Progress | None
) -> Iterator[PartRecord]:
    """The records of all files, in the order in which they are done."""
    total_bytes = sum(file.size_bytes for file in files)
    report = progress or (lambda _rows, _done_bytes, _total_bytes: None)
    report(0, 0, total_bytes)
    if min(workers, len(files)) > 1 and total_bytes >= _SMALLEST_POOLED_BYTES:
        yield from _index_in_pool(task, files, min(workers, len(files)), report, total_bytes)
    elif files:
        indexer = _FileIndexer(task, _LocalCounter(report, total_bytes))
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


def _index_in_pool(
    task: _Task, files: Sequence[SourceFile], workers: int, report: Progress, total_bytes: int
) -> Iterator[PartRecord]:
    context = multiprocessing.get_context("spawn")
    counter = _SharedCounter(context.Value("q", 0), context.Value("q", 0))
    with ProcessPoolExecutor(
        workers, mp_context=context, initializer=_start_process, initargs=(task, counter)
    ) as pool:
        # The largest first, so that no process is left alone with one at the end.
        order = sorted(files, key=lambda file: -file.size_bytes)
        pending: set[Future[PartRecord]] = {pool.submit(_index_in_process, f) for f in order}
        try:
            while pending:
                done, pending = wait(pending, timeout=_POLL_S, return_when=FIRST_EXCEPTION)
                report(counter.rows.value, counter.size_bytes.value, total_bytes)
                yield from [future.result() for future in done]
        except BrokenProcessPool as error:
            raise SourceError(
                f"source {task.spec.name!r}: one of {workers} indexing processes died, perhaps "
                "for want of memory. Run it again with fewer workers; finished files are kept."
            ) from error
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


_indexer: _FileIndexer | None = None  # of this process of the pool


def _start_process(task: _Task, counter: Counter) -> None:
    global _indexer
    _indexer = _FileIndexer(task, counter)


def _index_in_process(file: SourceFile) -> PartRecord:
    assert _indexer is not None
    return _indexer.index(file)
