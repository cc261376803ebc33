"""A step that every rank has trained is written once, whoever commits meanwhile."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any, cast

import pytest

from dataservice.core.cursor import Cursor
from dataservice.core.errors import StateError
from dataservice.core.plan import StepTime
from dataservice.core.ports import NoMetrics
from dataservice.core.topology import Topology
from dataservice.engine.attempt import Attempt, Claim
from dataservice.engine.commits import Commits
from dataservice.engine.skips import Skips
from tests.waiting import LIMIT_S, settled, until

RANKS = 64
Claims = Callable[[], tuple[Attempt, list[Claim]]]


class SlowStore:
    """Records whose writes wait until they are let go."""

    def __init__(self, fails: bool = False) -> None:
        self.begun: list[tuple[int, float | None]] = []
        self.go = threading.Event()
        self._fails = fails

    def trained(self, step: int, measured_s: float | None) -> StepTime | None:
        self.begun.append((step, measured_s))
        assert self.go.wait(LIMIT_S)
        if self._fails:
            raise StateError("the disk is full")
        return None


@pytest.fixture
def claims_of() -> Claims:
    def made() -> tuple[Attempt, list[Claim]]:
        attempt = Attempt(job="job", number=1, topology=Topology(world_size=RANKS), start=Cursor())
        claims = [attempt.claim(rank, f"client {rank}") for rank in range(RANKS)]
        attempt.complete_now()
        return attempt, claims

    return made


def commits_of(attempt: Attempt, store: SlowStore) -> Commits:
    skips = Skips([], attempt=1)
    return Commits(attempt, records=cast(Any, store), metrics=NoMetrics(), skips=skips)


async def test_ranks_that_commit_while_the_store_is_slow_cause_no_writes_of_their_own(
    claims_of: Claims,
) -> None:
    attempt, claims = claims_of()
    store = SlowStore()
    commits = commits_of(attempt, store)
    first = [asyncio.create_task(commits.note(claim, 0, 1.0, None)) for claim in claims]
    await until(lambda: store.begun)
    later = [asyncio.create_task(commits.note(claim, 1, 2.0, None)) for claim in claims]
    await settled()
    assert store.begun == [(0, 1.0)]
    store.go.set()
    await asyncio.gather(*first, *later)
    assert (store.begun, commits.through_step) == ([(0, 1.0), (1, 2.0)], 1)


async def test_a_write_goes_on_without_those_who_asked_and_may_be_waited_for(
    claims_of: Claims,
) -> None:
    attempt, claims = claims_of()
    store = SlowStore()
    commits = commits_of(attempt, store)
    asked = [asyncio.create_task(commits.note(claim, 0, None, None)) for claim in claims]
    await until(lambda: store.begun)
    for each in asked:
        each.cancel()
    await asyncio.gather(*asked, return_exceptions=True)
    stopped = asyncio.create_task(commits.written())
    await settled()
    assert not stopped.done()
    store.go.set()
    await stopped
    assert commits.through_step == 0


async def test_all_who_wait_hear_that_a_step_cannot_be_written(
    claims_of: Claims,
) -> None:
    attempt, claims = claims_of()
    store = SlowStore(fails=True)
    store.go.set()
    commits = commits_of(attempt, store)
    for claim in claims[:-1]:
        await commits.note(claim, 0, None, None)
    told = await asyncio.gather(
        commits.note(claims[-1], 0, None, None),
        commits.note(claims[0], 1, None, None),
        return_exceptions=True,
    )
    assert [str(error) for error in told] == ["the disk is full"] * 2
    assert commits.through_step == -1
