"""Where the packs of a step are: copies at workers, ordered or ready.

ordered, answered, noted      what nearly every pack goes through: columns, see `Placements`
hedged, lost, refused         a pack that has been through it is an object, see `PackPlacement`
"""

import asyncio
import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from dataservice.core.errors import ServiceError
from dataservice.core.order_columns import PackOrders
from dataservice.core.plan import StepPlan
from dataservice.core.ports import WorkerInfo
from dataservice.engine.affinity import NO_WISHES, PackWishes
from dataservice.engine.delivered import Delivered
from dataservice.engine.reachability import Reachability
from dataservice.engine.waiters import Waiters
from dataservice.planning.kernels.sort import group_stable

# A pack that has been ready for longer, and does not come, is not held up by its decoding.
STREAM_PATIENCE_S = 3.0


@dataclass(slots=True, kw_only=True, eq=False)
class Copy:
    """One order of a pack, at one worker. `queued_work` is what each of the worker's slots had
    before it when it was made, and its own, in tokens; it is `queued` there until it is answered,
    and its receipt is `noted` once whoever records it has done so. `call` is the number of the call
    in which it was ordered, among those of its step."""

    worker: WorkerInfo
    call: int
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

    @property
    def is_due(self) -> bool:
        """A receipt of the pack is on its way, or in the hands of whoever records it."""
        return bool(self.copies) and not any(copy.noted for copy in self.copies.values())


NOWHERE, APART = -1, -2  # in place of a call: of packs without a copy, and of those with objects


class Placements(Sequence[PackPlacement]):
    """The packs of a step. One of which nothing is known but its only copy is a row of columns;
    what is read of it here is made anew, and changes nothing. `own` gives it an object.

    `work` int64[P] in tokens, and `pending` bool[P], whether no worker is known to hold the pack,
    are of all packs. Of those without objects, `call` int32[P] is the call in which their copy was
    ordered, `ordered_s` and `queued_work` float64[P] are as in Copy.
    """

    def __init__(self, work: NDArray[np.int64]) -> None:
        packs = len(work)
        self.work = work
        self.pending = np.ones(packs, bool)
        self.call = np.full(packs, NOWHERE, np.int32)
        self.ordered_s = np.zeros(packs)
        self.queued_work = np.zeros(packs)
        self._ready_s = np.zeros(packs)
        self._queued = np.zeros(packs, bool)
        self._noted = np.zeros(packs, bool)
        self._worker_of_call: list[WorkerInfo] = []
        self._apart: dict[int, PackPlacement] = {}

    def __len__(self) -> int:
        return len(self.work)

    @overload
    def __getitem__(self, place: int) -> PackPlacement: ...
    @overload
    def __getitem__(self, place: slice) -> list[PackPlacement]: ...
    def __getitem__(self, place: int | slice) -> PackPlacement | list[PackPlacement]:
        if isinstance(place, slice):
            return [self[pack] for pack in range(len(self))[place]]
        return self._apart.get(place) or self._made(range(len(self))[place])

    def own(self, pack: int) -> PackPlacement:
        """The pack's own object, for something that its columns have no place for."""
        placement = self._apart.get(pack)
        if placement is None:
            placement = self._apart[pack] = self._made(pack)
            self.call[pack] = APART
        return placement

    @property
    def apart(self) -> Mapping[int, PackPlacement]:
        """Those with objects of their own."""
        return self._apart

    def may_be_tried(self, pack: int) -> bool:
        """Whether the pack may be ordered now."""
        return pack not in self._apart or self._apart[pack].may_be_tried

    def copy_of(self, pack: int, call: int) -> Copy | None:
        """The pack's copy that was ordered in this call, if it still counts. It changes nothing
        where the pack has no object."""
        if self.call[pack] not in (call, APART):
            return None
        copies = self[pack].copies.values()
        return next((copy for copy in copies if copy.call == call), None)

    def begin_call(self, worker: WorkerInfo) -> int:
        """The number of a call in which packs are ordered from this worker."""
        self._worker_of_call.append(worker)
        return len(self._worker_of_call) - 1

    def order(
        self,
        packs: NDArray[np.int64],
        call: int,
        now_s: float,
        queued_work: NDArray[np.float64],
    ) -> None:
        """Packs that are nowhere have each a copy, ordered in this call."""
        self.call[packs] = call
        self.ordered_s[packs] = now_s
        self.queued_work[packs] = queued_work
        self._queued[packs] = True

    def answer(self, packs: NDArray[np.int64], now_s: float) -> int:
        """The copies of these packs, which have no objects, are ready. Returns the work that leaves
        their worker's queue."""
        done = int(self.work[packs[self._queued[packs]]].sum())
        self._queued[packs] = False
        self._ready_s[packs] = now_s
        self.pending[packs] = False
        return done

    def note(self, packs: NDArray[np.int64], call: int) -> None:
        """The receipts of these packs' copies of this call are recorded."""
        self._noted[packs[self.call[packs] == call]] = True
        for pack in packs[self.call[packs] == APART].tolist():
            if (copy := self.copy_of(pack, call)) is not None:
                copy.noted = True

    @property
    def any_due(self) -> bool:
        """Whether some pack's receipt is still to come, or to be recorded."""
        in_columns = ((self.call >= 0) & ~self._noted).any()
        return bool(in_columns) or any(each.is_due for each in self._apart.values())

    def _made(self, pack: int) -> PackPlacement:
        placement = PackPlacement(work=int(self.work[pack]))
        call = int(self.call[pack])
        if call >= 0:
            worker = self._worker_of_call[call]
            placement.copies[worker.worker] = Copy(
                worker=worker,
                call=call,
                ordered_s=float(self.ordered_s[pack]),
                queued_work=float(self.queued_work[pack]),
                hedge=False,
                ready_s=None if self.pending[pack] else float(self._ready_s[pack]),
                queued=bool(self._queued[pack]),
                noted=bool(self._noted[pack]),
            )
        return placement


def grouped(
    packs: NDArray[np.int64], number: NDArray[np.integer[Any]], workers: int
) -> list[NDArray[np.int64]]:
    """Of each of the workers, by number, those of these packs int64[k] that have its number in
    `number` int[k], in their order. O(k + workers)."""
    order, begins = group_stable(number.astype(np.int64), np.arange(len(packs)), workers)
    return [packs[order[first:end]] for first, end in pairwise(begins.tolist())]


@dataclass(slots=True, kw_only=True, eq=False)
class DispatchedStep:
    """The packs of one step, or some of them, as they are ordered, where each is, and what workers
    deliver for it.

    `ordering` lasts until every pack is ordered once, at `ordered_s`;
    `asked` is set once a rank has asked for the step; `wishes` say where its packs had best be.
    `doubted` are (rank, worker): who could not fetch from whom once; `reachability` knows who is
    sent there no more.
    `holder` int32[P] is the place in `workers` of whoever has a pack's best copy, for ranks that
    can reach that worker, and -1 where there is no copy; `numbers` are those places by name.
    `calls` are those in which packs were ordered and that have not ended.
    """

    plan: StepPlan
    orders: PackOrders
    placements: Placements
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
    changed: Waiters = field(default_factory=Waiters)
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

    def numbers_of(self, names: Iterable[str]) -> set[int]:
        """The places of those of these workers that have one."""
        return {self.numbers[name] for name in names if name in self.numbers}

    @property
    def job(self) -> str:
        """The job whose step it is."""
        return self.orders.job

    @property
    def about(self) -> dict[str, str | int]:
        """What log records of this step carry."""
        of = self.orders
        return {"job": of.job, "step": of.step, "trace_id": of.plan_digest}

    @property
    def decoding(self) -> bool:
        """Some pack is at no worker yet."""
        return bool(self.placements.pending.any())

    def packs_by_worker(self) -> dict[str, list[int]]:
        """The places of the packs that each worker has a copy of, rising. O(packs + workers)."""
        # The only copy of a pack is its best one.
        only = np.flatnonzero((self.holder >= 0) & (self.placements.call >= 0))
        names = [worker.worker for worker in self.workers]
        packs = dict(zip(names, grouped(only, self.holder[only], len(names)), strict=True))
        found = {name: own.tolist() for name, own in packs.items()}
        for pack, each in sorted(self.placements.apart.items()):
            for name in each.copies:
                found[name].append(pack)
        return {name: sorted(own) for name, own in found.items() if own}

    def packs_at(self, worker: str) -> list[int]:
        """The places of the packs that are ordered from, or held by, this worker."""
        number = self.numbers.get(worker)
        if number is None:
            return []
        # The only copy of a pack is its best one.
        only = np.flatnonzero((self.holder == number) & (self.placements.call >= 0)).tolist()
        apart = self.placements.apart.items()
        return sorted([*only, *(pack for pack, each in apart if worker in each.copies)])

    async def receipts(self, timeout_s: float) -> None:
        """Wait for the receipts that are still to come, one for each pack."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self.placements.any_due:
                    await self.next_change()

    def note_change(self) -> None:
        """Wake whoever waits for a copy to come, go, or become ready."""
        self.changed.wake()

    async def next_change(self) -> None:
        """Wait for `note_change`."""
        await self.changed.next_change()

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
