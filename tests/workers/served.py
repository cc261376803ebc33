"""What a pool's worker serves where no decoding is wanted, and whoever asks it."""

import asyncio
import contextlib
import gc
import os
import sys

from ray import cloudpickle

from dataservice.core.whereabouts import ANYWHERE

# Ray's workers cannot import tests: send what this module defines by value.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Served:
    """A real server that tells its worker's name and process, and how it was stopped."""

    def __init__(self, server):
        self.server = server
        self.where = ANYWHERE
        self.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"

    async def stop(self):
        self.server.close()
        await self.server.wait_closed()


async def serve(worker):
    async def answer(reader, writer):
        writer.write(f"{worker} {os.getpid()} {gc.get_freeze_count()}".encode())
        await writer.drain()
        writer.close()
        await writer.wait_closed()

    return Served(await asyncio.start_server(answer, "127.0.0.1", 0))


async def ask(address):
    """(worker, process id) of whoever answers there."""
    worker, process_id, _ = await _answer(address)
    return worker, int(process_id)


async def never_searched(address):
    """How many objects whoever answers there leaves out of its search for cycles."""
    return int((await _answer(address))[2])


async def _answer(address):
    host, _, port = address.partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        worker, process_id, count = (await reader.read()).decode().split()
    finally:  # whoever asks may be cancelled
        writer.close()
    await writer.wait_closed()
    return worker, process_id, count


async def nobody_at(address):
    """Wait until nobody listens there: a process that was killed may take a while to end."""
    async with asyncio.timeout(30):
        while True:
            # Whoever ends just now takes the connection and gives no answer.
            with contextlib.suppress(ConnectionResetError, ValueError):
                try:
                    await ask(address)
                except ConnectionRefusedError:
                    return
            await asyncio.sleep(0.01)
