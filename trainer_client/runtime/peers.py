"""A group of replicas that talk to one another, and what happens when one of them stops.

Contract
--------
Success: ``post`` starts sends and receives and returns at once; ``Transfer.wait`` returns
when all of them are done (gloo) or ordered before later work on the current stream (NCCL).
Failure: the first transport error or timeout is turned into a ``PeerError``. The rank that
notices it writes to the store which peer it was waiting for, and drops its connections so that
peers which wait for *it* notice too. Then it follows the notes of the others to the replica that
wrote none, and names that one. All this takes at most ``timeout_s``.
Failure elsewhere: errors of DDP's and FSDP's own collectives do not name a replica. ``blame`` turns
such an error into a ``PeerError`` by finding which connections of this group are dead.
Cancellation: none; a group is not usable after a failure.

With NCCL the host does not wait for transfers, so a silent peer is noticed by NCCL's own
watchdog after the same timeout, and ends the process with NCCL's message.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store

from trainer_client.runtime.clock import note_transfer
from trainer_client.runtime.faults import GroupPoolError, PeerError, RuntimeFault

UNKNOWN = "?"
TRANSPORT_MARKS = ("gloo", "NCCL", "Connection closed by peer")
POLL_S = 0.02
PROBE_S = 0.1
PROBE_CHANNEL = 9  # channel of receives that only test whether a peer is alive


def grace_s(timeout_s: float) -> float:
    """Part of a timeout, in seconds, that is kept for reading the other survivors' notes."""
    return min(2.0, timeout_s / 4)


class FaultBoard:
    """Notes about failures, shared through the job's store: replica → whom it awaited."""

    def __init__(self, store: Store, *, replica: int) -> None:
        self._store = store
        self._replica = replica

    def report(self, awaited: int | None) -> None:
        self._store.set(f"fault/{self._replica}", UNKNOWN if awaited is None else str(awaited))

    def any_report(self, members: Sequence[int]) -> bool:
        return any(self._note(member) is not None for member in members)

    def culprits(
        self, members: Sequence[int], awaited: int | None, *, grace_s: float
    ) -> tuple[int, ...]:
        """Replicas that wrote no note, found by following the notes from ``awaited``.

        Without ``awaited`` (a collective), or where the notes end at a replica that was in a
        collective, all members that wrote none within the grace.
        """
        deadline = time.monotonic() + grace_s
        while True:
            followed = None if awaited is None else self._follow(awaited)
            silent = self.silent(members) if followed is None else followed
            open_end = followed is None and awaited is not None
            if time.monotonic() >= deadline or not (silent or open_end):
                return silent
            time.sleep(POLL_S)

    def silent(self, members: Sequence[int]) -> tuple[int, ...]:
        """Members other than this one that wrote no note."""
        return tuple(m for m in members if m != self._replica and self._note(m) is None)

    def _follow(self, awaited: int) -> tuple[int, ...] | None:
        """The replicas that wrote no note; empty if replicas waited in a circle, None if a note
        names no replica."""
        seen = {self._replica}
        while awaited not in seen:
            seen.add(awaited)
            note = self._note(awaited)
            if note is None:
                return (awaited,)
            if note == UNKNOWN:
                return None
            awaited = int(note)
        return ()

    def _note(self, replica: int) -> str | None:
        key = f"fault/{replica}"
        return self._store.get(key).decode() if self._store.check([key]) else None


class Transport(Protocol):
    """What a group needs of a c10d backend (torch's own stubs leave these methods out)."""

    @property
    def supports_coalescing(self) -> bool: ...
    def send(self, tensors: list[Tensor], peer: int, tag: int, /) -> dist.Work: ...
    def recv(self, tensors: list[Tensor], peer: int, tag: int, /) -> dist.Work: ...
    def allreduce(self, tensors: list[Tensor], op: object, /) -> dist.Work: ...
    def allgather(self, out: list[list[Tensor]], tensors: list[Tensor], /) -> dist.Work: ...
    def _start_coalescing(self) -> None: ...
    def _end_coalescing(self) -> dist.Work: ...


class Transfer:
    """Sends and receives in flight; keeps their tensors alive until waited for."""

    def __init__(self, group: "PeerGroup", action: str) -> None:
        self._group = group
        self._action = action
        self._note = note_transfer(action)
        self._works: list[tuple[dist.Work, int | None]] = []
        self._kept: list[Tensor] = []

    def add(self, work: dist.Work, peer: int | None, *tensors: Tensor) -> None:
        """``peer`` is an index into the group's members, None when the work is a collective."""
        self._works.append((work, peer))
        self._kept.extend(tensors)

    def wait(self) -> None:
        """Wait until all are done. Raises PeerError where a peer fails or stays silent."""
        with self._note.waited() if self._note and self._works else nullcontext():
            self._wait()

    def _wait(self) -> None:
        for work, peer in self._works:
            try:
                self._group.wait_for(work, peer)
            except RuntimeError as error:
                self._works = []
                raise self._group.failure(self._action, peer, error) from error
        self._works = []
        self._kept = []


class PeerGroup:
    """Some replicas in a fixed order, with point-to-point and small collective operations.

    Peers are named by their index in ``members`` (for a CP group: the ``cp_rank``). A group
    of one needs no transport, and every operation on it is the identity. ``device`` is where
    the transport takes its tensors from.
    """

    def __init__(
        self,
        members: Sequence[int],
        *,
        index: int,
        transport: Transport | None = None,
        board: FaultBoard | None = None,
        timeout_s: float = 600.0,
        device: torch.device | None = None,
    ) -> None:
        if len(members) > 1 and transport is None:
            raise GroupPoolError(
                f"a group of {len(members)} replicas needs a transport; get it from a GroupPool"
            )
        self.members = tuple(members)
        self.index = index
        self.timeout_s = timeout_s
        self.device = device or torch.device("cpu")
        self._transport = transport
        self._abandoned: Transport | None = None
        # NCCL orders its work on a stream and lets the host go on.
        self._on_stream = transport is not None and transport.supports_coalescing
        self._board = board

    @property
    def size(self) -> int:
        return len(self.members)

    @property
    def replica(self) -> int:
        return self.members[self.index]

    def home_of_sums(self, computing: torch.device) -> torch.device:
        """The device for a tensor that ``post_sum`` will take: the transport's, or without a
        transport the one that computes, so that the host need not wait for it."""
        return self.device if self.size > 1 else computing

    def __repr__(self) -> str:
        return f"PeerGroup(members={list(self.members)}, index={self.index})"

    def post(
        self,
        sends: Sequence[tuple[Tensor, int]],
        receives: Sequence[tuple[Tensor, int]],
        *,
        action: str,
        channel: int = 0,
    ) -> Transfer:
        """Start sends and receives of contiguous tensors; empty ones cost nothing.

        Messages between two peers on one ``channel`` arrive in the order they were posted.
        Both sides must agree on which messages are empty.
        """
        transfer = Transfer(self, action)
        receives = [(tensor, peer) for tensor, peer in receives if tensor.numel()]
        sends = [(tensor, peer) for tensor, peer in sends if tensor.numel()]
        if not receives and not sends:
            return transfer
        transport = self._live_transport(action)
        if self._on_stream:
            self._post_coalesced(transport, transfer, sends, receives)
            return transfer
        # Receives first: they are what a failure should be blamed on.
        for tensor, peer in receives:
            work = self._start(action, peer, transport.recv, [tensor], peer, channel)
            transfer.add(work, peer, tensor)
        for tensor, peer in sends:
            work = self._start(action, peer, transport.send, [tensor], peer, channel)
            transfer.add(work, peer, tensor)
        return transfer

    def post_sum(self, tensor: Tensor, *, action: str) -> Transfer:
        """Start an in-place sum over the group."""
        return self._post_reduced(tensor, dist.ReduceOp.SUM, action)

    def post_least(self, tensor: Tensor, *, action: str) -> Transfer:
        """Start taking the least of every element over the group, in place."""
        return self._post_reduced(tensor, dist.ReduceOp.MIN, action)

    def _post_reduced(self, tensor: Tensor, operation: object, action: str) -> Transfer:
        transfer = Transfer(self, action)
        if self.size > 1 and tensor.numel():
            transport = self._live_transport(action)
            work = self._start(action, None, transport.allreduce, [tensor], operation)
            transfer.add(work, None, tensor)
        return transfer

    def gather(self, tensor: Tensor, *, action: str) -> list[Tensor]:
        """Every member's ``tensor`` (one shape and type for all), in member order."""
        if self.size == 1:
            return [tensor.clone()]
        gathered = [torch.empty_like(tensor) for _ in self.members]
        transfer = Transfer(self, action)
        transport = self._live_transport(action)
        work = self._start(action, None, transport.allgather, [gathered], [tensor])
        transfer.add(work, None, tensor)
        transfer.wait()
        return gathered

    def wait_for(self, work: dist.Work, peer: int | None) -> None:
        """Wait for one piece of work; a RuntimeError of any kind means that it failed.

        A collective blocks on peers that may only be waiting themselves, so it looks at the
        board now and then: whoever notices a failure first frees the others.
        """
        watched = peer is None and self._board is not None and not self._on_stream
        if not watched:
            work.wait()
            return
        slice_ = as_timedelta(grace_s(self.timeout_s) / 4)
        while True:
            try:
                work.wait(slice_)
                return
            except RuntimeError:
                if work.is_completed():
                    raise
            if self._board is not None and self._board.any_report(self.members):
                raise RuntimeError("another member of the group reported a failure")

    def failure(self, action: str, peer: int | None, error: Exception) -> PeerError:
        """Report a failure, drop the connections, and return the error with its culprits."""
        awaited = None if peer is None else self.members[peer]
        if peer is None:
            # Freeing a collective that still runs would wait for its threads.
            self._abandoned, self._transport = self._transport, None
        else:
            self.close()
        return PeerError(
            action=action,
            members=self.members,
            replica=self.replica,
            awaited=awaited,
            culprits=self._ask_survivors(awaited),
            timeout_s=self.timeout_s,
            cause=str(error),
        )

    def blame(self, error: Exception, *, action: str) -> PeerError:
        """The PeerError for an error of another library's collective among these members.

        It names the members whose process is gone and that reported no failure themselves; if
        there are none within the grace period, those that reported none.
        """
        return PeerError(
            action=action,
            members=self.members,
            replica=self.replica,
            awaited=None,
            culprits=self._find_lost(),
            timeout_s=self.timeout_s,
            cause=str(error),
        )

    def _find_lost(self) -> tuple[int, ...]:
        if self._board is None:
            return ()
        deadline = time.monotonic() + grace_s(self.timeout_s)
        try:
            self._board.report(None)
            while True:
                silent = self._board.silent(self.members)
                gone = tuple(member for member in silent if self._is_gone(member))
                if gone:
                    self._board.report(gone[0])  # for those that waited for this one
                if gone or not silent or time.monotonic() >= deadline:
                    return gone or silent
                time.sleep(PROBE_S)
        except RuntimeError:  # the store's host is gone as well
            return ()

    def _is_gone(self, member: int) -> bool:
        """Whether the connection to a member is known to be dead. A receive that is never answered
        is posted to find out; with NCCL there is no way to know."""
        if self._transport is None or self._on_stream:
            return False
        try:
            self._transport.recv([torch.empty(1)], self.members.index(member), PROBE_CHANNEL)
        except RuntimeError:
            return True
        return False

    def _ask_survivors(self, awaited: int | None) -> tuple[int, ...]:
        known = () if awaited is None else (awaited,)
        if self._board is None:
            return known
        try:
            self._board.report(awaited)
            found = self._board.culprits(self.members, awaited, grace_s=grace_s(self.timeout_s))
        except RuntimeError:  # the store's host is gone as well
            return known
        return found or known

    def close(self) -> None:
        """Drop the connections; peers still waiting for this replica get an error at once."""
        self._transport = None

    def _live_transport(self, action: str) -> Transport:
        if self._transport is None:
            raise GroupPoolError(
                f"group {list(self.members)} was closed or has failed; {action} cannot use it. "
                "After a PeerError restart the ranks; otherwise ask the pool for the group again."
            )
        return self._transport

    def _start(
        self, action: str, peer: int | None, operation: Callable[..., dist.Work], *args: object
    ) -> dist.Work:
        try:
            return operation(*args)
        except RuntimeError as error:  # gloo reports a connection it already knows to be dead here
            raise self.failure(action, peer, error) from error

    def _post_coalesced(
        self,
        transport: Transport,
        transfer: Transfer,
        sends: Sequence[tuple[Tensor, int]],
        receives: Sequence[tuple[Tensor, int]],
    ) -> None:
        """One NCCL group call, so that the order of sends and receives cannot deadlock."""
        transport._start_coalescing()
        for tensor, peer in sends:
            transport.send([tensor], peer, 0)
        for tensor, peer in receives:
            transport.recv([tensor], peer, 0)
        kept = [tensor for tensor, _ in (*sends, *receives)]
        transfer.add(transport._end_coalescing(), None, *kept)


def is_transport_error(error: RuntimeError) -> bool:
    """Whether torch reports a failed communication rather than an error in the model."""
    if isinstance(error, RuntimeFault):
        return False
    return isinstance(error, dist.DistError) or any(mark in str(error) for mark in TRANSPORT_MARKS)


def as_timedelta(seconds: float) -> timedelta:
    """At least a millisecond, because torch treats zero as no limit at all."""
    return timedelta(milliseconds=max(1, round(seconds * 1000)))
