"""Rows are looked up in a mapped file as whoever reads all of it would find them."""

import math
import os
import sys
from collections import Counter
from dataclasses import fields
from itertools import pairwise
from random import Random
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from dataservice.core.orders import PackSample
from dataservice.core.sample import (
    ByteSpan,
    ItemDetails,
    ItemLengths,
    Modality,
    SampleLengths,
    SampleLocation,
    SampleRef,
)
from dataservice.core.sample_columns import NUMBERS
from dataservice.core.sample_files import SampleFiles
from dataservice.sources.detail_file import DETAIL_SCHEMA, DetailFile
from dataservice.sources.gather import Ranges

GRID = [1, 4, 4, 2]
FILES = SampleFiles.of([("tars", "a.tar"), ("tars", "b.tar"), ("texts", "c.txt")])
Rows = list[dict[str, Any]]


def made_rows(count: int, seed: int) -> Rows:
    """Any keys, spans and items, some of them none; what may be null is so here and there."""
    random = Random(seed)

    def listed(of: int, cell: Any) -> list[Any]:
        return [cell() for _ in range(of)]

    rows = []
    for _ in range(count):
        spans, items = random.choice([0, 1, 2, 5]), random.choice([0, 0, 1, 3])
        sounds = listed(items, lambda: random.random() < 0.3)
        rows.append(
            {
                "key": random.choice(["", "k", "ein Schlüssel/" * 9]) + str(random.random()),
                "span_name": listed(spans, lambda: random.choice(["", "jpg", "größer.json"])),
                "span_offset_bytes": listed(spans, lambda: random.randrange(2**40)),
                "span_size_bytes": listed(spans, lambda: random.randrange(2**33)),
                "row_group": random.randrange(-1, 9),
                "row": random.randrange(-1, 2**31),
                "piece": random.choice([0, 1, 2**31 - 1]),
                "crc32": random.choice([None, 0, 2**32 - 1, 7]),
                "llm_tokens": random.randrange(1, 9000),
                "loss_tokens": random.randrange(9000),
                "item_modality": [int(sound) for sound in sounds],
                "item_encoder_tokens": listed(items, lambda: random.randrange(2**31)),
                "item_llm_tokens": listed(items, lambda: random.randrange(2**31)),
                "item_position": listed(items, lambda: random.randrange(2**31)),
                "item_shape": [
                    [random.randrange(2**24)] if sound else [2, random.randrange(999), 28, 3]
                    for sound in sounds
                ],
                "item_kind": listed(items, lambda: random.choice([None, 0, 2])),
                "item_grid": listed(items, lambda: random.choice([None, GRID, GRID[::-1]])),
                "item_seconds_per_patch": listed(items, lambda: random.choice([None, 0.1, 2.0])),
                "loss_weight": random.choice([1.0, 0.0, 2.5]),
            }
        )
    return rows


def written(rows: Rows, cuts: list[int], **options: Any) -> DetailFile:
    """A file of these rows, those between two cuts in a batch of their own."""
    arrays = [pa.array([row[each.name] for row in rows], each.type) for each in DETAIL_SCHEMA]
    whole = pa.RecordBatch.from_arrays(arrays, schema=DETAIL_SCHEMA)
    descriptor = os.memfd_create("details")
    path = f"/proc/self/fd/{descriptor}"
    with pa.ipc.new_file(path, DETAIL_SCHEMA, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        for start, stop in pairwise([0, *cuts]):
            writer.write_batch(whole.slice(start, stop - start))
    return DetailFile(descriptor)


def as_read(row: dict[str, Any], number: int, file: tuple[str, str]) -> PackSample:
    """A row as the sample that a worker is told of."""
    spans = zip(row["span_name"], row["span_offset_bytes"], row["span_size_bytes"], strict=True)
    items = zip(
        *(row[name] for name in ("item_modality", "item_encoder_tokens", "item_llm_tokens")),
        *(row[name] for name in ("item_position", "item_shape")),
        strict=True,
    )
    return PackSample(
        ref=SampleRef(
            sample_id=number,
            source=file[0],
            key=row["key"],
            location=SampleLocation(
                file=file[1],
                spans=tuple(ByteSpan(name=n, offset_bytes=o, size_bytes=b) for n, o, b in spans),
                row_group=row["row_group"],
                row=row["row"],
                piece=row["piece"],
            ),
            crc32=row["crc32"],
        ),
        lengths=SampleLengths(
            llm_tokens=row["llm_tokens"],
            loss_tokens=row["loss_tokens"],
            items=tuple(
                ItemLengths(
                    modality=Modality(modality),
                    encoder_tokens=encoder_tokens,
                    llm_tokens=llm_tokens,
                    position=position,
                    shape=tuple(shape),
                )
                for modality, encoder_tokens, llm_tokens, position, shape in items
            ),
        ),
    )


def require_alike(file: DetailFile, rows: Rows, wanted: list[int]) -> None:
    """All that is looked up of these rows is what they say."""
    ids, file_of = np.array(wanted, np.int64), np.array([k * 7 % 3 for k in wanted], np.int32)
    own = [rows[k] for k in wanted]
    columns = file.columns(ids, file_of, FILES)
    told = [as_read(rows[k], k, FILES.named()[k * 7 % 3]) for k in wanted]
    assert columns.samples() == told
    assert all(getattr(columns, name).dtype.kind == "i" for name in NUMBERS)
    assert columns.crc32.dtype == np.int64
    assert [(told.ref, told.lengths) for told in columns.samples()] == list(
        file.take(ids, file_of, FILES)
    )

    items = file.item_details(ids)
    notes = items.notes
    kinds = [kind for row in own for kind in row["item_kind"]]
    assert notes.kind.tolist() == [-1 if kind is None else kind for kind in kinds]
    assert notes.grid.tolist() == [grid or [0] * 4 for row in own for grid in row["item_grid"]]
    seconds = [each for row in own for each in row["item_seconds_per_patch"]]
    np.testing.assert_array_equal(notes.seconds_per_patch, np.array(seconds, np.float64))
    none = ItemDetails.of([])
    for of, as_in in ((items, none), (notes, none.notes)):
        for name in {each.name for each in fields(of)} - {"notes"}:
            assert getattr(of, name).dtype == getattr(as_in, name).dtype

    assert items.modality.tolist() == [each for row in own for each in row["item_modality"]]
    assert items.values.tolist() == [math.prod(shape) for row in own for shape in row["item_shape"]]
    assert file.loss_weights(ids).tolist() == [row["loss_weight"] for row in own]


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(
    "cuts", [[40], [1, 40], [13, 13, 26, 40], [*range(3, 40, 3), 40]], ids=lambda c: f"{len(c)}"
)
def test_rows_are_found_in_any_order_in_whichever_batch(cuts: list[int], seed: int) -> None:
    rows = made_rows(40, seed)
    file, random = written(rows, cuts), Random(seed)
    for count in (0, 1, 5, 200):
        require_alike(file, rows, random.choices(range(40), k=count))
    require_alike(file, rows, list(range(40)))
    require_alike(file, rows, list(range(39, -1, -1)))


def test_many_batches_take_no_more_calls_than_one() -> None:
    rows, ids = made_rows(60, seed=2), np.arange(59, -1, -2)
    calls = []
    for cuts in ([60], [*range(2, 60, 2), 60]):
        file, made = written(rows, cuts), Counter[str]()
        file.columns(ids, ids % 3, FILES)  # what is made once is made

        def count(_frame: object, event: str, _argument: object, made: Any = made) -> None:
            made[event] += 1

        sys.setprofile(count)
        try:
            file.columns(ids, ids % 3, FILES)
            file.item_details(ids)
        finally:
            sys.setprofile(None)
        calls.append(made)
    assert calls[0] == calls[1]


@pytest.mark.parametrize(
    "nothing",
    [
        {"crc32": None},
        {name: [] for name in ("span_name", "span_offset_bytes", "span_size_bytes")},
        {field.name: [] for field in DETAIL_SCHEMA if field.name.startswith("item_")},
        {"key": ""},
    ],
    ids=["no checksum", "no span", "no item", "no key"],
)
def test_a_batch_may_have_none_of_what_another_has(nothing: dict[str, Any]) -> None:
    for without in (range(10), range(10, 20), range(20)):
        rows = made_rows(20, seed=3)
        for k in without:
            rows[k] |= nothing
        require_alike(written(rows, [10, 20]), rows, [19, 3, 3, 11, 10, 9, 0])


def test_a_file_without_rows_has_none() -> None:
    for cuts in ([], [0]):
        file = written([], cuts)
        require_alike(file, [], [])
        with pytest.raises(IndexError):
            file.columns(np.array([0]), np.array([0]), FILES)


@pytest.mark.parametrize("wrong", [-1, 20, 2**40])
def test_a_row_that_the_file_does_not_have_is_refused(wrong: int) -> None:
    file = written(made_rows(20, seed=1), [7, 20])
    for ask in (file.item_details, file.loss_weights):
        with pytest.raises(IndexError):
            ask(np.array([3, wrong]))


def test_a_compressed_file_is_refused() -> None:
    with pytest.raises(pa.ArrowInvalid, match="do not lie in the file"):
        written(made_rows(400, seed=1), [400], compression="zstd")


def places_of_numbers(file: DetailFile) -> list[int]:
    """Where the file has whole words of offsets, bits, numbers and texts, in bytes."""
    mapped = pa.memory_map(f"/proc/self/fd/{file.descriptor}")
    reader = pa.ipc.open_file(mapped)
    mapped.seek(0)
    begin = mapped.read_buffer().address
    batches = [reader.get_batch(number) for number in range(reader.num_record_batches)]
    buffers = [each for batch in batches for column in batch for each in column.buffers() if each]
    return [each.address - begin + word for each in buffers for word in range(0, each.size - 3, 4)]


def test_of_a_damaged_file_nothing_is_read_that_lies_outside() -> None:
    """That would end the process. What lies elsewhere in the file may come instead."""
    file, random, refused = written(made_rows(30, seed=5), [11, 30]), Random(5), 0
    whole = os.pread(file.descriptor, os.fstat(file.descriptor).st_size, 0)
    places = places_of_numbers(file)
    ids = np.array(random.choices(range(30), k=60))
    for _ in range(300):
        data = bytearray(whole)
        for at in random.choices(places, k=random.randint(1, 40)):
            data[at : at + 4] = random.choice([b"\xff" * 4, b"\0\0\0\x80", b"\xff\xff\xff\x7f"])
        copy = os.memfd_create("damaged")
        os.write(copy, data)
        damaged = DetailFile(copy)
        try:
            damaged.columns(ids, np.zeros(60, np.int64), FILES)
            damaged.item_details(ids)
        except (IndexError, ValueError, MemoryError):
            refused += 1
    assert 100 < refused < 300


@pytest.mark.parametrize("seed", range(30))
def test_the_range_of_a_row_is_the_last_that_begins_before_it(seed: int) -> None:
    rng = np.random.default_rng(seed)
    sizes = rng.choice([0, 0, 1, 5, 1000, 300_000], rng.integers(1, 60))
    starts = np.cumsum([0, *sizes, 1])
    rows = rng.integers(0, starts[-1], 500)
    edges = np.concatenate([starts[:-1], starts[1:] - 1])
    ranges = Ranges(starts)
    for asked in (rows, edges[edges >= 0], rows[:0]):
        wanted = np.searchsorted(starts, asked, side="right") - 1
        np.testing.assert_array_equal(ranges.of(asked), wanted)
    for wrong in (-1, int(starts[-1])):
        with pytest.raises(IndexError):
            ranges.of(np.array([0, wrong]))
