"""Recognises a file's kind, or its format, by its first bytes, whatever its name.

Only signatures with which other data do not begin by chance are used. Bare MPEG audio frames (an
MP3 without ID3, AAC as ADTS) begin with 11 set bits, and so may vectors: such files are recognised
only by name.
"""

from dataservice.core.job import SourceFormat
from dataservice.core.sample import MediaKind

HEAD_BYTES = 64
"""The number of bytes that `signature_kind` looks at."""
FORMAT_HEAD_BYTES = 512
"""The number of bytes that `signature_format` looks at."""

_STARTS: tuple[tuple[bytes, MediaKind], ...] = (
    (b"\xff\xd8\xff", "image"),  # JPEG
    (b"\x89PNG\r\n\x1a\n", "image"),
    (b"GIF87a", "image"),
    (b"GIF89a", "image"),
    (b"II*\0", "image"),  # TIFF
    (b"MM\0*", "image"),
    (b"II+\0", "image"),  # BigTIFF
    (b"MM\0+", "image"),
    (b"\0\0\0\x0cjP  \r\n\x87\n", "image"),  # JPEG 2000, in its file format and bare
    (b"\xff\x4f\xff\x51\0", "image"),
    (b"\0\0\0\x0cJXL \r\n\x87\n", "image"),
    (b"\x1aE\xdf\xa3", "video"),  # Matroska, WebM
    (b"FLV\x01", "video"),
    (b"\0\0\x01\xba", "video"),  # MPEG program stream
    (b"\0\0\x01\xb3", "video"),
    (b"0&\xb2u\x8ef\xcf\x11", "video"),  # ASF, WMV
    (b"ID3\x02", "audio"),  # MP3 behind its tag
    (b"ID3\x03", "audio"),
    (b"ID3\x04", "audio"),
    (b"fLaC", "audio"),
    (b"caff\0\x01", "audio"),
    (b"#!AMR", "audio"),
)
_RIFF: dict[bytes, MediaKind] = {b"WEBP": "image", b"WAVE": "audio", b"AVI ": "video"}
_IMAGE_BRANDS = (b"avif", b"avis", b"heic", b"heix", b"heim", b"heis", b"mif1", b"msf1", b"hevc")
_AUDIO_BRANDS = (b"M4A ", b"M4B ", b"M4P ")
_BMP_HEADERS = (12, 40, 52, 56, 64, 108, 124)

_FORMATS: tuple[tuple[bytes, SourceFormat], ...] = (
    (b"PAR1", "parquet"),
    (b"ARROW1", "arrow"),
    (b"\xff\xff\xff\xff", "arrow"),  # a stream of messages
    (b"{", "jsonl"),
    (b"[", "json"),
)


def signature_format(head: bytes) -> SourceFormat | None:
    """Format of a source's file that begins with `head`, or None when it is not recognised."""
    if head[257:262] == b"ustar":
        return "webdataset"
    text = head.lstrip()
    return next((format for start, format in _FORMATS if text.startswith(start)), None)


def signature_kind(head: bytes) -> MediaKind | None:
    """Kind of a file that begins with `head`, or None when it is not recognised."""
    for start, kind in _STARTS:
        if head.startswith(start):
            return kind
    if head[:4] in (b"RIFF", b"RF64"):
        return _RIFF.get(head[8:12])
    if head[4:8] == b"ftyp":  # MP4, QuickTime and what is built like them
        brand = head[8:12]
        return "image" if brand in _IMAGE_BRANDS else "audio" if brand in _AUDIO_BRANDS else "video"
    if head[4:8] in (b"moov", b"mdat", b"wide") and head[:2] == b"\0\0":  # older QuickTime
        return "video"
    if head.startswith(b"OggS"):
        return "video" if b"\x80theora" in head else "audio"
    if head.startswith(b"FORM") and head[8:12] in (b"AIFF", b"AIFC"):
        return "audio"
    return "image" if _is_bmp(head) else None


def _is_bmp(head: bytes) -> bool:
    """Whether this is a BMP. Two letters are too short a signature: the reserved bytes and the
    header's size decide."""
    return (
        head.startswith(b"BM")
        and head[6:10] == bytes(4)
        and int.from_bytes(head[14:18], "little") in _BMP_HEADERS
    )
