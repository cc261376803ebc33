"""Which sample ids belong to which source."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dataservice.core.errors import NotFoundError
from dataservice.core.sample import IntArray


@dataclass(frozen=True, slots=True)
class SourceRanges:
    """Dense ids over the sources in the order of the job file: source s has ids
    `offsets[s]:offsets[s+1]` of `offsets` int64[sources+1]."""

    names: tuple[str, ...]
    offsets: NDArray[np.int64]

    @staticmethod
    def of(names: Sequence[str], sizes: Sequence[int]) -> "SourceRanges":
        """Dense ids over the sources, in this order."""
        return SourceRanges(tuple(names), np.cumsum([0, *sizes], dtype=np.int64))

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of samples of each source."""
        return tuple(int(size) for size in np.diff(self.offsets))

    def source_of(self, sample_id: int) -> str:
        """The source a sample belongs to. Raises NotFoundError when the id is unknown."""
        self.require(np.array([sample_id]))
        return self.names[int(np.searchsorted(self.offsets, sample_id, side="right")) - 1]

    def require(self, sample_ids: IntArray) -> None:
        """Raises NotFoundError when no source has one of these ids."""
        total = int(self.offsets[-1])
        wrong = np.asarray(sample_ids)[(sample_ids < 0) | (sample_ids >= total)]
        if len(wrong):
            raise NotFoundError(
                f"there is no sample {int(wrong[0])}: the index has ids 0 to {total - 1}. The id "
                "comes from another index; submit the job again."
            )
