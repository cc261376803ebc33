"""Who makes a call, what they may do, and which names they speak of jobs by.

A token is random, so its SHA-256 is all that is ever stored of it. A team's own jobs have plain
names to it; whatever else it names is looked for among its own and is not there, exactly as a
job that never was. An admin speaks of other teams' jobs by their full names, `team/job`.
"""

import hashlib
import hmac
import re
import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from dataservice.core.errors import (
    PlanningError,
    RoleError,
    SampleError,
    ServiceError,
    SourceError,
    SpecError,
    TokenError,
)
from dataservice.core.team import NO_TEAM, Identity, Role, full_name, team_of

TOKEN_PREFIX = "dst_"
TOKEN_BYTES = 32
AUTHORIZATION = "authorization"
RANK: dict[Role, int] = {"reader": 0, "team": 1, "admin": 2}

Authenticate = Callable[[str | None], Identity]
"""Who shows this token, None when a call carries none. Raises TokenError."""

# Messages about data quote paths and keys, which may look like names of jobs.
ABOUT_DATA = (SourceError, SampleError, SpecError, PlanningError)


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


def everyone(_: str | None) -> Identity:
    """A service without tokens: whoever reaches it is an admin of the one nameless team."""
    return Identity(team=NO_TEAM, role="admin", name="")


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


def bearer_token(metadata: Iterable[tuple[str, str | bytes]]) -> str | None:
    """The token of a call; None when it has no authorization, or more than one."""
    given = [value for key, value in metadata if key == AUTHORIZATION]
    if len(given) != 1 or not isinstance(given[0], str):
        return None
    scheme, _, token = given[0].partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


def require_role(identity: Identity, needed: Role, method: str) -> None:
    """Raises RoleError when the identity's role is below the one needed."""
    if RANK[identity.role] < RANK[needed]:
        raise RoleError(
            f"token {identity.name!r} has role {identity.role}, and {method} needs role {needed}. "
            f"Use a token of role {needed}."
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Caller:
    """An identity, and the names that it gives and is given."""

    identity: Identity

    @property
    def sees_all(self) -> bool:
        """Whether jobs of other teams exist for it."""
        return self.identity.role == "admin"

    def sees(self, job: str) -> bool:
        """Whether the job of this full name exists for it."""
        return self.sees_all or team_of(job) == self.identity.team

    def full(self, given: str) -> str:
        """The full name of the job that the caller means."""
        team = self.identity.team
        if "/" in given and (self.sees_all or team_of(given) == team):
            return given
        return full_name(team, given)

    def plain(self, job: str) -> str:
        """What the job of this full name is called to the caller."""
        return job if self.sees_all else job.removeprefix(f"{self.identity.team}/")

    def told(self, error: ServiceError) -> ServiceError:
        """The same error in the caller's names."""
        if self.sees_all or isinstance(error, ABOUT_DATA):
            return error
        own = rf"(?<![^\s'\"`(]){re.escape(self.identity.team)}/(?=[A-Za-z0-9])"
        return type(error)(re.sub(own, "", str(error)))
