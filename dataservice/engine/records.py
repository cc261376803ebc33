"""What an attempt writes down: each step before it is dispatched, its commit, its bad samples.

Every function but `noted_soon` runs in a thread. `plan` writes nothing; what the others write is on
disk when they return.

A step is on disk before anyone hears of it, and its commit before the rank that made it is
answered. What a step of few samples delivered waits for the next step's entry, in whose transaction
it costs nothing, or for CONTENT_WAIT_S. No position depends on it: it only tells whether a later
decoding is the same. A coordinator that is killed meanwhile leaves the step planned, without
content, as one that is killed before the last receipt does; ranks may have its bytes either way.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dataservice.core.content import StepContent
from dataservice.core.cursor import Cursor
from dataservice.core.errors import StateError
from dataservice.core.job import LedgerEntry, QuarantineEntry
from dataservice.core.job_limits import JobLimits
from dataservice.core.job_setup import JobSetup
from dataservice.core.order_columns import FEW_SAMPLES, PackOrders
from dataservice.core.orders import StepSummary
from dataservice.core.plan import StepPlan, StepTime
from dataservice.core.ports import Catalog, Metrics
from dataservice.core.receipts import PackReceipts
from dataservice.core.sample import ItemDetails
from dataservice.core.state_store import StateStore
from dataservice.core.team import TeamShare
from dataservice.engine.attempt import Attempt
from dataservice.engine.delivered import Comparison, Delivered
from dataservice.engine.error_budget import TrainedSamples
from dataservice.engine.pack_orders import pack_orders
from dataservice.engine.placement import DispatchedStep
from dataservice.engine.planner import PlannedStep, plan_step
from dataservice.engine.ready_bytes import planned_bytes
from dataservice.engine.ready_step import CommonPart, step_summary
from dataservice.engine.shards import StepParts, cut_step

log = logging.getLogger(__name__)

NAMED_SAMPLES = 8
# How long what a step delivered waits for another step's entry, to be written with it.
CONTENT_WAIT_S = 0.1
_NO_ITEMS = ItemDetails.of([])


@dataclass(frozen=True, kw_only=True, slots=True)
class MadeStep:
    """A plan, and what is to be done for it once it is in the ledger. `keys` uint32[n] are those of
    its samples' rows, `size_bytes` is the size of its packs once decoded, `plan_s` the time that
    planning took."""

    planned: PlannedStep
    digest: str
    parts: StepParts
    orders: PackOrders
    samples: TrainedSamples
    common: CommonPart
    keys: NDArray[np.uint32]
    size_bytes: int
    plan_s: float


class AttemptRecords:
    """The ledger, the commits and the quarantine of one attempt."""

    def __init__(self, attempt: Attempt, *, store: StateStore, metrics: Metrics) -> None:
        self._attempt = attempt
        self._store = store
        self._metrics = metrics
        # Of steps that this coordinator planned and that are not trained yet.
        self._predicted: dict[int, StepTime] = {}
        # The highest step that the ledger has of any attempt, once it was asked; from then on only
        # this attempt adds to it, for an older one has ended before. Behind it, nothing is on
        # record of a step: most steps are such, and the store is asked nothing about them.
        self._recorded_through: int | None = None
        self._recording = threading.Lock()
        self._first_here: set[int] = set()  # of those, the steps of which the plan alone is known
        self._contents: deque[tuple[int, bytes]] = deque()  # that wait

    def cursor(self, step: int) -> Cursor | None:
        """The cursor that a step of this attempt was planned from; None if it never was."""
        attempt = self._attempt
        entry = self._store.ledger_entry(attempt.job, step, attempt.number)
        return None if entry is None else Cursor.from_json(entry.cursor)

    def plan(self, setup: JobSetup, cursor: Cursor, share: TeamShare) -> MadeStep | None:
        """Plan the step at `cursor`; None behind the last. Its packs are ordered under this share
        of the workers. Raises QuotaError where the step is larger than the service takes."""
        attempt = self._attempt
        started_s = time.perf_counter()
        planned = plan_step(setup, cursor, attempt.topology)
        plan_s = time.perf_counter() - started_s
        if planned is None:
            return None
        plan, digest = planned.plan, planned.plan.digest
        items = _items(plan, setup.catalog)
        size_bytes = planned_bytes(plan, items)
        _require_bytes(setup.job_limits, plan, size_bytes)
        orders = pack_orders(
            plan,
            setup.catalog,
            job=attempt.job,
            digest=digest,
            pipeline=setup.pipeline,
            share=share,
        )
        return MadeStep(
            planned=planned,
            digest=digest,
            parts=cut_step(plan, items.notes),
            orders=orders,
            samples=TrainedSamples.of(plan, setup.catalog),
            common=CommonPart.of(planned, digest),
            keys=setup.catalog.row_keys(plan.sample_ids),
            size_bytes=size_bytes,
            plan_s=plan_s,
        )

    def summary(self, setup: JobSetup, cursor: Cursor) -> StepSummary:
        """The groups of a step of the ledger, planned again."""
        planned = plan_step(setup, cursor, self._attempt.topology)
        assert planned is not None, "a step of the ledger is never past the end"
        return step_summary(planned.plan, planned.plan.digest)

    def record(self, made: MadeStep) -> None:
        """Put a step in the ledger, before anyone hears of it. Raises StateError where the step is
        there already with another digest."""
        attempt, cursor, plan = self._attempt, made.planned.cursor, made.planned.plan
        with self._recording:
            known = self._known(cursor.step)
            if plan.time is not None and (known is None or known.committed_unix_s is None):
                self._predicted[cursor.step] = plan.time
            if known is None:
                self._put(self._entry(cursor, plan, made.digest))
        if known is None:
            self._note_planned(plan, made.digest, made.plan_s)
        elif known.plan_digest != made.digest:
            raise StateError(
                f"step {cursor.step} of job {attempt.job!r} now plans to {made.digest}, the "
                f"ledger says {known.plan_digest}. The index, the job or the release changed "
                "under a running attempt; restart the trainers from their checkpoint."
            )

    def _known(self, step: int) -> LedgerEntry | None:
        """This attempt's entry of a step, if there is one."""
        job = self._attempt.job
        if self._recorded_through is None:
            self._recorded_through = self._store.last_planned_step(job)
        if step > self._recorded_through:
            return None
        return self._store.ledger_entry(job, step, self._attempt.number)

    def _put(self, entry: LedgerEntry) -> None:
        self._store.put_ledger(entry, self._waiting())
        assert self._recorded_through is not None, "it was asked whether the step is known"
        if entry.step > self._recorded_through:
            self._recorded_through = entry.step
            self._first_here.add(entry.step)

    def trained(self, step: int, measured_s: float | None) -> StepTime | None:
        """Every rank has trained a step. Returns what its plan predicted, None where another
        coordinator planned it. Raises NotFoundError where it was never planned."""
        job, attempt = self._attempt.job, self._attempt.number
        self._first_here.discard(step)
        self._store.commit_step(job, attempt, step, time.time(), measured_s)
        predicted = self._predicted.pop(step, None)
        if measured_s is None:
            return predicted
        predicted_s = None if predicted is None else predicted.total_s
        if predicted_s is None:
            entry = self._store.ledger_entry(job, step, attempt)
            predicted_s = None if entry is None else entry.predicted_s
        if predicted_s is not None:
            self._metrics.step_measured(job, predicted_s=predicted_s, measured_s=measured_s)
        return predicted

    def delivered(self, delivered: Delivered) -> StateError | None:
        """The receipts of all packs of a step are in: put its content in the ledger. Returns an
        error where it is not what this attempt, or the last one to train the step, delivered
        before."""
        job, number, step = self._attempt.job, self._attempt.number, delivered.plan.step
        if step in self._first_here:
            self._first_here.discard(step)
            self._store.put_content(job, number, step, delivered.content().to_bytes())
            return None
        self.write_contents()  # the step's own may be among them, from before it was planned again
        for entry in reversed(self._entries(step)):
            if entry.content is None:
                continue
            bad = self._store.quarantine_of_step(job, entry.attempt, step)
            recorded = StepContent.from_bytes(entry.content)
            found = delivered.compared(recorded, {each.sample_id for each in bad})
            if found.verdict == "differs":
                return StateError(_delivered_otherwise(entry, found))
            if entry.attempt == number:
                return None
            if found.verdict == "same":
                break
        masked = {bad.sample_id for bad in self._store.quarantine_of_step(job, number, step)}
        content = delivered.content(masked | delivered.masked.keys())
        self._store.put_content(job, number, step, content.to_bytes())
        return None

    def _entries(self, step: int) -> list[LedgerEntry]:
        """The entries of a step, by attempt. Old ones may be in a file that is lost, which keeps
        nobody from training: this attempt's own is then all that can be compared with."""
        job, number = self._attempt.job, self._attempt.number
        try:
            return self._store.ledger_of_step(job, step)
        except StateError as error:
            own = self._store.ledger_entry(job, step, number)
            about = {**self._attempt.about, "step": step}
            log.warning("it is not compared with what was delivered before: %s", error, extra=about)
            return [] if own is None else [own]

    def noted_soon(self, delivered: Delivered) -> bool:
        """Whether the content of a step will be written with whatever is written next, or by
        `write_contents`: few samples, of which there is nothing to compare with."""
        step = delivered.plan.step
        if step not in self._first_here or len(delivered.plan.sample_ids) > FEW_SAMPLES:
            return False
        self._first_here.discard(step)
        self._contents.append((step, delivered.content().to_bytes()))
        return True

    def write_contents(self) -> None:
        """Put the contents that wait in the ledger; those that `record` has taken are there too."""
        with self._recording:
            for step, content in self._waiting():
                self._store.put_content(self._attempt.job, self._attempt.number, step, content)

    def _waiting(self) -> list[tuple[int, bytes]]:
        waiting = []
        while self._contents:  # the event loop may add to them meanwhile
            waiting.append(self._contents.popleft())
        return waiting

    def quarantine(self, receipts: PackReceipts) -> None:
        """Record the bad samples of packs."""
        about = {**self._attempt.about, "step": receipts.step, "trace_id": receipts.plan_digest}
        entries = [
            QuarantineEntry(
                job=self._attempt.job,
                attempt=self._attempt.number,
                step=receipts.step,
                sample_id=bad.sample_id,
                source=bad.source,
                key=bad.key,
                reason=bad.reason,
            )
            for bad in receipts.bad
        ]
        for entry in entries:
            log.warning("quarantined %s/%s: %s", entry.source, entry.key, entry.reason, extra=about)
        self._first_here.discard(receipts.step)
        self._store.add_quarantine(entries)

    def _entry(self, cursor: Cursor, plan: StepPlan, digest: str) -> LedgerEntry:
        return LedgerEntry(
            job=self._attempt.job,
            attempt=self._attempt.number,
            step=cursor.step,
            cursor=cursor.to_json(),
            plan_digest=digest,
            world_size=self._attempt.topology.world_size,
            cost_version=plan.cost_version,
            planned_unix_s=time.time(),
            predicted_s=plan.predicted_s,
        )

    def _note_planned(self, plan: StepPlan, digest: str, plan_s: float) -> None:
        self._metrics.step_planned(self._attempt.job, plan, plan_s=plan_s)
        log.info(
            "planned %d samples as %d packs in %d waves, %.3g s of training, in %.3g s",
            len(plan.sample_ids),
            plan.packs,
            plan.waves,
            plan.predicted_s,
            plan_s,
            extra={**self._attempt.about, "step": plan.step, "trace_id": digest},
        )


def _items(plan: StepPlan, catalog: Catalog) -> ItemDetails:
    if not len(plan.item_sample):
        return _NO_ITEMS
    return catalog.item_details(plan.sample_ids)


LIKELY_CAUSES = (
    "A tokenizer, a template or a file of the data was replaced in place; or workers run other "
    "releases of the service or its libraries, see other files, or use a processor that does not "
    "give the same twice."
)


def two_versions(step: DispatchedStep, pack: int, samples: Sequence[str]) -> str:
    """The message where copies of one pack of a step differ."""
    holders = ", ".join(step.placements[pack].copies)
    return (
        f"pack {pack} of step {step.plan.step} of job {step.job!r} was decoded more than once, the "
        f"last time by one of {holders}, and {len(samples)} of its samples came out otherwise: "
        f"{', '.join(samples[:NAMED_SAMPLES])}. Ranks may have got either, so the attempt ends. "
        f"{LIKELY_CAUSES} Make the workers alike, and restart the trainers from their checkpoint."
    )


def _delivered_otherwise(entry: LedgerEntry, found: Comparison) -> str:
    step, job = entry.step, entry.job
    return (
        f"step {step} of job {job!r} is not what attempt {entry.attempt} delivered: {found.note}. "
        f"{LIKELY_CAUSES} Put back what was replaced and restart the trainers from their "
        f"checkpoint; `dataservice job replay {job} --steps {step} --content` tells whether it is "
        "as before. If the change is meant, delete the job and submit it again: that forgets its "
        "ledger and its skipped steps, and a checkpoint of the same order of samples still fits."
    )


def _require_bytes(limits: JobLimits, plan: StepPlan, size_bytes: int) -> None:
    limits.check("max_step_bytes", size_bytes, f"decoded bytes of step {plan.step}")
    of_each = size_bytes / plan.replicas
    limits.check("max_replica_bytes", of_each, f"decoded bytes a replica in step {plan.step}")
