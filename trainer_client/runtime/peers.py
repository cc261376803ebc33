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
Cancellation: none; after a failure no group that shares the communicator is usable.

With NCCL the host does not wait for transfers, so a silent peer is noticed by NCCL's own
watchdog after the same timeout, and ends the process with NCCL's message.
"""

import time
import zlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor

from trainer_client.runtime.clock import note_transfer
from trainer_client.runtime.communicator import Communicator
from trainer_client.runtime.fault_board import as_timedelta, grace_s
from trainer_client.runtime.faults import GroupPoolError, PeerError, RuntimeFault

TRANSPORT_MARKS = ("gloo", "NCCL", "Connection closed by peer")
PROBE_S = 0.1
PROBE_CHANNEL = 9  # channel of receives that only test whether a peer is alive
CHANNEL_BITS = 4  # channels are numbers below 16


class Transfer:
    """Sends and receives in flight; keeps their tensors alive until waited for."""

    def __init__(self, group: "PeerGroup", action: str) -> None:
        self._group = group
        self._action = action
        self._note = note_transfer(action)
        self._works: list[tuple[dist.Work, int | None]] = []
        self._kept: list[Tensor] = []
        self._given_up = False

    def add(self, work: dist.Work, peer: int | None, *tensors: Tensor) -> None:
        """``peer`` is an index into the group's members, None when the work is a collective."""
        self._works.append((work, peer))
        self._kept.extend(tensors)

    def wait(self) -> None:
        """Wait until all are done. Raises PeerError where a peer fails or stays silent, and
        GroupPoolError where the connections were dropped before."""
        with self._note.waited() if self._note and self._works else nullcontext():
            self._wait()

    def _wait(self) -> None:
        if self._given_up:
            self._group.check_alive(self._action)
        for work, peer in self._works:
            try:
                self._group.wait_for(work, peer)
            except RuntimeError as error:
                self.give_up()
                raise self._group.failure(self._action, peer, error) from error
        self._works = []
        self._kept = []

    def give_up(self) -> None:
        """Let go of the works, which hold their connections open."""
        self._given_up = bool(self._works)
        self._works = []


class PeerGroup:
    """Some replicas in a fixed order, with point-to-point operations, and small collective ones
    where they are all of their communicator.

    Peers are named by their index in ``members`` (for a CP group: the ``cp_rank``). A group
    of one needs no communicator, and every operation on it is the identity. ``device`` is where
    the communicator takes its tensors from.
    """

    def __init__(
        self,
        members: Sequence[int],
        *,
        index: int,
        communicator: Communicator | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        self.members = tuple(members)
        self.index = index
        self._communicator = communicator
        self._ranks: tuple[int, ...] = ()
        self._whole = False
        self.timeout_s = timeout_s if communicator is None else communicator.timeout_s
        self.device = torch.device("cpu") if communicator is None else communicator.device
        if communicator is not None:
            self._ranks = tuple(map(communicator.members.index, self.members))
            self._whole = self._ranks == tuple(range(len(communicator.members)))
        elif len(self.members) > 1:
            raise GroupPoolError(
                f"a group of {len(self.members)} replicas needs a communicator; get the group from "
                "a GroupPool"
            )
        # Messages of other rings between the same two replicas have other tags.
        self._tag = (zlib.crc32(repr(self.members).encode()) << CHANNEL_BITS) & 0x7FFFFFFF

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
        communicator = self._shared(action)
        transport = communicator.ready(action)
        communicator.watch(transfer)
        if communicator.on_stream:
            self._post_group(communicator, transfer, sends, receives)
            return transfer
        tag = self._tag | channel
        # Receives first: they are what a failure should be blamed on.
        for tensor, peer in receives:
            work = self._start(action, peer, transport.recv, [tensor], self._ranks[peer], tag)
            transfer.add(work, peer, tensor)
        for tensor, peer in sends:
            work = self._start(action, peer, transport.send, [tensor], self._ranks[peer], tag)
            transfer.add(work, peer, tensor)
        return transfer

    def _post_group(
        self,
        communicator: Communicator,
        transfer: Transfer,
        sends: Sequence[tuple[Tensor, int]],
        receives: Sequence[tuple[Tensor, int]],
    ) -> None:
        with communicator.on_device():
            work = communicator.post_group(
                [(tensor, self._ranks[peer]) for tensor, peer in sends],
                [(tensor, self._ranks[peer]) for tensor, peer in receives],
            )
        transfer.add(work, None, *(tensor for tensor, _ in (*sends, *receives)))

    def post_sum(self, tensor: Tensor, *, action: str) -> Transfer:
        """Start an in-place sum over the group."""
        return self._post_reduced(tensor, dist.ReduceOp.SUM, action)

    def post_least(self, tensor: Tensor, *, action: str) -> Transfer:
        """Start taking the least of every element over the group, in place."""
        return self._post_reduced(tensor, dist.ReduceOp.MIN, action)

    def _post_reduced(self, tensor: Tensor, operation: object, action: str) -> Transfer:
        transfer = Transfer(self, action)
        if self.size > 1 and tensor.numel():
            communicator = self._whole_communicator(action)
            transport = communicator.ready(action)
            with communicator.on_device():
                work = self._start(action, None, transport.allreduce, [tensor], operation)
            transfer.add(work, None, tensor)
        return transfer

    def gather(self, tensor: Tensor, *, action: str) -> list[Tensor]:
        """Every member's ``tensor`` (one shape and type for all), in member order."""
        if self.size == 1:
            return [tensor.clone()]
        communicator = self._whole_communicator(action)
        transport = communicator.ready(action)
        gathered = [torch.empty_like(tensor) for _ in self.members]
        transfer = Transfer(self, action)
        with communicator.on_device():
            work = self._start(action, None, transport.allgather, [gathered], [tensor])
        transfer.add(work, None, tensor)
        transfer.wait()
        return gathered

    def aside(self) -> AbstractContextManager[object]:
        """Work in the body waits for the communicator's earlier work, but not for what the current
        stream of a GPU has queued."""
        return nullcontext() if self._communicator is None else self._communicator.aside()

    def defer(self, work: Callable[[], None]) -> None:
        """Do this before the next use of the communicator, or when it is closed. All members defer
        the same: a collective may be in it."""
        if self._communicator is not None:
            self._communicator.defer(work)

    def wait_for(self, work: dist.Work, peer: int | None) -> None:
        """Wait for one piece of work; a RuntimeError of any kind means that it failed.

        A collective blocks on peers that may only be waiting themselves, so it looks at the
        board now and then: whoever notices a failure first frees the others.
        """
        communicator = self._communicator
        if peer is not None or communicator is None or communicator.on_stream:
            work.wait()
            return
        slice_ = as_timedelta(grace_s(self.timeout_s) / 4)
        while True:
            try:
                work.wait(slice_)
                return
            except RuntimeError:
                if work.is_completed():
                    break
            if communicator.board.any_report():
                raise RuntimeError("another member of the group reported a failure")
        # It failed, or ended between the end of the slice and the question: it says which.
        work.wait()

    def check_alive(self, action: str) -> None:
        """Raises GroupPoolError where the connections were dropped."""
        self._shared(action).live(action)

    def failure(self, action: str, peer: int | None, error: Exception) -> PeerError:
        """Report a failure, drop the connections, and return the error with its culprits."""
        awaited = None if peer is None else self.members[peer]
        if self._communicator is not None:
            if peer is None:
                self._communicator.abandon()
            else:
                self._communicator.drop()
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
        if self._communicator is None:
            return ()
        board = self._communicator.board
        deadline = time.monotonic() + grace_s(self.timeout_s)
        try:
            board.report(None)
            while True:
                silent = board.silent(self.members)
                gone = tuple(member for member in silent if self._is_gone(member))
                if gone:
                    board.report(gone[0])  # for those that waited for this one
                if gone or not silent or time.monotonic() >= deadline:
                    return gone or silent
                time.sleep(PROBE_S)
        except RuntimeError:  # the store's host is gone as well
            return ()

    def _is_gone(self, member: int) -> bool:
        """Whether the connection to a member is known to be dead. A receive that is never answered
        is posted to find out; with NCCL there is no way to know."""
        communicator = self._communicator
        if communicator is None or communicator.dropped or communicator.on_stream:
            return False
        rank = self._ranks[self.members.index(member)]
        try:
            communicator.live("a probe").recv([torch.empty(1)], rank, PROBE_CHANNEL)
        except RuntimeError:
            return True
        return False

    def _ask_survivors(self, awaited: int | None) -> tuple[int, ...]:
        known = () if awaited is None else (awaited,)
        if self._communicator is None:
            return known
        board, grace = self._communicator.board, grace_s(self.timeout_s)
        try:
            board.report(awaited)
            found = board.culprits(self.members, awaited, grace_s=grace)
        except RuntimeError:  # the store's host is gone as well
            return known
        return found or known

    def _shared(self, action: str) -> Communicator:
        if self._communicator is None:
            raise GroupPoolError(f"a group of one has nobody for {action}")
        return self._communicator

    def _whole_communicator(self, action: str) -> Communicator:
        if not self._whole:
            raise GroupPoolError(
                f"group {list(self.members)} is a part of its communicator, and only sends and "
                f"receives; for {action} use pool.everyone"
            )
        return self._shared(action)

    def _start(
        self, action: str, peer: int | None, operation: Callable[..., dist.Work], *args: object
    ) -> dist.Work:
        try:
            return operation(*args)
        except RuntimeError as error:  # gloo reports a connection it already knows to be dead here
            raise self.failure(action, peer, error) from error


def is_transport_error(error: RuntimeError) -> bool:
    """Whether torch reports a failed communication rather than an error in the model."""
    if isinstance(error, RuntimeFault):
        return False
    return isinstance(error, dist.DistError) or any(mark in str(error) for mark in TRANSPORT_MARKS)
