"""A TCP gate between trainers and the service, which can fail as a network does.

    rank ──► 127.0.0.1:gate port ──► coordinator or worker

A rank reaches every address through a port of the gate. For a set of addresses the gate can `cut`
(reset open connections and refuse new ones), fall `silent` (drop all packets, but close nothing),
`delay` every chunk, or `hold` the stream to the ranks after a number of bytes. `heal` ends all of
these; bytes held back by silence are then delivered, as TCP would retransmit them. A fault also
affects an address that a rank first asks for while it lasts.

Everything runs on one event loop in a separate thread; the public methods may be called from any
thread, and return when the change has taken effect.
"""

import asyncio
import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, TypeVar

Mode = Literal["open", "cut", "silent"]
Result = TypeVar("Result")
Which = Callable[[str], bool]
"""Whether a fault affects this address."""

CHUNK_BYTES = 1 << 16
ANSWER_LIMIT_S = 30.0
CLOSING_S = 0.05
TURNS_TO_BEGIN = 10  # of the loop; a connection that was accepted takes four


def through_gate(control: str, address: str) -> str:
    """The gate's port for `address`, for a rank. `control` is the gate's own address."""
    host, _, port = control.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=ANSWER_LIMIT_S) as line:
        line.sendall(address.encode() + b"\n")
        with line.makefile() as answer:
            return answer.readline().strip()


@dataclass(kw_only=True, slots=True, eq=False)
class _Link:
    """One address and the faults on it. `left_bytes` may still pass to the ranks."""

    address: str
    server: asyncio.Server | None = None
    mode: Mode = "open"
    delay_s: float = 0.0
    left_bytes: int | None = None
    writers: set[asyncio.StreamWriter] = field(default_factory=set)

    def change(self, which: Which, changes: dict[str, Any]) -> None:
        """Change the faults, if they are to affect this address."""
        if which(self.address):
            for name, value in changes.items():
                setattr(self, name, value)


class Gate:
    """A running gate; use as a context manager."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="gate", daemon=True)
        self._links: dict[str, _Link] = {}
        self._in_force: list[tuple[Which, dict[str, Any]]] = []  # since `heal`; for later links
        self._changed = asyncio.Condition()
        self._opening = asyncio.Lock()
        self._held = threading.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._control: asyncio.Server | None = None
        self._closing = False
        self.control = ""

    def __enter__(self) -> "Gate":
        self._thread.start()
        self.control = self._run(self._open())
        return self

    def __exit__(self, *_: object) -> None:
        self._run(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    @property
    def connected(self) -> list[str]:
        """All addresses with open connections."""
        return sorted(link.address for link in [*self._links.values()] if link.writers)

    # ---- faults ------------------------------------------------------------------------

    def cut(self, which: Which) -> None:
        """Reset open connections and refuse new ones, until `heal`."""
        self._run(self._change(which, mode="cut"))

    def silence(self, which: Which) -> None:
        """Let nothing pass in either direction, and close nothing, until `heal`."""
        self._run(self._change(which, mode="silent"))

    def delay(self, which: Which, delay_s: float) -> None:
        """Delay every chunk by `delay_s`."""
        self._run(self._change(which, delay_s=delay_s))

    def hold(self, which: Which, after_bytes: int) -> None:
        """Hold back the stream to the ranks after `after_bytes` more bytes have passed."""
        self._held.clear()
        self._run(self._change(which, left_bytes=after_bytes))

    def holds(self) -> bool:
        """Whether a stream is held back in the middle."""
        return self._held.is_set()

    def release(self) -> None:
        """End `hold`; other faults stay."""
        self._run(self._change(lambda _: True, left_bytes=None))

    def heal(self) -> None:
        """End all faults."""
        self._in_force = []
        self._run(self._change(lambda _: True, mode="open", delay_s=0.0, left_bytes=None))

    # ---- on the loop -------------------------------------------------------------------

    def _run(self, work: Coroutine[Any, Any, Result]) -> Result:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(ANSWER_LIMIT_S)

    async def _open(self) -> str:
        self._control = await asyncio.start_server(self._answer, "127.0.0.1", 0)
        return _address_of(self._control)

    async def _close(self) -> None:
        assert self._control is not None
        self._closing = True  # a connection that was accepted may begin only now
        links = [link.server for link in self._links.values()]
        servers = [server for server in (self._control, *links) if server is not None]
        for server in servers:
            for listening in server.sockets:
                self._loop.remove_reader(listening.fileno())
        for _ in range(TURNS_TO_BEGIN):  # asyncio never closes one that its server does not await
            await asyncio.sleep(0)
        for server in servers:
            server.close()
        tasks = [*self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(CLOSING_S)  # sockets are closed in the loop's next iterations

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        address = (await reader.readline()).decode().strip()
        async with self._opening:  # several ranks may ask for one address at the same time
            if address not in self._links:
                link = self._links[address] = _Link(address=address)
                for which, changes in self._in_force:
                    link.change(which, changes)
            link = self._links[address]
            if link.server is None:
                link.server = await asyncio.start_server(
                    partial(self._connected, link), "127.0.0.1", 0
                )
        writer.write(_address_of(link.server).encode() + b"\n")
        writer.close()

    async def _change(self, which: Which, **changes: Any) -> None:
        async with self._changed:
            self._in_force.append((which, changes))
            for link in self._links.values():
                link.change(which, changes)
                if link.mode == "cut":
                    for writer in [*link.writers]:
                        _reset(writer)
            self._changed.notify_all()

    async def _connected(
        self, link: _Link, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        link.writers.add(writer)
        try:
            if link.mode != "cut" and not self._closing:
                await self._pass(link, reader, writer)
        except (OSError, asyncio.CancelledError):
            pass  # either end is gone, or the gate closes
        finally:
            link.writers.discard(writer)
            _reset(writer)

    async def _pass(
        self, link: _Link, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Pass bytes until one end closes: gRPC has no use for half-closed connections."""
        await self._passage(link)  # while the link is silent, even connecting never ends
        host, _, port = link.address.rpartition(":")
        far_reader, far_writer = await asyncio.open_connection(host, int(port))
        link.writers.add(far_writer)
        pumps = [
            asyncio.create_task(self._pump(link, reader, far_writer, to_rank=False)),
            asyncio.create_task(self._pump(link, far_reader, writer, to_rank=True)),
        ]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            link.writers.discard(far_writer)
            _reset(far_writer)  # before this task waits: the gate may close just then
            await asyncio.gather(*pumps, return_exceptions=True)

    async def _pump(
        self,
        link: _Link,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        *,
        to_rank: bool,
    ) -> None:
        while data := await reader.read(CHUNK_BYTES):
            while data:
                size_bytes = await self._passage(link, len(data), to_rank=to_rank)
                writer.write(data[:size_bytes])
                await writer.drain()
                data = data[size_bytes:]

    async def _passage(self, link: _Link, size_bytes: int = 0, *, to_rank: bool = False) -> int:
        """Wait until bytes may pass; returns how many of them may."""

        def shut() -> bool:
            return link.mode == "silent" or (to_rank and link.left_bytes == 0)

        if link.delay_s:
            await asyncio.sleep(link.delay_s)
        async with self._changed:
            if to_rank and link.left_bytes == 0:
                self._held.set()
            await self._changed.wait_for(lambda: not shut())
        if not to_rank or link.left_bytes is None:
            return size_bytes
        allowed = min(size_bytes, link.left_bytes)
        link.left_bytes -= allowed
        return allowed


def _address_of(server: asyncio.Server) -> str:
    host, port = server.sockets[0].getsockname()
    return f"{host}:{port}"


def _reset(writer: asyncio.StreamWriter) -> None:
    """Close with RST, as a broken connection does, not with FIN."""
    sock = writer.get_extra_info("socket")
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
