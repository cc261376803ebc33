"""What the path of a part costs beside bare gRPC: `python -m benchmarks.data.part_path`, a minute.

A worker's server sends the pictures of a pack, 32 of 1.7 MB, to a client of the trainers, over
gRPC and through memory of the same machine; bare gRPC sends the same bytes in messages of the same
size, and a bare mapping is filled and read. All take turns, each receiver in a process of its own:
what one of them tells its C library is not told to the others. Figures are seconds of the processor
a GB of the sender's process and of the receiver's, and GB a second; the best of the rounds.
"""

import argparse
import asyncio
import mmap
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import psutil
from dataservice_proto.heap_threshold import keep_freed_messages

from benchmarks.data.bare_grpc import METHOD, held_bytes, serve
from benchmarks.harness import hardware, judged
from dataservice.core.crc32 import crc32
from dataservice.core.orders import PackKey, PartSpec, UnitRange
from dataservice.core.sample import HeldItems
from dataservice.core.tickets import holder_key, prove, sign_ticket, ticket_for
from dataservice.serving import wire_packs
from dataservice.serving.server import serve_worker
from trainer_client.fetch import PartFetcher, shares_of
from trainer_client.transport import GrpcTransport

PICTURES, PICTURE_BYTES = 32, 616 * 924 * 3
PACK_BYTES = PICTURES * PICTURE_BYTES
WARM_PACKS = 3
SECRET, WORKER, HOLDER = b"a secret of 32 bytes for a bench", "worker-0.1", "a holder"
KEY = PackKey(job="bench", step=0, plan_digest="", pack=0)
NAMES = {
    "bare": "bare gRPC, 1 MiB messages into one buffer",
    "bare_kept": "the same, where the C library keeps freed messages",
    "grpc": "a worker's parts over gRPC",
    "same_node": "a worker's parts through memory",
    "mapping": "a bare mapping, filled and read",
}
OURS = ("grpc", "same_node")
CPU_BAR, RECEIVER_BAR, WALL_BAR = 1.2, 1.25, 0.9


class HeldPictures:
    """core.ports.PackHost of one pack."""

    def __init__(self) -> None:
        self._pictures = list(held_bytes(PACK_BYTES).reshape(PICTURES, PICTURE_BYTES))
        self._crc32s = list(map(crc32, self._pictures))  # a worker has them since it decoded

    async def items(
        self, key: PackKey, items: Sequence[int], ranges: Sequence[UnitRange] = ()
    ) -> HeldItems:
        """The pictures."""
        return HeldItems(
            arrays=[self._pictures[item] for item in items],
            crc32s=[self._crc32s[item] for item in items],
        )


async def _serve_worker(host: str) -> None:
    served = await serve_worker(
        HeldPictures(),  # type: ignore[arg-type]  # of a pack that is ready no more is asked
        worker=WORKER,
        listen=f"{host}:0",
        secret=SECRET,
    )
    print(served.address, flush=True)
    await asyncio.Event().wait()


@contextmanager
def sender(kind: str) -> Iterator[tuple[str, psutil.Process]]:
    """A process that sends the pack: its address."""
    with _process("--serve", kind) as process:
        assert process.stdout is not None
        yield process.stdout.readline().strip(), psutil.Process(process.pid)


@contextmanager
def _process(*arguments: str) -> Iterator["subprocess.Popen[str]"]:
    command = [sys.executable, "-m", "benchmarks.data.part_path", *arguments]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def _bare(address: str) -> Callable[[], None]:
    channel = grpc.insecure_channel(address)
    stream: Any = channel.unary_stream(METHOD)
    buffer = np.zeros(PACK_BYTES, np.uint8).data

    def receive() -> None:
        at = 0
        for message in stream(b"1"):
            buffer[at : at + len(message)] = message
            at += len(message)

    return receive


def parts(address: str, *, same_node: bool) -> Callable[[], None]:
    """Receives the pack as a rank does."""
    fetcher = PartFetcher(GrpcTransport(), streams=1, stall_timeout_s=30.0, same_node=same_node)
    part = PartSpec(key=KEY, items=tuple(range(PICTURES)))
    ticket = sign_ticket(
        ticket_for({WORKER: (part,)}, rank=0, holder=HOLDER, expires_unix_s=2**40), SECRET
    )
    message, key = wire_packs.ticket_to_proto(ticket), holder_key(HOLDER, SECRET)
    assert prove(ticket, WORKER, key)
    shares = shares_of(message, [address])
    wanted = {part for share in shares for part in share.parts}

    def receive() -> None:
        fetched = fetcher.fetch(message, shares, set(wanted), key)
        assert fetched.parts.keys() == wanted, fetched.failures
        path = "same_node" if same_node else "grpc"
        assert fetcher.received[path] > 0 or fetcher.received["grpc"] == PACK_BYTES

    return receive


def _bare_kept(address: str) -> Callable[[], None]:
    keep_freed_messages()
    return _bare(address)


def _mapping(_address: str) -> Callable[[], None]:
    descriptor = os.memfd_create("bench")
    os.ftruncate(descriptor, PACK_BYTES)
    shared = mmap.mmap(descriptor, PACK_BYTES)
    os.close(descriptor)
    data, buffer = np.ones(PACK_BYTES, np.uint8), np.zeros(PACK_BYTES, np.uint8)

    def receive() -> None:
        np.copyto(np.frombuffer(shared, np.uint8), data)
        np.copyto(buffer, np.frombuffer(shared, np.uint8))

    return receive


@dataclass(frozen=True, slots=True)
class Figure:
    """Of a GB: seconds of the sender, of the receiver, and on the wall."""

    sender_s: float
    receiver_s: float
    wall_s: float

    @property
    def cpu_s(self) -> float:
        """Of both."""
        return self.sender_s + self.receiver_s

    def within(self, bare: "Figure") -> bool:
        """Whether all three bars are met."""
        return (
            self.cpu_s <= CPU_BAR * bare.cpu_s
            and self.receiver_s <= RECEIVER_BAR * bare.receiver_s
            and WALL_BAR * self.wall_s <= bare.wall_s
        )


RECEIVERS: dict[str, tuple[str, Callable[[str], Callable[[], None]]]] = {
    "bare": ("bare", _bare),
    "bare_kept": ("bare", _bare_kept),
    "grpc": ("worker", partial(parts, same_node=False)),
    "same_node": ("worker", partial(parts, same_node=True)),
    "mapping": ("", _mapping),
}
"""By path: what sends, and what receives from its address."""


def _receive(path: str, address: str) -> None:
    """Receive as many packs as each line of standard input says, and print the seconds of this
    process and of the wall."""
    receive = RECEIVERS[path][1](address)
    for line in sys.stdin:
        before = time.process_time(), time.monotonic()
        for _ in range(int(line)):
            receive()
        print(time.process_time() - before[0], time.monotonic() - before[1], flush=True)


def measured(
    receiver: "subprocess.Popen[str]", sender: psutil.Process | None, packs: int
) -> Figure:
    """Of so many packs."""

    def spent_s() -> float:
        if sender is None:
            return 0.0
        times = sender.cpu_times()
        return times.user + times.system

    assert receiver.stdin is not None
    assert receiver.stdout is not None
    before_s = spent_s()
    print(packs, file=receiver.stdin, flush=True)
    receiver_s, wall_s = map(float, receiver.stdout.readline().split())
    gigabytes = packs * PACK_BYTES / 1e9
    return Figure((spent_s() - before_s) / gigabytes, receiver_s / gigabytes, wall_s / gigabytes)


def run(rounds: int, packs: int) -> dict[str, Figure]:
    """The best of each, in turns."""
    found: dict[str, list[Figure]] = {path: [] for path in NAMES}
    with ExitStack() as started:
        senders = {kind: started.enter_context(sender(kind)) for kind in ("bare", "worker")}
        receivers = {}
        for path, (kind, _) in RECEIVERS.items():
            address, process = senders.get(kind, ("", None))
            receiver = started.enter_context(_process("--receive", path, "--from", address))
            measured(receiver, process, WARM_PACKS)
            receivers[path] = receiver, process
        for _ in range(rounds):
            for path, (receiver, process) in receivers.items():
                found[path].append(measured(receiver, process, packs))
    return {path: min(each, key=lambda figure: figure.cpu_s) for path, each in found.items()}


def to_markdown(best: dict[str, Figure], rounds: int, packs: int) -> str:
    """The run as a part of a results file."""
    bare = best["bare"]
    lines = [
        f"`python -m benchmarks.data.part_path` on {hardware()}; {packs} packs of "
        f"{PACK_BYTES / 1e6:.0f} MB, the best of {rounds} rounds in turns; load "
        f"{os.getloadavg()[0]:.1f} on {os.cpu_count()} cores.",
        "",
        "| path | CPU s a GB | sender | receiver | over bare gRPC | receiver's | GB/s | over it |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {NAMES[name]} | {each.cpu_s:.2f} | {each.sender_s:.2f} | {each.receiver_s:.2f} "
        f"| {each.cpu_s / bare.cpu_s:.2f} | {each.receiver_s / bare.receiver_s:.2f} "
        f"| {1 / each.wall_s:.2f} | {bare.wall_s / each.wall_s:.2f} |"
        for name, each in best.items()
    ]
    lines += [
        "",
        f"Bars: CPU ≤ {CPU_BAR} of bare gRPC, the receiver's ≤ {RECEIVER_BAR} of its, GB/s ≥ "
        f"{WALL_BAR} of its. "
        + ", ".join(f"{NAMES[name]}: {judged(best[name].within(bare))}" for name in OURS)
        + ".",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.data.part_path", description=__doc__
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--packs", type=int, default=10, help="of a round, 55 MB each")
    parser.add_argument("--listen", default="127.0.0.1", help=argparse.SUPPRESS)
    parser.add_argument("--serve", choices=("bare", "worker"), help=argparse.SUPPRESS)
    parser.add_argument("--receive", choices=NAMES, help=argparse.SUPPRESS)
    parser.add_argument("--from", dest="address", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help="write the table to this file too")
    given = parser.parse_args()
    if given.serve == "bare":
        serve(held_bytes(PACK_BYTES))
    elif given.receive:
        _receive(given.receive, given.address)
    elif given.serve:
        asyncio.run(_serve_worker(given.listen))
    else:
        text = to_markdown(run(given.rounds, given.packs), given.rounds, given.packs)
        print(text)
        if given.out:
            given.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
