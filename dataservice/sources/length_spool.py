"""Collects the lengths of many tables in files, column by column: none of them stay in memory."""

import mmap
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from types import TracebackType
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from dataservice.core.sample import LengthTable

COLUMNS: dict[str, np.dtype[Any]] = {
    "llm_tokens": np.dtype(np.int32),
    "loss_tokens": np.dtype(np.int32),
    "item_offsets": np.dtype(np.int64),
    "item_modality": np.dtype(np.int8),
    "item_encoder_tokens": np.dtype(np.int32),
    "item_llm_tokens": np.dtype(np.int32),
    "item_position": np.dtype(np.int32),
    "item_frames": np.dtype(np.int32),
}
"""The columns of lengths, as planning maps them."""


class LengthSpool:
    """Tables of lengths end to end, in temporary files that live as long as what is mapped of
    them."""

    def __enter__(self) -> "LengthSpool":
        with ExitStack() as opened:
            self._files: Mapping[str, IO[bytes]] = {
                name: opened.enter_context(tempfile.TemporaryFile(prefix="dataservice-"))
                for name in COLUMNS
            }
            self._opened = opened.pop_all()
        self._items = 0
        self._files["item_offsets"].write(np.zeros(1, COLUMNS["item_offsets"]).data)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._opened.close()

    def write(self, lengths: LengthTable) -> None:
        """Append the lengths of some samples, with the frames of all their items. Raises OSError
        where the disk is full."""
        for name, kind in COLUMNS.items():
            column = getattr(lengths, name)
            if name == "item_offsets":
                column = column[1:] + self._items
            self._files[name].write(np.ascontiguousarray(column, dtype=kind).data)
        self._items += int(lengths.item_offsets[-1])

    def finish(self) -> LengthTable:
        """All lengths, mapped read-only. Nothing can be written after that."""
        return LengthTable(**{name: _mapped(self._files[name], COLUMNS[name]) for name in COLUMNS})


def _mapped(stream: IO[bytes], kind: np.dtype[Any]) -> NDArray[Any]:
    stream.flush()
    if not stream.tell():
        return np.frombuffer(b"", dtype=kind)
    return np.frombuffer(mmap.mmap(stream.fileno(), 0, prot=mmap.PROT_READ), dtype=kind)
