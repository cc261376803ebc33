"""Torch's backend for one rank alone: it notes what is posted, and every wait ends at once.

A rank's whole step runs so without the others. What arrives is zeros, and sums are as if all ranks
gave the same, so that the rank takes all the plans for equal.
"""

import torch.distributed as dist

from tests.trainer_client.runtime.posted_order import Post, Wait
from trainer_client.runtime import GroupPool, group_pool


class RecordedWork:
    def __init__(self, queue, number):
        self._queue, self._number = queue, number

    def wait(self):
        self._queue.append(Wait(self._number))


class RecordedTransport:
    """One communicator; all of a rank write to its one queue."""

    supports_coalescing = True

    def __init__(self, queue, name, place, ranks):
        self._queue, self._name, self._place, self._ranks = queue, name, place, ranks
        self._batch = None

    def _posted(self, batch):
        number = len(self._queue)
        self._queue.append(Post(number, self._name, self._place, self._ranks, batch))
        return RecordedWork(self._queue, number)

    def _start_coalescing(self):
        self._batch = []

    def _end_coalescing(self):
        batch, self._batch = self._batch, None
        return self._posted(batch)

    def send(self, tensors, peer, tag):
        self._batch.append(("send", peer))  # a message on its own fails: there is no batch

    def recv(self, tensors, peer, tag):
        tensors[0].zero_()
        self._batch.append(("recv", peer))

    def allreduce(self, tensors, operation):
        if operation == dist.ReduceOp.SUM:
            tensors[0].mul_(self._ranks)
        return self._posted("all-reduce")

    def allgather(self, gathered, tensors):
        for each in gathered[0]:
            each.copy_(tensors[0])
        return self._posted("all-gather")

    def shutdown(self):
        pass

    def abort(self):
        pass


class Recorder:
    """From here on, pools connect to nobody; `begin` starts the next rank's queue. `made`: the
    communicators of this rank so far, by name."""

    def __init__(self, monkeypatch):
        self._store = dist.HashStore()
        self._queue = []
        self.made = []
        make_pool = GroupPool.__init__

        def with_store(pool, *, store=None, **options):
            make_pool(pool, store=store or self._store, **options)

        monkeypatch.setattr(GroupPool, "__init__", with_store)
        monkeypatch.setattr(group_pool, "meet", lambda *_, **__: None)
        monkeypatch.setattr(group_pool, "part", lambda *_, **__: None)
        monkeypatch.setattr(group_pool, "make_transport", self._make_transport)

    def begin(self):
        self._store = dist.HashStore()
        self._queue = []
        self.made = []
        return self._queue

    def _make_transport(self, name, store, rank, ranks, timeout_s, device):
        # Its place in the store names a communicator, and is the same on all of its ranks.
        store.set("here", "")
        (place,) = (key for key in self._store.list_keys() if key.endswith("here"))
        store.delete_key("here")
        self.made.append(place)
        return RecordedTransport(self._queue, place, rank, ranks)
