"""What a rank asks of the job's store: little when it connects, and nothing while it trains."""

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from tests.trainer_client.runtime.random_steps import (
    make_model,
    make_shard,
    random_plan,
    random_samples,
)
from trainer_client.runtime import GroupFormationError, GroupPool, group_pool, run_step
from trainer_client.runtime.fault_board import FaultBoard
from trainer_client.runtime.roster import meet

CONNECTING = 5  # operations of a rank, and two more of the last to come
TRANSPORT = "/transport/"  # keys of torch's own, which asks for each peer's address once


class CountingStore(dist.Store):
    """Counts the operations that reach the store which it stands before."""

    def __init__(self, store):
        super().__init__()
        self._store = store
        self.asked = []

    def _noted(self, operation, key):
        if TRANSPORT not in key:
            self.asked.append((operation, key))

    def set(self, key, value):
        self._noted("set", key)
        self._store.set(key, value)

    def get(self, key):
        self._noted("get", key)
        return self._store.get(key)

    def add(self, key, amount):
        self._noted("add", key)
        return self._store.add(key, amount)

    def append(self, key, value):
        self._noted("append", key)
        self._store.append(key, value)

    def check(self, keys):
        assert len(keys) == 1, "an operation that grows with the number of replicas"
        self._noted("check", keys[0])
        return self._store.check(keys)

    def wait(self, keys, timeout=None):
        assert len(keys) == 1 or TRANSPORT in keys[0]
        self._noted("wait", keys[0])
        self._store.wait(keys, *([] if timeout is None else [timeout]))

    def multi_get(self, keys):
        return [self.get(key) for key in keys]

    def has_extended_api(self):
        return False


def a_training_run(rank, size):
    store = CountingStore(dist.distributed_c10d._get_default_store())
    with GroupPool(store=store, replica=rank, replicas=size, timeout_s=600) as pool:
        assert pool.everyone.size == size
        connecting = list(store.asked)
        store.asked.clear()
        for seed in range(3):
            samples = random_samples(seed)
            waves = random_plan(samples, size, (1, 2, 3), seed)
            run_step(make_model(()), make_shard(samples, waves, size, rank, seed), pool)
    return connecting, store.asked


def test_a_rank_asks_little_to_connect_and_nothing_in_a_step(world):
    answers = world(a_training_run, 4)
    for connecting, training in answers.values():
        assert len(connecting) <= CONNECTING + 2
        # A sum that waits for longer than half a second looks for notes of a failure: one key.
        assert {operation for operation, _ in training} <= {"check"}
        assert all(key.endswith("fault/notes") for _, key in training)


def meeting(ranks):
    """What each of so many ranks asks to meet."""
    store, asked = dist.HashStore(), {}

    def come(rank):
        counting = CountingStore(store)
        meet(counting, replica=rank, ranks=ranks, statement="gloo", limit_s=60)
        asked[rank] = len(counting.asked)

    with ThreadPoolExecutor(ranks) as pool:
        list(pool.map(come, range(ranks)))
    return Counter(asked.values())


@pytest.mark.parametrize("ranks", [2, 5, 40])
def test_a_meeting_takes_each_rank_the_same_few_operations_however_many_come(ranks):
    assert meeting(ranks) == {4: ranks - 1, 6: 1}


def test_who_did_not_come_is_found_in_two_operations(monkeypatch):
    store = CountingStore(dist.HashStore())
    others = [
        GroupPool(store=store, replica=replica, replicas=40, timeout_s=1) for replica in (7, 21)
    ]
    monkeypatch.setattr(group_pool, "make_transport", None)
    barrier, found = threading.Barrier(2), []

    def connect(pool):
        barrier.wait()
        with pytest.raises(GroupFormationError) as error:
            pool.get((7, 21))
        found.append(error.value.culprits)

    with ThreadPoolExecutor(2) as ranks:
        list(ranks.map(connect, others))
    assert found == [tuple(r for r in range(40) if r not in (7, 21))] * 2
    after = [key for operation, key in store.asked if operation == "wait"]
    assert len(after) == 2, "a rank waits inside the store, once"
    assert len(store.asked) <= 2 * (CONNECTING + 2)


def test_notes_of_a_failure_are_read_at_once_whoever_wrote_them():
    store = CountingStore(dist.HashStore())
    boards = [FaultBoard(store, replica=replica) for replica in range(100)]
    for replica in range(99):
        boards[replica].report(replica + 1)
    store.asked.clear()
    assert boards[0].culprits(range(100), 1, grace_s=0) == (99,)
    assert Counter(operation for operation, _ in store.asked) == {"check": 1, "get": 1}


def test_later_notes_take_the_place_of_earlier_ones():
    store = dist.HashStore()
    for replica, awaited in ((1, None), (2, 1), (1, 3)):
        FaultBoard(store, replica=replica).report(awaited)
    assert FaultBoard(store, replica=0).culprits(range(4), 2, grace_s=0) == (3,)
