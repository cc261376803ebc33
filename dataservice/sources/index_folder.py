"""The folder of an index: small files at a path or any fsspec URL.

INDEX_DIR/SOURCE_NAME/manifest.json          written last: its presence means complete
INDEX_DIR/SOURCE_NAME/left_out.jsonl         each sample that cannot be used, and why
INDEX_DIR/SOURCE_NAME/sums.json              see part_sums.py
INDEX_DIR/SOURCE_NAME/lengths.bin            see length_cells.py
INDEX_DIR/SOURCE_NAME/part-<digest>.parquet  one per source file, named after a digest of the file's
name
INDEX_DIR/SOURCE_NAME/part-<digest>.parquet.<start>-<end>-<records before>
                                             a piece of one, until all are joined; nobody opens it
                                             but the run that goes on behind it
"""

import hashlib
import re
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO

from dataservice.core.errors import SourceError
from dataservice.sources.filesystem import open_filesystem, open_to_read, protocols, translate
from dataservice.sources.formats.protocol import FilePiece
from dataservice.sources.kept_ranges import version_of
from dataservice.sources.roots import Roots

MANIFEST = "manifest.json"
LEFT_OUT = "left_out.jsonl"
LENGTHS = "lengths.bin"
_PART = r"part-[0-9a-f]{16}\.parquet"
_PIECE = re.compile(rf"({_PART})\.(\d+)-(\d+)-(\d+)")
# Others may keep files in a folder that an index is written into, such as a data set's
# part-00000.parquet.
_OURS = re.compile(rf"{_PART}(\.\d+-\d+-\d+)?|.+\.[0-9a-f]{{32}}\.tmp")


class IndexFolder:
    """The index of one source. Files appear whole or not at all."""

    def __init__(self, index_dir: str, source: str, roots: Roots | None = None) -> None:
        """Reads only under `roots`, if given. Raises SourceError when `index_dir` is neither a path
        nor a URL that fsspec opens."""
        self._roots = roots
        self.source = source
        self.owner = f"index of source {source!r}"
        self._fs, root = open_filesystem(index_dir, {}, self.owner, roots=roots)
        self.path = f"{root.rstrip('/')}/{source}"

    @property
    def is_local(self) -> bool:
        """Whether its files lie on this machine, so that reading them waits for nothing."""
        return "file" in protocols(self._fs)

    def create(self) -> None:
        """Make the folder. Raises SourceError when it cannot be made."""
        with translate(self.owner, self.path, "be created"):
            self._fs.makedirs(self.path, exist_ok=True)

    def read(self, name: str) -> bytes | None:
        """A whole file's bytes, or None when there is no such file."""
        with translate(self.owner, f"{self.path}/{name}", "be read"):
            try:
                with self.open(name) as stream:
                    return stream.read()
            except FileNotFoundError:
                return None

    def open(self, name: str) -> IO[bytes]:
        """A file for reading. Raises FileNotFoundError when it is missing, SourceError for any
        other error."""
        path, absent = f"{self.path}/{name}", (FileNotFoundError,)
        return open_to_read(self._fs, path, self.owner, self._roots, pass_on=absent)

    def listing(self) -> dict[str, tuple[int, str]]:
        """By name, the size in bytes and the entity tag or time of each file, as far as the storage
        tells them. Raises SourceError where it cannot list its files."""
        with translate(self.owner, self.path, "be listed"):
            found = self._fs.ls(self.path, detail=True, refresh=True)
        return {
            str(info["name"]).rpartition("/")[2]: (int(info.get("size") or 0), version_of(info))
            for info in found
        }

    @contextmanager
    def replace(self, name: str) -> Iterator[IO[bytes]]:
        """A file for writing, which gets its name when the block ends without an error."""
        temporary = f"{self.path}/{name}.{uuid.uuid4().hex}.tmp"
        try:
            with self._writing(name):
                stream = self._fs.open(temporary, "wb")
            with stream:
                yield stream
            with self._writing(name):
                self._fs.mv(temporary, f"{self.path}/{name}")
        except BaseException:
            if self._fs.exists(temporary):
                self._fs.rm(temporary)
            raise

    def remove_others(self, kept: set[str]) -> None:
        """Remove parts of files that no longer exist, and leftovers of interrupted runs; nothing
        that no index has written."""
        with translate(self.owner, self.path, "be tidied"):
            for name, path in self._paths().items():
                if name not in kept and _OURS.fullmatch(name):
                    self._fs.rm(path)

    def pieces(self) -> dict[str, list[FilePiece]]:
        """The pieces of each part that is not joined yet, by its name and in their order."""
        found: dict[str, list[FilePiece]] = {}
        with translate(self.owner, self.path, "be listed"):
            for match in filter(None, map(_PIECE.fullmatch, self._paths())):
                start, end, before = map(int, match.groups()[1:])
                piece = FilePiece(start=start, end=end, records_before=before)
                found.setdefault(match[1], []).append(piece)
        return {part: sorted(found[part], key=lambda piece: piece.start) for part in found}

    def remove_pieces(self, file_name: str) -> None:
        """Remove the pieces of the part of this source file."""
        part = part_name(file_name)
        with translate(self.owner, self.path, "be tidied"):
            for name, path in self._paths().items():
                if name.rpartition(".")[0] == part:
                    self._fs.rm(path)

    def _paths(self) -> dict[str, str]:
        """The path of each file, by its name."""
        try:
            paths = self._fs.ls(self.path, detail=False, refresh=True)
        except FileNotFoundError:  # object stores have no empty folders
            return {}
        return {str(path).rpartition("/")[2]: str(path) for path in paths}

    @contextmanager
    def _writing(self, name: str) -> Iterator[None]:
        with translate(self.owner, f"{self.path}/{name}", "be written"):
            try:
                yield
            except FileNotFoundError as error:
                raise SourceError(
                    f"{self.owner}: {self.path}/{name} vanished while it was written. Run only "
                    "one `dataservice index` of a source at a time."
                ) from error


def part_name(file_name: str) -> str:
    """Name of the part that indexes a source file, derived from the file's name in its source."""
    return f"part-{hashlib.sha256(file_name.encode()).hexdigest()[:16]}.parquet"


def piece_name(file_name: str, piece: FilePiece) -> str:
    """Name of the part of one piece of a file, until the pieces are joined. It says which piece, as
    another run may divide the file otherwise; samples may be named by the records before it."""
    return f"{part_name(file_name)}.{piece.start}-{piece.end}-{piece.records_before}"
