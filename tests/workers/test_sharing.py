"""Teams share a worker's slots: real threads and a real host. How long a sample takes is what its
decoder tells, or a machine that holds a thread up would change the shares.
"""

import asyncio
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

from dataservice.core.ports import SampleDecoder
from dataservice.core.sample import DecodedSample, RawSample
from dataservice.core.team import TeamShare
from dataservice.workers.decoders import Decoders, SampleOutcome
from dataservice.workers.host import DecodingHost
from dataservice.workers.sample_pipelines import PipelineFactory
from dataservice.workers.thread_decoders import ThreadDecoders
from tests.waiting import until
from tests.workers.trouble import an_order

SLOTS = 2
TAKES_S = {"long": 0.02, "short": 0.003}


class Telling(Decoders):
    """Decodes a batch for each permit, in no time, and tells that each sample took its own.
    `began` has the samples in the order in which they were given a slot."""

    slots = SLOTS
    reads = 1

    def far_sources(self, pipeline):
        return ()

    def __init__(self):
        self.began, self.batches = [], []
        self.permits = threading.Semaphore(0)

    def start(self):
        pass

    def open(self, pipeline):
        return 0

    def decode(self, pipeline, samples, reads=()):
        self.began += [sample.ref.key for sample in samples]
        self.batches.append(len(samples))
        assert self.permits.acquire(timeout=60)
        return [
            SampleOutcome(
                sample=DecodedSample(
                    input_ids=ids,
                    labels=ids,
                    items=tuple(np.zeros(each.shape, np.uint8) for each in sample.lengths.items),
                ),
                seconds=TAKES_S[sample.ref.key],
            )
            for sample in samples
            for ids in [np.zeros(sample.lengths.llm_tokens, np.int32)]
        ]

    def close(self):
        self.permits.release(10_000)


@pytest.fixture
def decoders(monkeypatch):
    # A long sample has a slot for itself.
    monkeypatch.setattr("dataservice.workers.slots.BATCH_S", 0.01)
    # Besides its samples' seconds, a slot is charged with those that pass here.
    monkeypatch.setattr("dataservice.workers.slots.time", SimpleNamespace(monotonic=lambda: 1000.0))
    return Telling()


@pytest.fixture
async def host(decoders):
    host = DecodingHost(decoders)
    yield host
    host.close()


def prepare(host, job, key, samples, **share):
    """Order one pack, which keeps its team's line filled."""
    order = an_order("-", [key] * samples, tokens=500, job=job, share=TeamShare(**share))
    return asyncio.create_task(host.prepare(order))


def taken_s(began, until_s):
    """Seconds of each kind of sample, from the first on, until one kind has taken so many."""
    taken = dict.fromkeys(TAKES_S, 0.0)
    for key in began:
        taken[key] += TAKES_S[key]
        if taken[key] >= until_s:
            return taken
    raise AssertionError(f"no team has taken {until_s} s: {taken}")


async def test_two_to_one_in_seconds_of_decoding_whoever_has_the_longer_samples(host, decoders):
    both = [
        prepare(host, "a/j", "long", 400, weight=2),
        prepare(host, "b/j", "short", 1400, weight=1),
    ]
    await until(lambda: len(host.stats().teams) == 2)
    decoders.permits.release(10_000)
    await asyncio.gather(*both)
    taken = taken_s(decoders.began, until_s=6.0)
    assert taken["long"] / taken["short"] == pytest.approx(2, rel=0.1)


async def test_idle_share_is_lent_and_a_late_team_is_served_at_once(host, decoders):
    early = prepare(host, "a/j", "long", 400, weight=1)
    decoders.permits.release(100)
    # Alone, it has all slots, and by far more than what would be its half.
    await until(lambda: len(decoders.began) == 100 + SLOTS)
    late = prepare(host, "b/j", "short", 1400, weight=1)
    await until(lambda: len(host.stats().teams) == 2)
    decoders.permits.release(10_000)
    await asyncio.gather(early, late)
    afterwards = decoders.began[100 + SLOTS :]
    assert "short" in afterwards[:SLOTS]
    taken = taken_s(afterwards, until_s=2.0)
    assert taken["short"] / taken["long"] == pytest.approx(1, rel=0.1)


@pytest.mark.parametrize(
    ("limit", "most"), [({}, 10), ({"BATCH_BYTES": 2**20}, 3), ({"BATCH_S": 0.05}, 2)]
)
async def test_small_pictures_go_to_a_slot_several_at_a_time(
    host, decoders, monkeypatch, limit, most
):
    """As many as take little time and memory, at most a slot's share of those that wait."""
    for name, value in {"BATCH_S": 1.0, **limit}.items():
        monkeypatch.setattr(f"dataservice.workers.slots.{name}", value)
    decoders.permits.release(10_000)
    await host.prepare(an_order("-", ["long"] * 20, tokens=1, images=1, job="a/j"))
    assert max(decoders.batches) == most
    assert sum(decoders.batches) == 20


class Sleeper(SampleDecoder):
    pad_token_id = 0

    def __init__(self):
        self.awake = threading.Event()

    def read(self, ref):
        return RawSample(key=ref.key, record={})

    def decode(self, raw, planned, epoch=None, places=()):
        assert self.awake.wait(60)
        time.sleep(TAKES_S[raw.key])
        ids = np.zeros(planned.llm_tokens, np.int32)
        return DecodedSample(input_ids=ids, labels=ids)


async def test_the_queue_of_each_team_is_told(monkeypatch):
    monkeypatch.setattr("dataservice.workers.slots.BATCH_S", 0.01)
    sleeper = Sleeper()
    factory = PipelineFactory(reader_for=lambda _: sleeper, decoder_for=lambda _: sleeper)
    host = DecodingHost(ThreadDecoders(factory, slots=SLOTS))
    preparing = prepare(host, "a/j", "long", 10)
    await until(lambda: host.stats().teams)
    (team,) = host.stats().teams
    assert (team.team, team.queued) == ("a", 10 - SLOTS)
    sleeper.awake.set()
    await preparing
    (team,) = host.stats().teams
    assert team.queued == 0
    assert team.decode_s >= 10 * TAKES_S["long"]
    host.close()
