"""Drawn steps train as one process does that goes through the same samples."""

import types

import pytest
import torch

from tests.trainer_client.runtime.random_steps import (
    ITEM_WIDTH,
    VOCABULARY,
    Model,
    single_process,
    worst_difference,
)
from trainer_client.device import DeviceCopier, PlainQueue
from trainer_client.runtime import GroupPool, run_step
from trainer_client.synthetic import SyntheticDataset, SyntheticJob, SyntheticMedia

MEDIA = SyntheticMedia(images=0.7, clips=0.4, sounds=0.5, side_px=(28, 84), sound_s=(0.1, 0.5))
FACTOR = MEDIA.patch * MEDIA.merge


def rows_of(values):
    """An item as rows of numbers, one a token: what an encoder of this test sees of it."""
    if values.dim() == 1:
        parts = values.view(-1, MEDIA.samples_per_token)
        return torch.stack([parts.mean(1), parts.std(1), parts.amax(1)], dim=1).double()
    frames, height, width, _ = values.shape
    depth = min(frames, MEDIA.temporal_patch)
    shape = frames // depth, depth, height // FACTOR, FACTOR, width // FACTOR, FACTOR, 3
    tokens = values.double().view(shape).permute(0, 2, 4, 1, 3, 5, 6).flatten(3).flatten(0, 2)
    low, high = tokens.mean(1), tokens.std(1)
    return torch.stack([low, high, low + high, low - high, low * high], dim=1) / 256


class SeesPixels(Model):
    def encode(self, modality, batch):
        given = [rows_of(values) for values in batch.items]
        return self.encoders[modality](torch.cat(given)[:, : ITEM_WIDTH[modality]])

    def dummy_item(self, modality):
        if modality == "audio":
            return torch.zeros(MEDIA.samples_per_token)
        return torch.zeros(1, FACTOR, FACTOR, 3, dtype=torch.uint8)


def new_model():
    torch.manual_seed(7)
    return SeesPixels().double()


def alone(samples):
    """The same samples as `single_process` takes them."""
    return [
        types.SimpleNamespace(
            ids=sample.input_ids,
            labels=sample.labels,
            weight=sample.weight,
            items=[(item.modality, rows_of(item.values), item.position) for item in sample.items],
        )
        for sample in samples
    ]


def train(rank, size, jobs):
    worst = []
    for number, job in enumerate(jobs):
        with GroupPool(timeout_s=60, lane=str(number)) as pool:
            dataset, model = SyntheticDataset(job, rank=rank), new_model()
            for shard in dataset:
                model.zero_grad()
                assert dataset.peek(wait=False) is not shard
                result = run_step(model, shard, pool)
                dataset.commit(shard.step, measured_s=result.seconds, phase_s=result.phase_s)
                samples = alone(job.step(shard.step).samples)
                expected = single_process(new_model(), samples)
                worst.append((*worst_difference(result, model, *expected), len(samples)))
            assert dataset.state_dict()["step"] == job.steps
    return worst


@pytest.mark.parametrize("degrees", [(2,), (1,)])
def test_two_replicas_have_the_gradients_of_one_process(world, degrees):
    job = SyntheticJob(
        replicas=2, steps=2, microbatches=2, memory_tokens=96, degrees=degrees,
        sample_tokens=(9, 64), vocabulary=VOCABULARY, loss_weights=True, media=MEDIA,
    )  # fmt: skip
    for answer in world(train, 2, [job]).values():
        assert len(answer) == 2
        for parameter, difference, samples in answer:
            assert samples >= 4
            assert difference <= 1e-10, (parameter, difference)


class CountedQueue(PlainQueue):
    copies = 0

    def copy(self, whole):
        self.copies += 1
        return whole.clone()


def test_a_step_takes_each_microbatch_to_the_device_once_and_computes_the_same():
    """Also what counts its loss tokens beforehand reads the host's labels."""
    job = SyntheticJob(
        steps=1, microbatches=4, memory_tokens=64, sample_tokens=(9, 40), vocabulary=VOCABULARY,
        loss_weights=True, media=MEDIA,
    )  # fmt: skip
    step, queue = job.step(0), CountedQueue(torch.device("cpu"))
    shard = DeviceCopier(torch.device("cpu"), queue=queue).send(step.shard(0))
    model = new_model()
    with GroupPool() as pool:
        result = run_step(model, shard, pool)
    assert queue.copies == job.microbatches
    expected = single_process(new_model(), alone(step.samples))
    assert worst_difference(result, model, *expected)[1] <= 1e-10
