"""The processes that decode: `python -m dataservice.workers.decoder_process`.

    worker ──starts──► nursery ──forks──► decoder ◄══ orders, answers ══► worker
                          └─────forks──► decoder ◄══ orders, answers ══► worker

The *nursery* is a clean program: none of the worker's sockets, threads or memory. It loads
the libraries once and then only forks: a decoder begins in milliseconds and shares what is
loaded. It decodes nothing itself, so it has no cause to hang or crash. A *decoder* serves one
slot: it reads and decodes the samples of an order in turn and answers each as it is done.

Contract.
  Ending       Nursery and decoders end when the worker's sockets close, and are killed by the
               kernel with the one that started them: none outlives its worker, however it dies.
  Signals      SIGINT and SIGTERM are ignored: they go to a whole process group, and the worker
               still has to finish its streams.
  Memory       Past `memory_bytes` of a decoder's own (heap, stacks; not memory files, whose size
               the plan gives) an allocation fails, which costs that sample alone. Limited by
               RLIMIT_DATA: exact, and refused in time to be reported; a watcher of the
               resident size is late, and a limit of the address space counts what libraries
               only reserve. When the machine's memory is out, the kernel takes decoders first.
"""

import contextlib
import ctypes
import faulthandler
import gc
import json
import os
import pickle
import resource
import signal
import socket
import sys
import traceback
from pathlib import Path
from typing import NoReturn

from dataservice.core.errors import ServiceError
from dataservice.core.orders import PackSample
from dataservice.workers.decoder_messages import Answer, Kind, read_order, receive, send_answer
from dataservice.workers.decoders import SampleOutcome, read_and_decode
from dataservice.workers.pipelines import Pipeline, PipelineCache, PipelineFactory
from dataservice.workers.sample_memory import (
    INLINE_LIMIT_BYTES,
    sample_buffers,
    sample_bytes,
    write_memory,
)

REQUEST_LIMIT_BYTES = 128 * 1024
OUT_OF_MEMORY_SCORE = 900  # of 1000; the worker keeps its own
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's mallopt
_KEPT_HEAP_BYTES = 64 * 2**20
_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_libc = ctypes.CDLL(None, use_errno=True)


# ---- nursery ------------------------------------------------------------------------------


def main() -> None:
    """Fork decoders on request until the worker is gone."""
    _name_process("nursery")
    _keep_heap()
    control = socket.socket(fileno=int(sys.argv[1]))
    _end_with_parent(int(sys.argv[2]))
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    try:
        # From the worker that started us: the factories that its operator's code made.
        factory, memory_bytes = pickle.loads(control.recv(REQUEST_LIMIT_BYTES))
    except Exception as error:
        control.send(json.dumps(f"{type(error).__name__}: {error}").encode())
        return
    control.send(json.dumps("").encode())
    gc.collect()
    gc.freeze()  # what is loaded stays in pages that all decoders share
    _Nursery(control, factory, memory_bytes).serve()


class _Nursery:
    """Answers `fork` with the decoder's number and a descriptor of it, and `reap N` with how
    that process ended, or null while it has not."""

    def __init__(
        self, control: socket.socket, factory: PipelineFactory, memory_bytes: int | None
    ) -> None:
        self._control = control
        self._factory = factory
        self._memory_bytes = memory_bytes
        self._ending: set[int] = set()

    def serve(self) -> None:
        """Until the worker is gone; whatever then still runs is killed by the kernel."""
        while True:
            data, descriptors = receive(self._control, REQUEST_LIMIT_BYTES)
            if not data:
                return
            request = json.loads(data)
            if "fork" in request:
                self._fork(descriptors[0])
            else:
                self._answer(self._reap(request["reap"]))

    def _fork(self, orders: int) -> None:
        for process_id in tuple(self._ending):  # those that took long to die
            self._reap(process_id)
        nursery = os.getpid()
        try:
            process_id = os.fork()
        except OSError as error:
            os.close(orders)
            self._answer(str(error))
            return
        if process_id == 0:
            self._control.close()
            _end_with_parent(nursery)
            _run_decoder(socket.socket(fileno=orders), self._factory, self._memory_bytes)
        os.close(orders)
        process = os.pidfd_open(process_id)
        socket.send_fds(self._control, [json.dumps(process_id).encode()], [process])
        os.close(process)

    def _reap(self, process_id: int) -> int | None:
        done, status = os.waitpid(process_id, os.WNOHANG)
        if done == 0:
            self._ending.add(process_id)
            return None
        self._ending.discard(process_id)
        return os.waitstatus_to_exitcode(status)

    def _answer(self, answer: object) -> None:
        self._control.send(json.dumps(answer).encode())


def _end_with_parent(parent: int) -> None:
    """Have the kernel kill this process when the thread that started it ends."""
    _libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:  # it was gone before we asked
        os._exit(1)


def _keep_heap() -> None:
    """Have malloc keep what a sample frees for the next one: handing pages back and faulting
    them in anew took 40 % of the time of a small image."""
    with contextlib.suppress(AttributeError):  # another C library
        _libc.mallopt(_M_MMAP_THRESHOLD, _KEPT_HEAP_BYTES // 2)
        _libc.mallopt(_M_TRIM_THRESHOLD, _KEPT_HEAP_BYTES)


def _name_process(name: str) -> None:
    """What ps and top show."""
    _libc.prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)


# ---- decoder ------------------------------------------------------------------------------


def _run_decoder(
    orders: socket.socket, factory: PipelineFactory, memory_bytes: int | None
) -> NoReturn:
    """The whole life of a decoder."""
    status = 1
    try:
        _name_process("decoder")
        faulthandler.enable()  # a crash in C leaves its Python lines in the worker's log
        with contextlib.suppress(OSError):
            score = Path("/proc/self/oom_score_adj")
            score.write_text(str(max(int(score.read_text()), OUT_OF_MEMORY_SCORE)))
        if memory_bytes is not None:
            resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))
        _Decoder(orders, factory).serve()
        status = 0
    except OSError:
        pass  # the worker closed the socket while we answered
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)  # the nursery's own code lies above


class _Decoder:
    def __init__(self, orders: socket.socket, factory: PipelineFactory) -> None:
        self._orders = orders
        self._pipelines = PipelineCache(factory)

    def serve(self) -> None:
        """Until the worker closes the socket."""
        while (order := read_order(self._orders)) is not None:
            name, samples = order
            pipeline = self._pipeline(name, wanted=not samples)
            if pipeline is not None:
                for sample in samples:
                    self._decode(pipeline, sample)

    def _pipeline(self, name: str, *, wanted: bool) -> Pipeline | None:
        """Tells the worker when it was built, since that is not the sample's time."""
        known = name in self._pipelines
        try:
            pipeline = self._pipelines.get(name)
            pad = str(pipeline.decoder.pad_token_id)
        except Exception as error:
            kind = type(error).__name__ if isinstance(error, ServiceError) else ""
            text = str(error) if kind else f"{type(error).__name__}: {error}"
            self._send(Kind.REFUSED, payload=json.dumps([kind, text[:65536]]).encode())
            return None
        if wanted or not known:
            self._send(Kind.BUILT, payload=pad.encode())
        return pipeline

    def _decode(self, pipeline: Pipeline, sample: PackSample) -> None:
        outcome = read_and_decode(pipeline, sample)
        if outcome.sample is None:
            self._send(Kind.BAD, outcome, outcome.reason.encode(errors="replace"))
            return
        buffers = sample_buffers(outcome.sample, sample.lengths)
        size_bytes = sample_bytes(sample.lengths)
        if size_bytes <= INLINE_LIMIT_BYTES:
            self._send(Kind.INLINE, outcome, b"".join(buffers))
            return
        try:
            memory = write_memory(buffers, size_bytes)
        except OSError as error:
            reason = f"{size_bytes:,} decoded bytes cannot be kept: {error.strerror}."
            self._send(Kind.BAD, outcome, reason.encode())
            return
        self._send(Kind.MEMORY, outcome, descriptor=memory)
        os.close(memory)

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
            read_bytes=outcome.read_bytes if outcome else 0,
            payload=payload,
            descriptor=descriptor,
        )
        send_answer(self._orders, answer)


if __name__ == "__main__":
    main()
