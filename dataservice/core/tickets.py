"""Signed tickets: a worker checks one alone, with the secret it shares with the coordinator."""

import hashlib
import hmac
from dataclasses import replace

from dataservice.core.errors import TicketError
from dataservice.core.orders import Ticket


def _message(ticket: Ticket) -> bytes:
    parts = [
        (p.key.job, p.key.step, p.key.plan_digest, p.key.pack, p.cp_rank, p.items, p.tensors)
        for p in ticket.parts
    ]
    return repr((ticket.worker, ticket.rank, ticket.expires_unix_s, parts)).encode()


def sign_ticket(ticket: Ticket, secret: bytes) -> Ticket:
    """The same ticket with its signature (HMAC-SHA256 over all but the address)."""
    return replace(ticket, signature=hmac.digest(secret, _message(ticket), hashlib.sha256))


def check_ticket(ticket: Ticket, secret: bytes, *, worker: str, now_unix_s: float) -> None:
    """Raises TicketError unless the ticket is genuine, in time and for this worker."""
    expected = hmac.digest(secret, _message(ticket), hashlib.sha256)
    if not hmac.compare_digest(expected, ticket.signature):
        raise TicketError(
            "the ticket's signature is not this service's. Ask the coordinator for the shard "
            "again; if it repeats, coordinator and worker were started with different secrets."
        )
    if ticket.worker != worker:
        raise TicketError(
            f"the ticket is for worker {ticket.worker!r}, this is {worker!r}. Ask the "
            "coordinator for the shard again."
        )
    if now_unix_s > ticket.expires_unix_s:
        raise TicketError(
            f"the ticket expired {now_unix_s - ticket.expires_unix_s:.0f} s ago. Ask the "
            "coordinator for the shard again; if it repeats, the hosts' clocks disagree."
        )
