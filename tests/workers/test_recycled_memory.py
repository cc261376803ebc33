"""Memory files go to and fro between a decoder and its worker, and hold one sample at a time."""

import fcntl
import gc
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataservice.core.sample import DecodedSample
from dataservice.workers import recycled_memory
from dataservice.workers.recycled_memory import (
    FilledMemory,
    Handed,
    ReadMemory,
    Returned,
    file_bytes,
)
from dataservice.workers.sample_memory import (
    MAP_FAILED,
    sample_buffers,
    sample_bytes,
    sample_of_bytes,
)
from tests.workers.memory_files import descriptors, mappings, require_same
from tests.workers.trouble import a_sample

PLANNED = a_sample(1, "k", tokens=5, images=1, sounds=2).lengths


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    gc.collect()
    before = descriptors(), mappings()
    yield
    gc.collect()
    assert (descriptors(), mappings()) == before


def decoded(seed: int) -> DecodedSample:
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, 1000, 5, dtype=np.int32)
    pixels = rng.integers(0, 256, (2, 224, 224, 3), dtype=np.uint8)
    sounds = [rng.random(16001, dtype=np.float32) for _ in range(2)]
    return DecodedSample(input_ids=ids, labels=ids[::-1], items=(pixels, *sounds))


def handed(filled: FilledMemory, seed: int, planned=PLANNED) -> Handed:
    gave = filled.fill(sample_buffers(decoded(seed), planned), sample_bytes(planned))
    # As a socket does: the descriptor that arrives is another.
    copy = os.dup(gave.descriptor) if gave.descriptor >= 0 else -1
    if gave.descriptor >= 0:
        os.close(gave.descriptor)
    return Handed(gave.number, copy)


def test_memory_is_filled_again_only_after_the_last_view_of_its_sample_is_gone():
    filled, read = FilledMemory(), ReadMemory()
    one = read.sample(handed(filled, 1), PLANNED)
    view = one.items[2][7:9]
    del one
    filled.take_back(read.returned())
    other = handed(filled, 2)
    assert other.descriptor >= 0, "the first memory is still looked at"
    two = read.sample(other, PLANNED)
    require_same(two, decoded(2))
    assert (view == decoded(1).items[2][7:9]).all()
    del view
    filled.take_back(read.returned())
    third = handed(filled, 3)
    assert (third.number, third.descriptor) == (1, -1), "no new memory, and no descriptor"
    three = read.sample(third, PLANNED)
    require_same(three, decoded(3))
    require_same(two, decoded(2))


def test_a_hundred_samples_of_one_size_take_one_memory():
    filled, read = FilledMemory(), ReadMemory()
    news = 0
    for seed in range(100):
        gave = handed(filled, seed)
        news += gave.descriptor >= 0
        require_same(read.sample(gave, PLANNED), decoded(seed))
        filled.take_back(read.returned())
    assert news == 1


def placed(seed: int, memory: np.ndarray) -> DecodedSample:
    at = 0
    for buffer in sample_buffers(decoded(seed), PLANNED):
        memory[at : at + len(buffer)] = np.frombuffer(buffer, np.uint8)
        at += len(buffer)
    return sample_of_bytes(memory, PLANNED)


def lent_again() -> tuple[FilledMemory, ReadMemory, np.ndarray]:
    """Memory that has held a sample and is lent."""
    filled, read = FilledMemory(), ReadMemory()
    assert filled.lend(sample_bytes(PLANNED)) is None, "there is none yet"
    read.sample(handed(filled, 1), PLANNED)
    filled.take_back(read.returned())
    lent = filled.lend(sample_bytes(PLANNED))
    assert lent is not None
    return filled, read, lent


def test_a_sample_that_was_written_into_lent_memory_is_handed_over_as_it_stands():
    filled, read, lent = lent_again()
    buffers = sample_buffers(placed(2, lent), PLANNED)
    gave = filled.fill(buffers, sample_bytes(PLANNED))
    assert gave == Handed(1, -1)
    require_same(read.sample(gave, PLANNED), decoded(2))
    maps = Path("/proc/self/maps").read_text().splitlines()
    protection = [line.split()[1] for line in maps if "memfd:sample" in line]
    assert protection == ["r--s", "r--s"], "and nobody writes to it any more"


def test_what_of_a_sample_does_not_lie_in_lent_memory_is_copied_there():
    filled, read, lent = lent_again()
    assert filled.lend(sample_bytes(PLANNED)).ctypes.data == lent.ctypes.data, "until it is settled"
    sample = replace(decoded(2), items=(placed(2, lent).items[0], *decoded(2).items[1:]))
    lent[: 4 * 5] = 0  # its ids, which lie elsewhere too
    gave = filled.fill(sample_buffers(sample, PLANNED), sample_bytes(PLANNED))
    assert gave == Handed(1, -1)
    require_same(read.sample(gave, PLANNED), decoded(2))


@pytest.mark.parametrize("seed", [3, 4])
def test_another_sample_than_the_one_in_lent_memory_is_copied(seed):
    filled, read, lent = lent_again()
    sample = placed(seed, lent)
    sample = replace(sample, items=(sample.items[0], *sample.items[:0:-1]))  # sounds change places
    gave = filled.fill(sample_buffers(sample, PLANNED), sample_bytes(PLANNED))
    assert gave.number == 2
    wanted = decoded(seed)
    wanted = replace(wanted, items=(wanted.items[0], *wanted.items[:0:-1]))
    require_same(read.sample(gave, PLANNED), wanted)
    del sample, lent
    filled.settle()
    assert handed(filled, 5) == Handed(1, -1), "what was lent is free again"


def test_free_memory_beyond_what_is_kept_is_given_up_on_both_sides():
    filled, read = FilledMemory(), ReadMemory(kept_bytes=2 * file_bytes(sample_bytes(PLANNED)))
    before = mappings()
    samples = [read.sample(handed(filled, seed), PLANNED) for seed in range(6)]
    assert mappings() == before + 12
    del samples
    returned = read.returned()
    assert (len(returned.free), len(returned.gone)) == (2, 4)
    filled.take_back(returned)
    assert mappings() == before + 4


def test_a_sample_outlives_the_process_that_decoded_it():
    filled, read = FilledMemory(), ReadMemory()
    sample = read.sample(handed(filled, 1), PLANNED)
    del filled, read
    gc.collect()
    require_same(sample, decoded(1))


def test_a_worker_that_has_no_more_mappings_reads_the_sample(monkeypatch):
    filled, read = FilledMemory(), ReadMemory()
    gave = handed(filled, 1)
    no_room = type("Library", (), {"mmap": staticmethod(lambda *_: MAP_FAILED)})
    monkeypatch.setattr(recycled_memory, "libc", no_room)
    require_same(read.sample(gave, PLANNED), decoded(1))
    assert read.returned() == Returned([], [gave.number]), "the decoder may drop it"
    with pytest.raises(MemoryError):
        FilledMemory().fill([b"x"], 1)
    filled.take_back(Returned(gone=[gave.number]))


def test_what_is_released_beyond_what_is_kept_loses_its_pages_at_once():
    """A worker that gets no more orders keeps no large job's memory."""
    size_bytes = file_bytes(sample_bytes(PLANNED))
    filled, read = FilledMemory(), ReadMemory(kept_bytes=2 * size_bytes)
    files = [filled.fill(sample_buffers(decoded(n), PLANNED), size_bytes) for n in range(6)]
    watched = [os.dup(each.descriptor) for each in files]
    samples = [read.sample(each, PLANNED) for each in files]
    assert all(os.fstat(file).st_blocks * 512 >= 0.9 * sample_bytes(PLANNED) for file in watched)
    del samples
    assert sum(os.fstat(file).st_blocks > 0 for file in watched) == 2
    filled.take_back(read.returned())
    again = handed(filled, 9)
    require_same(read.sample(again, PLANNED), decoded(9))
    for file in watched:
        os.close(file)


def test_pages_that_go_are_gone_before_the_decoder_may_fill_them(monkeypatch):
    """Otherwise the next sample could lose its bytes."""
    filled, read = FilledMemory(), ReadMemory(kept_bytes=0)
    empty, meanwhile = recycled_memory.MappedFile.empty, []

    def slow(mapping: recycled_memory.MappedFile) -> None:
        meanwhile.append(read.returned())
        empty(mapping)

    monkeypatch.setattr(recycled_memory.MappedFile, "empty", slow)
    read.sample(handed(filled, 1), PLANNED)
    assert meanwhile == [Returned([], [])]
    assert read.returned() == Returned([], [1])


def test_a_sample_that_was_handed_over_is_mapped_for_reading_alone():
    """A codec's stray write ends its process, and changes no earlier sample."""
    filled, read = FilledMemory(), ReadMemory()
    for seed in range(2):
        sample = read.sample(handed(filled, seed), PLANNED)
        maps = Path("/proc/self/maps").read_text().splitlines()
        assert {line.split()[1] for line in maps if "memfd:sample" in line} == {"r--s"}
        require_same(sample, decoded(seed))
        del sample
        filled.take_back(read.returned())


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("in use", "unknown, in use or too small"),
        ("never sent", "unknown, in use or too small"),
        ("sent before", "no new one"),
        ("without a number", "no new one"),
        ("not sealed", "not sealed"),
        ("of another size", "not its planned size"),
    ],
)
def test_memory_that_breaks_the_protocol_is_refused(what, message):
    filled, read = FilledMemory(), ReadMemory()
    sample = read.sample(handed(filled, 1), PLANNED)
    size_bytes = file_bytes(sample_bytes(PLANNED))
    file = os.memfd_create("sample", os.MFD_ALLOW_SEALING)
    os.ftruncate(file, size_bytes + (what == "of another size"))
    if what != "not sealed":
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, seals)
    numbers = {"in use": 1, "never sent": 7, "sent before": 1, "without a number": -1}
    has_none = what in ("in use", "never sent")
    with pytest.raises(ValueError, match=message):
        read.sample(Handed(numbers.get(what, 2), -1 if has_none else file), PLANNED)
    if has_none:
        os.close(file)
    require_same(sample, decoded(1))


def test_memory_that_is_too_small_for_the_sample_is_refused():
    small = a_sample(1, "k", tokens=5, images=1).lengths
    filled, read = FilledMemory(), ReadMemory()
    part = DecodedSample(
        input_ids=decoded(1).input_ids, labels=decoded(1).labels, items=decoded(1).items[:1]
    )
    gave = filled.fill(sample_buffers(part, small), sample_bytes(small))
    read.sample(Handed(gave.number, gave.descriptor), small)
    read.returned()
    with pytest.raises(ValueError, match="too small"):
        read.sample(Handed(gave.number, -1), PLANNED)


@given(st.integers(1, 2**40))
def test_a_file_is_at_most_a_quarter_larger_than_its_sample(size_bytes):
    whole = file_bytes(size_bytes)
    assert size_bytes <= whole <= max(size_bytes * 1.25 + 1, size_bytes + 4096)
    assert file_bytes(whole) == whole


def test_small_samples_do_not_hold_large_memory():
    filled = FilledMemory()
    large = filled.fill([bytes(10**6)], 10**6)
    filled.take_back(Returned([large.number]))
    small = filled.fill([bytes(10**5)], 10**5)
    assert small.number != large.number
    half = filled.fill([bytes(5 * 10**5)], 5 * 10**5)
    assert half == Handed(large.number, -1)
    os.close(large.descriptor)
    os.close(small.descriptor)
