"""Samples are read before they have a slot: no slot waits for storage, and an outage masks none."""

import asyncio
import contextlib
import json
import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from dataservice.core.errors import NotFoundError, SourceError, StorageAwayError
from dataservice.core.ports import SampleDecoder, SampleReader
from dataservice.core.sample import DecodedSample, MediaBlob, RawSample
from dataservice.workers import read_ahead
from dataservice.workers.host import DecodingHost
from dataservice.workers.process_decoders import ProcessDecoders
from dataservice.workers.read_ahead_process import ReadAheadProcess
from dataservice.workers.sample_pipelines import PipelineFactory
from dataservice.workers.thread_decoders import ThreadDecoders
from tests.waiting import until
from tests.workers.memory_files import descriptors
from tests.workers.trouble import an_order

FAR, READS = "src", 8


class Store(SampleReader):
    """Storage that keeps reads of `slow` keys waiting until it is opened."""

    def __init__(self):
        self.opened = threading.Event()
        self.lock = threading.Lock()
        self.under_way = self.most = 0
        self.read_keys = []
        self.away = set()

    def read(self, ref):
        with self.lock:
            self.under_way += 1
            self.most = max(self.most, self.under_way)
            self.read_keys.append(ref.key)
        try:
            if ref.key.startswith("slow"):
                assert self.opened.wait(30)
            if ref.key in self.away:
                raise StorageAwayError("the store answers 503")
            if ref.key == "gone":
                raise SourceError("the source has vanished")
            media = (MediaBlob(kind="image", name="a", data=bytes(100_000)),)
            return RawSample(key=ref.key, record={"id": ref.sample_id}, media=media)
        finally:
            with self.lock:
                self.under_way -= 1


class Codec(SampleDecoder):
    pad_token_id = 0

    def __init__(self):
        self.decoded = []
        self.gate = threading.Event()
        self.gate.set()

    def decode(self, raw, planned, epoch=None, places=()):
        assert self.gate.wait(30)
        self.decoded.append(raw.key)
        ids = np.full(planned.llm_tokens, raw.record["id"], np.int32)
        return DecodedSample(input_ids=ids, labels=ids)


@pytest.fixture
def store():
    return Store()


@pytest.fixture
def codec():
    return Codec()


@pytest.fixture
def hosted(store, codec, monkeypatch):
    """A host of one slot; `far` says whether its source lies on another machine."""
    monkeypatch.setattr(read_ahead, "AGAIN_S", 0.01)
    with contextlib.ExitStack() as closing:

        def made(*, far=True, reads=READS, **more):
            factory = PipelineFactory(
                reader_for=lambda _: store,
                decoder_for=lambda _: codec,
                far_sources=lambda _: [FAR] if far else [],
            )
            host = DecodingHost(ThreadDecoders(factory, slots=1, reads=reads), **more)
            closing.callback(host.close)
            closing.callback(store.opened.set)
            closing.callback(codec.gate.set)
            return host

        yield made


async def test_what_is_read_is_decoded_while_storage_keeps_others_waiting(
    hosted, store, codec, tmp_path
):
    host = hosted()
    order = an_order(tmp_path, ["slow", "a", "b", "c"])
    preparing = asyncio.create_task(host.prepare(order))
    await until(lambda: len(codec.decoded) == 3)
    assert sorted(codec.decoded) == ["a", "b", "c"]
    store.opened.set()
    assert (await preparing).bad_samples == ()
    part = await host.sequence(order.key, 0)
    assert part["input_ids"].reshape(4, -1)[:, 0].tolist() == [1, 2, 3, 4], "each in its place"


async def test_many_reads_are_under_way_for_one_slot_and_no_more_than_may_be(
    hosted, store, tmp_path
):
    host = hosted(reads=READS)
    preparing = asyncio.create_task(
        host.prepare(an_order(tmp_path, [f"slow{n}" for n in range(50)]))
    )
    most = 2 * READS // 3 + 1  # one team leaves half of what it takes to others
    await until(lambda: store.under_way == most)
    assert host.stats().reads == most
    store.opened.set()
    await preparing
    assert store.most == most
    assert host.stats().samples_read_ahead == 50


async def test_bytes_that_were_read_are_bounded_until_slots_take_them(
    hosted, store, codec, tmp_path
):
    codec.gate.clear()
    host = hosted(read_ahead_bytes=10 * 128 * 1024)
    preparing = asyncio.create_task(host.prepare(an_order(tmp_path, [*map(str, range(60))])))
    await until(lambda: host.stats().reads == 0 and host.stats().read_ahead_bytes > 600_000)
    assert len(store.read_keys) < 12
    assert host.stats().read_ahead_bytes < 10 * 128 * 1024
    codec.gate.set()
    await preparing
    assert (len(store.read_keys), host.stats().read_ahead_bytes) == (60, 0)


@pytest.mark.parametrize("far", [True, False], ids=["read ahead", "read by its slot"])
async def test_an_outage_is_waited_for_and_told_and_masks_nothing(hosted, store, tmp_path, far):
    host = hosted(far=far)
    store.away = {"a", "b"}
    preparing = asyncio.create_task(host.prepare(an_order(tmp_path, ["a", "x", "b"], job="t/j")))
    await until(lambda: store.read_keys.count("a") > 2 and store.read_keys.count("b") > 2)
    (outage,) = host.stats().outages
    assert (outage.job, outage.source, outage.reason) == ("t/j", FAR, "the store answers 503")
    assert outage.away_s > 0
    store.away = set()
    receipt = await preparing
    assert receipt.bad_samples == ()
    assert host.stats().outages == ()


async def test_samples_of_an_outage_leave_the_slot_to_others(hosted, store, codec, tmp_path):
    host = hosted(far=False)
    store.away = {"a"}
    waiting = asyncio.create_task(host.prepare(an_order(tmp_path, ["a"], job="t/j")))
    await until(lambda: host.stats().outages)
    await host.prepare(an_order(tmp_path, ["x"] * 5, job="other/j"))
    assert codec.decoded == ["x"] * 5
    store.away = set()
    await waiting


async def test_what_cannot_be_read_is_masked_for_the_reason_that_its_slot_finds(hosted, tmp_path):
    receipt = await hosted().prepare(an_order(tmp_path, ["gone", "a"]))
    assert [bad.reason for bad in receipt.bad_samples] == ["the source has vanished"]


async def test_a_team_whose_storage_hangs_leaves_reads_to_the_others(hosted, codec, tmp_path):
    host = hosted()
    slow = [f"slow{n}" for n in range(100)]
    hung = [
        asyncio.create_task(host.prepare(an_order(tmp_path, slow, job=f"hung/{n}")))
        for n in range(3)
    ]
    await until(lambda: host.stats().reads > 2)
    await host.prepare(an_order(tmp_path, ["a", "b"], job="well/j"))
    assert sorted(codec.decoded) == ["a", "b"]
    for task in hung:
        task.cancel()


async def test_a_pack_that_is_released_while_it_is_read_leaves_nothing(hosted, store, tmp_path):
    host = hosted()
    order = an_order(tmp_path, ["slow1", "slow2", "a"])
    preparing = asyncio.create_task(host.prepare(order))
    await until(lambda: store.under_way == 2)
    host.release([order.key])
    with pytest.raises(NotFoundError):
        await preparing
    store.opened.set()
    await until(lambda: host.stats().reads == 0)
    assert host.stats().read_ahead_bytes == 0
    assert (await host.prepare(order)).bad_samples == (), "it may be ordered again"


async def test_a_source_that_made_slots_wait_time_and_again_is_read_ahead(
    hosted, monkeypatch, tmp_path
):
    host = hosted(far=False)
    await host.prepare(an_order(tmp_path, ["a"] * 20))
    assert host.stats().samples_read_ahead == 0
    monkeypatch.setattr(read_ahead, "WAIT_S", -1.0)
    await host.prepare(an_order(tmp_path, ["a"] * 20, pack=1))
    assert 0 < host.stats().samples_read_ahead < 20


# ---- the process that reads ----------------------------------------------------------------


class Shelf(SampleReader):
    """A reader for a process of its own: its keys say what it does."""

    def __init__(self, folder):
        self.folder = Path(folder)

    def read(self, ref):
        (self.folder / f"{ref.key}.{os.getpid()}").touch()
        act, _, size = ref.key.partition("-")
        first = not (self.folder / f"{act}.once").exists()
        if act in ("die", "hang") and first:
            (self.folder / f"{act}.once").touch()
            os._exit(3) if act == "die" else time.sleep(60)
        if act == "away" and first:
            (self.folder / f"{act}.once").touch()
            raise StorageAwayError("the store answers 503")
        media = (MediaBlob(kind="image", name="ä", data=bytes(range(256)) * int(size or 0)),)
        return RawSample(key=ref.key, record={"id": ref.sample_id, "text": "ä \ud800"}, media=media)


class Teller(SampleDecoder):
    """Writes down what it is given."""

    pad_token_id = 0

    def __init__(self, folder):
        self.folder = Path(folder)

    def decode(self, raw, planned, epoch=None, places=()):
        (self.folder / f"{raw.key}.raw").write_text(repr(raw))
        ids = np.zeros(planned.llm_tokens, np.int32)
        return DecodedSample(input_ids=ids, labels=ids)


def shelf_in(pipeline):
    return Shelf(json.loads(pipeline)["folder"])


def teller_in(pipeline):
    return Teller(json.loads(pipeline)["folder"])


def all_far(pipeline):
    return [FAR]


FACTORY = PipelineFactory(reader_for=shelf_in, decoder_for=teller_in, far_sources=all_far)


@pytest.fixture
async def processes(monkeypatch):
    monkeypatch.setattr(read_ahead, "AGAIN_S", 0.01)
    host = DecodingHost(ProcessDecoders(FACTORY, slots=1, reads=8, timeout_s=3.0))
    await host.start()
    yield host
    host.close()


def readers(folder, key):
    return {int(path.suffix[1:]) for path in folder.glob(f"{key}.[0-9]*")}


async def test_a_sample_comes_to_its_decoder_as_it_was_read_in_another_process(processes, tmp_path):
    keys = ["small-1", "large-4000", "none-0"]
    receipt = await processes.prepare(an_order(tmp_path, keys))
    assert receipt.bad_samples == ()
    pids = {pid for key in keys for pid in readers(tmp_path, key)}
    assert len(pids) == 1
    for number, key in enumerate(keys, 1):
        ref = an_order(tmp_path, [key], first=number).samples[0].ref
        assert (tmp_path / f"{key}.raw").read_text() == repr(Shelf(tmp_path).read(ref))


async def test_samples_read_ahead_leave_no_descriptor(processes, tmp_path):
    await processes.prepare(an_order(tmp_path, ["large-4000"]))
    before = descriptors()
    keys = [f"large{n}-4000" for n in range(20)]
    await processes.prepare(an_order(tmp_path, keys, pack=1))
    await until(lambda: descriptors() <= before)


@pytest.mark.parametrize("act", ["die", "hang", "away"])
async def test_a_process_that_dies_or_hangs_while_it_reads_costs_no_sample(
    processes, tmp_path, act
):
    keys = [*(f"large{n}-4000" for n in range(6)), act]
    receipt = await processes.prepare(an_order(tmp_path, keys))
    assert receipt.bad_samples == ()
    assert (await processes.prepare(an_order(tmp_path, ["x"], pack=1))).bad_samples == ()


class Fleeting:
    """A nursery whose only child is gone, and takes as long to end as who waits for its answer."""

    def __init__(self):
        self.orders, self.other_end = socket.socketpair()
        self.ending, self.waited, self.kills = threading.Event(), threading.Event(), []

    def fork(self):
        return self

    def kill(self):
        self.kills.append(self.ending.is_set())

    def end(self, child):
        self.ending.set()
        self.waited.wait(10)
        return "has ended"


def test_a_process_that_has_ended_is_not_killed_by_who_waits_for_it_in_vain(tmp_path):
    """Its descriptor may be that of another process by then."""
    nursery = Fleeting()
    reading = ReadAheadProcess(nursery, threads=1, timeout_s=0.5)
    refs = [sample.ref for sample in an_order(tmp_path, ["x"]).samples]
    with ThreadPoolExecutor(1) as threads:
        outcomes = threads.submit(reading.read, "{}", refs)
        nursery.other_end.recv(1)
        nursery.other_end.close()
        assert nursery.ending.wait(10)
        (outcome,) = outcomes.result(10)
    nursery.waited.set()
    assert outcome.away
    assert True not in nursery.kills


def test_reading_ends_with_the_decoders(tmp_path):
    decoders = ProcessDecoders(FACTORY, slots=1, reads=2, timeout_s=30.0)
    order = an_order(tmp_path, ["hang"])
    with ThreadPoolExecutor(2) as threads:
        threads.submit(decoders.start).result()
        refs = [sample.ref for sample in order.samples]
        reading = threads.submit(decoders.read, order.pipeline, refs)
        while not readers(tmp_path, "hang"):
            time.sleep(0.01)
        decoders.close()
        (outcome,) = reading.result(timeout=10)
    assert outcome.read is None
