"""Where the packs of a step are: copies at workers, ordered or ready."""

import asyncio
import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from dataservice.core.errors import ServiceError
from dataservice.core.order_columns import PackOrders
from dataservice.core.plan import StepPlan
from dataservice.core.ports import WorkerInfo
from dataservice.engine.affinity import NO_WISHES, PackWishes
from dataservice.engine.delivered import Delivered
from dataservice.engine.reachability import Reachability

# A pack that has been ready for longer, and does not come, is not held up by its decoding.
STREAM_PATIENCE_S = 3.0


@dataclass(slots=True, kw_only=True, eq=False)
class Copy:
    """One order of a pack, at one worker. `queued_work` is what each of the worker's slots had
    before it when it was made, and its own, in tokens; it is `queued` there until it is answered,
    and its receipt is `noted` once whoever records it has done so."""

    worker: WorkerInfo
    ordered_s: float
    queued_work: float
    hedge: bool
    ready_s: float | None = None
    queued: bool = True
    noted: bool = False

    @property
    def ready(self) -> bool:
        """The worker has said that it holds the pack."""
        return self.ready_s is not None


@dataclass(slots=True, kw_only=True, eq=False)
class PackPlacement:
    """A pack, its `work` in tokens, and its copies by worker, oldest first. `tries` is how many
    orders in a row have failed, `error` why the last one did, `failure` the same once they are too
    many."""

    work: int
    copies: dict[str, Copy] = field(default_factory=dict)
    tries: int = 0
    not_before_s: float = 0.0
    error: ServiceError | None = None
    failure: ServiceError | None = None

    @property
    def ready(self) -> bool:
        """Some worker holds it."""
        return any(copy.ready for copy in self.copies.values())

    @property
    def may_be_tried(self) -> bool:
        """Its orders have not failed too often, and the pause after the last failure is over."""
        return self.failure is None and asyncio.get_running_loop().time() >= self.not_before_s


def _is_due(placement: PackPlacement) -> bool:
    """A receipt of the pack is on its way, or in the hands of whoever records it."""
    for copy in placement.copies.values():
        if copy.noted:
            return False
    return bool(placement.copies)


@dataclass(slots=True, kw_only=True, eq=False)
class DispatchedStep:
    """The packs of one step, or some of them, as they are ordered, where each is, and what workers
    deliver for it.

    `ordering` lasts until every pack is ordered once, at `ordered_s`;
    `asked` is set once a rank has asked for the step; `pending` are the packs that no worker is
    known to hold, and `wishes` say where they had best be. `doubted` are (rank, worker): who could
    not fetch from whom once; `reachability` knows who is sent there no more.
    `holder` int32[P] is the place in `workers` of whoever has a pack's best copy, for ranks that
    can reach all of them, and -1 where there is no copy; `numbers` are those places by name.
    `calls` are those in which packs were ordered and that have not ended.
    """

    plan: StepPlan
    orders: PackOrders
    placements: list[PackPlacement]
    pending: set[int]
    reachability: Reachability
    delivered: Delivered
    wishes: PackWishes = NO_WISHES
    ordering: bool = True
    ordered_s: float = 0.0
    asked: bool = False
    released: bool = False
    workers: list[WorkerInfo] = field(default_factory=list)
    holder: NDArray[np.int32] = field(init=False)
    numbers: dict[str, int] = field(default_factory=dict)
    doubted: set[tuple[int, str]] = field(default_factory=set)
    waiters: list[asyncio.Future[None]] = field(default_factory=list)
    calls: set[asyncio.Task[None]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.holder = np.full(len(self.placements), -1, dtype=np.int32)

    def note_holder(self, pack: int) -> None:
        """The copies of a pack have changed."""
        best: Copy | None = None
        for copy in self.placements[pack].copies.values():
            if best is None or copy.ready >= best.ready:  # of equals, the one ordered last
                best = copy
        self.holder[pack] = -1 if best is None else self.number_of(best.worker)

    def number_of(self, worker: WorkerInfo) -> int:
        """The place of a worker in `workers`."""
        number = self.numbers.get(worker.worker)
        if number is None:
            number = self.numbers[worker.worker] = len(self.workers)
            self.workers.append(worker)
        return number

    @property
    def job(self) -> str:
        """The job whose step it is."""
        return self.orders.job

    @property
    def about(self) -> dict[str, str | int]:
        """What log records of this step carry."""
        of = self.orders
        return {"job": of.job, "step": of.step, "trace_id": of.plan_digest}

    def packs_by_worker(self) -> dict[str, list[int]]:
        """The places of the packs that each worker has a copy of."""
        packs: dict[str, list[int]] = {}
        for pack, placement in enumerate(self.placements):
            for worker in placement.copies:
                packs.setdefault(worker, []).append(pack)
        return packs

    async def receipts(self, timeout_s: float) -> None:
        """Wait for the receipts that are still to come, one for each pack."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while due := next(filter(_is_due, self.placements), None):
                    # Looked for again only once this one has come: changes are many.
                    while _is_due(due):
                        await self.next_change()

    def has_pack_at(self, worker: str) -> bool:
        """Whether some pack is ordered from, or held by, this worker."""
        return any(worker in placement.copies for placement in self.placements)

    def note_change(self) -> None:
        """Wake whoever waits for a copy to come, go, or become ready."""
        waiters, self.waiters = self.waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def next_change(self) -> None:
        """Wait for `note_change`."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.waiters.append(waiter)
        await waiter

    def avoid_slow(self, rank: int, workers: Iterable[str], packs: Iterable[int]) -> None:
        """Nothing came to a rank from these workers for a while. It avoids those at which one of
        its packs has been ready for long enough."""
        now_s = asyncio.get_running_loop().time()
        slow = set(workers)
        for copy in (copy for pack in packs for copy in self.placements[pack].copies.values()):
            ready_s = now_s if copy.ready_s is None else copy.ready_s
            if copy.worker.worker in slow and now_s - ready_s >= STREAM_PATIENCE_S:
                self.reachability.avoid(rank, copy.worker.worker)

    def doubt(self, rank: int, worker: str) -> bool:
        """The rank could not fetch from this worker. The first time says little: the worker may
        have died, or the pack may have been moved meanwhile. The second time, the rank avoids the
        worker. Returns whether it is the first."""
        first = (rank, worker) not in self.doubted
        self.doubted.add((rank, worker))
        if not first:
            self.reachability.avoid(rank, worker)
        return first

    def reachable(self, pack: int, rank: int) -> list[Copy]:
        """The copies at workers that the rank does not avoid."""
        copies = self.placements[pack].copies
        return [copy for name, copy in copies.items() if not self.reachability.avoids(rank, name)]

    def best_copy(self, pack: int, rank: int, alive: Mapping[str, WorkerInfo]) -> Copy | None:
        """The copy that this rank can probably fetch first: at a worker that it can reach, then at
        one that answers, then a copy that is ready; of equals, the one ordered last."""

        def doubts(copy: Copy) -> tuple[bool, bool, bool]:
            info = alive.get(copy.worker.worker)
            silent = info is None or info.state == "silent"
            return self.reachability.avoids(rank, copy.worker.worker), silent, not copy.ready

        newest_first = reversed(self.placements[pack].copies.values())
        return min(newest_first, key=doubts, default=None)
