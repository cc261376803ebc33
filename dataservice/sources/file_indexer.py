"""Indexes one file, or a piece of one: scans it, measures its samples, writes their part."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property, partial
from typing import IO

from dataservice.core.errors import SourceError, StorageAwayError
from dataservice.core.job import SourceSpec
from dataservice.core.limits import DecodeLimits
from dataservice.core.ports import SampleMeasurer
from dataservice.sources.filesystem import translate
from dataservice.sources.formats.protocol import Divisible, FilePiece, ScannedSample
from dataservice.sources.formats.registry import open_format
from dataservice.sources.formats.signatures import FORMAT_HEAD_BYTES, signature_format
from dataservice.sources.index_folder import IndexFolder, part_name, piece_name
from dataservice.sources.index_part import Counter, join_parts, write_part
from dataservice.sources.manifest import LeftOutFile, PartRecord, Recipe
from dataservice.sources.roots import Roots
from dataservice.sources.storage import SourceFile, Storage


class DamagedFilesError(SourceError):
    """Files of a source are damaged; the message says which ones and how."""


MakeMeasurer = Callable[[], SampleMeasurer]
Result = PartRecord | LeftOutFile
_LARGEST_PIECE_BYTES = 2**28

PartStream = Callable[[str], AbstractContextManager[IO[bytes]]]
"""Opens the stream that the part of this name is written to."""


@dataclass(frozen=True, kw_only=True, slots=True)
class IndexTask:
    """The settings that all files of a run share; pickled once to each process. Files are read only
    under `roots`, if given."""

    spec: SourceSpec
    recipe: Recipe
    make_measurer: MakeMeasurer
    limits: DecodeLimits
    out_dir: str = ""  # of those who write into a folder
    samples_per_file: int | None = None
    roots: Roots | None = None


class FileIndexer:
    """Indexes files one after another, with one measurer, each part into a stream of
    `part_stream`."""

    def __init__(self, task: IndexTask, counter: Counter, part_stream: PartStream) -> None:
        self._task = task
        self._counter = counter
        self._part_stream = part_stream
        self._format = open_format(task.spec, task.limits, task.roots)

    @cached_property
    def _measurer(self) -> SampleMeasurer:
        return self._task.make_measurer()  # slow, and not needed to count

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

    def index_piece(self, file: SourceFile, piece: FilePiece) -> Result:
        """The same as `index` for one piece of a file, as a part of its own."""
        scan = partial(self._divisible.scan_piece, piece=piece)
        return self._write(piece_name(file.name, piece), file, scan, piece)

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
            with self._part_stream(name) as stream:
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
            reason = str(error).removeprefix(f"{owner}: ")
            raise DamagedFilesError(f"{reason}{self._other_format(file, reason)}") from error

    def _other_format(self, file: SourceFile, reason: str) -> str:
        """What format the file has by its first bytes, unless that is the source's, or said."""
        spec, head = self._task.spec, b""
        with (
            suppress(SourceError),  # the reason stands without it
            translate(spec.name, file.path, "be read"),
            Storage(spec, self._task.roots).open(file.path) as stream,
        ):
            head = stream.read(FORMAT_HEAD_BYTES)
        found = signature_format(head)
        if found in (None, spec.format) or spec.format == "custom" or f"format: {found}" in reason:
            return ""
        return f" It begins as files of {found} do: write format: {found} in the source."


def divided_files(
    task: IndexTask, files: Sequence[SourceFile], piece_bytes: int
) -> dict[str, tuple[FilePiece, ...]]:
    """The pieces of those of these files that can be divided, by name. Raises StorageAwayError."""
    format = open_format(task.spec, task.limits, task.roots)
    if not isinstance(format, Divisible):
        return {}
    found = {}
    for file in files:
        try:
            with translate(f"source {task.spec.name!r}", file.path, "be read"):
                pieces = format.divided(file, min(piece_bytes, _LARGEST_PIECE_BYTES))
        except StorageAwayError:
            raise
        except SourceError:
            continue  # whoever scans it says why
        if len(pieces) > 1:
            found[file.name] = pieces
    return found


def join_pieces(
    folder: IndexFolder, file: SourceFile, pieces: Mapping[FilePiece, PartRecord]
) -> Result:
    """Write the part of a file whose pieces are in the folder, in their order."""
    name = part_name(file.name)
    streams = (folder.open(piece_name(file.name, piece)) for piece in pieces)
    with translate(folder.owner, f"{folder.path}/{name}", "be made"), folder.replace(name) as part:
        try:
            joined = join_parts(part, zip(streams, pieces.values(), strict=True))
        except FileNotFoundError as error:
            raise SourceError(
                f"{folder.owner}: pieces of {file.name} vanished from {folder.path} before they "
                "were joined. Run only one `dataservice index` of a source at a time."
            ) from error
    folder.remove_pieces(file.name)
    return joined
