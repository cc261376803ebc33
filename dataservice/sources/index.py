"""Builds the index of one source: every file is walked once, every sample measured.

    list files → skip files and pieces whose part is current → scan + measure → parts
    → samples left out → manifest

Success: the manifest is written last, so an index without one is incomplete. A damaged file does
not stop the others: the run names all damaged files at the end and then fails, unless they are to
be left out. Unavailable storage is not damage; it ends the run. Finished parts, and finished pieces
of large files, are kept and not made again, however a run ended (KeyboardInterrupt, a kill); pieces
that are of no more use go when a run completes. A sample that cannot be measured does not stop the
run: the index lists it with its reason.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from dataservice.core.errors import IndexStaleError, SourceError
from dataservice.core.job import SourceSpec
from dataservice.core.limits import DEFAULT_LIMITS, DecodeLimits
from dataservice.sources.file_indexer import DamagedFilesError, IndexTask, MakeMeasurer
from dataservice.sources.formats.protocol import FilePiece
from dataservice.sources.formats.registry import list_files
from dataservice.sources.index_files import index_files
from dataservice.sources.index_folder import LEFT_OUT, MANIFEST, IndexFolder, part_name, piece_name
from dataservice.sources.index_part import read_record
from dataservice.sources.length_cells import write_length_cells
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
from dataservice.sources.part_reader import read_numbers, require_whole
from dataservice.sources.part_sums import PartSums
from dataservice.sources.reasons import ReasonCount, by_wording, reason_lines
from dataservice.sources.shared_indexing import (
    Elsewhere,
    Progress,
    bytes_to_do,
    index_elsewhere,
    unheard,
)
from dataservice.sources.storage import SourceFile


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenFigures:
    """LLM tokens of a source's samples: their sum, and quantiles over samples; how many of them are
    `learnt`, and of how many samples none is, which are `unlearnt`."""

    total: int
    p50: int
    p99: int
    longest: int
    learnt: int
    unlearnt: int


@dataclass(frozen=True, kw_only=True, slots=True)
class IndexSummary:
    """The result of indexing one source. `files_reused` files had a current part already, and
    `pieces_reused` pieces of others; all other figures include them. `left_out` are damaged files
    that the user chose to leave out. `long` says what became of samples that are longer than the
    pipeline's `longer_than`; those left out are among `skipped`."""

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
    pieces_reused: int = 0


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
    elsewhere: Elsewhere | None = None,
) -> IndexSummary:
    """Index `spec` into `out_dir/<source name>/`; parts that are current already are kept.

    Args:
        out_dir: a path or an fsspec URL, shared by the sources of a job.
        make_measurer: makes the measurer; with `workers` > 1, or where a run of several was
            interrupted, it must be picklable: each process (started by spawn) makes its own.
        workers: number of processes, which share the files.
        progress: called with (rows done, bytes done, bytes in all) at intervals, in this thread;
            what was done before is not among them.
        limits: limits on what a sample may make the reader allocate; the measurer is made with the
            same limits.
        leave_out_damaged: list damaged files in the manifest and make the index without them.
        samples_per_file: measure only so many samples at the beginning of each file. Such an index
            is not of its source: only for looking at the summary.
        elsewhere: lists and measures the source in place of this process, which makes no measurer.

    Raises:
        SourceError: a file is missing, files are damaged (all of them are named), the index
            cannot be written, or not one sample could be measured.
    """
    started_s = time.monotonic()
    if elsewhere is not None:
        files, recipe = elsewhere.listed()
    else:
        files, recipe = list_files(spec), Recipe.of(spec, make_measurer().fingerprint)
    folder = IndexFolder(out_dir, spec.name)
    _require_apart(spec, folder, files)
    folder.create()
    sums = PartSums(folder, limits)
    records = dict(_current_parts(folder, files, recipe, sums))
    sums.write()
    reused = len(records)
    task = IndexTask(
        spec=spec,
        out_dir=out_dir,
        recipe=recipe,
        make_measurer=make_measurer,
        limits=limits,
        samples_per_file=samples_per_file,
    )
    damaged: list[LeftOutFile] = []
    todo = [file for file in files if file.name not in records]
    left = dict(_left_pieces(folder, todo, recipe, limits))
    report = progress or unheard
    report(0, 0, bytes_to_do(todo, left))
    if elsewhere is not None:
        results = index_elsewhere(elsewhere, folder, todo, report, left)
    else:
        results = index_files(task, todo, workers, report, left)
    for result in results:
        if isinstance(result, LeftOutFile):
            damaged.append(result)
        else:
            records[result.file.name] = result
    damaged.sort(key=lambda file: file.name)
    if damaged and (len(damaged) == len(files) or not leave_out_damaged):
        raise _damaged_error(spec, damaged, len(files))
    manifest = Manifest(
        source=spec.name,
        recipe=recipe,
        parts=tuple(records[file.name] for file in files if file.name in records),
        left_out=tuple(damaged),
    )
    _require_samples(spec, manifest)
    write_length_cells(folder, manifest)
    with folder.replace(LEFT_OUT) as stream:
        stream.writelines(each.to_line() for part in manifest.parts for each in part.skipped)
    with folder.replace(MANIFEST) as stream:
        stream.write(manifest.to_json().encode())
    folder.remove_others({part_name(part.file.name) for part in manifest.parts})
    summary = _summary(manifest, folder, files_reused=reused, seconds=time.monotonic() - started_s)
    return replace(summary, pieces_reused=sum(map(len, left.values())))


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
    learnt = unlearnt = 0
    for part in manifest.parts:
        for tokens, of_loss in read_numbers(folder, part, "llm_tokens", "loss_tokens"):
            learnt += int(of_loss.sum(dtype=np.int64))
            unlearnt += int((of_loss == 0).sum())
            counts = np.bincount(tokens, minlength=len(samples_of))
            counts[: len(samples_of)] += samples_of
            samples_of = counts
    behind = np.cumsum(samples_of)
    p50, p99 = (int(np.searchsorted(behind, share * behind[-1])) for share in (0.5, 0.99))
    total = int((samples_of * np.arange(len(samples_of))).sum())
    return TokenFigures(
        total=total,
        p50=p50,
        p99=p99,
        longest=len(samples_of) - 1,
        learnt=learnt,
        unlearnt=unlearnt,
    )


def _current_parts(
    folder: IndexFolder,
    files: Sequence[SourceFile],
    recipe: Recipe,
    sums: PartSums,
) -> Iterator[tuple[str, PartRecord]]:
    """By name, files that have a whole part, made from these very bytes by this very recipe."""
    for file in files:
        if record := _current(folder, part_name(file.name), file, recipe, sums.require_whole):
            yield file.name, record


def _left_pieces(
    folder: IndexFolder, files: Sequence[SourceFile], recipe: Recipe, limits: DecodeLimits
) -> Iterator[tuple[str, dict[FilePiece, PartRecord]]]:
    """By name, files of which an earlier run has left pieces, made from these very bytes by this
    very recipe: those that are whole, in their order, and none twice."""
    pieces = folder.pieces() if files else {}

    def require(name: str, record: PartRecord) -> None:
        require_whole(folder, record, limits, name)

    for file in files:
        found: dict[FilePiece, PartRecord] = {}
        behind = 0
        for piece in pieces.get(part_name(file.name), ()):
            if behind <= piece.start < piece.end <= file.size_bytes and (
                record := _current(folder, piece_name(file.name, piece), file, recipe, require)
            ):
                found[piece], behind = record, piece.end
        if found:
            yield file.name, found


def _current(
    folder: IndexFolder,
    name: str,
    file: SourceFile,
    recipe: Recipe,
    require: Callable[[str, PartRecord], None],
) -> PartRecord | None:
    """What a part or piece says of itself, if it is of this very file and recipe, and whole, as is
    then required of it."""
    try:
        with folder.open(name) as stream:
            record = read_record(stream)
        if record is None or record.recipe != recipe or record.file != IndexedFile.of(file):
            return None
        require(name, record)
    except (FileNotFoundError, IndexStaleError):
        return None
    return record


def _damaged_error(
    spec: SourceSpec, damaged: Sequence[LeftOutFile], files: int
) -> DamagedFilesError:
    reasons = "\n".join(f"  {file.name}: {file.reason}" for file in damaged)
    if len(damaged) == files:
        return DamagedFilesError(
            f"source {spec.name!r}: not one of its {files} files can be read.\n{reasons}\nMend "
            "what the reasons name, or correct the source's url, format or columns."
        )
    return DamagedFilesError(
        f"source {spec.name!r}: {len(damaged)} of its {files} files cannot be read; the others are "
        f"indexed, and kept.\n{reasons}\nMend or remove them and run it again, or make the index "
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
