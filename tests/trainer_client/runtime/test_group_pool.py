"""Groups are made by their members alone, kept, and dropped alike everywhere."""

import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

from trainer_client.runtime import GroupPool, GroupPoolError
from trainer_client.runtime.group_ledger import GroupLedger


def summed(group, value):
    tensor = torch.tensor([float(value)])
    group.post_sum(tensor, action="a test").wait()
    return float(tensor)


def pool_cases(rank, size):
    seen = {}
    with GroupPool(timeout_s=60, max_groups=2) as pool:
        # Ranks outside (0, 3) make no call at all, and nobody waits for them.
        if rank in (0, 3):
            seen["members only"] = summed(pool.get((0, 3)), rank)
        seen["same object"] = pool.everyone is pool.get(tuple(range(size)))
        seen["alone"] = summed(pool.get((rank,)), rank)
        seen["ring order"] = pool.get((1, 0)).index if rank < 2 else None
        seen["kept"] = random_steps(pool, rank, size)
    with GroupPool(timeout_s=60) as again:
        seen["second pool"] = summed(again.everyone, rank)
    return seen


def random_steps(pool, rank, size):
    """Many steps of random groups through a pool of two: each is used while it is planned."""
    draw = random.Random(5)
    most = 0
    for step in range(30):
        order = draw.sample(range(size), size)
        cut = draw.randrange(1, size)
        groups = [tuple(sorted(order[:cut])), tuple(sorted(order[cut:]))]
        pool.prewarm(groups)
        mine = next(group for group in groups if rank in group)
        assert summed(pool.get(mine), rank) == sum(mine), step
        most = max(most, len(pool.kept()))
    return most


def test_groups_are_made_by_their_members_and_bounded(world):
    answers = world(pool_cases, 4)
    assert [answers[rank].get("members only") for rank in range(4)] == [3.0, None, None, 3.0]
    assert [answers[rank]["ring order"] for rank in range(4)] == [1, 0, None, None]
    for rank, seen in answers.items():
        assert seen["same object"]
        assert seen["alone"] == rank
        assert seen["kept"] == 2
        assert seen["second pool"] == 6


def lanes_case(rank, size):
    """Two tensor-parallel lanes of two replicas each: ranks 0, 2 and ranks 1, 3."""
    with GroupPool(replica=rank // 2, replicas=2, lane=f"tp{rank % 2}", timeout_s=60) as pool:
        return summed(pool.everyone, rank), dist.get_world_size()


def test_lanes_of_one_replica_never_meet(world):
    answers = world(lanes_case, 4)
    assert {rank: total for rank, (total, _) in answers.items()} == {0: 2, 1: 4, 2: 2, 3: 4}


def test_every_replica_works_out_the_same_groups_to_drop():
    draw = random.Random(1)
    ledgers = [GroupLedger(3) for _ in range(4)]
    admissions = set()
    for _ in range(60):
        order = draw.sample(range(12), 12)
        cuts = sorted(draw.sample(range(1, 12), 4))
        edges = zip([0, *cuts], [*cuts, 12], strict=True)
        groups = [tuple(sorted(order[a:b])) for a, b in edges]
        outcomes = [ledger.admit(iter(groups)) for ledger in ledgers]
        assert all(outcome == outcomes[0] for outcome in outcomes)
        admitted, dropped = outcomes[0]
        assert not admissions & set(admitted.values()), "a place in the store is used once"
        admissions |= set(admitted.values())
        assert not set(dropped) & set(groups)
        held = ledgers[0].groups()
        assert max(sum(replica in group for group in held) for replica in range(12)) <= 3


def test_a_group_that_is_planned_again_outlives_one_that_is_not():
    ledger = GroupLedger(2)
    ledger.admit([(0, 1)])
    ledger.admit([(0, 2)])
    ledger.admit([(0, 1)])
    _, dropped = ledger.admit([(0, 3)])
    assert dropped == [(0, 2)]


def test_groups_of_two_steps_are_kept_even_above_the_bound():
    ledger = GroupLedger(1)
    ledger.admit([(0, 1), (0, 2)])
    _, dropped = ledger.admit([(0, 3), (0, 4)])
    assert dropped == []
    _, dropped = ledger.admit([(0, 5)])
    assert dropped == [(0, 1), (0, 2)]


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
        GroupPool().prewarm([(0, 1)])


def test_a_pool_must_keep_at_least_one_group():
    with pytest.raises(GroupPoolError, match="max_groups is 0"):
        GroupPool(max_groups=0)


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

    def __init__(self, store, index, size, options, *, current, seen):
        self._index, self._current, self._seen = index, current, seen

    def eager_connect_single_device(self, device):
        thread = threading.current_thread().name
        self._seen.append((self._index, device, self._current.device, thread.split("_")[0]))


def test_every_rank_of_a_host_connects_on_its_own_gpu_in_whichever_thread(monkeypatch):
    current, seen = DeviceOfThread(), []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current.device.index)
    monkeypatch.setattr(torch.cuda, "set_device", current.set)

    def nccl(*arguments):
        return RecordedNccl(*arguments, current=current, seen=seen)

    nccl.Options = RecordedNccl.Options
    monkeypatch.setattr(dist, "ProcessGroupNCCL", nccl, raising=False)
    store = dist.HashStore()

    def rank(local_rank):
        torch.cuda.set_device(torch.device("cuda", local_rank))
        options = {"store": store, "replica": local_rank, "replicas": 3, "backend": "nccl"}
        with GroupPool(**options, timeout_s=60) as pool:
            pool.prewarm([(0, 1, 2)])
            return pool.get((0, 1, 2)).device, pool.everyone.device

    with ThreadPoolExecutor(3, thread_name_prefix="rank") as ranks:
        devices = list(ranks.map(rank, range(3)))
    assert devices == [(torch.device("cuda", n),) * 2 for n in range(3)]
    for index, asked, current_there, _ in seen:
        assert asked == current_there == torch.device("cuda", index)
    assert sorted((index, thread) for index, *_, thread in seen) == [
        (n, "cp-groups") for n in range(3)
    ]
