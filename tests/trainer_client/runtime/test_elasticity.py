"""The engine's own steps: one loss curve at any world size, and plain DDP's with nothing on."""

import pytest
import torch

from tests.trainer_client.runtime.elastic_ranks import (
    against_plain_ddp,
    losses_of_ranks,
    optimizer_of,
)
from tests.trainer_client.runtime.planned_steps import planned_steps
from tests.trainer_client.runtime.random_steps import make_model, single_process

STEPS = 5


def losses_of_one(steps):
    """Loss curve of a single process that holds all samples of every step."""
    model, losses = make_model(()), []
    optimizer = optimizer_of(model)
    for held in steps:
        losses.append(single_process(model, held)[0])
        optimizer.step()
        optimizer.zero_grad()
    return losses


def test_the_same_global_batches_give_one_loss_curve_on_any_number_of_ranks(world, tmp_path):
    paths, degrees = {}, {}
    for ranks in (2, 3, 4):
        samples, shards = planned_steps(ranks, STEPS, memory_tokens=560)
        degrees[ranks] = [of[0].plan.degrees for of in shards]
        paths[ranks] = str(tmp_path / f"shards{ranks}.pt")
        torch.save(shards, paths[ranks])
    expected = losses_of_one(samples)
    answers = world(losses_of_ranks, 4, paths)
    for rank, curves in answers.items():
        assert sorted(curves) == [ranks for ranks in paths if ranks > rank]
        for losses in curves.values():
            assert losses == pytest.approx(expected, rel=1e-9)
    assert expected[-1] < expected[0]
    assert degrees[2] != degrees[3] != degrees[4]
    assert any(degree > 1 for of in degrees[4] for degree in of)


def test_clips_that_several_ranks_encode_give_the_loss_curve_of_a_single_process(world, tmp_path):
    samples, shards = planned_steps(4, STEPS, memory_tokens=560, clips=True)
    encoders = [
        [
            rank
            for rank, shard in enumerate(of)
            if any(mb.vision and mb.vision.items for mb in shard.microbatches)
        ]
        for of in shards
    ]
    assert all(len(ranks) == 4 for ranks in encoders)
    torch.save(shards, tmp_path / "shards.pt")
    expected = losses_of_one(samples)
    answers = world(losses_of_ranks, 4, {4: str(tmp_path / "shards.pt")})
    for curves in answers.values():
        assert curves[4] == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("how", ["ddp", "plain"])
def test_with_every_switch_off_a_step_is_that_of_plain_ddp(world, tmp_path, how):
    samples, shards = planned_steps(
        3, 1, strategy="random", static_degree=1, memory_tokens=1200, batch=18
    )
    assert set(shards[0][0].plan.degrees) == {1}
    assert not any(mb.idle for shard in shards[0] for mb in shard.microbatches)
    torch.save(shards, tmp_path / "shards.pt")
    torch.save(samples[0], tmp_path / "samples.pt")
    paths = (str(tmp_path / "shards.pt"), str(tmp_path / "samples.pt"))
    for loss, gradients in world(against_plain_ddp, 3, how, *paths).values():
        assert loss <= 1e-13
        assert gradients <= 1e-12
