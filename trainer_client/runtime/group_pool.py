"""The replicas of a job and their CP groups, over one communicator.

Dynamic context parallelism needs another partition of the replicas in every wave. A CP group is a
list of replicas that send and receive over the communicator of all of them, so it costs nothing to
make, whichever groups a plan names. Why that cannot deadlock is said in ``communicator.py``.

Why not ``torch.distributed.new_group`` for the communicator: it changes torch's global tables, and
a lane (one stage and tensor rank of all replicas) would need every rank of the job to call it. Here
a backend is built directly on a ``PrefixStore`` whose prefix has never been used.

Contract
--------
The first use of ``everyone``, or of a group of several replicas, is collective over all replicas:
they meet in the store, compare how they communicate, and connect, in at most ``timeout_s``. After
it the pool makes no communicator, and uses the store only where something failed.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import TracebackType
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.tensor import DTensor
from torch.nn import Module

from trainer_client.runtime.communicator import Communicator, make_transport, statement_of
from trainer_client.runtime.fault_board import FaultBoard, grace_s
from trainer_client.runtime.faults import (
    GroupFormationError,
    GroupPoolError,
    PeerError,
    TransportMismatchError,
)
from trainer_client.runtime.memory_room import MemoryRoom
from trainer_client.runtime.peers import PeerGroup, is_transport_error
from trainer_client.runtime.roster import meet, missing, part

Members = tuple[int, ...]


class GroupPool:
    """CP groups of this replica, and the group of all replicas.

    Parameters
    ----------
    timeout_s: how long a peer may stay silent, in connecting or afterwards.
    store, replica, replicas, backend: taken from ``torch.distributed`` when not given; with
        neither, the pool serves a single replica. A replica of several ranks (tensor or
        pipeline parallel) makes one pool per rank, with the rank's place inside the replica
        as ``lane``: lanes never meet. All replicas make the pools of a lane in the same order.

    Attributes: ``communicators``, how many this pool has made; ``room``, what steps of the model
    that it trains were seen to take of the device.
    """

    def __init__(
        self,
        *,
        timeout_s: float = 600.0,
        store: Store | None = None,
        replica: int | None = None,
        replicas: int | None = None,
        backend: str | None = None,
        lane: str = "",
    ) -> None:
        ready = dist.is_initialized()
        self.replicas = replicas or (dist.get_world_size() if ready else 1)
        self.replica = replica if replica is not None else (dist.get_rank() if ready else 0)
        self.timeout_s = timeout_s
        self.communicators = 0
        self.room = MemoryRoom()
        self._backend_name = backend or _default_backend()
        on_gpu = self._backend_name == "nccl"
        self._device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else None
        self._store: Store | None = None
        if self.replicas > 1:
            base = store or dist.distributed_c10d._get_default_store()
            pools = base.add(f"cp_groups/{lane}/pools_of/{self.replica}", 1)
            self._store = PrefixStore(f"cp_groups/{lane}/{pools}/", base)
        self._parent: Communicator | None = None
        self._apart: dict[Members, Communicator] = {}
        self._everyone: PeerGroup | None = None
        self._connected: WeakSet[Module] = WeakSet()  # models whose meshes are

    @property
    def everyone(self) -> PeerGroup:
        """The group of all replicas; its first use is collective."""
        if self._everyone is None:
            self._everyone = self._group(tuple(range(self.replicas)))
        return self._everyone

    def get(self, members: Sequence[int]) -> PeerGroup:
        """The group of ``members``, which sends and receives over the communicator of all replicas.

        Raises
        ------
        GroupPoolError: this replica is not a member, or a member does not exist.
        GroupFormationError: a replica did not come within ``timeout_s``.
        TransportMismatchError: replicas would communicate in different ways.
        """
        key = self._checked(members)
        return self.everyone if key == tuple(range(self.replicas)) else self._group(key)

    def apart(self, members: Sequence[int]) -> PeerGroup:
        """A group of ``members`` with a communicator of its own, which they make alone: for
        messages that must not wait behind others', such as those between pipeline stages. Its
        first use is collective over them, and belongs before the first step. From then on a step
        has to be told how gradients are summed (``gradients.py``). Raises as ``get``.
        """
        key = self._checked(members)
        if len(key) > 1 and key not in self._apart:
            self._apart[key] = self._connect(key, "apart/" + "-".join(map(str, key)))
        return self._grouped(key, self._apart.get(key))

    def connect_meshes(self, model: Module) -> None:
        """Have torch connect the groups over which this model's weights are sharded, once.

        With NCCL it would do so in the first collective of each: in the first gather, and HSDP's
        others in a backward pass, beside running kernels. Collective over those groups.
        """
        if model in self._connected:
            return
        self._connected.add(model)
        meshes = dict.fromkeys(p.device_mesh for p in model.parameters() if isinstance(p, DTensor))
        for group, kind in {
            group: mesh.device_type for mesh in meshes for group in mesh.get_all_groups()
        }.items():
            if group.size() > 1:
                dist.all_reduce(torch.zeros(1, device=kind), group=group)

    @property
    def members_apart(self) -> tuple[Members, ...]:
        """The groups of several replicas that were made apart, in the order in which they were."""
        return tuple(self._apart)

    @contextmanager
    def naming_lost(self, action: str) -> Iterator[None]:
        """Name the replica that caused an error of DDP's or FSDP's collectives in the body.

        Only errors of communication are examined, and only once the replicas are connected. Raises
        PeerError in their place.
        """
        try:
            yield
        except RuntimeError as error:
            if (blamed := self._blamed(error, action)) is None:
                raise
            raise blamed from error

    def close(self) -> None:
        """Close the connections. Call it on all replicas after their last use of the pool.

        With NCCL a replica waits a little for the others to have done theirs: they would take a
        connection that ends under them for a failure.
        """
        self._each(Communicator.flush)
        settled = [each.settle() for each in self._communicators()]
        if any(settled) and self._store is not None:
            part(self._store, ranks=self.replicas, limit_s=grace_s(self.timeout_s))
        self._each(Communicator.leave)

    def drop(self) -> None:
        """Close the connections at once, after an error: the others may be at another place, and
        those that wait for this replica get an error."""
        self._each(Communicator.drop)

    def __enter__(self) -> "GroupPool":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close. An error of communication that leaves the body is raised as a PeerError that
        names the lost replica."""
        if error is None:
            self.close()
            return
        blamed = self._blamed(error, "work between steps")
        self.drop()
        if blamed is not None:
            raise blamed from error

    def _each(self, act: Callable[[Communicator], None]) -> None:
        for communicator in self._communicators():
            act(communicator)

    def _communicators(self) -> list[Communicator]:
        return [each for each in (self._parent, *self._apart.values()) if each is not None]

    def _blamed(self, error: BaseException | None, action: str) -> PeerError | None:
        known = self._parent is not None
        if not known or not isinstance(error, RuntimeError) or not is_transport_error(error):
            return None
        return self.everyone.blame(error, action=action)

    def _checked(self, members: Sequence[int]) -> Members:
        key = tuple(int(member) for member in members)
        if len(set(key)) != len(key) or not all(0 <= m < self.replicas for m in key):
            raise GroupPoolError(
                f"group {list(key)} must name different replicas in [0, {self.replicas}); "
                "check that the job's world size is the one the plan was made for"
            )
        if self.replica not in key:
            raise GroupPoolError(
                f"replica {self.replica} asked for group {list(key)}, of which it is no member; "
                "ask only for the cp_group of your own microbatch"
            )
        return key

    def _group(self, members: Members) -> PeerGroup:
        if self._parent is None and len(members) > 1:
            self._parent = self._connect(range(self.replicas), "everyone")
        return self._grouped(members, self._parent)

    def _grouped(self, members: Members, communicator: Communicator | None) -> PeerGroup:
        if len(members) == 1:
            communicator = None
        return PeerGroup(
            members,
            index=members.index(self.replica),
            communicator=communicator,
            timeout_s=self.timeout_s,
        )

    def _connect(self, members: Sequence[int], name: str) -> Communicator:
        """A communicator of ``members``; collective over them."""
        pool_store = self._store
        assert pool_store is not None, "more than one replica, so there is a store"
        store = PrefixStore(f"{name}/", pool_store)
        rank, ranks = members.index(self.replica), len(members)
        statement = statement_of(self._backend_name)
        limit_s = self.timeout_s - grace_s(self.timeout_s)
        try:
            unlike = meet(
                store, replica=self.replica, ranks=ranks, statement=statement, limit_s=limit_s
            )
            if unlike:
                raise TransportMismatchError(unlike)
            with self._on_device():
                transport = make_transport(
                    self._backend_name,
                    PrefixStore("transport/", store),
                    rank,
                    ranks,
                    limit_s,
                    self._device,
                )
                communicator = Communicator(
                    transport,
                    members,
                    replica=self.replica,
                    board=FaultBoard(pool_store, replica=self.replica),
                    timeout_s=self.timeout_s,
                    device=self._device,
                )
                communicator.warm_up()
        except TransportMismatchError:
            raise
        except RuntimeError as error:
            raise GroupFormationError(
                action="connecting the replicas (did all of them begin?)",
                members=tuple(members),
                replica=self.replica,
                awaited=None,
                culprits=missing(store, members),
                timeout_s=self.timeout_s,
                cause=str(error),
            ) from error
        self.communicators += 1
        return communicator

    def _on_device(self) -> AbstractContextManager[object]:
        """The pool's device in this thread, which may be another than the one that made it."""
        return nullcontext() if self._device is None else torch.cuda.device(self._device)


def _default_backend() -> str:
    """The default group's backend; the accelerator's where there is one backend per device."""
    name = dist.get_backend() if dist.is_initialized() else "gloo"
    if name in ("gloo", "nccl"):
        return name
    return "nccl" if torch.cuda.is_available() else "gloo"
