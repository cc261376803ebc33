"""Code that the formats share: order of names, JSON records, and samples made of both."""

import json
import re
from collections.abc import Mapping
from typing import cast

from dataservice.core.errors import SampleError
from dataservice.core.quoting import quoted

_KEY_FIELDS = ("id", "key", "__key__")
_LONGEST_KEY = 512
_LONGEST_FILE_NAME = 255  # bytes; file systems refuse more
_LONGEST_PATH = 4096


def natural_order(name: str) -> list[tuple[int, int, str]]:
    """Sort key under which `2.jpg` comes before `10.jpg`."""
    pieces = re.split(r"([0-9]+)", name)
    return [(0, int(p), p) if p.isdecimal() and p.isascii() else (1, 0, p) for p in pieces if p]


def parse_json(data: bytes | str, what: str) -> object:
    """Any JSON value. Raises SampleError when `data` is not JSON."""
    try:
        return cast(object, json.loads(data))
    except (ValueError, RecursionError) as error:
        raise SampleError(f"{what} is not valid JSON ({error}). Write JSON in UTF-8.") from error


def parse_record(data: bytes | str, what: str) -> dict[str, object]:
    """A JSON object. Raises SampleError when `data` is something else; `what` names it in the
    message."""
    record = parse_json(data, what)
    if not isinstance(record, dict):
        raise SampleError(
            f"{what} holds a JSON {type(record).__name__}; a sample must be one JSON object."
        )
    return record


def require_path(value: object, what: str) -> str:
    """A path that a record names. Raises SampleError when the value cannot be a path."""
    if not isinstance(value, str):
        raise SampleError(
            f"{what} holds {quoted(value, 80)}; it must be a relative path, or under a key of the "
            "record a list of them. Store the file beside and its path here."
        )
    if not value:
        raise SampleError(
            f"{what} is an empty text, which is no path. Write null where a record has no file, or "
            "take the key out."
        )
    parts = value.split("/") if len(value) <= _LONGEST_PATH else [value]
    if any(len(part.encode(errors="replace")) > _LONGEST_FILE_NAME for part in parts):
        raise SampleError(
            f"{what} holds {len(value):,} characters, {quoted(value, 40)}, which is no path. "
            "Store the file beside and its path here."
        )
    return value


def is_text(value: str) -> bool:
    """Whether a string can be written as UTF-8. JSON may hold halves of surrogate pairs."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def utf8_text(data: bytes, what: str) -> str:
    """A text's bytes as text, without a byte-order mark. Raises SampleError when they are not
    UTF-8."""
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise SampleError(f"{what} is not UTF-8 text ({error}). Write it in UTF-8.") from error


def record_key(record: Mapping[str, object], fallback: str) -> str:
    """The record's own id, if it has one that can be written as UTF-8 and is not a long text; else
    `fallback`."""
    for field in _KEY_FIELDS:
        value = record.get(field)
        if isinstance(value, (str, int)) and not isinstance(value, bool) and value != "":
            key = str(value)
            if len(key) <= _LONGEST_KEY and is_text(key):
                return key
    return fallback
