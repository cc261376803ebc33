"""Makes samples of what a user's own format parses, by the rules for rows of tables."""

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import cast

from dataservice.core.errors import SampleError
from dataservice.core.job import SourceSpec
from dataservice.core.limits import DecodeLimits
from dataservice.core.own_code import running
from dataservice.core.own_format import OwnFormat
from dataservice.core.quoting import quoted
from dataservice.core.sample import MediaKind, RawSample
from dataservice.sources.formats.content import record_key
from dataservice.sources.formats.media_names import default_kind, holding_kind
from dataservice.sources.formats.table_columns import Columns
from dataservice.sources.formats.table_rows import Row, TableRows


class OwnSamples:
    """The samples of one source whose format is the user's own. Safe for use from several
    threads."""

    def __init__(self, spec: SourceSpec, name: str, reads: OwnFormat, limits: DecodeLimits) -> None:
        """`name` is that of the class in the service's config."""
        self._spec = spec
        self._name = name
        self._reads = reads
        self._limits = limits
        self._rows = TableRows(spec, _NoFiles(), limits)

    def parsed(self, raw: RawSample) -> RawSample:
        """The sample of these bytes, under the key that they were read with. Raises SampleError
        where it cannot be used."""
        _, made = self.keyed(raw)
        return replace(made, key=raw.key, piece=raw.piece)

    def keyed(self, raw: RawSample) -> tuple[str, RawSample]:
        """(The sample's own key, or else that of `raw`; the sample). Raises SampleError where it
        cannot be used."""
        assert raw.unparsed is not None, "such a source gives nothing else"
        with running(self._name):
            cells = _cells(self._reads.parse(raw.unparsed.parts))
        columns = self._columns(cells)
        cells |= self._record({name: cells[name] for name in columns.record})
        key = record_key(cells, raw.key)
        return key, self._rows.sample(key, columns, cells, "")

    def _columns(self, cells: Row) -> Columns:
        """Which cells are media: those that the source names, whose name says so, and bytes."""
        media: dict[str, MediaKind | None] = {
            column: kind
            for kind, columns in self._spec.media_columns.items()
            for column in columns
            if column in cells
        }
        texts = {column.split(".")[0] for column in self._spec.columns.of_records.values()}
        record = []
        for name, value in cells.items():
            if name in self._spec.ignore or name in media:
                continue
            if name not in texts and (_holds_bytes(value) or default_kind(name) is not None):
                media[name] = holding_kind(name)
            else:
                record.append(name)
        return Columns(media=media, record=tuple(record), unknown=())

    def _record(self, record: Row) -> Row:
        """The cells that are not media, as JSON has them. Raises SampleError where it has no such
        thing."""
        try:
            text = json.dumps(record)
            plain = json.loads(text)
        except (TypeError, ValueError, RecursionError) as error:
            raise SampleError(
                f"{quoted(self._name)} parsed a row that is not JSON ({error}). A row has text, "
                "numbers, lists and dicts of them, and media as bytes or lists of bytes."
            ) from error
        self._limits.check("max_record_bytes", len(text), "the row: bytes of its record")
        return cast(Row, plain)


def _cells(row: object) -> Row:
    """The cells of a row that hold something, and lists where the user's code has tuples. Raises
    SampleError where it is no row, and what a mapping of the user's own raises."""
    if not isinstance(row, Mapping) or not all(isinstance(column, str) for column in row):
        raise SampleError(
            f"it is parsed to {quoted(row, 80)}. Return a row: a dict of columns by name."
        )
    return {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in row.items()
        if value is not None
    }


def _holds_bytes(value: object) -> bool:
    held = value if isinstance(value, list) else [value]
    first = next((item for item in held if item is not None), None)
    return isinstance(first, bytes) or (isinstance(first, Mapping) and "bytes" in first)


class _NoFiles:
    """Where records of such formats may name files: nowhere."""

    def read_beside(self, path: str, relative: str, limits: DecodeLimits) -> bytes:
        """Raises SampleError."""
        raise SampleError(
            f"it names the file {quoted(relative, 80)}. A format of your own gives media as bytes: "
            "locate their ranges, and let parse return them."
        )
