"""Workers that take orders and say at once that the packs are ready: bytes are not the subject.

Orders and receipts are columns here too: a worker makes an object of each sample, which for all
workers of a step takes longer than all that the coordinator does, on the processors that it is
measured on.
"""

import asyncio
from collections.abc import AsyncIterator, Iterable
from multiprocessing.connection import Connection
from typing import Any

import grpc.aio
import numpy as np
from dataservice_proto.columns import ORDERS, read
from dataservice_proto.v1 import worker_pb2, worker_pb2_grpc

from dataservice.core.content import SAMPLE_DIGEST
from dataservice.core.orders import PackKeys, SourceWork
from dataservice.core.receipts import PackAnswers, PackReceipts
from dataservice.serving import wire_packs
from dataservice.serving.worker_servicer import ANSWERED_AT_ONCE

_ORDERS = {column.name: column for column in ORDERS}


class StandIn(worker_pb2_grpc.WorkerServicer):
    """The Worker service without decoders."""

    def __init__(self) -> None:
        self._held: dict[tuple[str, int, str], set[int]] = {}

    async def Prepare(
        self, request: worker_pb2.PackOrders, _context: Any
    ) -> AsyncIterator[worker_pb2.PackAnswers]:
        """Receipts as of packs that decoded well, as many in a message as workers send."""
        self._forget(request.released)
        packs, samples = (
            read(getattr(request, name), request.packs, _ORDERS[name])
            for name in ("pack", "samples")
        )
        plan = request.job, request.step, request.plan_digest
        self._held.setdefault(plan, set()).update(packs.tolist())
        for start in range(0, len(packs), ANSWERED_AT_ONCE):
            own = slice(start, start + ANSWERED_AT_ONCE)
            receipts = _receipts(request, packs[own], samples[own])
            yield wire_packs.pack_answers_to_proto(PackAnswers(receipts=receipts))

    async def Release(
        self, request: worker_pb2.ReleaseRequest, _context: Any
    ) -> worker_pb2.ReleaseResponse:
        """Forget packs."""
        self._forget(request.packs)
        return worker_pb2.ReleaseResponse()

    def _forget(self, packs: Iterable[worker_pb2.PackKeys]) -> None:
        for of in packs:
            plan = of.job, of.step, of.plan_digest
            left = self._held.pop(plan, set()).difference(of.packs)
            if left:
                self._held[plan] = left

    async def Held(
        self, _request: worker_pb2.HeldRequest, _context: Any
    ) -> AsyncIterator[worker_pb2.HeldPacks]:
        """What was ordered and not released."""
        for (job, step, plan_digest), packs in self._held.items():
            keys = PackKeys(job=job, step=step, plan_digest=plan_digest, packs=sorted(packs))
            yield worker_pb2.HeldPacks(packs=wire_packs.pack_keys_to_proto(keys))

    async def Fetch(
        self, _request: worker_pb2.FetchRequest, _context: Any
    ) -> AsyncIterator[worker_pb2.FetchChunk]:
        """No rank comes for bytes here."""
        raise NotImplementedError
        yield

    async def Index(
        self, _request: worker_pb2.IndexOrder, _context: Any
    ) -> AsyncIterator[worker_pb2.IndexAnswer]:
        """Nothing is indexed here."""
        raise NotImplementedError
        yield


def _receipts(request: worker_pb2.PackOrders, packs: Any, samples: Any) -> PackReceipts:
    k, n = len(packs), int(samples.sum())
    work = SourceWork(
        source=request.sources[0],
        samples=n,
        read_s=0.01 * k,
        decode_s=0.1 * k,
        read_bytes=10_000 * k,
    )
    return PackReceipts(
        job=request.job,
        step=request.step,
        plan_digest=request.plan_digest,
        pack=packs,
        size_bytes=np.ones(k, np.int64),
        decode_s=np.full(k, 0.1),
        room_s=np.zeros(k),
        bad_samples=np.zeros(k, np.int64),
        digests=samples,
        sample_digests=np.zeros(n, SAMPLE_DIGEST),
        sources=(work,),
    )


def serve(workers: int, line: Connection) -> None:
    """Serve so many workers, say where, and end when the line says so."""
    asyncio.run(_serve(workers, line))


async def _serve(workers: int, line: Connection) -> None:
    servers, addresses = [], []
    for _ in range(workers):
        server = grpc.aio.server()
        worker_pb2_grpc.add_WorkerServicer_to_server(StandIn(), server)
        addresses.append(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
        await server.start()
        servers.append(server)
    line.send(addresses)
    await asyncio.get_running_loop().run_in_executor(None, line.recv)
    for server in servers:
        await server.stop(0.0)
