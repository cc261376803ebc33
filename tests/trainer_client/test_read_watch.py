"""A loop that reads labels without their weights is refused; whoever reads both is not."""

from dataclasses import replace

import pytest
import torch

from trainer_client import LossWeightsNotRead
from trainer_client.read_watch import LOSS_WEIGHTS, ReadWatch
from trainer_client.shard import Microbatch, PlanSummary, Shard

TOKENS = 4


def shard_of(step, weights=None, labels=True):
    tokens = torch.arange(TOKENS)
    microbatch = Microbatch(
        wave=0, pack=0, cp_group=(0,), cp_rank=0, predicted_s=0.0, input_ids=tokens,
        labels=tokens if labels else None, position_ids=tokens,
        cu_seqlens=torch.tensor([0, TOKENS], dtype=torch.int32),
        lengths=torch.tensor([TOKENS]), sample_ids=torch.tensor([0]), weights=weights,
    )  # fmt: skip
    plan = PlanSummary(
        digest="", replicas=1, samples=1, loss_tokens=TOKENS, predicted_s=0.0, waves=(), stages=()
    )
    return Shard(
        job="j", attempt=1, step=step, rank=0, replica=0, cursor_after="", plan=plan,
        microbatches=(microbatch,), size_bytes=0,
    )  # fmt: skip


@pytest.fixture
def watch():
    return ReadWatch(LOSS_WEIGHTS, job="j", rank=3)


HALF = torch.full((TOKENS,), 0.5, dtype=torch.float64)


def test_labels_without_their_weights_are_refused_when_the_step_is_trained(watch):
    shard = shard_of(7, HALF)
    watch.hand(shard)
    assert shard.microbatches[0].labels is not None
    with pytest.raises(LossWeightsNotRead, match=r"'j'.* rank 3 trained step 7 .*mb\.loss_weights"):
        watch.trained(7)


def test_a_copy_on_another_device_counts_too(watch):
    shard = shard_of(7, HALF)
    watch.hand(shard)
    moved = shard.mapped(lambda tensor: tensor.clone())
    assert moved.microbatches[0].labels is not None
    with pytest.raises(LossWeightsNotRead):
        watch.trained(7)


def test_a_loop_that_reads_both_is_not_watched_any_more(watch):
    first, second = shard_of(0, HALF), shard_of(1, HALF)
    watch.hand(first)
    watch.hand(second)
    torch.testing.assert_close(first.microbatches[0].loss_weights, HALF)
    assert first.microbatches[0].labels is not None
    assert second.microbatches[0].labels is not None
    watch.trained(0)
    watch.trained(1)


def test_steps_without_weights_and_ranks_without_labels_are_left_alone(watch):
    plain, other_stage = shard_of(0), shard_of(1, HALF, labels=False)
    assert plain.microbatches[0].labels is not None
    assert getattr(other_stage.microbatches[0], "labels", None) is None
    watch.hand(plain)
    watch.hand(other_stage)
    watch.trained(1)


def test_an_idle_rank_that_only_counts_its_labels_is_left_alone(watch):
    shard = shard_of(0, torch.empty(0, dtype=torch.float64))
    idle = replace(shard.microbatches[0], pack=-1, labels=torch.empty(0, dtype=torch.int64))
    watch.hand(replace(shard, microbatches=(idle,)))
    assert idle.loss_tokens() == (0, 0.0)
    watch.trained(0)


def test_without_weights_every_token_weighs_1():
    weights = shard_of(0).microbatches[0].loss_weights
    assert torch.equal(weights, torch.ones(TOKENS, dtype=torch.float64))
