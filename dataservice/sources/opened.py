"""A source together with what it is opened with, where the operator grants that: its storage, and
the code of its format.

Such a source is made where storage is opened, and stays in that process: what it holds is written
to no file and no message.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from dataservice.core.job import SourceSpec
from dataservice.core.own_format import FormatCode
from dataservice.sources.roots import Roots

SHORTEST_SECRET = 4  # characters; shorter values would be hidden in every word of a message


@dataclass(frozen=True, kw_only=True, slots=True)
class Grant:
    """The options of a file system, of which `secret` are never shown, and where they may be
    used."""

    options: Mapping[str, Any]
    secret: Mapping[str, Any] = field(repr=False)
    roots: Roots


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenedSource(SourceSpec):
    """A source with what its storage profile grants, where it names one, and with the code of its
    format, where that is the user's own."""

    grant: Grant | None = field(default=None, repr=False, compare=False)
    code: FormatCode | None = field(default=None, repr=False, compare=False)


def without_secrets(text: str, secret: object) -> str:
    """The text with "***" in place of each value of `secret` that it quotes."""
    for value in sorted(_texts(secret), key=len, reverse=True):
        text = text.replace(value, "***")
    return text


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, Mapping):
        for inner in value.values():
            yield from _texts(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _texts(inner)
    elif len(text := str(value)) >= SHORTEST_SECRET and not isinstance(value, bool):
        yield from {text, repr(text)[1:-1], quote(text, safe="")}  # as messages quote them
