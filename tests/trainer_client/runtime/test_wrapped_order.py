"""DDP, FSDP2 and the runtime talk in one order on all replicas, over however many communicators.

What a rank posts is noted as it happens, over gloo, torch's collectives among it. Then all of it is
replayed (``posted_order.py``) on a device that does one thing after the other: each rank finishes
what it has posted before it begins the next, whichever communicator that is on. Where this comes
through, all replicas have one order in common, and no device that runs more at once can wait for
ever: the earliest of what is not done has nothing before it on any rank.
"""

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from tests.trainer_client.runtime.posted_order import Post, Wait, stuck
from tests.trainer_client.runtime.random_steps import (
    make_shard,
    random_plan,
    random_samples,
    wrapped,
)
from trainer_client.runtime import GroupPool, PeerGroup, evaluate_step, run_step

SUMS = ("post_sum", "post_least", "gather")


class OneQueue(TorchDispatchMode):
    """What this rank posts while it is entered, each waited for at once."""

    def __init__(self, rank):
        super().__init__()
        self.rank, self.posts = rank, []
        PeerGroup.post = self._noting(PeerGroup.post, messages)
        for name in SUMS:
            setattr(PeerGroup, name, self._noting(getattr(PeerGroup, name), name))

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if operation.namespace == "c10d":
            boxed = next(each for each in args if isinstance(each, torch.ScriptObject))
            ranks = dist.get_process_group_ranks(dist.ProcessGroup.unbox(boxed))
            self._note(f"torch {ranks}", ranks.index(self.rank), len(ranks), str(operation))
        return operation(*args, **(kwargs or {}))

    def _noting(self, post, batch_of):
        def noted(group, *given, **named):
            batch = batch_of if isinstance(batch_of, str) else batch_of(group, *given)
            if group.size > 1 and batch:
                self._note("the pool", self.rank, dist.get_world_size(), batch)
            return post(group, *given, **named)

        return noted

    def _note(self, communicator, place, ranks, batch):
        number = len(self.posts)
        self.posts += [Post(number, communicator, place, ranks, batch), Wait(number)]


def messages(group, sends, receives):
    """What goes to whom, by their places in the pool."""
    batches = {"send": sends, "recv": receives}
    return [
        (kind, group.members[peer])
        for kind, batch in batches.items()
        for tensor, peer in batch
        if tensor.numel()
    ]


def queues(rank, size, cases):
    found = {}
    queue = OneQueue(rank)
    with GroupPool(timeout_s=60) as pool:
        for how, seed, frozen, ahead in cases:
            samples = random_samples(seed)
            shard = make_shard(
                samples, random_plan(samples, size, (1, 2, 3), seed), size, rank, seed
            )
            model = wrapped(how, frozen)
            queue.posts = []
            with queue:
                evaluate_step(model, shard, pool)
                for _ in range(2):  # DDP makes its buckets anew in the second
                    run_step(model, shard, pool, features_ahead=ahead)
            found[how, seed, frozen, ahead] = queue.posts
    return found


@pytest.mark.parametrize("ahead", [True, False])
def test_wrappers_and_the_runtime_post_in_one_order_that_all_replicas_share(world, ahead):
    kinds = (("ddp", 11, ()), ("fsdp", 13, ("vision",)), ("fsdp", 11, ()), ("hsdp", 10, ()))
    cases = [(*kind, ahead) for kind in kinds]
    answers = world(queues, 4, cases)
    for case in cases:
        of_ranks = {rank: answer[case] for rank, answer in answers.items()}
        posts = [each for queue in of_ranks.values() for each in queue if isinstance(each, Post)]
        communicators = {post.communicator for post in posts}
        assert len(communicators) == (5 if case[0] == "hsdp" else 2), "theirs, and the pool's"
        assert not stuck(of_ranks), case


class FirstUses(TorchDispatchMode):
    """Whether anything had been computed when a group of torch's was first used: then NCCL makes
    its communicator."""

    def __init__(self):
        super().__init__()
        self.computed, self.late = False, {}

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if operation.namespace == "c10d":
            boxed = next(each for each in args if isinstance(each, torch.ScriptObject))
            ranks = tuple(dist.get_process_group_ranks(dist.ProcessGroup.unbox(boxed)))
            self.late.setdefault(ranks, self.computed)
        self.computed |= operation in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return operation(*args, **(kwargs or {}))


def first_uses(rank, size):
    found = {}
    samples = random_samples(3)
    shard = make_shard(samples, random_plan(samples, size, (1, 2), 3), size, rank, 3)
    with GroupPool(timeout_s=60) as pool:
        for how in ("ddp", "fsdp", "hsdp"):
            with FirstUses() as uses:
                run_step(wrapped(how, ()), shard, pool)
            assert uses.computed
            found[how] = uses.late
        made = pool.communicators
    return found, made


def test_wrappers_communicators_are_made_before_a_step_computes(world):
    for rank, (found, made) in world(first_uses, 4).items():
        everyone = (0, 1, 2, 3)
        assert found["ddp"] == found["fsdp"] == {everyone: False}
        assert len(found["hsdp"]) == 2
        assert all(rank in ranks for ranks in found["hsdp"])
        assert not any(found["hsdp"].values())
        assert made == 1


def test_two_communicators_in_other_orders_are_found():
    batches = [("torch", "all-gather"), ("the pool", "all-reduce")]
    queues = {}
    for rank, order in enumerate((batches, batches[::-1])):
        queues[rank] = [
            each
            for number, (communicator, batch) in enumerate(order)
            for each in (Post(number, communicator, rank, 2, batch), Wait(number))
        ]
    assert set(stuck(queues)) == {0, 1}
