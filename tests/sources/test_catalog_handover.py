"""A catalog crosses from process to process unchanged, and a damaged one is refused."""

import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from random import Random

import numpy as np
import pytest

from benchmarks.scale.made_job import hand_over, made_catalog, write_lengths
from dataservice.core.job import SourceSpec
from dataservice.core.limits import DEFAULT_LIMITS
from dataservice.core.ports import SampleMeasurer
from dataservice.sources.catalog import IndexedCatalog, find_index
from dataservice.sources.catalog_handover import (
    RowFiles,
    hand_over_head,
    take_over,
    take_over_head,
)
from dataservice.sources.index import build_index
from dataservice.sources.lengths_file import MappedLengths
from tests.sources.handed_over import handed_over

Measurer = Callable[[], SampleMeasurer]


@pytest.fixture
def catalog(
    tmp_path: Path,
    spec: Callable[..., SourceSpec],
    write_tar: Callable[..., Path],
    write_jsonl: Callable[..., Path],
    measurer: Measurer,
) -> IndexedCatalog:
    """Images and texts, of two sources."""
    members = [(f"{k}.{i}.jpg", b"J" * (i + 1)) for k in range(9) for i in range(k % 3)]
    members += [(f"{k}.txt", b"word " * (k + 1)) for k in range(9)]
    write_tar(tmp_path / "data" / "0.tar", sorted(members))
    write_jsonl(tmp_path / "data" / "t.jsonl", [{"text": "a b " * (k + 1)} for k in range(5)])
    specs = [
        spec(tmp_path / "data" / "0.tar", "webdataset", name="media"),
        spec(tmp_path / "data" / "t.jsonl", "jsonl", name="texts"),
    ]
    for source in specs:
        build_index(source, out_dir=str(tmp_path / "index"), make_measurer=measurer)
    return find_index(specs, str(tmp_path / "index"), measurer().fingerprint).read()


def copied(descriptor: int, change: Callable[[bytearray], None] = lambda data: None) -> int:
    """A file of its own with the same bytes, but for the change."""
    data = bytearray(os.pread(descriptor, os.fstat(descriptor).st_size, 0))
    change(data)
    copy = os.memfd_create("copy")
    os.write(copy, data)
    return copy


def test_a_catalog_is_the_same_on_the_other_side(catalog):
    taken = handed_over(catalog)
    ids = np.arange(catalog.samples)
    assert taken.fingerprint == catalog.fingerprint
    assert taken.sizes == catalog.sizes
    assert taken.details(ids) == catalog.details(ids)
    np.testing.assert_array_equal(taken.llm_tokens, catalog.llm_tokens)


def test_a_taken_catalog_outlives_the_one_that_it_came_from(catalog):
    taken = handed_over(catalog)
    expected = catalog.details(np.arange(3))[:]
    del catalog
    assert taken.details(np.arange(3)) == expected


def resident_bytes() -> tuple[int, int]:
    """Of the mapped files of catalogs, and their size."""
    kib = {"Rss": 0, "Size": 0}
    ours = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, _, value = line.partition(":")
        if name in kib:
            kib[name] += int(value.split()[0]) * ours
        elif "-" in name:  # the first line of a mapping
            ours = "(deleted)" in line
    return kib["Rss"] * 1024, kib["Size"] * 1024


def test_what_was_checked_of_a_catalog_does_not_stay_in_memory():
    before = resident_bytes()
    made = made_catalog(300_000)
    taken = handed_over(made)
    resident, size = (now - then for now, then in zip(resident_bytes(), before, strict=True))
    assert size > 100 * taken.samples
    assert resident < 8 * taken.samples


def test_a_draw_costs_what_is_drawn_and_copies_no_column():
    """Of an index of 100 million, a copy of each column took seconds a step."""
    taken = handed_over(made_catalog(300_000))
    tracemalloc.start()
    try:
        taken.lengths(np.arange(0, taken.samples, 1000))
        _, most_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most_bytes < taken.samples


def test_a_file_of_lengths_holds_nothing_else_of_the_process_that_wrote_it():
    lengths, files = made_catalog(1000).parts.lengths, []
    for junk in (0x55, 0xAA):
        left = [np.full(len(lengths) * size, junk, np.uint8) for size in (16, 20)]
        del left  # freed, for the next who needs as much
        descriptor = write_lengths(lengths)
        files.append(os.pread(descriptor, os.fstat(descriptor).st_size, 0))
        os.close(descriptor)
    assert files[0] == files[1]


def test_lengths_that_another_release_has_written_are_refused():
    descriptor = write_lengths(made_catalog(10).parts.lengths)
    try:
        head = os.pread(descriptor, 128, 0)
        os.pwrite(descriptor, head.replace(b'"form": 2', b'"form": 3'), 0)
        with pytest.raises(ValueError, match="another release"):
            MappedLengths(descriptor)
    finally:
        os.close(descriptor)


@pytest.mark.parametrize("which", ["head", "lengths", "details"])
def test_damaged_files_are_refused_or_hold_sound_numbers(catalog, which):
    """Whatever the other process wrote: an error, or columns that agree with each other."""
    rng = Random(3)
    files, head = hand_over(catalog), hand_over_head(catalog.parts)
    refused = 0
    for _ in range(300):

        def damage(data: bytearray) -> None:
            for _ in range(rng.randint(1, 4)):
                data[rng.randrange(len(data))] = rng.choice((0, 1, 127, 128, 255))
            if rng.random() < 0.2:
                del data[rng.randrange(len(data)) :]

        changes = {which: damage}
        try:
            lengths, details = (
                copied(descriptor, changes.get(name, lambda data: None))
                for name, descriptor in (("lengths", files.lengths), ("details", files.details))
            )
            taken = take_over(
                take_over_head(copied(head, changes.get("head", lambda data: None))),
                RowFiles(lengths=lengths, details=details),
                DEFAULT_LIMITS,
            )
        except ValueError:
            refused += 1
            continue
        assert taken.samples == sum(taken.sizes)
        assert np.all(taken.lengths(np.arange(taken.samples)).llm_tokens >= 1)
        taken.details(np.arange(taken.samples))[:]
    assert refused > 30


def test_files_of_different_catalogs_are_refused(catalog):
    files, empty = hand_over(catalog), os.memfd_create("empty")
    for lengths, details in (
        (copied(files.lengths), empty),
        (copied(files.details), copied(files.details)),
    ):
        with pytest.raises(ValueError, match=r"."):
            take_over(catalog.parts, RowFiles(lengths=lengths, details=details), DEFAULT_LIMITS)
