"""The program of a decoder: a process of a worker, forked by its nursery, that serves one slot.

It reads the samples of an order, decodes them in turn, and answers each as soon as it is done.
Those that were read ahead come with the order. Where it runs a team's own code, another process
reads for it (see reading_process.py). When its memory exceeds the nursery's `memory_bytes`, an
allocation fails and only that sample is lost.
"""

import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from dataservice.core.kernels import load_kernels
from dataservice.core.orders import PackSample
from dataservice.core.sample import ItemArray
from dataservice.workers.byte_cache import ByteCache, KeptReads
from dataservice.workers.decoded_cache import CachedDecoder, DecodedCache
from dataservice.workers.decoder_messages import (
    Answer,
    Kind,
    read_hello,
    read_order,
    refusal,
    send_answer,
)
from dataservice.workers.decoders import SampleOutcome
from dataservice.workers.kept_files import CacheSpec
from dataservice.workers.read_and_decode import read_and_decode
from dataservice.workers.read_sample import RawBytes, close_all
from dataservice.workers.reading_process import ReaderAway, serve_reads, serve_reads_ahead
from dataservice.workers.recycled_memory import FilledMemory, Handed, Returned
from dataservice.workers.sample_memory import (
    INLINE_LIMIT_BYTES,
    sample_buffers,
    sample_bytes,
    sample_of_bytes,
    write_memory,
)
from dataservice.workers.sample_pipelines import Pipeline, PipelineCache, PipelineFactory


@dataclass(frozen=True, slots=True)
class DecoderProgram:
    """The whole life of a decoder."""

    factory: PipelineFactory

    def __reduce__(self) -> tuple[Callable[..., "DecoderProgram"], tuple[PipelineFactory]]:
        return _in_nursery, (self.factory,)

    def __call__(self, orders: socket.socket) -> None:
        """Serve orders until the worker closes the socket."""
        hello, link = read_hello(orders)
        self.factory.hold_credentials(hello["credentials"])
        factory, ranges = self.factory, None
        if hello["ranges"] is not None:
            ranges = ByteCache(CacheSpec(**hello["ranges"]))
            factory = replace(factory, reader_for=partial(factory.reader_for, ranges_of=ranges.of))
        reads = ranges.reads if ranges is not None else KeptReads
        if hello["ahead"]:
            serve_reads_ahead(orders, factory.reader_for, hello["ahead"], reads)
        elif link is None:
            memory = FilledMemory()
            if hello["cache"] is not None:
                factory = _cached(factory, DecodedCache(CacheSpec(**hello["cache"])), memory)
            _Decoder(orders, factory, memory, reads).serve()
        elif hello["reads"]:
            serve_reads(orders, link, factory.reader_for)
        else:
            away = ReaderAway(link)
            factory = replace(self.factory, reader_for=lambda _: away)
            _Decoder(orders, factory, FilledMemory(), reads).serve()


def _in_nursery(factory: PipelineFactory) -> DecoderProgram:
    """The program as a nursery takes it up: kernels are loaded there, for all decoders at once."""
    load_kernels()
    return DecoderProgram(factory)


def _cached(factory: PipelineFactory, cache: DecodedCache, memory: FilledMemory) -> PipelineFactory:
    """The same, whose decoders find what was decoded before, in the memory of samples."""

    def decoder_for(pipeline: str) -> CachedDecoder:
        decoder, identity = factory.decoder_for(pipeline), factory.identity(pipeline)
        return CachedDecoder(decoder, cache, identity, memory.lend)

    return replace(factory, decoder_for=decoder_for)


def _reused(pipeline: Pipeline) -> int:
    return pipeline.decoder.reused if isinstance(pipeline.decoder, CachedDecoder) else 0


class _Decoder:
    def __init__(
        self,
        orders: socket.socket,
        factory: PipelineFactory,
        memory: FilledMemory,
        reads: Callable[[], KeptReads],
    ) -> None:
        self._orders = orders
        self._pipelines = PipelineCache(factory)
        self._memory = memory
        self._reads = reads

    def serve(self) -> None:
        """Serve orders until the worker closes the socket."""
        while (order := read_order(self._orders)) is not None:
            self._memory.take_back(Returned(order.free, order.gone))
            pipeline = self._pipeline(order.pipeline, wanted=not order.samples)
            if pipeline is not None:
                self._decode(pipeline, order.samples, order.reads)
            else:
                close_all(order.reads)

    def _pipeline(self, name: str, *, wanted: bool) -> Pipeline | None:
        """The pipeline of this JSON, or None when it cannot be built. Tells the worker when it has
        been built, since that time is not the sample's."""
        known = name in self._pipelines
        try:
            pipeline = self._pipelines.get(name)
            pad = str(pipeline.decoder.pad_token_id)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a library's panic may be no Exception
            send_answer(self._orders, refusal(error))
            return None
        if wanted or not known:
            self._send(Kind.BUILT, payload=pad.encode())
        return pipeline

    def _decode(
        self,
        pipeline: Pipeline,
        samples: Sequence[PackSample],
        reads: Sequence[RawBytes | None],
    ) -> None:
        several = len(samples) > 1  # of which one is to blame where this process dies
        outcomes = read_and_decode(
            pipeline,
            samples,
            reads,
            places=self._places,
            begun=partial(self._send, Kind.BEGUN) if several else lambda: None,
            cpu_clock=time.process_time,  # it works for this one slot, libraries' threads included
        )
        before = _reused(pipeline)
        for sample, outcome in zip(samples, outcomes, strict=True):
            reused = _reused(pipeline)
            found = replace(outcome, reused=reused > before, kept=self._reads())
            self._answer(sample, found)
            self._memory.settle()
            before = reused

    def _places(self, sample: PackSample) -> Sequence[ItemArray]:
        """Memory for the items of a large sample in which it is handed over, if some is free."""
        size_bytes = sample_bytes(sample.lengths)
        lent = self._memory.lend(size_bytes) if size_bytes > INLINE_LIMIT_BYTES else None
        return () if lent is None else sample_of_bytes(lent, sample.lengths).items

    def _answer(self, sample: PackSample, outcome: SampleOutcome) -> None:
        if outcome.sample is None:
            kind = Kind.AWAY if outcome.away else Kind.BAD
            self._send(kind, outcome, outcome.reason.encode(errors="replace"))
            return
        size_bytes = sample_bytes(sample.lengths)
        buffers = sample_buffers(outcome.sample, sample.lengths)
        if size_bytes <= INLINE_LIMIT_BYTES:
            self._send(Kind.INLINE, outcome, b"".join(buffers))
            return
        try:
            self._hand_over(outcome, buffers, size_bytes)
        except OSError as error:
            reason = f"{size_bytes:,} decoded bytes cannot be kept: {error.strerror}."
            self._send(Kind.BAD, outcome, reason.encode())

    def _hand_over(
        self, outcome: SampleOutcome, buffers: Sequence[memoryview | bytes], size_bytes: int
    ) -> None:
        """Send a large sample in memory. Raises OSError where there is none."""
        try:
            handed = self._memory.fill(buffers, size_bytes)
            kind = Kind.FILLED if handed.descriptor < 0 else Kind.NEW
        except MemoryError:  # this process has no more mappings
            handed, kind = Handed(0, write_memory([*buffers], size_bytes)), Kind.MEMORY
        payload = b"" if kind is Kind.MEMORY else str(handed.number).encode()
        try:
            self._send(kind, outcome, payload, handed.descriptor)
        finally:
            if handed.descriptor >= 0:
                os.close(handed.descriptor)

    def _send(
        self,
        kind: Kind,
        outcome: SampleOutcome | None = None,
        payload: bytes = b"",
        descriptor: int = -1,
    ) -> None:
        answer = Answer(
            kind=kind,
            seconds=outcome.seconds if outcome else 0.0,
            read_s=outcome.read_s if outcome else 0.0,
            cpu_s=outcome.cpu_s if outcome else 0.0,
            read_cpu_s=outcome.read_cpu_s if outcome else 0.0,
            read_bytes=outcome.read_bytes if outcome else 0,
            reused=outcome.reused if outcome else False,
            kept=outcome.kept if outcome else KeptReads(),
            payload=payload,
            descriptor=descriptor,
        )
        send_answer(self._orders, answer)
