"""Decides which columns of a table are media, which are the record, and which are neither.

A column is media when the schema's Hugging Face features say so, when its type is that of a file
(struct with `bytes`), when its name does (`jpg`, `image_2`; a string only under `image(s)`,
`video(s)`, `audio(s)`), or when the source's `columns` say so. Text, numbers and nested values
of these are the record. Vectors, dates, and bytes whose name says nothing are neither; indexing
looks at these bytes, in case they are media.
"""

import difflib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import pyarrow as pa
import pyarrow.compute as pc

from dataservice.core.errors import SourceError
from dataservice.core.job import SourceSpec
from dataservice.core.quoting import cut, quoted
from dataservice.core.sample import MediaKind
from dataservice.sources.formats.media_names import default_kind, holding_kind
from dataservice.sources.formats.signatures import HEAD_BYTES, signature_kind

# Columns that a record needs, whatever their type.
_RECORD_COLUMNS = frozenset({"messages", "conversations", "text", "tools", "system"})
_FEATURES: dict[object, MediaKind] = {"Image": "image", "Video": "video", "Audio": "audio"}
_DEEPEST_FEATURE = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class Columns:
    """`media` has the kind of each media column, in the order of the schema (None: each cell's
    bytes or path tell its kind); `record` columns are read as they are; `unknown` columns hold
    bytes of unknown use."""

    media: dict[str, MediaKind | None]
    record: tuple[str, ...]
    unknown: tuple[str, ...]

    @property
    def read(self) -> tuple[str, ...]:
        """All columns that a sample is made of."""
        return (*self.media, *self.record)


def choose_columns(schema: pa.Schema, spec: SourceSpec, owner: str) -> Columns:
    """The columns of a schema. Raises SourceError, which names the column, when media are stored in
    a form that cannot be read."""
    _require_columns(schema, spec, owner)
    named: dict[str, MediaKind | None] = {
        name: kind for kind, names in spec.media_columns.items() for name in names
    }
    texts = _RECORD_COLUMNS | {column.split(".")[0] for column in spec.columns.of_records.values()}
    features = _features(schema)
    media: dict[str, MediaKind | None] = {}
    record, unknown = [], []
    for field in schema:
        name, feature = field.name, features.get(field.name)
        if name in spec.ignore:
            continue
        if name in named:
            continue
        if name not in texts and (declared := _declared_kind(feature)) is not None:
            media[name] = declared
        elif name not in texts and _is_media(field):
            media[name] = holding_kind(name)
        elif _is_textual(field.type, numbers=name in texts):
            record.append(name)
        elif name in texts or _mentions_media(feature):
            raise _unreadable(field, owner, "is read as text, numbers and nests of them")
        elif _has_bytes(field.type):
            unknown.append(name)
    others = {name: kind for name, kind in media.items() if kind not in spec.media_columns}
    media = {**named, **others}
    for name in media:
        if not _is_cell(schema.field(name).type):
            raise _unreadable(schema.field(name), owner, "is read as media")
    return Columns(media=media, record=tuple(record), unknown=tuple(unknown))


def refuse_media(batch: pa.RecordBatch, columns: Columns, owner: str) -> None:
    """Raises SourceError when a column of unknown use holds media. O(values); copies only their
    first bytes."""
    for name in columns.unknown:
        kind = next(filter(None, map(signature_kind, _heads(batch.column(name)))), None)
        if kind is None:
            continue
        raise SourceError(
            f"{owner}: column {name!r} holds {kind} files by their first bytes, and nothing says "
            f"what they are for. Write columns: {{{kind}: {name}}} in the source to read them, or "
            f"ignore: [{name}] if they are no part of a sample."
        )


def _require_columns(schema: pa.Schema, spec: SourceSpec, owner: str) -> None:
    media = {name: role for role, names in spec.media_columns.items() for name in names}
    texts = {column: role for role, column in spec.columns.of_records.items()}
    for column, role in {**texts, **media}.items():
        # The first key of a dotted path is a column; media are read from columns alone.
        first = column if column in media else column.split(".")[0]
        if not {column, first} & set(schema.names):
            place = "image_column" if column == spec.image_column else f"columns.{role}"
            raise SourceError(
                f"{owner} has no column {quoted(column)}, which {place} of the source names. "
                "Its columns, the most alike first, are "
                f"{cut(', '.join(_most_alike(column, schema.names)))}. Correct {place}."
            )


def _most_alike(column: str, names: Sequence[str]) -> list[str]:
    """Names of columns, as far as they are shown; those most like `column` first."""
    shown = [cut(name, 60) for name in names]
    return difflib.get_close_matches(cut(column, 60), shown, n=len(shown) or 1, cutoff=0)


def _unreadable(field: "pa.Field[Any]", owner: str, use: str) -> SourceError:
    if "arrow.json" in str(field.type):  # datasets' feature Json, as it loads calls of tools
        name = field.name
        return SourceError(
            f"{owner}: column {name!r} {use}, and holds pieces of JSON, of type "
            f"{field.type!s:.200}. Write each row as one string of JSON (in datasets: "
            f"map(lambda row: {{'other': json.dumps(row[{name!r}])}}, remove_columns={name!r})"
            f".rename_column('other', {name!r})); or write ignore: [{name}] in the source if it is "
            "no part of a sample."
        )
    return SourceError(
        f"{owner}: column {field.name!r} {use}, and is of type {field.type!s:.200}. Media are kept "
        "as struct{bytes, path}, as the bytes of their files, as paths, or as lists of these "
        f"(in datasets: cast_column to Image, Video or Audio); or write ignore: [{field.name}] in "
        "the source if it is no part of a sample."
    )


# ---- what the schema's features say -------------------------------------------------------


def _features(schema: pa.Schema) -> dict[str, object]:
    """Hugging Face's features by column; empty when another program wrote the file."""
    try:
        stated = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
        features = stated["info"]["features"]
    except (ValueError, TypeError, LookupError, RecursionError):
        return {}
    return features if isinstance(features, dict) else {}


def _declared_kind(feature: object) -> MediaKind | None:
    """Kind of an Image, Video or Audio feature, or of a list of them."""
    for _ in range(_DEEPEST_FEATURE):
        if isinstance(feature, list) and feature:
            feature = feature[0]
        elif isinstance(feature, dict) and isinstance(feature.get("feature"), dict | list):
            feature = feature["feature"]
        else:
            break
    kind = feature.get("_type") if isinstance(feature, dict) else None
    return _FEATURES.get(kind) if isinstance(kind, str) else None


def _mentions_media(feature: object) -> bool:
    """Whether a feature contains a media feature at any depth."""
    level = [feature]
    for _ in range(_DEEPEST_FEATURE):
        if any(_declared_kind(one) for one in level):
            return True
        nests = [one.values() if isinstance(one, dict) else one for one in level]
        level = [item for nest in nests if isinstance(nest, Iterable) for item in nest]
        level = [item for item in level if isinstance(item, dict | list)]
    return False


# ---- types --------------------------------------------------------------------------------


def _is_media(field: "pa.Field[Any]") -> bool:
    """Whether a column is media by its type and its name."""
    kind = _item(field.type)
    if pa.types.is_struct(kind):
        names = {kind.field(place).name for place in range(kind.num_fields)}
        if "bytes" in names:
            inner = kind.field("bytes").type
            return _is_bytes(inner) or pa.types.is_null(inner)
        # Sound or pictures stored as decoded arrays, under a name that says so.
        return default_kind(field.name) is not None or {"array", "sampling_rate"} <= names
    if _is_bytes(kind):
        return holding_kind(field.name) is not None
    return default_kind(field.name) is not None and not pa.types.is_null(kind)


def _is_cell(kind: pa.DataType) -> bool:
    """Whether a media column is stored in a form that can be read."""
    kind = _item(kind)
    if pa.types.is_struct(kind):
        names = {kind.field(place).name for place in range(kind.num_fields)}
        return "array" not in names and bool(names & {"bytes", "path"})
    return _is_bytes(kind) or _is_string(kind) or pa.types.is_null(kind)


def _item(kind: pa.DataType) -> pa.DataType:
    """The type of a list's items, else the type itself; for dictionary-encoded values, the values'
    type."""
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        kind = cast(pa.DataType, kind.value_type)
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def _is_bytes(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return pa.types.is_binary(kind) or pa.types.is_large_binary(kind)


def _is_string(kind: pa.DataType) -> bool:
    return pa.types.is_string(kind) or pa.types.is_large_string(kind)


def _is_textual(kind: pa.DataType, *, numbers: bool) -> bool:
    """Whether a column may be part of a JSON record: text, plain scalars, and nested text; lists of
    numbers, such as vectors, only with `numbers`."""
    if pa.types.is_dictionary(kind):
        return _is_textual(kind.value_type, numbers=numbers)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        inner = kind.value_type
        numeric = pa.types.is_integer(inner) or pa.types.is_floating(inner)
        return (numbers or not numeric) and _is_textual(inner, numbers=numbers)
    if pa.types.is_struct(kind):
        fields = (kind.field(place).type for place in range(kind.num_fields))
        return all(_is_textual(field, numbers=numbers) for field in fields)
    return (
        _is_string(kind)
        or pa.types.is_integer(kind)
        or pa.types.is_floating(kind)
        or pa.types.is_boolean(kind)
        or pa.types.is_null(kind)
    )


def _has_bytes(kind: pa.DataType) -> bool:
    if pa.types.is_struct(kind):
        return any(_has_bytes(kind.field(place).type) for place in range(kind.num_fields))
    if pa.types.is_map(kind):
        return _has_bytes(kind.key_type) or _has_bytes(kind.item_type)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return _has_bytes(kind.value_type)
    return _is_bytes(kind)


def _heads(array: "pa.Array[Any]") -> Iterator[bytes]:
    """The first bytes of every value in an array, at any depth of nesting."""
    if isinstance(array, pa.DictionaryArray):
        yield from _heads(array.dictionary.take(array.indices.drop_null().unique()))
    elif isinstance(array, pa.MapArray):  # a ListArray too, which is not flattened as one
        yield from _heads(array.keys)
        yield from _heads(array.items)
    elif isinstance(array, pa.ListArray | pa.LargeListArray | pa.FixedSizeListArray):
        yield from _heads(pc.list_flatten(array))
    elif isinstance(array, pa.StructArray):
        for field in array.flatten():
            yield from _heads(field)
    elif _is_bytes(array.type):
        heads = pc.binary_slice(array.drop_null(), 0, HEAD_BYTES)
        yield from cast("list[bytes]", heads.to_pylist())
