"""What ranks are told of a ready step: their rows, and a ticket for their bytes."""

import time
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from weakref import ref

import numpy as np
from dataservice_proto.columns import SUMMARY, packed
from numpy.typing import NDArray

from dataservice.core.orders import (
    RankShard,
    ShardsMade,
    StepSummary,
    Ticket,
    WantedParts,
)
from dataservice.core.plan import StepPlan
from dataservice.core.positions import PositionRule
from dataservice.core.tickets import signed_ticket
from dataservice.engine.attempt import Attempt, Claim
from dataservice.engine.placement import DispatchedStep
from dataservice.engine.planner import PlannedStep
from dataservice.engine.shards import StepParts, columns_of
from dataservice.engine.ticket_rows import StepTickets, TicketRows

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
    """A planned step whose packs are decoding or decoded; decoded they have `size_bytes`. `made`
    are the parts of ranks, made before each asks."""

    planned: PlannedStep
    digest: str
    parts: StepParts
    common: CommonPart
    dispatched: DispatchedStep
    tickets: StepTickets
    size_bytes: int
    made: dict[int, "MadeShard"] = field(default_factory=dict)


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


class RankShards:
    """Makes what the ranks of an attempt are told of its ready steps.

    All ranks ask at once, and nearly all find every pack where it was ordered and want the same as
    the last time. So when the first asks, the parts of all ranks near it are made in a row, which
    takes each half of what it takes between other work: see StepTickets. A rank of which anything
    is otherwise has its own made.
    """

    def __init__(self, attempt: Attempt, secret: bytes) -> None:
        self._attempt = attempt
        self._secret = secret

    def of(
        self,
        ready: ReadyStep,
        claim: Claim,
        wanted: WantedParts,
        holders: NDArray[np.int32],
        positions: PositionRule,
    ) -> RankShard:
        """One rank's part of a step, for a model that counts positions so, with a ticket for what
        it wants of its replica's part, of which `holders` int32[k] has the packs: those of
        `packs_of`, as places in the dispatched step's workers."""
        claim.wanted = wanted
        expires_unix_s = int(time.time()) + TICKET_LIFE_S
        if claim.rank not in ready.made:
            self._make_beside(ready, claim.rank, positions, expires_unix_s)
        made = ready.made.get(claim.rank)
        if made is not None and made.is_for(claim, wanted, holders, positions, expires_unix_s):
            return made.shard
        replica = self._attempt.topology.replica_of(claim.rank)
        rows = ready.tickets.of(replica, wanted, holders)
        return self._shard(ready, claim, rows, positions, expires_unix_s)

    def _make_beside(
        self, ready: ReadyStep, rank: int, positions: PositionRule, expires_unix_s: int
    ) -> None:
        """Make the parts of all ranks near this one that have a claim, but those that are there."""
        topology, claims = self._attempt.topology, self._attempt.claims
        replicas = ready.tickets.made_with(topology.replica_of(rank))
        each = topology.ranks_per_replica
        together = ShardsMade()
        for near in range(replicas.start * each, replicas.stop * each):
            claim = claims.get(near)
            if claim is None or near in ready.made:
                continue
            rows = ready.tickets.made(topology.replica_of(near), claim.wanted)
            shard = self._shard(ready, claim, rows, positions, expires_unix_s, together)
            ready.made[near] = MadeShard(claim, claim.wanted, rows.held, shard, together)
            together.shards.append(shard)

    def _shard(
        self,
        ready: ReadyStep,
        claim: Claim,
        rows: TicketRows,
        positions: PositionRule,
        expires_unix_s: int,
        together: ShardsMade | None = None,
    ) -> RankShard:
        """What a rank is told that wants what its claim says."""
        common, replica = ready.common, self._attempt.topology.replica_of(claim.rank)
        summary = common.summary
        return RankShard(
            job=self._attempt.job,
            attempt=self._attempt.number,
            step=ready.planned.plan.step,
            rank=claim.rank,
            replica=replica,
            plan_digest=ready.digest,
            cursor_after=common.cursor_after,
            loss_tokens=common.loss_tokens,
            weighted_loss_tokens=common.weighted_loss_tokens,
            samples=summary.samples,
            predicted_s=summary.predicted_s,
            columns=columns_of(ready.parts, replica, claim.wanted),
            ticket=self._ticket(ready, claim, rows, expires_unix_s),
            summary=summary if summary.size_bytes <= SMALL_SUMMARY_BYTES else None,
            positions=positions,
            made_with=None if together is None else ref(together),  # in no cycle with it
        )

    def _ticket(
        self, ready: ReadyStep, claim: Claim, rows: TicketRows, expires_unix_s: int
    ) -> Ticket | None:
        """None where there is nothing to fetch."""
        if not rows.held:
            return None
        wanted = claim.wanted
        return signed_ticket(
            self._secret,
            job=self._attempt.job,
            step=ready.planned.plan.step,
            plan_digest=ready.digest,
            rank=claim.rank,
            holder=claim.holder,
            expires_unix_s=expires_unix_s,
            workers=rows.workers,
            addresses=rows.addresses,
            tensors=() if wanted.tokens and wanted.labels else wanted.sequence,
            sequences=rows.sequences,
            parts=rows.parts,
            columns=rows.columns,
            written=rows.written,
        )


class MadeShard(NamedTuple):
    """One rank's part of a step, with those it was made with, and for what: who claims the rank
    and wants what, and where its packs were."""

    claim: Claim
    wanted: WantedParts
    held: bytes
    shard: RankShard
    together: ShardsMade

    def is_for(
        self,
        claim: Claim,
        wanted: WantedParts,
        holders: NDArray[np.int32],
        positions: PositionRule,
        expires_unix_s: int,
    ) -> bool:
        """Whether this rank would be told the same now, but for a small part of its ticket's life,
        which would end at `expires_unix_s`."""
        ticket = self.shard.ticket
        return (
            self.claim is claim
            and self.wanted == wanted
            and self.held == holders.tobytes()
            and self.shard.positions == positions
            and (ticket is None or expires_unix_s - ticket.expires_unix_s < TICKET_LIFE_S // 10)
        )
