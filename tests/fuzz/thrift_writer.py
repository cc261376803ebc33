"""Thrift structs as `dataservice.sources.formats.thrift` reads them, written again: so that one
field of a Parquet file's headers can be changed and the rest stay whole."""

from collections.abc import Callable

from dataservice.sources.formats.thrift import BINARY, I32, STRUCT, Struct, Value, read_struct

LIST = 9
_TRUTH = (1, 2)


def with_footer(data: bytes, change: Callable[[Struct], None]) -> bytes:
    """A Parquet file whose footer was changed."""
    start = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    footer, _ = read_struct(data[start:-8])
    change(footer)
    written = encoded(footer)
    return data[:start] + written + len(written).to_bytes(4, "little") + data[-4:]


def encoded(struct: Struct) -> bytes:
    """A struct in the compact protocol, the number of each field written out."""
    out = bytearray()
    for (number, kind), value in struct.items():
        out += bytes([kind]) + varint(number)
        out += b"" if kind in _TRUTH else _value(value)
    return bytes(out) + b"\0"


def varint(value: int) -> bytes:
    """A number, signed by zigzag."""
    return _plain(value << 1 if value >= 0 else ~(value << 1))


def _value(value: Value) -> bytes:
    if isinstance(value, int):
        return varint(value)
    if isinstance(value, bytes):
        return _plain(len(value)) + value
    if isinstance(value, dict):
        return encoded(value)
    kinds: dict[type, int] = {int: I32, bytes: BINARY, dict: STRUCT, list: LIST}
    kind = kinds[type(value[0])] if value else STRUCT
    return bytes([0xF0 | kind]) + _plain(len(value)) + b"".join(map(_value, value))


def _plain(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes(out + bytes([value]))
