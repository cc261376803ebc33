import asyncio
import contextlib
import signal
import subprocess
import sys
import threading
import zlib
from collections import Counter
from dataclasses import replace

import grpc
import grpc.aio
import numpy as np
import pytest
from dataservice_proto.v1 import worker_pb2, worker_pb2_grpc

from dataservice.core.errors import (
    NotFoundError,
    SourceError,
    SpecError,
    TicketError,
    WorkerLostError,
)
from dataservice.core.index_orders import IndexOrder, IndexProgress
from dataservice.core.order_columns import FEW_SAMPLES, PackOrders
from dataservice.core.orders import (
    BadSample,
    Holdings,
    PackReceipt,
    PartSpec,
    StorageOutage,
    UnitRange,
)
from dataservice.core.ports import WorkerInfo
from dataservice.engine.fair_threads import FairThreads
from dataservice.serving import wire_packs, worker_link, worker_servicer
from dataservice.serving.channels import Keepalive
from dataservice.serving.server import serve_worker
from dataservice.serving.status_codes import error_of
from dataservice.serving.worker_link import GrpcWorkerLink
from soak.gate import through_gate
from tests.one_order import each_of, prepared
from tests.serving.conftest import SECRET, WORKER
from tests.waiting import until


@pytest.fixture
async def link(make):
    link = GrpcWorkerLink(make.secret, answer_timeout_s=30.0, release_timeout_s=30.0)
    yield link
    await link.close()


@pytest.fixture
def fetch(channel_to, make):
    """Fetch a ticket's parts: [(header, bytes)], with every chunk's size checked."""

    async def fetch(address, ticket, **shown):
        stub = worker_pb2_grpc.WorkerStub(channel_to(address))
        parts = []
        try:
            async for chunk in stub.Fetch(make.fetch(ticket, **shown)):
                assert chunk.ByteSize() <= 4 * 2**20
                if chunk.HasField("header"):
                    parts.append((chunk.header, bytearray()))
                else:
                    parts[-1][1].extend(chunk.data)
        except grpc.aio.AioRpcError as error:
            raise error_of(error) from error
        for header, data in parts:
            assert len(data) == header.size_bytes
            assert zlib.crc32(data) == header.crc32
        return parts

    return fetch


def tensors(part):
    """[(name, array)] of a fetched part."""
    header, data = part
    offset, made = 0, []
    for each in header.tensors:
        dtype, shape = np.dtype(each.dtype), tuple(each.shape)
        size_bytes = dtype.itemsize * int(np.prod(shape))
        array = np.frombuffer(data[offset : offset + size_bytes], dtype).reshape(shape)
        made.append((each.name, array))
        offset += size_bytes
    assert offset == len(data)
    return made


async def test_a_prepared_pack_is_streamed_part_by_part_as_the_host_holds_it(
    make, host, worker, link, fetch
):
    receipt = await prepared(link, worker, make.order(degree=2))
    key = receipt.key
    ticket = make.ticket(
        PartSpec(key=key, cp_rank=1), PartSpec(key=key, items=(3, 0)), PartSpec(key=key, cp_rank=0)
    )
    parts = await fetch(worker.address, ticket)
    assert [header.part for header, _ in parts] == [0, 1, 2]

    for part, cp_rank in ((parts[0], 1), (parts[1], 0)):  # of a pack the sequences come first
        expected = await host.sequence(key, cp_rank)
        for (name, array), (wanted_name, wanted) in zip(
            tensors(part), expected.items(), strict=True
        ):
            assert (name, array.dtype.str) == (wanted_name, "<i4")
            np.testing.assert_array_equal(array, wanted)
    assert [name for name, _ in tensors(parts[2])] == ["item", "item"]
    assert [array.dtype.str for _, array in tensors(parts[2])] == ["<f4", "|u1"]
    items = (await host.items(key, [3, 0])).arrays
    for (_, array), wanted in zip(tensors(parts[2]), items, strict=True):
        np.testing.assert_array_equal(array, wanted)


async def test_of_an_item_only_the_frames_that_a_ticket_names_are_streamed(
    make, host, worker, link, fetch
):
    order = make.order(samples=1, shapes=((6, 2, 2, 3), (4, 2, 2, 3)))
    await prepared(link, worker, order)
    ranges = (UnitRange(1, 3, 3), UnitRange(0, 1, 4))
    (part,) = await fetch(
        worker.address, make.ticket(PartSpec(key=order.key, items=(0, 1), ranges=ranges))
    )
    clip, picture = (await host.items(order.key, [0, 1])).arrays
    for (_, array), wanted in zip(tensors(part), (clip[2:6], picture[:1]), strict=True):
        np.testing.assert_array_equal(array, wanted)
    assert part[0].size_bytes == 5 * 2 * 2 * 3


@pytest.mark.parametrize(
    "units", [UnitRange(0, 1, 4), UnitRange(2, 2, 3), UnitRange(-1, 1, 3), UnitRange(0, 4, 3)]
)
async def test_frames_that_an_item_does_not_fall_into_are_refused(make, worker, link, fetch, units):
    order = make.order(samples=1, shapes=((6, 2, 2, 3),))
    await prepared(link, worker, order)
    ticket = make.ticket(PartSpec(key=order.key, items=(0,), ranges=(units,)))
    with pytest.raises(NotFoundError, match=r"items of \[6\] frames, which do not fall into"):
        await fetch(worker.address, ticket)


async def test_only_the_tensors_that_a_ticket_names_are_streamed(make, host, worker, link, fetch):
    key = (await prepared(link, worker, make.order())).key
    held = await host.sequence(key, 0)
    named = [("labels",), ("position_ids", "input_ids"), ()]
    streamed = [("labels",), ("input_ids", "position_ids"), tuple(held)]
    for wanted, names in zip(named, streamed, strict=True):
        ticket = make.ticket(PartSpec(key=key, cp_rank=0, tensors=wanted))
        (part,) = await fetch(worker.address, ticket)
        assert part[0].size_bytes == sum(held[name].nbytes for name in names)
        assert tuple(name for name, _ in tensors(part)) == names
        for name, array in tensors(part):
            np.testing.assert_array_equal(array, held[name])


async def test_a_tensor_of_another_release_is_refused(make, worker, link, fetch):
    key = (await prepared(link, worker, make.order())).key
    with pytest.raises(TicketError, match="names loss_mask; a sequence has input_ids"):
        await fetch(
            worker.address, make.ticket(PartSpec(key=key, cp_rank=0, tensors=("loss_mask",)))
        )


async def test_a_part_of_thirty_megabytes_arrives_intact_in_small_chunks(
    make, host, worker, link, fetch
):
    order = make.order(samples=1, shapes=((10, 1000, 1000, 3),))
    await prepared(link, worker, order)
    (part,) = await fetch(worker.address, make.ticket(PartSpec(key=order.key, items=(0,))))
    ((_, array),) = tensors(part)
    assert array.nbytes == 30_000_000
    np.testing.assert_array_equal(array, (await host.items(order.key, [0])).arrays[0])


async def test_a_fetch_waits_for_a_pack_that_is_being_decoded(make, link, fetch, gated):
    info, gate, begun = gated
    order = make.order()
    prepare = asyncio.create_task(prepared(link, info, order))
    await until(lambda: begun)
    fetched = asyncio.create_task(
        fetch(info.address, make.ticket(PartSpec(key=order.key, cp_rank=0)))
    )
    done, _ = await asyncio.wait({fetched}, timeout=0.05)
    assert not done
    gate.set()
    (part,) = await fetched
    assert [name for name, _ in tensors(part)] == ["input_ids", "labels", "position_ids"]
    assert (await prepare).key == order.key


async def test_an_unknown_pack_is_not_found(make, worker, fetch):
    with pytest.raises(NotFoundError, match="never ordered here"):
        await fetch(worker.address, make.ticket(PartSpec(key=make.order().key, cp_rank=0)))


async def test_a_released_pack_is_not_found(make, worker, link, fetch):
    receipt = await prepared(link, worker, make.order())
    await link.release(worker, "vlm", [receipt.key])
    with pytest.raises(NotFoundError, match="has been released"):
        await fetch(worker.address, make.ticket(PartSpec(key=receipt.key, cp_rank=0)))


async def test_a_release_goes_with_the_next_order_which_is_of_packs_that_are_wanted(
    make, host, worker, link, monkeypatch
):
    calls = []
    monkeypatch.setattr(
        worker_servicer.WorkerServicer, "Release", lambda *_: calls.append("of its own")
    )
    monkeypatch.setattr(worker_link, "RELEASE_WAIT_S", 30.0)
    first, second, third = (make.order(pack=pack) for pack in range(3))
    for order in (first, second):
        await prepared(link, worker, order)
    releases = [
        asyncio.create_task(link.release(worker, "vlm", [order.key])) for order in (first, second)
    ]
    await asyncio.sleep(0)
    async for _ in link.order(worker, [second, third]):  # the second is wanted again
        pass
    await asyncio.gather(*releases)
    assert set(host.held()) == {second.key, third.key}
    assert not calls


async def test_a_release_that_no_order_takes_along_is_a_call_of_its_own_soon(
    make, host, worker, link
):
    first, second = (make.order(pack=pack) for pack in range(2))
    await prepared(link, worker, first)
    await link.release(worker, "vlm", [first.key])
    assert not host.held()
    await prepared(link, worker, first)  # it is decoded anew, and no release is left
    await prepared(link, worker, second)
    assert set(host.held()) == {first.key, second.key}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"signature": b"x" * 32}, "signature"),
        ({"rank": 1}, "signature"),
        ({"workers": ("worker-0.2",)}, "signature"),
    ],
)
async def test_a_forged_ticket_is_refused(make, worker, link, fetch, change, message):
    receipt = await prepared(link, worker, make.order())
    ticket = make.ticket(PartSpec(key=receipt.key, cp_rank=0))
    with pytest.raises(TicketError, match=message):
        await fetch(worker.address, replace(ticket, **change))


@pytest.mark.parametrize(
    ("made", "message"),
    [
        ({"expires_unix_s": 1}, "expired"),
        ({"worker": "worker-7.1"}, "for worker 'worker-7.1'"),
        ({"secret": b"another"}, "signature"),
    ],
)
async def test_a_ticket_of_another_time_place_or_service_is_refused(
    make, worker, link, fetch, made, message
):
    receipt = await prepared(link, worker, make.order())
    with pytest.raises(TicketError, match=message):
        await fetch(worker.address, make.ticket(PartSpec(key=receipt.key, cp_rank=0), **made))


@pytest.mark.parametrize("session", ["another rank's", ""])
async def test_a_ticket_is_of_no_use_to_another_session_and_refusing_it_is_counted(
    make, host, session, fetch, caplog
):
    refused = Counter()
    served = await serve_worker(
        host,
        worker=make.worker,
        listen="127.0.0.1:0",
        secret=make.secret,
        grace_s=0.0,
        refused=refused,
    )
    await host.prepare(make.order())
    ticket = make.ticket(PartSpec(key=make.order().key, cp_rank=0))
    with pytest.raises(TicketError, match="given to another session, of rank 0"):
        await fetch(served.address, ticket, session=session)
    assert "a ticket from ipv4:127.0.0.1:" in caplog.text
    for _ in range(2):  # its own session may try again
        assert await fetch(served.address, ticket)
    assert refused == {"holder": 1}
    await served.stop()


async def test_a_ticket_without_parts_is_refused(make, worker, fetch):
    with pytest.raises(TicketError, match="no parts"):
        await fetch(worker.address, make.ticket())


@pytest.mark.parametrize("metadata", [(), (("dataservice-command", "0" * 64),)])
async def test_only_the_coordinator_commands_a_worker(make, worker, channel_to, metadata):
    stub = worker_pb2_grpc.WorkerStub(channel_to(worker.address))
    orders = wire_packs.pack_orders_to_proto(PackOrders.of([make.order()]))
    for call in (
        stub.Prepare(orders, metadata=metadata).read(),
        stub.Release(worker_pb2.ReleaseRequest(), metadata=metadata),
    ):
        with pytest.raises(grpc.aio.AioRpcError, match="only the coordinator") as refused:
            await call
        assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED


async def test_a_link_with_another_secret_is_refused(make, worker):
    link = GrpcWorkerLink(b"another")
    with pytest.raises(TicketError, match="different secrets"):
        await prepared(link, worker, make.order())
    await link.release(worker, "vlm", [make.order().key])
    await link.close()


async def test_the_worker_s_own_error_comes_back_as_itself(make, worker, link):
    with pytest.raises(SpecError, match="degree 0"):
        await prepared(link, worker, make.order(degree=0))


async def test_a_worker_that_is_not_there_is_lost_and_releasing_it_is_no_error(make, link):
    nobody = WorkerInfo(worker="worker-3.1", address="127.0.0.1:1", slots=1)
    for _ in range(2):
        with pytest.raises(WorkerLostError, match=r"worker-3.1 at 127.0.0.1:1 does not answer"):
            await prepared(link, nobody, make.order())
    await link.release(nobody, "vlm", [make.order().key])


@pytest.fixture
async def gated(make):
    """A worker whose decoding waits at a gate: (where it serves, gate, decodes begun)."""
    pipeline, gate, begun = make.pipeline(), threading.Event(), []
    decode = pipeline.decode

    def decode_behind_the_gate(raw, planned, epoch=None, places=()):
        begun.append(raw.key)
        assert gate.wait(30)
        return decode(raw, planned, epoch, places)

    pipeline.decode = decode_behind_the_gate
    host = make.host(pipeline)
    served = await serve_worker(
        host, worker=make.worker, listen="127.0.0.1:0", secret=make.secret, on_stopped=host.close
    )
    yield WorkerInfo(worker=make.worker, address=served.address, slots=2), gate, begun
    gate.set()
    await served.stop()


async def test_a_worker_may_take_as_long_as_it_needs(make, gated, link):
    info, gate, _ = gated
    hasty = GrpcWorkerLink(make.secret, answer_timeout_s=0.2)
    prepare = asyncio.create_task(prepared(hasty, info, make.order()))
    done, _ = await asyncio.wait({prepare}, timeout=1.0)
    assert not done
    assert (await link.ask_held(info)).packs == {make.order().key}
    gate.set()
    assert (await prepare).key == make.order().key
    await hasty.close()


async def test_an_order_outlives_its_connection_and_is_decoded_once(make, link, gated, network):
    info, gate, begun = gated
    through = replace(info, address=through_gate(network.control, info.address))
    prepare = asyncio.create_task(prepared(link, through, make.order()))
    await until(lambda: len(begun) == 2)
    network.cut(lambda to: to == info.address)
    network.heal()
    await asyncio.sleep(0.1)
    gate.set()
    assert (await prepare).key == make.order().key
    assert len(begun) == 2


@pytest.fixture
def channels(monkeypatch):
    """The channels that a link makes, by address."""
    made, make_channel = {}, grpc.aio.insecure_channel

    def noted(address, **options):
        made[address] = make_channel(address, **options)
        return made[address]

    monkeypatch.setattr(grpc.aio, "insecure_channel", noted)
    return made


async def test_renewed_workers_leave_no_channels_behind(make, host, channels, monkeypatch):
    monkeypatch.setattr(worker_link, "IDLE_S", 0.0)
    link = GrpcWorkerLink(make.secret, answer_timeout_s=30.0)
    for _ in range(4):  # each at an address of its own
        served = await serve_worker(host, worker=WORKER, listen="127.0.0.1:0", secret=make.secret)
        await link.ask_held(WorkerInfo(worker=WORKER, address=served.address, slots=1))
        await served.stop()
    *before, last = (channel.get_state() for channel in channels.values())
    assert set(before) == {grpc.ChannelConnectivity.SHUTDOWN}
    assert last != grpc.ChannelConnectivity.SHUTDOWN
    await link.close()


async def test_a_channel_that_was_called_of_late_stays_for_the_next_call(
    make, worker, gated, link, channels
):
    await link.ask_held(worker)
    kept = channels[worker.address]
    await link.ask_held(gated[0])
    await link.ask_held(worker)
    assert channels == {worker.address: kept, gated[0].address: channels[gated[0].address]}
    assert kept.get_state() == grpc.ChannelConnectivity.READY


async def test_a_channel_with_a_call_in_flight_is_never_closed_for_another(
    make, worker, gated, link, channels, monkeypatch
):
    monkeypatch.setattr(worker_link, "IDLE_S", 0.0)
    info, gate, begun = gated
    await link.ask_held(info)  # so that it was idle before, too
    prepare = asyncio.create_task(prepared(link, info, make.order()))
    await until(lambda: len(begun) == 2)
    await link.ask_held(worker)
    assert channels[info.address].get_state() == grpc.ChannelConnectivity.READY
    gate.set()
    assert (await prepare).key == make.order().key


async def test_a_stopped_worker_is_lost_once_pings_stay_unanswered(make):
    link = GrpcWorkerLink(
        make.secret,
        answer_timeout_s=2.0,
        keepalive=Keepalive(interval_s=0.2, timeout_s=2.0),
    )
    command = [sys.executable, "-c", STANDALONE, make.secret.hex()]
    with subprocess.Popen(  # noqa: ASYNC220
        command, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            address = (await asyncio.to_thread(process.stdout.readline)).strip()
            info = WorkerInfo(worker=make.worker, address=address, slots=1)
            prepare = asyncio.create_task(prepared(link, info, make.order()))
            done, _ = await asyncio.wait({prepare}, timeout=2.5)  # longer than a ping may take
            assert not done
            process.send_signal(signal.SIGSTOP)
            with pytest.raises(WorkerLostError, match="does not answer"):
                await asyncio.wait_for(prepare, 60)
        finally:
            process.kill()
    await link.close()


async def test_a_worker_tells_the_coordinator_alone_what_it_holds(make, worker, link, channel_to):
    orders = [make.order(pack=pack) for pack in range(3)]
    for order in orders:
        await prepared(link, worker, order)
    await link.release(worker, "vlm", [orders[1].key])
    assert (await link.ask_held(worker)).outages == ()
    assert (await link.ask_held(worker)).packs == {orders[0].key, orders[2].key}
    stub = worker_pb2_grpc.WorkerStub(channel_to(worker.address))
    with pytest.raises(grpc.aio.AioRpcError, match="only the coordinator"):
        await stub.Held(worker_pb2.HeldRequest()).read()


async def test_a_worker_tells_how_many_bytes_went_by_which_path(host, link):
    sent = Counter(grpc=3 * 2**40, same_node=5)
    served = await serve_worker(host, worker=WORKER, listen="127.0.0.1:0", secret=SECRET, sent=sent)
    told = await link.ask_held(WorkerInfo(worker=WORKER, address=served.address, slots=1))
    assert (told.grpc_bytes, told.same_node_bytes) == (3 * 2**40, 5)
    await served.stop()


async def test_a_worker_tells_which_storage_it_waits_for(make, worker, host, link, monkeypatch):
    outages = tuple(
        StorageOutage(job="a/vlm", source=f"s{n}", away_s=1.5 + n, reason="503 of é")
        for n in (0, 1)
    )
    monkeypatch.setattr(host, "outages", lambda: outages)
    assert await link.ask_held(worker) == Holdings(outages=outages)


async def test_what_a_worker_holds_may_fill_many_messages(make, worker, host, link, monkeypatch):
    keys = tuple(replace(make.order().key, pack=pack) for pack in range(10_000))
    monkeypatch.setattr(host, "held", lambda: keys)
    assert (await link.ask_held(worker)).packs == frozenset(keys)


class MaskingHost:
    """It can read no sample, and says of each why at length."""

    def __init__(self, reason="r" * 1000):
        self.reason = reason

    async def prepare(self, order):
        bad = tuple(
            BadSample(sample_id=n, source="s", key=sample.ref.key, reason=self.reason)
            for n, sample in enumerate(order.samples)
        )
        return PackReceipt(key=order.key, size_bytes=1, decode_s=0.1, bad_samples=bad)


def with_keys(order, key_bytes):
    """The same order, of samples with such long keys."""
    (first, *_) = order.samples
    sample = replace(first, ref=replace(first.ref, key="k" * key_bytes))
    return replace(order, samples=(sample,) * len(order.samples))


async def test_orders_and_answers_that_no_message_holds_come_in_several(make, link):
    served = await serve_worker(
        MaskingHost(), worker=make.worker, listen="127.0.0.1:0", secret=make.secret, grace_s=0.0
    )
    info = WorkerInfo(worker=make.worker, address=served.address, slots=1)
    orders = [with_keys(make.order(pack=pack, samples=1500, shapes=()), 1000) for pack in range(3)]
    assert wire_packs.pack_orders_to_proto(PackOrders.of(orders)).ByteSize() > 4 * 2**20
    receipts = [r async for told in link.order(info, orders) for r in each_of(told.receipts)]
    assert sum(len(r.bad_samples) for r in receipts) * 2000 > 8 * 2**20
    assert [r.key for r in receipts] == [order.key for order in orders]
    with pytest.raises(SpecError, match=r"has 5,000 samples, .* takes at most 4,194,304"):
        await prepared(link, info, with_keys(make.order(samples=5000, shapes=()), 1000))
    await served.stop()


@pytest.mark.parametrize(("samples", "in_a_thread"), [(FEW_SAMPLES, False), (1000, True)])
async def test_orders_of_many_samples_are_written_in_a_thread(
    make, monkeypatch, samples, in_a_thread
):
    written_in: list[str] = []
    write = wire_packs.pack_orders_to_proto

    def noted(orders):
        written_in.append(threading.current_thread().name)
        return write(orders)

    monkeypatch.setattr(wire_packs, "pack_orders_to_proto", noted)
    served = await serve_worker(
        MaskingHost(), worker=make.worker, listen="127.0.0.1:0", secret=make.secret, grace_s=0.0
    )
    info = WorkerInfo(worker=make.worker, address=served.address, slots=1)
    writers = FairThreads("writing orders", threads=1)
    link = GrpcWorkerLink(make.secret, threads=writers)
    try:
        orders = PackOrders.of([make.order(samples=samples, shapes=())])
        orders = replace(orders, samples=orders.columns())
        assert [answers async for answers in link.order(info, orders)]
    finally:
        await link.close()
        writers.close()
        await served.stop()
    loop = threading.current_thread().name
    assert [name != loop for name in written_in] == [in_a_thread]


@pytest.mark.parametrize(("key_bytes", "reason"), [(20, "é" * 2000), (1000, "é" * 500)])
async def test_reasons_that_no_message_holds_are_shortened_and_say_so(
    make, link, key_bytes, reason
):
    served = await serve_worker(
        MaskingHost(reason), worker=make.worker, listen="127.0.0.1:0", secret=make.secret, grace_s=0
    )
    info = WorkerInfo(worker=make.worker, address=served.address, slots=1)
    order = with_keys(make.order(samples=3900, shapes=()), key_bytes)
    receipt = await prepared(link, info, order)
    assert [bad.sample_id for bad in receipt.bad_samples] == list(range(3900))
    assert {bad.key for bad in receipt.bad_samples} == {"k" * key_bytes}
    (told,) = {bad.reason for bad in receipt.bad_samples}
    assert told.lstrip("é") == f" … (of {len(reason.encode()):,} bytes)"
    assert 0 < len(told.encode()) < len(reason.encode())
    await served.stop()


class FailingHost(MaskingHost):
    """Masks all samples of the first pack, and cannot make the others."""

    async def prepare(self, order):
        if order.key.pack == 0:
            return await super().prepare(order)
        raise SourceError("é" * 2**20)


async def test_failures_come_beside_a_receipt_that_fills_a_message(make, link):
    served = await serve_worker(
        FailingHost("é" * 2000),
        worker=make.worker,
        listen="127.0.0.1:0",
        secret=make.secret,
        grace_s=0,
    )
    info = WorkerInfo(worker=make.worker, address=served.address, slots=1)
    orders = [make.order(samples=3900, shapes=()), *(make.order(pack=pack) for pack in (1, 2))]
    ready, failed = [], {}
    async for told in link.order(info, orders):
        ready += told.receipts.pack.tolist()
        failed |= told.failures
    assert (ready, sorted(failed)) == ([0], [1, 2])
    assert {type(error) for error in failed.values()} == {SourceError}
    await served.stop()


class SlowHost(MaskingHost):
    """Packs end one after another, each some turns of the loop after the last; pack 3 fails."""

    async def prepare(self, order):
        await asyncio.sleep(0.01 * (1 + order.key.pack))
        if order.key.pack == 3:
            raise SourceError("gone")
        return await super().prepare(order)


async def test_packs_that_end_within_a_moment_are_told_together_and_a_failure_at_once(
    make, link, monkeypatch
):
    monkeypatch.setattr(worker_servicer, "TOLD_WITHIN_S", 30.0)
    served = await serve_worker(
        SlowHost(), worker=make.worker, listen="127.0.0.1:0", secret=make.secret, grace_s=0.0
    )
    info = WorkerInfo(worker=make.worker, address=served.address, slots=1)
    orders = [make.order(pack=pack, shapes=()) for pack in range(6)]
    told = [
        (answers.receipts.pack.tolist(), list(answers.failures))
        async for answers in link.order(info, orders)
    ]
    assert told == [([0, 1, 2], [3]), ([4, 5], [])]
    await served.stop()


async def test_a_call_that_is_closed_ends_at_the_worker(make, worker, host, link):
    orders = [make.order(pack=pack) for pack in range(3)]
    waiting = asyncio.Event()
    decode, left = host.prepare, []

    async def prepare(order):
        if order.key.pack == 0:
            return await decode(order)
        try:
            await waiting.wait()
        finally:
            left.append(order.key.pack)

    host.prepare = prepare
    call = link.order(worker, orders)
    answers = await anext(call)
    assert answers.receipts.pack.tolist() == [0]
    await call.aclose()
    await until(lambda: sorted(left) == [1, 2])


async def test_a_successor_at_the_same_address_is_reached_at_once(make, host, link):
    async def serve(name, port):
        # A host of this test alone: at another's, the port might be taken between the two.
        return await serve_worker(
            host, worker=name, listen=f"127.0.0.3:{port}", secret=make.secret, grace_s=0.0
        )

    first = await serve("worker-0.1", 0)
    info = WorkerInfo(worker="worker-0.1", address=first.address, slots=1)
    await prepared(link, info, make.order())
    await first.stop()
    with pytest.raises(WorkerLostError):
        await prepared(link, info, make.order(pack=1))
    second = await serve("worker-0.2", first.address.rpartition(":")[2])
    assert (await prepared(link, info, make.order(pack=1))).key.pack == 1
    await second.stop()


async def test_stopping_a_worker_lets_its_open_streams_finish(make, host, channel_to, monkeypatch):
    # On a busy machine the last bytes may be on their way for longer than the default.
    monkeypatch.setattr("dataservice.serving.server.FLUSH_S", 2.0)
    served = await serve_worker(
        host, worker=make.worker, listen="127.0.0.1:0", secret=make.secret, grace_s=30.0
    )
    order = make.order(samples=1, shapes=((4, 1000, 1000, 3),))
    await host.prepare(order)
    request = make.fetch(make.ticket(PartSpec(key=order.key, items=(0,))))
    call = worker_pb2_grpc.WorkerStub(channel_to(served.address)).Fetch(request)
    chunks = aiter(call)
    header = (await anext(chunks)).header
    stopping = asyncio.create_task(served.stop())
    await asyncio.sleep(0)
    received_bytes = 0
    async for chunk in chunks:
        received_bytes += len(chunk.data)
    assert received_bytes == header.size_bytes == 12_000_000
    await stopping


STANDALONE = """
import asyncio, sys
import numpy as np
from dataservice.core.sample import HeldItems
from dataservice.serving.server import serve_worker

class Host:
    async def prepare(self, order):
        await asyncio.Event().wait()

    async def items(self, key, items, ranges):
        return HeldItems(arrays=[np.zeros(256 * 2**20, dtype=np.uint8)])

async def main():
    served = await serve_worker(
        Host(), worker="worker-0.1", listen="127.0.0.1:0", secret=bytes.fromhex(sys.argv[1])
    )
    print(served.address, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


async def test_a_worker_killed_in_the_middle_of_a_fetch_is_unavailable(make, channel_to):
    command = [sys.executable, "-c", STANDALONE, make.secret.hex()]
    with subprocess.Popen(  # noqa: ASYNC220
        command, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            address = (await asyncio.to_thread(process.stdout.readline)).strip()
            request = make.fetch(make.ticket(PartSpec(key=make.order().key, items=(0,))))
            call = worker_pb2_grpc.WorkerStub(channel_to(address)).Fetch(request)
            chunks = aiter(call)
            assert (await anext(chunks)).header.size_bytes == 256 * 2**20
            assert len((await anext(chunks)).data) > 0
        finally:
            process.kill()
        with pytest.raises(grpc.aio.AioRpcError) as lost:
            async for _ in chunks:
                pass
        assert lost.value.code() is grpc.StatusCode.UNAVAILABLE


class Indexes:
    """Carries out an errand until it is left."""

    def __init__(self):
        self.orders = []
        self.left = asyncio.Event()

    async def index(self, order):
        self.orders.append(order)
        try:
            yield IndexProgress(rows=1, size_bytes=2)
            if order.errand == "refuse":
                raise SourceError("the source is empty")
            yield b"x" * 2**20
            await asyncio.Event().wait()
        finally:
            self.left.set()


async def test_an_errand_for_an_index_is_for_whoever_commands_the_worker(host, make):
    indexes = Indexes()
    served = await serve_worker(
        host, worker=make.worker, listen="127.0.0.1:0", secret=make.secret, indexing=indexes
    )
    info = WorkerInfo(worker=make.worker, address=served.address, slots=1)
    order = IndexOrder(pipeline="{}", errand="go")
    link, stranger = (
        GrpcWorkerLink(make.secret),
        GrpcWorkerLink(b"another secret of 32 bytes......"),
    )
    try:
        async with contextlib.aclosing(link.index(info, order)) as answers:
            assert await anext(answers) == IndexProgress(rows=1, size_bytes=2)
            assert await anext(answers) == b"x" * 2**20
            assert not indexes.left.is_set()
        await asyncio.wait_for(indexes.left.wait(), 10)
        with pytest.raises(SourceError, match=r"^the source is empty$"):
            _ = [each async for each in link.index(info, replace(order, errand="refuse"))]
        with pytest.raises(TicketError):
            _ = [each async for each in stranger.index(info, order)]
        assert [each.errand for each in indexes.orders] == ["go", "refuse"]
    finally:
        await link.close()
        await stranger.close()
        await served.stop()
