"""Finding, opening and reading the files of a source."""

import errno
import os
import posixpath
import re
import stat
import threading
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import IO, Any, cast
from urllib.parse import unquote

from fsspec.spec import AbstractFileSystem

from dataservice.core.errors import SampleError, SourceError, StorageAwayError
from dataservice.core.job import SourceSpec
from dataservice.core.limits import DecodeLimits
from dataservice.core.named_files import path_of
from dataservice.core.ports import RangeCache
from dataservice.core.sample import ByteSpan
from dataservice.sources.filesystem import (
    NO_SECRET,
    exactly,
    is_allowed,
    open_filesystem,
    open_to_read,
    patiently,
    protocols,
    require_allowed,
    require_storage,
    translate,
)
from dataservice.sources.formats.content import is_text
from dataservice.sources.kept_ranges import KeptRanges, version_of
from dataservice.sources.opened import OpenedSource
from dataservice.sources.patterns import expand
from dataservice.sources.roots import Roots

# Reading a gap of this size costs less than another request to an object store.
BRIDGED_GAP_BYTES = 64 * 1024
_PATTERN = re.compile(r"[*?\[{]")
# What opening a name says of a folder that is a file, of links in a circle, and of a socket: it is
# the one record's mistake that names it.
_NO_FILE = {errno.ENOTDIR, errno.ELOOP, errno.ENXIO}


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceFile:
    """One file of a source as it was when listed. `name` is relative to the part of the source's
    URL before its first pattern; `version` is its entity tag or modification time, and empty when
    the file system has neither."""

    name: str
    path: str
    size_bytes: int
    version: str


Fetched = Mapping[str, Mapping[ByteSpan, bytes]]
"""Bytes that a request for several samples gave, by path and span."""


class _Unfit(Exception):
    """A request for several samples cannot be answered as one."""


class Storage:
    """The file system of one source. Safe for use from several threads."""

    def __init__(
        self, spec: SourceSpec, roots: Roots | None = None, ranges: RangeCache | None = None
    ) -> None:
        """Reads only under `roots`, if given, or instead where its profile grants it; what lies on
        other machines is kept in `ranges`. Raises SourceError when the URL's protocol is unknown or
        its package is not installed."""
        self._spec = spec
        options, self._secret, self._roots = _opened_with(spec, roots)
        patterns = _expand_braces(spec)
        owner = f"source {spec.name!r}"
        for pattern in patterns:
            require_storage(pattern, options, owner)
        self._fs, _ = open_filesystem(patterns[0], options, owner, self._secret, self._roots)
        self._local = "file" in protocols(self._fs)
        self._media_root = ""
        if spec.media_root:
            media_fs, root = open_filesystem(
                spec.media_root, options, owner, self._secret, self._roots
            )
            if protocols(media_fs) != protocols(self._fs):
                raise SourceError(
                    f"{owner}: its media_root {spec.media_root!r} lies in another storage than its "
                    f"url {spec.url!r}. Keep both in one."
                )
            self._media_root = root.rstrip("/")
        self._kept = None
        if ranges is not None and not self._local:
            self._kept = KeptRanges(self._fs, options, ranges)
        self._fetched = threading.local()
        self._patterns = [cast(str, self._fs._strip_protocol(pattern)) for pattern in patterns]

    @property
    def fs(self) -> AbstractFileSystem:
        """The fsspec file system, for libraries that take one."""
        return self._fs

    @property
    def is_local(self) -> bool:
        """Whether reading needs no request over a network."""
        return self._local

    @property
    def paths(self) -> Sequence[str]:
        """The paths and patterns that the source's URL stands for."""
        return self._patterns

    def is_folder(self, path: str) -> bool:
        """Whether there is a folder at a path."""
        try:
            with self.translate(path, "be listed", pass_on=(FileNotFoundError,)):
                return bool(self._fs.info(path)["type"] == "directory")
        except FileNotFoundError:
            return False

    def files(self, suffixes: Sequence[str]) -> tuple[SourceFile, ...]:
        """The source's files, sorted by name. A folder stands for all files under it that end
        in one of `suffixes`.

        Raises:
            SourceError: a named file is missing, or there are no files, or a name is no text.
        """
        found: dict[str, dict[str, object]] = {}
        missing: list[str] = []
        with self.translate(self._spec.url, "be listed"):
            self._fs.invalidate_cache()
            for pattern in self._patterns:
                infos = self._matches(pattern, suffixes)
                if infos is None:
                    missing.append(pattern)
                for info in infos or ():
                    found[str(info["name"])] = info
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
        unwritable = next((path for path in found if not is_text(path)), None)
        if unwritable is not None:
            raise SourceError(
                f"source {self._spec.name!r}: the file name {unwritable!r} is not in UTF-8, and an "
                "index could not name the file. Rename it, or leave it out of the source's url."
            )
        root = self._root(found)
        files = [_source_file(info, path.removeprefix(root)) for path, info in found.items()]
        return tuple(sorted(files, key=lambda file: file.name))

    def _root(self, found: Container[str]) -> str:
        """The prefix left out of the files' names: it says where the corpus lies, and is no part of
        it."""
        fixed = cast(str, self._fs._strip_protocol(static_prefix(self._spec.url) or "."))
        if fixed in found:  # the URL names one file
            fixed = posixpath.dirname(fixed)
        return f"{fixed.rstrip('/')}/"

    def _matches(self, pattern: str, suffixes: Sequence[str]) -> list[dict[str, object]] | None:
        """Listing entries of one pattern; None when it is a plain path that does not exist."""
        try:
            info = self._fs.info(pattern)
        except FileNotFoundError:
            if not any(character in pattern for character in "*?["):
                return None
            entries = map(self._target, self._fs.glob(pattern, detail=True).values())
            return [entry for entry in entries if entry["type"] == "file"]
        if info["type"] == "file":
            return [info]
        under = self._fs.find(pattern, detail=True).values()
        named = (each for each in under if str(each["name"]).lower().endswith(tuple(suffixes)))
        return [*map(self._target, named)]

    def _target(self, entry: dict[str, object]) -> dict[str, object]:
        """A listing's entry; of a link, which a listing tells as no file, what it leads to. Raises
        SourceError where it leads nowhere."""
        if not entry.get("islink"):
            return entry
        path = str(entry["name"])
        with self.translate(path, "be listed"):
            return cast("dict[str, object]", self._fs.info(path))

    def open(self, path: str) -> IO[bytes]:
        """Open a file for reading. Raises SourceError when it cannot be opened."""
        owner = f"source {self._spec.name!r}"
        return open_to_read(self._fs, path, owner, self._roots, secret=self._secret)

    def read_note(self, path: str, most_bytes: int) -> bytes | None:
        """A small file that a library keeps beside its data; None when there is none. Raises
        SourceError when it is larger than `most_bytes`."""
        owner, absent = f"source {self._spec.name!r}", (FileNotFoundError,)
        try:
            with open_to_read(
                self._fs, path, owner, self._roots, pass_on=absent, secret=self._secret
            ) as stream:
                data = stream.read(most_bytes + 1)
        except FileNotFoundError:
            return None
        if len(data) > most_bytes:
            raise SourceError(f"{owner}: {path} has more than {most_bytes:,} bytes. Restore it.")
        return data

    def read_spans(self, path: str, spans: Sequence[ByteSpan]) -> list[bytes]:
        """The bytes of each span; neighbouring spans are read in one request.

        Raises:
            SourceError: the file cannot be read, or is shorter than the index says.
        """
        fetched: Fetched | None = getattr(self._fetched, "ranges", None)
        anew = self._kept is not None and self._kept.passed_over
        if fetched and not anew and path in fetched and all(map(fetched[path].__contains__, spans)):
            return [fetched[path][span] for span in spans]
        found = self._found(path, spans)
        if found is not None:
            return found
        runs = _runs([span for span in spans if span.size_bytes])
        blobs = self._local_runs(path, runs) if self._local else self._remote_runs(path, runs)
        return self._keep(path, spans, self._cut(path, spans, runs, blobs))

    def _found(self, path: str, spans: Sequence[ByteSpan]) -> list[bytes] | None:
        """The bytes of these spans, if this machine keeps them."""
        if self._kept is None:
            return None
        require_allowed(self._roots, self._fs, path, f"source {self._spec.name!r}")
        return self._kept.find(path, spans)

    def _keep(self, path: str, spans: Sequence[ByteSpan], blobs: list[bytes]) -> list[bytes]:
        if self._kept is not None:
            self._kept.keep(path, spans, blobs)
        return blobs

    @contextmanager
    def fetching(self, wanted: Sequence[tuple[str, Sequence[ByteSpan]]]) -> Iterator[None]:
        """Within this, `read_spans` of these (path, spans) in this thread costs no request: those
        of a file that are neighbours were read together, and all at once. What a request for all
        cannot read is read one by one. Raises StorageAwayError."""
        if not self._local:
            with suppress(_Unfit):
                self._fetched.ranges = self._fetch(wanted)
        try:
            yield
        finally:
            self._fetched.ranges = None

    def _fetch(self, wanted: Sequence[tuple[str, Sequence[ByteSpan]]]) -> "Fetched":
        fetched: dict[str, dict[ByteSpan, bytes]] = {path: {} for path, _ in wanted}
        missing: list[tuple[str, Sequence[ByteSpan]]] = []
        spans: dict[str, list[ByteSpan]] = {}
        try:
            for path, own in wanted:
                if (found := self._found(path, own)) is not None:
                    fetched[path].update(zip(own, found, strict=True))
                else:
                    missing.append((path, own))
                    spans.setdefault(path, []).extend(own)
            runs = {path: _runs([s for s in own if s.size_bytes]) for path, own in spans.items()}
            asked = [(path, *run) for path, each in runs.items() for run in each]
            blobs = iter(self._ask(asked))
            for path, own in spans.items():
                of_runs = [next(blobs) for _ in runs[path]]
                fetched[path].update(self._by_span(path, own, runs[path], of_runs))
        except StorageAwayError:
            raise
        except SourceError as error:
            raise _Unfit from error
        for path, own in missing:
            self._keep(path, own, [fetched[path][span] for span in own])
        return fetched

    def _by_span(
        self,
        path: str,
        spans: Sequence[ByteSpan],
        runs: Sequence[tuple[int, int]],
        blobs: Sequence[bytes],
    ) -> dict[ByteSpan, bytes]:
        return dict(zip(spans, self._cut(path, spans, runs, blobs), strict=True))

    def _cut(
        self,
        path: str,
        spans: Sequence[ByteSpan],
        runs: Sequence[tuple[int, int]],
        blobs: Sequence[bytes],
    ) -> list[bytes]:
        """The bytes of each span out of those of the runs. Raises SourceError when they end
        early."""
        by_start = {start: blob for (start, _), blob in zip(runs, blobs, strict=True)}
        starts = sorted(by_start)
        out = []
        for span in spans:
            if not span.size_bytes:
                out.append(b"")  # a request for no bytes would be answered with the whole file
                continue
            start = max(s for s in starts if s <= span.offset_bytes)
            at = span.offset_bytes - start
            data = by_start[start][at : at + span.size_bytes]
            if len(data) != span.size_bytes:
                raise SourceError(
                    f"source {self._spec.name!r}: {path} ends inside {span.name!r}, which needs "
                    f"bytes {span.offset_bytes} to {span.offset_bytes + span.size_bytes}. The "
                    "file was changed after it was indexed: restore it. To index it again makes "
                    "other data of it, which the job's checkpoints do not fit."
                )
            out.append(bytes(data))
        return out

    def _local_runs(self, path: str, runs: Sequence[tuple[int, int]]) -> list[bytes]:
        with self.open(path) as stream, self.translate(path, "be read"):
            return [_read_run(stream, start, end) for start, end in runs]

    def _remote_runs(self, path: str, runs: Sequence[tuple[int, int]]) -> list[bytes]:
        return self._ask([(path, start, end) for start, end in runs])

    def _ask(self, ranges: Sequence[tuple[str, int, int]]) -> list[bytes]:
        """Reads all (path, start, end) at once, if the file system can."""
        if not ranges:
            return []
        for path in {path for path, *_ in ranges}:
            require_allowed(self._roots, self._fs, path, f"source {self._spec.name!r}")
        paths, starts, ends = map(list, zip(*ranges, strict=True))
        ask = partial(self._fs.cat_ranges, on_error="raise", **exactly(self._fs))
        with self.translate(ranges[0][0], "be read"):
            blobs = patiently(lambda: ask(paths, starts, ends))
        return cast(list[bytes], blobs)

    def read_beside(self, path: str, relative: str, limits: DecodeLimits) -> bytes:
        """A file named relative to the folder of `path`, or to the source's media_root: records
        name their media in this way.

        Links are followed as long as they stay inside that folder.

        Raises:
            SampleError: the name or a link leaves the folder, there is no such file, it is not a
                plain file (a device, a pipe), or it is larger than `max_media_bytes`.
        """
        folder = self._media_root or posixpath.dirname(path)
        relative = relative.removeprefix(f"{folder}/")  # some records name whole paths
        # A web server reads %2e%2e as two dots.
        spellings = {relative} if self._local else {relative, unquote(relative)}
        if any(map(_leaves, spellings)):
            raise _outside(relative, folder)
        if not _can_be_written(relative, local=self._local):
            raise _no_file(relative, folder)
        full = f"{folder}/{_normal(relative)}"
        if not is_allowed(self._roots, self._fs, full):
            raise _outside(relative, folder)
        try:
            with self.translate(full, "be read", pass_on=(FileNotFoundError, IsADirectoryError)):
                if self._local:
                    return _read_local(full, folder, relative, limits, self._roots)
                kept = self._kept.find_whole(full) if self._kept is not None else None
                if kept is not None:
                    limits.check("max_media_bytes", len(kept), f"file {relative!r}: bytes")
                    return kept
                ask = partial(self._fs.cat_file, full, **exactly(self._fs))
                data = cast(bytes, patiently(lambda: ask(start=0, end=limits.max_media_bytes + 1)))
        except (FileNotFoundError, IsADirectoryError) as error:
            raise _no_file(relative, folder) from error
        limits.check("max_media_bytes", len(data), f"file {relative!r}: bytes")
        if self._kept is not None:
            self._kept.keep_whole(full, data)
        return data

    @contextmanager
    def translate(
        self, path: str, what: str, *, pass_on: tuple[type[Exception], ...] = ()
    ) -> Iterator[None]:
        """Turn any exception of the file system into SourceError: '<path> cannot <what>'."""
        owner = f"source {self._spec.name!r}"
        with translate(owner, path, what, pass_on=pass_on, secret=self._secret):
            yield


def _opened_with(
    spec: SourceSpec, roots: Roots | None
) -> tuple[Mapping[str, Any], Mapping[str, Any], Roots | None]:
    """(Options, those that are secrets, where they may be used). Raises SourceError for a source
    that names a profile and was not granted it: it would be read with other credentials."""
    if isinstance(spec, OpenedSource) and spec.grant is not None:
        return spec.grant.options, spec.grant.secret, spec.grant.roots
    if spec.storage_profile:
        raise SourceError(
            f"source {spec.name!r} names the storage_profile {spec.storage_profile!r}, which is "
            "known to a service's config alone. Give the command that config."
        )
    return spec.storage_options, NO_SECRET, roots


def _read_local(
    full: str, folder: str, relative: str, limits: DecodeLimits, roots: Roots | None
) -> bytes:
    """A plain file whose real path lies in the folder's real path. It is opened once, so that the
    file that was checked is the file that is read."""
    real, top = os.path.realpath(full), os.path.realpath(folder)
    if not real.startswith(f"{top.rstrip('/')}/"):
        raise _outside(relative, folder)
    try:
        # Otherwise opening a pipe without a writer would block.
        descriptor = os.open(real, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        if error.errno in _NO_FILE:
            raise FileNotFoundError(real) from error
        raise
    with open(descriptor, "rb") as stream:
        if roots is not None and not roots.hold_file(path_of(descriptor, real)):
            raise _outside(relative, folder)
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
    """Whether a name leaves the folder that it is relative to."""
    inside = _normal(relative)
    return (
        not relative
        or "\0" in relative
        or "://" in relative
        or inside in ("..", ".")
        or inside.startswith(("/", "../"))
    )


def _can_be_written(relative: str, *, local: bool) -> bool:
    """Whether a name has bytes. JSON may hold halves of surrogate pairs, of which Python itself
    writes some for the bytes of local names that are not UTF-8."""
    try:
        relative.encode(errors="surrogateescape" if local else "strict")
    except UnicodeEncodeError:
        return False
    return True


def _no_file(relative: str, folder: str) -> SampleError:
    return SampleError(
        f"there is no file {relative!r} in {folder!r}. Restore it or correct the path."
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


def static_prefix(url: str) -> str:
    """The part of a URL before its first pattern, cut at its last slash; the whole URL when it has
    no pattern."""
    pattern = _PATTERN.search(url)
    return url.rstrip("/") if pattern is None else url[: pattern.start()].rpartition("/")[0]


def _source_file(info: dict[str, object], name: str) -> SourceFile:
    return SourceFile(
        name=name,
        path=str(info["name"]),
        size_bytes=int(cast(int, info["size"] or 0)),
        version=version_of(info),
    )


def _read_run(stream: IO[bytes], start: int, end: int) -> bytes:
    stream.seek(start)
    return stream.read(end - start)


def _runs(spans: Sequence[ByteSpan]) -> list[tuple[int, int]]:
    """Byte ranges [start, end) that cover the spans, bridging small gaps."""
    runs: list[tuple[int, int]] = []
    for span in sorted(spans, key=lambda s: s.offset_bytes):
        end = span.offset_bytes + span.size_bytes
        if runs and span.offset_bytes - runs[-1][1] <= BRIDGED_GAP_BYTES:
            runs[-1] = (runs[-1][0], max(end, runs[-1][1]))
        else:
            runs.append((span.offset_bytes, end))
    return runs


def _some(names: Sequence[str], limit: int = 5) -> str:
    shown = ", ".join(repr(name) for name in names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"
