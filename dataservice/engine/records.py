"""What an attempt writes down: each step before it is dispatched, its commit, its bad samples.

Every function runs in a thread, and is on disk when it returns.
"""

import logging
import time
from dataclasses import dataclass

from dataservice.core.cursor import Cursor
from dataservice.core.errors import StateError
from dataservice.core.job import LedgerEntry, QuarantineEntry
from dataservice.core.orders import PackOrder, PackReceipt
from dataservice.core.plan import StepPlan
from dataservice.core.ports import Metrics
from dataservice.core.state_store import StateStore
from dataservice.core.team import TeamShare
from dataservice.engine.attempt import Attempt
from dataservice.engine.pack_orders import pack_orders
from dataservice.engine.planner import PlannedStep, plan_step
from dataservice.engine.ready_bytes import planned_bytes
from dataservice.engine.setup import JobSetup
from dataservice.engine.shards import StepParts, cut_step

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class MadeStep:
    """A plan that is in the ledger, and what is to be done for it. `size_bytes` is what its
    packs take up once decoded."""

    planned: PlannedStep
    digest: str
    parts: StepParts
    orders: list[PackOrder]
    size_bytes: int


class AttemptRecords:
    """The ledger, the commits and the quarantine of one attempt."""

    def __init__(self, attempt: Attempt, *, store: StateStore, metrics: Metrics) -> None:
        self._attempt = attempt
        self._store = store
        self._metrics = metrics

    def cursor(self, step: int) -> Cursor | None:
        """Where a step of this attempt was planned from; None if it never was."""
        attempt = self._attempt
        entry = self._store.ledger_entry(attempt.job, step, attempt.number)
        return None if entry is None else Cursor.from_json(entry.cursor)

    def make(self, setup: JobSetup, cursor: Cursor, share: TeamShare) -> MadeStep | None:
        """Plan the step at `cursor` and put it in the ledger; None behind the last. A step that
        is there already must come to the same digest, else StateError. Its packs are ordered
        for this share of the workers."""
        attempt = self._attempt
        started_s = time.perf_counter()
        planned = plan_step(setup, cursor, attempt.topology)
        plan_s = time.perf_counter() - started_s
        if planned is None:
            return None
        plan, digest = planned.plan, planned.plan.digest
        known = self._store.ledger_entry(attempt.job, cursor.step, attempt.number)
        if known is None:
            self._store.put_ledger(self._entry(cursor, plan, digest))
            self._note_planned(plan, digest, plan_s)
        elif known.plan_digest != digest:
            raise StateError(
                f"step {cursor.step} of job {attempt.job!r} now plans to {digest}, the ledger "
                f"says {known.plan_digest}. The index, the job or the release changed under a "
                "running attempt; restart the trainers from their checkpoint."
            )
        orders = pack_orders(
            plan,
            job=attempt.job,
            digest=digest,
            pipeline=setup.pipeline,
            catalog=setup.catalog,
            share=share,
        )
        return MadeStep(
            planned=planned,
            digest=digest,
            parts=cut_step(plan),
            orders=orders,
            size_bytes=planned_bytes(plan, setup.catalog),
        )

    def trained(self, step: int, measured_s: float | None) -> None:
        """Every rank has trained a step; NotFoundError if it was never planned."""
        job, attempt = self._attempt.job, self._attempt.number
        self._store.commit_step(job, attempt, step, time.time(), measured_s)
        if measured_s is None:
            return
        entry = self._store.ledger_entry(job, step, attempt)
        if entry is not None and entry.predicted_s is not None:
            self._metrics.step_measured(job, predicted_s=entry.predicted_s, measured_s=measured_s)

    def quarantine(self, receipt: PackReceipt) -> None:
        """A pack's bad samples."""
        key = receipt.key
        about = {**self._attempt.about, "step": key.step, "trace_id": key.plan_digest}
        entries = [
            QuarantineEntry(
                job=self._attempt.job,
                attempt=self._attempt.number,
                step=receipt.key.step,
                sample_id=bad.sample_id,
                source=bad.source,
                key=bad.key,
                reason=bad.reason,
            )
            for bad in receipt.bad_samples
        ]
        for entry in entries:
            log.warning("quarantined %s/%s: %s", entry.source, entry.key, entry.reason, extra=about)
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
