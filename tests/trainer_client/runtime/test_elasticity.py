"""The engine's own steps: one loss curve at any world size, and plain DDP's with nothing on."""

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from tests.trainer_client.runtime.planned_steps import planned_steps
from tests.trainer_client.runtime.random_steps import (
    make_model,
    sample_logits,
    single_process,
    whole,
    wrapped,
)
from trainer_client.runtime import GroupPool, run_step

STEPS = 5


def optimizer_of(model):
    return torch.optim.AdamW(model.parameters(), lr=3e-3)


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
            for shard, upcoming in zip(shards, [*shards[1:], None], strict=True):
                losses.append(run_step(model, shard, pool, upcoming=upcoming).loss)
                optimizer.step()
                optimizer.zero_grad()
        curves[replicas] = losses
    return curves


def test_the_same_global_batches_give_one_loss_curve_on_any_number_of_ranks(world, tmp_path):
    paths, degrees = {}, {}
    for ranks in (2, 3, 4):
        samples, shards = planned_steps(ranks, STEPS, memory_tokens=560)
        degrees[ranks] = [of[0].plan.degrees for of in shards]
        paths[ranks] = str(tmp_path / f"shards{ranks}.pt")
        torch.save(shards, paths[ranks])
    model, expected = make_model(()), []
    optimizer = optimizer_of(model)
    for held in samples:
        expected.append(single_process(model, held)[0])
        optimizer.step()
        optimizer.zero_grad()
    answers = world(losses_of_ranks, 4, paths)
    for rank, curves in answers.items():
        assert sorted(curves) == [ranks for ranks in paths if ranks > rank]
        for losses in curves.values():
            assert losses == pytest.approx(expected, rel=1e-9)
    assert expected[-1] < expected[0]
    assert degrees[2] != degrees[3] != degrees[4]
    assert any(degree > 1 for of in degrees[4] for degree in of)


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


@pytest.mark.parametrize("how", ["ddp", "plain"])
def test_with_every_switch_off_a_step_is_that_of_plain_ddp(world, tmp_path, how):
    samples, shards = planned_steps(
        3, 1, strategy="random", static_degree=1, memory_tokens=1200, batch=12
    )
    assert set(shards[0][0].plan.degrees) == {1}
    assert not any(mb.idle for shard in shards[0] for mb in shard.microbatches)
    torch.save(shards, tmp_path / "shards.pt")
    torch.save(samples[0], tmp_path / "samples.pt")
    paths = (str(tmp_path / "shards.pt"), str(tmp_path / "samples.pt"))
    for loss, gradients in world(against_plain_ddp, 3, how, *paths).values():
        assert loss <= 1e-13
        assert gradients <= 1e-12
