"""MDS, the shards of MosaicML Streaming: one sample per record, its columns as in a table's row.

    uint32 samples, uint32[samples + 1] offsets, JSON of the columns, the samples one after another
    a sample: uint32 sizes of the columns that have no fixed size, then the columns' bytes

A sample is one byte range. Its columns are media or record by the rules for tables (those encoded
as images are images). `index.json` beside the shards says which of them are the data set.

Source: `streaming/base/format/mds/` of mosaicml-streaming 0.13.
"""

import json
import posixpath
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import IO, Any, ClassVar, cast

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from dataservice.core.errors import RESTORE, SampleError, SourceError
from dataservice.core.job import SourceSpec
from dataservice.core.limits import DecodeLimits
from dataservice.core.quoting import cut, quoted
from dataservice.core.sample import ByteSpan, RawSample, SampleLocation
from dataservice.sources.formats.content import parse_record
from dataservice.sources.formats.listing import listed_files
from dataservice.sources.formats.mds_values import DECODERS, SIZES_BYTES, cell_type, is_image
from dataservice.sources.formats.protocol import ScannedSample
from dataservice.sources.formats.table_columns import Columns, choose_columns, refuse_media
from dataservice.sources.formats.table_format import KEPT_DESCRIPTIONS, TableFormat
from dataservice.sources.formats.table_rows import Row
from dataservice.sources.storage import SourceFile, Storage

_COMPRESSED = (".mds.br", ".mds.bz2", ".mds.gz", ".mds.snappy", ".mds.zstd")
_VERSION = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """What the head of a shard says: its samples, its columns in the order in which samples have
    them, and what each is for. `sizes` are of columns whose values all have one size."""

    samples: int
    encodings: Mapping[str, str]
    sizes: Mapping[str, int]
    columns: Columns


class Mds(TableFormat):
    """Uncompressed shards; columns are chosen by name and encoding, shard by shard."""

    suffixes: ClassVar[tuple[str, ...]] = (".mds",)

    def __init__(self, spec: SourceSpec, storage: Storage, limits: DecodeLimits) -> None:
        super().__init__(spec, storage, limits)
        self._opened = lru_cache(KEPT_DESCRIPTIONS)(self._open)

    def files(self) -> tuple[SourceFile, ...]:
        """The shards at the source's URL. Of a folder, those that its `index.json` names; a folder
        of several splits is refused, and so are compressed shards."""
        found = self._storage.files((*self.suffixes, *_COMPRESSED))
        plain = [file for file in found if not file.path.endswith(_COMPRESSED)]
        present = {file.path for file in plain}
        for file in found:
            stem, _, codec = file.path.rpartition(".")
            if file.path not in present and stem not in present:
                raise SourceError(
                    f"{self._owner}: {file.path} is compressed with {codec}; samples are read from "
                    "the middle of a shard, which needs an uncompressed one. Decompress the shards "
                    "in their folder, or write them by MDSWriter without compression (media inside "
                    "are compressed already)."
                )
        return listed_files(
            self._storage, plain, self._owner, list_names=("index.json",), names_in=_shards
        )

    def scan(self, file: SourceFile) -> Iterator[ScannedSample]:
        """All samples of a shard. Raises SourceError when it is truncated or damaged."""
        name = posixpath.basename(file.path)
        with (
            self._storage.translate(file.path, "be read as MDS"),
            self._damage(file.path, "MDS shard"),
            self._storage.open(file.path) as stream,
        ):
            shard = self._head(stream, file.path)
            for number, span in enumerate(self._spans(stream, shard)):
                key, raw = self._scanned(stream, shard, span, file.path, f"{name}:{number}")
                yield ScannedSample(
                    key=key,
                    location=SampleLocation(file=file.path, spans=(span,)),
                    raw=raw,
                    behind_bytes=span.offset_bytes + span.size_bytes,
                )

    def read(self, key: str, location: SampleLocation) -> RawSample:
        """One sample from its byte range."""
        self._check_size(location.spans)
        (data,) = self._storage.read_spans(location.file, location.spans)
        with self._storage.translate(location.file, "be read as MDS"):
            try:
                shard = self._opened(location.file)
            except ValueError as error:
                raise SourceError(
                    f"{self._owner}: {location.file} is no MDS shard ({cut(error)}). The file was "
                    f"changed after it was indexed. {RESTORE}"
                ) from error
        cells = self._cells(data, shard)
        return self._samples.sample(key, shard.columns, cells, location.file)

    # ---- shards ---------------------------------------------------------------------------

    def _open(self, path: str) -> Shard:
        with self._storage.open(path) as stream:
            return self._head(stream, path)

    def _head(self, stream: IO[bytes], path: str) -> Shard:
        """The head of a shard. Raises ValueError when this is none, SourceError when its columns
        cannot be read."""
        size_bytes = stream.seek(0, 2)
        stream.seek(0)
        head = stream.read(4)
        samples = int.from_bytes(head, "little")
        columns_at = 4 * (samples + 2)
        if len(head) < 4 or columns_at > size_bytes or samples > self._limits.max_row_group_values:
            raise ValueError(
                f"it states {samples:,} samples in {size_bytes:,} bytes; the limit "
                f"max_row_group_values is {self._limits.max_row_group_values:,}"
            )
        begin = int.from_bytes(stream.read(4), "little")
        if not columns_at <= begin <= min(size_bytes, columns_at + self._limits.max_header_bytes):
            raise ValueError(f"its first sample is at byte {begin:,}")
        stream.seek(columns_at)
        stated = stream.read(begin - columns_at)
        try:
            config = parse_record(stated, "its description of columns")
        except SampleError as error:
            raise ValueError(str(error)) from error
        encodings, sizes = _described(config)
        return Shard(
            samples=samples,
            encodings=encodings,
            sizes=sizes,
            columns=self._choose(encodings, f"{self._owner}: {path}"),
        )

    def _choose(self, encodings: Mapping[str, str], owner: str) -> Columns:
        """Columns by the rules for tables."""
        fields, features = [], {}
        for name, encoding in encodings.items():
            if name in self._spec.ignore:
                continue
            if encoding not in DECODERS:
                raise SourceError(
                    f"{owner}: column {quoted(name)} is encoded as {quoted(encoding)}, which is "
                    "not read. Encode it as str, int, json, bytes, jpeg or png, or write "
                    f"ignore: [{cut(name, 60)}] in the source if it is no part of a sample."
                )
            fields.append(pa.field(name, cell_type(encoding)))
            if is_image(encoding):
                features[name] = {"_type": "Image"}
        stated = json.dumps({"info": {"features": features}})
        return choose_columns(pa.schema(fields, {"huggingface": stated}), self._spec, owner)

    def _spans(self, stream: IO[bytes], shard: Shard) -> Iterator[ByteSpan]:
        """Where the samples lie. Raises ValueError when they do not fill the file."""
        size_bytes = stream.seek(0, 2)
        stream.seek(4)
        data = stream.read(4 * (shard.samples + 1))
        offsets: NDArray[np.uint32] = np.frombuffer(data, "<u4")
        if (offsets[1:] < offsets[:-1]).any() or offsets[-1] != size_bytes:
            raise ValueError(f"its samples end at byte {offsets[-1]:,}, the file at {size_bytes:,}")
        for number in range(shard.samples):
            start, end = int(offsets[number]), int(offsets[number + 1])
            yield ByteSpan(name=f"sample {number}", offset_bytes=start, size_bytes=end - start)

    # ---- samples --------------------------------------------------------------------------

    def _scanned(
        self, stream: IO[bytes], shard: Shard, span: ByteSpan, path: str, fallback_key: str
    ) -> tuple[str, RawSample | SampleError]:
        cells: Row | SampleError
        try:
            self._check_size((span,))
            stream.seek(span.offset_bytes)
            data = stream.read(span.size_bytes)
            self._refuse_media(self._values(data, shard), shard, path)
            cells = self._cells(data, shard)
        except SampleError as error:
            cells = error
        return self._samples.scanned(shard.columns, cells, path, fallback_key)

    def _refuse_media(self, values: Mapping[str, bytes], shard: Shard, path: str) -> None:
        """Raises SourceError when a column of bytes of unknown use holds media."""
        if shard.columns.unknown:
            heads = {name: pa.array([values[name]]) for name in shard.columns.unknown}
            refuse_media(pa.record_batch(heads), shard.columns, f"{self._owner}: {path}")

    def _values(self, data: bytes, shard: Shard) -> dict[str, bytes]:
        """Each column's bytes. Raises SampleError when they are not the sample's."""
        sized = [name for name in shard.encodings if name not in shard.sizes]
        at = 4 * len(sized)
        stated = struct.unpack_from(f"<{len(sized)}I", data) if at <= len(data) else ()
        sizes = {**shard.sizes, **dict(zip(sized, stated, strict=False))}
        ends_at = at + sum(sizes.values())
        if ends_at != len(data) or len(sizes) < len(shard.encodings):
            raise SampleError(
                f"the sample holds {len(data):,} bytes, and its columns take {ends_at:,}. Copy the "
                "shard again."
            )
        values = {}
        for name in shard.encodings:
            values[name] = data[at : at + sizes[name]]
            at += sizes[name]
        return values

    def _cells(self, data: bytes, shard: Shard) -> Row:
        """A sample as a row of a table."""
        values, columns = self._values(data, shard), shard.columns
        record_bytes = sum(len(values[name]) for name in columns.record)
        self._limits.check("max_record_bytes", record_bytes, "the sample: bytes of its record")
        return {
            name: DECODERS[shard.encodings[name]](values[name], f"column {name!r}", self._limits)
            for name in columns.read
        }


def _described(config: Mapping[str, object]) -> tuple[dict[str, str], dict[str, int]]:
    """(Encoding by column, fixed size by column) of a shard's description. Raises ValueError when
    it is none."""
    if config.get("version") != _VERSION or config.get("format") != "mds":
        raise ValueError(f"it is no MDS of version {_VERSION}")
    names, encodings, sizes = (
        config.get(f"column_{what}") for what in ("names", "encodings", "sizes")
    )
    lists = (names, encodings, sizes)
    if not all(isinstance(each, list) for each in lists):
        raise ValueError("it does not describe its columns")
    rows = list(zip(*cast("tuple[list[Any], ...]", lists), strict=True))
    of_text = all(
        isinstance(value, str) for name, encoding, _ in rows for value in (name, encoding)
    )
    if not of_text or len({name for name, *_ in rows}) < len(rows):
        raise ValueError("it does not describe its columns")
    fixed = {}
    for name, encoding, size in rows:
        if size != SIZES_BYTES.get(encoding, size) or not (
            size is None or (isinstance(size, int) and size > 0)
        ):
            raise ValueError(f"column {quoted(name)} of {quoted(encoding)} states {size!r} bytes")
        if size is not None:
            fixed[name] = size
    return {name: encoding for name, encoding, _ in rows}, fixed


def _shards(index: Mapping[str, object]) -> list[str]:
    """The uncompressed shards that an `index.json` names."""
    shards = cast(Sequence[Mapping[str, Any]], index["shards"])
    return [shard["raw_data"]["basename"] for shard in shards]
