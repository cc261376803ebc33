"""The checks that every call to the coordinator passes: token, role, limits, and the audit log.

    call ─► token ─► role ─► size of the request ─► calls of the team ─► the servicer's body
              └────────┴──────── refused ─────────────────┴──► audit log ◄── changes, sessions

Contract. A method without a rule in `RULES` is refused to everyone. Errors name jobs as the caller
names them. However a call ends, it stops counting towards its team's limit.
"""

import contextlib
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import grpc.aio
from google.protobuf.message import Message

from dataservice.core.errors import QuotaError, RoleError, ServiceError, TokenError
from dataservice.core.team import NO_TEAM, Identity, Role, TeamSpec, team_of
from dataservice.serving.audit import CHANGES, AuditLog, Event
from dataservice.serving.identity import Authenticate, Caller, bearer_token, everyone, require_role
from dataservice.serving.limits import Limits, require_within
from dataservice.serving.status_codes import ServiceUnreachableError, answered

Context = grpc.aio.ServicerContext[Any, Any]
REFUSALS = (TokenError, RoleError, QuotaError)
NOBODY = Caller(identity=Identity(team=NO_TEAM, role="reader", name=""))


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """The lowest role that may call a method, and whether the audit log records each call."""

    role: Role
    audited: bool = False


RULES: dict[str, Rule] = {
    "SubmitJob": Rule(role="team", audited=True),
    "ListJobs": Rule(role="reader"),
    "GetJob": Rule(role="reader"),
    "DrainJob": Rule(role="team", audited=True),
    "DeleteJob": Rule(role="team", audited=True),
    "ListQuarantine": Rule(role="reader"),
    "RecostJob": Rule(role="team", audited=True),
    "ChangeMixture": Rule(role="team", audited=True),
    "ExplainStep": Rule(role="reader"),
    "FindSample": Rule(role="reader"),
    "ReplaySteps": Rule(role="reader"),
    "SkipSteps": Rule(role="team", audited=True),
    "ListWorkers": Rule(role="admin"),
    "RestartWorkers": Rule(role="admin", audited=True),
    "Index": Rule(role="team"),
    "OpenSession": Rule(role="team"),
    "GetShard": Rule(role="team"),
    "GetShards": Rule(role="team"),
    "GetStepSummary": Rule(role="team"),
    "CommitStep": Rule(role="team"),
    "Report": Rule(role="team"),
    "GetHealth": Rule(role="reader"),
}


@dataclass(kw_only=True, slots=True)
class Visit:
    """One call: who makes it, and what the audit log may record of it. `foreign` is set where the
    call named a job or session of another team."""

    method: str
    peer: str
    caller: Caller = NOBODY
    job: str = ""
    foreign: bool = False
    request_id: str = field(default_factory=lambda: uuid.uuid4().hex[:12])

    def named(self, job: str) -> str:
        """The full name of the job that a request names."""
        self.job = self.caller.full(job)
        self.foreign = "/" in job and team_of(job) != team_of(self.job)
        return self.job

    def event(self, outcome: str, reason: str = "") -> Event:
        """The line for the audit log."""
        who = self.caller.identity
        return Event(
            request=self.request_id,
            token=who.name,
            team=who.team,
            role="" if self.caller is NOBODY else who.role,
            peer=self.peer,
            method=self.method,
            job=self.job,
            outcome=outcome,
            reason=reason,
        )


class AccessControl:
    """Admits calls; see the module's contract. Without arguments every caller is an admin."""

    def __init__(
        self,
        *,
        authenticate: Authenticate = everyone,
        teams: Mapping[str, TeamSpec] | None = None,
        audit: AuditLog | None = None,
        limits: Limits | None = None,
    ) -> None:
        self.limits = limits or Limits()
        self._authenticate = authenticate
        self._teams = dict(teams or {})
        self._audit = audit
        self._calls: Counter[str] = Counter()

    @property
    def open(self) -> bool:
        """Whether calls need no token."""
        return self._authenticate is everyone

    def team(self, name: str) -> TeamSpec:
        """The limits of a team; one that the operator has not listed has none."""
        return self._teams.get(name, TeamSpec())

    @contextlib.asynccontextmanager
    async def call(
        self, context: Context, method: str, request: Message | None = None
    ) -> AsyncIterator[Visit]:
        """Admit a call while the body runs, or refuse it with the reason. One without a `request`
        comes with many, each to be checked by `require_within`."""
        visit = Visit(method=method, peer=context.peer())
        async with answered(context, method):
            try:
                self._admit(visit, context, request)
                self._require_recorded(visit)
                with self._counted(visit.caller.identity.team):
                    yield visit
            except ServiceError as error:
                self._note_failure(visit, error)
                raise visit.caller.told(error) from error
            except BaseException as error:  # a defect of ours, or the caller has gone
                if RULES[method].audited:
                    self.note(visit, type(error).__name__)
                raise
            if RULES[method].audited:
                self.note(visit, "ok")

    def note(self, visit: Visit, outcome: str, reason: str = "") -> None:
        """Write a change to the audit log."""
        if self._audit is not None:
            self._audit.change(visit.event(outcome, reason))

    def note_session(self, visit: Visit, outcome: str, reason: str) -> None:
        """Write to the audit log that a session opened or closed."""
        if self._audit is not None:
            self._audit.session(visit.event(outcome, reason))

    def require_still(self, visit: Visit, context: Context) -> None:
        """Raises ServiceUnreachableError where the call's token is no longer valid: the client
        then opens its session again with its current token."""
        token = bearer_token(context.invocation_metadata() or ())
        with contextlib.suppress(TokenError):
            if self._authenticate(token) == visit.caller.identity:
                return
        raise ServiceUnreachableError(
            "the token of this session was replaced or has expired. Open the session again with "
            "the team's new token, rejoining its attempt."
        )

    def require_within(self, request: Message) -> None:
        """Raises SpecError where a part of the request is too large."""
        require_within(request, self.limits)

    def _admit(self, visit: Visit, context: Context, request: Message | None) -> None:
        rule = RULES.get(visit.method)
        if rule is None:
            raise RoleError(f"no rule says who may call {visit.method}, so nobody may.")
        token = bearer_token(context.invocation_metadata() or ())
        visit.caller = Caller(identity=self._authenticate(token))
        require_role(visit.caller.identity, rule.role, visit.method)
        if request is not None:
            self.require_within(request)

    def _require_recorded(self, visit: Visit) -> None:
        """Raises QuotaError where a change is one too many for the audit log."""
        if self._audit is None or not RULES[visit.method].audited:
            return
        if not self._audit.allows_change(visit.caller.identity.team):
            at_once, per_s = CHANGES
            raise QuotaError(
                f"this team has made {at_once:,} changes in short order, and {per_s:g} a second "
                "are recorded in the long run. Try again later."
            )

    @contextlib.contextmanager
    def _counted(self, team: str) -> Iterator[None]:
        if self._calls[team] >= self.limits.calls_per_team:
            raise QuotaError(
                f"{self._calls[team]:,} calls of this team are open, and no more may be. Stop "
                "trainers that are not needed."
            )
        self._calls[team] += 1
        try:
            yield
        finally:
            self._calls[team] -= 1

    def _note_failure(self, visit: Visit, error: ServiceError) -> None:
        if self._audit is None:
            return
        event = visit.event(type(error).__name__, str(error))
        changes = visit.method in RULES and RULES[visit.method].audited
        if changes or visit.foreign or isinstance(error, REFUSALS):
            self._audit.refusal(event)
