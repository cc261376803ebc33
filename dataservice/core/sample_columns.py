"""What a worker needs to know of samples, as columns: cut, gathered and sent without an object for
any of them. Workers make the objects, each of its own packs.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import pairwise
from typing import Any, Protocol, overload

import numpy as np
from numpy.typing import NDArray

from dataservice.core.layout import expanded, sample_starts
from dataservice.core.orders import PackSample
from dataservice.core.sample import (
    ByteSpan,
    ItemLengths,
    Modality,
    SampleLengths,
    SampleLocation,
    SampleRef,
)
from dataservice.core.sample_files import SampleFiles, numbered

Array = NDArray[Any]

NO_CHECKSUM = -1


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SampleColumns:
    """n samples with their spans and items; all whole numbers.

    `sample_id`, `epoch`, `row_group`, `row`, `piece`, `crc32` (-1: none), `llm_tokens`,
    `loss_tokens` [n]; `file` [n] are numbers of `files`, which may have more. `keys` are the
    samples' keys in UTF-8 end to end, of `key_bytes` [n] each. `spans` [n] and `items` [n] count
    the rows of the columns of spans, whose `names` are as the keys, and of items; `sides` [items]
    those of `side`, the items' shapes.
    """

    files: SampleFiles
    keys: bytes
    names: bytes
    sample_id: Array
    file: Array
    key_bytes: Array
    epoch: Array
    row_group: Array
    row: Array
    piece: Array
    crc32: Array
    llm_tokens: Array
    loss_tokens: Array
    spans: Array
    span_name_bytes: Array
    span_offset_bytes: Array
    span_size_bytes: Array
    items: Array
    item_modality: Array
    item_encoder_tokens: Array
    item_llm_tokens: Array
    item_position: Array
    sides: Array
    side: Array
    # Where the rows of each sample or item begin, and where they end, by what counts them: each
    # worker of a step is given samples from all over it.
    _starts: dict[str, Array] = field(default_factory=dict, init=False, repr=False)

    def __len__(self) -> int:
        return len(self.sample_id)

    def take(self, rows: Array) -> "SampleColumns":
        """These samples, in this order. O(rows)."""
        spans, items = self._rows_of("spans", rows), self._rows_of("items", rows)
        taken: dict[str, Any] = {
            name: getattr(self, name)[at]
            for names, at in ((OF_SAMPLES, rows), (OF_SPANS, spans), (OF_ITEMS, items))
            for name in names
        }
        return SampleColumns(
            **{
                **taken,
                "files": self.files,
                "keys": self._text_of(self.keys, "key_bytes", rows),
                "names": self._text_of(self.names, "span_name_bytes", spans),
                "side": self.side[self._rows_of("sides", items)],
            }
        )

    def cut(self, start: int, stop: int) -> "SampleColumns":
        """The samples from `start` to `stop` - 1, of whose numbers nothing is copied."""
        if start == 0 and stop == len(self):
            return self
        spans, items = self._cut_of("spans", start, stop), self._cut_of("items", start, stop)
        own = slice(start, stop)
        cut: dict[str, Any] = {
            name: getattr(self, name)[at]
            for names, at in ((OF_SAMPLES, own), (OF_SPANS, spans), (OF_ITEMS, items))
            for name in names
        }
        return SampleColumns(
            **{
                **cut,
                "files": self.files,
                "keys": self.keys[self._cut_of("key_bytes", start, stop)],
                "names": self.names[self._cut_of("span_name_bytes", spans.start, spans.stop)],
                "side": self.side[self._cut_of("sides", items.start, items.stop)],
            }
        )

    def _cut_of(self, counted: str, start: int, stop: int) -> slice:
        """The rows that this column counts, of those from `start` to `stop` - 1."""
        starts = self._starts_of(counted)
        return slice(int(starts[start]), int(starts[stop]))

    def _starts_of(self, counted: str) -> Array:
        starts = self._starts.get(counted)
        if starts is None:
            starts = self._starts[counted] = sample_starts(getattr(self, counted))
        return starts

    def _rows_of(self, counted: str, chosen: Array) -> Array:
        """The rows that this column counts, of those chosen. O(n) once, then O(rows)."""
        starts, counts = self._starts_of(counted), getattr(self, counted)
        return expanded(starts[chosen], counts[chosen].astype(np.int64))

    def _text_of(self, text: bytes, sizes: str, chosen: Array) -> bytes:
        return np.frombuffer(text, np.uint8)[self._rows_of(sizes, chosen)].tobytes()

    def own_files(self) -> tuple[SampleFiles, Array]:
        """The files that hold these samples and no others, and the number of each sample's among
        them, [n]. Raises IndexError where a sample's file is none of `files`."""
        numbers, file = numbered(self.file)
        if len(numbers) and not 0 <= numbers[0] <= numbers[-1] < len(self.files):
            raise IndexError(f"files {numbers[0]} to {numbers[-1]} of {len(self.files)}")
        return self.files.only(numbers), file

    def samples(self) -> list[PackSample]:
        """The samples as objects. Raises ValueError or IndexError where columns contradict each
        other."""
        spans, items = _cuts(self.spans), _cuts(self.items)
        of_spans, of_items = self._spans(), self._items()
        keys = _texts(self.keys, self.key_bytes)
        files, file = self.own_files()
        named = map(files.named().__getitem__, file.tolist())
        plain = (getattr(self, name).tolist() for name in PLAIN)
        return [
            PackSample(
                ref=SampleRef(
                    sample_id=sample_id,
                    source=source,
                    key=key,
                    location=SampleLocation(
                        file=path,
                        spans=tuple(of_spans[own_spans]),
                        row_group=row_group,
                        row=row,
                        piece=piece,
                    ),
                    crc32=None if crc32 == NO_CHECKSUM else crc32,
                ),
                lengths=SampleLengths(
                    llm_tokens=llm_tokens,
                    loss_tokens=loss_tokens,
                    items=tuple(of_items[own_items]),
                ),
                epoch=epoch,
            )
            for key, own_spans, own_items, (source, path), sample_id, epoch, row_group, row, piece,
            crc32, llm_tokens, loss_tokens in zip(keys, spans, items, named, *plain, strict=True)
        ]  # fmt: skip

    def _spans(self) -> list[ByteSpan]:
        names = _texts(self.names, self.span_name_bytes)
        offsets, sizes = self.span_offset_bytes.tolist(), self.span_size_bytes.tolist()
        return [
            ByteSpan(name=name, offset_bytes=offset_bytes, size_bytes=size_bytes)
            for name, offset_bytes, size_bytes in zip(names, offsets, sizes, strict=True)
        ]

    def _items(self) -> list[ItemLengths]:
        columns = (getattr(self, name).tolist() for name in OF_ITEMS if name != "sides")
        side = self.side.tolist()
        return [
            ItemLengths(
                modality=Modality(modality),
                encoder_tokens=encoder_tokens,
                llm_tokens=llm_tokens,
                position=position,
                shape=tuple(side[own]),
            )
            for own, modality, encoder_tokens, llm_tokens, position in zip(
                _cuts(self.sides), *columns, strict=True
            )
        ]

    @staticmethod
    def of(samples: Sequence[PackSample]) -> "SampleColumns":
        """Columns from objects."""
        refs, lengths = [s.ref for s in samples], [s.lengths for s in samples]
        spans = [span for ref in refs for span in ref.location.spans]
        items = [item for each in lengths for item in each.items]
        files = list(dict.fromkeys((ref.source, ref.location.file) for ref in refs))
        place = {file: k for k, file in enumerate(files)}
        keys, names = [r.key.encode() for r in refs], [span.name.encode() for span in spans]
        columns: dict[str, Sequence[int]] = {
            "sample_id": [r.sample_id for r in refs],
            "file": [place[r.source, r.location.file] for r in refs],
            "key_bytes": list(map(len, keys)),
            "epoch": [s.epoch for s in samples],
            "row_group": [r.location.row_group for r in refs],
            "row": [r.location.row for r in refs],
            "piece": [r.location.piece for r in refs],
            "crc32": [NO_CHECKSUM if r.crc32 is None else r.crc32 for r in refs],
            "llm_tokens": [each.llm_tokens for each in lengths],
            "loss_tokens": [each.loss_tokens for each in lengths],
            "spans": [len(r.location.spans) for r in refs],
            "span_name_bytes": list(map(len, names)),
            "span_offset_bytes": [span.offset_bytes for span in spans],
            "span_size_bytes": [span.size_bytes for span in spans],
            "items": [len(each.items) for each in lengths],
            "item_modality": [item.modality for item in items],
            "item_encoder_tokens": [item.encoder_tokens for item in items],
            "item_llm_tokens": [item.llm_tokens for item in items],
            "item_position": [item.position for item in items],
            "sides": [len(item.shape) for item in items],
            "side": [side for item in items for side in item.shape],
        }
        return SampleColumns(
            files=SampleFiles.of(files),
            keys=b"".join(keys),
            names=b"".join(names),
            **{name: np.array(values, dtype=np.int64) for name, values in columns.items()},
        )


class Samples(Protocol):
    """Samples that are there as columns, or are looked up."""

    def take(self, rows: Array) -> SampleColumns:
        """These samples, in this order."""
        ...

    def cut(self, start: int, stop: int) -> SampleColumns:
        """The samples from `start` to `stop` - 1."""
        ...


class FoundSamples(Samples):
    """Samples that are looked up each time that they are asked for: if those of whole steps were
    kept, they would be most of what the coordinator holds."""

    def __init__(self, find: Callable[[Array], SampleColumns]) -> None:
        """`find` gives the samples at these rows."""
        self._find = find

    def take(self, rows: Array) -> SampleColumns:
        """These samples, in this order."""
        return self._find(rows)

    def cut(self, start: int, stop: int) -> SampleColumns:
        """The samples from `start` to `stop` - 1."""
        return self._find(np.arange(start, stop))


class SamplesFoundOnce(Samples):
    """Some of other samples, which are looked up together once any are asked for, and kept. Several
    threads may ask."""

    def __init__(self, of: Samples, rows: Array) -> None:
        """Those at `rows` of these."""
        self._of = of
        self._rows = rows
        self._found: SampleColumns | None = None
        self._finding = threading.Lock()

    def take(self, rows: Array) -> SampleColumns:
        """These samples, in this order."""
        return self._columns().take(rows)

    def cut(self, start: int, stop: int) -> SampleColumns:
        """The samples from `start` to `stop` - 1."""
        return self._columns().cut(start, stop)

    def _columns(self) -> SampleColumns:
        with self._finding:
            if self._found is None:
                self._found = self._of.take(self._rows)
            return self._found


class PackedSamples(Sequence[PackSample]):
    """The samples of one pack: `rows` of others, made into objects each time that they are read."""

    def __init__(self, of: Samples, rows: range) -> None:
        self.of = of
        self.rows = rows

    def __iter__(self) -> Iterator[PackSample]:
        return iter(self.of.cut(self.rows.start, self.rows.stop).samples())

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, place: int) -> PackSample: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[PackSample]: ...
    def __getitem__(self, place: int | slice) -> PackSample | Sequence[PackSample]:
        if isinstance(place, slice):
            return self.of.take(np.array(self.rows[place], dtype=np.int64)).samples()
        return self.of.take(np.array([self.rows[place]])).samples()[0]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))


OF_SAMPLES = (
    *("sample_id", "file", "key_bytes", "epoch", "row_group", "row", "piece", "crc32"),
    *("llm_tokens", "loss_tokens", "spans", "items"),
)
OF_SPANS = ("span_name_bytes", "span_offset_bytes", "span_size_bytes")
OF_ITEMS = (
    *("item_modality", "item_encoder_tokens", "item_llm_tokens", "item_position"),
    "sides",
)
PLAIN = (
    *("sample_id", "epoch", "row_group", "row", "piece", "crc32"),
    *("llm_tokens", "loss_tokens"),
)
NUMBERS = tuple(
    of.name for of in fields(SampleColumns) if of.init and of.name not in ("files", "keys", "names")
)


def numbers_of(columns: SampleColumns) -> Mapping[str, Array]:
    """The columns of numbers by name."""
    return {name: getattr(columns, name) for name in NUMBERS}


def _texts(text: bytes, sizes: Array) -> list[str]:
    if sizes.size and (sizes.min() < 0 or sizes.sum() != len(text)):
        raise ValueError(f"texts of {sizes.sum()} bytes came as {len(text)} bytes")
    return [text[cut].decode() for cut in _cuts(sizes)]


def _cuts(counts: Array) -> list[slice]:
    return [slice(start, stop) for start, stop in pairwise(sample_starts(counts).tolist())]
