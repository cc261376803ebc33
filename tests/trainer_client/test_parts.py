"""Peers of a replica fetch what they read, and no more."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from trainer_client import BadArgument, MisuseError, NotFetched, ShardDataset
from trainer_client.parts import EVERYTHING, WantedParts

SEQUENCE_BYTES = 4 * (8 + 5)  # one int32 tensor of rank 0: 8 tokens of pack 0, 5 of pack 1
IMAGE_BYTES = 13 * 17 * 3


def first_shard(service, **options):
    with service.dataset(**options) as dataset:
        return next(iter(dataset))


@pytest.mark.parametrize(
    ("parts", "size_bytes", "workers"),
    [
        (EVERYTHING, 3 * SEQUENCE_BYTES + IMAGE_BYTES, {"w0", "w1"}),
        (("inputs",), 2 * SEQUENCE_BYTES + IMAGE_BYTES, {"w0", "w1"}),
        (("tokens", "labels"), 3 * SEQUENCE_BYTES, {"w0", "w1"}),
        (("labels",), SEQUENCE_BYTES, {"w0", "w1"}),
        (("media",), IMAGE_BYTES, {"w0"}),
        ((), 0, set()),
    ],
)
def test_a_rank_receives_the_parts_it_names(service, parts, size_bytes, workers):
    shard = first_shard(service, parts=parts)
    assert shard.size_bytes == size_bytes
    assert {name for name, worker in service.workers.items() if worker.calls} == workers
    wanted = WantedParts.named(parts)
    for pack, microbatch in enumerate(shard.microbatches):
        expected = service.sequence_of(0, pack, 0)
        assert microbatch.local_tokens == len(expected["labels"])
        for name, present in (("input_ids", wanted.tokens), ("labels", wanted.labels)):
            assert hasattr(microbatch, name) == present
            if present:
                np.testing.assert_array_equal(getattr(microbatch, name), expected[name])
        assert len(microbatch.position_ids) == microbatch.local_tokens
    image = shard.microbatches[0].vision
    assert (image is not None) == (wanted.tokens or wanted.media)
    assert image is None or hasattr(image, "items") == wanted.media


def test_a_part_that_was_not_asked_for_says_so_when_it_is_read(service):
    shard = first_shard(service, parts=("tokens",))
    microbatch = shard.microbatches[0]
    with pytest.raises(NotFetched, match=r"leave out 'labels'. Name it in ShardDataset"):
        _ = microbatch.labels
    with pytest.raises(MisuseError, match="items did not come to this rank"):
        _ = microbatch.vision.items
    other = replace(microbatch, labels=None, input_ids=torch.zeros(8))
    assert other.input_ids.sum() == 0
    assert not hasattr(other, "labels")
    on_device = shard.mapped(torch.Tensor.clone).microbatches[0]
    assert on_device.input_ids.equal(microbatch.input_ids)
    assert not hasattr(on_device, "labels")
    assert not hasattr(on_device.vision, "items")
    assert "cp_rank=0 of [0, 1], local_tokens=8" in repr(microbatch)


@pytest.mark.parametrize("parts", ["inputs", ("pixels",), ("inputs", "label")])
def test_an_unknown_part_is_refused(parts):
    with pytest.raises(BadArgument, match="'inputs', 'tokens', 'media', 'labels', or"):
        ShardDataset("host:1", job="x", rank=0, world_size=1, parts=parts)
