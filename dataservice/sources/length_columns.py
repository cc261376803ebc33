"""Converts the columns of an index to the numpy columns that planning reads."""

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from dataservice.core.sample import LengthTable, Modality

_Scalar = TypeVar("_Scalar", bound=np.generic)


def lengths_of(table: pa.Table) -> LengthTable:
    """The length columns of one part. Columns of one chunk are not copied."""
    return LengthTable(
        llm_tokens=_numpy(table["llm_tokens"].chunks, np.int32),
        loss_tokens=_numpy(table["loss_tokens"].chunks, np.int32),
        item_offsets=_offsets(table["item_modality"].chunks),
        item_modality=_items(table, "item_modality", np.int8),
        item_encoder_tokens=_items(table, "item_encoder_tokens", np.int32),
        item_llm_tokens=_items(table, "item_llm_tokens", np.int32),
        item_position=_items(table, "item_position", np.int32),
        item_frames=_frames(table),
    )


def concatenate(tables: Sequence[LengthTable]) -> LengthTable:
    """The samples of all tables end to end."""
    item_counts = [np.diff(t.item_offsets) for t in tables]
    joined = LengthTable(
        llm_tokens=_join([t.llm_tokens for t in tables], np.int32),
        loss_tokens=_join([t.loss_tokens for t in tables], np.int32),
        item_offsets=np.concatenate([[0], np.cumsum(_join(item_counts, np.int64))]),
        item_modality=_join([t.item_modality for t in tables], np.int8),
        item_encoder_tokens=_join([t.item_encoder_tokens for t in tables], np.int32),
        item_llm_tokens=_join([t.item_llm_tokens for t in tables], np.int32),
        item_position=_join([t.item_position for t in tables], np.int32),
        item_frames=_join([_known(t.item_frames) for t in tables], np.int32),
    )
    joined.llm_tokens.flags.writeable = False  # handed out whole, see Catalog.llm_tokens
    return joined


def _offsets(lists: "Sequence[pa.Array[Any]]") -> NDArray[np.int64]:
    """Where each list begins among the elements of all, and where the last ends."""
    ends, behind = [np.zeros(1, np.int64)], 0
    for chunk in lists:
        own = _ends(chunk)
        ends.append(own[1:].astype(np.int64) + (behind - int(own[0])))
        behind = int(ends[-1][-1]) if len(own) > 1 else behind
    return np.concatenate(ends)


def _ends(lists: Any) -> NDArray[np.int32]:
    return np.asarray(lists.offsets.to_numpy())


def _frames(table: pa.Table) -> NDArray[np.int32]:
    """The first side of each shape, which is a picture's or clip's number of frames. Raises
    ValueError where a shape has no side."""
    first = _join([_first(pc.list_flatten(c)) for c in table["item_shape"].chunks], np.int32)
    is_vision = _items(table, "item_modality", np.int8) == Modality.VISION
    if len(first) != len(is_vision):
        raise ValueError("it has lists that differ in length: item_modality, item_shape")
    return first if is_vision.all() else np.where(is_vision, first, np.int32(1))


def _first(lists: Any) -> NDArray[np.int32]:
    ends = _ends(lists)
    if np.any(ends[1:] <= ends[:-1]):
        raise ValueError("it has shapes of another rank")
    return np.asarray(lists.values.to_numpy())[ends[:-1]].astype(np.int32, copy=False)


def _known(frames: NDArray[np.int32] | None) -> NDArray[np.int32]:
    assert frames is not None, "an index has the shape of every item"
    return frames


def _items(table: pa.Table, name: str, kind: type[_Scalar]) -> NDArray[_Scalar]:
    return _numpy((pc.list_flatten(c) for c in table[name].chunks), kind)


def _numpy(chunks: "Iterable[pa.Array[Any]]", kind: type[_Scalar]) -> NDArray[_Scalar]:
    return _join([chunk.to_numpy(zero_copy_only=False) for chunk in chunks], kind)


def _join(arrays: Sequence[NDArray[_Scalar]], kind: type[_Scalar]) -> NDArray[_Scalar]:
    if len(arrays) == 1:
        return arrays[0].astype(kind, copy=False)
    return np.concatenate([np.zeros(0, dtype=kind), *arrays]).astype(kind, copy=False)
