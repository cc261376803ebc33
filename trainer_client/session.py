"""A rank's claim on a job: one stream that is held open, and calls made under its name.

    open() ─▶ OpenSession stream ─▶ first event: session, attempt, start step
                    │ breaks
                    └─▶ open again with rejoin_attempt, waits growing, until timeout_s ─▶ fails

The claim ends with the stream. A thread reads the stream; when the stream breaks, the same thread
opens it again under the same attempt, and calls wait meanwhile; where the service is not reached,
along a new channel, as certificates may have been renewed. The service gives every stream a new
session name, so a call that fails because its name is out of date is made once more under the
new one.

Success: `open` returns the attempt; `call` returns the answer.
Failure: the service's refusal, or a deadline, is kept and raised by every later `call`.
Cancellation: `close`, and closing the channel, end the thread and wake all that wait.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import grpc
from dataservice_proto.columns import VERSION
from dataservice_proto.v1 import coordinator_pb2, coordinator_pb2_grpc

from trainer_client.backoff import Backoff
from trainer_client.errors import (
    ClientError,
    Fenced,
    MisuseError,
    RankAlreadyClaimed,
    ServiceTimeout,
    ServiceUnreachable,
    UnknownJob,
    from_rpc,
)
from trainer_client.interruptible import await_end, wait_for

Answer = TypeVar("Answer")

# Time for which a session name that the service does not know may turn out to be out of date.
STALE_SESSION_S = 3.0
# Time for which a rank may still look claimed by a client that has just gone: a loop that was left
# and is entered again, or a process that was killed.
CLAIM_GRACE_S = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """What a rank asks for. `cursor` is where the attempt begins, empty for the beginning.
    `launch` names the launch that the rank belongs to; see launch.py. `node` and `zone` are where
    it runs, empty where that is not known."""

    job: str
    rank: int
    world_size: int
    cursor: str
    client: str
    launch: str = ""
    node: str = ""
    zone: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Lease:
    """A claim that was granted. `generation` counts the streams that held it; `ticket_key` proves
    to workers that a ticket was given to this session; the rank reports to the service every
    `report_every_s` seconds, or never if it is 0; `reports_along` with a question for a step."""

    session: str
    attempt: int
    start_step: int
    generation: int
    ticket_key: bytes = field(default=b"", repr=False)
    report_every_s: float = 0.0
    reports_along: bool = False


class Session:
    """Holds a claim on a rank; see the module's contract."""

    def __init__(
        self,
        channel: grpc.Channel,
        address: str,
        claim: Claim,
        *,
        stop: threading.Event,
        renew: Callable[[], None],
        connect_timeout_s: float,
        timeout_s: float,
    ) -> None:
        """`renew` has the channel opened anew."""
        self._stub = coordinator_pb2_grpc.CoordinatorStub(channel)
        self._address = address
        self._claim = claim
        self._stop = stop
        self._renew = renew
        self._connect_timeout_s = connect_timeout_s
        self._timeout_s = timeout_s
        self._changed = threading.Condition()
        self._lease: Lease | None = None
        self._last: Lease | None = None
        self._failure: ClientError | None = None
        self._thread = threading.Thread(target=self._keep, name="shard-session", daemon=True)

    def open(self) -> Lease:
        """Claim the rank; returns once every rank of the attempt has.

        Raises the service's refusal, ServiceUnreachable where the service goes away, and
        ServiceTimeout where the other ranks do not come.
        """
        self._thread.start()
        claim = self._claim
        with self._changed:
            settled = wait_for(self._changed, lambda: self._lease or self._failure, self._timeout_s)
            if not settled:
                raise ServiceTimeout(
                    f"rank {claim.rank} of {claim.world_size} has waited {self._timeout_s:g} s "
                    f"for the other ranks of job {claim.job!r} to open. Check that all "
                    f"{claim.world_size} started; each opens at its first iteration."
                )
            return self._usable()

    @property
    def lease(self) -> Lease | None:
        """The claim while its stream is open."""
        return self._lease

    def call(self, rpc: Callable[[Lease], Answer]) -> Answer:
        """Run `rpc(lease)` under the current session, again after a break or a long wait.

        Raises the service's refusal, or ServiceUnreachable after `timeout_s` of failures. A call
        that passes its own deadline is repeated until the session ends, because the service is
        then only waiting for a step.
        """
        retry = Backoff(self._stop, self._timeout_s)
        while True:
            lease = self._current()
            try:
                return rpc(lease)
            except grpc.RpcError as failed:
                error = from_rpc(failed, self._address)
            except ValueError as failed:
                if "closed" not in str(failed):  # as gRPC says of a channel
                    raise
                if self._stop.is_set():
                    raise MisuseError("the dataset was closed during a call") from failed
                error = ServiceUnreachable(f"the channel to {self._address}: {failed}")
            if isinstance(error, ServiceTimeout):
                retry = Backoff(self._stop, self._timeout_s)
                self._stop.wait(0.01)  # the service may answer this at once, again and again
            elif isinstance(error, UnknownJob | Fenced):
                if not self._stale(lease):
                    raise error
            elif not isinstance(error, ServiceUnreachable):
                raise error
            elif not retry.wait():
                raise type(error)(
                    f"{error} (the last of {retry.attempts + 1} calls in {retry.spent_s:.0f} s; "
                    "the session itself is open). Look in the service's log for why it refuses."
                ) from error

    def close(self) -> None:
        """Wake all callers. The stream itself ends with its channel."""
        with self._changed:
            self._lease = None
            self._failure = self._failure or MisuseError("the dataset is closed")
            self._changed.notify_all()

    def join(self, timeout_s: float) -> None:
        """Wait for the thread; call after `stop` was set and the channel closed."""
        await_end(self._thread, timeout_s)

    def _usable(self) -> Lease:
        if self._failure is not None:
            raise self._failure
        assert self._lease is not None
        return self._lease

    def _current(self) -> Lease:
        # Needs no timeout: the thread gets a lease or fails within its own deadline.
        with self._changed:
            self._changed.wait_for(lambda: self._lease or self._failure)
            return self._usable()

    def _stale(self, lease: Lease) -> bool:
        """Whether the session was, or is about to be, replaced by a newer one."""

        def moved_on() -> bool:
            current = self._lease
            return current is None or current.generation != lease.generation

        with self._changed:
            return bool(self._changed.wait_for(moved_on, STALE_SESSION_S))

    def _keep(self) -> None:
        """The thread's work: hold a stream; when it breaks, open the next."""
        retry = Backoff(self._stop, self._connect_timeout_s)
        while not self._stop.is_set():
            generation = self._last.generation if self._last else 0
            error = self._hold_stream()
            if self._last and self._last.generation > generation:
                retry = Backoff(self._stop, self._timeout_s)  # the stream was open: start anew
            with self._changed:
                self._lease = None
                self._changed.notify_all()
            unreachable_again = isinstance(error, ServiceUnreachable) and retry.attempts > 0
            if not self._worth_retrying(error, retry) or not retry.wait():
                self._fail(error, retry)
                return
            if unreachable_again:
                self._renew()

    def _hold_stream(self) -> ClientError:
        """Open a stream and read it to its end; returns why it ended."""
        claim, last = self._claim, self._last
        request = coordinator_pb2.OpenSessionRequest(
            job=claim.job,
            rank=claim.rank,
            world_size=claim.world_size,
            cursor=claim.cursor,
            client=claim.client,
            rejoin_attempt=last.attempt if last else 0,
            launch=claim.launch,
            loss_weights=True,
            columns=VERSION,
            node=claim.node,
            zone=claim.zone,
        )
        try:
            for event in self._stub.OpenSession(request):
                self._grant(event)
        except grpc.RpcError as failed:
            return from_rpc(failed, self._address)
        except ValueError:
            return MisuseError("the dataset is closed")
        return ServiceUnreachable(f"{self._address} ended the session of rank {claim.rank}")

    def _grant(self, event: coordinator_pb2.SessionEvent) -> None:
        with self._changed:
            if self._stop.is_set():
                return
            self._last = self._lease = Lease(
                session=event.session,
                attempt=event.attempt,
                start_step=event.start_step,
                generation=self._last.generation + 1 if self._last else 1,
                ticket_key=event.ticket_key,
                report_every_s=event.report_every_s,
                reports_along=event.reports_along,
            )
            self._changed.notify_all()

    def _worth_retrying(self, error: ClientError, retry: Backoff) -> bool:
        if isinstance(error, RankAlreadyClaimed):
            # On return, the broken stream still claims the rank until the service notices.
            return self._last is not None or retry.spent_s < CLAIM_GRACE_S
        return isinstance(error, ServiceUnreachable | ServiceTimeout)

    def _fail(self, error: ClientError, retry: Backoff) -> None:
        if isinstance(error, ServiceUnreachable):
            error = ServiceUnreachable(
                f"the session of rank {self._claim.rank} with {self._address} broke and could "
                f"not be opened again in {retry.spent_s:.0f} s ({retry.attempts} attempts): "
                f"{error}. Restart the service if it is down, then resume from the checkpoint."
            )
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()
