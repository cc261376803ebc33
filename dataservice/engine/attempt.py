"""One start of a job's trainers: who holds which rank, and how far each has come.

Contract. An attempt *forms* while its ranks open; it is complete when all have, at one
cursor and one world size. A rank that contradicts the others fails the whole attempt, and
every waiting rank is told why. A complete attempt lives until a newer one fences it. A
claim lives as long as its client's stream; giving it up frees the rank and changes nothing
else.
"""

import asyncio
import contextlib
import secrets
from collections.abc import Callable, Collection, Mapping
from copy import copy
from dataclasses import dataclass, field, replace
from heapq import nsmallest
from itertools import islice
from operator import attrgetter
from typing import NoReturn

from dataservice.core.cursor import Cursor
from dataservice.core.errors import (
    CursorMismatchError,
    RankClaimedError,
    ServiceError,
    WorldSizeError,
)
from dataservice.core.orders import EVERYTHING, WantedParts
from dataservice.core.tickets import holder_of
from dataservice.core.topology import Topology
from dataservice.core.whereabouts import ANYWHERE, Whereabouts
from dataservice.engine.tasks import retrieve_error
from dataservice.engine.waiters import Waiters

NAMED_RANKS = 16  # of a message, which each of thousands of ranks gets


@dataclass(kw_only=True, slots=True)
class Claim:
    """A rank held by a client, for as long as it is `live`; `where` it is, as it says, and which
    parts it `wanted` the last time. The two steps only grow. Tickets name it as their `holder`."""

    session: str
    rank: int
    client: str
    received_step: int
    committed_step: int
    where: Whereabouts = ANYWHERE
    wanted: WantedParts = EVERYTHING
    live: bool = True
    holder: str = field(init=False)

    def __post_init__(self) -> None:
        self.holder = holder_of(self.session)


class Attempt:
    """The claims of one attempt and its life: forming, complete, over. All its ranks are of
    one `launch`, and it goes by one version of the job file."""

    def __init__(
        self,
        *,
        job: str,
        number: int,
        topology: Topology,
        start: Cursor,
        trained_step: int | None = None,
        launch: str = "",
        spec_version: int = 1,
    ) -> None:
        """`trained_step` is the last that every rank is known to have trained, where the
        attempt is restored. `reads_loss_weights` turns False once a rank joins that does not."""
        self.job = job
        self.number = number
        self.topology = topology
        self.start = start
        self.launch = launch
        self.spec_version = spec_version
        self.trained_step = start.step - 1 if trained_step is None else trained_step
        self.claims: dict[int, Claim] = {}
        self._connected: set[int] = set()
        self._received = _Least(attrgetter("received_step"))
        self._committed = _Least(attrgetter("committed_step"))
        self.reads_loss_weights = True
        self._begun_s = asyncio.get_running_loop().time()
        self._complete = False
        self._changed = Waiters()  # it is complete, or over: thousands of ranks wait
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._over.add_done_callback(retrieve_error)

    def join(
        self,
        rank: int,
        client: str,
        *,
        world_size: int,
        cursor: Cursor,
        where: Whereabouts = ANYWHERE,
    ) -> Claim:
        """Claim a rank of a forming attempt. A contradiction ends the attempt for all."""
        if world_size != self.topology.world_size:
            raise self.end(
                WorldSizeError(
                    f"rank {rank} of job {self.job!r} opened with world size {world_size}, but "
                    f"{_some_ranks(self.claims)} opened with {self.topology.world_size}. "
                    "Start all ranks with one world size."
                )
            )
        # Both fit the job; its order may have grown since the first came, by a source added.
        if replace(cursor, order=self.start.order) != self.start:
            raise self.end(
                CursorMismatchError(
                    f"rank {rank} of job {self.job!r} resumes at step {cursor.step} "
                    f"({cursor.to_json()}), {_some_ranks(self.claims)} at step "
                    f"{self.start.step} ({self.start.to_json()}). Load the same checkpoint on "
                    "every rank."
                )
            )
        self.refuse_if_claimed(rank, client)
        return self.claim(rank, client, where)

    def claim(self, rank: int, client: str, where: Whereabouts = ANYWHERE) -> Claim:
        """Hand the rank to this client, whoever held it."""
        before = self.trained_step
        held = self.claims.get(rank)
        claim = Claim(
            session=secrets.token_urlsafe(16),
            rank=rank,
            client=client,
            received_step=held.received_step if held else before,
            committed_step=held.committed_step if held else before,
            where=where,
        )
        self.claims[rank] = claim
        self._connected.add(rank)
        return claim

    def leave(self, claim: Claim) -> None:
        """The claim's client is gone: another may have the rank."""
        claim.live = False
        if self.claims.get(claim.rank) is claim:
            self._connected.discard(claim.rank)

    def refuse_if_claimed(self, rank: int, client: str) -> None:
        """Raises RankClaimedError where another live client holds the rank."""
        held = self.claims.get(rank)
        if held is not None and held.live:
            raise RankClaimedError(
                f"rank {rank} of job {self.job!r} is held by {held.client} in attempt "
                f"{self.number}; {client} cannot have it too. Give each process its own RANK, "
                "or stop the other client: its claim ends with its connection."
            )

    @property
    def about(self) -> dict[str, str | int]:
        """What log records of this attempt carry."""
        return {"job": self.job, "attempt": self.number}

    @property
    def full(self) -> bool:
        """Every rank has a claim."""
        return len(self.claims) == self.topology.world_size

    @property
    def replicas_at(self) -> list[Whereabouts]:
        """Where each replica is: its first rank, as a node nearly always has all of them."""
        ranks = range(0, self.topology.world_size, self.topology.ranks_per_replica)
        claims = map(self.claims.get, ranks)
        return [ANYWHERE if claim is None else claim.where for claim in claims]

    @property
    def connected(self) -> bool:
        """Some client holds a rank now."""
        return bool(self._connected)

    @property
    def clients(self) -> list[str]:
        """The clients that hold a rank now. O(ranks)."""
        return sorted({claim.client for claim in self.claims.values() if claim.live})

    @property
    def who(self) -> str:
        """Its launch and some of its clients, for messages."""
        launch = f"launch {self.launch}" if self.launch else "a launch without a name"
        # Of few: each rank of a launch that was replaced is told.
        some = sorted({self.claims[rank].client for rank in islice(self._connected, 8)})
        return f"{launch}: {', '.join(some) or 'nobody connected'}"

    @property
    def missing(self) -> tuple[int, ...]:
        """The ranks that no client holds."""
        return tuple(rank for rank in range(self.topology.world_size) if rank not in self.claims)

    @property
    def age_s(self) -> float:
        """Seconds since its first rank came."""
        return asyncio.get_running_loop().time() - self._begun_s

    @property
    def failure(self) -> str:
        """Why it is over; empty while it is not."""
        return str(self._over.exception()) if self.over else ""

    def complete_now(self) -> None:
        """Let the ranks go on: all are here, or the attempt is restored and they will rejoin."""
        self._complete = True
        self._changed.wake()

    @property
    def complete(self) -> bool:
        """All ranks have opened and the attempt is durable."""
        return self._complete

    @property
    def over(self) -> bool:
        """A newer attempt, a contradiction or the job's deletion has ended it."""
        return self._over.done()

    def end(self, reason: ServiceError) -> ServiceError:
        """End the attempt; everyone who waits on it gets `reason`, which is returned."""
        if not self._over.done():
            self._over.set_exception(copy(reason))
            self._changed.wake()
        return reason

    def when_over(self, call: Callable[[], None]) -> None:
        """Call this once the attempt is over."""
        self._over.add_done_callback(lambda _: call())

    async def ended(self) -> NoReturn:
        """Wait for the end. Raises its reason."""
        while not self.over:
            await self._changed.next_change()
        raise self._reason()

    def _reason(self) -> BaseException:
        """Why it is over, as a new error for each who is told: an error that was raised keeps the
        frames that it came through, which hold the job, which holds this attempt."""
        reason = self._over.exception()
        assert reason is not None, "an attempt ends with a reason"
        return copy(reason)

    async def wait_complete(self, timeout_s: float) -> None:
        """Wait until all ranks have opened. Raises the reason where the attempt ends before, and
        WorldSizeError, which names those that are missing, where they do not come in time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not (self.complete or self.over):
                    await self._changed.next_change()
        if self.over:
            raise self._reason()
        if not self.complete:
            raise self.end(
                WorldSizeError(
                    f"job {self.job!r} waited {timeout_s:.0f} s for {_some_ranks(self.missing)} "
                    f"of {self.topology.world_size} ({self.who}). Start every rank, all by one "
                    "launcher, or lower the world size; where a launcher gives its ranks different "
                    "names, set DATASERVICE_LAUNCH alike on all."
                )
            )

    @property
    def received_by_all(self) -> int:
        """The last step whose bytes have reached every rank."""
        return self._received.among(self.claims) if self.full else self.trained_step

    @property
    def committed_by_all(self) -> int:
        """The last step that every rank has trained."""
        return self._committed.among(self.claims) if self.full else self.trained_step


class _Least:
    """The least of a step that claims have, which only grows. It is looked for anew once every
    claim that it was found at has moved on: so a call of each of n ranks costs O(n) in all."""

    def __init__(self, step_of: Callable[[Claim], int]) -> None:
        self._step_of = step_of
        self._step = 0
        self._behind: list[Claim] = []

    def among(self, claims: Mapping[int, Claim]) -> int:
        """The least step."""
        while self._behind:
            claim = self._behind[-1]
            if claims.get(claim.rank) is claim and self._step_of(claim) == self._step:
                return self._step
            self._behind.pop()
        self._step = min(map(self._step_of, claims.values()))
        self._behind = [claim for claim in claims.values() if self._step_of(claim) == self._step]
        return self._step


def _some_ranks(ranks: Collection[int]) -> str:
    """These ranks for a message: the lowest, and how many others."""
    named = nsmallest(NAMED_RANKS, ranks)
    others = f" and {len(ranks) - len(named):,} others" if len(ranks) > len(named) else ""
    return f"ranks {named}{others}"
