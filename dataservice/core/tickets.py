"""Signed tickets: a worker checks one alone, with the secret it shares with the coordinator.

    coordinator ── ticket, signed, names its holder ──► rank ── ticket, proof ──► worker
         └──────── the holder's key, once a session ────►│

Only the session that a ticket was given to can use it. The key is not sent to workers, which derive
it from the secret; a proof is good for one ticket.
"""

import hashlib
import hmac
from dataclasses import replace

from dataservice.core.errors import TicketError
from dataservice.core.orders import Ticket


def holder_of(session: str) -> str:
    """The name of a session in tickets: 32 hex digits, from which the session's own name cannot be
    found."""
    return hashlib.sha256(f"dataservice ticket holder {session}".encode()).hexdigest()[:32]


def holder_key(holder: str, secret: bytes) -> bytes:
    """The key by which a session proves that it is this holder: 32 bytes."""
    return hmac.digest(secret, f"dataservice ticket key {holder}".encode(), hashlib.sha256)


def prove(ticket: Ticket, key: bytes) -> bytes:
    """The proof, for a worker, that the ticket comes from its holder: 32 bytes."""
    return hmac.digest(key, ticket.signature, hashlib.sha256)


def sign_ticket(ticket: Ticket, secret: bytes) -> Ticket:
    """The same ticket with its signature (HMAC-SHA256 over all but the address)."""
    return replace(ticket, signature=hmac.digest(secret, _message(ticket), hashlib.sha256))


def check_ticket(
    ticket: Ticket, proof: bytes, secret: bytes, *, worker: str, now_unix_s: float
) -> None:
    """Raises TicketError where the ticket is forged, expired, for another worker, or not shown by
    its holder."""
    expected = hmac.digest(secret, _message(ticket), hashlib.sha256)
    if not hmac.compare_digest(expected, ticket.signature):
        raise TicketError(
            "the ticket's signature is not this service's. Ask the coordinator for the shard "
            "again; if it repeats, coordinator and worker were started with different secrets."
        )
    if not hmac.compare_digest(prove(ticket, holder_key(ticket.holder, secret)), proof):
        raise TicketError(
            f"the ticket was given to another session, of rank {ticket.rank}: "
            f"{'it is shown without' if not proof else 'this is not'} its proof. Fetch with the "
            "tickets of your own session, and a trainer_client of the service's release.",
            fault="holder",
        )
    if ticket.worker != worker:
        raise TicketError(
            f"the ticket is for worker {ticket.worker!r}, this is {worker!r}. Ask the "
            "coordinator for the shard again.",
            fault="worker",
        )
    if now_unix_s > ticket.expires_unix_s:
        raise TicketError(
            f"the ticket expired {now_unix_s - ticket.expires_unix_s:.0f} s ago. Ask the "
            "coordinator for the shard again; if it repeats, the hosts' clocks disagree.",
            fault="expired",
        )


def _message(ticket: Ticket) -> bytes:
    parts = [
        (
            *(p.key.job, p.key.step, p.key.plan_digest, p.key.pack, p.cp_rank, p.items, p.tensors),
            # Without them as in releases that knew none, of which workers may be.
            *map(tuple, p.ranges),
        )
        for p in ticket.parts
    ]
    return repr((ticket.worker, ticket.rank, ticket.holder, ticket.expires_unix_s, parts)).encode()
