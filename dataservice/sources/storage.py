"""The one border to fsspec: finding, opening and reading the files of a source.

File systems are plug-ins and raise what they like, so every call here translates any
exception into SourceError, once, with the file's name and a remedy.
"""

import os
import posixpath
import re
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, cast
from urllib.parse import unquote

import fsspec
from fsspec.spec import AbstractFileSystem

from dataservice.core.errors import SampleError, ServiceError, SourceError
from dataservice.core.job import SourceSpec
from dataservice.core.limits import DecodeLimits
from dataservice.core.sample import ByteSpan
from dataservice.sources.patterns import expand
from dataservice.sources.roots import Roots

# Reading a gap of this size costs less than asking an object store once more.
_BRIDGED_GAP_BYTES = 64 * 1024
# Storage that holds bytes and does nothing else. fsspec has protocols that run programs, render
# templates, or open a second address that the first one names; a job may not ask for those.
PROTOCOLS = frozenset(
    {"file", "local", "memory", "http", "https", "s3", "s3a", "gs", "gcs", "hf", "hdfs"}
    | {"abfs", "abfss", "az", "adl", "oss", "oci"}
)
_REFUSED_OPTIONS = frozenset({"protocol", "target_protocol", "target_options", "fo"})
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

    def __init__(self, spec: SourceSpec, roots: Roots | None = None) -> None:
        """Reads under `roots` only, where given. Raises SourceError when the URL's protocol is
        unknown or lacks its package."""
        self._spec = spec
        self._roots = roots
        patterns = _expand_braces(spec)
        self._fs, _ = open_filesystem(patterns[0], spec.storage_options, f"source {spec.name!r}")
        self._local = "file" in _protocols(self._fs)
        self._media_root = ""
        if spec.media_root:
            owner = f"source {spec.name!r}"
            media_fs, root = open_filesystem(spec.media_root, spec.storage_options, owner)
            if _protocols(media_fs) != _protocols(self._fs):
                raise SourceError(
                    f"{owner}: its media_root {spec.media_root!r} lies in another storage than its "
                    f"url {spec.url!r}. Keep both in one."
                )
            self._media_root = root.rstrip("/")
        self._patterns = [cast(str, self._fs._strip_protocol(pattern)) for pattern in patterns]

    @property
    def fs(self) -> AbstractFileSystem:
        """The fsspec file system, for libraries that take one."""
        return self._fs

    @property
    def is_local(self) -> bool:
        """Whether a read costs no request over a network."""
        return self._local

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
        require_allowed(self._roots, self._fs, path, f"source {self._spec.name!r}")
        with self.translate(path, "be opened"):
            return cast(IO[bytes], self._fs.open(path, "rb"))

    def read_spans(self, path: str, spans: Sequence[ByteSpan]) -> list[bytes]:
        """The bytes of each span; spans that lie close together are read at once.

        Raises:
            SourceError: the file cannot be read, or is shorter than the index says.
        """
        require_allowed(self._roots, self._fs, path, f"source {self._spec.name!r}")
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

    def read_beside(self, path: str, relative: str, limits: DecodeLimits) -> bytes:
        """A file named relative to the folder of `path`, or to the source's media_root, as
        records name their media.

        Links are followed as long as they stay inside that folder.

        Raises:
            SampleError: the name or a link leaves the folder, there is no such file, it is none
                (a device, a pipe), or it is larger than `max_media_bytes`.
        """
        folder = self._media_root or posixpath.dirname(path)
        # A web server takes %2e%2e for two dots.
        spellings = {relative} if self._local else {relative, unquote(relative)}
        if any(map(_leaves, spellings)):
            raise _outside(relative, folder)
        full = f"{folder}/{_normal(relative)}"
        if not is_allowed(self._roots, self._fs, full):
            raise _outside(relative, folder)
        try:
            with self.translate(full, "be read", pass_on=(FileNotFoundError, IsADirectoryError)):
                if self._local:
                    return _read_local(full, folder, relative, limits)
                most = limits.max_media_bytes + 1
                data = cast(bytes, self._fs.cat_file(full, start=0, end=most))
        except (FileNotFoundError, IsADirectoryError) as error:
            raise SampleError(
                f"there is no file {relative!r} in {folder!r}. Restore it or correct the path."
            ) from error
        limits.check("max_media_bytes", len(data), f"file {relative!r}: bytes")
        return data

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
    _require_storage(url, options, owner)
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


def is_allowed(roots: Roots | None, fs: AbstractFileSystem, path: str) -> bool:
    """Whether a file lies under the roots; without roots any may be read."""
    local = "file" in _protocols(fs)
    return roots is None or roots.hold_file(path if local else str(fs.unstrip_protocol(path)))


def require_allowed(roots: Roots | None, fs: AbstractFileSystem, path: str, owner: str) -> None:
    """Raises SourceError for a file that does not lie under the roots. `owner` opens its text."""
    if not is_allowed(roots, fs, path):
        raise SourceError(
            f"{owner}: {path} lies outside of what this service reads, or is a link that leads "
            "out of it. Keep the file itself under one of the operator's allowed_roots."
        )


def _require_storage(url: str, options: dict[str, str], owner: str) -> None:
    """Raises SourceError before fsspec makes anything of a URL that is no plain storage."""
    named = re.match(r"([^/]*?):", url)
    protocol = named[1].lower() if named and len(named[1]) > 1 else "file"
    if protocol not in PROTOCOLS or "::" in url:
        raise SourceError(
            f"{owner}: {url!r} is of no storage that jobs may read. Use a path, or a URL of "
            f"{', '.join(sorted(PROTOCOLS))}."
        )
    refused = sorted(_REFUSED_OPTIONS & options.keys())
    if refused:
        raise SourceError(
            f"{owner}: storage_options names {', '.join(refused)}, which would choose another "
            "storage than the url. Leave it out."
        )


def _protocols(fs: AbstractFileSystem) -> tuple[str, ...]:
    protocol = fs.protocol
    return (protocol,) if isinstance(protocol, str) else tuple(protocol)


def _read_local(full: str, folder: str, relative: str, limits: DecodeLimits) -> bytes:
    """A plain file whose real path lies in the folder's. Opened once, so that what is checked
    is what is read."""
    real, top = os.path.realpath(full), os.path.realpath(folder)
    if not real.startswith(f"{top.rstrip('/')}/"):
        raise _outside(relative, folder)
    # A pipe without a writer would else be waited for.
    descriptor = os.open(real, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with open(descriptor, "rb") as stream:
        found = os.fstat(descriptor)
        if stat.S_ISDIR(found.st_mode):
            raise IsADirectoryError(real)
        if not stat.S_ISREG(found.st_mode):
            raise SampleError(
                f"{relative!r} in {folder!r} is a device, a pipe or a socket. Put a plain file "
                "there, or leave the sample out."
            )
        limits.check("max_media_bytes", found.st_size, f"file {relative!r}: bytes")
        return stream.read(found.st_size)


def _normal(relative: str) -> str:
    return posixpath.normpath(relative.replace("\\", "/"))


def _leaves(relative: str) -> bool:
    """Whether a name is none of a file inside the folder that it is relative to."""
    inside = _normal(relative)
    return (
        not relative
        or "\0" in relative
        or "://" in relative
        or inside in ("..", ".")
        or inside.startswith(("/", "../"))
    )


def _outside(relative: str, folder: str) -> SampleError:
    return SampleError(
        f"path {relative!r} must be relative and inside the folder {folder!r}, links included. "
        "Move the media there, or set the source's media_root to the folder that holds them."
    )


def _expand_braces(spec: SourceSpec) -> list[str]:
    try:
        return expand(spec.url)
    except ValueError as error:
        raise SourceError(
            f"source {spec.name!r}: url {spec.url!r} cannot be used: {error}. Write ranges as "
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
