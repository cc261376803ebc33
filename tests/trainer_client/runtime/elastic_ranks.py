"""What the ranks of test_elasticity do, apart from it so that they need not import the planner."""

import torch
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from tests.trainer_client.runtime.random_steps import make_model, sample_logits, whole, wrapped
from trainer_client.runtime import GroupPool, run_step


def optimizer_of(model):
    """Not Adam, which would not mind gradients of a wrong size."""
    return torch.optim.SGD(model.parameters(), lr=0.3)


def losses_of_ranks(rank, size, paths):
    """Loss curve by number of replicas; the ranks behind those look on."""
    curves = {}
    for replicas, path in paths.items():
        if rank >= replicas:
            continue
        shards = [of[rank] for of in torch.load(path, weights_only=False)]
        model = wrapped("fsdp" if replicas == size else "plain", ())
        optimizer, losses = optimizer_of(model), []
        with GroupPool(replica=rank, replicas=replicas, lane=f"{replicas}", timeout_s=60) as pool:
            for shard in shards:
                losses.append(run_step(model, shard, pool).loss)
                optimizer.step()
                optimizer.zero_grad()
        curves[replicas] = losses
    return curves


class PlainStep(torch.nn.Module):
    """What a trainer without this package does: samples one by one, features in place."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, samples):
        return [sample_logits(self.model, sample) for sample in samples]


def against_plain_ddp(rank, size, how, path, batches):
    (shard,) = [of[rank] for of in torch.load(path, weights_only=False)]
    samples = {sample.id: sample for sample in torch.load(batches, weights_only=False)}
    with GroupPool(timeout_s=60) as pool:
        model = wrapped(how, ())
        result = run_step(model, shard, pool)
    plain = DistributedDataParallel(PlainStep(make_model(())), find_unused_parameters=True)
    total = sum(int((s.labels != -100).sum()) for s in samples.values())
    loss_sum = torch.zeros((), dtype=torch.float64)
    for number, microbatch in enumerate(shard.microbatches, start=1):
        held = [samples[k] for k in microbatch.sample_ids.tolist()]
        plain.require_backward_grad_sync = number == len(shard.microbatches)
        pairs = zip(plain(held), held, strict=True)
        loss = sum(cross_entropy(x, s.labels, reduction="sum") for x, s in pairs) / total
        (loss * size).backward()
        loss_sum += loss.detach()
    torch.distributed.all_reduce(loss_sum)
    found, expected = whole(model), plain.module.model
    differences = {
        name: float((a.grad - b.grad).norm() / b.grad.norm())
        for (name, a), b in zip(found.named_parameters(), expected.parameters(), strict=True)
    }
    return abs(result.loss - float(loss_sum)) / result.loss, max(differences.values())
