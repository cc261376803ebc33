"""Synthetic shards are those that the service would send of the same samples and plan."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from dataservice.core.orders import RankShard
from dataservice.engine.ready_step import step_summary
from dataservice.engine.shards import columns_of, cut_step
from dataservice.serving.wire_shards import rank_shard_to_proto
from tests.trainer_client.as_service import in_turn, plan_of, sent_by_service
from trainer_client import BadArgument, MisuseError, NotFetched, RankOutOfRange
from trainer_client.assemble import assemble_shard
from trainer_client.positions import MropeRule
from trainer_client.synthetic import (
    SyntheticDataset,
    SyntheticItem,
    SyntheticJob,
    SyntheticMedia,
    SyntheticSample,
    SyntheticStep,
    synthetic_shards,
)

MIXED = SyntheticMedia(
    images=0.8, clips=0.5, sounds=0.5, side_px=(28, 90), clip_frames=(2, 6), sound_s=(0.1, 0.6)
)
JOB = SyntheticJob(
    name="vlm-sft",
    replicas=3,
    steps=3,
    microbatches=2,
    memory_tokens=120,
    degrees=(2, 1),
    sample_tokens=(5, 100),
    vocabulary=50,
    loss_weights=True,
    media=MIXED,
    mrope=MropeRule(tokens_per_second=2.0),
    seed=4,
)


def assert_same(ours, theirs, where="shard"):
    """Types, shapes and values of every field, however deep."""
    assert type(ours) is type(theirs), where
    if dataclasses.is_dataclass(ours):
        for field in dataclasses.fields(ours):
            mine, other = (getattr(of, field.name, "absent") for of in (ours, theirs))
            assert_same(mine, other, f"{where}.{field.name}")
    elif isinstance(ours, torch.Tensor):
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape), where
        assert torch.equal(ours, theirs), where
    elif isinstance(ours, np.ndarray):
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape), where
        assert np.array_equal(ours, theirs, equal_nan=ours.dtype.kind == "f"), where
    elif isinstance(ours, tuple | list):
        assert len(ours) == len(theirs), where
        for place, pair in enumerate(zip(ours, theirs, strict=True)):
            assert_same(*pair, f"{where}[{place}]")
    elif isinstance(ours, float):
        assert ours == pytest.approx(theirs, rel=1e-12), where
    else:
        assert ours == theirs, where


def test_every_field_is_that_of_the_shard_which_the_service_sends():
    samples = JOB.step(1).samples
    half = len(samples) // 2
    # A shared pack beside an idle replica that may encode; then all three, in another order.
    waves = [
        [((2, 0), range(half))],
        [((1,), [half]), ((0, 2), range(half + 1, len(samples)))],
    ]
    ours = SyntheticStep(
        samples, waves, replicas=3, step=1, job="vlm-sft", encoders=in_turn, mrope=JOB.mrope
    )
    modalities = {item.modality for sample in samples for item in sample.items}
    assert modalities == {"vision", "audio"}
    for replica, theirs in enumerate(sent_by_service(ours, waves)):
        assert_same(ours.shard(replica), theirs)


def test_the_same_seed_gives_the_same_steps_and_another_one_others():
    for mine, again in zip(synthetic_shards(JOB, 2), synthetic_shards(JOB, 2), strict=True):
        assert_same(mine, again)
    other = synthetic_shards(dataclasses.replace(JOB, seed=5), 2)[0]
    assert other.plan.digest != synthetic_shards(JOB, 2)[0].plan.digest


def test_replicas_agree_on_the_plan_and_on_who_sends_what_to_whom():
    shards = synthetic_shards(JOB)
    assert len({shard.plan.digest for shard in shards}) == 1
    for wave in zip(*(shard.microbatches for shard in shards), strict=True):
        for modality in ("vision", "audio"):
            batches = [getattr(mb, modality) for mb in wave]
            assert len({batch is None for batch in batches}) == 1
            if batches[0] is not None:
                sent = np.array([batch.exchange.send_splits for batch in batches])
                got = np.array([batch.exchange.recv_splits for batch in batches])
                assert np.array_equal(sent, got.T)


@pytest.mark.parametrize("degrees", [(1,), (2,), (4, 2, 1), (3,), (8,)])
def test_groups_have_the_given_degrees_and_packs_fill_their_memory(degrees):
    job = SyntheticJob(replicas=8, memory_tokens=64, degrees=degrees, sample_tokens=(4, 60))
    shard = synthetic_shards(job)[0]
    first = shard.plan.waves[0]
    assert [group.degree for group in first.groups][: len(degrees)] == list(degrees)
    assert len(first.idle) < min(degrees)
    for group in shard.plan.groups:
        assert 64 * group.degree - 2 * group.degree < group.tokens <= 64 * group.degree
    for mb in (mb for each in synthetic_shards(job) for mb in each.microbatches if not mb.idle):
        degree = len(mb.cp_group)
        assert degree == 1 or int(mb.lengths[0]) > 64 * (degree - 1)
    assert len({group.replicas for group in shard.plan.groups if group.degree > 1}) != 1 or (
        degrees in ((1,), (8,))
    )


@pytest.mark.parametrize("tokens", [(None, None), (3, None), (None, 3), (40, 3), (63, 62)])
def test_the_tokens_of_features_stand_where_items_do_and_nowhere_else(tokens):
    job = dataclasses.replace(JOB, vocabulary=64, image_token=tokens[0], sound_token=tokens[1])
    image, sound = (
        last if given is None else given for given, last in zip(tokens, (62, 63), strict=True)
    )
    others = set()
    for sample in job.step(0).samples:
        expected = torch.full_like(sample.input_ids, -1)
        for item in sample.items:
            place = slice(item.position, item.position + item.tokens)
            expected[place] = image if item.modality == "vision" else sound
        assert torch.equal(sample.input_ids == image, expected == image)
        assert torch.equal(sample.input_ids == sound, expected == sound)
        others |= set(sample.input_ids[expected < 0].tolist())
    assert len(others) > 50
    assert others <= set(range(64))


def test_a_loop_over_the_dataset_is_the_loop_over_a_service():
    def loop(dataset, stop_after=None):
        seen = []
        with dataset:
            for shard in dataset:
                seen.append(shard.step)
                dataset.peek(wait=False)
                dataset.commit(shard.step, measured_s=0.1, phase_s={"llm": 0.1})
                if shard.step == stop_after:
                    break
        return seen

    first = SyntheticDataset(JOB, rank=2)
    assert loop(first, stop_after=0) == [0]
    second = SyntheticDataset(JOB, rank=2, prefetch_steps=1)
    second.load_state_dict(first.state_dict())
    assert loop(second) == [1, 2]
    assert second.state_dict() == {"version": 1, "job": "vlm-sft", "step": 3, "cursor": "3"}
    with pytest.raises(MisuseError, match="last step yielded is 2"):
        second.commit(3)


def test_a_loop_without_commits_stands_behind_what_it_was_handed():
    dataset = SyntheticDataset(JOB, rank=0)
    assert [shard.step for shard in dataset] == [0, 1, 2]
    assert dataset.state_dict()["step"] == 3


def test_what_a_rank_does_not_ask_for_stays_absent():
    (first, last) = (
        next(iter(SyntheticDataset(JOB, rank=rank, ranks_per_replica=2, parts=parts)))
        for rank, parts in ((2, ("inputs",)), (3, ("labels",)))
    )
    assert (first.replica, last.replica, first.rank, last.rank) == (1, 1, 2, 3)
    for mb in last.microbatches:
        assert mb.labels.numel() == mb.position_ids.numel()
        assert mb.vision is None
        with pytest.raises(NotFetched):
            _ = mb.input_ids
    with pytest.raises(NotFetched):
        _ = first.microbatches[0].labels


def sample_of(tokens, *items, number=0):
    ids = torch.arange(tokens)
    return SyntheticSample(id=number, input_ids=ids, labels=ids, items=items)


def item_at(position, tokens, modality="vision"):
    return SyntheticItem(modality=modality, values=torch.zeros(1), position=position, tokens=tokens)


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        (lambda: sample_of(5, item_at(3, 3)), "an item that ends at token 6"),
        (lambda: sample_of(9, item_at(3, 3), item_at(5, 1)), "the one before it ends at 6"),
        (lambda: sample_of(9, item_at(3, 3, "smell")), "items are of"),
        (lambda: SyntheticStep([sample_of(4)], [], replicas=1), "must be in one pack"),
        (
            lambda: SyntheticStep([sample_of(4)] * 2, [[((0,), [0]), ((0,), [1])]], replicas=2),
            r"names the replicas \[0, 0\]",
        ),
        (lambda: SyntheticJob(replicas=2, degrees=(3,)), "between 1 and the 2 replicas"),
        (lambda: SyntheticJob(sample_tokens=(9, 3)), "must be at least 1, and rise"),
        (lambda: SyntheticJob(memory_tokens=0), "0 memory_tokens"),
        (lambda: SyntheticJob(image_token=31_999), "image_token is 31999 and sound_token 31999"),
        (lambda: SyntheticJob(vocabulary=64, sound_token=64), r"of the vocabulary's 0\.\.63"),
        (lambda: JOB.step(3), "outside 0..2"),
        (lambda: JOB.step(0).shard(3), "outside 0..2"),
    ],
)
def test_what_makes_no_step_is_refused(wrong, complaint):
    with pytest.raises(BadArgument, match=complaint):
        wrong()


def test_a_rank_outside_the_job_is_refused():
    with pytest.raises(RankOutOfRange, match=r"outside 0\.\.2"):
        SyntheticDataset(JOB, rank=3)


def test_a_step_that_has_no_sample_left_reaches_every_rank():
    """Its plan has no wave, so that there is nothing to cut."""
    plan = plan_of(SimpleNamespace(step=0, replicas=3, samples=()), [])
    assert plan.waves == 0
    cut = cut_step(plan)
    for replica in range(3):
        of_rank = RankShard(
            job="job", attempt=1, step=0, rank=replica, replica=replica, plan_digest="d",
            cursor_after="1", loss_tokens=0, samples=0, predicted_s=0.0,
            columns=columns_of(cut, replica), ticket=None, summary=step_summary(plan, "d"),
        )  # fmt: skip
        assert assemble_shard(rank_shard_to_proto(of_rank), {}).microbatches == ()
