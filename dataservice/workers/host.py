"""The packs that a worker holds: those being decoded and those that are ready.

Contract.
  Success      `prepare` returns once the pack is assembled; the pack is held until released. The
               same order again joins the work or returns the same receipt.
  Bad sample   Only the sample that fails is masked; the receipt names it.
  Failure      When the pack itself cannot be built (its pipeline is refused, memory is out),
               `prepare` and every call that waits for its parts raise; nothing is held, so the same
               order may be tried again. WorkerLostError means that this worker cannot decode any
               more.
  Cancelling   a call ends the caller's waiting, never the work: others may wait for it, and a retry
               finds it done. `release` stops the work: samples not yet started are dropped, results
               of samples already on a slot are discarded, and waiting calls raise NotFoundError.
  Room         While the worker holds its limit of bytes, a pack that is not needed yet waits; a
               pack that a rank asks for never waits (see held_bytes.py).

Everything here runs on one event loop, except assembling and decoding, which run in threads.
"""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from dataservice.core.errors import NotFoundError
from dataservice.core.orders import (
    BadSample,
    PackKey,
    PackOrder,
    PackReceipt,
    SourceWork,
    StorageOutage,
    UnitRange,
)
from dataservice.core.sample import HeldItems
from dataservice.workers.byte_cache import KeptReads
from dataservice.workers.decoders import Decoders, SampleOutcome
from dataservice.workers.fair_queue import TeamLoad
from dataservice.workers.held_bytes import HeldBytes
from dataservice.workers.pack import (
    AssembledPack,
    SequencePart,
    assemble,
    holds_range,
    in_range,
    masked_sample,
    planned_bytes,
)
from dataservice.workers.read_ahead import READ_AHEAD_BYTES
from dataservice.workers.slots import Slots

log = logging.getLogger(__name__)

ORDER_GRACE_S = 2.0
HELD_BYTES = 4 * 2**30
PAD_TOKENS_KEPT = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class HostStats:
    """A worker's packs now, and what it has done since it started.

    `packs_waiting` counts the pending packs that have no room yet; `held_bytes` counts ready packs.
    `reads` are requests to storage under way, beside those of slots; `read_ahead_bytes` are being
    read, or were read and wait for a slot. `ranges_found` and `ranges_missed` are of the bytes
    kept on this machine's disk.
    """

    packs_pending: int
    packs_waiting: int
    packs_ready: int
    held_bytes: int
    samples_decoded: int
    samples_masked: int
    samples_reused: int
    decode_s: float
    reads: int
    read_ahead_bytes: int
    samples_read_ahead: int
    ranges_found: int
    ranges_missed: int
    range_bytes_found: int
    outages: tuple[StorageOutage, ...]
    teams: tuple[TeamLoad, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Ready:
    pack: AssembledPack
    receipt: PackReceipt


@dataclass(kw_only=True, slots=True, eq=False)
class _Held:
    order: PackOrder
    ready: asyncio.Future[_Ready]
    ordered_s: float
    room_s: float = 0.0
    work: asyncio.Task[None] | None = None

    def forget_work(self, _work: "asyncio.Task[None]") -> None:
        """Drop the ended task. The traceback of a cancelled task refers to the pack, and the pack
        to the task: together they would stay in memory until garbage is collected."""
        self.work = None

    def give_up(self, error: BaseException) -> None:
        """Stop the work; calls that wait, now or later, raise this error."""
        if self.work is not None:
            self.work.cancel()
        if not self.ready.done():
            self.ready.set_exception(error)
            self.ready.exception()  # marks the error as retrieved: perhaps no call waits for it


class DecodingHost:
    """core.ports.PackHost over decoders. Made anywhere, used on one event loop."""

    def __init__(
        self,
        decoders: Decoders,
        *,
        held_bytes: int = HELD_BYTES,
        read_ahead_bytes: int = READ_AHEAD_BYTES,
        order_grace_s: float = ORDER_GRACE_S,
    ) -> None:
        """Packs are decoded ahead of need up to `held_bytes`, and of those samples are read before
        they have a slot up to about `read_ahead_bytes`. A call for a part of a pack that has
        not been ordered yet waits up to `order_grace_s` for the order."""
        self._slots = Slots(decoders, read_ahead_bytes=read_ahead_bytes)
        self._read_share = decoders.slots / decoders.reads
        self._room = HeldBytes(held_bytes)
        self._pad_tokens: dict[str, int] = {}
        self._held: dict[PackKey, _Held] = {}
        self._awaited: dict[PackKey, list[asyncio.Future[_Held]]] = {}  # one of each asker
        self._order_grace_s = order_grace_s
        self._samples_decoded = 0
        self._samples_masked = 0
        self._samples_reused = 0
        self._kept = KeptReads()
        self._decode_s = 0.0

    async def start(self) -> None:
        """Start the decoders. Raises WorkerLostError when they cannot start."""
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

    async def items(
        self, key: PackKey, items: Sequence[int], ranges: Sequence[UnitRange] = ()
    ) -> HeldItems:
        """The encoder items at these places, and of each its range where there are some. Raises
        NotFoundError."""
        pack = await self._ready(key)
        for place in items:
            if not 0 <= place < len(pack.items):
                raise NotFoundError(
                    f"pack {key.pack} of {key.job} step {key.step} has {len(pack.items)} encoder "
                    f"items; there is none at place {place}. Ask the coordinator for the shard "
                    "again."
                )
        whole = [pack.items[place] for place in items]
        if not ranges:
            return HeldItems(arrays=whole, crc32s=[pack.item_crc32s[place] for place in items])
        if len(ranges) != len(whole) or not all(map(holds_range, whole, ranges)):
            raise NotFoundError(
                f"pack {key.pack} of {key.job} step {key.step} has items of "
                f"{[len(item) for item in whole]} frames, which do not fall into {ranges}. Ask the "
                "coordinator for the shard again."
            )
        return HeldItems(arrays=list(map(in_range, whole, ranges)))

    def release(self, packs: Sequence[PackKey]) -> None:
        """Release these packs; unknown ones are ignored."""
        for key in packs:
            held = self._held.pop(key, None)
            if held is not None:
                held.give_up(_unknown(key))
        self._let_in(self._room.remove(packs))

    def held(self) -> Sequence[PackKey]:
        """Packs that were ordered here and not released."""
        return tuple(self._held)

    def outages(self) -> Sequence[StorageOutage]:
        """Sources whose storage does not answer, and whose samples wait for it."""
        return self._slots.ahead.outages()

    def stats(self) -> HostStats:
        """Counts for metrics. O(packs held)."""
        ready = [h.ready.result() for h in self._held.values() if h.ready.done()]
        kept = self._kept.plus(self._slots.ahead.kept)
        return HostStats(
            packs_pending=len(self._held) - len(ready),
            packs_waiting=self._room.waiting,
            packs_ready=len(ready),
            held_bytes=sum(each.receipt.size_bytes for each in ready),
            samples_decoded=self._samples_decoded,
            samples_masked=self._samples_masked,
            samples_reused=self._samples_reused,
            decode_s=self._decode_s,
            reads=self._slots.ahead.reads,
            read_ahead_bytes=self._slots.ahead.held_bytes,
            samples_read_ahead=self._slots.ahead.samples,
            ranges_found=kept.found,
            ranges_missed=kept.missed,
            range_bytes_found=kept.found_bytes,
            outages=tuple(self.outages()),
            teams=self._slots.teams(),
        )

    def close(self) -> None:
        """Release everything and end the decoders."""
        self.release(tuple(self._held))
        self._slots.close()

    def _begin(self, order: PackOrder) -> _Held:
        # Another order under this key comes from a job that was deleted and submitted again: it
        # replaces the old one.
        if order.key in self._held:
            self.release([order.key])
        loop = asyncio.get_running_loop()
        held = _Held(order=order, ready=loop.create_future(), ordered_s=loop.time())
        self._held[order.key] = held
        arrivals = [each for each in self._awaited.pop(order.key, ()) if not each.done()]
        let_in = self._room.add(order.key, planned_bytes(order))
        for arrival in arrivals:
            arrival.set_result(held)
        if arrivals and self._room.ask(order.key):
            let_in.append(order.key)
        self._let_in(let_in)
        return held

    def _let_in(self, packs: Sequence[PackKey]) -> None:
        """Begin the work on packs that now have room."""
        for key in packs:
            loop = asyncio.get_running_loop()  # a host that holds nothing is closed without one
            held = self._held[key]
            held.room_s = loop.time() - held.ordered_s
            work = self._work(held)
            held.work = loop.create_task(work, name=f"pack {key.pack}")
            held.work.add_done_callback(held.forget_work)

    async def _work(self, held: _Held) -> None:
        try:
            held.ready.set_result(await self._build(held.order, held.room_s))
        except Exception as error:
            key = held.order.key
            if self._held.get(key) is held:
                del self._held[key]
                self._let_in(self._room.remove([key]))
            held.give_up(error)

    async def _build(self, order: PackOrder, room_s: float) -> _Ready:
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
        sources = _by_source(order, outcomes, self._read_share)
        return _Ready(pack=pack, receipt=_receipt(order, pack, outcomes, sources, room_s))

    async def _pad_token(self, pipeline: str) -> int:
        """The pad token of a pipeline. Builds a pipeline that is new here, so that if it cannot be
        built, its packs fail before any sample is tried."""
        if pipeline not in self._pad_tokens:
            pad_token_id = await self._slots.open(pipeline)
            while len(self._pad_tokens) >= PAD_TOKENS_KEPT:
                del self._pad_tokens[next(iter(self._pad_tokens))]
            self._pad_tokens[pipeline] = pad_token_id
        return self._pad_tokens[pipeline]

    def _count(self, outcomes: Sequence[SampleOutcome]) -> None:
        self._samples_decoded += len(outcomes)
        self._samples_masked += sum(bool(outcome.reason) for outcome in outcomes)
        self._samples_reused += sum(outcome.reused for outcome in outcomes)
        for outcome in outcomes:
            self._kept = self._kept.plus(outcome.kept)
        self._decode_s += sum(outcome.seconds for outcome in outcomes)

    async def _ready(self, key: PackKey) -> AssembledPack:
        held = self._held.get(key) or await self._ordered(key)
        if self._room.ask(key):
            self._let_in([key])
        return (await asyncio.shield(held.ready)).pack

    async def _ordered(self, key: PackKey) -> _Held:
        """A rank may come with its ticket before the coordinator's order has arrived."""
        arrival = asyncio.get_running_loop().create_future()
        askers = self._awaited.setdefault(key, [])
        askers.append(arrival)
        try:
            return await asyncio.wait_for(arrival, self._order_grace_s)
        except TimeoutError as error:
            raise _unknown(key) from error
        finally:
            askers.remove(arrival)
            if not askers and self._awaited.get(key) is askers:
                del self._awaited[key]


def _receipt(
    order: PackOrder,
    pack: AssembledPack,
    outcomes: Sequence[SampleOutcome],
    sources: tuple[SourceWork, ...],
    room_s: float,
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
        sources=sources,
        sample_digests=pack.sample_digests,
        room_s=room_s,
    )


def _by_source(
    order: PackOrder, outcomes: Sequence[SampleOutcome], read_share: float
) -> tuple[SourceWork, ...]:
    """A second of reading ahead counts as `read_share` seconds of a slot: so many slots there are
    for each request that may be under way."""
    found: dict[str, list[SampleOutcome]] = {}
    for sample, outcome in zip(order.samples, outcomes, strict=True):
        found.setdefault(sample.ref.source, []).append(outcome)
    return tuple(
        SourceWork(
            source=source,
            samples=len(own),
            read_s=sum(outcome.read_s + read_share * outcome.ahead_s for outcome in own),
            decode_s=sum(outcome.seconds - outcome.read_s for outcome in own),
            read_bytes=sum(outcome.read_bytes for outcome in own),
            read_cpu_s=sum(outcome.read_cpu_s for outcome in own),
            decode_cpu_s=sum(outcome.cpu_s - outcome.read_cpu_s for outcome in own),
        )
        for source, own in sorted(found.items())
    )


def _unknown(key: PackKey) -> NotFoundError:
    return NotFoundError(
        f"pack {key.pack} of {key.job} step {key.step} (plan {key.plan_digest[:8]}) is not held "
        "by this worker: it was never ordered here, or has been released. Ask the coordinator "
        "for the shard again."
    )
