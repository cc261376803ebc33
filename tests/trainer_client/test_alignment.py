"""Rows are a multiple of what was asked for, and what was there before is untouched."""

from dataclasses import fields

import pytest
import torch

from trainer_client import BadArgument
from trainer_client.alignment import ADDED_SAMPLE, aligned
from trainer_client.parts import WantedParts
from trainer_client.positions import MropeRule
from trainer_client.shard import IGNORED_LABEL
from trainer_client.synthetic import (
    SyntheticDataset,
    SyntheticJob,
    SyntheticSample,
    SyntheticStep,
)

LENGTHS = (5, 12, 1, 9)
WAVES = [[((0, 1), (0, 1)), ((2,), (2,))], [((1,), (3,))]]  # replicas 0 and 2 idle at last


def step(**options):
    samples = [
        SyntheticSample(
            id=40 + number,
            input_ids=torch.arange(1, length + 1),
            labels=torch.arange(length),
            weight=0.5,
        )
        for number, length in enumerate(LENGTHS)
    ]
    return SyntheticStep(samples, WAVES, replicas=3, **options)


@pytest.mark.parametrize("multiple", [3, 8, 16])
@pytest.mark.parametrize("replica", range(3))
def test_rows_are_added_behind_what_was_there(multiple, replica):
    before = step(mrope=MropeRule()).shard(replica)
    after = aligned(before, multiple)
    for old, new in zip(before.microbatches, after.microbatches, strict=True):
        assert (new.rows_multiple, new.idle, new.cp_group) == (multiple, old.idle, old.cp_group)
        assert new.local_tokens == len(new.input_ids)
        assert new.local_tokens % multiple == 0
        assert (new.local_tokens == 0) == old.idle
        for name in ("input_ids", "labels", "position_ids", "mrope", "weights"):
            kept = getattr(new, name)[..., : old.local_tokens]
            assert torch.equal(kept, getattr(old, name)), name
        for name in ("cu_seqlens", "lengths", "sample_ids"):
            one, other = getattr(old, name), getattr(new, name)
            assert other.dtype == one.dtype
            assert torch.equal(other[: len(one)], one), name
        added = new.local_tokens - old.local_tokens
        assert (new.labels[old.local_tokens :] == IGNORED_LABEL).all()
        degree = len(new.cp_group)
        assert added % 2 == 0 or degree == 1, "two chunks of equal size"
        assert int(new.cu_seqlens[-1]) == int(old.cu_seqlens[-1]) + added * degree
        assert new.sample_ids.tolist()[len(old.sample_ids) :] == [ADDED_SAMPLE] * (added > 0)
        assert new.loss_tokens() == old.loss_tokens()


def test_positions_of_added_rows_are_cut_as_those_of_any_sample():
    of_members = [aligned(step().shard(replica), 16).microbatches[0] for replica in (0, 1)]
    added = [mb.position_ids[-int(mb.lengths[-1]) // 2 :].tolist() for mb in of_members]
    assert sorted(added[0] + added[1]) == list(range(int(of_members[0].lengths[-1])))


def test_what_a_rank_did_not_fetch_stays_absent():
    shard = step().shard(1, wanted=WantedParts.named(["labels"]))
    for microbatch in aligned(shard, 8).microbatches:
        assert not hasattr(microbatch, "input_ids")
        assert len(microbatch.labels) % 8 == 0


def test_a_shard_that_fits_is_left_as_it_is():
    shard = step().shard(0)
    assert aligned(shard, 1) is shard
    fitting = aligned(shard, 8)
    for one, other in zip(fitting.microbatches, aligned(fitting, 8).microbatches, strict=True):
        for name in (field.name for field in fields(one) if field.name != "rows_multiple"):
            assert getattr(one, name) is getattr(other, name)


@pytest.mark.parametrize("device", [None, "meta"])
def test_a_dataset_aligns_what_it_hands_out(device):
    job = SyntheticJob(
        replicas=2, steps=2, memory_tokens=64, degrees=(2, 1), sample_tokens=(3, 60), vocabulary=9
    )
    with SyntheticDataset(job, rank=0, device=device, rows_multiple=16) as dataset:
        for shard in dataset:
            for microbatch in shard.microbatches:
                assert microbatch.input_ids.shape[0] % 16 == 0
                assert bool(microbatch.layouts) == (device is not None and not microbatch.idle)


def test_a_multiple_that_is_none_is_refused():
    with pytest.raises(BadArgument, match="rows_multiple is 0; give 1 or more"):
        aligned(step().shard(0), 0)
