"""Seeded damage to files: blind, and with a sense for headers."""

import contextlib
import random
import struct
import zlib
from collections.abc import Callable, Sequence

from dataservice.sources.formats.thrift import Value
from tests.fuzz.thrift_writer import with_footer

INTERESTING = (
    0,
    1,
    2,
    0x7F,
    0x80,
    0xFF,
    0x7FFF,
    0x8000,
    0xFFFF,
    0x7FFFFFFF,
    0x80000000,
    0xFFFFFFFF,
)
Damage = Callable[[bytearray, random.Random], None]


def mutated(seed: bytes, others: Sequence[bytes], rng: random.Random) -> bytes:
    """One to four kinds of damage to a copy of the seed, then perhaps its checksums mended, so
    that what lies behind them is reached too."""
    data = bytearray(seed)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        if not data:
            break
        if rng.random() < 0.1:
            _splice(data, rng.choice(others), rng)
        else:
            rng.choice(_DAMAGES)(data, rng)
    if rng.random() < 0.7:
        _mend(data)
    return bytes(data)


def _place(data: bytearray, rng: random.Random) -> int:
    """Anywhere; half of the time among the first bytes, where headers are."""
    return rng.randrange(min(len(data), 300) if rng.random() < 0.5 else len(data))


def _flip_bits(data: bytearray, rng: random.Random) -> None:
    for _ in range(rng.choice((1, 1, 2, 8, 64))):
        data[_place(data, rng)] ^= 1 << rng.randrange(8)


def _set_bytes(data: bytearray, rng: random.Random) -> None:
    for _ in range(rng.choice((1, 1, 4))):
        data[_place(data, rng)] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))


def _set_number(data: bytearray, rng: random.Random) -> None:
    """A length, a count or a size becomes another; in either order of bytes."""
    width = rng.choice((2, 4, 4, 8))
    value = rng.choice(INTERESTING) if rng.random() < 0.7 else rng.randrange(2**31)
    at = _place(data, rng)
    number = (value % 2 ** (8 * width)).to_bytes(width, rng.choice(("big", "little")))
    data[at : at + width] = number[: len(data) - at]


def _nudge_number(data: bytearray, rng: random.Random) -> None:
    width, order = rng.choice((2, 4)), rng.choice(("big", "little"))
    at = _place(data, rng)
    value = int.from_bytes(data[at : at + width], order) + rng.choice((-1, 1, 8, -8, 1000))
    data[at : at + width] = (value % 2 ** (8 * width)).to_bytes(width, order)[: len(data) - at]


def _truncate(data: bytearray, rng: random.Random) -> None:
    del data[_place(data, rng) :]


def _remove(data: bytearray, rng: random.Random) -> None:
    at = _place(data, rng)
    del data[at : at + rng.choice((1, 4, 64, 1000))]


def _repeat(data: bytearray, rng: random.Random) -> None:
    at, size = _place(data, rng), rng.choice((4, 64, 512, 2000))
    data[at:at] = data[at : at + size] * rng.choice((1, 1, 20))


def _move(data: bytearray, rng: random.Random) -> None:
    start, size = _place(data, rng), rng.choice((4, 64, 512))
    piece = bytes(data[start : start + size])
    del data[start : start + size]
    at = rng.randrange(len(data) + 1)
    data[at:at] = piece


def _overwrite(data: bytearray, rng: random.Random) -> None:
    at, size = _place(data, rng), rng.choice((16, 256))
    data[at : at + size] = rng.randbytes(min(size, len(data) - at))


def _splice(data: bytearray, other: bytes, rng: random.Random) -> None:
    """The beginning of one file and the end of another."""
    data[_place(data, rng) :] = other[rng.randrange(len(other)) :]


def _grow(data: bytearray, rng: random.Random) -> None:
    """The size that a picture or a table states, where each format keeps it."""
    width, height = (rng.choice((0, 1, 300, 5000, 65_535, 2**31 - 1)) for _ in range(2))
    jpeg = max(data.find(b"\xff\xc0"), data.find(b"\xff\xc2"))
    if data[:4] == b"\x89PNG":
        data[16:24] = struct.pack(">II", width, height)
    elif data[:3] == b"GIF":
        data[6:10] = struct.pack("<HH", width & 0xFFFF, height & 0xFFFF)
    elif data[:2] == b"BM":
        data[18:26] = struct.pack("<ii", width, -height)
    elif data[:2] == b"\xff\xd8" and jpeg > 0:
        data[jpeg + 5 : jpeg + 9] = struct.pack(">HH", height & 0xFFFF, width & 0xFFFF)
        data[jpeg + 11 : jpeg + 12] = bytes([rng.randrange(256)])  # how it is sampled
    elif data[:4] == data[-4:] == b"PAR1":
        _change_footer(data, rng)
    else:
        _set_number(data, rng)


def _change_footer(data: bytearray, rng: random.Random) -> None:
    """One field of a Parquet file's footer, which is otherwise whole."""

    def change(value: Value) -> None:
        inner = list(value) if isinstance(value, dict) else list(range(len(value)))
        if not inner:
            return
        at = rng.choice(inner)
        if isinstance(value[at], dict | list) and rng.random() < 0.9:
            change(value[at])
        elif rng.random() < 0.2:
            del value[at]
        else:
            value[at] = rng.choice(INTERESTING) if isinstance(value[at], int) else rng.randbytes(8)

    with contextlib.suppress(IndexError, ValueError):  # other damage came first
        data[:] = with_footer(bytes(data), change)


def _change_named(data: bytearray, rng: random.Random) -> None:
    """A number right behind a name of four letters, as MP4, RIFF and PNG have them."""
    names = [
        at
        for at in range(max(len(data) - 12, 0))
        if data[at : at + 4].isalpha() and data[at : at + 4].isascii()
    ]
    at = rng.choice(names or [0]) + rng.choice((-4, 4, 8, 12, 16))
    at = min(max(at, 0), max(len(data) - 4, 0))
    data[at : at + 4] = struct.pack(rng.choice("<>") + "I", rng.choice(INTERESTING))


_DAMAGES: tuple[Damage, ...] = (
    _flip_bits,
    _flip_bits,
    _set_bytes,
    _set_number,
    _set_number,
    _nudge_number,
    _truncate,
    _remove,
    _repeat,
    _move,
    _overwrite,
    _grow,
    _change_named,
)


# ---- checksums ----------------------------------------------------------------------------


def _mend(data: bytearray) -> None:
    if data[:4] == b"\x89PNG":
        _mend_png(data)
    elif b"ustar" in data[:2000]:
        _mend_tar(data)
    elif data[:4] == b"OggS":
        _mend_ogg(data)


def _mend_png(data: bytearray) -> None:
    at = 8
    while at + 12 <= len(data):
        (size,) = struct.unpack_from(">I", data, at)
        end = at + 8 + size
        if end + 4 > len(data):
            return
        struct.pack_into(">I", data, end, zlib.crc32(data[at + 4 : end]))
        at = end + 4


def _mend_tar(data: bytearray) -> None:
    for at in range(0, len(data) - 511, 512):
        if data[at + 257 : at + 262] == b"ustar":
            data[at + 148 : at + 156] = b" " * 8
            data[at + 148 : at + 156] = b"%06o\0 " % sum(data[at : at + 512])


def _mend_ogg(data: bytearray) -> None:
    at = data.find(b"OggS")
    while at >= 0 and at + 27 <= len(data):
        segments = data[at + 26]
        end = at + 27 + segments + sum(data[at + 27 : at + 27 + segments])
        data[at + 22 : at + 26] = bytes(4)
        struct.pack_into("<I", data, at + 22, _ogg_crc(bytes(data[at:end])))
        at = data.find(b"OggS", at + 27)


def _ogg_crc(data: bytes) -> int:
    crc = 0
    for byte in data:
        crc = (crc << 8 & 0xFFFFFFFF) ^ _OGG_TABLE[crc >> 24 ^ byte]
    return crc


def _ogg_table() -> list[int]:
    table = []
    for value in range(256):
        crc = value << 24
        for _ in range(8):
            crc = (crc << 1 ^ (0x04C11DB7 if crc & 0x80000000 else 0)) & 0xFFFFFFFF
        table.append(crc)
    return table


_OGG_TABLE = _ogg_table()
