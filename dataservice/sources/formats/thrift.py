"""Thrift's compact protocol, as far as Parquet's headers need it.

Some damaged footers make Arrow end the process, by a C++ exception that nothing catches. Headers
are therefore checked here before Arrow reads a file, and parsed as Arrow parses them: a field of an
unexpected type is skipped, as if it were absent.

Source: Apache Thrift, "Thrift Compact protocol encoding".
"""

from typing import TypeVar, Union, cast

# The objects of a footer, ours and Arrow's, take up to 200 bytes per value. A file with 50,000
# columns in all its row groups together has two million values.
MOST_VALUES = 2**21
_DEEPEST = 32
_LONGEST_NUMBER_BITS = 70  # ten bytes of seven
_TRUE, _FALSE, _BYTE, _I16, I32, I64, _DOUBLE, BINARY, _LIST, _SET, _MAP, STRUCT = range(1, 13)
_BITS = {_I16: 16, I32: 32, I64: 64}

Value = Union[int, bytes, list["Value"], "Struct"]
Struct = dict[tuple[int, int], Value]
"""Values by the number and type of their field."""

_Item = TypeVar("_Item", int, Struct)


def read_struct(data: bytes) -> tuple[Struct, int]:
    """The fields, and the number of bytes they took. Doubles and maps are skipped.

    Raises:
        IndexError: the data ends too early.
        ValueError: the data is not Thrift, or has more than MOST_VALUES values.
    """
    reader = _Reader(data)
    return reader.struct(0), reader.at


def integer(struct: Struct, field: int, kind: int) -> int:
    """A number of type I32 or I64, at least 0; 0 when it is absent. Raises ValueError when it is
    negative."""
    value = struct.get((field, kind), 0)
    if not isinstance(value, int) or value < 0:
        raise ValueError(f"a header states {str(value)[:40]} for field {field}")
    return value


def items(struct: Struct, field: int, kind: type[_Item]) -> list[_Item]:
    """A list of numbers (int) or of structs (dict), empty when it is absent. Raises ValueError when
    its items are of another type."""
    values = struct.get((field, _LIST), [])
    if not isinstance(values, list) or not all(isinstance(value, kind) for value in values):
        raise ValueError(f"a header has a list of another type in field {field}")
    return cast("list[_Item]", values)


class _Reader:
    def __init__(self, data: bytes) -> None:
        self._data = data
        self._values = 0
        self.at = 0

    def struct(self, depth: int) -> Struct:
        if depth > _DEEPEST:
            raise ValueError("a header nests too deep")
        fields: Struct = {}
        number = 0
        while (head := self._byte()) != 0:
            delta, kind = head >> 4, head & 0x0F
            number = number + delta if delta else self._integer(16)
            value = self._value(kind, depth)
            if (number, kind) in fields or number >= 2**15:
                raise ValueError(f"a header has field {number} twice, or above 16 bits")
            if value is not None:
                fields[number, kind] = value
        return fields

    def _value(self, kind: int, depth: int) -> Value | None:
        self._values += 1
        if self._values > MOST_VALUES:
            raise ValueError(f"a header holds more than {MOST_VALUES:,} values")
        if kind in (_TRUE, _FALSE):
            return int(kind == _TRUE)
        if kind == _BYTE:
            return self._bytes(1)
        if kind in _BITS:
            return self._integer(_BITS[kind])
        if kind == _DOUBLE:
            self._bytes(8)
            return None
        if kind == BINARY:
            return self._bytes(self._size())
        if kind in (_LIST, _SET):
            return self._list(depth)
        if kind == _MAP:
            self._map(depth)
            return None
        if kind == STRUCT:
            return self.struct(depth + 1)
        raise ValueError(f"a header holds a value of Thrift type {kind}")

    def _list(self, depth: int) -> list[Value]:
        head = self._byte()
        kind, size = head & 0x0F, head >> 4
        if size == 15:
            size = self._size()
        values = (self._item(kind, depth) for _ in range(size))
        return [value for value in values if value is not None]

    def _map(self, depth: int) -> None:
        size = self._size()
        kinds = self._byte() if size else 0
        for _ in range(size):
            self._item(kinds >> 4, depth)
            self._item(kinds & 0x0F, depth)

    def _item(self, kind: int, depth: int) -> Value | None:
        """One item of a list. Unlike in a field, a boolean in a list takes a byte."""
        if kind in (_TRUE, _FALSE):
            return self._byte()
        if depth >= _DEEPEST:
            raise ValueError("a header nests too deep")
        return self._value(kind, depth + 1)

    def _integer(self, bits: int) -> int:
        """A signed number. Numbers of more bits are refused: a reader that truncates them would
        read another number."""
        value = self._varint(bits)
        return (value >> 1) ^ -(value & 1)

    def _size(self) -> int:
        return self._varint(31)

    def _varint(self, bits: int) -> int:
        value = shift = 0
        while True:
            byte = self._byte()
            value |= (byte & 0x7F) << shift
            shift += 7
            if value >> bits or shift > _LONGEST_NUMBER_BITS:
                raise ValueError(f"a header holds a number above {bits} bits")
            if byte < 0x80:
                return value

    def _byte(self) -> int:
        byte = self._data[self.at]
        self.at += 1
        return byte

    def _bytes(self, size: int) -> bytes:
        if self.at + size > len(self._data):
            raise IndexError
        self.at += size
        return self._data[self.at - size : self.at]
