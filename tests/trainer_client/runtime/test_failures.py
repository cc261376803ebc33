"""A replica that dies or hangs is named to the others; nobody waits for ever."""

import os
import time

import pytest
import torch
import torch.distributed as dist

from trainer_client.runtime import (
    GroupFormationError,
    GroupPool,
    GroupPoolError,
    PeerError,
    exchange_features,
    ring_attention,
)
from trainer_client.runtime.host_transport import HostTransport

# A quarter of it is the survivors' time to write whom they waited for: a busy machine may keep one
# of them waiting for a second, and it must not be taken for lost as well.
LIMIT_S = 8.0
LOST = 2


def lose(manner):
    if manner == "dies":
        os._exit(9)
    while True:  # hangs: the process lives and its sockets stay open
        time.sleep(0.1)
        if all_others_answered():
            os._exit(9)


def all_others_answered():
    store = dist.distributed_c10d._get_default_store()
    return store.check([f"answered/{rank}" for rank in range(4) if rank != LOST])


def facts(error, rank):
    dist.distributed_c10d._get_default_store().set(f"answered/{rank}", "1")
    return type(error).__name__, error.members, error.culprits, str(error)


def meet(rank, size):
    """All ranks meet; the one that will be lost goes on once no other needs it for that."""
    store = dist.distributed_c10d._get_default_store()
    dist.barrier()
    met = f"met/{store.add(f'meetings/{rank}', 1)}"
    store.set(f"{met}/{rank}", "1")
    if rank == LOST:
        store.wait([f"{met}/{other}" for other in range(size)])


def group_of_all(rank, size):
    """All replicas form it together, and use it together from here on."""
    meet(rank, size)
    group = GroupPool(timeout_s=LIMIT_S).everyone
    meet(rank, size)
    return group


def in_a_ring(rank, size, manner):
    group = group_of_all(rank, size)
    q = torch.randn(16, 1, 4)
    try:
        for step in range(200):
            if rank == LOST and step == 2:
                lose(manner)
            ring_attention(q, q, q, [0, 64], group=group)
    except PeerError as error:
        with pytest.raises(GroupPoolError, match="were closed or have failed"):
            group.post([(q, (rank + 1) % size)], [], action="another try")
        return facts(error, rank)


def in_an_exchange(rank, size, manner):
    group = group_of_all(rank, size)
    if rank == LOST:
        lose(manner)
    try:
        exchange_features(torch.zeros(size, 2), [1] * size, [1] * size, group)
    except PeerError as error:
        return facts(error, rank)


def in_a_sum(rank, size, manner):
    group = group_of_all(rank, size)
    if rank == LOST:
        lose(manner)
    try:
        group.post_sum(torch.zeros(5), action="the gradient sum").wait()
    except PeerError as error:
        return facts(error, rank)


def in_a_collective_of_torch(rank, size, manner):
    """As DDP's and FSDP's own are."""
    meet(rank, size)
    try:
        with GroupPool(timeout_s=LIMIT_S) as pool:
            assert pool.everyone.size == size
            with pytest.raises(RuntimeError, match="shapes differ"), pool.naming_lost("a step"):
                raise RuntimeError("shapes differ")  # the model's own errors stay what they are
            meet(rank, size)
            if rank == LOST:
                lose(manner)
            dist.all_reduce(torch.zeros(5))
    except PeerError as error:
        return facts(error, rank)


def in_forming_a_group(rank, size, manner):
    pool = GroupPool(timeout_s=LIMIT_S)
    meet(rank, size)
    if rank == LOST:
        lose(manner)
    try:
        pool.get((0, 1, 2, 3))
    except GroupFormationError as error:
        return facts(error, rank)


@pytest.mark.parametrize(
    ("scenario", "manner"),
    [
        (in_a_ring, "dies"),
        pytest.param(in_a_ring, "hangs", marks=pytest.mark.long),
        (in_an_exchange, "dies"),
        (in_a_sum, "dies"),
        (in_a_sum, "hangs"),
        (in_a_collective_of_torch, "dies"),
        (in_forming_a_group, "dies"),
    ],
)
def test_a_lost_replica_is_named_to_all_others(world, scenario, manner):
    answers = world(scenario, 4, manner)
    assert sorted(answers) == [0, 1, 3]
    for rank, (_, members, culprits, text) in answers.items():
        assert members == (0, 1, 2, 3)
        assert culprits == (LOST,), (rank, text)
        assert f"replica {LOST} of group [0, 1, 2, 3] died or hung" in text


def in_a_ring_of_some(rank, size):
    """Two rings at a time; those whose ring came through learn of the loss in the next sum."""
    meet(rank, size)
    with GroupPool(timeout_s=LIMIT_S) as pool:
        group = pool.get((0, LOST) if rank in (0, LOST) else (1, 3))
        meet(rank, size)
        if rank == LOST:
            lose("dies")
        q = torch.randn(16, 1, 4)
        try:
            ring_attention(q, q, q, [0, 32], group=group)
            pool.everyone.post_sum(torch.zeros(5), action="the gradient sum").wait()
        except PeerError as error:
            return facts(error, rank)


def test_a_replica_lost_in_one_ring_is_named_to_those_of_others_too(world):
    answers = world(in_a_ring_of_some, 4)
    assert {rank: members for rank, (_, members, *_) in answers.items()} == {
        0: (0, LOST),
        1: (0, 1, 2, 3),
        3: (0, 1, 2, 3),
    }
    for _, _, culprits, text in answers.values():
        assert culprits == (LOST,), text


def a_slow_member(rank, size):
    group = group_of_all(rank, size)
    total = torch.ones(1)
    if rank == 1:
        time.sleep(LIMIT_S / 3)
    group.post_sum(total, action="the gradient sum").wait()
    return float(total)


def test_a_slow_replica_is_waited_for(world):
    assert world(a_slow_member, 2) == {0: 2.0, 1: 2.0}


class EndsWithTheSlice:
    """Gloo's work that ends between the end of a slice of waiting and the question whether it has:
    a moment that a busy machine makes long."""

    def __init__(self, work, store):
        self._work, self._store = work, store
        self.is_completed = work.is_completed

    def wait(self, *limit):
        try:
            return self._work.wait(*limit)
        except RuntimeError:
            self._store.set("a slice ended", "")
            while not self.is_completed():
                time.sleep(0.001)
            raise


def a_member_that_comes_as_a_slice_ends(rank, size, manner):
    store = dist.distributed_c10d._get_default_store()
    group = group_of_all(rank, size)
    total = torch.ones(1)
    allreduce = HostTransport.allreduce
    HostTransport.allreduce = lambda *given: EndsWithTheSlice(allreduce(*given), store)
    if rank == 1:
        store.wait(["a slice ended"])
        if manner == "dies":
            os._exit(9)
    try:
        group.post_sum(total, action="the gradient sum").wait()
        return float(total)
    except PeerError as error:
        return error.culprits


@pytest.mark.parametrize(("manner", "answers"), [("comes", {0: 2.0, 1: 2.0}), ("dies", {0: (1,)})])
def test_a_sum_that_ends_as_a_slice_of_waiting_does_is_what_it_came_to(world, manner, answers):
    assert world(a_member_that_comes_as_a_slice_ends, 2, manner) == answers
