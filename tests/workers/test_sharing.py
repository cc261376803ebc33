"""Teams share a worker's slots: real threads that sleep, counted in the seconds they took."""

import asyncio
import itertools
import time

import numpy as np
import pytest

from dataservice.core.sample import DecodedSample, RawSample
from dataservice.core.team import TeamShare
from dataservice.workers.host import DecodingHost
from dataservice.workers.sample_pipelines import PipelineFactory
from dataservice.workers.thread_decoders import ThreadDecoders
from tests.workers.trouble import an_order

SLOTS = 2
PACKS_AHEAD = 6
SLEEP_S = {"long": 0.02, "short": 0.003}


class Sleeper:
    pad_token_id = 0

    def read(self, ref):
        return RawSample(key=ref.key, record={})

    def decode(self, raw, planned, epoch=None):
        time.sleep(SLEEP_S[raw.key])
        ids = np.zeros(planned.llm_tokens, np.int32)
        return DecodedSample(input_ids=ids, labels=ids)


@pytest.fixture
def host():
    factory = PipelineFactory(reader_for=lambda _: Sleeper(), decoder_for=lambda _: Sleeper())
    host = DecodingHost(ThreadDecoders(factory, slots=SLOTS))
    yield host
    host.close()


async def keep_ordering(host, job, key, share, samples=20):
    """A job whose trainers always want more: so many packs are on order at any time that a busy
    machine does not let it run dry."""

    async def line(first):
        for step in itertools.count(first, PACKS_AHEAD):
            order = an_order("-", [key] * samples, tokens=500, step=step, job=job, share=share)
            await host.prepare(order)
            host.release([order.key])

    await asyncio.gather(*map(line, range(PACKS_AHEAD)))


def decode_s(host):
    return {team.team: team.decode_s for team in host.stats().teams}


async def gains(host, until_s):
    """Seconds that each team is given from now until one has taken so many."""
    before = decode_s(host)
    while True:
        await asyncio.sleep(0.01)
        taken = {team: s - before.get(team, 0.0) for team, s in decode_s(host).items()}
        if max(taken.values(), default=0.0) >= until_s:
            return taken


async def test_two_to_one_in_seconds_of_decoding_whoever_has_the_longer_samples(host):
    tasks = [
        asyncio.create_task(keep_ordering(host, "a/j", "long", TeamShare(weight=2))),
        asyncio.create_task(keep_ordering(host, "b/j", "short", TeamShare(weight=1), 100)),
    ]
    taken = await gains(host, until_s=1.5)
    for task in tasks:
        task.cancel()
    assert taken["a"] / taken["b"] == pytest.approx(2, rel=0.1)


async def test_idle_share_is_lent_and_a_late_team_is_served_at_once(host):
    # Long samples: what a busy machine takes between two of them is then little.
    early = asyncio.create_task(keep_ordering(host, "a/j", "long", TeamShare(weight=1)))
    began_s = time.monotonic()
    taken = await gains(host, until_s=0.8)
    half_s = SLOTS * (time.monotonic() - began_s) / 2
    assert taken["a"] > half_s, "alone, it has more than what would be its half"
    late = asyncio.create_task(keep_ordering(host, "b/j", "short", TeamShare(weight=1), 100))
    taken = await gains(host, until_s=0.4)
    assert taken["b"] / taken["a"] == pytest.approx(1, rel=0.2)
    for task in (early, late):
        task.cancel()


async def test_the_queue_of_each_team_is_told(host):
    order = an_order("-", ["long"] * 10, tokens=500, job="a/j")
    preparing = asyncio.create_task(host.prepare(order))
    await asyncio.sleep(0.01)
    (team,) = host.stats().teams
    assert (team.team, team.queued) == ("a", 10 - SLOTS)
    await preparing
    (team,) = host.stats().teams
    assert team.queued == 0
    assert team.decode_s >= 10 * SLEEP_S["long"]
