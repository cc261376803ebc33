"""Process groups of replicas, made by their members alone and kept for the next step.

Dynamic context parallelism needs another partition of the replicas in every wave, and there
are far too many possible groups to make them all beforehand. The pool makes a group when a
plan first names it, keeps it for later steps, and drops the least recently planned ones.

Why not ``torch.distributed.new_group``: it either needs every rank of the job to call it, or
(``use_local_synchronization``) names a group by its members alone, so that a group dropped
and made again would meet the addresses of the old one in the store. It also changes global
tables, which a background thread must not. Here a backend is built directly on a
``PrefixStore`` whose prefix has never been used.

Contract
--------
Every replica calls ``prewarm`` with the same groups in the same order: *all* groups of the
step, not only its own. The bookkeeping of who keeps what is then the same computation on
every replica, so a group is dropped by all of its members or by none, without a message
between them. Groups are connected by one background thread in the order of the list, which
is the same everywhere, so members that wait for one another cannot form a cycle.
``get`` of a group that no list named connects it in the calling thread and keeps it until
``close``; all of its members must do the same.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import contextmanager
from types import TracebackType
from typing import cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from trainer_client.runtime.faults import GroupFormationError, GroupPoolError, PeerError
from trainer_client.runtime.group_ledger import GroupLedger, Members
from trainer_client.runtime.host_transport import HostTransport
from trainer_client.runtime.peers import (
    POLL_S,
    FaultBoard,
    PeerGroup,
    Transport,
    as_timedelta,
    grace_s,
    is_transport_error,
)


class GroupPool:
    """CP groups of this replica, and the group of all replicas.

    Parameters
    ----------
    max_groups: groups kept per replica. The groups of the two most recent lists are always
        kept, since the older of them may still be computing, so the real bound is the larger
        of ``max_groups`` and the groups of two steps.
    timeout_s: how long a peer may stay silent, in forming a group or in using it.
    store, replica, replicas, backend: taken from ``torch.distributed`` when not given; with
        neither, the pool serves a single replica. A replica of several ranks (tensor or
        pipeline parallel) makes one pool per rank, with the rank's place inside the replica
        as ``lane``: lanes never meet. All replicas make the pools of a lane in the same order.
    """

    def __init__(
        self,
        *,
        max_groups: int = 64,
        timeout_s: float = 600.0,
        store: Store | None = None,
        replica: int | None = None,
        replicas: int | None = None,
        backend: str | None = None,
        lane: str = "",
    ) -> None:
        if max_groups < 1:
            raise GroupPoolError(f"max_groups is {max_groups}; it must be at least 1")
        ready = dist.is_initialized()
        self.replicas = replicas or (dist.get_world_size() if ready else 1)
        self.replica = replica if replica is not None else (dist.get_rank() if ready else 0)
        self.timeout_s = timeout_s
        self._backend_name = backend or _default_backend()
        on_gpu = self._backend_name == "nccl"
        self._device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else None
        if self.replicas > 1:
            base = store or dist.distributed_c10d._get_default_store()
            pools = base.add(f"cp_groups/{lane}/pools_of/{self.replica}", 1)
            prefix = f"cp_groups/{lane}/{pools}/"
            self._store: Store | None = PrefixStore(prefix, base)
            self._open_background_store: Callable[[], Store] = lambda: PrefixStore(
                prefix, _own_client(base)
            )
        else:
            self._store = None
        self._background_store: Store | None = None
        self._closed_at = math.inf  # of the monotonic clock
        self._ledger = GroupLedger(max_groups)
        self._planned: dict[Members, Future[PeerGroup]] = {}
        self._unplanned: dict[Members, PeerGroup] = {}
        self._connector = ThreadPoolExecutor(
            max_workers=1,
            thread_name_prefix="cp-groups",
            initializer=_compute_on,
            initargs=(self._device,),
        )

    @property
    def everyone(self) -> PeerGroup:
        """The group of all replicas; its first use is collective."""
        return self.get(tuple(range(self.replicas)))

    def prewarm(self, step_groups: Iterable[Sequence[int]]) -> None:
        """Admit a step's groups and start connecting those this replica is in; returns at once.

        ``step_groups``: every group of the step, of all replicas, in the plan's order.
        """
        admitted, dropped = self._ledger.admit(tuple(group) for group in step_groups)
        for members in dropped:
            if self.replica in members:
                self._planned.pop(members).add_done_callback(_close_made)
        for members, admission in admitted.items():
            if self.replica in members:
                self._checked(members)
                self._planned[members] = self._connector.submit(
                    self._connect_planned, members, f"planned/{admission}"
                )

    def get(self, members: Sequence[int]) -> PeerGroup:
        """The group of ``members``, connected.

        Raises
        ------
        GroupPoolError: this replica is not a member, or a member does not exist.
        GroupFormationError: a member did not arrive within ``timeout_s``.
        """
        key = self._checked(members)
        if len(key) == 1:
            return PeerGroup(key, index=0, timeout_s=self.timeout_s)
        if key in self._planned:
            try:
                return self._planned[key].result(timeout=2 * self.timeout_s)
            except FutureTimeout as error:
                raise self._formation_error(key, (), error) from error
        if key not in self._unplanned:
            name = "unplanned/" + "-".join(map(str, key))
            assert self._store is not None  # more than one replica, so there is a store
            self._unplanned[key] = self._connect(key, name, self._store)
        return self._unplanned[key]

    def kept(self) -> tuple[Members, ...]:
        """Planned groups this replica keeps, least recently planned first."""
        return tuple(key for key in self._ledger.groups() if self.replica in key)

    @contextmanager
    def naming_lost(self, action: str) -> Iterator[None]:
        """Name the replica that caused an error of DDP's or FSDP's collectives in the body.

        Only errors of communication are examined, and only once ``everyone`` was used. Raises
        PeerError in their place.
        """
        try:
            yield
        except RuntimeError as error:
            if (blamed := self._blamed(error, action)) is None:
                raise
            raise blamed from error

    def close(self) -> None:
        """Drop every group. Call it on all replicas after their last use of the pool.

        Groups that are still being connected are finished, because their other members wait for
        this one, but no longer than the grace period.
        """
        self._closed_at = time.monotonic()
        self._connector.shutdown(wait=False)
        for future in self._planned.values():
            future.add_done_callback(_close_made)
        for group in self._unplanned.values():
            group.close()
        self._planned.clear()
        self._unplanned.clear()

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
        blamed = self._blamed(error, "work between steps")
        self.close()
        if blamed is not None:
            raise blamed from error

    def _blamed(self, error: BaseException | None, action: str) -> PeerError | None:
        everyone = self._unplanned.get(tuple(range(self.replicas)))
        if everyone is None or not isinstance(error, RuntimeError) or not is_transport_error(error):
            return None
        return everyone.blame(error, action=action)

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

    def _connect_planned(self, members: Members, name: str) -> PeerGroup:
        # A store client serves one call at a time and waits inside it, so this thread has its own.
        if self._background_store is None:
            self._background_store = self._open_background_store()
        return self._connect(members, name, self._background_store)

    def _connect(self, members: Members, name: str, pool_store: Store) -> PeerGroup:
        store = PrefixStore(f"{name}/", pool_store)
        index = members.index(self.replica)
        limit_s = self.timeout_s - grace_s(self.timeout_s)
        try:
            store.set(f"arrived/{self.replica}", "1")
            self._await_members(members, store, limit_s)
            transport = _make_transport(
                self._backend_name, store, index, len(members), limit_s, self._device
            )
        except RuntimeError as error:
            raise self._formation_error(members, _missing(store, members), error) from error
        board = FaultBoard(self._store or pool_store, replica=self.replica)
        return PeerGroup(
            members,
            index=index,
            transport=transport,
            board=board,
            timeout_s=self.timeout_s,
            device=self._device,
        )

    def _await_members(self, members: Members, store: Store, limit_s: float) -> None:
        """Wait until all members request this group. NCCL alone would wait for the store's own
        timeout. Raises RuntimeError."""
        deadline = time.monotonic() + limit_s
        arrivals = [f"arrived/{member}" for member in members]
        while not store.check(arrivals):
            if time.monotonic() >= min(deadline, self._closed_at + grace_s(self.timeout_s)):
                raise RuntimeError(f"not all members came within {limit_s:g} s")
            time.sleep(POLL_S)

    def _formation_error(
        self, members: Members, missing: Sequence[int], error: Exception
    ) -> GroupFormationError:
        return GroupFormationError(
            action="forming the group (did all replicas prewarm the same list?)",
            members=members,
            replica=self.replica,
            awaited=None,
            culprits=missing,
            timeout_s=self.timeout_s,
            cause=str(error),
        )


def _close_made(future: Future[PeerGroup]) -> None:
    """Close a group once it is connected. Connecting is not cancelled, because the other members
    would then wait until their timeout."""
    if not future.cancelled() and future.exception() is None:
        future.result().close()


def _default_backend() -> str:
    """The default group's backend; the accelerator's where there is one backend per device."""
    name = dist.get_backend() if dist.is_initialized() else "gloo"
    if name in ("gloo", "nccl"):
        return name
    return "nccl" if torch.cuda.is_available() else "gloo"


def _compute_on(device: torch.device | None) -> None:
    """Set CUDA's current device, which each thread has for itself and which is 0 in a new one."""
    if device is not None:
        torch.cuda.set_device(device)


def _make_transport(
    name: str,
    store: Store,
    index: int,
    size: int,
    timeout_s: float,
    device: torch.device | None,
) -> Transport:
    timeout = as_timedelta(timeout_s)
    if name == "gloo":
        return HostTransport(dist.ProcessGroupGloo(store, index, size, timeout))
    if name == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        backend = dist.ProcessGroupNCCL(store, index, size, options)
        # Connect now, in the background, rather than inside the first ring.
        backend.eager_connect_single_device(device)
        return cast(Transport, backend)
    raise GroupPoolError(
        f"backend {name!r} is not supported by the group pool; start torch.distributed with "
        "'gloo' or 'nccl', or pass backend="
    )


def _own_client(store: Store) -> Store:
    """A second connection to the store, where this torch can make one."""
    clone: Callable[[], Store] | None = getattr(store, "clone", None)
    return store if clone is None else clone()


def _missing(store: Store, members: Sequence[int]) -> tuple[int, ...]:
    try:
        return tuple(m for m in members if not store.check([f"arrived/{m}"]))
    except RuntimeError:  # the store's host is gone
        return ()
