"""Builds the index of one source: every file is walked once, every sample measured.

    list files → skip files whose part is current → scan + measure → parts → manifest

Success: the manifest is written last, so an index without one is incomplete. A damaged file does
not stop the others: the run names all damaged files at the end and then fails, unless they are to
be left out. Unavailable storage is not damage; it ends the run. Finished parts are kept and not
made again, also after a cancellation (KeyboardInterrupt). A sample that cannot be measured does not
stop the run: the manifest lists it with its reason.
"""

import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from multiprocessing.sharedctypes import Synchronized

import numpy as np

from dataservice.core.errors import IndexStaleError, SourceError, StorageAwayError
from dataservice.core.job import SourceSpec
from dataservice.core.limits import DEFAULT_LIMITS, DecodeLimits
from dataservice.core.ports import SampleMeasurer
from dataservice.sources.filesystem import translate
from dataservice.sources.formats.protocol import ScannedSample
from dataservice.sources.formats.registry import list_files, open_format
from dataservice.sources.index_folder import MANIFEST, IndexFolder, part_name
from dataservice.sources.index_part import Counter, read_record, write_part
from dataservice.sources.manifest import (
    IndexedFile,
    LeftOutFile,
    LongSamples,
    Manifest,
    MediaCounts,
    PartRecord,
    Recipe,
    SkippedSample,
)
from dataservice.sources.part_reader import read_part, read_tokens
from dataservice.sources.reasons import ReasonCount, by_wording, reason_lines
from dataservice.sources.storage import SourceFile


class DamagedFilesError(SourceError):
    """Files of a source are damaged; the message says which ones and how."""


MakeMeasurer = Callable[[], SampleMeasurer]
Progress = Callable[[int, int, int], None]  # rows done, bytes done, bytes in all

_POLL_S = 0.2
# Below this size, starting processes costs more than it saves: each loads its own tokenizer.
SMALLEST_POOLED_BYTES = 32 * 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenFigures:
    """LLM tokens of a source's samples: their sum, and quantiles over samples."""

    total: int
    p50: int
    p99: int
    longest: int


@dataclass(frozen=True, kw_only=True, slots=True)
class IndexSummary:
    """The result of indexing one source. `files_reused` files had a current part already; all other
    figures include those files. `left_out` are damaged files that the user chose to leave out.
    `long` says what became of samples that are longer than the pipeline's `longer_than`; those left
    out are among `skipped`."""

    source: str
    rows: int
    files: int
    files_reused: int
    media: MediaCounts
    tokens: TokenFigures
    skipped: tuple[SkippedSample, ...]
    skipped_reasons: tuple[ReasonCount, ...]
    left_out: tuple[LeftOutFile, ...]
    fingerprint: str
    seconds: float
    long: LongSamples = field(default_factory=LongSamples)


def build_index(
    spec: SourceSpec,
    *,
    out_dir: str,
    make_measurer: MakeMeasurer,
    workers: int = 1,
    progress: Progress | None = None,
    limits: DecodeLimits = DEFAULT_LIMITS,
    leave_out_damaged: bool = False,
    samples_per_file: int | None = None,
) -> IndexSummary:
    """Index `spec` into `out_dir/<source name>/`; parts that are current already are kept.

    Args:
        out_dir: a path or an fsspec URL, shared by the sources of a job.
        make_measurer: makes the measurer; with `workers` > 1 it must be picklable, as each
            process (started by spawn) makes its own.
        workers: number of processes, which share the files.
        progress: called with (rows done, bytes done, bytes in all) at intervals, in this thread.
        limits: limits on what a sample may make the reader allocate; the measurer is made with the
            same limits.
        leave_out_damaged: list damaged files in the manifest and make the index without them.
        samples_per_file: measure only so many samples at the beginning of each file. Such an index
            is not of its source: only for looking at the summary.

    Raises:
        SourceError: a file is missing, files are damaged (all of them are named), the index
            cannot be written, or not one sample could be measured.
    """
    started_s = time.monotonic()
    files = list_files(spec)
    folder = IndexFolder(out_dir, spec.name)
    _require_apart(spec, folder, files)
    folder.create()
    recipe = Recipe.of(spec, make_measurer().fingerprint)
    records = dict(_current_parts(folder, files, recipe, limits))
    reused = len(records)
    task = _Task(
        spec=spec,
        out_dir=out_dir,
        recipe=recipe,
        make_measurer=make_measurer,
        limits=limits,
        samples_per_file=samples_per_file,
    )
    damaged: list[LeftOutFile] = []
    todo = [file for file in files if file.name not in records]
    for result in _index_files(task, todo, workers, progress):
        if isinstance(result, LeftOutFile):
            damaged.append(result)
        else:
            records[result.file.name] = result
    damaged.sort(key=lambda file: file.name)
    if damaged and not leave_out_damaged:
        raise _damaged_error(spec, damaged, len(files))
    manifest = Manifest(
        source=spec.name,
        recipe=recipe,
        parts=tuple(records[file.name] for file in files if file.name in records),
        left_out=tuple(damaged),
    )
    _require_samples(spec, manifest)
    with folder.replace(MANIFEST) as stream:
        stream.write(manifest.to_json().encode())
    folder.remove_others({part_name(part.file.name) for part in manifest.parts})
    return _summary(manifest, folder, files_reused=reused, seconds=time.monotonic() - started_s)


def _summary(
    manifest: Manifest, folder: IndexFolder, *, files_reused: int, seconds: float
) -> IndexSummary:
    skipped = tuple(s for part in manifest.parts for s in part.skipped)
    return IndexSummary(
        source=manifest.source,
        rows=manifest.rows,
        files=len(manifest.parts),
        files_reused=files_reused,
        media=sum((part.media for part in manifest.parts), MediaCounts()),
        tokens=_token_figures(manifest, folder),
        skipped=skipped,
        skipped_reasons=by_wording((each.key, each.reason) for each in skipped),
        left_out=manifest.left_out,
        fingerprint=manifest.fingerprint,
        seconds=seconds,
        long=manifest.long,
    )


def _token_figures(manifest: Manifest, folder: IndexFolder) -> TokenFigures:
    """Exact figures, from the number of samples of each length; memory is proportional to the
    longest sample's tokens."""
    samples_of = np.zeros(1, dtype=np.int64)
    for part in manifest.parts:
        for tokens in read_tokens(folder, part):
            counts = np.bincount(tokens, minlength=len(samples_of))
            counts[: len(samples_of)] += samples_of
            samples_of = counts
    behind = np.cumsum(samples_of)
    p50, p99 = (int(np.searchsorted(behind, share * behind[-1])) for share in (0.5, 0.99))
    total = int((samples_of * np.arange(len(samples_of))).sum())
    return TokenFigures(total=total, p50=p50, p99=p99, longest=len(samples_of) - 1)


def _current_parts(
    folder: IndexFolder, files: Sequence[SourceFile], recipe: Recipe, limits: DecodeLimits
) -> Iterator[tuple[str, PartRecord]]:
    """By name, files that have a whole part, made from these very bytes by this very recipe."""
    for file in files:
        try:
            with folder.open(part_name(file.name)) as stream:
                record = read_record(stream)
            if record is None or record.recipe != recipe or record.file != IndexedFile.of(file):
                continue
            for _ in read_part(folder, record, limits):
                pass
        except (FileNotFoundError, IndexStaleError):
            continue
        yield file.name, record


def _damaged_error(
    spec: SourceSpec, damaged: Sequence[LeftOutFile], files: int
) -> DamagedFilesError:
    reasons = "\n".join(f"  {file.name}: {file.reason}" for file in damaged)
    return DamagedFilesError(
        f"source {spec.name!r}: {len(damaged)} of its {files} files are damaged; the others are "
        f"indexed, and kept.\n{reasons}\nRepair or remove them and run it again, or make the index "
        "without them: `dataservice index JOB.yaml --leave-out-damaged`."
    )


def _require_apart(spec: SourceSpec, folder: IndexFolder, files: Sequence[SourceFile]) -> None:
    """Raises SourceError when the index lies inside its source: a Parquet source that is a folder
    would take its own index for data."""
    inside = [file.path for file in files if file.path.startswith(f"{folder.path}/")]
    if inside:
        raise SourceError(
            f"source {spec.name!r}: its url {spec.url!r} takes in its own index, such as "
            f"{inside[0]}. Keep the index in a directory outside of the source."
        )


def _require_samples(spec: SourceSpec, manifest: Manifest) -> None:
    if manifest.rows:
        return
    if not manifest.parts:
        reasons = "\n".join(f"  {file.name}: {file.reason}" for file in manifest.left_out)
        raise SourceError(
            f"source {spec.name!r}: all of its {len(manifest.left_out)} files are damaged.\n"
            f"{reasons}\nRepair them, or correct the source's format."
        )
    skipped = [each for part in manifest.parts for each in part.skipped]
    if not skipped:
        raise SourceError(
            f"source {spec.name!r} is empty: its {len(manifest.parts)} files at {spec.url!r} hold "
            f"no {spec.format} sample. Correct the source's url or format."
        )
    counts = by_wording((each.key, each.reason) for each in skipped)
    lines = "".join(f"  {line}\n" for line in reason_lines(spec.name, counts))
    tokens = manifest.long.longest_tokens
    longest = f"The longest has {tokens:,} tokens. " if tokens else ""
    raise SourceError(
        f"source {spec.name!r}: not one of its {len(skipped):,} samples can be used:\n{lines}"
        f"{longest}Mend what the reasons name, or correct the source's format or the job's "
        "pipeline."
    )


# ---- one file, here or in another process -------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class _Task:
    """The settings that all files of a run share; pickled once to each process."""

    spec: SourceSpec
    out_dir: str
    recipe: Recipe
    make_measurer: MakeMeasurer
    limits: DecodeLimits
    samples_per_file: int | None


class _FileIndexer:
    """Indexes files one after another, with one measurer."""

    def __init__(self, task: _Task, counter: Counter) -> None:
        self._task = task
        self._counter = counter
        self._measurer = task.make_measurer()
        self._format = open_format(task.spec, task.limits)
        self._folder = IndexFolder(task.out_dir, task.spec.name)

    def index(self, file: SourceFile) -> PartRecord | LeftOutFile:
        """Write the part of one file, or say what is wrong with it."""
        try:
            with self._folder.replace(part_name(file.name)) as stream:
                return write_part(
                    stream,
                    file=file,
                    samples=self._scanned(file),
                    recipe=self._task.recipe,
                    measurer=self._measurer,
                    counter=self._counter,
                    most_samples=self._task.samples_per_file,
                )
        except DamagedFilesError as error:
            return LeftOutFile(name=file.name, reason=str(error))

    def _scanned(self, file: SourceFile) -> Iterator[ScannedSample]:
        """The file's samples. Marks errors of reading the file, to tell them from errors of writing
        the index."""
        owner = f"source {self._task.spec.name!r}"
        try:
            with translate(owner, file.path, "be read"):
                yield from self._format.scan(file)
        except StorageAwayError:
            raise
        except SourceError as error:
            raise DamagedFilesError(str(error).removeprefix(f"{owner}: ")) from error


def _index_files(
    task: _Task, files: Sequence[SourceFile], workers: int, progress: Progress | None
) -> Iterator[PartRecord | LeftOutFile]:
    """The result of each file, in the order in which files are finished."""
    total_bytes = sum(file.size_bytes for file in files)
    report = progress or (lambda _rows, _done_bytes, _total_bytes: None)
    report(0, 0, total_bytes)
    if min(workers, len(files)) > 1 and total_bytes >= SMALLEST_POOLED_BYTES:
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
) -> Iterator[PartRecord | LeftOutFile]:
    context = multiprocessing.get_context("spawn")
    counter = _SharedCounter(context.Value("q", 0), context.Value("q", 0))
    with ProcessPoolExecutor(
        workers, mp_context=context, initializer=_start_process, initargs=(task, counter)
    ) as pool:
        # Largest files first, so that no process works on a large one alone at the end.
        order = sorted(files, key=lambda file: -file.size_bytes)
        try:
            pending: set[Future[PartRecord | LeftOutFile]] = {
                pool.submit(_index_in_process, f) for f in order
            }
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


def _index_in_process(file: SourceFile) -> PartRecord | LeftOutFile:
    assert _indexer is not None
    return _indexer.index(file)
