"""Messages through host memory give what gloo gives: ranks of one GPU can train together."""

import torch
import torch.distributed as dist

from tests.trainer_client.runtime.random_steps import (
    make_model,
    make_shard,
    random_plan,
    random_samples,
    single_process,
    worst_difference,
)
from trainer_client.runtime import GroupPool, run_step
from trainer_client.runtime.host_transport import HostTransport


def always_through_the_host():
    """As for tensors of a GPU, also for those of the host."""
    HostTransport.__init__.__kwdefaults__["always"] = True


def messages(rank, size):
    always_through_the_host()
    store = dist.PrefixStore("messages/", dist.distributed_c10d._get_default_store())
    transport = HostTransport(dist.ProcessGroupGloo(store, rank, size, dist.default_pg_timeout))
    seen = {}
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.uint8):
        ours = torch.arange(6).view(2, 3).to(dtype) + rank
        theirs = torch.zeros_like(ours)
        sending = transport.send([ours], 1 - rank, 5)
        ours += 100  # what is sent is a copy
        receiving = transport.recv([theirs], 1 - rank, 5)
        receiving.wait()
        sending.wait()
        assert receiving.is_completed()
        total = torch.full((2,), float(rank + 1)).to(dtype)
        transport.allreduce([total], dist.ReduceOp.SUM).wait()
        gathered = [[torch.zeros(2, dtype=dtype) for _ in range(size)]]
        transport.allgather(gathered, [torch.full((2,), rank + 3).to(dtype)]).wait()
        seen[dtype] = theirs.tolist(), total.tolist(), [each.tolist() for each in gathered[0]]
    return seen


def test_messages_of_every_type_arrive_and_are_summed(world):
    for rank, seen in world(messages, 2).items():
        assert len(seen) == 5
        for theirs, total, gathered in seen.values():
            assert theirs == [[k + 1 - rank for k in range(row, row + 3)] for row in (0, 3)]
            assert total == [3, 3]
            assert gathered == [[3, 3], [4, 4]]


def step(rank, size):
    always_through_the_host()
    samples = random_samples(5)
    shard = make_shard(samples, random_plan(samples, size, (2, 3), 5), size, rank, 5)
    model = make_model(())
    with GroupPool(timeout_s=60) as pool:
        result = run_step(model, shard, pool)
    expected = single_process(make_model(()), samples)
    return worst_difference(result, model, *expected), shard.plan.degrees


def test_a_whole_step_through_host_memory_has_the_gradients_of_one_process(world):
    for (parameter, difference), degrees in world(step, 3).values():
        assert max(degrees) > 1
        assert difference <= 1e-10, parameter


def test_tensors_of_the_host_are_handed_to_gloo_as_they_are():
    class Gloo:
        def send(self, tensors, peer, tag):
            return tensors, peer, tag

    tensor = torch.ones(2)
    sent, *rest = HostTransport(Gloo()).send([tensor], 1, 2)
    assert sent[0] is tensor
    assert rest == [1, 2]
