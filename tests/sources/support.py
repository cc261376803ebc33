"""Reading a whole source, columns of files as Hugging Face datasets lays them out, and indexes of
small row groups."""

import threading
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pytest

from dataservice.core.job import SourceSpec
from dataservice.core.sample import RawSample
from dataservice.sources import index_part, index_rows, part_reader
from dataservice.sources.formats.protocol import Format, ScannedSample
from dataservice.sources.formats.registry import list_files, open_format

FILE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


def scan(spec: SourceSpec) -> list[ScannedSample]:
    """All samples of a source, with their locations."""
    opened = open_format(spec)
    return [sample for file in list_files(spec) for sample in opened.scan(file)]


def wrong_reads(opened: Format, samples: Sequence[ScannedSample], threads: int) -> list[object]:
    """What differs, or fails, where so many threads read all samples, each in an order of its
    own."""
    wrong: list[object] = []

    def read(seed: int) -> None:
        for k in np.random.default_rng(seed).permutation(len(samples)).tolist():
            try:
                if opened.read(samples[k].key, samples[k].location) != samples[k].raw:
                    wrong.append(k)
            except Exception as error:
                wrong.append(error)

    readers = [threading.Thread(target=read, args=(seed,)) for seed in range(threads)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    return wrong


def good(sample: ScannedSample) -> RawSample:
    """What was read of a sample that can be used."""
    assert isinstance(sample.raw, RawSample), sample.raw
    return sample.raw


def held(*blobs: bytes) -> pa.Array:
    """A column of files that lie in their cells."""
    return pa.array([{"bytes": blob, "path": None} for blob in blobs], FILE)


ROWS_A_SMALL_GROUP = 4


def in_small_row_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have parts of an index written and read in row groups of so few rows."""
    for module in (index_part, part_reader):
        monkeypatch.setattr(module, "ROWS_PER_GROUP", ROWS_A_SMALL_GROUP)
    for module in (part_reader, index_rows):  # several shares are read at once
        monkeypatch.setattr(module, "ROWS_A_SHARE", 2 * ROWS_A_SMALL_GROUP)


def pictures_and_texts(shard: int, rows: int, words: int = 1) -> list[tuple[str, bytes]]:
    """Members of a tar: samples of no, one and two pictures, with texts of rising length."""
    members = []
    for k in range(rows):
        members += [(f"{shard}{k:02d}.{i}.jpg", b"J" * (i + 1)) for i in range(k % 3)]
        members += [(f"{shard}{k:02d}.txt", b"word " * (k + words))]
    return members
