"""One communicator of torch's, which all groups of its ranks share.

Rings and exchanges only send and receive, and any of a communicator's ranks may do so without the
others. So a CP group is a list of ranks, not a communicator: torch's backend is made once, with its
memory and its connections, and nothing is initialised beside running kernels.

With NCCL the sends and receives of one hop are one group call, and torch runs a group call on the
communicator of all ranks; a send on its own it may run on a communicator of two ranks, which it
makes then (``ProcessGroupNCCL::pointToPoint``; see also ``batch_isend_irecv``, which says that
ranks may stay away once the first collective is over: ``warm_up`` makes that). With gloo every
message has a tag.

Why one communicator cannot deadlock
------------------------------------
A communicator does one rank's work in the order in which it is posted. All replicas walk through
the same plan: give each thing that they do together (a hop of a ring, an exchange, a sum) its place
in the plan: wave by wave, or action by action of a pipeline's schedule; within it the exchange of
each modality, then layer by layer and hop by hop, backwards in the backward pass. An exchange that
is started a wave ahead has its place between the forward and the backward layers of the wave before
(before both where there is no backward pass), on all replicas: they agree on that when the step
begins. A replica is in one ring of a wave and posts in rising order of
these places, and all who take part in a thing have it at the same place. Take the lowest place that
is not done: all who take part in it have done everything they posted before, so all of them post
it, and nothing is in its way. So it is done, and so is every later one.
``tests/trainer_client/runtime/test_posting_order.py`` checks the premises on planned steps, and
that the argument fails where they do.

Contract
--------
Making one is collective over its ranks and takes at most ``timeout_s``. ``leave`` closes the
connections once all that was posted here is done. ``drop`` closes them at once: transfers in flight
are given up, and ranks that wait for this one get an error. After either, every use raises
GroupPoolError. Everything is done by the calling thread, on the device that
the communicator was made for, whichever that thread's current one is.
"""

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol, cast
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store

from trainer_client.runtime.fault_board import FaultBoard, as_timedelta
from trainer_client.runtime.faults import GroupPoolError
from trainer_client.runtime.host_transport import HostTransport

PROTOCOL = 5  # of what replicas say to one another; raise it with any change
NEIGHBOURHOOD = 8  # consecutive replicas whose rings are connected at the start: a host's GPUs


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
    def shutdown(self) -> None: ...
    def abort(self) -> None: ...


class Droppable(Protocol):
    """A transfer in flight."""

    def give_up(self) -> None:
        """Let go of the work and its connection."""
        ...


Message = tuple[Tensor, int]
"""A tensor, and the rank that it goes to or comes from."""


class Communicator:
    """A transport among ``members``, which are its ranks in this order."""

    def __init__(
        self,
        transport: Transport,
        members: Sequence[int],
        *,
        replica: int,
        board: FaultBoard,
        timeout_s: float,
        device: torch.device | None = None,
    ) -> None:
        self.members = members
        self.replica = replica
        self.board = board
        self.timeout_s = timeout_s
        self.device = device or torch.device("cpu")
        # NCCL orders its work on a stream and lets the host go on.
        self.on_stream = transport.supports_coalescing
        self._transport: Transport | None = transport
        self._abandoned: Transport | None = None
        self._in_flight: WeakSet[Droppable] = WeakSet()
        self._deferred: deque[Callable[[], None]] = deque()
        self._aside: torch.cuda.Stream | None = None

    def ready(self, action: str) -> Transport:
        """The transport, once what was deferred is done. Raises GroupPoolError if dropped."""
        while self._deferred:
            self._deferred.popleft()()
        return self.live(action)

    def live(self, action: str) -> Transport:
        """The transport. Raises GroupPoolError if dropped."""
        if self._transport is None:
            raise GroupPoolError(
                f"the connections of replica {self.replica} were closed or have failed; {action} "
                "cannot use them. After a PeerError restart the ranks; otherwise make a new pool."
            )
        return self._transport

    @property
    def dropped(self) -> bool:
        """Whether the connections were closed, or have failed."""
        return self._transport is None

    def defer(self, work: Callable[[], None]) -> None:
        """Do this before the next use, or when the pool is closed; on all ranks alike."""
        self._deferred.append(work)

    def watch(self, transfer: Droppable) -> None:
        """Give this transfer up when the connections are dropped."""
        self._in_flight.add(transfer)

    def on_device(self) -> AbstractContextManager[object]:
        """CUDA's current device, which each thread has for itself and which is 0 in a new one."""
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()

    def aside(self) -> AbstractContextManager[object]:
        """Work on a stream of its own, which does not wait for what the current one has queued."""
        if self.device.type != "cuda":
            return nullcontext()
        if self._aside is None:
            self._aside = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        return torch.cuda.stream(self._aside)

    def post_group(self, sends: Sequence[Message], receives: Sequence[Message]) -> dist.Work:
        """One group call of NCCL's: its sends and receives cannot wait for one another."""
        transport = self.live("a group call")
        transport._start_coalescing()
        for tensor, rank in sends:
            transport.send([tensor], rank, 0)
        for tensor, rank in receives:
            transport.recv([tensor], rank, 0)
        return transport._end_coalescing()

    def warm_up(self) -> None:
        """Connect what will be used, and wait until all ranks have: none leaves before.

        Gloo's ranks are all connected once it is made. NCCL connects the trees and rings of its
        collectives in the first of them, and two ranks when one first sends to the other. Rings
        stay inside a host where they fit, so neighbours are connected here, and next to one another
        all round. Other pairs (of exchanges, of rings across hosts) are connected when a plan first
        needs them, in the plan's order: connecting all pairs would cost buffers for every one.
        """
        here = torch.ones(1, device=self.device)
        self.live("warming up").allreduce([here], dist.ReduceOp.SUM).wait()
        if not self.on_stream:
            return
        rank = self.members.index(self.replica)
        for following, preceding in neighbours(rank, len(self.members)):
            arriving = torch.empty_like(here)
            self.post_group([(here, following)], [(arriving, preceding)]).wait()
        here.cpu()  # NCCL's waits are the stream's; here the host waits as well, once

    def flush(self) -> None:
        """Do what was deferred, while the connections live."""
        if self._transport is not None:
            self.ready("closing")

    def settle(self) -> bool:
        """Wait until the device has done all that was posted; whether there is one to wait for."""
        if self._transport is None or not self.on_stream:
            return False
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return True

    def leave(self) -> None:
        """Close the connections after ``settle``."""
        if self._transport is not None:
            self._transport.shutdown()
            self._transport = None
        self.drop()

    def drop(self) -> None:
        """Close the connections; ranks that wait for this one get an error at once."""
        self._deferred.clear()
        for transfer in tuple(self._in_flight):
            transfer.give_up()
        if self._transport is not None:
            self._transport.abort()  # ends its kernels, which would wait for their peers
        self._transport = None

    def abandon(self) -> None:
        """Use the connections no more, but leave them open: a collective still runs, and freeing it
        would wait for its threads."""
        self._deferred.clear()
        self._abandoned, self._transport = self._transport, None


def neighbours(rank: int, ranks: int) -> list[tuple[int, int]]:
    """(send to, receive from) of each round in which ``warm_up`` connects neighbours: at most two
    peers a round, and each round the same on all ranks of a neighbourhood."""
    first = rank - rank % NEIGHBOURHOOD
    size = min(NEIGHBOURHOOD, ranks - first)
    place = rank - first
    rounds = [
        (first + (place + far) % size, first + (place - far) % size) for far in range(1, size)
    ]
    if ranks > NEIGHBOURHOOD:
        rounds.append(((rank + 1) % ranks, (rank - 1) % ranks))
    return rounds


def make_transport(
    name: str, store: Store, rank: int, ranks: int, timeout_s: float, device: torch.device | None
) -> Transport:
    """A new backend of torch's among ``ranks`` that all call this. Raises RuntimeError."""
    timeout = as_timedelta(timeout_s)
    if name == "gloo":
        return HostTransport(dist.ProcessGroupGloo(store, rank, ranks, timeout))
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    backend = dist.ProcessGroupNCCL(store, rank, ranks, options)
    backend.eager_connect_single_device(device)
    return cast(Transport, backend)


def statement_of(name: str) -> str:
    """How this rank communicates; ranks whose statements differ would wait for one another.

    Raises GroupPoolError for a backend that is not known.
    """
    if name == "gloo":
        way = "gloo"
    elif name == "nccl":
        version = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
        way = f"nccl {version} in group calls"
    else:
        raise GroupPoolError(
            f"backend {name!r} is not supported by the group pool; start torch.distributed with "
            "'gloo' or 'nccl', or pass backend="
        )
    return f"{way}, torch {torch.__version__}, protocol {PROTOCOL}"
