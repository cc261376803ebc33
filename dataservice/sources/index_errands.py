"""What a process elsewhere is asked of one source, so that its index can be written here.

    whoever writes the index ──Errand──▶ a process that may read the source
                             ◀─Finding──  a listing, pieces, a count, or the part of each file

Errands and findings are plain data: nothing between the two need understand them.
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, astuple, dataclass
from typing import IO, Any, Literal, get_args

from dataservice.core.errors import SpecError
from dataservice.sources.file_indexer import FileIndexer, IndexTask, Result, divided_files
from dataservice.sources.formats.protocol import FilePiece
from dataservice.sources.formats.registry import open_format
from dataservice.sources.index_part import Counter
from dataservice.sources.manifest import LeftOutFile, Recipe
from dataservice.sources.shared_indexing import BATCH_BYTES, MOST_FILES
from dataservice.sources.storage import SourceFile
from dataservice.sources.unnamed_file import unnamed_file

What = Literal["list", "divide", "count", "index", "piece"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Errand:
    """One thing to do: `list` the source's files; `divide` these into pieces of `piece_bytes`;
    `count` the records of a `piece` of one; `index` these; or index one `piece`. Its `number` says
    nothing, but services of older releases want one."""

    what: What
    files: tuple[SourceFile, ...] = ()
    piece: FilePiece | None = None
    number: int = 0
    piece_bytes: int = 0

    @property
    def measures(self) -> bool:
        """Whether it needs the job's tokenizer and processors."""
        return self.what in ("list", "index", "piece")

    def to_json(self) -> str:
        """The form in which it is sent."""
        return json.dumps(asdict(self), separators=(",", ":"))

    @staticmethod
    def from_json(text: str) -> "Errand":
        """Read `to_json`'s form, which anyone may have written. Raises SpecError."""
        try:
            plain = json.loads(text)
            piece = plain["piece"]
            errand = Errand(
                what=plain["what"],
                files=tuple(_file(each) for each in plain["files"]),
                piece=None if piece is None else FilePiece(**_whole(piece)),
                number=int(plain["number"]),
                piece_bytes=int(plain["piece_bytes"]),
            )
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise _unknown(f"{type(error).__name__}: {str(error)[:200]}") from error
        if errand.what not in get_args(What):
            raise _unknown(f"to {str(errand.what)[:40]!r} is none")
        if errand.what in ("count", "piece") and (errand.piece is None or len(errand.files) != 1):
            raise _unknown(f"to {errand.what!r} needs one file, and a piece of it")
        if errand.what == "index":
            _require_short(errand.files)
        return errand


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """What was found of the file at this `place` among those of the errand: the descriptor of a
    file without a name, which the receiver closes; or -1, and the `damage` because of which there
    is none."""

    place: int = 0
    descriptor: int = -1
    damage: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Listing:
    """The files of a source, sorted by name, and how they are indexed."""

    files: tuple[SourceFile, ...]
    recipe: Recipe

    def to_json(self) -> str:
        """The form in which it is sent."""
        return json.dumps([asdict(self.recipe), [astuple(file) for file in self.files]])

    @staticmethod
    def from_json(text: str | bytes) -> "Listing":
        """Read `to_json`'s form."""
        recipe, files = json.loads(text)
        names = ("name", "path", "size_bytes", "version")
        return Listing(
            files=tuple(SourceFile(**dict(zip(names, file, strict=True))) for file in files),
            recipe=Recipe(**recipe),
        )


def pieces_of_json(text: str | bytes) -> Mapping[str, tuple[FilePiece, ...]]:
    """The pieces that `divide` found, by the name of their file."""
    return {
        name: tuple(FilePiece(start=start, end=end) for start, end in pieces)
        for name, pieces in json.loads(text).items()
    }


def carry_out(errand: Errand, task: IndexTask, counter: Counter) -> Iterator[Finding]:
    """Do what is asked. Raises SourceError where the source cannot be read."""
    if errand.what == "list":
        files = open_format(task.spec, task.limits, task.roots).files()
        yield _told(Listing(files=files, recipe=task.recipe).to_json())
        return
    if errand.what == "divide":
        found = divided_files(task, errand.files, errand.piece_bytes)
        plain = {name: [(p.start, p.end) for p in pieces] for name, pieces in found.items()}
        yield _told(json.dumps(plain))
        return
    kept = _KeptPart()
    indexer = FileIndexer(task, counter, kept.stream)
    if errand.what == "index":
        for place, file in enumerate(errand.files):
            yield kept.finding(place, indexer.index(file))
        return
    (file,), piece = errand.files, errand.piece
    assert piece is not None, "an errand that needs a piece has one"
    if errand.what == "piece":
        yield kept.finding(0, indexer.index_piece(file, piece))
        return
    counted = indexer.count(file, piece)
    if isinstance(counted, LeftOutFile):
        yield Finding(damage=counted.reason)
    else:
        yield _told(json.dumps(counted))


@dataclass(slots=True)
class _KeptPart:
    """The part that was written last."""

    descriptor: int = -1

    @contextmanager
    def stream(self, name: str) -> Iterator[IO[bytes]]:
        """What the part is written to; its name does not matter here."""
        with os.fdopen(unnamed_file(), "wb") as stream:
            yield stream
            stream.flush()
            self.descriptor = os.dup(stream.fileno())

    def finding(self, place: int, result: Result) -> Finding:
        """The part, or why there is none."""
        if isinstance(result, LeftOutFile):
            return Finding(place=place, damage=result.reason)
        return Finding(place=place, descriptor=self.descriptor)


def _told(text: str) -> Finding:
    descriptor = unnamed_file()
    with os.fdopen(os.dup(descriptor), "wb") as stream:
        stream.write(text.encode())
    return Finding(descriptor=descriptor)


def _require_short(files: Sequence[SourceFile]) -> None:
    """Raises SpecError where several files are more than are indexed in one turn: other teams wait
    for its end."""
    size_bytes = sum(max(0, file.size_bytes) for file in files)
    if len(files) > MOST_FILES or (len(files) > 1 and size_bytes > BATCH_BYTES):
        raise _unknown(
            f"it has {len(files):,} files of {size_bytes:,} bytes; several may be {MOST_FILES}, of "
            f"{BATCH_BYTES:,} bytes in all"
        )


def _file(plain: Mapping[str, Any]) -> SourceFile:
    return SourceFile(
        name=str(plain["name"]),
        path=str(plain["path"]),
        size_bytes=int(plain["size_bytes"]),
        version=str(plain["version"]),
    )


def _whole(plain: Mapping[str, Any]) -> dict[str, int]:
    return {name: int(plain[name]) for name in ("start", "end", "records_before")}


def _unknown(why: str) -> SpecError:
    return SpecError(f"this is no errand of an index: {why}. Use a command line of this release.")
