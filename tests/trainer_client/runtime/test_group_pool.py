"""Groups of any replicas, over one communicator that is made at the start."""

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist

from tests.trainer_client.runtime.posted_order import Post, stuck
from tests.trainer_client.runtime.world_device import DEVICE
from trainer_client.runtime import GroupPool, GroupPoolError, PeerGroup, TransportMismatchError
from trainer_client.runtime.communicator import PROTOCOL, Communicator


def summed(group, value):
    """What every member gave, handed once round the group."""
    total = held = torch.tensor([float(value)], device=DEVICE)
    for _ in range(group.size - 1):
        arriving = torch.empty_like(held)
        following, preceding = (group.index + 1) % group.size, (group.index - 1) % group.size
        group.post([(held, following)], [(arriving, preceding)], action="a test").wait()
        total, held = total + arriving, arriving
    return float(total)


def pool_cases(rank, size):
    seen = {}
    with GroupPool(timeout_s=60) as pool:
        seen["alone"] = summed(pool.get((rank,)), rank)
        seen["before"] = pool.communicators
        seen["same object"] = pool.everyone is pool.get(tuple(range(size)))
        # Ranks outside (0, 3) make no call at all, and nobody waits for them.
        if rank in (0, 3):
            seen["members only"] = summed(pool.get((0, 3)), rank)
        seen["ring order"] = pool.get((1, 0)).index if rank < 2 else None
        random_steps(pool, rank, size)
        seen["after"] = pool.communicators
        if rank < 2:
            seen["apart"] = summed(pool.apart((1, 0)), rank), summed(pool.apart((1, 0)), rank)
        seen["with those apart"] = pool.communicators
    with GroupPool(timeout_s=60) as again:
        seen["second pool"] = summed(again.everyone, rank)
    return seen


def random_steps(pool, rank, size):
    """Many random groups, some in another order than the replicas'."""
    draw = random.Random(5)
    for step in range(60):
        order = draw.sample(range(size), size)
        cut = draw.randrange(1, size)
        mine = next(group for group in (order[:cut], order[cut:]) if rank in group)
        assert summed(pool.get(mine), rank) == sum(mine), step


def test_groups_of_any_members_share_one_communicator(world):
    answers = world(pool_cases, 4)
    assert [answers[rank].get("members only") for rank in range(4)] == [3.0, None, None, 3.0]
    assert [answers[rank]["ring order"] for rank in range(4)] == [1, 0, None, None]
    for rank, seen in answers.items():
        assert seen["same object"]
        assert seen["alone"] == rank
        assert seen["second pool"] == 6
        assert (seen["before"], seen["after"]) == (0, 1)
        assert seen["with those apart"] == (2 if rank < 2 else 1)
        assert seen.get("apart") == ((1.0, 1.0) if rank < 2 else None)


def rings_between_the_same_two(rank, size):
    """Two rings that both have replicas 0 and 1 as neighbours, posted in different orders."""
    with GroupPool(timeout_s=60) as pool:
        if rank > 1:
            pool.get((0, 1, 2))
            return None
        groups = [pool.get((0, 1)), pool.get((0, 1, 2))]
        arriving = [torch.zeros(1, device=DEVICE) for _ in range(2)]
        order = (0, 1) if rank == 0 else (1, 0)
        posted = []
        for which in order:
            group, ours = groups[which], torch.full((1,), float(which), device=DEVICE)
            sends, receives = [(ours, 1)], [(arriving[which], 0)]
            where = (sends, []) if rank == 0 else ([], receives)
            posted.append(group.post(*where, action="a test", channel=1))
        for transfer in posted:
            transfer.wait()
        return [float(each) for each in arriving]


def test_messages_of_different_rings_between_the_same_replicas_never_mix(world):
    assert world(rings_between_the_same_two, 3)[1] == [0.0, 1.0]


def unlike_ranks(rank, size):
    """Replica 1 runs another release of torch."""
    torch.__version__ = "1.0" if rank == 1 else "2.0"
    try:
        return GroupPool(timeout_s=60).everyone
    except TransportMismatchError as error:
        return error.replicas_of, str(error)


def test_replicas_that_would_communicate_in_different_ways_are_named_before_they_connect(world):
    answers = world(unlike_ranks, 3)
    assert len(answers) == 3
    for replicas_of, text in answers.values():
        assert replicas_of == {
            f"gloo, torch 2.0, protocol {PROTOCOL}": (0, 2),
            f"gloo, torch 1.0, protocol {PROTOCOL}": (1,),
        }
        assert f"torch 1.0, protocol {PROTOCOL} on replicas [1]" in text
        assert "one environment" in text


def lanes_case(rank, size):
    """Two tensor-parallel lanes of two replicas each: ranks 0, 2 and ranks 1, 3."""
    with GroupPool(replica=rank // 2, replicas=2, lane=f"tp{rank % 2}", timeout_s=60) as pool:
        return summed(pool.everyone, rank), dist.get_world_size()


def test_lanes_of_one_replica_never_meet(world):
    answers = world(lanes_case, 4)
    assert {rank: total for rank, (total, _) in answers.items()} == {0: 2, 1: 4, 2: 2, 3: 4}


def test_a_group_without_this_replica_is_refused():
    pool = GroupPool(store=dist.HashStore(), replica=0, replicas=4)
    with pytest.raises(GroupPoolError, match=r"replica 0 asked for group \[1, 2\]"):
        pool.get((1, 2))


@pytest.mark.parametrize("members", [(0, 0), (0, 4), (-1, 0)])
def test_replicas_that_do_not_exist_are_refused(members):
    pool = GroupPool(store=dist.HashStore(), replica=0, replicas=4)
    with pytest.raises(GroupPoolError, match=r"different replicas in \[0, 4\)"):
        pool.get(members)


def test_a_plan_for_more_replicas_than_the_job_has_is_refused():
    with pytest.raises(GroupPoolError, match="world size"):
        GroupPool().get((0, 1))


def test_a_part_of_the_replicas_only_sends_and_receives():
    transport = RecordedNccl(threading.local(), [])
    parent = Communicator(transport, range(3), replica=0, board=None, timeout_s=60)
    part = PeerGroup((0, 2), index=0, communicator=parent)
    with pytest.raises(GroupPoolError, match=r"use pool\.everyone"):
        part.post_sum(torch.zeros(1), action="a sum")


def test_an_unknown_backend_is_refused():
    pool = GroupPool(store=dist.HashStore(), replica=0, replicas=2, backend="mpi")
    with pytest.raises(GroupPoolError, match="'gloo' or 'nccl'"):
        pool.get((0, 1))


class DeviceOfThread(threading.local):
    """CUDA's rule: every thread begins on device 0."""

    device = torch.device("cuda", 0)

    def set(self, device):
        self.device = torch.device(device)


class RecordedNccl:
    """What the pool asks of NCCL, which this torch may have been built without."""

    supports_coalescing = True

    class Options:
        pass

    def __init__(self, current, calls):
        self._current, self._calls = current, calls

    def _note(self, what):
        where = getattr(self._current, "device", None)
        self._calls.append((what, where, threading.current_thread().name.split("_")[0]))

    def eager_connect_single_device(self, device):
        self._note(("connect", device))

    def allreduce(self, tensors, operation):
        self._note("allreduce")
        return Done()

    def send(self, tensors, peer, tag):
        self._note(("send", peer))

    def recv(self, tensors, peer, tag):
        self._note(("recv", peer))

    def _start_coalescing(self):
        self._note("start")

    def _end_coalescing(self):
        self._note("end")
        return Done()

    def shutdown(self):
        self._note("shut down")

    def abort(self):
        self._note("aborted")


class Done:
    def wait(self):
        pass


@pytest.fixture
def gpus(monkeypatch):
    """Threads with CUDA's rule for the current device, and NCCL's calls in each rank."""
    current, calls = DeviceOfThread(), {}

    @contextmanager
    def device(which):
        before = current.device
        current.set(which)
        yield
        current.set(before)

    def nccl(store, rank, ranks, options):
        return RecordedNccl(current, calls.setdefault(rank, []))

    nccl.Options = RecordedNccl.Options
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current.device.index)
    monkeypatch.setattr(torch.cuda, "set_device", current.set)
    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 29, 3))
    monkeypatch.setattr(dist, "ProcessGroupNCCL", nccl, raising=False)
    monkeypatch.setattr(torch, "ones", on_the_host(torch.ones))
    return calls


def on_the_host(make):
    """This torch may have no CUDA to make tensors on."""
    return lambda *size, device=None, **options: make(*size, **options)


def connect_and_post(local_rank, store, ranks):
    """One rank of a host, which makes its pool in one thread and posts a ring in another, as
    autograd does; a new thread's device is 0."""
    torch.cuda.set_device(torch.device("cuda", local_rank))
    pool = GroupPool(store=store, replica=local_rank, replicas=ranks, backend="nccl", timeout_s=60)
    with ThreadPoolExecutor(1, thread_name_prefix="another") as another:
        ring = another.submit(pool.get, tuple(range(ranks))[::-1]).result()
        sends = [(torch.ones(1), (ring.index + 1) % ranks)]
        receives = [(torch.ones(1), (ring.index - 1) % ranks)]
        another.submit(ring.post, sends, receives, action="a hop").result().wait()
        assert torch.cuda.current_device() == local_rank
        assert another.submit(torch.cuda.current_device).result() == 0
    return pool.everyone.device


def test_every_rank_of_a_host_communicates_on_its_own_gpu_in_whichever_thread(gpus):
    store = dist.HashStore()
    with ThreadPoolExecutor(3, thread_name_prefix="rank") as ranks:
        devices = list(ranks.map(lambda rank: connect_and_post(rank, store, 3), range(3)))
    assert devices == [torch.device("cuda", rank) for rank in range(3)]
    assert sorted(gpus) == [0, 1, 2]
    for rank, calls in gpus.items():
        device = torch.device("cuda", rank)
        assert calls[0][0] == ("connect", device)
        assert {where for _, where, _ in calls} == {device}
        assert {thread for *_, thread in calls} == {"another"}, "the caller's, and no other"


def test_nccl_is_warmed_up_once_and_then_only_posts_group_calls_of_two_peers(gpus):
    store = dist.HashStore()
    with ThreadPoolExecutor(11, thread_name_prefix="rank") as ranks:
        list(ranks.map(lambda rank: connect_and_post(rank, store, 11), range(11)))
    batches = {}
    for rank, calls in gpus.items():
        named = [what for what, *_ in calls]
        assert named[0][0] == "connect"
        assert named[1] == "allreduce", "all ranks take part in a communicator's first collective"
        assert named.count("allreduce") == 1
        assert len([what for what in named if what[0] == "connect"]) == 1
        batches[rank] = grouped(named[2:])  # the warm-up's, then the ring's hop
        assert all(len({peer for _, peer in batch}) <= 2 for batch in batches[rank])
    posts = {
        rank: [Post(number, "all", rank, 11, batch) for number, batch in enumerate(each)]
        for rank, each in batches.items()
    }
    assert not stuck(posts)
    connected = {(rank, peer) for rank, each in batches.items() for b in each for _, peer in b}
    ring = {(rank, (rank + 1) % 11) for rank in range(11)}
    host = {(a, b) for a in range(8) for b in range(8) if a != b}
    assert connected >= ring | host


def closing(local_rank, store, ranks, fails):
    """One rank that connects and closes its pool, by an error in its midst if it `fails`."""
    torch.cuda.set_device(torch.device("cuda", local_rank))
    pool = GroupPool(store=store, replica=local_rank, replicas=ranks, backend="nccl", timeout_s=60)
    try:
        with pool:
            assert pool.everyone.size == ranks
            if fails:
                raise ValueError("of the trainer's own")
    except ValueError:
        return
    pool.close()  # once more changes nothing


def test_no_replica_closes_nccl_before_all_of_them_have_done_their_work(gpus, monkeypatch):
    order = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: order.append(device.index))
    ended = RecordedNccl.shutdown
    monkeypatch.setattr(
        RecordedNccl, "shutdown", lambda nccl: (order.append("shut down"), ended(nccl))
    )
    store = dist.HashStore()
    with ThreadPoolExecutor(3) as ranks:
        list(ranks.map(lambda rank: closing(rank, store, 3, False), range(3)))
    assert set(order[:3]) == {0, 1, 2}
    assert order[3:] == ["shut down"] * 3
    assert all([what for what, *_ in calls][-1] == "shut down" for calls in gpus.values())


def test_a_replica_that_fails_ends_its_kernels_and_the_others_wait_for_it_a_little_only(
    gpus, monkeypatch
):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    store = dist.HashStore()
    with ThreadPoolExecutor(3) as ranks:
        list(ranks.map(lambda rank: closing(rank, store, 3, rank == 1), range(3)))
    last = {rank: calls[-1][0] for rank, calls in gpus.items()}
    assert last == {0: "shut down", 1: "aborted", 2: "shut down"}


def grouped(named):
    """The sends and receives between each start and end; a send on its own fails."""
    batches, within = [], None
    for what in named:
        if what == "start":
            within = []
        elif what == "end":
            batches.append(within)
            within = None
        else:
            within.append(what)
    return batches
