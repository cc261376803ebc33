"""Who makes a call, what they may do, and the names by which they know jobs.

A team knows its own jobs by plain names. Any other name that it gives is looked up among its own
jobs and not found, exactly like a job that never existed. An admin names the jobs of other teams by
their full names, `team/job`.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from dataservice.core.errors import (
    PlanningError,
    RoleError,
    SampleError,
    ServiceError,
    SourceError,
    SpecError,
)
from dataservice.core.team import NO_TEAM, Identity, Role, full_name, team_of

AUTHORIZATION = "authorization"
RANK: dict[Role, int] = {"reader": 0, "team": 1, "admin": 2}

Authenticate = Callable[[str | None], Identity]
"""Gives the identity behind a token, or behind None for a call without one. Raises TokenError."""

# Messages of these errors quote paths and keys, which may look like names of jobs.
ABOUT_DATA = (SourceError, SampleError, SpecError, PlanningError)


def everyone(_: str | None) -> Identity:
    """For a service without tokens: every caller is an admin of the one nameless team."""
    return Identity(team=NO_TEAM, role="admin", name="")


def bearer_token(metadata: Iterable[tuple[str, str | bytes]]) -> str | None:
    """The token of a call; None where it has no authorization header, or more than one."""
    given = [value for key, value in metadata if key == AUTHORIZATION]
    if len(given) != 1 or not isinstance(given[0], str):
        return None
    scheme, _, token = given[0].partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


def require_role(identity: Identity, needed: Role, method: str) -> None:
    """Raises RoleError where the identity's role is below the one needed."""
    if RANK[identity.role] < RANK[needed]:
        raise RoleError(
            f"token {identity.name!r} has role {identity.role}, and {method} needs role {needed}. "
            f"Use a token of role {needed}."
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Caller:
    """An identity, and the translation between its names of jobs and full names."""

    identity: Identity

    @property
    def sees_all(self) -> bool:
        """Whether it may see the jobs of other teams."""
        return self.identity.role == "admin"

    def sees(self, job: str) -> bool:
        """Whether it may see the job of this full name."""
        return self.sees_all or team_of(job) == self.identity.team

    def full(self, given: str) -> str:
        """The full name of the job that the caller means."""
        team = self.identity.team
        if "/" in given and (self.sees_all or team_of(given) == team):
            return given
        return full_name(team, given)

    def plain(self, job: str) -> str:
        """The name by which the caller knows the job of this full name."""
        return job if self.sees_all else job.removeprefix(f"{self.identity.team}/")

    def told(self, error: ServiceError) -> ServiceError:
        """The same error, with jobs named as the caller names them."""
        if self.sees_all or isinstance(error, ABOUT_DATA):
            return error
        own = rf"(?<![^\s'\"`(]){re.escape(self.identity.team)}/(?=[A-Za-z0-9])"
        return type(error)(re.sub(own, "", str(error)))
