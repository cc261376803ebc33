"""A worker's host that reports: a log line and a span for each pack, and metrics of the worker.

servicer ──► WatchedHost ──► DecodingHost
              │ prepared      ▲ stats
              ▼               │
      log, StepTracer     /metrics
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from dataservice.core.orders import PackKey, PackOrder, PackReceipt, StorageOutage, UnitRange
from dataservice.core.ports import PackHost
from dataservice.core.sample import HeldItems
from dataservice.observability.endpoint import serve_metrics
from dataservice.observability.traces import StepTracer
from dataservice.observability.worker_metrics import worker_registry
from dataservice.workers.host import DecodingHost, HostStats
from dataservice.workers.pack import SequencePart

log = logging.getLogger(__name__)

SCRAPE_LIMIT_S = 5.0


class WatchedHost(PackHost):
    """core.ports.PackHost around another, which does the work. Errors and cancellation pass
    through unchanged."""

    def __init__(self, host: DecodingHost, *, worker: str, tracer: StepTracer | None) -> None:
        self._host = host
        self._worker = worker
        self._tracer = tracer

    async def prepare(self, order: PackOrder) -> PackReceipt:
        """Decode, assemble and hold a pack; report it when it is ready."""
        key, began_s = order.key, time.time()
        receipt = await self._host.prepare(order)
        log.info(
            "pack %d of %d samples: ready after %.3g s, %.3g s of slots, %d bytes, %d masked",
            key.pack,
            len(order.samples),
            time.time() - began_s,
            receipt.decode_s,
            receipt.size_bytes,
            len(receipt.bad_samples),
            extra={
                "job": key.job,
                "step": key.step,
                "worker": self._worker,
                "trace_id": key.plan_digest,
            },
        )
        if self._tracer is not None:
            self._tracer.part(
                "prepare pack",
                key.plan_digest,
                began_s=began_s,
                job=key.job,
                step=key.step,
                pack=key.pack,
                worker=self._worker,
                decode_s=receipt.decode_s,
            )
        return receipt

    async def sequence(self, key: PackKey, cp_rank: int) -> SequencePart:
        """One group member's sequence arrays."""
        return await self._host.sequence(key, cp_rank)

    async def items(
        self, key: PackKey, items: Sequence[int], ranges: Sequence[UnitRange] = ()
    ) -> HeldItems:
        """The encoder items at these places, and of each its range where there are some."""
        return await self._host.items(key, items, ranges)

    def release(self, packs: Sequence[PackKey]) -> None:
        """Forget these packs."""
        self._host.release(packs)

    def held(self) -> Sequence[PackKey]:
        """Packs that were ordered and are not yet released."""
        return self._host.held()

    def outages(self) -> Sequence[StorageOutage]:
        """Sources whose storage does not answer."""
        return self._host.outages()


def serve_host_metrics(
    host: DecodingHost,
    listen: str,
    *,
    slots: int,
    worker: str,
    refused: Mapping[str, int],
    sent: Mapping[str, int],
) -> Callable[[], None]:
    """Serve a host's metrics, the number of tickets that its server has `refused`, and the bytes
    that it has `sent` by path. Call it on the host's event loop. Returns a function that starts
    closing the port and does not wait. Raises SpecError."""
    loop = asyncio.get_running_loop()

    async def stats() -> HostStats:
        return host.stats()

    def read() -> HostStats:  # called in the endpoint's thread; the host belongs to the event loop
        return asyncio.run_coroutine_threadsafe(stats(), loop).result(SCRAPE_LIMIT_S)

    registry = worker_registry(worker, slots=slots, read=read, refused=refused, sent=sent)
    endpoint = serve_metrics(registry, listen)
    log.info("%s: metrics at http://%s/metrics", worker, endpoint.address)
    # In a thread: a scrape may be waiting for this event loop, so the loop must not wait for it.
    return threading.Thread(target=endpoint.stop, name="metrics-stop", daemon=True).start
