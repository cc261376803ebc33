"""Teams: which team asks, which team a job belongs to, and what a team may take of the service.

A job's full name is `team/job`, so that teams share no names, and none can learn another's. A
service without tokens has one team, whose name is empty: there the full name is the job's own.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

from dataservice.core.errors import SpecError
from dataservice.core.job import STRICT

Role = Literal["admin", "team", "reader"]
"""An admin sees and changes all teams' jobs, a team its own; a reader sees its team's and changes
nothing."""

NO_TEAM = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Identity:
    """The caller; `name` is the name of its token, for the audit log."""

    team: str
    role: Role
    name: str


@dataclass(frozen=True, kw_only=True, slots=True)
class TeamSpec:
    """A team's share of the service, and its limits."""

    __pydantic_config__: ClassVar[dict[str, object]] = STRICT

    weight: float = 1.0
    """While several teams want decoding time, it is shared in proportion to their weights."""
    max_jobs: int = 1000
    """Jobs that may be registered at once, a validation counted as one. Each keeps two files of its
    index open, of as many as the coordinator may have."""
    max_ready_bytes: int | None = None
    """Decoded bytes held ahead of the team's trainers, over all its jobs."""
    max_decode_cpus: float | None = None
    """The most CPUs that its decoding may take, even while other teams decode nothing."""

    def __post_init__(self) -> None:
        for name in ("weight", "max_jobs", "max_ready_bytes", "max_decode_cpus"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise SpecError(f"{name} is {value}; it must be above 0, or left out.")


@dataclass(frozen=True, kw_only=True, slots=True)
class TeamShare:
    """What a worker has to know of a team: its `weight`, and as `limit` the largest fraction of the
    worker's decoding time that it may take."""

    weight: float = 1.0
    limit: float = 1.0


def full_name(team: str, job: str) -> str:
    """A job's name in the service."""
    return f"{team}/{job}" if team else job


def team_of(job: str) -> str:
    """The team of a job's full name."""
    team, slash, _ = job.partition("/")
    return team if slash else NO_TEAM
