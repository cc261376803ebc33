"""How often a step of a model of transformers makes the host wait for its device: never, where the
library does not."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from tests.trainer_client.adapters.foreign_models import FAMILIES, PROCESSOR
from tests.trainer_client.adapters.foreign_steps import samples_of, shard_of
from tests.trainer_client.runtime.fake_device import THERE, FakeDevice, moved
from tests.trainer_client.runtime.model_there import PlayedStream
from trainer_client.adapters.transformers import trainable
from trainer_client.runtime import GroupPool, clock, run_step


@pytest.fixture(autouse=True)
def played_device(monkeypatch):
    """Torch has no autocast for it, and says so by an error."""
    has_autocast = torch.is_autocast_enabled
    monkeypatch.setattr(
        torch, "is_autocast_enabled", lambda *kind: THERE.type not in kind and has_autocast(*kind)
    )
    monkeypatch.setattr(clock, "start_clock", PlayedStream)


# Eager experts read how many tokens they got; grouped ones, which take no fp64, do not.
READING = {"qwen3_moe"}
# Copies that the library itself waits for, for each microbatch with items.
COPIES_OF_THE_LIBRARY = {"llava_next": 1}  # of lengths that only its own forward takes


def steps_there(name, seed=1, change=lambda model: None):
    """The losses of a step on the host and of a second one on the device, what waited there, and
    how many microbatches had items. ``change``: of the model on the device."""
    samples = samples_of(name, FAMILIES[name].build(), seed)
    shard = shard_of(samples, 1, 0, seed, (1,))
    with GroupPool() as pool:
        expected = run_step(trainable(FAMILIES[name].build(), processor=PROCESSOR), shard, pool)
    with FakeDevice() as device, GroupPool() as pool:
        model = moved(trainable(FAMILIES[name].build(), processor=PROCESSOR))
        change(model.model)
        there = shard.to(THERE)
        run_step(model, there, pool)  # copies what is copied once, and learns what the head does
        device.reads.clear()
        device.copies.clear()
        found = run_step(model, there, pool)
        reads, copies = list(device.reads), list(device.copies)
    assert found.loss == pytest.approx(expected.loss, rel=1e-12)
    with_items = sum(mb.vision is not None or mb.audio is not None for mb in shard.microbatches)
    assert bool(with_items) == bool(model.family.encoders)
    return reads, copies, with_items


@pytest.mark.parametrize("name", sorted(FAMILIES.keys() - READING))
def test_a_microbatch_never_makes_the_host_wait_for_the_device(name):
    reads, copies, with_items = steps_there(name)
    assert reads == []
    assert len(copies) == with_items * COPIES_OF_THE_LIBRARY.get(name, 0)


def flash_attention(module, query, key, value, *, cu_seq_lens_q, max_length_q, **options):
    """As a kernel that takes bounds on its device, and on the host the longest part."""
    assert cu_seq_lens_q.device == query.device
    assert type(max_length_q) is int
    places = torch.arange(query.shape[2], device=query.device)
    part = torch.searchsorted(cu_seq_lens_q.long(), places, right=True)
    alone = part[:, None] == part
    out = scaled_dot_product_attention(query, key, value, attn_mask=alone, scale=options["scaling"])
    return out.transpose(1, 2), None


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_an_encoder_with_flash_attention_has_its_bounds_on_the_device(name, monkeypatch):
    AttentionInterface.register("played_flash", flash_attention)

    def take(model):  # the library's own setter looks for a kernel of this name
        monkeypatch.setattr(model.config.vision_config, "_attn_implementation", "played_flash")

    reads, copies, _ = steps_there(name, change=take)
    assert (reads, copies) == ([], [])
