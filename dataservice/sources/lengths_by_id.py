"""The lengths of every catalog, as columns by sample id."""

from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from dataservice.core.sample import IntArray, LengthTable
from dataservice.sources.lengths_file import Lengths
from dataservice.sources.ranges import SourceRanges


class LengthsById:
    """Lengths of all samples, and each source's range of ids. A catalog sets both when it is
    made."""

    sources: SourceRanges
    _lengths: Lengths

    @property
    def samples(self) -> int:
        """Number of samples; ids are 0 .. samples-1."""
        return len(self._lengths)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of samples of each source, in the order of the job file."""
        return self.sources.sizes

    @property
    def llm_tokens(self) -> NDArray[np.int32]:
        """LLM tokens of all samples by id: int32[samples], read-only."""
        return self._lengths.llm_tokens

    @property
    def source_names(self) -> tuple[str, ...]:
        """The sources, in the order of the job file."""
        return self.sources.names

    def source_numbers(self, sample_ids: IntArray) -> NDArray[np.int64]:
        """Indices into `source_names` of these samples' sources, in this order. Raises
        NotFoundError when an id is unknown."""
        self.sources.require(sample_ids)
        return np.searchsorted(self.sources.offsets, sample_ids, side="right") - 1

    def source_of(self, sample_id: int) -> str:
        """The source a sample belongs to. Raises NotFoundError when the id is unknown."""
        return self.sources.source_of(sample_id)

    @cached_property
    def longest_sample(self) -> int:
        """The id of one of the samples with the most LLM tokens."""
        return int(np.argmax(self._lengths.llm_tokens))

    def lengths(self, sample_ids: IntArray) -> LengthTable:
        """Lengths of these samples, in this order. Raises NotFoundError when an id is unknown."""
        self.sources.require(sample_ids)
        return self._lengths.take(sample_ids)
