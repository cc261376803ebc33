"""What the rooms ask of each other. Each port has a real and an in-memory implementation."""

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from dataservice.core.cursor import Cursor
from dataservice.core.job import BatchSize
from dataservice.core.orders import PackKey, PackOrder, PackReceipt
from dataservice.core.plan import StepPlan
from dataservice.core.sample import (
    DecodedSample,
    IntArray,
    LengthTable,
    Modality,
    RawSample,
    SampleLengths,
    SampleRef,
)

# ---- sources ------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Draw:
    """Samples of one step in draw order: `sample_ids` int64[n], `epoch` int32[n]; and the
    place in the mixture behind them. n is 0 at the end of the last epoch."""

    sample_ids: NDArray[np.int64]
    epoch: NDArray[np.int32]
    next_epoch: int
    next_position: int


class SampleStream(Protocol):
    """A job's mixture: a fixed, seeded order of samples over all its epochs."""

    def draw(self, *, epoch: int, position: int, batch: BatchSize) -> Draw:
        """The samples of one step that starts at this place. Pure."""
        ...

    def steps_left(self, cursor: Cursor, batch: BatchSize) -> int | None:
        """Steps until the last epoch ends, or None where only drawing can tell."""
        ...


class Catalog(Protocol):
    """The opened index of a job: lengths and locations by sample id."""

    @property
    def fingerprint(self) -> str:
        """Changes whenever a source, a processor or the tokenizer does."""
        ...

    @property
    def samples(self) -> int:
        """How many samples there are; ids are 0 .. samples-1."""
        ...

    def lengths(self, sample_ids: IntArray) -> LengthTable:
        """Lengths of these samples, in this order."""
        ...

    def details(self, sample_ids: IntArray) -> Sequence[tuple[SampleRef, SampleLengths]]:
        """Locations and full lengths (shapes included) of these samples, in this order. May
        make each only when it is looked at."""
        ...

    def decoded_values(self, sample_ids: IntArray) -> Mapping[Modality, int]:
        """How many values (of pixels, of sound) these samples' encoder items decode to."""
        ...


class SampleReader(Protocol):
    """Reads one sample's bytes."""

    def read(self, ref: SampleRef) -> RawSample:
        """Raises SampleError when this sample, SourceError when the source, is unreadable."""
        ...


# ---- decode -------------------------------------------------------------------------------


class SampleMeasurer(Protocol):
    """Lengths from headers and tokenising, without decoding pixels."""

    @property
    def fingerprint(self) -> str:
        """Digest of the tokenizer, template and processors that decide the lengths."""
        ...

    def measure(self, raw: RawSample) -> SampleLengths:
        """Raises SampleError with the reason when the sample cannot be used."""
        ...


class SampleDecoder(Protocol):
    """Decodes one sample to the shape that was planned for it."""

    @property
    def pad_token_id(self) -> int:
        """Fills padding and masked samples."""
        ...

    def decode(self, raw: RawSample, planned: SampleLengths) -> DecodedSample:
        """Raises SampleError when it cannot be decoded or does not take the planned shape."""
        ...


# ---- workers ------------------------------------------------------------------------------


WorkerState = Literal["serving", "silent", "draining"]
"""serving takes orders; silent has not answered for a while, and may yet; draining takes no
orders and serves what it holds until that is released."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerInfo:
    """A live worker: its name, its gRPC address, and how many samples it decodes at once."""

    worker: str
    address: str
    slots: int
    state: WorkerState = "serving"


class ServedWorker(Protocol):
    """A worker that serves gRPC in this process. Built by app, run by a pool."""

    @property
    def address(self) -> str:
        """host:port where trainers and the coordinator reach it."""
        ...

    async def stop(self) -> None:
        """Finish the streams that are open, then close the port."""
        ...


ServeWorker = Callable[[str], Awaitable[ServedWorker]]
"""Start a worker of this name in this process."""


class WorkerPool(Protocol):
    """Keeps a number of workers alive."""

    async def start(self) -> None:
        """Start all workers; returns when each serves."""
        ...

    def workers(self) -> tuple[WorkerInfo, ...]:
        """The workers now believed to be alive."""
        ...

    async def replace(self, worker: str) -> None:
        """The worker does not answer: make sure that it is gone and start another."""
        ...

    async def renew(
        self, workers: Collection[str], drained: Callable[[str], Awaitable[None]]
    ) -> None:
        """Replace these workers one after another without losing what they hold: each ends
        once `drained(worker)` returns, or a time limit is over. Names not of the pool are
        ignored."""
        ...

    async def stop(self) -> None:
        """End all workers; those that are to outlive this process are left as they are."""
        ...


class WorkerLink(Protocol):
    """How the coordinator commands workers."""

    async def prepare(self, worker: WorkerInfo, order: PackOrder) -> PackReceipt:
        """Decode and assemble a pack; returns when it is ready. The same order twice is
        decoded once. Raises WorkerLostError when the worker is gone."""
        ...

    async def release(self, worker: WorkerInfo, job: str, packs: Sequence[PackKey]) -> None:
        """Forget these packs. Unknown ones are ignored; never raises for a lost worker."""
        ...

    async def ask_held(self, worker: WorkerInfo) -> frozenset[PackKey]:
        """The packs that a worker holds or decodes. Raises WorkerLostError."""
        ...


class PackHost(Protocol):
    """The worker's side: packs being decoded, and the parts of those that are ready."""

    async def prepare(self, order: PackOrder) -> PackReceipt:
        """Decode, assemble and hold a pack."""
        ...

    async def sequence(self, key: PackKey, cp_rank: int) -> dict[str, NDArray[np.int32]]:
        """`input_ids`, `labels`, `position_ids` int32[local tokens] of one group member.
        Waits until the pack is ready; NotFoundError for a pack never ordered here."""
        ...

    async def items(
        self, key: PackKey, items: Sequence[int]
    ) -> list[NDArray[np.uint8] | NDArray[np.float32]]:
        """The decoded encoder items at these places of the pack's item list."""
        ...

    def release(self, packs: Sequence[PackKey]) -> None:
        """Forget these packs; unknown ones are ignored."""
        ...

    def held(self) -> Sequence[PackKey]:
        """Every pack that was ordered here and not released, decoded or not."""
        ...


# ---- observability ------------------------------------------------------------------------


class Metrics(Protocol):
    """What the engine tells whoever watches it: one call an event, from any thread. A call
    neither raises nor waits."""

    def step_planned(self, job: str, plan: StepPlan, *, plan_s: float) -> None:
        """A step was drawn and planned for the first time in its attempt, in `plan_s` seconds."""
        ...

    def ready_steps(self, job: str, steps: int) -> None:
        """So many steps are planned, and decoding or decoded, that not every rank has received."""
        ...

    def step_committed(self, job: str) -> None:
        """Every rank has trained one more step."""
        ...

    def step_measured(self, job: str, *, predicted_s: float, measured_s: float) -> None:
        """A trained step took its slowest rank `measured_s`, and was planned as `predicted_s`."""
        ...

    def rank_measured(self, job: str, measured_s: float) -> None:
        """A step took one rank so long."""
        ...

    def step_phases(self, job: str, phase_s: Mapping[str, float]) -> None:
        """In a trained step the slowest rank of each phase took so long."""
        ...

    def data_waited(self, job: str, step_s: float) -> None:
        """A rank's loop stood so long without data, a step, over its last few."""
        ...

    def waited_most(self, job: str, rank: int, step_s: float) -> None:
        """No rank's loop stands longer without data, a step, over the last steps; -1: no rank."""
        ...

    def waiting_ranks(self, job: str, ranks: int) -> None:
        """The loops of so many ranks stand without data now."""
        ...

    def worker_slots(self, slots: int) -> None:
        """All workers together decode so many samples at once."""
        ...

    def pack_prepared(self, receipt: PackReceipt) -> None:
        """A worker has decoded and assembled a pack."""
        ...

    def error_budget_used(self, job: str, source: str, share: float) -> None:
        """Of a source's error budget this share is used in the window now; at 1 the job stops."""
        ...

    def work_outstanding(self, worker: str, tokens: float) -> None:
        """So much decoding, counted in tokens, was ordered from a worker and is not done."""
        ...

    def pack_hedged(self, job: str) -> None:
        """A pack that was overdue at a slow worker was ordered at a second one."""
        ...

    def pack_found(self, job: str) -> None:
        """A pack that is ordered is at a worker already: a former coordinator ordered it."""
        ...

    def worker_lost(self, worker: str) -> None:
        """A worker is gone; its name is never used again."""
        ...

    def worker_retired(self, worker: str) -> None:
        """A worker was drained and has ended; its name is never used again."""
        ...

    def job_deleted(self, job: str) -> None:
        """The job is forgotten, and whatever was kept about it with it."""
        ...


class NoMetrics(Metrics):
    """Nobody watches: every event is dropped."""

    def step_planned(self, job: str, plan: StepPlan, *, plan_s: float) -> None: ...
    def ready_steps(self, job: str, steps: int) -> None: ...
    def step_committed(self, job: str) -> None: ...
    def step_measured(self, job: str, *, predicted_s: float, measured_s: float) -> None: ...
    def rank_measured(self, job: str, measured_s: float) -> None: ...
    def step_phases(self, job: str, phase_s: Mapping[str, float]) -> None: ...
    def data_waited(self, job: str, step_s: float) -> None: ...
    def waited_most(self, job: str, rank: int, step_s: float) -> None: ...
    def waiting_ranks(self, job: str, ranks: int) -> None: ...
    def worker_slots(self, slots: int) -> None: ...
    def pack_prepared(self, receipt: PackReceipt) -> None: ...
    def error_budget_used(self, job: str, source: str, share: float) -> None: ...
    def work_outstanding(self, worker: str, tokens: float) -> None: ...
    def pack_hedged(self, job: str) -> None: ...
    def pack_found(self, job: str) -> None: ...
    def worker_lost(self, worker: str) -> None: ...
    def worker_retired(self, worker: str) -> None: ...
    def job_deleted(self, job: str) -> None: ...


__all__ = [
    "Catalog",
    "Draw",
    "Metrics",
    "NoMetrics",
    "PackHost",
    "SampleDecoder",
    "SampleMeasurer",
    "SampleReader",
    "SampleStream",
    "ServeWorker",
    "ServedWorker",
    "WorkerInfo",
    "WorkerLink",
    "WorkerPool",
    "WorkerState",
]
