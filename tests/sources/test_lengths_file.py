"""The mapped file of an index's lengths says what was written, and nothing from outside of it."""

import os
from collections.abc import Sequence
from contextlib import closing
from random import Random
from threading import Thread

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.scale.made_job import write_lengths
from dataservice.core.limits import DecodeLimits
from dataservice.core.sample import ItemLengths, LengthTable, Modality, SampleLengths
from dataservice.sources import lengths_file
from dataservice.sources.length_records import LengthRecords
from dataservice.sources.lengths_file import COLUMNS, LengthsFile, MappedLengths

LIMITS = DecodeLimits(max_llm_tokens=2**31 - 1)


def picture(tokens: int, position: int) -> ItemLengths:
    return ItemLengths(
        modality=Modality.VISION,
        encoder_tokens=4 * tokens,
        llm_tokens=tokens,
        position=position,
        shape=(2, 8, 8, 3),
    )


def sample(tokens: int, pictures: int = 0) -> SampleLengths:
    items = tuple(picture(tokens // 8, k * (tokens // 8)) for k in range(pictures))
    return SampleLengths(llm_tokens=tokens, loss_tokens=tokens // 2, items=items)


SAMPLES = st.builds(sample, st.sampled_from([8, 300, 65_535, 65_536, 2_000_000]), st.integers(0, 3))


def written(blocks: Sequence[LengthTable]) -> int:
    with closing(LengthsFile(sum(map(len, blocks)))) as file:
        for block in blocks:
            file.write(LengthRecords.of(block))
        return file.finish()


def mapped(descriptor: int) -> MappedLengths:
    try:
        return MappedLengths(descriptor)
    finally:
        os.close(descriptor)


def same(one: LengthTable, other: LengthTable) -> bool:
    return all(np.array_equal(getattr(one, name), getattr(other, name)) for name in COLUMNS)


@given(st.lists(st.lists(SAMPLES, max_size=5), max_size=5), st.randoms(use_true_random=False))
def test_any_samples_of_any_blocks_are_drawn_as_they_were_written(drawn, rng):
    lengths = mapped(written([LengthTable.of(block) for block in drawn]))
    whole = LengthTable.of([each for block in drawn for each in block])
    rows = np.array([rng.randrange(len(whole)) for _ in range(7 * bool(len(whole)))], dtype=int)
    assert len(lengths) == len(whole)
    assert same(lengths.take(rows), whole.take(rows))
    assert np.array_equal(lengths.llm_tokens, whole.llm_tokens)
    for block in range(lengths.blocks):
        lengths.records(block).require_sound(LIMITS)


def test_what_waits_for_the_disk_is_drawn_by_threads_and_is_the_same(monkeypatch):
    lengths = mapped(written([LengthTable.of([sample(8 + k, k % 3) for k in range(500)])]))
    rows = np.random.default_rng(0).integers(0, 500, 2000)
    expected, began = lengths.take(rows), []
    monkeypatch.setattr(lengths_file, "COLD_FAULTS", -1)  # as if each row had waited
    monkeypatch.setattr(Thread, "start", lambda one, start=Thread.start: began.append(start(one)))
    assert same(lengths.take(rows), expected)
    assert 1 <= len(began) <= lengths_file.READERS
    rows[1500] = 500
    with pytest.raises(IndexError):
        lengths.take(rows)


def test_what_is_drawn_has_the_types_that_planning_reads():
    taken = mapped(write_lengths(LengthTable.of([sample(800, 2)]))).take(np.array([0, 0]))
    assert {name: getattr(taken, name).dtype for name in COLUMNS} == COLUMNS


def test_a_sample_that_is_not_there_is_an_error():
    lengths = mapped(write_lengths(LengthTable.of([sample(800, 2)] * 3)))
    for row in (-1, 3, 2**40):
        with pytest.raises(IndexError):
            lengths.take(np.array([row]))


def test_a_picture_takes_twenty_bytes_and_a_text_ten():
    """More than a tenth of the memory, and the system makes who writes it wait for the disk."""
    for one, most_bytes in ((sample(800, 1), 20), (sample(800), 10), (sample(80_000, 1), 36)):
        descriptor = write_lengths(LengthTable.of([one] * 100_000))
        try:
            assert os.fstat(descriptor).st_size <= 100_000 * most_bytes + 4096
        finally:
            os.close(descriptor)


def test_other_tokens_in_the_column_than_in_the_records_are_noticed():
    records = LengthRecords.of(LengthTable.of([sample(800), sample(300)]))
    records.require_sound(LIMITS)
    records.llm_tokens[1] += 1
    with pytest.raises(ValueError, match="llm_tokens out of range"):
        records.require_sound(LIMITS)


def test_columns_that_speak_of_different_items_make_no_records():
    whole = {name: getattr(LengthTable.of([sample(800, 2)] * 2), name) for name in COLUMNS}
    for name, wrong in (
        ("item_offsets", [0, 5, 4]),
        ("item_offsets", [1, 2, 4]),
        ("item_offsets", [0, 2, 3]),
        ("item_offsets", [0, 2**32 + 2, 4]),
        ("item_offsets", [0, 4]),
        ("item_position", [0, 1]),
        ("loss_tokens", [1]),
    ):
        column = np.array(wrong, COLUMNS[name])
        with pytest.raises(ValueError, match="different items"):
            LengthRecords.of(LengthTable(**{**whole, name: column}))


def test_whatever_a_damaged_file_says_nothing_outside_of_it_is_read():
    """Refused when it is mapped or drawn from, or numbers of the file."""
    tables = [LengthTable.of([sample(900, k % 3), sample(70_000 * (k % 2) + 80)]) for k in range(9)]
    descriptor = written(tables)
    whole = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
    os.close(descriptor)
    rng, refused, rows = Random(5), 0, np.arange(18)
    for _ in range(2000):
        data = bytearray(whole)
        for _ in range(rng.randint(1, 3)):
            data[rng.randrange(len(data))] = rng.choice((0, 1, 2, 4, 127, 128, 255))
        if rng.random() < 0.1:
            del data[rng.randrange(len(data)) :]
        copy = os.memfd_create("copy")
        os.write(copy, data)
        try:
            mapped(copy).take(rows)
        except (ValueError, IndexError):
            refused += 1
    assert refused > 200
