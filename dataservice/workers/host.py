"""Packs being decoded and packs that are ready: what a worker holds.

Contract.
  Success      `prepare` returns once the pack is assembled; it is held until released. The
               same order again joins the work or returns the same receipt.
  Bad sample   Whatever one sample raises masks that sample alone; the receipt names it.
  Failure      When the pack itself cannot be built (its pipeline is refused, memory is out),
               `prepare` and all who wait for its parts raise; nothing is held, so the same
               order may be tried again.
  Cancelling   a call stops the caller's waiting, never the work: others may wait for it, and
               a retry finds it done. `release` stops the work: samples not yet started are
               dropped, those in a thread run out unused, and who waits gets NotFoundError.

Everything here runs on one event loop; only reading, decoding and assembling run in threads.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from dataservice.core.errors import NotFoundError, SampleError, SourceError, SpecError
from dataservice.core.orders import BadSample, PackKey, PackOrder, PackReceipt, PackSample
from dataservice.core.ports import SampleDecoder, SampleReader
from dataservice.core.sample import DecodedSample
from dataservice.workers.pack import (
    AssembledPack,
    ItemArray,
    SequencePart,
    assemble,
    check_planned_shape,
    masked_sample,
)
from dataservice.workers.pipelines import Pipeline, PipelineCache, PipelineFactory

logger = logging.getLogger(__name__)

REASON_LIMIT = 1000  # characters of a bad sample's reason that are kept
ORDER_GRACE_S = 2.0


@dataclass(frozen=True, kw_only=True, slots=True)
class HostStats:
    """A worker's packs now, and its work since it started. `decode_s` is summed over threads."""

    packs_pending: int
    packs_ready: int
    held_bytes: int
    samples_decoded: int
    samples_masked: int
    decode_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class _Outcome:
    sample: DecodedSample
    reason: str
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class _Ready:
    pack: AssembledPack
    receipt: PackReceipt


@dataclass(kw_only=True, slots=True, eq=False)
class _Held:
    order: PackOrder
    ready: asyncio.Future[_Ready]
    work: asyncio.Task[None] | None = None

    def give_up(self, error: BaseException) -> None:
        """Stop the work; whoever waits, now or later, gets the error."""
        if self.work is not None:
            self.work.cancel()
        if not self.ready.done():
            self.ready.set_exception(error)
            self.ready.exception()  # marks it as seen: there may be nobody waiting


def decode_one(pipeline: Pipeline, sample: PackSample) -> _Outcome:
    """Read and decode one sample; masked, with the reason, when that cannot be done."""
    started_s = time.perf_counter()
    reason = ""
    try:
        raw = pipeline.reader.read(sample.ref)
        decoded = pipeline.decoder.decode(raw, sample.lengths)
        check_planned_shape(decoded, sample.lengths)
    except (SampleError, SourceError) as error:
        reason = str(error) or type(error).__name__
    except Exception as error:  # a codec's surprise is this sample's fault, not the pack's
        reason = f"reading or decoding failed unexpectedly: {type(error).__name__}: {error}"
        logger.warning("sample %s of %s", sample.ref.key, sample.ref.source, exc_info=True)
    if reason:
        decoded = masked_sample(sample.lengths, pipeline.decoder.pad_token_id)
    return _Outcome(
        sample=decoded,
        reason=reason[:REASON_LIMIT],
        seconds=time.perf_counter() - started_s,
    )


class DecodingHost:
    """core.ports.PackHost over a pool of threads. Made anywhere, used on one event loop."""

    def __init__(
        self,
        *,
        reader_for: Callable[[str], SampleReader],
        decoder_for: Callable[[str], SampleDecoder],
        slots: int,
        order_grace_s: float = ORDER_GRACE_S,
    ) -> None:
        """`slots` samples are decoded at once; readers and decoders are shared by threads. A
        part of a pack that was not ordered yet is waited for `order_grace_s`."""
        if slots < 1:
            raise SpecError(f"a worker has {slots} decoding slots; give it at least 1.")
        self._threads = ThreadPoolExecutor(slots, thread_name_prefix="decode")
        factory = PipelineFactory(reader_for=reader_for, decoder_for=decoder_for)
        self._pipelines = PipelineCache(factory, self._threads)
        self._held: dict[PackKey, _Held] = {}
        self._awaited: dict[PackKey, asyncio.Future[_Held]] = {}
        self._order_grace_s = order_grace_s
        self._samples_decoded = 0
        self._samples_masked = 0
        self._decode_s = 0.0

    async def prepare(self, order: PackOrder) -> PackReceipt:
        """Decode, assemble and hold a pack."""
        held = self._held.get(order.key)
        if held is None or held.order != order:
            held = self._begin(order)
        return (await asyncio.shield(held.ready)).receipt

    async def sequence(self, key: PackKey, cp_rank: int) -> SequencePart:
        """One group member's sequence arrays, int32[local tokens]. Raises NotFoundError."""
        pack = await self._ready(key)
        if not 0 <= cp_rank < len(pack.members):
            raise NotFoundError(
                f"pack {key.pack} of {key.job} step {key.step} has {len(pack.members)} group "
                f"members; member {cp_rank} does not exist. Ask the coordinator for the shard "
                "again."
            )
        return pack.members[cp_rank]

    async def items(self, key: PackKey, items: Sequence[int]) -> list[ItemArray]:
        """The encoder items at these places. Raises NotFoundError."""
        pack = await self._ready(key)
        for place in items:
            if not 0 <= place < len(pack.items):
                raise NotFoundError(
                    f"pack {key.pack} of {key.job} step {key.step} has {len(pack.items)} encoder "
                    f"items; there is none at place {place}. Ask the coordinator for the shard "
                    "again."
                )
        return [pack.items[place] for place in items]

    def release(self, packs: Sequence[PackKey]) -> None:
        """Forget these packs; unknown ones are ignored."""
        for key in packs:
            held = self._held.pop(key, None)
            if held is not None:
                held.give_up(_unknown(key))

    def stats(self) -> HostStats:
        """Counts for metrics. O(packs held)."""
        ready = [h.ready.result() for h in self._held.values() if h.ready.done()]
        return HostStats(
            packs_pending=len(self._held) - len(ready),
            packs_ready=len(ready),
            held_bytes=sum(each.receipt.size_bytes for each in ready),
            samples_decoded=self._samples_decoded,
            samples_masked=self._samples_masked,
            decode_s=self._decode_s,
        )

    def close(self) -> None:
        """Release everything and let the threads end. Does not wait for them."""
        self.release(tuple(self._held))
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _begin(self, order: PackOrder) -> _Held:
        # Another order under this key is of a job deleted and made again: it replaces the old.
        self.release([order.key])
        loop = asyncio.get_running_loop()
        held = _Held(order=order, ready=loop.create_future())
        self._held[order.key] = held
        arrival = self._awaited.pop(order.key, None)
        if arrival is not None:
            arrival.set_result(held)
        held.work = loop.create_task(self._work(held), name=f"pack {order.key.pack}")
        return held

    async def _work(self, held: _Held) -> None:
        try:
            held.ready.set_result(await self._build(held.order))
        except Exception as error:
            if self._held.get(held.order.key) is held:
                del self._held[held.order.key]
            held.give_up(error)

    async def _build(self, order: PackOrder) -> _Ready:
        pipeline = await self._pipelines.get(order.pipeline)
        loop = asyncio.get_running_loop()
        outcomes = await asyncio.gather(
            *(loop.run_in_executor(self._threads, decode_one, pipeline, s) for s in order.samples)
        )
        self._count(outcomes)
        pack = await loop.run_in_executor(
            self._threads,
            lambda: assemble(
                order.samples,
                [outcome.sample for outcome in outcomes],
                degree=order.degree,
                pad_token_id=pipeline.decoder.pad_token_id,
            ),
        )
        return _Ready(pack=pack, receipt=_receipt(order, pack, outcomes))

    def _count(self, outcomes: Sequence[_Outcome]) -> None:
        self._samples_decoded += len(outcomes)
        self._samples_masked += sum(bool(outcome.reason) for outcome in outcomes)
        self._decode_s += sum(outcome.seconds for outcome in outcomes)

    async def _ready(self, key: PackKey) -> AssembledPack:
        held = self._held.get(key) or await self._ordered(key)
        return (await asyncio.shield(held.ready)).pack

    async def _ordered(self, key: PackKey) -> _Held:
        """A rank may come with its ticket before the coordinator's order has arrived."""
        arrival = self._awaited.setdefault(key, asyncio.get_running_loop().create_future())
        try:
            return await asyncio.wait_for(asyncio.shield(arrival), self._order_grace_s)
        except TimeoutError as error:
            raise _unknown(key) from error
        finally:
            self._awaited.pop(key, None)


def _receipt(order: PackOrder, pack: AssembledPack, outcomes: Sequence[_Outcome]) -> PackReceipt:
    return PackReceipt(
        key=order.key,
        size_bytes=pack.size_bytes,
        decode_s=sum(outcome.seconds for outcome in outcomes),
        bad_samples=tuple(
            BadSample(
                sample_id=sample.ref.sample_id,
                source=sample.ref.source,
                key=sample.ref.key,
                reason=outcome.reason,
            )
            for sample, outcome in zip(order.samples, outcomes, strict=True)
            if outcome.reason
        ),
    )


def _unknown(key: PackKey) -> NotFoundError:
    return NotFoundError(
        f"pack {key.pack} of {key.job} step {key.step} (plan {key.plan_digest[:8]}) is not held "
        "by this worker: it was never ordered here, or has been released. Ask the coordinator "
        "for the shard again."
    )
