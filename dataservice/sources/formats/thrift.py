"""Thrift's compact protocol, as far as Parquet's headers need it.

Arrow's own objects for a footer end the process on some damaged ones: an exception of C++ that
nothing catches. What is looked at before a file is trusted is therefore read here.

Source: Apache Thrift, "Thrift Compact protocol encoding".
"""

from typing import Union

_DEEPEST = 32
_TRUE, _FALSE, _BYTE, _I16, _I32, _I64, _DOUBLE, _BINARY, _LIST, _SET, _MAP, _STRUCT = range(1, 13)

Value = Union[int, bytes, list["Value"], "Struct"]
Struct = dict[int, Value]


def read_struct(data: bytes) -> tuple[Struct, int]:
    """Fields by number, and how many bytes they took. Doubles and maps are passed over.

    Raises:
        IndexError: the data ends too early.
        ValueError: it is no Thrift.
    """
    reader = _Reader(data)
    return reader.struct(0), reader.at


def integer(struct: Struct, field: int) -> int:
    """A field that must be a number of at least 0; 0 when it is absent. Raises ValueError."""
    value = struct.get(field, 0)
    if not isinstance(value, int) or value < 0:
        raise ValueError(f"a header states {str(value)[:40]} for field {field}")
    return value


def structs(struct: Struct, field: int) -> list[Struct]:
    """A field that must be a list of structs. Raises ValueError."""
    values = struct.get(field, [])
    if not isinstance(values, list) or not all(isinstance(value, dict) for value in values):
        raise ValueError(f"a header has no list of structs in field {field}")
    return [value for value in values if isinstance(value, dict)]


class _Reader:
    def __init__(self, data: bytes) -> None:
        self._data = data
        self.at = 0

    def struct(self, depth: int) -> Struct:
        if depth > _DEEPEST:
            raise ValueError("a header nests too deep")
        fields: Struct = {}
        number = 0
        while (head := self._byte()) != 0:
            delta, kind = head >> 4, head & 0x0F
            number = number + delta if delta else self._integer()
            value = self._value(kind, depth)
            if value is not None:
                fields[number] = value
        return fields

    def _value(self, kind: int, depth: int) -> Value | None:
        if kind in (_TRUE, _FALSE):
            return int(kind == _TRUE)
        if kind == _BYTE:
            return self._bytes(1)
        if kind in (_I16, _I32, _I64):
            return self._integer()
        if kind == _DOUBLE:
            self._bytes(8)
            return None
        if kind == _BINARY:
            return self._bytes(self._varint())
        if kind in (_LIST, _SET):
            return self._list(depth)
        if kind == _MAP:
            self._map(depth)
            return None
        if kind == _STRUCT:
            return self.struct(depth + 1)
        raise ValueError(f"a header holds a value of Thrift type {kind}")

    def _list(self, depth: int) -> list[Value]:
        head = self._byte()
        kind, size = head & 0x0F, head >> 4
        if size == 15:
            size = self._varint()
        values = (self._item(kind, depth) for _ in range(size))
        return [value for value in values if value is not None]

    def _map(self, depth: int) -> None:
        size = self._varint()
        kinds = self._byte() if size else 0
        for _ in range(size):
            self._item(kinds >> 4, depth)
            self._item(kinds & 0x0F, depth)

    def _item(self, kind: int, depth: int) -> Value | None:
        """Unlike in a field, a truth value inside a list takes a byte."""
        if kind in (_TRUE, _FALSE):
            return self._byte()
        return self._value(kind, depth + 1) if depth < _DEEPEST else self._too_deep()

    def _too_deep(self) -> Value:
        raise ValueError("a header nests too deep")

    def _integer(self) -> int:
        value = self._varint()
        return (value >> 1) ^ -(value & 1)

    def _varint(self) -> int:
        value = shift = 0
        while True:
            byte = self._byte()
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
            shift += 7
            if shift > 63:
                raise ValueError("a header holds a number above 64 bits")

    def _byte(self) -> int:
        byte = self._data[self.at]
        self.at += 1
        return byte

    def _bytes(self, size: int) -> bytes:
        if self.at + size > len(self._data):
            raise IndexError
        self.at += size
        return self._data[self.at - size : self.at]
