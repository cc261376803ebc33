"""Parts for ranks on the machine of a worker: real servers, sockets, processes and signals."""

import asyncio
import itertools
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections import Counter
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import grpc
import numpy as np
import psutil
import pytest
from dataservice_proto import same_node
from dataservice_proto.same_node import Frames, Kind
from dataservice_proto.v1 import worker_pb2_grpc

from benchmarks.data import part_path
from dataservice.core.errors import SpecError
from dataservice.core.orders import PartSpec
from dataservice.core.tickets import holder_key, sign_ticket, ticket_for
from dataservice.serving import node_door, wire_packs, worker_servicer
from dataservice.serving.node_door import CONNECTIONS, NodeDoor
from dataservice.serving.parts import part_chunks, part_pieces
from dataservice.serving.server import serve_worker
from dataservice.serving.worker_link import GrpcWorkerLink
from tests.one_order import prepared
from tests.serving.conftest import HOLDER, SECRET, WORKER
from tests.waiting import wait_for
from trainer_client import CorruptPart
from trainer_client.fetch import PartFetcher, shares_of
from trainer_client.node_link import Announced, NodeLink, NodeLinkError, NodeStream
from trainer_client.transport import GrpcTransport

BIG = (1, 700, 800, 3)  # takes two slots


class Asker:
    """A rank that fetches all that one ticket names."""

    def __init__(self, address, ticket, *, holder=HOLDER, secret=SECRET, **more):
        self.fetcher = PartFetcher(GrpcTransport(), streams=4, stall_timeout_s=20.0, **more)
        self.message = wire_packs.ticket_to_proto(ticket)
        self.shares = shares_of(self.message, [address])
        self.key = holder_key(holder, secret)

    def __call__(self):
        wanted = {part for share in self.shares for part in share.parts}
        return self.fetcher.fetch(self.message, self.shares, wanted, self.key)

    @property
    def received(self):
        """Bytes by path."""
        return Counter(self.fetcher.received)


@contextmanager
def closing(asker):
    try:
        yield asker
    finally:
        asker.fetcher.close()


async def all_of(make, host, link, served, **order):
    """A ticket for all parts of a pack, and what they are."""
    order = make.order(samples=3, degree=2, **order)
    await prepared(link, served, order)
    places = tuple(range(3 * len(order.samples[0].lengths.items)))
    specs = [PartSpec(key=order.key, cp_rank=rank) for rank in (0, 1)]
    specs.append(PartSpec(key=order.key, items=places))
    held = [list((await host.sequence(order.key, rank)).values()) for rank in (0, 1)]
    held.append((await host.items(order.key, places)).arrays)
    return make.ticket(*specs), held


def assert_same(fetched, held):
    assert not fetched.failures
    assert len(fetched.parts) == len(held)
    for part, arrays in zip(fetched.parts.values(), held, strict=True):
        for (_, tensor), array in zip(part.tensors, arrays, strict=True):
            assert tuple(tensor.shape) == array.shape
            np.testing.assert_array_equal(tensor.numpy(), array)


class Served(NamedTuple):
    """A worker, as its link and its ranks find it, and from within."""

    worker: str
    address: str
    door: NodeDoor
    sent: Counter[str]


@pytest.fixture
async def worker(host):
    sent = Counter()
    served = await serve_worker(
        host, worker=WORKER, listen="127.0.0.1:0", secret=SECRET, grace_s=0.5, sent=sent
    )
    yield Served(WORKER, served.address, served.door, sent)
    await served.stop()


@pytest.fixture
async def link(make):
    link = GrpcWorkerLink(make.secret, answer_timeout_s=30.0, release_timeout_s=30.0)
    yield link
    await link.close()


@pytest.mark.parametrize("shapes", [((1, 2, 2, 3), (16,)), (BIG, (16,)), ((1, 1, 1, 3), (0,))])
async def test_all_parts_but_those_of_the_first_ticket_come_through_memory_bit_by_bit(
    make, host, worker, link, shapes
):
    ticket, held = await all_of(make, host, link, worker, shapes=shapes)
    size = sum(array.nbytes for arrays in held for array in arrays)
    with closing(Asker(worker.address, ticket)) as ask:
        for times in range(4):
            assert_same(await asyncio.to_thread(ask), held)
            assert ask.received == {"grpc": size, "same_node": times * size}
    assert worker.sent == {"grpc": size, "same_node": 3 * size}


async def test_a_rank_that_wants_no_memory_gets_all_over_grpc(make, host, worker, link):
    ticket, held = await all_of(make, host, link, worker)
    with closing(Asker(worker.address, ticket, same_node=False)) as ask:
        for _ in range(2):
            assert_same(await asyncio.to_thread(ask), held)
        assert ask.received["same_node"] == 0


@pytest.mark.parametrize("where", ["off", "folder"])
async def test_a_service_chooses_the_place_of_the_socket_or_none(make, host, link, tmp_path, where):
    place = str(tmp_path) if where == "folder" else where
    served = await serve_worker(
        host, worker=WORKER, listen="127.0.0.1:0", secret=SECRET, same_node=place
    )
    found = Served(WORKER, served.address, served.door, Counter())
    ticket, held = await all_of(make, host, link, found)
    with closing(Asker(served.address, ticket)) as ask:
        for _ in range(2):
            assert_same(await asyncio.to_thread(ask), held)
        assert (ask.received["same_node"] > 0) == (where == "folder")
    assert len(list(tmp_path.iterdir())) == (where == "folder")
    await served.stop()
    assert not list(tmp_path.iterdir())


async def test_a_folder_that_cannot_have_a_socket_is_named(host, tmp_path):
    missing = str(tmp_path / "missing")
    with pytest.raises(SpecError, match=r"same_node: no socket can be made in .*missing"):
        await serve_worker(
            host, worker=WORKER, listen="127.0.0.1:0", secret=SECRET, same_node=missing
        )


# ---- rights ----------------------------------------------------------------------------------


def announced_by(served, holder=HOLDER):
    told = dict(served.door.announced(holder))
    return Announced(told[same_node.SOCKET], told[same_node.KEY], holder)


async def test_a_key_of_another_holder_opens_nothing(worker):
    of_other = announced_by(worker, "another")
    for forged in (
        Announced(of_other.socket, of_other.key, HOLDER),
        Announced(of_other.socket, b"", HOLDER),
        Announced(of_other.socket, of_other.key, ""),
    ):
        with pytest.raises(NodeLinkError):
            await asyncio.to_thread(NodeLink, forged)


async def test_a_link_serves_the_tickets_of_its_own_holder_alone(make, host, worker, link):
    ticket, _ = await all_of(make, host, link, worker)
    other = await asyncio.to_thread(NodeLink, announced_by(worker, "another"))
    with pytest.raises(NodeLinkError):
        await asyncio.to_thread(list, NodeStream(other, make.fetch(ticket)))
    other.close()


@pytest.mark.parametrize(
    "spoilt", [{"secret": b"of another service, 32 bytes ..."}, {"expires_unix_s": 1}]
)
async def test_a_ticket_that_grpc_would_refuse_is_refused(make, host, worker, link, spoilt):
    ticket, _ = await all_of(make, host, link, worker)
    bad = make.ticket(PartSpec(key=make.order().key, items=(0,)), **spoilt)
    opened = await asyncio.to_thread(NodeLink, announced_by(worker))
    with pytest.raises(NodeLinkError, match="TicketError"):
        await asyncio.to_thread(list, NodeStream(opened, make.fetch(bad)))
    stolen = make.fetch(ticket, session="another session")
    with pytest.raises(NodeLinkError, match="TicketError"):
        await asyncio.to_thread(list, NodeStream(opened, stolen))
    served = NodeStream(opened, make.fetch(ticket))  # the link still serves what is granted
    assert await asyncio.to_thread(lambda: sum(1 for _ in served)) > 3
    opened.close()


async def test_who_has_no_ticket_is_told_of_no_socket(make, worker, channel_to):
    ticket = make.ticket(PartSpec(key=make.order().key), expires_unix_s=1)
    stub = worker_pb2_grpc.WorkerStub(channel_to(worker.address))
    wanted = ((same_node.WANTED, same_node.VERSION),)
    call = stub.Fetch(make.fetch(ticket), metadata=wanted)
    with pytest.raises(grpc.aio.AioRpcError):
        async for _ in call:
            pass
    assert same_node.SOCKET not in dict(await call.initial_metadata())


async def test_a_window_can_be_neither_written_nor_shrunk_by_a_rank(worker):
    found = announced_by(worker)

    def try_all():
        with socket.socket(socket.AF_UNIX) as rank:
            rank.connect(same_node.socket_address(found.socket))
            frames = Frames()
            frames.feed(rank.recv(100))
            nonce = secrets.token_bytes(same_node.NONCE_BYTES)
            proof = same_node.proof_of(found.key, "rank", frames.take()[1], nonce)
            rank.sendall(same_node.frame(Kind.HELLO, HOLDER.encode() + nonce + proof))
            _, (window,), _, _ = socket.recv_fds(rank, 1000, 1)
            for change in (
                lambda: os.ftruncate(window, 1),
                lambda: os.pwrite(window, b"spoilt", 0),
                lambda: os.pwrite(os.open(f"/proc/self/fd/{window}", os.O_RDWR), b"spoilt", 0),
            ):
                with pytest.raises(PermissionError):
                    change()
            os.close(window)

    await asyncio.to_thread(try_all)


@pytest.mark.parametrize("sent", [b"\0" * 100, b"\xff" * 5, b"GET / HTTP/1.1\r\n\r\n", b""])
async def test_bytes_that_are_no_greeting_end_their_connection_alone(
    make, host, worker, link, sent
):
    ticket, held = await all_of(make, host, link, worker)

    def speak():
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.settimeout(20)
            stranger.connect(same_node.socket_address(announced_by(worker).socket))
            stranger.sendall(sent)
            stranger.shutdown(socket.SHUT_WR)
            while stranger.recv(1000):
                pass

    await asyncio.to_thread(speak)
    with closing(Asker(worker.address, ticket)) as ask:
        for _ in range(2):
            assert_same(await asyncio.to_thread(ask), held)
        assert ask.received["same_node"] > 0


async def test_connections_beyond_their_number_find_grpc(make, host, worker, link):
    ticket, held = await all_of(make, host, link, worker)
    found = announced_by(worker)

    def crowd():
        sockets = [socket.socket(socket.AF_UNIX) for _ in range(CONNECTIONS)]
        for each in sockets:
            each.connect(same_node.socket_address(found.socket))
            each.recv(1)
        return sockets

    sockets = await asyncio.to_thread(crowd)
    with closing(Asker(worker.address, ticket)) as ask:
        for _ in range(2):
            assert_same(await asyncio.to_thread(ask), held)
        assert ask.received["same_node"] == 0
    for each in sockets:
        each.close()


# ---- what breaks -----------------------------------------------------------------------------


def breaking_once(pieces):
    """The same, but the second chunk that is asked for breaks what asks."""
    asked = itertools.count()

    def broken(tensors, limit_bytes):
        for piece in pieces(tensors, limit_bytes):
            if next(asked) == 1:
                raise RuntimeError("breaks in its midst")
            yield piece

    return broken


async def test_a_link_that_is_cut_in_a_transfer_costs_no_byte(
    make, host, worker, link, monkeypatch
):
    ticket, held = await all_of(make, host, link, worker, shapes=(BIG, BIG))
    size = sum(array.nbytes for arrays in held for array in arrays)
    with closing(Asker(worker.address, ticket)) as ask:
        assert_same(await asyncio.to_thread(ask), held)
        monkeypatch.setattr(node_door, "part_pieces", breaking_once(part_pieces))
        for _ in range(3):
            assert_same(await asyncio.to_thread(ask), held)
        assert ask.received["grpc"] == 2 * size  # the first, and the one that broke
        assert ask.received["same_node"] > 2 * size  # it was opened again


async def test_wrong_bytes_in_memory_are_noticed_and_come_over_grpc(
    make, host, worker, link, monkeypatch
):
    ticket, held = await all_of(make, host, link, worker)
    with closing(Asker(worker.address, ticket)) as ask:
        assert_same(await asyncio.to_thread(ask), held)

        def spoilt(tensors, limit_bytes):
            return part_pieces([(name, tensor + 1) for name, tensor in tensors], limit_bytes)

        monkeypatch.setattr(node_door, "part_pieces", spoilt)
        assert_same(await asyncio.to_thread(ask), held)
        assert ask.received["same_node"] == 0


@pytest.mark.parametrize("path", ["grpc", "same_node"])
async def test_a_byte_that_changes_in_a_workers_memory_is_noticed(make, host, worker, link, path):
    ticket, held = await all_of(make, host, link, worker, shapes=(BIG, (16,)))
    with closing(Asker(worker.address, ticket, same_node=path == "same_node")) as ask:
        assert_same(await asyncio.to_thread(ask), held)
        picture = held[2][2]
        picture.flat[picture.size // 2] ^= 1  # since it was decoded
        (failure,) = (await asyncio.to_thread(ask)).failures
        assert isinstance(failure.error, CorruptPart)
        picture.flat[picture.size // 2] ^= 1
        assert_same(await asyncio.to_thread(ask), held)


async def test_a_byte_that_changes_on_its_way_over_grpc_is_noticed(
    make, host, worker, link, monkeypatch
):
    ticket, held = await all_of(make, host, link, worker, shapes=(BIG, (16,)))

    def flipped(tensors, limit_bytes):
        for chunk in part_chunks(tensors, limit_bytes):
            yield chunk[:-1] + bytes([chunk[-1] ^ 1])

    with closing(Asker(worker.address, ticket, same_node=False)) as ask:
        with monkeypatch.context() as patched:
            patched.setattr(worker_servicer, "part_chunks", flipped)
            (failure,) = (await asyncio.to_thread(ask)).failures
        assert isinstance(failure.error, CorruptPart)
        assert_same(await asyncio.to_thread(ask), held)


@contextmanager
def serving_process(host="127.0.0.1"):
    """A worker in a process of its own that holds a pack of 55 MB: (address, process)."""
    command = [sys.executable, "-m", "benchmarks.data.part_path", "--serve", "worker"]
    command += ["--listen", host]
    root = Path(__file__).parents[2]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=root) as process:
        try:
            yield process.stdout.readline().strip(), psutil.Process(process.pid)
        finally:
            process.kill()


def asker_of_process(address):
    part = PartSpec(key=part_path.KEY, items=tuple(range(part_path.PICTURES)))
    ticket = ticket_for(
        {part_path.WORKER: (part,)}, rank=0, holder=part_path.HOLDER, expires_unix_s=2**40
    )
    signed = sign_ticket(ticket, part_path.SECRET)
    return Asker(address, signed, holder=part_path.HOLDER, secret=part_path.SECRET)


def windows_of(process):
    """Windows that the process has mapped, and its open files."""
    maps = Path(f"/proc/{process.pid}/maps").read_text()
    return maps.count("memfd:window"), len(os.listdir(f"/proc/{process.pid}/fd"))


@pytest.mark.long
def test_a_worker_that_is_killed_in_a_transfer_is_named_and_its_successor_serves():
    with serving_process() as (address, process), closing(asker_of_process(address)) as ask:
        assert not ask().failures
        assert not ask().failures
        assert ask.received == {"grpc": part_path.PACK_BYTES, "same_node": part_path.PACK_BYTES}
        process.send_signal(signal.SIGSTOP)  # with the request in its socket
        came = []
        thread = threading.Thread(target=lambda: came.append(ask()))
        thread.start()
        process.send_signal(signal.SIGKILL)
        thread.join()
        assert not came[0].parts
        assert [failure.worker for failure in came[0].failures] == [part_path.WORKER]
        with serving_process() as (successor, _):
            ask.shares = shares_of(ask.message, [successor])
            for _ in range(2):
                assert not ask().failures
            assert ask.received["same_node"] == 2 * part_path.PACK_BYTES


RANK = """
import os, signal, sys
from tests.serving.test_node_door import asker_of_process
from trainer_client.node_link import NodeLink
ask = asker_of_process(sys.argv[1])
assert not ask().failures
filled = NodeLink.filled
def stop(self, payload):
    os.write(1, b"holds\\n")
    os.kill(os.getpid(), signal.SIGSTOP)
    return filled(self, payload)
NodeLink.filled = stop
ask()
"""


@pytest.mark.long
def test_a_rank_that_is_killed_while_it_has_memory_mapped_leaves_nothing_at_the_worker():
    root = Path(__file__).parents[2]
    with serving_process() as (address, process):
        with closing(asker_of_process(address)) as ask:
            assert not ask().failures
        wait_for(lambda: windows_of(process)[0] == 0)
        before = windows_of(process)
        for _ in range(3):
            command = [sys.executable, "-c", RANK, address]
            with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=root) as rank:
                assert rank.stdout.readline() == b"holds\n"
                assert windows_of(process)[0] == 1
                rank.kill()
            wait_for(lambda: windows_of(process)[0] == 0)
        wait_for(lambda: windows_of(process)[1] <= before[1])
        with closing(asker_of_process(address)) as ask:
            for _ in range(2):
                assert not ask().failures
            assert ask.received["same_node"] == part_path.PACK_BYTES


@contextmanager
def another_host():
    """A network namespace, as another host has it: (its name, the address of this one from it)."""
    name = f"ds{os.getpid()}"
    steps = (
        f"ip netns add {name}",
        f"ip link add {name}a type veth peer name {name}b netns {name}",
        f"ip addr add 10.231.77.1/30 dev {name}a",
        f"ip link set {name}a up",
        f"ip -n {name} addr add 10.231.77.2/30 dev {name}b",
        f"ip -n {name} link set {name}b up",
    )
    try:
        for step in steps:
            made = subprocess.run(step.split(), capture_output=True, check=False)
            if made.returncode:
                pytest.skip(f"no network namespace can be made here: {made.stderr.decode()}")
        yield name, "10.231.77.1"
    finally:
        subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


FETCHED = """
import sys
from tests.serving.test_node_door import asker_of_process
ask = asker_of_process(sys.argv[1])
for _ in range(3):
    assert not ask().failures
print(ask.received["grpc"] // ask.received.total(), ask.received["same_node"])
"""


@pytest.mark.long
@pytest.mark.skipif(shutil.which("ip") is None, reason="hosts are played by the command ip")
def test_of_two_ranks_that_of_another_host_gets_all_over_grpc():
    root = Path(__file__).parents[2]
    with another_host() as (there, address), serving_process(address) as (served, _):
        fetch = [sys.executable, "-c", FETCHED, served]
        for where, came in (
            ([], f"0 {2 * part_path.PACK_BYTES}"),
            (["ip", "netns", "exec", there], "1 0"),
        ):
            told = subprocess.run([*where, *fetch], capture_output=True, cwd=root, check=True)
            assert told.stdout.decode().strip() == came
