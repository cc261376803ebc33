"""How a worker knows the coordinator: a token derived from the secret that they share.

The secret itself signs tickets and never travels.
"""

import hashlib
import hmac
from collections.abc import Iterable

from dataservice.core.errors import TicketError

COMMAND_METADATA = "dataservice-command"


def command_token(secret: bytes) -> str:
    """The token that commands a worker: 64 hex digits."""
    return hmac.digest(secret, b"dataservice worker command", hashlib.sha256).hex()


def derived_name(secret: bytes, purpose: str) -> str:
    """A name that follows from the secret and does not tell it: 16 hex digits."""
    return hmac.digest(secret, f"dataservice {purpose}".encode(), hashlib.sha256).hex()[:16]


def check_command(metadata: Iterable[tuple[str, str | bytes]], secret: bytes) -> None:
    """Raises TicketError unless the call carries the token. Takes the same time either way."""
    given = dict(metadata).get(COMMAND_METADATA, "")
    sent = given.encode() if isinstance(given, str) else given
    if not hmac.compare_digest(sent, command_token(secret).encode()):
        raise TicketError(
            "only the coordinator may command a worker, and this call does not carry its token. "
            "If it came from the coordinator, the two were started with different secrets."
        )
