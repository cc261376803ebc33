"""What the rooms ask of each other. Each port has a real and an in-memory implementation."""

from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from dataservice.core.cursor import Cursor
from dataservice.core.index_orders import IndexAnswer, IndexOrder
from dataservice.core.job import BatchSize, MixtureChange
from dataservice.core.orders import (
    Holdings,
    PackKey,
    PackOrder,
    PackReceipt,
    StorageOutage,
    UnitRange,
)
from dataservice.core.plan import StepPlan
from dataservice.core.receipts import PackAnswers, PackReceipts
from dataservice.core.sample import (
    DecodedSample,
    HeldItems,
    IntArray,
    ItemArray,
    ItemDetails,
    LengthTable,
    RawSample,
    SampleLengths,
    SampleRef,
)
from dataservice.core.sample_columns import SampleColumns
from dataservice.core.whereabouts import ANYWHERE, Whereabouts

# ---- sources ------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Draw:
    """The samples of one step in draw order, `sample_ids` int64[n] and `epoch` int32[n], and the
    place in the mixture behind them. n is 0 at the end of the last epoch."""

    sample_ids: NDArray[np.int64]
    epoch: NDArray[np.int32]
    next_epoch: int
    next_position: int
    next_begun: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Drawn:
    """How many samples of each source, int64[sources] as in the catalog's `source_names`, lie
    before a place: those `before_epoch`, its epoch, all of them `so_far`, and what there will be
    `through_epoch` and `in_all` epochs by the weights that are known."""

    before_epoch: NDArray[np.int64]
    so_far: NDArray[np.int64]
    through_epoch: NDArray[np.int64]
    in_all: NDArray[np.int64]


class SampleStream(Protocol):
    """A job's mixture: a fixed, seeded order of samples over all its epochs."""

    def draw(self, *, epoch: int, position: int, batch: BatchSize, begun: str = "") -> Draw:
        """The samples of the step that starts at this place. Pure."""
        ...

    @property
    def largest_epoch(self) -> float:
        """How many samples an epoch has, before or after any change of its weights."""
        ...

    def changed(self, more: Mapping[str, MixtureChange]) -> "SampleStream":
        """The same with further changes of its weights, by name. Raises SpecError where they name
        other sources."""
        ...

    def require_weights(self) -> None:
        """Raises SpecError where its changes are sure to leave no source a weight. For a change
        that is yet to be taken: what is on record holds for older versions of a job file too, of
        which some may have no source left."""
        ...

    def begin_changes(self, cursor: Cursor) -> Cursor:
        """The cursor with the changes of the mixture that are due at its step. For a step that is
        planned the first time; the ledger's cursors name those that were in force. Pure."""
        ...

    @property
    def epochs(self) -> int:
        """How many epochs there are."""
        ...

    def sources_met(self, begun: str) -> int:
        """How many sources there are up to the last one that has, or had, a weight where these
        changes have begun."""
        ...

    def drawn(self, cursor: Cursor) -> Drawn:
        """How much of each source lies before this place. Takes no longer further on."""
        ...


class Catalog(Protocol):
    """The opened index of a job: lengths and locations by sample id."""

    @property
    def fingerprint(self) -> str:
        """Changes whenever a source, a processor or the tokenizer does."""
        ...

    @property
    def samples(self) -> int:
        """The number of samples; their ids are 0 .. samples-1."""
        ...

    @property
    def source_names(self) -> tuple[str, ...]:
        """The sources, in the order of the job file."""
        ...

    @property
    def sizes(self) -> tuple[int, ...]:
        """The number of samples of each of these; ids rise from source to source."""
        ...

    def source_numbers(self, sample_ids: IntArray) -> NDArray[np.int64]:
        """The source of each of these samples, as its place in `source_names`: int64[n]."""
        ...

    @property
    def longest_sample(self) -> int:
        """The id of a sample with the most LLM tokens."""
        ...

    def lengths(self, sample_ids: IntArray) -> LengthTable:
        """The lengths of these samples, in the order given."""
        ...

    @property
    def at_hand(self) -> bool:
        """Whether what the methods below give is at hand for all samples. Until then a call may
        take seconds, unless its samples were just fetched."""
        ...

    def fetch(self, sample_ids: IntArray) -> None:
        """Have what the methods below give of these samples at hand. May take seconds."""
        ...

    def details(self, sample_ids: IntArray) -> Sequence[tuple[SampleRef, SampleLengths]]:
        """Locations and full lengths (shapes included) of these samples, in the order given. An
        implementation may make each only when it is read."""
        ...

    def columns(self, sample_ids: IntArray) -> SampleColumns:
        """The same as columns, of epoch 0."""
        ...

    def files(self, sample_ids: IntArray) -> Sequence[str]:
        """The paths of the files that hold these samples, in the order given."""
        ...

    def row_keys(self, sample_ids: IntArray) -> NDArray[np.uint32]:
        """A number for the file and row of each of these samples, whichever job names them:
        uint32[n], in the order given. Two rows seldom have the same."""
        ...

    def item_details(self, sample_ids: IntArray) -> ItemDetails:
        """What is known of these samples' encoder items besides their lengths, by sample, then in
        its order."""
        ...

    def loss_weights(self, sample_ids: IntArray) -> NDArray[np.float64]:
        """The own loss weight of each of these samples, without its source's: float64[n], in the
        order given."""
        ...


class SampleReader(Protocol):
    """Reads samples' bytes. Safe for use from several threads."""

    def read(self, ref: SampleRef) -> RawSample:
        """Raises SampleError where the sample cannot be read, SourceError where its source cannot
        be, StorageAwayError where a later try may succeed."""
        ...

    def read_together(self, refs: Sequence[SampleRef]) -> Sequence[RawSample | Exception]:
        """Samples of one source, each as `read` gives it or the error that it raises. A reader may
        read them in fewer requests."""
        return [self._result(ref) for ref in refs]

    def _result(self, ref: SampleRef) -> RawSample | Exception:
        try:
            return self.read(ref)
        except Exception as error:
            return error


# ---- decode -------------------------------------------------------------------------------


class SampleMeasurer(Protocol):
    """Measures samples by their headers and by tokenising, without decoding pixels."""

    @property
    def fingerprint(self) -> str:
        """A digest of the tokenizer, template and processors, which decide the lengths."""
        ...

    def measure(self, raw: RawSample) -> SampleLengths:
        """The lengths of a sample, or of the piece of it that `raw` names. Raises SampleError where
        the sample cannot be used, with the reason."""
        ...

    def measure_pieces(self, raw: RawSample) -> Sequence[SampleLengths]:
        """The lengths of the samples that a sample as read becomes: its own, or those of its pieces
        in order where the pipeline cuts it. Raises SampleTooLongError where it is longer than
        `longer_than` allows and is not cut, SampleError where it cannot be used."""
        ...


class RangeCache(Protocol):
    """Bytes that a team read from other machines, kept on this one. `about` says all that decides
    what they are. Safe for several threads."""

    @property
    def passed_over(self) -> bool:
        """Whether this thread reads `anew`."""
        ...

    def find(self, about: str, size_bytes: int) -> bytes | None:
        """The bytes that were kept, if they are there."""
        ...

    def keep(self, about: str, data: bytes) -> None:
        """Keep these bytes, if there is room."""
        ...

    def anew(self) -> AbstractContextManager[None]:
        """Within this, this thread finds nothing, and keeps what it reads instead."""
        ...


class ToDecode(NamedTuple):
    """A sample as read, the shape that was planned for it, and the epoch by which it is augmented,
    None where it is not."""

    raw: RawSample
    planned: SampleLengths
    epoch: int | None = None


Finish = Callable[[Sequence[ItemArray]], DecodedSample]
"""Decodes a sample of which a part is done, into the places given for its items or elsewhere."""


class SampleDecoder(Protocol):
    """Decodes one sample to the shape that was planned for it."""

    @property
    def pad_token_id(self) -> int:
        """The token that fills padding and masked samples."""
        ...

    def decode(
        self,
        raw: RawSample,
        planned: SampleLengths,
        epoch: int | None = None,
        places: Sequence[ItemArray] = (),
    ) -> DecodedSample:
        """The sample augmented as in this epoch, or with None as it is. Where `places` has memory
        for its items, of their planned shapes, any of them may lie there. Raises SampleError where
        it cannot be decoded, or does not come out in the planned shape."""
        ...

    def begin(self, samples: Sequence[ToDecode]) -> list[Finish]:
        """Begin to decode several samples; what is given for each, called with its `places`, does
        the rest as `decode` does."""
        return [partial(self.decode, *sample) for sample in samples]

    def augment(self, raw: RawSample, decoded: DecodedSample, epoch: int) -> DecodedSample:
        """What `decode` gives in this epoch, of what it gives without one; `decoded` may be changed
        in place. Raises SampleError where its media cannot be augmented."""
        return decoded


# ---- workers ------------------------------------------------------------------------------


WorkerState = Literal["serving", "silent", "draining"]
"""A serving worker takes orders. A silent one has not answered for a while, and may yet. A draining
one takes no orders, and serves what it holds until that is released."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerInfo:
    """A live worker: its name and its gRPC address. Its `slots` are the samples that it decodes at
    once; `descriptors` the files and sockets that its process may have open, None where it shares
    the coordinator's process; `where` the worker is, as it says."""

    worker: str
    address: str
    slots: int
    state: WorkerState = "serving"
    descriptors: int | None = None
    where: Whereabouts = ANYWHERE


class ServedWorker(Protocol):
    """A worker that serves gRPC in this process. Built by app, run by a pool."""

    @property
    def address(self) -> str:
        """host:port where trainers and the coordinator reach it."""
        ...

    @property
    def where(self) -> Whereabouts:
        """Its node and zone, and its cache."""
        ...

    async def stop(self) -> None:
        """Finish the streams that are open, then close the port."""
        ...


ServeWorker = Callable[[str], Awaitable[ServedWorker]]
"""Start a worker of this name in this process."""


class WorkerPool(Protocol):
    """Keeps a number of workers alive."""

    async def start(self) -> None:
        """Start all workers. Returns once each serves, or once the required number does and no more
        come; those that are missing then are tried again."""
        ...

    def workers(self) -> tuple[WorkerInfo, ...]:
        """The workers now believed to be alive; none before `start` has returned."""
        ...

    def shortfall(self) -> str:
        """How many of the wanted workers are missing, why, and what is done about it. Empty if none
        is missing."""
        ...

    async def replace(self, worker: str) -> None:
        """Make sure that a worker that does not answer is gone, and start another."""
        ...

    async def renew(
        self, workers: Collection[str], drained: Callable[[str], Awaitable[None]]
    ) -> None:
        """Replace these workers one after another without losing what they hold: each ends
        once `drained(worker)` returns, or a time limit is over. Names not of the pool are
        ignored."""
        ...

    async def stop(self) -> None:
        """End all workers but those that are to outlive this process."""
        ...


class WorkerLink(Protocol):
    """How the coordinator commands workers."""

    def order(
        self, worker: WorkerInfo, orders: Sequence[PackOrder]
    ) -> AsyncGenerator[PackAnswers, None]:
        """Decode and assemble packs of one step. Each is answered once it is ready or cannot be
        made; the same order given twice is decoded once. Raises WorkerLostError where the worker
        is gone before all are answered. To close it ends the call."""
        ...

    async def release(self, worker: WorkerInfo, job: str, packs: Sequence[PackKey]) -> None:
        """Forget these packs. Packs that it does not know are ignored; a lost worker raises
        nothing."""
        ...

    async def ask_held(self, worker: WorkerInfo) -> Holdings:
        """What a worker holds or decodes, and what it waits for. Raises WorkerLostError where it is
        gone."""
        ...

    def index(self, worker: WorkerInfo, order: IndexOrder) -> AsyncGenerator[IndexAnswer, None]:
        """Have an errand for an index carried out. Raises WorkerLostError where the worker is gone
        before its end, and what the errand raises. To close it ends the errand."""
        ...


class PackHost(Protocol):
    """The worker's side: packs being decoded, and the parts of those that are ready."""

    async def prepare(self, order: PackOrder) -> PackReceipt:
        """Decode, assemble and hold a pack."""
        ...

    async def sequence(self, key: PackKey, cp_rank: int) -> dict[str, NDArray[np.int32]]:
        """`input_ids`, `labels`, `position_ids` int32[local tokens] of one group member. Waits
        until the pack is ready. Raises NotFoundError where the pack was never ordered."""
        ...

    async def items(
        self, key: PackKey, items: Sequence[int], ranges: Sequence[UnitRange] = ()
    ) -> HeldItems:
        """The decoded encoder items at these places of the pack's item list, and of each the frames
        of its range where there are some. Raises NotFoundError where there are none such."""
        ...

    def release(self, packs: Sequence[PackKey]) -> None:
        """Forget these packs. Packs that it does not know are ignored."""
        ...

    def held(self) -> Sequence[PackKey]:
        """Every pack that was ordered here and not released, decoded or not."""
        ...

    def outages(self) -> Sequence[StorageOutage]:
        """The sources whose storage does not answer, and whose samples wait for it."""
        return ()


class IndexHost(Protocol):
    """The worker's side of indexing."""

    def index(self, order: IndexOrder) -> AsyncGenerator[IndexAnswer, None]:
        """Carry out an errand, at the lowest priority. Raises what it raises. To close it ends the
        errand."""
        ...


# ---- observability ------------------------------------------------------------------------


class Metrics(Protocol):
    """What the engine tells whoever watches it: one call for each event, from any thread. A call
    neither raises nor waits."""

    def step_planned(self, job: str, plan: StepPlan, *, plan_s: float) -> None:
        """A step was drawn and planned for the first time in its attempt, in `plan_s` seconds."""
        ...

    def ready_steps(self, job: str, steps: int) -> None:
        """The number of steps that are decoding or decoded, and that not every rank has
        received."""
        ...

    def step_committed(self, job: str) -> None:
        """Every rank has trained one more step."""
        ...

    def step_measured(self, job: str, *, predicted_s: float, measured_s: float) -> None:
        """Training time of a step at its slowest rank, and as the plan predicted it."""
        ...

    def ranks_measured(self, job: str, measured_s: Sequence[float]) -> None:
        """Training times of a step that every rank has trained, at those that measured theirs."""
        ...

    def step_phases(
        self, job: str, *, predicted_s: Mapping[str, float], measured_s: Mapping[str, float]
    ) -> None:
        """Time of each phase of a trained step, on the mean of the ranks that reported it, and as
        its plan predicted it: nothing where the plan is not known any more."""
        ...

    def data_waited(self, job: str, step_s: float) -> None:
        """Seconds a rank's training waited for data, mean of the steps since its last report."""
        ...

    def waited_most(self, job: str, rank: int, step_s: float) -> None:
        """The rank whose training waits longest for data, and its seconds, mean of its last steps.
        The rank is -1 when none is connected."""
        ...

    def waiting_ranks(self, job: str, ranks: int) -> None:
        """The number of ranks whose training waits for data now."""
        ...

    def job_looked_at(self, job: str, *, stalled: bool) -> None:
        """A registered job was looked at, whether or not it has trainers; it may be stalled."""
        ...

    def workers_serving(self, workers: int, *, slots: int) -> None:
        """The number of workers that serve, and of samples that they decode at once together."""
        ...

    def packs_prepared(self, receipts: PackReceipts) -> None:
        """A worker has decoded and assembled packs of one step."""
        ...

    def error_budget_used(self, job: str, source: str, share: float) -> None:
        """The share of a source's error budget that is used; above 1 the job stops."""
        ...

    def work_outstanding(self, worker: str, tokens: float) -> None:
        """The decoding that was ordered from a worker and is not done, in tokens."""
        ...

    def pack_hedged(self, job: str) -> None:
        """A pack that was overdue at a slow worker was ordered at a second one."""
        ...

    def pack_found(self, job: str) -> None:
        """A pack was ordered from a worker that held it already, for a former coordinator."""
        ...

    def packs_placed(
        self, job: str, *, work: float, cached: float, same_node: float, same_zone: float
    ) -> None:
        """Packs of this decode work were ordered, in tokens. As much of it is thought to be kept at
        the workers chosen, and goes to ranks on their nodes and in their zones."""
        ...

    def delivered_otherwise(self, job: str) -> None:
        """A pack or a step was decoded again, to other bytes than before."""
        ...

    def worker_lost(self, worker: str) -> None:
        """A worker is lost; its name is never used again."""
        ...

    def worker_retired(self, worker: str) -> None:
        """A worker was drained and has ended; its name is never used again."""
        ...

    def job_deleted(self, job: str) -> None:
        """A job was deleted, and what was kept about it goes too."""
        ...


class NoMetrics(Metrics):
    """Nobody watches: every event is dropped."""

    def step_planned(self, job: str, plan: StepPlan, *, plan_s: float) -> None: ...
    def ready_steps(self, job: str, steps: int) -> None: ...
    def step_committed(self, job: str) -> None: ...
    def step_measured(self, job: str, *, predicted_s: float, measured_s: float) -> None: ...
    def ranks_measured(self, job: str, measured_s: Sequence[float]) -> None: ...
    def step_phases(
        self, job: str, *, predicted_s: Mapping[str, float], measured_s: Mapping[str, float]
    ) -> None: ...
    def data_waited(self, job: str, step_s: float) -> None: ...
    def waited_most(self, job: str, rank: int, step_s: float) -> None: ...
    def waiting_ranks(self, job: str, ranks: int) -> None: ...
    def job_looked_at(self, job: str, *, stalled: bool) -> None: ...
    def workers_serving(self, workers: int, *, slots: int) -> None: ...
    def packs_prepared(self, receipts: PackReceipts) -> None: ...
    def error_budget_used(self, job: str, source: str, share: float) -> None: ...
    def work_outstanding(self, worker: str, tokens: float) -> None: ...
    def pack_hedged(self, job: str) -> None: ...
    def pack_found(self, job: str) -> None: ...
    def packs_placed(
        self, job: str, *, work: float, cached: float, same_node: float, same_zone: float
    ) -> None: ...
    def delivered_otherwise(self, job: str) -> None: ...
    def worker_lost(self, worker: str) -> None: ...
    def worker_retired(self, worker: str) -> None: ...
    def job_deleted(self, job: str) -> None: ...


__all__ = [
    "Catalog",
    "Draw",
    "Drawn",
    "IndexHost",
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
