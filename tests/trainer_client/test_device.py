"""Shards on another device. The CUDA path needs a GPU; `meta` stands for any other device."""

import pytest
import torch

from trainer_client.device import DeviceCopier, resolve_device
from trainer_client.runtime.loss import own_loss_tokens


def moving_tensors(shard):
    for mb in shard.microbatches:
        yield from (mb.input_ids, mb.labels, mb.position_ids)
        for batch in (mb.vision, mb.audio):
            if batch is not None:
                yield from (*batch.items, batch.exchange.send_rows, batch.exchange.recv_positions)


def staying_tensors(shard):
    for mb in shard.microbatches:
        yield from (mb.cu_seqlens, mb.lengths, mb.sample_ids)


def test_tokens_items_and_indices_come_on_the_device_and_the_plan_on_the_host(service):
    on_host = list(service.dataset())
    on_device = list(service.dataset(device="meta"))
    for here, there in zip(on_host, on_device, strict=True):
        assert {tensor.device.type for tensor in moving_tensors(there)} == {"meta"}
        assert {tensor.device.type for tensor in staying_tensors(there)} == {"cpu"}
        assert [t.shape for t in moving_tensors(there)] == [t.shape for t in moving_tensors(here)]
        assert there.plan == here.plan
        assert there.size_bytes == here.size_bytes


@pytest.mark.parametrize("device", [None, "cpu", torch.device("cpu")])
def test_on_the_host_nothing_is_copied_or_pinned(service, device):
    shard = next(iter(service.dataset(device=device)))
    assert not any(tensor.is_pinned() for tensor in moving_tensors(shard))
    copier = DeviceCopier(resolve_device(device))
    assert not copier.pins
    assert copier.send(shard) is shard


def test_what_a_rank_did_not_ask_for_stays_absent(service):
    shard = next(iter(service.dataset(parts=("labels",), device="meta")))
    for mb in shard.microbatches:
        assert mb.labels.device.type == "meta"
        assert not hasattr(mb, "input_ids")
        assert mb.vision is None or not hasattr(mb.vision, "items")


def test_moving_changes_neither_values_nor_types(service):
    shard = next(iter(service.dataset()))
    copied = shard.mapped(torch.clone)
    pairs = list(zip(moving_tensors(shard), moving_tensors(copied), strict=True))
    assert pairs
    for before, after in pairs:
        assert before.dtype == after.dtype
        assert torch.equal(before, after)
        assert before.numel() == 0 or before.data_ptr() != after.data_ptr()


def test_loss_tokens_of_a_shard_that_was_moved_are_counted_on_the_host(service):
    shard = next(iter(service.dataset()))
    moved = shard.to("meta")
    assert moved.microbatches[0].labels.is_meta
    assert own_loss_tokens(moved) == own_loss_tokens(shard)
    assert own_loss_tokens(moved.to("meta")) == own_loss_tokens(shard)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_shards_arrive_from_pinned_memory_with_the_same_values(service):
    on_host = list(service.dataset())
    for here, there in zip(on_host, service.dataset(device="cuda"), strict=True):
        for before, after in zip(moving_tensors(here), moving_tensors(there), strict=True):
            assert after.is_cuda
            assert torch.equal(before, after.cpu())
