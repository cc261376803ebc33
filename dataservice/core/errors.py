"""Every error the service raises on purpose, in one tree.

    ServiceError
    ├── PlanningError (ValueError)     a planner was given values it cannot plan
    ├── SpecError (ValueError)         a job file or service config says something impossible
    ├── SourceError                    a source is missing or cannot be read
    │   ├── IndexStaleError            an index no longer describes its source or its processors
    │   └── StorageAwayError           storage does not answer; what it holds may be whole
    ├── SampleError                    one sample cannot be used; the rest can
    │   └── SampleTooLongError         it has more tokens than the job's longer_than allows
    ├── ErrorBudgetError               a source's samples are bad more often than its budget allows
    ├── StateError                     durable state is damaged, full or read-only
    ├── NotFoundError                  no such job, step or pack
    ├── ConflictError                  the name or rank is taken, or the request is out of order
    │   ├── WorldSizeError             ranks disagree on the world size, or it cannot be divided
    │   ├── RankClaimedError           two live clients claim one rank
    │   ├── CursorMismatchError        ranks resume from different places
    │   └── FencedError                a newer attempt of the job has replaced this one
    ├── QuotaError                     a team asks for more than it may have
    ├── TokenError                     no token came with a call, or none that is known and valid
    ├── RoleError                      the token is known, and its role may not do this
    ├── TicketError                    a ticket is forged, expired, or another's
    └── WorkerLostError                a worker cannot be reached

A message says the value seen, what is allowed, and what to do. Foreign exceptions are
translated into this tree once, at the border where they enter. They may quote anyone's text: a
message is cut at MESSAGE_CHARS, and nothing in it but a line break acts on a terminal.
"""

from collections.abc import Callable
from typing import Literal, ParamSpec, TypeVar, get_args

from dataservice.core.visible import LINE_BREAKS, visible

Given = ParamSpec("Given")
Made = TypeVar("Made")

MESSAGE_CHARS = 8192
RESTORE = "Restore it: indexing again makes other data, which checkpoints do not fit."
"""What to do about data that changed under an index."""


class ServiceError(Exception):
    """Base of every deliberate error of the service."""

    def __init__(self, message: object = "") -> None:
        super().__init__(visible(str(message), MESSAGE_CHARS, keep=LINE_BREAKS))


class PlanningError(ServiceError, ValueError):
    """A planner was given values it cannot plan."""


class SpecError(ServiceError, ValueError):
    """A job file or a service config says something impossible."""


class SourceError(ServiceError):
    """A source is missing or cannot be read."""


class IndexStaleError(SourceError):
    """An index no longer describes its source, processors or tokenizer."""


class StorageAwayError(SourceError):
    """Storage does not answer, or not yet; what it holds may be whole."""


class SampleError(ServiceError):
    """One sample cannot be used. It is quarantined; the job goes on."""


class SampleTooLongError(SampleError):
    """A sample has more LLM tokens, `tokens`, than the job's `longer_than` allows."""

    def __init__(self, message: object = "", *, tokens: int = 0) -> None:
        super().__init__(message)
        self.tokens = tokens


class ErrorBudgetError(ServiceError):
    """A source's samples are bad more often than its budget allows."""


class StateError(ServiceError):
    """Durable state is damaged, full or read-only."""


class NotFoundError(ServiceError):
    """No such job, step or pack."""


class ConflictError(ServiceError):
    """The request contradicts what the service already holds."""


class WorldSizeError(ConflictError):
    """Ranks disagree on the world size, or it cannot be divided into replicas."""


class RankClaimedError(ConflictError):
    """Two live clients claim one rank."""


class CursorMismatchError(ConflictError):
    """Ranks of one attempt resume from different places."""


class FencedError(ConflictError):
    """A newer attempt of the job has replaced this one."""


class QuotaError(ServiceError):
    """A team asks for more than it may have, or one of its jobs for more than a job may."""


class TokenError(ServiceError):
    """A call carries no token, or one that this service does not know or that is no longer
    valid."""


class RoleError(ServiceError):
    """A token's role does not allow the call."""


TicketFault = Literal["forged", "expired", "worker", "holder"]
TICKET_FAULTS: tuple[TicketFault, ...] = get_args(TicketFault)


class TicketError(ServiceError):
    """A ticket is forged, expired, meant for another worker, or shown by another than its holder.
    `fault` says which, and refused tickets are counted by it."""

    def __init__(self, message: object = "", *, fault: TicketFault = "forged") -> None:
        super().__init__(message)
        self.fault = fault


class WorkerLostError(ServiceError):
    """A worker cannot be reached."""


def caught(
    step: Callable[Given, Made], *given: Given.args, **named: Given.kwargs
) -> Made | Exception:
    """What a step makes, or the error that it raises, where several samples take it in turn."""
    try:
        return step(*given, **named)
    except Exception as error:
        return error


def uncaught(result: Made | Exception) -> Made:
    """What the step made. Raises the error that was caught instead."""
    if isinstance(result, Exception):
        raise result
    return result
