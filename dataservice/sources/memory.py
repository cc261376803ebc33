"""A catalog of samples given in memory, for tests and simulations."""

import hashlib
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from dataservice.core.orders import PackSample
from dataservice.core.sample import (
    IntArray,
    ItemDetails,
    LengthTable,
    SampleLengths,
    SampleLocation,
    SampleRef,
)
from dataservice.core.sample_columns import SampleColumns
from dataservice.core.split_mix import split_mix
from dataservice.sources.lengths_by_id import LengthsById
from dataservice.sources.ranges import SourceRanges


class MemoryCatalog(LengthsById):
    """The port Catalog over the samples of each source: (key, location, lengths)."""

    def __init__(
        self,
        sources: Mapping[str, Sequence[tuple[str, SampleLocation, SampleLengths]]],
        loss_weights: Sequence[float] | None = None,
    ) -> None:
        """`loss_weights` are the samples' own, by id; by default all 1."""
        self.sources = SourceRanges.of(list(sources), [len(rows) for rows in sources.values()])
        rows = [(source, *row) for source, given in sources.items() for row in given]
        self._details = [
            (SampleRef(sample_id=k, source=source, key=key, location=location), lengths)
            for k, (source, key, location, lengths) in enumerate(rows)
        ]
        self._lengths = LengthTable.of([lengths for _, lengths in self._details])
        weights = np.ones(len(rows)) if loss_weights is None else loss_weights
        self._loss_weights = np.array(weights, dtype=np.float64)
        weighed = self._details if loss_weights is None else [*self._details, list(loss_weights)]
        self._fingerprint = hashlib.sha256(repr(weighed).encode()).hexdigest()

    @property
    def fingerprint(self) -> str:
        """Changes when any sample changes."""
        return self._fingerprint

    at_hand = True

    def fetch(self, sample_ids: IntArray) -> None:
        """All samples are at hand. Raises NotFoundError when an id is unknown."""
        self.sources.require(sample_ids)

    def details(self, sample_ids: IntArray) -> list[tuple[SampleRef, SampleLengths]]:
        """Locations and full lengths of these samples, in this order. Raises NotFoundError when an
        id is unknown."""
        self.sources.require(sample_ids)
        return [self._details[int(sample_id)] for sample_id in sample_ids]

    def columns(self, sample_ids: IntArray) -> SampleColumns:
        """The same as columns, of epoch 0. Raises NotFoundError when an id is unknown."""
        details = self.details(sample_ids)
        return SampleColumns.of([PackSample(ref=ref, lengths=lengths) for ref, lengths in details])

    def files(self, sample_ids: IntArray) -> list[str]:
        """Paths of the files that hold these samples, in this order. Raises NotFoundError when an
        id is unknown."""
        return [ref.location.file for ref, _ in self.details(sample_ids)]

    def row_keys(self, sample_ids: IntArray) -> NDArray[np.uint32]:
        """A number for each of these samples: uint32[n]. Raises NotFoundError when an id is
        unknown."""
        self.sources.require(sample_ids)
        return (split_mix(np.asarray(sample_ids, np.uint64)) >> np.uint64(32)).astype(np.uint32)

    def item_details(self, sample_ids: IntArray) -> ItemDetails:
        """What is known of these samples' encoder items besides their lengths, by sample, then in
        its order. Raises NotFoundError when an id is unknown."""
        details = self.details(sample_ids)
        return ItemDetails.of([item for _, lengths in details for item in lengths.items])

    def loss_weights(self, sample_ids: IntArray) -> NDArray[np.float64]:
        """The own loss weight of each of these samples: float64[n]. Raises NotFoundError when an
        id is unknown."""
        self.sources.require(sample_ids)
        return self._loss_weights[sample_ids]
