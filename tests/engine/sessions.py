"""Ranks of a job in memory: opened, given their shards, trained, gone."""

import asyncio

from dataservice.core.cursor import Cursor
from dataservice.core.orders import EVERYTHING, RankShard, WantedParts
from dataservice.engine.api import EndOfData, SessionOpened, SkippedSteps
from dataservice.engine.coordinator import Coordinator
from dataservice.state.memory import MemoryStateStore
from tests.engine.support import Books, make_coordinator, make_setup
from tests.waiting import LIMIT_S

START = Cursor()


async def open_rank(
    coordinator: Coordinator,
    rank: int,
    *,
    world: int = 2,
    cursor: Cursor = START,
    rejoin: int = 0,
    job: str = "job",
    launch: str = "",
    reads_loss_weights: bool = True,
) -> SessionOpened:
    return await coordinator.open_session(
        job=job,
        rank=rank,
        world_size=world,
        cursor=cursor,
        client=f"{launch or 'host'}:{rank}",
        rejoin_attempt=rejoin,
        launch=launch,
        reads_loss_weights=reads_loss_weights,
    )


async def open_all(
    coordinator: Coordinator,
    *,
    world: int = 2,
    cursor: Cursor = START,
    rejoin: int = 0,
    job: str = "job",
    launch: str = "",
) -> list[SessionOpened]:
    return await asyncio.gather(
        *(
            open_rank(
                coordinator, r, world=world, cursor=cursor, rejoin=rejoin, job=job, launch=launch
            )
            for r in range(world)
        )
    )


async def shard_of(
    coordinator: Coordinator,
    opened: SessionOpened,
    step: int,
    failed: tuple[str, ...] = (),
    wanted: WantedParts = EVERYTHING,
) -> RankShard | EndOfData:
    got = await coordinator.shard(
        opened.session, step, received_step=step - 1, failed_workers=failed, wanted=wanted
    )
    assert not isinstance(got, SkippedSteps)
    return got


async def train(
    coordinator: Coordinator, sessions: list[SessionOpened], first: int, steps: int
) -> list[RankShard]:
    """Rank 0's shards of these steps, every rank fetching and committing each."""
    shards = []
    for step in range(first, first + steps):
        got = [await shard_of(coordinator, opened, step) for opened in sessions]
        if isinstance(got[0], EndOfData):
            break
        assert len({shard.plan_digest for shard in got}) == 1
        shards.append(got[0])
        for opened in sessions:
            await coordinator.commit(opened.session, step)
    return shards


async def train_until_told(coordinator, sessions, first, steps):
    """Train these steps, and wait for the error that ends the attempt: what workers tell is noted
    in threads, so it may come after the last step."""
    await train(coordinator, sessions, first, steps)
    await asyncio.wait_for(coordinator.session_ended(sessions[0].session), LIMIT_S)


def leave(coordinator, sessions):
    for opened in sessions:
        coordinator.close_session(opened.session)


async def started(*jobs, store=None, books=None, **more):
    """A coordinator with these jobs."""
    setups = [make_setup(name=name, memory_tokens=1024) for name in jobs]
    made = make_coordinator(store or MemoryStateStore(), books or Books(), *setups, **more)
    for name in jobs:
        await made.submit(name, "")
    return made


async def settled(condition):
    async with asyncio.timeout(LIMIT_S):
        while not await condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def only_missing(coordinator, *ranks, job="job"):
    """Wait until an attempt forms that lacks just these ranks: the others have joined it."""

    async def others_are_here():
        (seen,) = (await coordinator.health([job], team=None)).jobs
        return seen.health.missing_ranks == ranks

    await settled(others_are_here)
