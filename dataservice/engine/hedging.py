"""When an order is overdue, by what packs of its job have taken so far, and how many of the overdue
orders may be hedged.

An order waits for the work queued before it at its worker, so its deadline is for that work too.
What packs took is what workers tell of reading and decoding, without the time that packs waited.
If the whole service decodes more slowly, the deadlines grow with it.
"""

from collections.abc import Iterable
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

Work = TypeVar("Work", float, NDArray[np.float64])

# Beyond this multiple of what is expected, an order is overdue.
OVERDUE_FACTOR = 4.0
# No order is overdue sooner, however little work it is.
SOONEST_S = 3.0
# Until the first pack of a job is there: files are opened, codecs and tokenizers loaded.
UNKNOWN_S = 30.0
WEIGHT = 0.1  # of the newest pack in the moving average

# The fraction of all orders that may be hedged, and how many at once after a quiet time.
HEDGED_FRACTION = 0.05
MOST_AT_ONCE = 4.0


class OrderDeadlines:
    """Limits from the seconds that a unit of work takes in each job: a moving average."""

    def __init__(self) -> None:
        self._s_per_work: dict[str, float] = {}

    def note(self, job: str, packs: Iterable[tuple[float, float]]) -> None:
        """Packs were read and decoded: of each its work, and the seconds of one slot."""
        usual = self._s_per_work.get(job)
        for work, decode_s in packs:
            if work > 0:
                newest = decode_s / work
                usual = newest if usual is None else usual + WEIGHT * (newest - usual)
        if usual is not None:
            self._s_per_work[job] = usual

    def limit_s(self, job: str, *, queued_work: Work) -> Work:
        """Seconds after which an order, or each of some, is overdue. `queued_work` is what its slot
        has before it, its own included."""
        s_per_work = self._s_per_work.get(job)
        if s_per_work is None:
            return UNKNOWN_S + 0.0 * queued_work
        return SOONEST_S + OVERDUE_FACTOR * s_per_work * queued_work

    def forget(self, job: str) -> None:
        """No order of the job is open any more."""
        self._s_per_work.pop(job, None)


class HedgeBudget:
    """How many orders may be hedged now. Each order made earns a fraction of a hedge, so that
    hedging never becomes a load of its own."""

    def __init__(self) -> None:
        self._left = MOST_AT_ONCE / 2

    def earn(self, orders: int) -> None:
        """These orders were made."""
        self._left = min(MOST_AT_ONCE, self._left + HEDGED_FRACTION * orders)

    @property
    def left(self) -> bool:
        """Whether `spend` would give one."""
        return self._left >= 1.0

    def spend(self) -> bool:
        """Take one hedge; False where none is left."""
        if not self.left:
            return False
        self._left -= 1.0
        return True
