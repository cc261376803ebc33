"""The fields of a protobuf message as bytes, for messages that are made by the thousand.

A message made of objects, only to be made bytes at once, takes several times as long as joining the
bytes that it consists of. The encoding is the one that protobuf defines
(protobuf.dev/programming-guides/encoding); fields may come in any order, and those that are zero or
empty need not come.
"""

from collections.abc import Iterable, Mapping
from functools import cache, lru_cache
from typing import Any

NUMBER, BYTES = 0, 2  # how a field is written: a number, or a length and so many bytes
_MORE = 0x80  # of a byte of a number, when another comes
_NUMBER_BITS = (1 << 64) - 1
TEXTS_KEPT = 4096  # of one field that repeats texts


def heads_of(message: Any, kind: int) -> dict[str, bytes]:
    """What stands before each field of a type of messages, were it of this kind, by name."""
    fields = message.DESCRIPTOR.fields
    return {field.name: head_of(field.number, kind) for field in fields}


@lru_cache(maxsize=8192)  # nearly all lengths and ranks, and what thousands of messages repeat
def number(value: int) -> bytes:
    """A number of up to 64 bits; one below zero has ten bytes."""
    value &= _NUMBER_BITS
    digits = bytearray()
    while value >= _MORE:
        digits.append(value & (_MORE - 1) | _MORE)
        value >>= 7
    digits.append(value)
    return bytes(digits)


def head_of(field: int, kind: int) -> bytes:
    """What stands before a field of this number and kind."""
    return number(field << 3 | kind)


def fields(heads: Mapping[str, bytes], values: Mapping[str, bytes]) -> list[bytes]:
    """The parts of fields of bytes, by name; those that are empty are left out."""
    parts: list[bytes] = []
    for name, value in values.items():
        if value:
            parts += heads[name], number(len(value)), value
    return parts


def numbers(heads: Mapping[str, bytes], **values: int) -> list[bytes]:
    """The parts of fields of numbers, by name."""
    return [part for name, value in values.items() for part in (heads[name], number(value))]


def texts(head: bytes, values: Iterable[str]) -> list[bytes]:
    """A field that repeats texts, which are often the same."""
    return list(map(_repeated(head).__getitem__, values))


@cache
def _repeated(head: bytes) -> "_Texts":
    return _Texts(head)


class _Texts(dict[str, bytes]):
    """Texts with this before them, kept: a look costs a call of Python only where one is new."""

    def __init__(self, head: bytes) -> None:
        self._head = head

    def __missing__(self, text: str) -> bytes:
        if len(self) >= TEXTS_KEPT:
            self.clear()
        encoded = text.encode()
        self[text] = found = b"".join((self._head, number(len(encoded)), encoded))
        return found


def within(head: bytes, parts: list[bytes]) -> list[bytes]:
    """The parts of a field that holds a message of these parts."""
    message = b"".join(parts)
    return [head, number(len(message)), message]
