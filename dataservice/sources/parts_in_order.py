"""Reads the parts of an index, several at once, and gives their rows in their order.

Contract.
  Success       each row group of each part, in order. At most `READERS` parts are begun, of which
                each holds `GROUPS_AHEAD` row groups that are not asked for yet.
  Failure       the error of the first part that has one, once all before it was given.
  Cancellation  closing the generator ends every reader before it returns.
"""

import queue
import threading
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from itertools import islice

import pyarrow as pa

from dataservice.core.limits import DecodeLimits
from dataservice.core.sample import LengthTable
from dataservice.sources.index_folder import IndexFolder
from dataservice.sources.manifest import PartRecord
from dataservice.sources.part_reader import read_part

READERS = 4
GROUPS_AHEAD = 2

Rows = tuple[pa.Table, LengthTable]


def rows_in_order(
    parts: Sequence[tuple[IndexFolder, PartRecord]], limits: DecodeLimits
) -> Generator[Rows, None, None]:
    """The checked rows of these parts, one row group at a time, as `read_part` gives them. Raises
    what it raises."""
    waiting = iter(parts)
    begun = deque(_Reader(*part, limits) for part in islice(waiting, READERS))
    try:
        while begun:
            yield from begun[0].rows()
            begun.popleft()
            begun.extend(_Reader(*part, limits) for part in islice(waiting, 1))
    finally:
        for reader in begun:
            reader.close()


class _Reader:
    """Reads one part in a thread."""

    def __init__(self, folder: IndexFolder, record: PartRecord, limits: DecodeLimits) -> None:
        self._rows: queue.Queue[Rows | Exception | None] = queue.Queue(GROUPS_AHEAD)
        self._of = (folder, record, limits)
        self._closed = False
        self._thread = threading.Thread(target=self._read, name="index part", daemon=True)
        self._thread.start()

    def rows(self) -> Iterator[Rows]:
        while (rows := self._rows.get()) is not None:
            if isinstance(rows, Exception):
                raise rows
            yield rows

    def close(self) -> None:
        self._closed = True
        while self._thread.is_alive():
            try:  # it may wait for room
                self._rows.get(timeout=0.01)
            except queue.Empty:
                continue

    def _read(self) -> None:
        try:
            for rows in read_part(*self._of):
                if self._closed:
                    return
                self._rows.put(rows)
        except Exception as error:
            self._rows.put(error)
        else:
            self._rows.put(None)
