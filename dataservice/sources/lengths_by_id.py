"""What every catalog is once its lengths are in memory: columns by sample id."""

import numpy as np
from numpy.typing import NDArray

from dataservice.core.sample import IntArray, LengthTable
from dataservice.sources.ranges import SourceRanges


class LengthsById:
    """Lengths of all samples, and the ranges of ids that are each source's. A catalog sets
    both when it is made."""

    sources: SourceRanges
    _lengths: LengthTable

    @property
    def samples(self) -> int:
        """How many samples there are; ids are 0 .. samples-1."""
        return len(self._lengths)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Samples of each source, in the order of the job file."""
        return self.sources.sizes

    @property
    def llm_tokens(self) -> NDArray[np.int32]:
        """LLM tokens of all samples by id: int32[samples], read-only."""
        return self._lengths.llm_tokens

    def source_of(self, sample_id: int) -> str:
        """The source a sample belongs to. Raises NotFoundError."""
        return self.sources.source_of(sample_id)

    def lengths(self, sample_ids: IntArray) -> LengthTable:
        """Lengths of these samples, in this order. Raises NotFoundError."""
        self.sources.require(sample_ids)
        return self._lengths.take(sample_ids)
