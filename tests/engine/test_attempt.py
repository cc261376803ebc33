import asyncio

import pytest

from dataservice.core.cursor import Cursor
from dataservice.core.errors import (
    CursorMismatchError,
    FencedError,
    RankClaimedError,
    WorldSizeError,
)
from dataservice.core.topology import Topology
from dataservice.engine.attempt import Attempt
from tests.engine.counted import calls_of

START = Cursor(step=8, position=64)


@pytest.fixture
async def attempt() -> Attempt:
    return Attempt(job="job", number=3, topology=Topology(world_size=2), start=START)


async def test_an_attempt_is_full_once_every_rank_has_joined(attempt):
    attempt.join(0, "a:1", world_size=2, cursor=START)
    assert not attempt.full
    attempt.join(1, "b:1", world_size=2, cursor=START)
    assert attempt.full
    assert attempt.received_by_all == 7


async def test_another_world_size_ends_the_attempt_for_every_rank(attempt):
    attempt.join(0, "a:1", world_size=2, cursor=START)
    waiting = asyncio.create_task(attempt.wait_complete(5.0))
    with pytest.raises(WorldSizeError, match=r"rank 1 .* world size 3, but ranks \[0\] .* 2"):
        attempt.join(1, "b:1", world_size=3, cursor=START)
    with pytest.raises(WorldSizeError):
        await waiting


async def test_ranks_that_resume_at_different_steps_are_refused_with_both_steps(attempt):
    attempt.join(0, "a:1", world_size=2, cursor=START)
    with pytest.raises(CursorMismatchError, match=r"rank 1 .* step 4 .*ranks \[0\] at step 8"):
        attempt.join(1, "b:1", world_size=2, cursor=Cursor(step=4, position=32))
    assert attempt.over


async def test_a_rank_of_many_is_told_both_sides_and_what_to_do():
    ranks = Topology(world_size=9_000)
    attempt = Attempt(job="job", number=3, topology=ranks, start=START)
    for rank in range(8_000):
        attempt.join(rank, f"a:{rank}", world_size=9_000, cursor=START)
    with pytest.raises(CursorMismatchError) as raised:
        attempt.join(8_000, "b", world_size=9_000, cursor=Cursor(step=4, position=32))
    said = str(raised.value)
    assert "resumes at step 4" in said
    assert "13, 14, 15] and 7,984 others at step 8" in said
    assert said.endswith("Load the same checkpoint on every rank.")
    assert len(said) < 1_000


async def test_two_live_clients_cannot_claim_one_rank(attempt):
    claim = attempt.join(0, "a:1", world_size=2, cursor=START)
    with pytest.raises(RankClaimedError, match="held by a:1 in attempt 3; b:1 cannot"):
        attempt.join(0, "b:1", world_size=2, cursor=START)
    assert attempt.connected
    attempt.leave(claim)
    assert not attempt.connected
    assert attempt.join(0, "b:1", world_size=2, cursor=START).client == "b:1"


async def test_who_holds_a_rank_is_known_though_its_former_client_leaves_later(attempt):
    former = attempt.claim(0, "a:1")
    attempt.claim(0, "b:1")
    attempt.leave(former)
    assert (attempt.connected, attempt.clients) == (True, ["b:1"])


def who_is_here(ranks: int) -> list[int]:
    """The calls that asking for it takes, while these ranks are here and once they have left."""
    attempt = Attempt(job="job", number=3, topology=Topology(world_size=ranks), start=START)
    claims = [attempt.claim(rank, f"a:{rank}") for rank in range(ranks)]
    asked = [calls_of(lambda: (attempt.connected, attempt.who))]
    assert attempt.who == "a launch without a name: " + ", ".join(f"a:{k}" for k in range(8))
    for claim in claims:
        attempt.leave(claim)
    assert attempt.who == "a launch without a name: nobody connected"
    return [*asked, calls_of(lambda: (attempt.connected, attempt.who))]


async def test_who_is_here_takes_as_many_calls_of_any_number_of_ranks():
    assert who_is_here(500) == who_is_here(8)


async def test_ranks_that_never_come_are_named(attempt):
    attempt.join(0, "a:1", world_size=2, cursor=START)
    with pytest.raises(WorldSizeError, match=r"ranks \[1\] of 2"):
        await attempt.wait_complete(0.01)


async def test_a_fenced_attempt_tells_everyone_who_waits(attempt):
    waiting = asyncio.create_task(attempt.ended())
    await asyncio.sleep(0)
    attempt.end(FencedError("replaced"))
    with pytest.raises(FencedError, match="replaced"):
        await waiting


async def test_progress_counts_only_once_all_ranks_are_here(attempt):
    first = attempt.join(0, "a:1", world_size=2, cursor=START)
    first.received_step = 20
    assert attempt.received_by_all == 7
    attempt.join(1, "b:1", world_size=2, cursor=START).received_step = 12
    assert attempt.received_by_all == 12
