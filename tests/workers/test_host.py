import asyncio
import json
import re
import threading
import zlib

import numpy as np
import pytest

from dataservice.core.errors import NotFoundError, SampleError, SourceError, SpecError
from dataservice.core.orders import PackKey, PackOrder, PackSample
from dataservice.core.ports import SampleDecoder
from dataservice.core.sample import (
    DecodedSample,
    ItemLengths,
    Modality,
    RawSample,
    SampleLengths,
    SampleLocation,
    SampleRef,
)
from dataservice.workers.host import DecodingHost
from dataservice.workers.pack import planned_bytes
from dataservice.workers.sample_pipelines import PipelineFactory
from dataservice.workers.thread_decoders import ThreadDecoders
from tests.waiting import until

PAD = 9
SHAPE = (1, 2, 2, 3)


class Library(SampleDecoder):
    """Reader and decoder in one: a sample's key says what becomes of it."""

    pad_token_id = PAD

    def __init__(self):
        self.decoded = []
        self.gate = threading.Event()
        self.gate.set()
        self.started = threading.Semaphore(0)

    def read(self, ref):
        if ref.key == "unreadable":
            raise SampleError("the member is cut short")
        if ref.key == "gone":
            raise SourceError("the source has vanished")
        return RawSample(key=ref.key, record={"id": ref.sample_id})

    def decode(self, raw, planned, epoch=None, places=()):
        self.started.release()
        assert self.gate.wait(30)
        self.decoded.append(raw.key)
        if raw.key == "corrupt":
            raise SampleError("the image is truncated")
        if raw.key == "surprise":
            raise ZeroDivisionError("in the codec")
        tokens = planned.llm_tokens - (raw.key == "short")
        ids = np.full(tokens, raw.record["id"], dtype=np.int32)
        items = tuple(np.full(i.shape, raw.record["id"], np.uint8) for i in planned.items)
        return DecodedSample(input_ids=ids, labels=ids, items=items)


def order(*keys, pack=0, step=3, degree=1, pipeline="{}", tokens=4):
    image = ItemLengths(
        modality=Modality.VISION, encoder_tokens=4, llm_tokens=1, position=0, shape=SHAPE
    )
    return PackOrder(
        key=PackKey(job="j", step=step, plan_digest="d" * 32, pack=pack),
        degree=degree,
        pipeline=pipeline,
        samples=tuple(
            PackSample(
                ref=SampleRef(
                    sample_id=i + 1, source="src", key=key, location=SampleLocation(file="f")
                ),
                lengths=SampleLengths(llm_tokens=tokens, loss_tokens=tokens, items=(image,)),
            )
            for i, key in enumerate(keys)
        ),
    )


def threads(library, decoder_for=None, slots=2):
    """Decoders in this process, so that a test sees what they do."""
    factory = PipelineFactory(
        reader_for=lambda _: library, decoder_for=decoder_for or (lambda _: library)
    )
    return ThreadDecoders(factory, slots=slots)


@pytest.fixture
def library():
    return Library()


@pytest.fixture
async def host(library):
    host = DecodingHost(threads(library), order_grace_s=0.1)
    yield host
    library.gate.set()
    host.close()


async def started(library, count=1):
    for _ in range(count):
        assert await asyncio.to_thread(library.started.acquire, timeout=30)


async def test_a_prepared_pack_gives_its_sequence_and_items(host):
    receipt = await host.prepare(order("a", "b"))
    assert receipt.bad_samples == ()
    part = await host.sequence(receipt.key, 0)
    assert part["input_ids"].tolist() == [1] * 4 + [2] * 4
    items = (await host.items(receipt.key, [1, 0])).arrays
    assert [item.flat[0] for item in items] == [2, 1]
    known = (await host.items(receipt.key, [1, 0])).crc32s
    assert known == [zlib.crc32(item.tobytes()) for item in items]
    assert receipt.size_bytes == 3 * 4 * 8 + 2 * 12


@pytest.mark.parametrize(
    ("key", "reason"),
    [
        ("unreadable", "the member is cut short"),
        ("gone", "the source has vanished"),
        ("corrupt", "the image is truncated"),
        ("surprise", "ZeroDivisionError: in the codec"),
        ("short", r"int32\[3\] where int32\[4\] was planned"),
    ],
)
async def test_a_bad_sample_is_masked_alone_and_reported_by_name(host, key, reason):
    receipt = await host.prepare(order("a", key, "b"))
    (bad,) = receipt.bad_samples
    assert (bad.sample_id, bad.source, bad.key) == (2, "src", key)
    assert re.search(reason, bad.reason)
    part = await host.sequence(receipt.key, 0)
    assert part["input_ids"].tolist() == [1] * 4 + [PAD] * 4 + [3] * 4
    assert part["labels"].tolist() == [1] * 4 + [-100] * 4 + [3] * 4
    items = (await host.items(receipt.key, [0, 1, 2])).arrays
    assert [item.flat[0] for item in items] == [1, 0, 3]
    assert items[1].shape == SHAPE


async def test_the_same_order_twice_is_decoded_once(host, library):
    first, second = await asyncio.gather(host.prepare(order("a")), host.prepare(order("a")))
    third = await host.prepare(order("a"))
    assert first == second == third
    assert library.decoded == ["a"]


async def test_another_order_under_the_same_key_replaces_the_pack(host):
    await host.prepare(order("a", tokens=4))
    receipt = await host.prepare(order("a", tokens=6))
    assert len((await host.sequence(receipt.key, 0))["input_ids"]) == 6


async def test_parts_are_waited_for_until_the_pack_is_ready(host, library):
    library.gate.clear()
    work = asyncio.create_task(host.prepare(order("a")))
    await started(library)
    waiting = asyncio.create_task(host.sequence(order("a").key, 0))
    await asyncio.sleep(0)
    assert not waiting.done()
    assert host.stats().packs_pending == 1
    library.gate.set()
    assert (await waiting)["input_ids"].tolist() == [1] * 4
    await work


async def test_a_rank_that_comes_before_the_order_waits_for_it(library):
    host = DecodingHost(threads(library), order_grace_s=60)
    early = asyncio.create_task(host.sequence(order("a").key, 0))
    await asyncio.sleep(0)
    await host.prepare(order("a"))
    assert (await early)["input_ids"].tolist() == [1] * 4
    host.close()


async def test_a_rank_waits_for_the_order_although_another_call_for_it_went_away(library):
    host = DecodingHost(threads(library), order_grace_s=60)
    key = order("a").key
    lost, early = (asyncio.create_task(host.sequence(key, 0)) for _ in range(2))
    await asyncio.sleep(0)
    lost.cancel()
    with pytest.raises(asyncio.CancelledError):
        await lost
    await host.prepare(order("a"))
    assert (await asyncio.wait_for(early, 30))["input_ids"].tolist() == [1] * 4
    host.close()


async def test_what_was_never_ordered_is_not_found(host):
    with pytest.raises(NotFoundError, match="never ordered here"):
        await host.sequence(order("a").key, 0)
    receipt = await host.prepare(order("a", degree=2))
    with pytest.raises(NotFoundError, match="member 2 does not exist"):
        await host.sequence(receipt.key, 2)
    with pytest.raises(NotFoundError, match="none at place 1"):
        await host.items(receipt.key, [0, 1])


async def test_releasing_drops_work_not_yet_started_and_tells_who_waits(host, library, monkeypatch):
    monkeypatch.setattr("dataservice.workers.slots.BATCH_SAMPLES", 1)
    library.gate.clear()
    work = asyncio.create_task(host.prepare(order("a", "b", "c", "d")))
    await started(library, 2)
    waiting = asyncio.create_task(host.items(order("a").key, [0]))
    await asyncio.sleep(0)
    host.release([order("a").key, PackKey(job="j", step=9, plan_digest="", pack=0)])
    for task in (work, waiting):
        with pytest.raises(NotFoundError, match="released"):
            await task
    library.gate.set()
    await host.prepare(order("z", pack=1))
    await until(lambda: len(library.decoded) == 3)  # what was in a thread runs out unused
    assert sorted(library.decoded) == ["a", "b", "z"]


async def test_a_caller_that_gives_up_does_not_stop_the_work(host, library):
    library.gate.clear()
    caller = asyncio.create_task(host.prepare(order("a")))
    await started(library)
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    library.gate.set()
    await host.prepare(order("a"))
    assert library.decoded == ["a"]


async def test_a_pipeline_that_cannot_be_built_fails_the_pack_until_it_can():
    library, broken = Library(), [True]

    def decoder_for(pipeline):
        if broken[0]:
            raise SpecError(f"unknown processor {json.loads(pipeline)['processor']!r}")
        return library

    host = DecodingHost(threads(library, decoder_for, slots=1))
    asked = order("a", pipeline='{"processor": "odd"}')
    with pytest.raises(SpecError, match="odd"):
        await host.prepare(asked)
    with pytest.raises(NotFoundError):
        await host.sequence(asked.key, 0)
    broken[0] = False
    assert (await host.prepare(asked)).bad_samples == ()
    host.close()


async def test_each_distinct_pipeline_is_built_once():
    library, built = Library(), []

    def decoder_for(pipeline):
        built.append(pipeline)
        return library

    host = DecodingHost(threads(library, decoder_for))
    await asyncio.gather(
        *(host.prepare(order("a", pack=n, pipeline=["x", "y"][n % 2])) for n in range(6))
    )
    assert sorted(built) == ["x", "y"]
    host.close()


def size_of(*keys):
    return planned_bytes(order(*keys))


async def test_packs_beyond_the_limit_of_bytes_wait_until_others_are_released(library, monkeypatch):
    now_s = 100.0
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: now_s)
    host = DecodingHost(threads(library), held_bytes=2 * size_of("a"))
    now, next_one, later = (order("a", step=step, pack=step) for step in range(3))
    had_room = await host.prepare(now)
    await host.prepare(next_one)
    waiting = asyncio.create_task(host.prepare(later))
    await asyncio.sleep(0)
    assert not waiting.done()
    assert (host.stats().packs_pending, host.stats().packs_waiting) == (1, 1)
    assert later.key in host.held()
    now_s += 0.5
    host.release([now.key])
    had_none = await waiting
    assert (had_room.room_s, had_none.room_s) == (0.0, 0.5)
    assert host.stats().packs_waiting == 0
    host.close()


async def test_a_rank_that_asks_for_a_pack_never_waits_for_room(library):
    host = DecodingHost(threads(library), held_bytes=1, order_grace_s=60)
    await host.prepare(order("a", step=0))
    ordered = asyncio.create_task(host.prepare(order("b", step=1)))
    await asyncio.sleep(0.05)
    assert not ordered.done()
    assert (await host.sequence(order(step=1).key, 0))["input_ids"].tolist() == [1] * 4
    await ordered
    early = asyncio.create_task(host.items(order(step=2).key, [0]))
    await asyncio.sleep(0)
    await host.prepare(order("c", step=2))
    assert len((await early).arrays) == 1
    host.close()


async def test_a_pack_that_fails_leaves_its_room(library):
    def decoder_for(pipeline):
        if pipeline == "bad":
            raise SpecError("no such tokenizer")
        return library

    host = DecodingHost(threads(library, decoder_for), held_bytes=size_of("a"))
    await host.prepare(order("a", step=0))
    failing = asyncio.create_task(host.prepare(order("b", step=1, pipeline="bad")))
    waiting = asyncio.create_task(host.prepare(order("c", step=2)))
    await asyncio.sleep(0.05)
    assert host.stats().packs_waiting == 2
    host.release([order(step=0).key])
    with pytest.raises(SpecError, match="no such tokenizer"):
        await failing
    assert (await waiting).bad_samples == ()
    host.close()


async def test_a_pack_takes_the_bytes_that_were_planned_for_it(host):
    asked = order("a", "b", "c", degree=3, tokens=5)
    assert (await host.prepare(asked)).size_bytes == planned_bytes(asked)


async def test_stats_count_what_is_held_and_what_was_done(host):
    first = await host.prepare(order("a", "corrupt", pack=0))
    second = await host.prepare(order("b", pack=1))
    stats = host.stats()
    assert (stats.packs_ready, stats.packs_pending) == (2, 0)
    assert stats.held_bytes == first.size_bytes + second.size_bytes
    assert (stats.samples_decoded, stats.samples_masked) == (3, 1)
    host.release([first.key])
    assert host.stats().held_bytes == second.size_bytes


def test_a_worker_without_slots_is_refused():
    with pytest.raises(SpecError, match="0 decoding slots"):
        threads(None, slots=0)


async def test_a_receipt_tells_what_is_delivered_of_each_sample_masked_or_not(host, library):
    first = await host.prepare(order("a", "corrupt", "c"))
    digests = [first.sample_digests[i : i + 8] for i in range(0, 24, 8)]
    assert len(set(digests)) == 3
    again = await host.prepare(order("a", "corrupt", "c", step=4))
    assert again.sample_digests == first.sample_digests
    good = await host.prepare(order("a", "b", "c", step=5))
    assert (good.sample_digests[:8], good.sample_digests[16:]) == (digests[0], digests[2])
    assert good.sample_digests[8:16] != digests[1]
