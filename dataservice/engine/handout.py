"""A ready step as one rank gets it: its microbatches, and tickets for their bytes."""

import time
from collections.abc import Mapping
from dataclasses import dataclass

from dataservice.core.orders import Microbatch, PartSpec, RankShard, Ticket, WantedParts
from dataservice.core.ports import WorkerInfo
from dataservice.core.tickets import sign_ticket
from dataservice.engine.attempt import Attempt
from dataservice.engine.places import DispatchedStep
from dataservice.engine.planner import PlannedStep
from dataservice.engine.shards import StepParts, microbatches_of, part_specs

TICKET_LIFE_S = 900


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadyStep:
    """A planned step whose packs are decoding or decoded, to `size_bytes`."""

    planned: PlannedStep
    digest: str
    parts: StepParts
    dispatched: DispatchedStep
    size_bytes: int


def wanted_parts(
    ready: ReadyStep, replica: int, wanted: WantedParts
) -> tuple[tuple[Microbatch, ...], dict[int, list[PartSpec]]]:
    """A replica's microbatches, and by pack what is to be fetched for them."""
    microbatches = microbatches_of(ready.parts, replica, wanted)
    return microbatches, part_specs(microbatches, ready.dispatched.keys, wanted)


def rank_shard(
    ready: ReadyStep,
    attempt: Attempt,
    rank: int,
    microbatches: tuple[Microbatch, ...],
    tickets: tuple[Ticket, ...],
) -> RankShard:
    """One rank's part of a step."""
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
        microbatches=microbatches,
        tickets=tickets,
    )


def sign_tickets(
    parts: Mapping[int, list[PartSpec]],
    holder: Mapping[int, WorkerInfo],
    rank: int,
    secret: bytes,
) -> tuple[Ticket, ...]:
    """One ticket a worker, its parts in wave order. `holder[pack]` is where it is fetched."""
    of_worker: dict[str, list[PartSpec]] = {}
    address = {}
    for pack in sorted(parts):
        address[holder[pack].worker] = holder[pack].address
        of_worker.setdefault(holder[pack].worker, []).extend(parts[pack])
    expires = int(time.time()) + TICKET_LIFE_S
    return tuple(
        sign_ticket(
            Ticket(
                worker=worker,
                address=address[worker],
                rank=rank,
                expires_unix_s=expires,
                parts=tuple(specs),
            ),
            secret,
        )
        for worker, specs in of_worker.items()
    )
