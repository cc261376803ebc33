"""Ranks counted against the files and sockets that the coordinator and workers may have open."""

import asyncio
from dataclasses import replace

import pytest

from dataservice.engine.connection_capacity import A_WORKER, AT_REST
from tests.engine.sessions import open_all, open_rank, settled, started
from tests.engine.support import Books

INSIDE = AT_REST + 2 * A_WORKER  # two workers in the coordinator's own process
PLENTY = 100_000


class Outside(Books):
    """Workers in processes of their own."""

    descriptors = PLENTY

    def workers(self):
        return tuple(replace(each, descriptors=self.descriptors) for each in super().workers())


async def shortage(coordinator, team=None):
    seen = await coordinator.health(["job"], team=team)
    return [found.text for found in seen.jobs[0].findings]


@pytest.mark.parametrize(
    ("books", "limit", "short"),
    [
        (Books, INSIDE + 2 * 7, ""),
        (Books, INSIDE + 2 * 7 - 1, "2 ranks need about 190 open files and sockets at the coord"),
        (Outside, INSIDE + 2, ""),
        (Outside, INSIDE + 1, "2 ranks need about 178 open files and sockets at the coord"),
        (None, PLENTY, "2 ranks need about 166 open files and sockets at w0 and 1 more, which"),
    ],
)
async def test_ranks_are_counted_where_they_connect(books, limit, short):
    made = Outside() if books is None else books()
    if books is None:
        made.descriptors = AT_REST + 1
    coordinator = await started("job", books=made, descriptors=limit)
    assert await shortage(coordinator) == []
    sessions = await open_all(coordinator)
    assert [text[: len(short)] for text in await shortage(coordinator)] == [short] * bool(short)
    for each in sessions:
        coordinator.close_session(each.session)
    assert await shortage(coordinator) == []
    await coordinator.stop()


async def test_ranks_that_are_yet_to_come_are_counted_and_it_is_logged_once(caplog):
    coordinator = await started("job", descriptors=INSIDE + 50)
    opening = [asyncio.create_task(open_rank(coordinator, r, world=1000)) for r in range(3)]

    async def all_wait():
        (seen,) = (await coordinator.health(["job"], team=None)).jobs
        return len(seen.health.missing_ranks) == 997

    await settled(all_wait)
    (text,) = await shortage(coordinator)
    assert "1,000 ranks need about 3,432 open files" in text
    assert "may have 226: the last ranks are not let in. Raise its hard limit to 3,432" in text
    assert [record.getMessage() for record in caplog.records].count(text) == 1
    for each in opening:
        each.cancel()
    await asyncio.gather(*opening, return_exceptions=True)
    await coordinator.stop()
