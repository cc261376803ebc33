"""When an order is overdue: what packs of its job have taken so far says how long one may.

An order waits for what is in line before it at its worker, so its time is judged against the
line; what packs took is what workers say of reading and decoding, without their waiting. A
service whose decoding slows down as a whole slows its own yardstick with it.
"""

# Beyond this multiple of what is expected, an order is overdue.
OVERDUE_FACTOR = 4.0
# No order is overdue sooner, however little it should take.
SOONEST_S = 3.0
# Before the first pack of a job is there: files are opened, codecs and tokenizers loaded.
UNKNOWN_S = 30.0
WEIGHT = 0.1  # of the newest pack in the moving average

# Of all orders, the fraction that may be hedged; and how many at once after a quiet time.
HEDGED_FRACTION = 0.05
MOST_AT_ONCE = 4.0


class Pace:
    """Seconds that a unit of work takes, for each job: a moving average."""

    def __init__(self) -> None:
        self._s_per_work: dict[str, float] = {}

    def note(self, job: str, *, work: float, decode_s: float) -> None:
        """A pack of this much work was read and decoded in so many seconds of one slot."""
        if work > 0:
            newest = decode_s / work
            before = self._s_per_work.get(job, newest)
            self._s_per_work[job] = before + WEIGHT * (newest - before)

    def limit_s(self, job: str, *, line: float) -> float:
        """After so many seconds an order is overdue behind this much work for one slot, its own
        included."""
        s_per_work = self._s_per_work.get(job)
        if s_per_work is None:
            return UNKNOWN_S
        return SOONEST_S + OVERDUE_FACTOR * s_per_work * line

    def forget(self, job: str) -> None:
        """Nothing of the job is in line any more."""
        self._s_per_work.pop(job, None)


class HedgeBudget:
    """How many orders may be hedged now: each order made earns a fraction of one, so that
    hedging never becomes a load of its own."""

    def __init__(self) -> None:
        self._left = MOST_AT_ONCE / 2

    def earn(self, orders: int) -> None:
        """So many orders were made."""
        self._left = min(MOST_AT_ONCE, self._left + HEDGED_FRACTION * orders)

    def spend(self) -> bool:
        """Take one hedge, if there is one."""
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True
