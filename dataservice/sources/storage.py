"""The one border to fsspec: finding, opening and reading the files of a source.

File systems are plug-ins and raise what they like, so every call here translates any
exception into SourceError, once, with the file's name and a remedy.
"""

import posixpath
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, cast

import fsspec
from braceexpand import braceexpand
from fsspec.spec import AbstractFileSystem

from dataservice.core.errors import SampleError, ServiceError, SourceError
from dataservice.core.job import SourceSpec
from dataservice.core.sample import ByteSpan

# Reading a gap of this size costs less than asking an object store once more.
_BRIDGED_GAP_BYTES = 64 * 1024
_VERSION_KEYS = ("ETag", "etag", "md5Hash", "mtime", "LastModified", "last_modified", "updated")


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceFile:
    """One file of a source as it was when listed. `version` is its entity tag or time of change,
    and empty where the file system knows neither."""

    path: str
    size_bytes: int
    version: str


class Storage:
    """The file system of one source. Safe for use from several threads."""

    def __init__(self, spec: SourceSpec) -> None:
        """Raises SourceError when the URL's protocol is unknown or lacks its package."""
        self._spec = spec
        patterns = _expand_braces(spec)
        self._fs, _ = open_filesystem(patterns[0], spec.storage_options, f"source {spec.name!r}")
        self._patterns = [cast(str, self._fs._strip_protocol(pattern)) for pattern in patterns]

    @property
    def fs(self) -> AbstractFileSystem:
        """The fsspec file system, for libraries that take one."""
        return self._fs

    def files(self, suffixes: Sequence[str]) -> tuple[SourceFile, ...]:
        """The source's files, sorted by path. A folder stands for all files under it that end
        in one of `suffixes`.

        Raises:
            SourceError: a named file is missing, or there is no file at all.
        """
        found: dict[str, SourceFile] = {}
        missing: list[str] = []
        with self.translate(self._spec.url, "be listed"):
            self._fs.invalidate_cache()
            for pattern in self._patterns:
                infos = self._matches(pattern, suffixes)
                if infos is None:
                    missing.append(pattern)
                for info in infos or ():
                    found[str(info["name"])] = _source_file(info)
        if missing:
            raise SourceError(
                f"source {self._spec.name!r} has no file at {_some(missing)} "
                f"(url {self._spec.url!r}). Correct the source's url or restore the file."
            )
        if not found:
            raise SourceError(
                f"source {self._spec.name!r} is empty: no {' or '.join(suffixes)} file matches "
                f"{self._spec.url!r}. Correct the source's url."
            )
        return tuple(found[path] for path in sorted(found))

    def _matches(self, pattern: str, suffixes: Sequence[str]) -> list[dict[str, object]] | None:
        """Listing entries of one pattern; None when a plain path does not exist."""
        try:
            info = self._fs.info(pattern)
        except FileNotFoundError:
            if not any(character in pattern for character in "*?["):
                return None
            entries = self._fs.glob(pattern, detail=True).values()
            return [entry for entry in entries if entry["type"] == "file"]
        if info["type"] == "file":
            return [info]
        under = self._fs.find(pattern, detail=True).values()
        return [entry for entry in under if str(entry["name"]).lower().endswith(tuple(suffixes))]

    def open(self, path: str) -> IO[bytes]:
        """Open a file for reading. Raises SourceError."""
        with self.translate(path, "be opened"):
            return cast(IO[bytes], self._fs.open(path, "rb"))

    def read(self, path: str) -> bytes:
        """A whole file. Raises FileNotFoundError, or SourceError for anything else."""
        with self.translate(path, "be read", pass_on=(FileNotFoundError,)):
            return cast(bytes, self._fs.cat_file(path))

    def read_spans(self, path: str, spans: Sequence[ByteSpan]) -> list[bytes]:
        """The bytes of each span; spans that lie close together are read at once.

        Raises:
            SourceError: the file cannot be read, or is shorter than the index says.
        """
        runs = _runs(spans)
        with self.translate(path, "be read"):
            blobs = self._fs.cat_ranges(
                [path] * len(runs),
                [start for start, _ in runs],
                [end for _, end in runs],
                on_error="raise",
            )
        by_start = {start: blob for (start, _), blob in zip(runs, blobs, strict=True)}
        starts = sorted(by_start)
        out = []
        for span in spans:
            start = max(s for s in starts if s <= span.offset_bytes)
            at = span.offset_bytes - start
            data = by_start[start][at : at + span.size_bytes]
            if len(data) != span.size_bytes:
                raise SourceError(
                    f"source {self._spec.name!r}: {path} ends inside {span.name!r}, which needs "
                    f"bytes {span.offset_bytes} to {span.offset_bytes + span.size_bytes}. The "
                    "file was changed after it was indexed: run `dataservice index JOB.yaml`."
                )
            out.append(bytes(data))
        return out

    def read_beside(self, path: str, relative: str) -> bytes:
        """A file named relative to the folder of `path`, as records name their media.

        The check is on the name: a link that lies inside the folder is followed.

        Raises:
            SampleError: the name leaves the folder, or there is no such file.
        """
        folder = posixpath.dirname(path)
        inside = posixpath.normpath(relative.replace("\\", "/"))
        if (
            not relative
            or "\0" in relative
            or "://" in relative
            or inside.startswith(("/", "../"))
            or inside in ("..", ".")
        ):
            raise SampleError(
                f"path {relative!r} must be relative and inside the folder of its file, "
                f"{folder!r}. Move the media beside the file that names it."
            )
        try:
            return self.read(f"{folder}/{inside}")
        except (FileNotFoundError, IsADirectoryError) as error:
            raise SampleError(
                f"there is no file {relative!r} in {folder!r}. Restore it or correct the path."
            ) from error

    @contextmanager
    def translate(
        self, path: str, what: str, *, pass_on: tuple[type[Exception], ...] = ()
    ) -> Iterator[None]:
        """Turn whatever a file system raises into SourceError: '<path> cannot <what>'."""
        with translate(f"source {self._spec.name!r}", path, what, pass_on=pass_on):
            yield


@contextmanager
def translate(
    owner: str, path: str, what: str, *, pass_on: tuple[type[Exception], ...] = ()
) -> Iterator[None]:
    """Turn whatever a file system raises into SourceError: '<owner>: <path> cannot <what>'."""
    try:
        yield
    except ServiceError:
        raise
    except pass_on:
        raise
    except FileNotFoundError as error:
        raise SourceError(
            f"{owner}: {path} cannot {what}: there is no such file. Correct the url or restore "
            "the file."
        ) from error
    except PermissionError as error:
        raise SourceError(
            f"{owner}: {path} cannot {what}: permission denied. Grant this process's user or "
            "cloud identity access to it."
        ) from error
    except Exception as error:
        raise SourceError(
            f"{owner}: {path} cannot {what}: {type(error).__name__}: {error}. Check the url, "
            "the storage_options and that the storage answers."
        ) from error


def open_filesystem(
    url: str, options: dict[str, str], owner: str
) -> tuple[AbstractFileSystem, str]:
    """The file system of a URL and the path in it. Raises SourceError; `owner` opens its text."""
    opener = cast(
        Callable[..., tuple[AbstractFileSystem, str]],
        fsspec.core.url_to_fs,
    )
    try:
        return opener(url, **options)
    except ImportError as error:
        raise SourceError(
            f"{owner}: {url!r} needs a package that is not installed: {error}. Install it, for "
            "example `pip install 'dataservice[s3]'` or `'dataservice[gs]'`."
        ) from error
    except Exception as error:
        raise SourceError(
            f"{owner}: {url!r} is not a URL that fsspec opens: {error}. Use a path, or a URL such "
            "as s3://bucket/folder/*.tar."
        ) from error


def _expand_braces(spec: SourceSpec) -> list[str]:
    try:
        return list(braceexpand(spec.url))
    except ValueError as error:  # its UnbalancedBracesError
        raise SourceError(
            f"source {spec.name!r}: url {spec.url!r} has unbalanced braces. Write ranges as "
            "{000..127} and lists as {train,extra}."
        ) from error


def _source_file(info: dict[str, object]) -> SourceFile:
    version = next((str(info[key]) for key in _VERSION_KEYS if info.get(key)), "")
    return SourceFile(
        path=str(info["name"]), size_bytes=int(cast(int, info["size"] or 0)), version=version
    )


def _runs(spans: Sequence[ByteSpan]) -> list[tuple[int, int]]:
    """Byte ranges [start, end) that cover the spans, bridging small gaps."""
    runs: list[tuple[int, int]] = []
    for span in sorted(spans, key=lambda s: s.offset_bytes):
        end = span.offset_bytes + span.size_bytes
        if runs and span.offset_bytes - runs[-1][1] <= _BRIDGED_GAP_BYTES:
            runs[-1] = (runs[-1][0], max(end, runs[-1][1]))
        else:
            runs.append((span.offset_bytes, end))
    return runs


def _some(names: Sequence[str], limit: int = 5) -> str:
    shown = ", ".join(repr(name) for name in names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"
