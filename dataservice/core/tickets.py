"""Signed tickets: a worker checks one alone, with the secret it shares with the coordinator.

    coordinator ── ticket, signed, names its holder ──► rank ── ticket, proof ──► each worker
         └──────── the holder's key, once a session ────►│

Only the session that a ticket was given to can use it. The key is not sent to workers, which derive
it from the secret; a proof is good for one ticket at one worker.
"""

import hashlib
import hmac
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from operator import attrgetter, itemgetter
from typing import Any

from dataservice_proto.columns import TICKET, TICKET_FIELDS, TicketColumns, packed

from dataservice.core.errors import TicketError
from dataservice.core.field_bytes import BYTES, fields, head_of
from dataservice.core.orders import PackKey, PartSpec, Ticket, UnitRange


def holder_of(session: str) -> str:
    """The name of a session in tickets: 32 hex digits, from which the session's own name cannot be
    found."""
    return hashlib.sha256(f"dataservice ticket holder {session}".encode()).hexdigest()[:32]


def holder_key(holder: str, secret: bytes) -> bytes:
    """The key by which a session proves that it is this holder: 32 bytes."""
    return hmac.digest(secret, f"dataservice ticket key {holder}".encode(), hashlib.sha256)


def prove(ticket: Ticket, worker: str, key: bytes) -> bytes:
    """The proof, for this worker, that the ticket comes from its holder: 32 bytes."""
    return hmac.digest(key, ticket.signature + worker.encode(), hashlib.sha256)


def sign_ticket(ticket: Ticket, secret: bytes) -> Ticket:
    """The same ticket with its signature (HMAC-SHA256 over all but the addresses)."""
    return replace(ticket, signature=_signature(_signed(ticket), written_of(ticket), secret))


def signed_ticket(secret: bytes, written: bytes, **more: Any) -> Ticket:
    """A signed ticket of all its fields, made once: of thousands a step, a copy is felt."""
    signature = _signature(_signed_of(more), written, secret)
    return Ticket(written=written, signature=signature, **more)


def written_of(ticket: Ticket) -> bytes:
    """The ticket's columns as fields of a message, in the order of TICKET; those that are empty
    have none."""
    given = ticket.columns
    return ticket.written or b"".join(fields(_HEADS, {name: given[name] for name in _HEADS}))


def check_ticket(
    ticket: Ticket, proof: bytes, secret: bytes, *, worker: str, now_unix_s: float
) -> None:
    """Raises TicketError where the ticket is forged, expired, for another worker, or not shown by
    its holder."""
    expected = _signature(_signed(ticket), written_of(ticket), secret)
    if not hmac.compare_digest(expected, ticket.signature):
        raise TicketError(
            "the ticket's signature is not this service's. Ask the coordinator for the shard "
            "again; if it repeats, coordinator and worker were started with different secrets."
        )
    if not hmac.compare_digest(prove(ticket, worker, holder_key(ticket.holder, secret)), proof):
        raise TicketError(
            f"the ticket was given to another session, of rank {ticket.rank}: "
            f"{'it is shown without' if not proof else 'this is not'} its proof. Fetch with the "
            "tickets of your own session, and a trainer_client of the service's release.",
            fault="holder",
        )
    if worker not in ticket.workers:
        raise TicketError(
            f"the ticket is for worker {', '.join(map(repr, ticket.workers[:8]))}, this is "
            f"{worker!r}. Ask the coordinator for the shard again.",
            fault="worker",
        )
    if now_unix_s > ticket.expires_unix_s:
        raise TicketError(
            f"the ticket expired {now_unix_s - ticket.expires_unix_s:.0f} s ago. Ask the "
            "coordinator for the shard again; if it repeats, the hosts' clocks disagree.",
            fault="expired",
        )


def ticket_for(parts: Mapping[str, Sequence[PartSpec]], **more: Any) -> Ticket:
    """A ticket for some parts of one step by worker, not yet signed; `more` are its other fields.
    What the coordinator hands out is cut from a step's columns; this is for a few parts."""
    named = [(k, part) for k, of in enumerate(parts.values()) for part in of]
    sequences = [(k, part.key.pack, part.cp_rank) for k, part in named if not part.items]
    of_items = [(k, part.key.pack, len(part.items)) for k, part in named if part.items]
    places = [
        (place, *units)
        for _, part in named
        for place, units in zip(
            part.items, part.ranges or (UnitRange(0, 1, 1),) * len(part.items), strict=True
        )
    ]
    rows = [*_transposed(sequences, 3), *_transposed(of_items, 3), *_transposed(places, 4)]
    columns = {column.name: packed(of) for column, of in zip(TICKET, rows, strict=True)}
    if not any(part.ranges for _, part in named):
        columns |= dict.fromkeys(_RANGES, b"")
    keys = {(part.key.job, part.key.step, part.key.plan_digest) for _, part in named}
    job, step, plan_digest = keys.pop() if keys else ("", 0, "")
    return Ticket(
        job=job,
        step=step,
        plan_digest=plan_digest,
        workers=tuple(parts),
        tensors=next((part.tensors for _, part in named if not part.items), ()),
        sequences=len(sequences),
        parts=len(of_items),
        columns=columns,
        **more,
    )


_RANGES = ("place_first", "place_stop", "place_of")


def parts_at(ticket: Ticket, worker: str) -> list[PartSpec]:
    """What a worker is to stream for a ticket, in order. Raises TicketError where its columns
    contradict each other."""
    try:
        read = TicketColumns(ticket.columns, sequences=ticket.sequences, parts=ticket.parts)
    except ValueError as error:
        raise TicketError(f"the ticket cannot be read: {error}.") from error
    return [
        PartSpec(
            key=PackKey(
                job=ticket.job, step=ticket.step, plan_digest=ticket.plan_digest, pack=part.pack
            ),
            cp_rank=part.member,
            items=part.items,
            tensors=() if part.items else ticket.tensors,
            ranges=tuple(UnitRange(*units) for units in part.ranges),
        )
        for place, name in enumerate(ticket.workers)
        if name == worker
        for part in read.parts_at(place)
    ]


def _transposed(rows: Sequence[tuple[int, ...]], columns: int) -> list[list[int]]:
    return [[row[k] for row in rows] for k in range(columns)]


def _signature(signed: tuple[object, ...], written: bytes, secret: bytes) -> bytes:
    signing = _keyed(secret).copy()
    signing.update(repr(signed).encode() + written)  # a tuple ends where its bracket closes
    return signing.digest()


@lru_cache(maxsize=4)
def _keyed(secret: bytes) -> hmac.HMAC:
    """Begun once: what is left hashes a few hundred bytes, for which no other thread is let run."""
    return hmac.new(secret, digestmod="sha256")


_HEADS = {column.name: head_of(TICKET_FIELDS[column.name], BYTES) for column in TICKET}
_SIGNED = (
    *("job", "step", "plan_digest", "rank", "holder"),
    *("expires_unix_s", "workers", "tensors", "sequences", "parts"),
)
_signed, _signed_of = attrgetter(*_SIGNED), itemgetter(*_SIGNED)
