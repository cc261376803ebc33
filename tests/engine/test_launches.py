"""One launch's ranks only: the newest launch trains, the older is told."""

import asyncio

import pytest

from dataservice.core.errors import FencedError, QuotaError, RankClaimedError, WorldSizeError
from dataservice.engine import attempts
from dataservice.engine.attempt import Attempt
from dataservice.engine.launches import Launches
from tests.engine.sessions import only_missing, open_all, open_rank, shard_of, train
from tests.engine.support import Books, make_coordinator, make_setup


async def submitted(store):
    coordinator = make_coordinator(store, Books(), make_setup())
    await coordinator.submit("job", "")
    return coordinator


def opening(coordinator, launch, rank):
    return asyncio.create_task(open_rank(coordinator, rank, launch=launch))


async def test_two_launches_that_open_in_turns_never_share_an_attempt(store):
    coordinator = await submitted(store)
    ranks = {}
    for launch, rank, missing in (("X", 0, 1), ("Y", 1, 0)):
        ranks[launch, rank] = opening(coordinator, launch, rank)
        await only_missing(coordinator, missing)
    ranks["X", 1] = opening(coordinator, "X", 1)
    of_x = [await ranks["X", rank] for rank in range(2)]
    ranks["Y", 0] = opening(coordinator, "Y", 0)
    of_y = [await ranks["Y", rank] for rank in range(2)]
    assert {opened.attempt for opened in of_x} == {1}
    assert {opened.attempt for opened in of_y} == {2}
    assert [each.launch for each in store.attempts("job")] == ["X", "Y"]
    for opened in of_x:
        with pytest.raises(FencedError, match=r"launch X: X:0, X:1.*by attempt 2 \(launch Y: Y:0"):
            await coordinator.session_ended(opened.session)
    assert len(await train(coordinator, of_y, 0, 100)) == 13
    await coordinator.stop()


async def test_an_older_launch_that_still_forms_is_told_when_the_newer_begins(store):
    coordinator = await submitted(store)
    older = opening(coordinator, "X", 0)
    await only_missing(coordinator, 1)
    newer = await open_all(coordinator, launch="Y")
    with pytest.raises(FencedError, match=r"that was forming .*launch X: X:0.*launch Y: Y:0, Y:1"):
        await older
    assert {opened.attempt for opened in newer} == {1}
    await coordinator.stop()


async def test_a_newer_launch_that_never_completes_keeps_nobody_from_training(store, monkeypatch):
    wait_complete, x_trains = Attempt.wait_complete, asyncio.Event()

    async def for_as_long_as_it_takes(attempt, timeout_s):
        if attempt.launch == "Y":  # its patience ends once the other launch has begun
            await x_trains.wait()
            timeout_s = 0.01
        await wait_complete(attempt, timeout_s)

    monkeypatch.setattr(Attempt, "wait_complete", for_as_long_as_it_takes)
    coordinator = await submitted(store)
    first = opening(coordinator, "X", 0)
    await only_missing(coordinator, 1)
    stray = opening(coordinator, "Y", 1)
    await only_missing(coordinator, 0)
    sessions = [await open_rank(coordinator, 1, launch="X"), await first]
    assert {opened.attempt for opened in sessions} == {1}
    x_trains.set()
    with pytest.raises(WorldSizeError, match=r"ranks \[0\] of 2 \(launch Y: Y:1\)"):
        await stray
    assert len(await train(coordinator, sessions[::-1], 0, 100)) == 13
    await coordinator.stop()


async def test_late_ranks_of_a_launch_that_was_replaced_fence_nobody(store):
    coordinator = await submitted(store)
    late = opening(coordinator, "X", 0)
    await only_missing(coordinator, 1)
    sessions = await open_all(coordinator, launch="Y")
    with pytest.raises(FencedError):
        await late
    for rank in range(2):
        with pytest.raises(FencedError, match=r"launch X .* was replaced by attempt 1 \(launch Y"):
            await open_rank(coordinator, rank, launch="X")
    assert len(await train(coordinator, sessions, 0, 100)) == 13
    await coordinator.stop()


async def test_so_many_launches_of_a_job_wait_for_their_ranks_and_no_more(store, monkeypatch):
    monkeypatch.setattr(attempts, "MOST_FORMING", 2)
    coordinator = await submitted(store)
    older = opening(coordinator, "X", 0)
    await only_missing(coordinator, 1)
    newer = opening(coordinator, "Y", 1)
    await only_missing(coordinator, 0)
    with pytest.raises(QuotaError, match="2 starts of job 'job' wait for ranks"):
        await open_rank(coordinator, 0, launch="Z")
    sessions = [await open_rank(coordinator, 0, launch="Y"), await newer]
    assert {opened.attempt for opened in sessions} == {1}
    with pytest.raises(FencedError):
        await older
    await coordinator.stop()


async def test_a_job_begins_so_often_and_no_more(store, monkeypatch):
    monkeypatch.setattr(attempts, "MOST_ATTEMPTS", 2)
    coordinator = await submitted(store)
    for launch in ("X", "Y"):
        sessions = await open_all(coordinator, launch=launch)
    with pytest.raises(QuotaError, match="has begun 2 times, and no more"):
        await open_all(coordinator, launch="Z")
    assert len(store.attempts("job")) == 2
    assert len(await train(coordinator, sessions, 0, 100)) == 13  # the last one goes on
    await coordinator.stop()


def test_of_many_launches_the_last_thousand_keep_their_order():
    launches = Launches()
    for number in range(1500):
        launches.see(f"launch {number}")
    launches.renew("launch 700")
    launches.see("launch 800")
    assert launches.replaces("launch 700", "launch 1499")
    assert launches.replaces("launch 1499", "launch 800")
    assert not launches.replaces("launch 800", "launch 1499")
    for unknown in ("launch 400", "", "another"):
        assert not launches.replaces(unknown, "launch 1499")
        assert not launches.replaces("launch 1499", unknown)


async def test_the_order_of_launches_outlives_the_coordinator(store):
    first = await submitted(store)
    await open_all(first, launch="X")
    await open_all(first, launch="Y")
    await first.stop()
    second = make_coordinator(store, Books(), make_setup())
    await second.start()
    await second.restored()
    sessions = await open_all(second, rejoin=2, launch="Y")
    with pytest.raises(FencedError, match=r"launch X .* was replaced by attempt 2"):
        await open_rank(second, 0, launch="X")
    with pytest.raises(FencedError, match=r"X:0 \(launch X\) comes back to attempt 2 .*another"):
        await open_rank(second, 0, rejoin=2, launch="X")
    assert len(await train(second, sessions, 0, 100)) == 13
    await second.stop()


async def test_a_launch_takes_over_from_one_whose_ranks_still_look_alive(store):
    coordinator = await submitted(store)
    old = await open_all(coordinator, launch="X")
    new = await open_all(coordinator, launch="Y")
    with pytest.raises(FencedError):
        await shard_of(coordinator, old[0], 0)
    assert len(await train(coordinator, new, 0, 100)) == 13
    await coordinator.stop()


async def test_a_launch_may_come_back_once_the_newer_one_is_gone(store):
    coordinator = await submitted(store)
    for launch in ("X", "Y", "X", "Y"):
        sessions = await open_all(coordinator, launch=launch)
        for opened in sessions:
            coordinator.close_session(opened.session)
    assert [each.launch for each in store.attempts("job")] == ["X", "Y", "X", "Y"]
    await coordinator.stop()


async def test_every_pass_of_one_launch_is_an_attempt_of_its_own(store):
    coordinator = await submitted(store)
    for number in (1, 2):
        sessions = await open_all(coordinator, launch="X")
        assert {opened.attempt for opened in sessions} == {number}
        with pytest.raises(RankClaimedError):
            await open_rank(coordinator, 1, launch="X")
        for opened in sessions:
            coordinator.close_session(opened.session)
    await coordinator.stop()


async def test_ranks_whose_launch_has_no_name_train_among_themselves(store):
    coordinator = await submitted(store)
    named = opening(coordinator, "X", 0)
    await only_missing(coordinator, 1)
    sessions = await open_all(coordinator)
    with pytest.raises(RankClaimedError):
        await open_rank(coordinator, 0)
    assert [each.launch for each in store.attempts("job")] == [""]
    named.cancel()
    assert len(await train(coordinator, sessions, 0, 100)) == 13
    await coordinator.stop()
