"""Workers index beside training: which errand gets a place at which worker, and when.

    command line ──errand──▶ desk ──lowest tag of a team──▶ the worker with most room ──▶ answers

Contract. A worker of four slots or fewer carries out one errand at a time, a larger one a quarter
as many as it has slots; they run at the lowest priority of the system, so that decoding goes first.
Teams take turns by the seconds that their errands have taken, over their weights (see
core/fair_share.py), and a team whose decoding is limited has so much of the places. While no worker
serves, errands wait, as ranks do, and whoever asked is told why. An errand whose worker is lost, or
whose process dies, raises WorkerLostError: whoever asked asks again. A caller that leaves ends its
errand.
"""

import asyncio
import math
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field

from dataservice.core.errors import SpecError, WorkerLostError
from dataservice.core.fair_share import FairShare, Run
from dataservice.core.index_orders import (
    IndexAnswer,
    IndexOrder,
    IndexPlaces,
    IndexWaiting,
    index_places,
)
from dataservice.core.ports import WorkerInfo, WorkerLink, WorkerPool
from dataservice.core.quoting import quoted
from dataservice.core.team import TeamShare, full_name
from dataservice.engine.opening import Openings
from dataservice.engine.shares import Shares
from dataservice.engine.tasks import detach

ReadSources = Callable[[str, str, str], Mapping[str, str]]
"""Validate a job file (YAML text, base directory, its team) into what a worker needs of it to index
each source, by the source's name. Raises SpecError."""

LOOK_S = 1.0  # at whether workers have come
PASSED_OVER_S = 10.0  # after a worker was lost, until the pool knows
READ_FOR_S = 60.0  # then the paths that a job file names are judged again
FILES_READ = 16


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Place:
    """A place at a worker, and the team's work there."""

    worker: WorkerInfo
    run: Run


@dataclass(kw_only=True, slots=True, eq=False)
class _Team:
    """A team's errands that wait, those that run, and the seconds that the last one took."""

    waiting: deque["asyncio.Future[_Place]"] = field(default_factory=deque)
    running: int = 0
    last_s: float = 0.0


class IndexDesk:
    """See the module's contract. Used on one event loop."""

    def __init__(
        self,
        *,
        pool: WorkerPool,
        link: WorkerLink,
        read_sources: ReadSources,
        shares: Shares,
        openings: Openings,
    ) -> None:
        self._pool = pool
        self._link = link
        self._read_sources = read_sources
        self._shares = shares
        self._openings = openings
        self._read: dict[tuple[str, str, str], tuple[float, asyncio.Task[Mapping[str, str]]]] = {}
        self._turns: FairShare[str] = FairShare()
        self._teams: dict[str, _Team] = {}
        self._busy: Counter[str] = Counter()
        self._lost_s: dict[str, float] = {}

    async def index(
        self, spec_yaml: str, base_directory: str, *, team: str, source: str, errand: str
    ) -> AsyncGenerator[IndexAnswer, None]:
        """Have an errand over a source of a team's job file carried out, when there is a place."""
        pipelines = await self._pipelines(spec_yaml, base_directory, team)
        if source not in pipelines:
            raise SpecError(
                f"the job file has no source {quoted(source)}; it has {', '.join(pipelines)}."
            )
        waiting: asyncio.Future[_Place] = asyncio.get_running_loop().create_future()
        self._teams.setdefault(team, _Team()).waiting.append(waiting)
        try:
            async for why in self._without_workers(waiting):
                yield IndexWaiting(why=why)
        except BaseException:
            if not waiting.cancel():  # it has just got one
                self._give_back(team, waiting.result())
            raise
        place = waiting.result()
        try:
            yield IndexPlaces(places=self._most(team))
            order = IndexOrder(pipeline=pipelines[source], errand=errand)
            async with aclosing(self._link.index(place.worker, order)) as answers:
                async for answer in answers:
                    yield answer
        except WorkerLostError:
            self._lost_s[place.worker.worker] = _now_s()
            raise
        finally:
            self._give_back(team, place)

    # ---- job files ------------------------------------------------------------------------

    async def _pipelines(self, spec_yaml: str, base: str, team: str) -> Mapping[str, str]:
        """What workers need of a job file, which is read once for the many errands of a run."""
        key, now_s = (spec_yaml, base, team), _now_s()
        read_s, reading = self._read.pop(key, (0.0, None))
        if reading is None or now_s - read_s > READ_FOR_S:
            read_s = now_s
            reading = detach(self._openings.run(team, self._read_sources, spec_yaml, base, team))
        self._read[key] = read_s, reading
        if len(self._read) > FILES_READ:
            del self._read[next(iter(self._read))]
        try:
            return await asyncio.shield(reading)
        except Exception:
            self._read.pop(key, None)  # it may be mended by then
            raise

    # ---- places ---------------------------------------------------------------------------

    async def _without_workers(
        self, waiting: "asyncio.Future[_Place]"
    ) -> AsyncGenerator[str, None]:
        """Ends once there is a place at a worker, in the team's turn. Yields why no worker serves,
        where that is so, whenever it is another reason."""
        told = ""
        while not waiting.done():
            why = "" if self._serving() else self._pool.shortfall()
            if why and why != told:
                yield why
            told = why
            self._hand_out()
            if not waiting.done():
                await asyncio.wait({waiting}, timeout=LOOK_S)

    def _hand_out(self) -> None:
        while (worker := self._roomiest()) is not None:
            for name, team in self._teams.items():
                while team.waiting and team.waiting[0].done():
                    team.waiting.popleft()  # whoever waited has gone
                self._note(name, team)
            now_s = _now_s()
            chosen = self._turns.lowest(now_s)
            if chosen is None:
                return
            team = self._teams[chosen]
            run = Run(started_s=now_s, charged_s=team.last_s)
            self._turns.begin(chosen, run)
            team.running += 1
            self._busy[worker.worker] += 1
            team.waiting.popleft().set_result(_Place(worker=worker, run=run))

    def _note(self, name: str, team: _Team) -> None:
        """A team that has all its places counts as one without work, which earns no credit."""
        if team.waiting and team.running < self._most(name):
            self._turns.wants(name, weight=self._share(name).weight)
        else:
            self._turns.rests(name)

    def _give_back(self, name: str, place: _Place) -> None:
        team, worker = self._teams[name], place.worker.worker
        team.last_s = _now_s() - place.run.started_s
        self._turns.end(name, place.run, team.last_s)
        team.running -= 1
        self._busy[worker] -= 1
        if not self._busy[worker]:
            del self._busy[worker]
        self._note(name, team)
        self._hand_out()

    def _most(self, name: str) -> int:
        """How many errands of a team run at once."""
        places = sum(index_places(worker.slots) for worker in self._serving())
        return max(1, math.floor(self._share(name).limit * places))

    def _share(self, name: str) -> TeamShare:
        return self._shares(full_name(name, "index"))

    def _roomiest(self) -> WorkerInfo | None:
        """The worker with most free places for its slots."""
        soonest_s = _now_s() - PASSED_OVER_S
        self._lost_s = {name: s for name, s in self._lost_s.items() if s > soonest_s}
        free = {
            worker.worker: worker
            for worker in self._serving()
            if self._busy[worker.worker] < index_places(worker.slots)
            and worker.worker not in self._lost_s
        }
        return min(free.values(), key=lambda w: self._busy[w.worker] / w.slots, default=None)

    def _serving(self) -> list[WorkerInfo]:
        return [worker for worker in self._pool.workers() if worker.state == "serving"]


def _now_s() -> float:
    return asyncio.get_running_loop().time()
