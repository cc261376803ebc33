"""Samples: where their bytes lie, how long they are, and what they decode to.

The planner sees only lengths (`LengthTable`); workers see locations and bytes. A sample is
known by its `sample_id`, a dense int64 over all the sources of a job in the order of the
job file.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Literal

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int32] | NDArray[np.int64]
MediaKind = Literal["image", "video", "audio"]
PlaceholderRule = Literal["strict", "text"]
# Parts of a message's content that stand for a file, by their type.
PART_KINDS: Mapping[str, MediaKind] = {
    "image": "image",
    "image_url": "image",
    "input_image": "image",
    "video": "video",
    "video_url": "video",
    "audio": "audio",
    "audio_url": "audio",
    "input_audio": "audio",
}
# Keys of such parts, as Qwen's are documented, by which other frames or pixels would be shown.
PART_OPTIONS = frozenset(
    {
        *("resized_height", "resized_width", "min_pixels", "max_pixels", "total_pixels"),
        *("video_start", "video_end", "nframes", "fps", "min_frames", "max_frames"),
    }
)


# Products and sums of larger weights could leave the range of floats.
MAX_LOSS_WEIGHT = 1e6


class Modality(IntEnum):
    """An encoder's input. Images and video clips share the vision encoder."""

    VISION = 0
    AUDIO = 1


class ItemKind(IntEnum):
    """What an encoder item was made of."""

    IMAGE = 0
    CLIP = 1
    RECORDING = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class ByteSpan:
    """A member of an archive: its name and where its bytes lie."""

    name: str
    offset_bytes: int
    size_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleLocation:
    """Where one sample's bytes lie inside a source.

    `spans` are the sample's members in a tar, the one line of a JSONL file or record of a shard, or
    the pieces of a row's cells in an Arrow file; `row_group` and `row` (within the group) address
    Parquet, and say the record batch and row in Arrow. They are -1 elsewhere. `piece` counts from 1
    the samples that a long document was cut into, all of which lie in one place; 0 is a sample
    that is whole.
    """

    file: str
    spans: tuple[ByteSpan, ...] = ()
    row_group: int = -1
    row: int = -1
    piece: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleRef:
    """A sample by name, with all that a worker needs to read it without the index. `crc32` is the
    checksum of its bytes when it was indexed; None is not compared. A piece of a document has the
    document's key with its number behind it, and the checksum of the whole document."""

    sample_id: int
    source: str
    key: str
    location: SampleLocation
    crc32: int | None = None

    @property
    def key_in_source(self) -> str:
        """The key by which the source knows the sample, or the document that it is a piece of."""
        return self.key.removesuffix(piece_key("", self.location.piece))


def piece_key(key: str, piece: int) -> str:
    """The key of a piece of the document `key`, as `article-7#2`; of a whole sample (0) its own."""
    return f"{key}#{piece}" if piece else key


@dataclass(frozen=True, kw_only=True, slots=True)
class MediaBlob:
    """One encoded image, clip or recording, as its source holds it."""

    kind: MediaKind
    name: str
    data: bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Unparsed:
    """What a format of the user's own has of a sample before its code was asked what that is: the
    bytes of its ranges, and the source whose code knows."""

    source: str
    parts: tuple[bytes, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class RawSample:
    """One sample as read, nothing decoded.

    `record` is the sample's JSON object (`{"text": ...}` for a plain text member); `media`
    are its blobs in the order in which placeholders refer to them. With `placeholders` as text,
    `<image>` in a sample without an image is a word like others. `piece` says which piece of the
    document is meant, as in SampleLocation; the record is that of the whole document. `loss_weight`
    is the record's own, where the source's `columns` name one. With `unparsed`, everything else is
    empty but the key and the piece.
    """

    key: str
    record: Mapping[str, object]
    media: tuple[MediaBlob, ...] = ()
    placeholders: PlaceholderRule = "strict"
    piece: int = 0
    loss_weight: float = 1.0
    unparsed: Unparsed | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ItemLengths:
    """One encoder item: an image, a clip or a recording.

    `shape` is what the decoder must produce: [frames, height, width, 3] of uint8 for vision
    (tiles count as frames), [samples] of float32 at 16 kHz for audio. `position` is the
    offset of the item's first token in its sample; its `llm_tokens` tokens are contiguous.

    The other fields are kept in the index where they are known, are not sent to workers, and are
    not compared: `kind`, what made the item; `grid` [t, h, w, merge], the item's patches in time,
    height and width, and how many of them per side become one token; and of a clip
    `seconds_per_patch`, what one patch spans in time, and `key_frames_s`, the times of its key
    frames."""

    modality: Modality
    encoder_tokens: int
    llm_tokens: int
    position: int
    shape: tuple[int, ...]
    kind: ItemKind | None = field(default=None, compare=False)
    grid: tuple[int, int, int, int] | None = field(default=None, compare=False)
    seconds_per_patch: float | None = field(default=None, compare=False)
    key_frames_s: tuple[float, ...] | None = field(default=None, compare=False)

    @property
    def frames(self) -> int:
        """Frames or tiles of a picture or clip; 1 for sound."""
        return self.shape[0] if self.modality == Modality.VISION else 1


@dataclass(frozen=True, kw_only=True, slots=True)
class ItemNotes:
    """What models need to know of m encoder items, and planning does not.

    `kind` int8[m]: an ItemKind, -1 where it is unknown; `grid` int32[m, 4]: the item's patches in
    time, height and width, and how many of them per side become one token, zeros where the model
    has no grid; `seconds_per_patch` float64[m]: what one patch of a clip spans in time, nan where
    it is unknown or the item has no time.
    """

    kind: NDArray[np.int8]
    grid: NDArray[np.int32]
    seconds_per_patch: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.kind)

    def take(self, rows: IntArray | slice) -> "ItemNotes":
        """The notes of these items, in this order."""
        # numpy's own indexing takes several times as long for rows of some numbers.
        grid = self.grid[rows] if isinstance(rows, slice) else self.grid.take(rows, axis=0)
        return ItemNotes(
            kind=self.kind[rows],
            grid=grid,
            seconds_per_patch=self.seconds_per_patch[rows],
        )

    @staticmethod
    def unknown(items: int) -> "ItemNotes":
        """Notes of this number of items of which nothing is known."""
        return ItemNotes(
            kind=np.full(items, -1, dtype=np.int8),
            grid=np.zeros((items, 4), dtype=np.int32),
            seconds_per_patch=np.full(items, np.nan),
        )

    @staticmethod
    def of(items: "Sequence[ItemLengths]") -> "ItemNotes":
        """Columns from rows."""
        grids = [item.grid or (0, 0, 0, 0) for item in items]
        spans = [item.seconds_per_patch for item in items]
        return ItemNotes(
            kind=np.array([-1 if i.kind is None else i.kind for i in items], dtype=np.int8),
            grid=np.array(grids, dtype=np.int32).reshape(-1, 4),
            seconds_per_patch=np.array([np.nan if s is None else s for s in spans], dtype=float),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ItemDetails:
    """What is known of m encoder items besides their lengths: their `modality` int8[m], how many
    numbers each is decoded to, `values` int64[m], and what models need to know of them."""

    modality: NDArray[np.int8]
    values: NDArray[np.int64]
    notes: ItemNotes

    @staticmethod
    def of(items: "Sequence[ItemLengths]") -> "ItemDetails":
        """Columns from rows."""
        return ItemDetails(
            modality=np.array([item.modality for item in items], dtype=np.int8),
            values=np.array([math.prod(item.shape) for item in items], dtype=np.int64),
            notes=ItemNotes.of(items),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleLengths:
    """All that planning knows about one sample."""

    llm_tokens: int
    loss_tokens: int
    items: tuple[ItemLengths, ...] = ()

    @property
    def text_tokens(self) -> int:
        """Tokens of the sequence that come from text, markers included."""
        return self.llm_tokens - sum(item.llm_tokens for item in self.items)


ItemArray = NDArray[np.uint8] | NDArray[np.float32]
"""An encoder item: pixels uint8[frames, height, width, 3], or sound float32[samples]."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodedSample:
    """One sample as arrays.

    `input_ids` int32[tokens]; `labels` int32[tokens], already shifted: `labels[i]` is the
    target at position i and -100 where there is none; `items[k]` has `items[k].shape` of its
    lengths.
    """

    input_ids: NDArray[np.int32]
    labels: NDArray[np.int32]
    items: tuple[ItemArray, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldItems:
    """Encoder items as a worker holds them: each one's array, and the CRC-32 of its bytes where
    that is known since the item was decoded. Of an item's frames it is not."""

    arrays: Sequence[ItemArray]
    crc32s: Sequence[int] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class LengthTable:
    """The lengths of n samples as columns; the items of sample i are rows
    `item_offsets[i]:item_offsets[i+1]` of the item columns.

    `llm_tokens`, `loss_tokens` int32[n]; `item_offsets` int64[n+1]; `item_modality` int8[m];
    `item_encoder_tokens`, `item_llm_tokens`, `item_position` int32[m]; `item_frames` int32[m], the
    frames or tiles of each picture or clip and 1 for sound, None where that is unknown.
    """

    llm_tokens: NDArray[np.int32]
    loss_tokens: NDArray[np.int32]
    item_offsets: NDArray[np.int64]
    item_modality: NDArray[np.int8]
    item_encoder_tokens: NDArray[np.int32]
    item_llm_tokens: NDArray[np.int32]
    item_position: NDArray[np.int32]
    item_frames: NDArray[np.int32] | None = None

    def __len__(self) -> int:
        return len(self.llm_tokens)

    def take(self, rows: IntArray) -> "LengthTable":
        """The same columns for the samples `rows` (int[k], repeats allowed), in that order."""
        starts = self.item_offsets.take(rows)
        counts = self.item_offsets[1:].take(rows) - starts
        offsets = np.zeros(len(rows) + 1, dtype=np.int64)
        np.add.accumulate(counts, out=offsets[1:])
        items = (starts - offsets[:-1]).repeat(counts)
        items += np.arange(len(items))
        return LengthTable(
            llm_tokens=self.llm_tokens.take(rows),
            loss_tokens=self.loss_tokens.take(rows),
            item_offsets=offsets,
            item_modality=self.item_modality.take(items),
            item_encoder_tokens=self.item_encoder_tokens.take(items),
            item_llm_tokens=self.item_llm_tokens.take(items),
            item_position=self.item_position.take(items),
            item_frames=None if self.item_frames is None else self.item_frames.take(items),
        )

    def item_units(self, unit_frames: int) -> NDArray[np.int32] | None:
        """Into how many equal parts each item may be cut: int32[m]; None where none can be.

        An encoder takes `unit_frames` frames of an item together, and no frame attends to one
        outside; with 0, items are whole. An item is whole too where its frames or tokens do not
        fall into such parts.
        """
        if unit_frames < 1 or self.item_frames is None:
            return None
        units = np.maximum(self.item_frames // unit_frames, 1)
        falls = (self.item_modality == Modality.VISION) & (units * unit_frames == self.item_frames)
        falls &= (self.item_encoder_tokens % units == 0) & (self.item_llm_tokens % units == 0)
        units = np.where(falls, units, 1).astype(np.int32)
        return units if (units > 1).any() else None

    def tokens_per_sample(self, column: NDArray[np.int32], modality: Modality) -> NDArray[np.int64]:
        """Sum an item column over each sample's items of one modality: int64[n]."""
        chosen = np.where(self.item_modality == modality, column, 0).astype(np.int64)
        total = np.zeros(len(chosen) + 1, dtype=np.int64)
        np.cumsum(chosen, out=total[1:])
        return total[self.item_offsets[1:]] - total[self.item_offsets[:-1]]

    def encoder_tokens(self, modality: Modality) -> NDArray[np.int64]:
        """Tokens each sample gives to one encoder: int64[n]."""
        return self.tokens_per_sample(self.item_encoder_tokens, modality)

    @staticmethod
    def of(samples: "list[SampleLengths]") -> "LengthTable":
        """Columns from rows: the form the tests and the index builder start from."""
        items = [item for sample in samples for item in sample.items]
        offsets = np.cumsum([0, *(len(sample.items) for sample in samples)], dtype=np.int64)
        return LengthTable(
            llm_tokens=np.array([s.llm_tokens for s in samples], dtype=np.int32),
            loss_tokens=np.array([s.loss_tokens for s in samples], dtype=np.int32),
            item_offsets=offsets,
            item_modality=np.array([i.modality for i in items], dtype=np.int8),
            item_encoder_tokens=np.array([i.encoder_tokens for i in items], dtype=np.int32),
            item_llm_tokens=np.array([i.llm_tokens for i in items], dtype=np.int32),
            item_position=np.array([i.position for i in items], dtype=np.int32),
            item_frames=np.array([i.frames for i in items], dtype=np.int32),
        )
