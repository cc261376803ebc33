"""Workers that take orders and say at once that the packs are ready: bytes are not the subject."""

import asyncio
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.scale.service import SECRET
from dataservice.core.orders import PackKey, PackOrder, PackReceipt, SourceWork
from dataservice.core.ports import PackHost
from dataservice.serving.server import serve_worker

DIGEST_BYTES = 8


class StandIn(PackHost):
    """core.ports.PackHost without decoders."""

    def __init__(self) -> None:
        self._held: set[PackKey] = set()

    async def prepare(self, order: PackOrder) -> PackReceipt:
        """A receipt as of a pack that decoded well."""
        self._held.add(order.key)
        source = order.samples[0].ref.source
        work = SourceWork(
            source=source, samples=len(order.samples), read_s=0.01, decode_s=0.1, read_bytes=10_000
        )
        return PackReceipt(
            key=order.key,
            size_bytes=1,
            decode_s=0.1,
            sources=(work,),
            sample_digests=bytes(DIGEST_BYTES * len(order.samples)),
        )

    async def sequence(self, key: PackKey, cp_rank: int) -> Any:
        """No rank comes for bytes here."""
        raise NotImplementedError

    async def items(self, key: PackKey, items: Sequence[int], ranges: Sequence[Any] = ()) -> Any:
        """No rank comes for bytes here."""
        raise NotImplementedError

    def release(self, packs: Sequence[PackKey]) -> None:
        """Forget packs."""
        self._held.difference_update(packs)

    def held(self) -> Sequence[PackKey]:
        """What was ordered and not released."""
        return tuple(self._held)


def serve(workers: int, line: Connection) -> None:
    """Serve so many workers, say where, and end when the line says so."""
    asyncio.run(_serve(workers, line))


async def _serve(workers: int, line: Connection) -> None:
    served = [
        await serve_worker(
            StandIn(), worker=f"worker-{k}", listen="127.0.0.1:0", secret=SECRET, grace_s=0.0
        )
        for k in range(workers)
    ]
    line.send([each.address for each in served])
    await asyncio.get_running_loop().run_in_executor(None, line.recv)
    for each in served:
        await each.stop()
