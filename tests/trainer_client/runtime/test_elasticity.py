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


def losses_of_ranks(rank, size, how, path):
    shards = [of[rank] for of in torch.load(path, weights_only=False)]
    model = wrapped(how, ())
    optimizer, losses = optimizer_of(model), []
    with GroupPool(timeout_s=60) as pool:
        for shard, upcoming in zip(shards, [*shards[1:], None], strict=True):
            losses.append(run_step(model, shard, pool, upcoming=upcoming).loss)
            optimizer.step()
            optimizer.zero_grad()
    return losses


def test_the_same_global_batches_give_one_loss_curve_on_any_number_of_ranks(world, tmp_path):
    curves, degrees = {}, {}
    for ranks, how in ((2, "plain"), (3, "ddp"), (4, "fsdp")):
        samples, shards = planned_steps(ranks, STEPS, memory_tokens=560)
        path = tmp_path / f"shards{ranks}.pt"
        torch.save(shards, path)
        answers = world(losses_of_ranks, ranks, how, str(path))
        assert len({tuple(losses) for losses in answers.values()}) == 1, "ranks disagree"
        curves[ranks] = answers[0]
        degrees[ranks] = [of[0].plan.degrees for of in shards]
    model = make_model(())
    optimizer, curves[1] = optimizer_of(model), []
    for held in samples:
        curves[1].append(single_process(model, held)[0])
        optimizer.step()
        optimizer.zero_grad()
    for ranks in (2, 3, 4):
        assert curves[ranks] == pytest.approx(curves[1], rel=1e-9), ranks
    assert curves[1][-1] < curves[1][0]
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
