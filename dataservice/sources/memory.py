"""A catalog of samples given as they are, for tests and simulations."""

import hashlib
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from dataservice.core.sample import (
    IntArray,
    LengthTable,
    SampleLengths,
    SampleLocation,
    SampleRef,
)
from dataservice.sources.ranges import SourceRanges


class MemoryCatalog:
    """The port Catalog over the samples of each source: (key, location, lengths)."""

    def __init__(
        self, sources: Mapping[str, Sequence[tuple[str, SampleLocation, SampleLengths]]]
    ) -> None:
        self.sources = SourceRanges.of(list(sources), [len(rows) for rows in sources.values()])
        rows = [(source, *row) for source, given in sources.items() for row in given]
        self._details = [
            (SampleRef(sample_id=k, source=source, key=key, location=location), lengths)
            for k, (source, key, location, lengths) in enumerate(rows)
        ]
        self._lengths = LengthTable.of([lengths for _, lengths in self._details])
        self._fingerprint = hashlib.sha256(repr(self._details).encode()).hexdigest()

    @property
    def fingerprint(self) -> str:
        """Changes with any of the samples."""
        return self._fingerprint

    @property
    def samples(self) -> int:
        """How many samples there are; ids are 0 .. samples-1."""
        return len(self._details)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Samples of each source."""
        return self.sources.sizes

    @property
    def llm_tokens(self) -> NDArray[np.int32]:
        """LLM tokens of all samples by id: int32[samples]."""
        return self._lengths.llm_tokens

    def source_of(self, sample_id: int) -> str:
        """The source a sample belongs to. Raises NotFoundError."""
        return self.sources.source_of(sample_id)

    def lengths(self, sample_ids: IntArray) -> LengthTable:
        """Lengths of these samples, in this order. Raises NotFoundError."""
        self.sources.require(sample_ids)
        return self._lengths.take(sample_ids)

    def details(self, sample_ids: IntArray) -> list[tuple[SampleRef, SampleLengths]]:
        """Locations and full lengths of these samples, in this order. Raises NotFoundError."""
        self.sources.require(sample_ids)
        return [self._details[int(sample_id)] for sample_id in sample_ids]
