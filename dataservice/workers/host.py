"""Packs being decoded and packs that are ready: what a worker holds.

Contract.
  Success      `prepare` returns once the pack is assembled; it is held until released. The
               same order again joins the work or returns the same receipt.
  Bad sample   Whatever one sample does masks that sample alone; the receipt names it.
  Failure      When the pack itself cannot be built (its pipeline is refused, memory is out),
               `prepare` and all who wait for its parts raise; nothing is held, so the same
               order may be tried again. WorkerLostError: this worker can decode no more.
  Cancelling   a call stops the caller's waiting, never the work: others may wait for it, and
               a retry finds it done. `release` stops the work: samples not yet started are
               dropped, those on a slot run out unused, and who waits gets NotFoundError.
  Room         A pack that is not needed yet waits while the worker holds its limit of bytes;
               one that a rank asks for never does (see held_bytes.py).

Everything here runs on one event loop; only assembling, and what decodes, run in threads.
"""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from dataservice.core.errors import NotFoundError
from dataservice.core.orders import BadSample, PackKey, PackOrder, PackReceipt, SourceWork
from dataservice.workers.decoders import Decoders, SampleOutcome
from dataservice.workers.fair_queue import TeamLoad
from dataservice.workers.held_bytes import HeldBytes
from dataservice.workers.pack import (
    AssembledPack,
    ItemArray,
    SequencePart,
    assemble,
    masked_sample,
    planned_bytes,
)
from dataservice.workers.slots import Slots

logger = logging.getLogger(__name__)

ORDER_GRACE_S = 2.0
HELD_BYTES = 4 * 2**30
PAD_TOKENS_KEPT = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class HostStats:
    """A worker's packs now, and its work since it started.

    `packs_waiting` of those pending have no room yet; `held_bytes` counts the ready ones.
    """

    packs_pending: int
    packs_waiting: int
    packs_ready: int
    held_bytes: int
    samples_decoded: int
    samples_masked: int
    decode_s: float
    teams: tuple[TeamLoad, ...]


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


class DecodingHost:
    """core.ports.PackHost over decoders. Made anywhere, used on one event loop."""

    def __init__(
        self,
        decoders: Decoders,
        *,
        held_bytes: int = HELD_BYTES,
        order_grace_s: float = ORDER_GRACE_S,
    ) -> None:
        """Packs are decoded ahead of need up to `held_bytes`. A part of a pack that was not
        ordered yet is waited for `order_grace_s`."""
        self._slots = Slots(decoders)
        self._room = HeldBytes(held_bytes)
        self._pad_tokens: dict[str, int] = {}
        self._held: dict[PackKey, _Held] = {}
        self._awaited: dict[PackKey, asyncio.Future[_Held]] = {}
        self._order_grace_s = order_grace_s
        self._samples_decoded = 0
        self._samples_masked = 0
        self._decode_s = 0.0

    async def start(self) -> None:
        """Have the decoders ready. Raises WorkerLostError."""
        await self._slots.start()

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
        self._let_in(self._room.remove(packs))

    def held(self) -> Sequence[PackKey]:
        """Packs that were ordered here and not released."""
        return tuple(self._held)

    def stats(self) -> HostStats:
        """Counts for metrics. O(packs held)."""
        ready = [h.ready.result() for h in self._held.values() if h.ready.done()]
        return HostStats(
            packs_pending=len(self._held) - len(ready),
            packs_waiting=self._room.waiting,
            packs_ready=len(ready),
            held_bytes=sum(each.receipt.size_bytes for each in ready),
            samples_decoded=self._samples_decoded,
            samples_masked=self._samples_masked,
            decode_s=self._decode_s,
            teams=self._slots.teams(),
        )

    def close(self) -> None:
        """Release everything and end the decoders."""
        self.release(tuple(self._held))
        self._slots.close()

    def _begin(self, order: PackOrder) -> _Held:
        # Another order under this key is of a job deleted and made again: it replaces the old.
        if order.key in self._held:
            self.release([order.key])
        held = _Held(order=order, ready=asyncio.get_running_loop().create_future())
        self._held[order.key] = held
        arrival = self._awaited.pop(order.key, None)
        let_in = self._room.add(order.key, planned_bytes(order))
        if arrival is not None:
            arrival.set_result(held)
            let_in = let_in or self._room.ask(order.key)
        if let_in:
            self._let_in([order.key])
        return held

    def _let_in(self, packs: Sequence[PackKey]) -> None:
        """Begin the work on packs that now have room."""
        for key in packs:
            held = self._held[key]
            work = self._work(held)
            held.work = asyncio.get_running_loop().create_task(work, name=f"pack {key.pack}")

    async def _work(self, held: _Held) -> None:
        try:
            held.ready.set_result(await self._build(held.order))
        except Exception as error:
            key = held.order.key
            if self._held.get(key) is held:
                del self._held[key]
                self._let_in(self._room.remove([key]))
            held.give_up(error)

    async def _build(self, order: PackOrder) -> _Ready:
        pad_token_id = await self._pad_token(order.pipeline)
        outcomes = await self._slots.decode(order)
        self._count(outcomes)
        decoded = [
            outcome.sample or masked_sample(sample.lengths, pad_token_id)
            for sample, outcome in zip(order.samples, outcomes, strict=True)
        ]
        pack = await asyncio.to_thread(
            assemble, order.samples, decoded, degree=order.degree, pad_token_id=pad_token_id
        )
        return _Ready(pack=pack, receipt=_receipt(order, pack, outcomes))

    async def _pad_token(self, pipeline: str) -> int:
        """Builds a pipeline that is new here, so that one that cannot be built fails its packs
        before a sample is tried."""
        if pipeline not in self._pad_tokens:
            pad_token_id = await self._slots.open(pipeline)
            while len(self._pad_tokens) >= PAD_TOKENS_KEPT:
                del self._pad_tokens[next(iter(self._pad_tokens))]
            self._pad_tokens[pipeline] = pad_token_id
        return self._pad_tokens[pipeline]

    def _count(self, outcomes: Sequence[SampleOutcome]) -> None:
        self._samples_decoded += len(outcomes)
        self._samples_masked += sum(bool(outcome.reason) for outcome in outcomes)
        self._decode_s += sum(outcome.seconds for outcome in outcomes)

    async def _ready(self, key: PackKey) -> AssembledPack:
        held = self._held.get(key) or await self._ordered(key)
        if self._room.ask(key):
            self._let_in([key])
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


def _receipt(
    order: PackOrder, pack: AssembledPack, outcomes: Sequence[SampleOutcome]
) -> PackReceipt:
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
        sources=_by_source(order, outcomes),
    )


def _by_source(order: PackOrder, outcomes: Sequence[SampleOutcome]) -> tuple[SourceWork, ...]:
    found: dict[str, list[SampleOutcome]] = {}
    for sample, outcome in zip(order.samples, outcomes, strict=True):
        found.setdefault(sample.ref.source, []).append(outcome)
    return tuple(
        SourceWork(
            source=source,
            samples=len(own),
            read_s=sum(outcome.read_s for outcome in own),
            decode_s=sum(outcome.seconds - outcome.read_s for outcome in own),
            read_bytes=sum(outcome.read_bytes for outcome in own),
        )
        for source, own in sorted(found.items())
    )


def _unknown(key: PackKey) -> NotFoundError:
    return NotFoundError(
        f"pack {key.pack} of {key.job} step {key.step} (plan {key.plan_digest[:8]}) is not held "
        "by this worker: it was never ordered here, or has been released. Ask the coordinator "
        "for the shard again."
    )
