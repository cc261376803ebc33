"""The service's errors as gRPC statuses, and back.

    ServiceError                    gRPC status
    ------------                    -----------
    PlanningError, SpecError        INVALID_ARGUMENT
    SourceError, IndexStaleError,
      ErrorBudgetError              FAILED_PRECONDITION
    SampleError                     DATA_LOSS
    StateError                      INTERNAL
    NotFoundError                   NOT_FOUND
    ConflictError, WorldSizeError,
      CursorMismatchError           FAILED_PRECONDITION
    RankClaimedError                ALREADY_EXISTS
    FencedError                     ABORTED
    QuotaError                      RESOURCE_EXHAUSTED
    TokenError                      UNAUTHENTICATED
    RoleError, TicketError          PERMISSION_DENIED
    WorkerLostError,
      ServiceUnreachableError       UNAVAILABLE
    anything else                   INTERNAL, "error <id>"; the details are in the log only

The trailing metadata `dataservice-error` carries the class, so that the caller gets the same
error back; a caller that reads only the status still gets the message.
"""

import contextlib
import logging
import uuid
from collections.abc import AsyncIterator
from typing import Any, cast

import grpc
import grpc.aio

from dataservice.core import errors
from dataservice.core.errors import ServiceError

log = logging.getLogger(__name__)

ERROR_METADATA = "dataservice-error"
# A status is sent in headers, 8 KiB in all, where a byte outside ASCII takes three.
MESSAGE_LIMIT_BYTES = 2000


class ServiceUnreachableError(ServiceError):
    """The coordinator does not answer, or is stopping. Not one of core's errors, because only the
    two ends of a connection raise it."""


STATUS_OF: dict[type[ServiceError], grpc.StatusCode] = {
    errors.PlanningError: grpc.StatusCode.INVALID_ARGUMENT,
    errors.SpecError: grpc.StatusCode.INVALID_ARGUMENT,
    errors.SourceError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.SampleError: grpc.StatusCode.DATA_LOSS,
    errors.ErrorBudgetError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.StateError: grpc.StatusCode.INTERNAL,
    errors.NotFoundError: grpc.StatusCode.NOT_FOUND,
    errors.ConflictError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.RankClaimedError: grpc.StatusCode.ALREADY_EXISTS,
    errors.FencedError: grpc.StatusCode.ABORTED,
    errors.QuotaError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.TokenError: grpc.StatusCode.UNAUTHENTICATED,
    errors.RoleError: grpc.StatusCode.PERMISSION_DENIED,
    errors.TicketError: grpc.StatusCode.PERMISSION_DENIED,
    errors.WorkerLostError: grpc.StatusCode.UNAVAILABLE,
    ServiceUnreachableError: grpc.StatusCode.UNAVAILABLE,
}

# The error for a status without a class: the broadest class that maps to the status.
CLASS_OF: dict[grpc.StatusCode, type[ServiceError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: errors.SpecError,
    grpc.StatusCode.NOT_FOUND: errors.NotFoundError,
    grpc.StatusCode.FAILED_PRECONDITION: errors.ConflictError,
    grpc.StatusCode.ALREADY_EXISTS: errors.RankClaimedError,
    grpc.StatusCode.ABORTED: errors.FencedError,
    grpc.StatusCode.UNAUTHENTICATED: errors.TokenError,
    grpc.StatusCode.PERMISSION_DENIED: errors.TicketError,
}

# No answer came, or none in time: the peer is gone, stopping, or disconnected.
UNREACHABLE = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.CANCELLED,
    }
)


def status_of(error: ServiceError) -> grpc.StatusCode:
    """The status of the nearest class in the table; INTERNAL for a bare ServiceError."""
    for kind in type(error).__mro__:
        if kind in STATUS_OF:
            return STATUS_OF[kind]
    return grpc.StatusCode.INTERNAL


def is_unreachable(error: grpc.RpcError) -> bool:
    """Whether no service of ours answered the call, or one that is stopping."""
    call = _call_of(error)
    return call.code() in UNREACHABLE and _class_of(call) is None


def error_of(error: grpc.RpcError) -> ServiceError:
    """The error that the peer raised, from the finished call."""
    call = _call_of(error)
    kind = _class_of(call) or CLASS_OF.get(call.code(), ServiceError)
    return kind(call.details() or f"the call ended with {call.code().name} and no message")


def error_named(name: str, message: str) -> ServiceError:
    """The error of this class, or a bare one where this release knows no such class."""
    return (_kind_named(name) or ServiceError)(message)


def _call_of(error: grpc.RpcError) -> grpc.Call:
    # An RpcError that a call raises is also a grpc.Call, although its type does not say so.
    return cast(grpc.Call, error)


def _class_of(call: grpc.Call) -> type[ServiceError] | None:
    name = dict(call.trailing_metadata() or ()).get(ERROR_METADATA)
    return _kind_named(name) if isinstance(name, str) else None


def _kind_named(name: str) -> type[ServiceError] | None:
    kind = getattr(errors, name, None)
    return kind if isinstance(kind, type) and issubclass(kind, ServiceError) else None


@contextlib.asynccontextmanager
async def answered(context: grpc.aio.ServicerContext[Any, Any], call: str) -> AsyncIterator[None]:
    """Turns whatever the body raises into the call's status. Cancellation passes through."""
    try:
        yield
    except ServiceError as error:
        log.info("%s: %s: %s", call, type(error).__name__, error)
        message = str(error).encode()[:MESSAGE_LIMIT_BYTES].decode(errors="ignore")
        await context.abort(status_of(error), message, ((ERROR_METADATA, type(error).__name__),))
    except grpc.aio.InternalError as error:  # what was to be sent has no call any more
        log.info("%s: the caller has left: %s", call, error)
        with contextlib.suppress(grpc.aio.InternalError):
            await context.abort(grpc.StatusCode.INTERNAL, f"the answer was not sent: {error}")
    except Exception:
        incident = uuid.uuid4().hex[:8]
        log.exception("%s failed unexpectedly, error %s", call, incident)
        await context.abort(
            grpc.StatusCode.INTERNAL,
            f"the service failed unexpectedly, error {incident}. Its log says more under that id.",
            ((ERROR_METADATA, ServiceError.__name__),),  # else a proxy's, as trainers take it
        )
