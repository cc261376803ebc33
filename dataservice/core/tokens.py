"""Tokens that callers show. One is random, so its SHA-256 is all that is ever stored of it."""

import hashlib
import hmac
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from dataservice.core.errors import TokenError
from dataservice.core.team import Identity

TOKEN_PREFIX = "dst_"
TOKEN_BYTES = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenEntry:
    """What the service keeps of a token. `expires_unix_s` is None for one without an end."""

    identity: Identity
    sha256: bytes
    expires_unix_s: float | None = None


def new_token() -> str:
    """256 random bits, recognisable by their prefix to whoever scans for leaked secrets."""
    return TOKEN_PREFIX + secrets.token_urlsafe(TOKEN_BYTES)


def token_digest(token: str) -> bytes:
    """What is kept of a token. It has all its entropy already, so one hash will do."""
    return hashlib.sha256(token.encode()).digest()


def identify(entries: Sequence[TokenEntry], token: str | None, now_unix_s: float) -> Identity:
    """Whose token it is. Looks at every entry, whichever fits. Raises TokenError."""
    if token is None:
        raise TokenError(
            "this service asks for a token, and the call carries none. Set DATASERVICE_TOKEN or "
            "name a file with --token-file (token_file= in a trainer); the operator makes "
            "tokens with `dataservice token new`."
        )
    digest = token_digest(token)
    found = [entry for entry in entries if hmac.compare_digest(entry.sha256, digest)]
    if not found:
        raise TokenError(
            "the call's token is not one of this service's. Check DATASERVICE_TOKEN or the token "
            "file, or ask the operator for a new token."
        )
    entry = found[0]
    if entry.expires_unix_s is not None and now_unix_s >= entry.expires_unix_s:
        ended = datetime.fromtimestamp(entry.expires_unix_s, tz=UTC)
        raise TokenError(
            f"token {entry.identity.name!r} expired at {ended:%Y-%m-%dT%H:%M:%SZ}. Ask the "
            "operator for a new one."
        )
    return entry.identity
