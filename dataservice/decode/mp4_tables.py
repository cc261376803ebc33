"""Counts the entries of an MP4's tables before FFmpeg expands them.

A track's tables are run-length coded: eight bytes can state four billion samples, and FFmpeg
allocates an entry for each when it opens the file. Here the boxes' sizes and counts are read, and
nothing is allocated.

Source: ISO/IEC 14496-12, boxes 8.6.6 (elst), 8.7.3 (stsz, stz2), 8.8.8 (trun).
"""

from collections.abc import Iterator
from dataclasses import dataclass

from dataservice.core.errors import SampleError
from dataservice.core.limits import DecodeLimits
from dataservice.core.sample import MediaBlob

_FOLDERS = frozenset(
    {b"moov", b"trak", b"mdia", b"minf", b"stbl", b"edts", b"moof", b"traf", b"mvex", b"dinf"}
    | {b"udta", b"tref", b"wave"}
)
# Box types with which a file of this family begins.
_FIRST = frozenset(
    {b"ftyp", b"moov", b"mdat", b"free", b"skip", b"wide", b"styp", b"moof", b"pnot", b"sidx"}
)
_DEEPEST = 8
_MOST_BOXES = 1_000_000


@dataclass(slots=True)
class _Counts:
    """Entries of the current track, and of all tracks before it."""

    samples: int = 0
    edits: int = 0
    before: int = 0

    @property
    def entries(self) -> int:
        """Upper bound on entries: each edit may repeat all samples of its track."""
        return self.before + self.samples * max(self.edits, 1)


def check_tables(blob: MediaBlob, limits: DecodeLimits) -> None:
    """Raises SampleError when an MP4 or MOV lists more packets than the limit. Other formats and
    damaged boxes are left to FFmpeg. O(boxes)."""
    data = blob.data
    if data[4:8] not in _FIRST:
        return
    counts = _Counts()
    for place, (kind, start, end) in enumerate(_boxes(data, 0, len(data), 0)):
        if place > _MOST_BOXES:
            raise SampleError(
                f"{blob.kind} {blob.name!r} has more than {_MOST_BOXES:,} boxes in its header. "
                "Write the file again, or leave the sample out."
            )
        if kind == b"cmov":
            raise SampleError(
                f"{blob.kind} {blob.name!r} has a compressed header (cmov). Write the file again, "
                "for example with `ffmpeg -i FILE -c copy NEW.mp4`, or leave the sample out."
            )
        if kind in (b"trak", b"traf"):
            counts = _Counts(before=counts.entries)
        elif kind in (b"stsz", b"stz2"):
            counts.samples = max(counts.samples, _number(data, start + 8, end))
        elif kind == b"trun":
            counts.samples += _number(data, start + 4, end)
        elif kind == b"elst":
            counts.edits = max(counts.edits, _number(data, start + 4, end))
        limits.check(
            "max_media_packets",
            counts.entries,
            f"{blob.kind} {blob.name!r}: packets in the tables of its header",
        )


def _boxes(data: bytes, start: int, end: int, depth: int) -> Iterator[tuple[bytes, int, int]]:
    """(type, start, end) of the content of every box; a container box comes before its content."""
    while start + 8 <= end:
        size, kind, content = _number(data, start, end), data[start + 4 : start + 8], start + 8
        if size == 1:
            size, content = int.from_bytes(data[start + 8 : start + 16]), start + 16
        behind = end if size == 0 else min(start + size, end)
        if behind < content:
            return
        yield kind, content, behind
        if kind in _FOLDERS and depth < _DEEPEST:
            yield from _boxes(data, content, behind, depth + 1)
        start = behind


def _number(data: bytes, start: int, end: int) -> int:
    return int.from_bytes(data[start : min(start + 4, end)])
