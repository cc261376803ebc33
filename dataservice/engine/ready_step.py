"""A ready step as one rank gets it: its microbatches, and tickets for their bytes."""

import time
from collections.abc import Mapping
from dataclasses import dataclass

from dataservice.core.orders import Microbatch, PackKey, PartSpec, RankShard, Ticket, WantedParts
from dataservice.core.ports import WorkerInfo
from dataservice.core.positions import PositionRule
from dataservice.core.tickets import holder_of, sign_ticket
from dataservice.engine.attempt import Attempt, Claim
from dataservice.engine.placement import DispatchedStep
from dataservice.engine.planner import PlannedStep
from dataservice.engine.shards import StepParts, microbatches_of, part_specs

# Streams wait for one another on slow links, and the clocks of hosts differ. Only its holder can
# use a ticket meanwhile.
TICKET_LIFE_S = 900


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadyStep:
    """A planned step whose packs, named `keys`, are decoding or decoded; decoded they have
    `size_bytes`."""

    planned: PlannedStep
    digest: str
    parts: StepParts
    dispatched: DispatchedStep
    keys: tuple[PackKey, ...]
    size_bytes: int


def wanted_parts(
    ready: ReadyStep, replica: int, wanted: WantedParts
) -> tuple[tuple[Microbatch, ...], dict[int, list[PartSpec]]]:
    """A replica's microbatches, and by pack what is to be fetched for them."""
    microbatches = microbatches_of(ready.parts, replica, wanted)
    return microbatches, part_specs(microbatches, ready.keys, wanted)


def rank_shard(
    ready: ReadyStep,
    attempt: Attempt,
    rank: int,
    microbatches: tuple[Microbatch, ...],
    tickets: tuple[Ticket, ...],
    positions: PositionRule,
) -> RankShard:
    """One rank's part of a step, for a model that counts positions so."""
    plan = ready.planned.plan
    return RankShard(
        job=attempt.job,
        attempt=attempt.number,
        step=plan.step,
        rank=rank,
        replica=attempt.topology.replica_of(rank),
        plan_digest=ready.digest,
        cursor_after=ready.planned.next_cursor.to_json(),
        loss_tokens=int(plan.sample_loss_tokens.sum()),
        weighted_loss_tokens=plan.weighted_loss_tokens,
        microbatches=microbatches,
        tickets=tickets,
        positions=positions,
    )


def sign_tickets(
    parts: Mapping[int, list[PartSpec]],
    place: Mapping[int, WorkerInfo],
    claim: Claim,
    secret: bytes,
) -> tuple[Ticket, ...]:
    """One ticket for each worker, its parts in wave order. `place[pack]` is the worker that the
    pack is fetched from."""
    of_worker: dict[str, list[PartSpec]] = {}
    address = {}
    for pack in sorted(parts):
        address[place[pack].worker] = place[pack].address
        of_worker.setdefault(place[pack].worker, []).extend(parts[pack])
    holder = holder_of(claim.session)
    expires = int(time.time()) + TICKET_LIFE_S
    return tuple(
        sign_ticket(
            Ticket(
                worker=worker,
                address=address[worker],
                rank=claim.rank,
                holder=holder,
                expires_unix_s=expires,
                parts=tuple(specs),
            ),
            secret,
        )
        for worker, specs in of_worker.items()
    )
