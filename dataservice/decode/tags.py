"""Removes titles, covers and comments from a file before FFmpeg reads it.

Decoding does not need them, but FFmpeg expands them when it opens a file: a compressed ID3 frame of
200 kB costs 20 s and a gigabyte, a RIFF comment the memory that its header states.
"""

import re

_ID3_HEADER_BYTES = 10
_ID3_FOOTER_FLAG = 0x10
_RIFF = (b"RIFF", b"RIFX", b"RF64", b"FORM", b"riff")
# Chunks of RIFF and AIFF that hold tags. FFmpeg skips them once they are renamed.
_TAG_CHUNKS = re.compile(rb"LIST(?=.{4}INFO)|(?:id3|ID3) (?=.{4}ID3[\x02-\x04])", re.DOTALL)
# Raw AAC may have a tag between any two frames.
_ID3_INSIDE = re.compile(rb"ID3(?=[\x02-\x04][\x00-\x0f].[\x00-\x7f]{4})", re.DOTALL)


def without_tags(data: bytes) -> bytes:
    """The file without tags; a copy only when it has some. O(bytes)."""
    start = 0
    while data[start : start + 3] == b"ID3":
        head = data[start : start + _ID3_HEADER_BYTES].ljust(_ID3_HEADER_BYTES, b"\0")
        footer = _ID3_HEADER_BYTES if head[5] & _ID3_FOOTER_FLAG else 0
        start += _ID3_HEADER_BYTES + _syncsafe(head[6:10]) + footer
    if start:
        data = data[start:]
    if data[:4] in _RIFF:
        return _TAG_CHUNKS.sub(b"JUNK", data)
    if data[:1] == b"\xff":
        return _ID3_INSIDE.sub(b"\0\0\0", data)
    return data


def _syncsafe(data: bytes) -> int:
    """A size as ID3 writes it, with seven bits per byte."""
    value = 0
    for byte in data:
        value = value << 7 | byte & 0x7F
    return value
