"""Reading a whole source, and columns of files as Hugging Face datasets lays them out."""

import threading
from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from dataservice.core.job import SourceSpec
from dataservice.core.sample import RawSample
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
