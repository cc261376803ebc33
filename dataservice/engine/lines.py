"""Work ordered from each worker and not done, in tokens."""

from dataservice.core.ports import Metrics


class Lines:
    """What is in line at each worker. A line that has emptied is exactly 0 again."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._known: frozenset[str] = frozenset()
        self._orders: dict[str, int] = {}
        self._work: dict[str, float] = {}

    def of(self, worker: str) -> float:
        """The work in line at a worker."""
        return self._work.get(worker, 0.0)

    def all(self) -> dict[str, float]:
        """The lines that are not empty."""
        return dict(self._work)

    def add(self, worker: str, work: float) -> None:
        """An order was made."""
        self._orders[worker] = self._orders.get(worker, 0) + 1
        self._work[worker] = self.of(worker) + work
        self._tell(worker)

    def remove(self, worker: str, work: float) -> None:
        """An order has ended, one way or another."""
        self._orders[worker] -= 1
        self._work[worker] -= work
        if self._orders[worker] == 0:
            del self._orders[worker], self._work[worker]
        self._tell(worker)

    def know(self, workers: frozenset[str]) -> None:
        """These workers live; of no other is anything told to the metrics."""
        self._known = workers

    def _tell(self, worker: str) -> None:
        if worker in self._known:
            self._metrics.work_outstanding(worker, self.of(worker))
