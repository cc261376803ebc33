"""Every error the client raises on purpose, in one tree.

    ClientError
    ├── BadArgument (ValueError)             ShardDataset was given something impossible
    │   ├── RankOutOfRange                   rank is not in 0 .. world_size-1
    │   └── StateMismatch                    a state_dict of another job, shape or version
    ├── MisuseError (RuntimeError)           a method was called at a time when it means nothing
    │   ├── NotFetched (AttributeError)      a tensor was read that this rank did not ask for
    │   ├── PositionsNotRead                 the loop trains another model than the job is for
    │   └── LossWeightsNotRead               the loop trains all samples alike, the job does not
    ├── ServiceUnreachable (ConnectionError) nothing answers at the coordinator's address
    │   └── WorkerUnreachable                workers did not deliver a step's bytes
    ├── ServiceTimeout (TimeoutError)        the service answers, but what was asked did not come
    ├── RequestRefused                       the service answers, and says no
    │   ├── UnknownJob                       no such job, step or session
    │   ├── WrongWorldSize                   ranks disagree, or it cannot be divided
    │   ├── RankAlreadyClaimed               another live client has this rank
    │   ├── CursorMismatch                   ranks resume from different places
    │   ├── Fenced                           a newer attempt of the job has replaced this one
    │   └── AccessDenied                     token, certificate or ticket is not accepted
    ├── ServiceFailed                        the service broke while it worked on the request
    └── BadData                              what arrived is not what was planned
        ├── CorruptPart                      bytes do not match their checksum or header
        ├── MalformedShard                   a shard contradicts itself
        └── PlanDigestMismatch               two plans under one step

Errors of gRPC are turned into this tree once, by `from_rpc`; the service's own message is
kept. The service names the error's class in the trailing metadata `dataservice-error`; the
status code decides where it is missing.
"""

from collections.abc import Iterable

import grpc

ERROR_KEY = "dataservice-error"


class ClientError(Exception):
    """Base of every deliberate error of the client."""


class BadArgument(ClientError, ValueError):
    """ShardDataset was given something impossible."""


class RankOutOfRange(BadArgument):
    """The rank is not in 0 .. world_size-1."""


class StateMismatch(BadArgument):
    """A state_dict of another job, shape or version."""


class MisuseError(ClientError, RuntimeError):
    """A method was called at a time when it means nothing."""


class NotFetched(MisuseError, AttributeError):
    """A tensor was read that this rank did not ask for."""


class PositionsNotRead(MisuseError):
    """The job's model counts positions in time, height and width, and the loop read others."""


class LossWeightsNotRead(MisuseError):
    """The job weighs the loss of its samples, and the loop read labels without their weights."""


class ServiceUnreachable(ClientError, ConnectionError):
    """Nothing answers at the coordinator's address."""


class WorkerUnreachable(ServiceUnreachable):
    """Workers did not deliver a step's bytes in time."""


class ServiceTimeout(ClientError, TimeoutError):
    """The service answers, but what was asked for did not come in time."""


class RequestRefused(ClientError):
    """The service answers, and says no."""


class UnknownJob(RequestRefused):
    """No such job, step or session."""


class WrongWorldSize(RequestRefused):
    """Ranks disagree on the world size, or it cannot be divided into replicas."""


class RankAlreadyClaimed(RequestRefused):
    """Another live client has claimed this rank."""


class CursorMismatch(RequestRefused):
    """Ranks of one attempt resume from different places."""


class Fenced(RequestRefused):
    """A newer attempt of the job has replaced this one."""


class AccessDenied(RequestRefused):
    """The token, certificate or ticket is not accepted."""


class ServiceFailed(ClientError):
    """The service broke while it worked on the request."""


class BadData(ClientError):
    """What arrived is not what was planned."""


class CorruptPart(BadData):
    """Bytes do not match their checksum or their header."""


class MalformedShard(BadData):
    """A shard contradicts itself or its tickets."""


class PlanDigestMismatch(BadData):
    """Two different plans under one step."""


_BY_NAME: dict[str, type[ClientError]] = {
    "NotFoundError": UnknownJob,
    "WorldSizeError": WrongWorldSize,
    "RankClaimedError": RankAlreadyClaimed,
    "CursorMismatchError": CursorMismatch,
    "FencedError": Fenced,
    "ConflictError": RequestRefused,
    "SpecError": RequestRefused,
    "QuotaError": RequestRefused,
    "TokenError": AccessDenied,
    "RoleError": AccessDenied,
    "TicketError": AccessDenied,
    "SourceError": ServiceFailed,
    "IndexStaleError": ServiceFailed,
    "SampleError": ServiceFailed,
    "StateError": ServiceFailed,
    "WorkerLostError": ServiceUnreachable,
}

_BY_STATUS: dict[grpc.StatusCode, type[ClientError]] = {
    grpc.StatusCode.NOT_FOUND: UnknownJob,
    grpc.StatusCode.ALREADY_EXISTS: RankAlreadyClaimed,
    grpc.StatusCode.ABORTED: Fenced,
    grpc.StatusCode.FAILED_PRECONDITION: RequestRefused,
    grpc.StatusCode.INVALID_ARGUMENT: RequestRefused,
    grpc.StatusCode.OUT_OF_RANGE: RequestRefused,
    grpc.StatusCode.UNAUTHENTICATED: AccessDenied,
    grpc.StatusCode.PERMISSION_DENIED: AccessDenied,
    grpc.StatusCode.UNAVAILABLE: ServiceUnreachable,
    # Our own calls are cancelled only after `close`; else the server is going away.
    grpc.StatusCode.CANCELLED: ServiceUnreachable,
    grpc.StatusCode.DEADLINE_EXCEEDED: ServiceTimeout,
}
# What a proxy makes of a stream that it resets. The service itself names a class beside these.
_ON_THE_WAY = grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN


def _named_class(error: grpc.RpcError) -> str:
    if not isinstance(error, grpc.Call):
        return ""
    metadata: Iterable[tuple[str, str | bytes]] = error.trailing_metadata() or ()
    return next((str(value) for key, value in metadata if key == ERROR_KEY), "")


def from_rpc(error: grpc.RpcError, address: str) -> ClientError:
    """The client's error for a failed call to `address`, with the service's own message."""
    if not isinstance(error, grpc.Call):
        return ServiceFailed(f"the call to {address} failed: {error}")
    status, message = error.code(), error.details() or "no message"
    named = _named_class(error)
    kind = _BY_NAME.get(named) or _BY_STATUS.get(status, ServiceFailed)
    if not named and status in _ON_THE_WAY:
        kind = ServiceUnreachable
    if issubclass(kind, RequestRefused):
        return kind(message)
    return kind(f"{address} answered {status.name}: {message}")
