"""The values of MosaicML Streaming's columns, by their encodings.

Only encodings that hold text, numbers, JSON and files are read. `pkl` is a program, which is never
run; `ndarray` is no part of a record.

Source: `streaming/base/format/mds/encodings.py` of mosaicml-streaming 0.13.
"""

import struct
import zlib
from collections.abc import Callable, Mapping
from functools import partial

import numpy as np
import pyarrow as pa

from dataservice.core.errors import SampleError
from dataservice.core.limits import DecodeLimits
from dataservice.sources.formats.content import parse_json

_CHANNELS = {b"L": (1, 0), b"LA": (2, 4), b"RGB": (3, 2), b"RGBA": (4, 6)}
"""Of Pillow's modes: bytes a pixel, and PNG's type of colour."""
_STORED_BYTES = 65_535  # of one block of uncompressed data in a PNG

Decode = Callable[[bytes, str, DecodeLimits], object]


def _text(data: bytes, what: str, _limits: DecodeLimits) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise SampleError(f"{what} is not UTF-8 text ({error}). Write it in UTF-8.") from error


def _json(data: bytes, what: str, _limits: DecodeLimits) -> object:
    return parse_json(data, what)


def _bytes(data: bytes, _what: str, _limits: DecodeLimits) -> bytes:
    return data


def _number(data: bytes, _what: str, _limits: DecodeLimits, *, code: str) -> object:
    return np.frombuffer(data, f"<{code}").item()


def _digits(
    data: bytes, what: str, limits: DecodeLimits, *, kind: Callable[[str], object]
) -> object:
    try:
        return kind(_text(data, what, limits))
    except ValueError as error:
        raise SampleError(f"{what} is no number ({error}). Write digits.") from error


def _pixels(data: bytes, what: str, limits: DecodeLimits) -> bytes:
    """Raw pixels as a PNG without compression: the same file whatever library is installed."""
    width, height, mode_bytes = _numbers(data, 0, 3, what)
    mode, pixels = data[12 : 12 + mode_bytes], data[12 + mode_bytes :]
    channels, colour = _CHANNELS.get(mode, (0, 0))
    limits.check("max_image_pixels", width * height, f"{what}: pixels")
    if not channels or not width * height or width * height * channels != len(pixels):
        raise SampleError(
            f"{what} states {width} x {height} pixels of mode {mode[:16]!r} in {len(pixels):,} "
            "bytes; 8-bit L, LA, RGB and RGBA are read. Encode the column as png."
        )
    rows = np.frombuffer(pixels, np.uint8).reshape(height, width * channels)
    lines = np.pad(rows, ((0, 0), (1, 0))).tobytes()  # each begins with its filter, 0: none
    header = struct.pack(">IIBBBBB", width, height, 8, colour, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", _stored(lines)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))
        for name, body in chunks
    )


def _stored(data: bytes) -> bytes:
    """A zlib stream of uncompressed blocks."""
    blocks = [data[at : at + _STORED_BYTES] for at in range(0, len(data), _STORED_BYTES)]
    ends = [0] * (len(blocks) - 1) + [1]
    return (
        b"\x78\x01"
        + b"".join(
            struct.pack("<BHH", end, len(block), len(block) ^ 0xFFFF) + block
            for end, block in zip(ends, blocks, strict=True)
        )
        + struct.pack(">I", zlib.adler32(data))
    )


def _list(
    data: bytes, what: str, limits: DecodeLimits, *, skipped_bytes: int, inner: Decode
) -> list[object]:
    """Files behind their number and sizes."""
    (count,) = _numbers(data, skipped_bytes, 1, what)
    limits.check("max_media_items", count, f"{what}: files")
    sizes = _numbers(data, skipped_bytes + 4, count, what)
    at = skipped_bytes + 4 + 4 * count
    if at + sum(sizes) != len(data):
        raise SampleError(
            f"{what} holds {len(data):,} bytes and states {at + sum(sizes):,}. Write it again."
        )
    files = []
    for place, size in enumerate(sizes):
        files.append(inner(data[at : at + size], f"{what}[{place}]", limits))
        at += size
    return files


def _numbers(data: bytes, at: int, count: int, what: str) -> tuple[int, ...]:
    """Unsigned 32-bit integers."""
    if at + 4 * count > len(data):
        raise SampleError(f"{what} ends after {len(data):,} bytes. Write it again.")
    return struct.unpack_from(f"<{count}I", data, at)


_INTEGERS = ("uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64")
_FLOATS = ("float16", "float32", "float64")
_FILES: Mapping[str, Decode] = {"jpeg": _bytes, "png": _bytes, "pil": _pixels}

DECODERS: Mapping[str, Decode] = {
    "str": _text,
    "json": _json,
    "bytes": _bytes,
    "int": partial(_number, code="i8"),
    **{name: partial(_number, code=np.dtype(name).str[1:]) for name in (*_INTEGERS, *_FLOATS)},
    "str_int": partial(_digits, kind=int),
    "str_float": partial(_digits, kind=float),
    "str_decimal": _text,
    **_FILES,
    **{f"list[{name}]": partial(_list, skipped_bytes=4, inner=of) for name, of in _FILES.items()},
    "jpeg_array": partial(_list, skipped_bytes=0, inner=_bytes),
    "jpegarray": partial(_list, skipped_bytes=0, inner=_bytes),
}
"""Encoding to what makes a cell of a value's bytes; a cell is as Parquet's rows have it."""

SIZES_BYTES: Mapping[str, int] = {
    "int": 8,
    **{name: np.dtype(name).itemsize for name in (*_INTEGERS, *_FLOATS)},
}
"""Encodings whose values have one size."""


def cell_type(encoding: str) -> pa.DataType:
    """The type that a column of cells has in a table."""
    if encoding in ("int", "str_int", *_INTEGERS):
        return pa.int64()
    if encoding in ("str_float", *_FLOATS):
        return pa.float64()
    if encoding in ("str", "json", "str_decimal"):
        return pa.string()
    return pa.list_(pa.binary()) if is_list(encoding) else pa.binary()


def is_list(encoding: str) -> bool:
    """Whether a value holds several files."""
    return encoding.startswith(("list[", "jpeg_array", "jpegarray"))


def is_image(encoding: str) -> bool:
    """Whether values are images, whatever their column is called."""
    return encoding in _FILES or is_list(encoding)
