"""Digests of an index's rows: one of the samples' contents, one of their locations.

The first is part of a job's identity, so it depends only on the rows and not on how Arrow or
Parquet divide them into chunks: each column is digested as streams of numbers and bytes.
"""

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

IDENTITY_COLUMNS = (
    "key",
    "content",
    "llm_tokens",
    "loss_tokens",
    "item_modality",
    "item_encoder_tokens",
    "item_llm_tokens",
    "item_position",
    "item_shape",
)
# Digested where it is not 1, so that samples without weights are identified as they ever were.
LOSS_WEIGHT = "loss_weight"
PLACE_COLUMNS = (
    "span_name",
    "span_offset_bytes",
    "span_size_bytes",
    "row_group",
    "row",
)


class RowsDigest:
    """Digests the rows of one part, chunk by chunk."""

    def __init__(self) -> None:
        self._streams: dict[tuple[str, str], Any] = {}
        self._rows = 0

    def add(self, rows: pa.Table | pa.RecordBatch) -> None:
        """Add the next rows. Their columns must have no empty cells, but for the loss weight."""
        batches = rows.to_batches() if isinstance(rows, pa.Table) else [rows]
        for batch in (each for each in batches if each.num_rows):
            for name in (*IDENTITY_COLUMNS, *PLACE_COLUMNS):
                self._feed(name, "", batch.column(name))
            self._feed_weights(batch.column(LOSS_WEIGHT))
            self._rows += batch.num_rows

    @property
    def identity(self) -> str:
        """Digest of keys, contents, lengths and loss weights: 32 hexadecimal digits."""
        return self._digest((*IDENTITY_COLUMNS, LOSS_WEIGHT))

    @property
    def places(self) -> str:
        """Digest of each sample's location in its file."""
        return self._digest(PLACE_COLUMNS)

    def _feed(self, name: str, level: str, values: Any) -> None:
        if pa.types.is_list(values.type):
            self._stream(name, f"{level}#", pc.list_value_length(values).to_numpy())
            self._feed(name, f"{level}/", pc.list_flatten(values))
        elif pa.types.is_string(values.type):
            self._stream(name, f"{level}#", pc.binary_length(values).to_numpy())
            self._stream(name, level, _bytes_of(values))
        elif pa.types.is_fixed_size_binary(values.type):
            width = values.type.byte_width
            begin = values.offset * width
            self._stream(
                name, level, memoryview(values.buffers()[1])[begin : begin + len(values) * width]
            )
        else:
            self._stream(name, level, values.to_numpy())

    def _feed_weights(self, column: Any) -> None:
        weights = np.asarray(pc.fill_null(column, 1.0).to_numpy(zero_copy_only=False))
        (rows,) = np.nonzero(weights != 1)
        if len(rows):
            self._stream(LOSS_WEIGHT, "#", (rows + self._rows).astype(np.int64))
            self._stream(LOSS_WEIGHT, "", weights[rows])

    def _stream(self, name: str, level: str, data: Any) -> None:
        stream = self._streams.setdefault((name, level), hashlib.blake2b(digest_size=16))
        stream.update(np.ascontiguousarray(data) if isinstance(data, np.ndarray) else data)

    def _digest(self, columns: Sequence[str]) -> str:
        whole = hashlib.blake2b(digest_size=16)
        for (name, level), stream in sorted(self._streams.items(), key=lambda item: item[0]):
            if name in columns:
                whole.update(f"{name}{level} ".encode() + stream.digest())
        return whole.hexdigest()


def _bytes_of(texts: Any) -> memoryview:
    """The bytes of all texts, concatenated."""
    _, offsets, data = texts.buffers()
    if data is None or not len(texts):
        return memoryview(b"")
    ends = np.frombuffer(offsets, dtype=np.int32)[texts.offset : texts.offset + len(texts) + 1]
    return memoryview(data)[ends[0] : ends[-1]]
