"""Where the packs of a step are: copies at workers, ordered or ready."""

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from dataservice.core.errors import ServiceError
from dataservice.core.orders import PackKey, PackOrder
from dataservice.core.plan import StepPlan
from dataservice.core.ports import WorkerInfo
from dataservice.engine.reach import Reach

# A pack that has been ready so long and does not come is not held up by its decoding.
STREAM_PATIENCE_S = 3.0


@dataclass(slots=True, kw_only=True, eq=False)
class Copy:
    """One order of a pack, at one worker. `line` is the work that was before it there for each
    of the worker's slots, and its own."""

    worker: WorkerInfo
    ordered_s: float
    line: float
    hedge: bool
    task: asyncio.Task[None] | None = None
    ready_s: float | None = None

    @property
    def ready(self) -> bool:
        """The worker has said that it holds the pack."""
        return self.ready_s is not None


@dataclass(slots=True, kw_only=True, eq=False)
class PackPlace:
    """A pack and its copies by worker, oldest first. `tries` is how often in a row an order
    has failed, `failure` the last reason once that is too often."""

    order: PackOrder
    work: float
    copies: dict[str, Copy] = field(default_factory=dict)
    tries: int = 0
    not_before_s: float = 0.0
    failure: ServiceError | None = None

    @property
    def ready(self) -> bool:
        """Some worker holds it."""
        return any(copy.ready for copy in self.copies.values())


@dataclass(slots=True, kw_only=True, eq=False)
class DispatchedStep:
    """The packs of one step and where each is.

    `asked` once a rank has asked for the step; `pending` are the packs that no worker is known
    to hold. `doubted` are (rank, worker): who could not fetch from whom once; `reach` knows who
    is sent there no more.
    """

    plan: StepPlan
    places: list[PackPlace]
    pending: set[int]
    reach: Reach
    asked: bool = False
    released: bool = False
    doubted: set[tuple[int, str]] = field(default_factory=set)
    waiters: list[asyncio.Future[None]] = field(default_factory=list)

    @property
    def job(self) -> str:
        """The job whose step it is."""
        return self.places[0].order.key.job

    @property
    def keys(self) -> list[PackKey]:
        """The names of its packs."""
        return [place.order.key for place in self.places]

    @property
    def about(self) -> dict[str, str | int]:
        """What log records of this step carry."""
        digest = self.places[0].order.key.plan_digest
        return {"job": self.job, "step": self.plan.step, "trace_id": digest}

    def has_pack_at(self, worker: str) -> bool:
        """Whether some pack is ordered from, or held by, this worker."""
        return any(worker in place.copies for place in self.places)

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
        """Nothing came to a rank from these workers for a while. It avoids those where a pack
        of its has been ready long enough."""
        now_s = asyncio.get_running_loop().time()
        slow = set(workers)
        for copy in (copy for pack in packs for copy in self.places[pack].copies.values()):
            ready_s = now_s if copy.ready_s is None else copy.ready_s
            if copy.worker.worker in slow and now_s - ready_s >= STREAM_PATIENCE_S:
                self.reach.avoid(rank, copy.worker.worker)

    def doubt(self, rank: int, worker: str) -> bool:
        """The rank could not fetch from this worker. The first time says little: the worker may
        have died, or the pack may have been moved meanwhile. Whether it is the first time; the
        second, the rank avoids the worker."""
        first = (rank, worker) not in self.doubted
        self.doubted.add((rank, worker))
        if not first:
            self.reach.avoid(rank, worker)
        return first

    def reachable(self, pack: int, rank: int) -> list[Copy]:
        """The copies at workers that the rank does not avoid."""
        copies = self.places[pack].copies
        return [copy for name, copy in copies.items() if not self.reach.avoids(rank, name)]

    def best_copy(self, pack: int, rank: int, alive: Mapping[str, WorkerInfo]) -> Copy | None:
        """The copy that this rank will have soonest, as far as one can tell: at a worker that
        it can reach and that answers, ready, else the one ordered last."""

        def doubts(copy: Copy) -> tuple[bool, bool, bool]:
            info = alive.get(copy.worker.worker)
            silent = info is None or info.state == "silent"
            return self.reach.avoids(rank, copy.worker.worker), silent, not copy.ready

        newest_first = reversed(self.places[pack].copies.values())
        return min(newest_first, key=doubts, default=None)
