"""What was read of files on other machines, found again on this one while the files are the same.

    options, path, size and version as told now, spans ──► bytes

The unit is what a sample reads of a file at once, since the samples that are asked for together
differ from epoch to epoch. What a storage tells of a file is believed for VERSION_S; a file of
which it tells neither entity tag nor time is not kept. The options keep storages apart that have
files of one path, and none of a profile's secrets is among them.
"""

import json
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from fsspec.spec import AbstractFileSystem

from dataservice.core.ports import RangeCache
from dataservice.core.sample import ByteSpan

VERSION_S = 60.0
FILES_KNOWN = 2**16
_VERSION_KEYS = (
    "ETag", "etag", "md5Hash", "blob_id", "mtime", "LastModified", "last_modified", "updated",
)  # fmt: skip
# Of web servers. They are no part of an index, whose files would then count as changed.
_WEB_VERSION_KEYS = "Last-Modified", "Content-MD5"


class KeptRanges:
    """The ranges of one file system. Safe for several threads."""

    def __init__(
        self, fs: AbstractFileSystem, options: Mapping[str, Any], ranges: RangeCache
    ) -> None:
        self._fs = fs
        self._options = json.dumps(dict(options), sort_keys=True, default=repr)
        self._ranges = ranges
        self._lock = threading.Lock()
        self._versions: dict[str, tuple[float, str, int]] = {}

    @property
    def passed_over(self) -> bool:
        """Whether this thread reads anew what it has found."""
        return self._ranges.passed_over

    def find(self, path: str, spans: Sequence[ByteSpan]) -> list[bytes] | None:
        """The bytes of each of these spans, if all are there."""
        about = self._about(path, _ends(spans))
        size_bytes = sum(span.size_bytes for span in spans)
        data = self._ranges.find(about, size_bytes) if about and size_bytes else None
        if data is None:
            return None
        out, at = [], 0
        for span in spans:
            out.append(data[at : at + span.size_bytes])
            at += span.size_bytes
        return out

    def keep(self, path: str, spans: Sequence[ByteSpan], blobs: Sequence[bytes]) -> None:
        """Keep the bytes of these spans."""
        if (about := self._about(path, _ends(spans))) and any(blobs):
            self._ranges.keep(about, b"".join(blobs))

    def find_whole(self, path: str) -> bytes | None:
        """A whole file, if it is there."""
        about = self._about(path, "whole")
        return self._ranges.find(about, self._version(path)[1]) if about else None

    def keep_whole(self, path: str, data: bytes) -> None:
        """Keep a whole file, unless it is another than the one that its storage told of."""
        about = self._about(path, "whole")
        if about and data and len(data) == self._version(path)[1]:
            self._ranges.keep(about, data)

    def _about(self, path: str, what: object) -> str:
        """All that decides what these bytes are; "" where no version is told."""
        version, size_bytes = self._version(path)
        if not version or size_bytes < 0:
            return ""
        place = str(self._fs.unstrip_protocol(path))
        return json.dumps([self._options, place, version, size_bytes, what])

    def _version(self, path: str) -> tuple[str, int]:
        """What the storage tells of a file: its version and size; ("", -1) where it tells too
        little, or nothing at all: whoever reads the file then finds out why."""
        now_s = time.monotonic()
        with self._lock:
            asked_s, version, size_bytes = self._versions.get(path, (-VERSION_S, "", -1))
        if now_s - asked_s < VERSION_S and not self.passed_over:
            return version, size_bytes
        try:
            info = self._fs.info(path)
            version = version_of(info) or _first(info, _WEB_VERSION_KEYS)
            size_bytes = int(info.get("size") or -1)
        except Exception:
            return "", -1
        with self._lock:
            if len(self._versions) >= FILES_KNOWN:
                self._versions.clear()
            self._versions[path] = now_s, version, size_bytes
        return version, size_bytes


def version_of(info: Mapping[str, object]) -> str:
    """The entity tag or time in what a file system tells of a file, or "" where it tells none."""
    return _first(info, _VERSION_KEYS)


def _first(info: Mapping[str, object], keys: Sequence[str]) -> str:
    return next((str(info[key]) for key in keys if info.get(key)), "")


def _ends(spans: Sequence[ByteSpan]) -> list[tuple[int, int]]:
    return [(span.offset_bytes, span.size_bytes) for span in spans]
