"""A ready step as one rank gets it: its rows, and a ticket for their bytes."""

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
from dataservice_proto.columns import SUMMARY, packed
from numpy.typing import NDArray

from dataservice.core.orders import (
    RankShard,
    ShardColumns,
    StepSummary,
    Ticket,
    WantedParts,
)
from dataservice.core.plan import StepPlan
from dataservice.core.positions import PositionRule
from dataservice.core.tickets import sign_ticket
from dataservice.engine.attempt import Attempt, Claim
from dataservice.engine.placement import DispatchedStep
from dataservice.engine.planner import PlannedStep
from dataservice.engine.shards import StepParts
from dataservice.engine.ticket_rows import StepTickets

# Streams wait for one another on slow links, and the clocks of hosts differ. Only its holder can
# use a ticket meanwhile.
TICKET_LIFE_S = 900
# A summary up to this size comes with every shard; a larger one is asked for.
SMALL_SUMMARY_BYTES = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class CommonPart:
    """What every rank is told of a step, made once."""

    cursor_after: str
    loss_tokens: int
    weighted_loss_tokens: float | None
    summary: StepSummary

    @staticmethod
    def of(planned: PlannedStep, digest: str) -> "CommonPart":
        """O(packs)."""
        plan = planned.plan
        return CommonPart(
            cursor_after=planned.next_cursor.to_json(),
            loss_tokens=int(plan.sample_loss_tokens.sum()),
            weighted_loss_tokens=plan.weighted_loss_tokens,
            summary=step_summary(plan, digest),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadyStep:
    """A planned step whose packs are decoding or decoded; decoded they have `size_bytes`."""

    planned: PlannedStep
    digest: str
    parts: StepParts
    common: CommonPart
    dispatched: DispatchedStep
    tickets: StepTickets
    size_bytes: int


def step_summary(plan: StepPlan, digest: str) -> StepSummary:
    """The groups of the whole step."""
    columns: tuple[NDArray[Any], ...] = (
        plan.pack_wave,
        plan.pack_degree,
        plan.pack_replicas,
        plan.pack_tokens,
        plan.pack_seconds,
    )
    return StepSummary(
        plan_digest=digest,
        replicas=plan.replicas,
        waves=plan.waves,
        packs=plan.packs,
        samples=len(plan.sample_ids),
        predicted_s=plan.predicted_s,
        stages=plan.stages,
        columns={
            column.name: packed(values) for column, values in zip(SUMMARY, columns, strict=True)
        },
    )


def rank_shard(
    ready: ReadyStep,
    attempt: Attempt,
    rank: int,
    columns: ShardColumns,
    ticket: Ticket | None,
    positions: PositionRule,
) -> RankShard:
    """One rank's part of a step, for a model that counts positions so."""
    common = ready.common
    summary = common.summary
    return RankShard(
        job=attempt.job,
        attempt=attempt.number,
        step=ready.planned.plan.step,
        rank=rank,
        replica=attempt.topology.replica_of(rank),
        plan_digest=ready.digest,
        cursor_after=common.cursor_after,
        loss_tokens=common.loss_tokens,
        weighted_loss_tokens=common.weighted_loss_tokens,
        samples=summary.samples,
        predicted_s=summary.predicted_s,
        columns=columns,
        ticket=ticket,
        summary=summary if summary.size_bytes <= SMALL_SUMMARY_BYTES else None,
        positions=positions,
    )


def signed_ticket(
    ready: ReadyStep,
    replica: int,
    wanted: WantedParts,
    holders: NDArray[np.int32],
    claim: Claim,
    job: str,
    secret: bytes,
) -> Ticket | None:
    """The ticket for what a rank wants of its replica's part, of which `holders` int32[k] has the
    packs: those of `packs_of`, as places in the dispatched step's workers. None where there is
    nothing."""
    if not len(holders):
        return None
    rows = ready.tickets.of(replica, wanted, holders)
    ticket = Ticket(
        job=job,
        step=ready.planned.plan.step,
        plan_digest=ready.digest,
        rank=claim.rank,
        holder=claim.holder,
        expires_unix_s=int(time.time()) + TICKET_LIFE_S,
        workers=rows.workers,
        addresses=rows.addresses,
        tensors=() if wanted.tokens and wanted.labels else wanted.sequence,
        sequences=rows.sequences,
        parts=rows.parts,
        columns=rows.columns,
        written=rows.written,
    )
    return sign_ticket(ticket, secret)
