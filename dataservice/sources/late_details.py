"""Details of an index that is still being read: those of single steps come when they are asked for.

    rows ──► all read? ──► fetched before? ──► fetch: the row groups that hold them

Contract.
  Success   a row's details are those of the whole file, whichever way they came. The last few
            fetched are kept, so that a step that was fetched is not fetched again while it is
            planned. Threads that fetch take turns; for rows that are at hand nobody waits.
  Failure   what fetching raises, and the next one tries again; once the index was found to be
            damaged, that error, for every row.
"""

import threading
from collections.abc import Callable

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from dataservice.core.errors import IndexStaleError, ServiceError
from dataservice.core.sample import IntArray
from dataservice.sources.detail_file import DETAIL_SCHEMA, DetailFile, DetailTable
from dataservice.sources.length_columns import lengths_of
from dataservice.sources.lengths_file import COLUMNS, Lengths
from dataservice.sources.manifest import AGAIN

FETCHED_KEPT = 4  # steps

Fetched = tuple[NDArray[np.int64], DetailFile]


class LateDetails(DetailTable):
    """Rows by number, of an index with these lengths. Safe for use from several threads."""

    def __init__(self, lengths: Lengths, fetch: Callable[[IntArray], int]) -> None:
        """`fetch` gives a descriptor of the DetailFile of these rows, which rise; it may take
        seconds."""
        self._lengths = lengths
        self._fetch = fetch
        self._turn = threading.Lock()
        self._fetched: tuple[Fetched, ...] = ()
        self._whole: DetailFile | None = None
        self._error: ServiceError | None = None
        self.at_hand = False

    def __len__(self) -> int:
        return len(self._lengths)

    def complete(self, details: DetailFile) -> None:
        """All rows have been read."""
        self._whole = details
        self.at_hand = True
        self._fetched = ()

    def fail(self, error: ServiceError) -> None:
        """The index was found to be damaged: nothing of it is to be used."""
        self._error = error

    def fetch(self, sample_ids: IntArray) -> None:
        """Have these rows at hand. Takes as long as reading their row groups."""
        if len(sample_ids):  # behind the last step there are none
            self._holding(np.unique(np.asarray(sample_ids, dtype=np.int64)))

    def holding(self, rows: NDArray[np.int64]) -> tuple[DetailFile, NDArray[np.int64]]:
        """A file that has these rows, and their numbers there. Rows that are not at hand are
        fetched."""
        ids, details = self._holding(np.unique(rows))
        return details, rows if ids is None else np.searchsorted(ids, rows)

    def find_key(self, key: str) -> int | None:
        """The row of the first sample with this key, or None. Reads the whole index where that is
        not done."""
        return self._holding(np.arange(len(self)))[1].find_key(key)

    def _holding(self, wanted: NDArray[np.int64]) -> tuple[NDArray[np.int64] | None, DetailFile]:
        """A file with these rows, which rise, and which rows it has: None for all."""
        held = self._at_hand(wanted)
        if held is None:
            with self._turn:
                held = self._at_hand(wanted)  # another thread may have fetched them
                if held is None:
                    held = wanted, self._read(wanted)
                    self._fetched = (*self._fetched, held)[-FETCHED_KEPT:]
        return held

    def _at_hand(
        self, wanted: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64] | None, DetailFile] | None:
        """The same, where nothing need be fetched."""
        if self._error is not None:
            raise self._error
        if self._whole is not None:
            return None, self._whole
        for ids, details in self._fetched:
            places = np.minimum(np.searchsorted(ids, wanted), len(ids) - 1)
            if np.array_equal(ids[places], wanted):
                return ids, details
        return None

    def _read(self, wanted: NDArray[np.int64]) -> DetailFile:
        try:
            details = DetailFile(self._fetch(wanted))
            details.require_whole()
            alike = len(details) == len(wanted) and self._as_planned(details, wanted)
        except pa.ArrowException as error:
            raise IndexStaleError(f"an index's rows are damaged: {error}. {_REMEDY}") from error
        if not alike:
            raise IndexStaleError(f"an index's rows have other lengths than before. {_REMEDY}")
        return details

    def _as_planned(self, details: DetailFile, wanted: NDArray[np.int64]) -> bool:
        """Whether these rows have the lengths that steps are planned by."""
        known = self._lengths.take(wanted)
        found = lengths_of(details.rows(np.arange(len(wanted)), DETAIL_SCHEMA.names))
        return all(np.array_equal(getattr(found, name), getattr(known, name)) for name in COLUMNS)


_REMEDY = f"Write it again: {AGAIN}; the same files give the same index, and checkpoints fit it."
