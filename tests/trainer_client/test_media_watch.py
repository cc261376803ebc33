"""A trainer that takes steps with images or sound and never looks at them is told so, once; no
other is."""

import warnings
from dataclasses import replace

import pytest
import torch

from trainer_client import MediaNotRead
from trainer_client.media_watch import LOOKAHEAD_STEPS, MediaWatch
from trainer_client.runtime import GroupPool, forward_microbatch


def media_notices(train):
    """What `train()` was told, whatever the filters of tests say."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        train()
    return [str(w.message) for w in told if issubclass(w.category, MediaNotRead)]


def tokens_only(dataset, *, commits=True):
    for shard in dataset:
        for mb in shard.microbatches:
            mb.input_ids.sum() + mb.labels.sum() + mb.position_ids.sum()
        if commits:
            dataset.commit(shard.step)


@pytest.mark.parametrize("commits", [True, False])
def test_a_trainer_of_tokens_alone_is_told_once_what_it_leaves_out(service, caplog, commits):
    dataset = service.dataset(rank=1)
    told = media_notices(lambda: tokens_only(dataset, commits=commits))
    assert [" vision " in text for text in told] == [True, False]
    for text, modality in zip(told, ("vision", "audio"), strict=True):
        assert "rank 1 of job 'vlm-sft'" in text
        assert f"{1 if commits else 4} {modality} items" in text
        assert f"mb.{modality}.items" in text
        assert "run_step" in text
        assert "leave `media` out of ShardDataset(parts=...)" in text
    assert [record.getMessage() for record in caplog.records if "media" in record.msg] == told


def test_the_notice_comes_with_the_commit_of_the_first_step_that_had_media(service):
    dataset = service.dataset()
    shards = iter(dataset)
    shard = next(shards)
    with pytest.warns(MediaNotRead, match=r"1 vision items for step 0") as told:
        dataset.commit(shard.step)
    assert told[0].filename == __file__, "it points at the trainer's own line"
    shards.close()


@pytest.mark.parametrize("read", ["items", "exchange", "shapes"])
def test_a_trainer_that_reads_a_medium_is_told_of_the_other_alone(service, read):
    def train(dataset):
        for shard in dataset:
            for mb in shard.microbatches:
                if mb.vision is not None:
                    getattr(mb.vision, read)
            dataset.commit(shard.step)

    told = media_notices(lambda: train(service.dataset(rank=1)))
    assert len(told) == 1
    assert "mb.audio" in told[0]


def test_ranks_that_no_item_came_to_are_told_nothing(service):
    for parts in (("tokens", "labels"), ("labels",), ()):
        dataset = service.dataset(parts=parts)
        assert (
            media_notices(lambda dataset=dataset: [dataset.commit(s.step) for s in dataset]) == []
        )
    # Rank 0's sound is encoded elsewhere: only its images count.
    told = media_notices(lambda: tokens_only(service.dataset(rank=0)))
    assert len(told) == 1
    assert "vision" in told[0]


def test_a_job_without_media_is_told_nothing(service):
    def no_phases(shard):
        for mb in shard.microbatches:
            mb.phases.clear()
        shard.parts = [part for part in shard.parts if not part.items]

    service.coordinator.edit = no_phases
    assert media_notices(lambda: tokens_only(service.dataset())) == []


def test_copies_and_shards_looked_at_ahead_are_no_reading(service):
    dataset = service.dataset(device="meta")

    def train():
        for shard in dataset:
            dataset.peek()
            moved = replace(shard.to("cpu") if shard.step < 0 else shard.to("meta"), wait_s=1.0)
            [replace(mb, labels=mb.labels) for mb in moved.microbatches]
            dataset.commit(shard.step)

    assert len(media_notices(train)) == 1


def test_reading_a_copy_on_the_device_is_reading(service):
    def train(dataset):
        for shard in dataset:
            for mb in shard.to("meta").microbatches:
                _ = mb.vision and mb.vision.items
                _ = mb.audio and mb.audio.items
            dataset.commit(shard.step)

    assert media_notices(lambda: train(service.dataset(rank=1))) == []


class Recorder(torch.nn.Module):
    """What the runtime asks of a model, computing next to nothing."""

    def encode(self, modality, batch):
        return torch.zeros(sum(batch.exchange.send_splits), 1)

    def dummy_item(self, modality):
        return torch.zeros(1)

    def encoder_trains(self, modality):
        return False

    def decode(self, microbatch, features, attention):
        return torch.zeros(microbatch.local_tokens or 1, 2)


def alone(shard):
    """The scripted step as one replica has it: everything it encodes is for itself."""
    for mb in shard.microbatches:
        mb.cp_group[:], mb.cp_rank = [0], 0
        for phase in mb.phases:
            rows = len(phase.send_rows)
            phase.send_splits = phase.recv_splits = [rows]
            phase.recv_positions = [2, 5][:rows]
    whole = shard.microbatches[0]
    whole.cu_seqlens, whole.lengths, whole.sample_ids = [0, 8], [8], [7]
    shard.replicas = 1
    shard.summary |= {"pack_degree": [1, 1], "pack_replicas": [0, 0]}


def test_the_runtime_reads_what_it_encodes(service):
    service.coordinator.edit = alone

    def train(dataset):
        with GroupPool() as groups:
            for shard in dataset:
                assert not shard.microbatches[0].vision.reads
                for mb in shard.microbatches:
                    forward_microbatch(Recorder(), mb, groups)
                dataset.commit(shard.step)

    assert media_notices(lambda: train(service.dataset())) == []


def test_a_loader_that_gathers_many_steps_before_the_first_is_trained_is_not_accused(make_service):
    shards = iter(make_service(steps=3).dataset())
    shard = next(shards)
    watch = MediaWatch(job="j", rank=0)
    for step in range(LOOKAHEAD_STEPS):
        watch.hand(replace(shard, step=step))
        watch.asked(step)
    watch.hand(replace(shard, step=LOOKAHEAD_STEPS))
    with pytest.warns(MediaNotRead, match=f"steps 0 to {LOOKAHEAD_STEPS}"):
        watch.asked(LOOKAHEAD_STEPS)
    shards.close()
