"""A team's share as its packs' orders carry it."""

import asyncio

import pytest

from dataservice.core.cursor import Cursor
from dataservice.core.team import TeamShare, TeamSpec
from dataservice.engine.shares import Shares
from dataservice.state.memory import MemoryStateStore
from tests.engine.support import Books, make_coordinator, make_setup


@pytest.mark.parametrize(
    ("spec", "share"),
    [
        (TeamSpec(), TeamShare(weight=1.0, limit=1.0)),
        (TeamSpec(weight=2.5), TeamShare(weight=2.5, limit=1.0)),
        (TeamSpec(max_decode_cpus=0.5), TeamShare(limit=0.25)),
        (TeamSpec(max_decode_cpus=64), TeamShare(limit=1.0)),
    ],
)
def test_cpus_become_a_fraction_of_all_workers_slots(spec, share):
    shares = Shares(teams=lambda: {"vision": spec}, pool=Books(alive=["w0", "w1"]))
    assert shares("vision/job") == share
    assert shares("audio/job") == shares("job") == TeamShare()


def test_a_share_follows_the_teams_and_the_workers_as_they_change():
    books, teams = Books(alive=["w0"]), {}
    shares = Shares(teams=lambda: teams, pool=books)
    assert shares("vision/job").weight == 1.0
    teams["vision"] = TeamSpec(weight=3.0, max_decode_cpus=1)
    assert shares("vision/job") == TeamShare(weight=3.0, limit=1.0)
    books.alive.append("w1")
    assert shares("vision/job").limit == 0.5


async def test_every_order_of_a_job_carries_its_team_s_share(monkeypatch):
    books, seen = Books(), []
    prepare = books.prepare

    async def noted(worker, order):
        seen.append(order.share)
        return await prepare(worker, order)

    monkeypatch.setattr(books, "prepare", noted)
    setup = make_setup(name="vision/job", memory_tokens=2048)
    teams = {"vision": TeamSpec(weight=2.0, max_decode_cpus=1)}
    coordinator = make_coordinator(MemoryStateStore(), books, setup, teams=lambda: teams)
    await coordinator.start()
    await coordinator.submit("vision/job", "")
    opened = await coordinator.open_session(
        job="vision/job", rank=0, world_size=1, cursor=Cursor(), client="h:1", rejoin_attempt=0
    )
    await coordinator.shard(opened.session, 0, received_step=-1, failed_workers=())
    async with asyncio.timeout(120):
        while not seen:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    await coordinator.stop()
    assert set(seen) == {TeamShare(weight=2.0, limit=0.5)}


async def test_a_client_that_says_it_received_what_never_was_moves_no_window():
    setup = make_setup(name="vision/job", memory_tokens=2048)
    coordinator = make_coordinator(MemoryStateStore(), Books(), setup)
    await coordinator.start()
    await coordinator.submit("vision/job", "")
    opened = await coordinator.open_session(
        job="vision/job", rank=0, world_size=1, cursor=Cursor(), client="h:1", rejoin_attempt=0
    )
    await coordinator.shard(opened.session, 0, received_step=-1, failed_workers=())
    await coordinator.shard(opened.session, 0, received_step=2**62, failed_workers=())
    await asyncio.sleep(0.3)
    planned = (await coordinator.job("vision/job")).planned_step
    await coordinator.stop()
    assert planned <= 2 * setup.ready_steps + 1
