"""Sliding windows: the ring keeps those that layers ask for; those in a model's mask alone would be
lost, since nobody makes masks for the ring."""

import numpy as np
import pytest

from tests.trainer_client.adapters.foreign_models import Text, one_at_a_time
from tests.trainer_client.runtime.random_steps import make_shard
from trainer_client.adapters.transformers import UnsupportedModel, trainable
from trainer_client.runtime import GroupPool, evaluate_step

WINDOW = 7
EXPERTS = {"num_experts_per_tok": 2}
PHIMOE = {"num_local_experts": 4, **EXPERTS}
QWEN_MOE = {"num_experts": 4, "moe_intermediate_size": 24, **EXPERTS}
QWEN2_MOE = {**QWEN_MOE, "shared_expert_intermediate_size": 24, "max_window_layers": 4}


def windowed(config, window=WINDOW, **settings):
    """A family of text whose windows are shorter than its samples."""
    return Text(config, sliding_window=window, **settings)


def random_samples(family):
    rng = np.random.default_rng(3)
    samples = [family.sample(rng, None) for _ in range(5)]
    assert max(len(sample.ids) for sample in samples) > 2 * WINDOW
    return samples


def evaluated(model, samples):
    """The ring's loss over packs."""
    shard = make_shard(samples, [[((0,), [2, 0, 4])], [((0,), [1, 3])]], 1, 0, 1)
    with GroupPool() as pool:
        return evaluate_step(model, shard, pool).loss


def losses(family):
    """The ring's loss, and the library's of one sample at a time."""
    samples = random_samples(family)
    found = evaluated(trainable(family.build()).eval(), samples)
    return found, one_at_a_time(family, family.build().eval(), samples)[0]


@pytest.mark.parametrize(
    "family",
    [
        windowed("Phi3Config"),
        windowed("MistralConfig"),
        windowed("MinistralConfig"),
        windowed("Starcoder2Config"),
        windowed("MixtralConfig", num_local_experts=4, **EXPERTS),
        windowed("Qwen2Config", use_sliding_window=True, max_window_layers=1),
        windowed("Qwen3Config", use_sliding_window=True, max_window_layers=1),
        windowed("Qwen3MoeConfig", use_sliding_window=True, max_window_layers=1, **QWEN_MOE),
        windowed("Cohere2Config"),
        windowed("Gemma3TextConfig", query_pre_attn_scalar=8),
        windowed("Olmo3Config"),
        windowed("Exaone4Config"),
    ],
    ids=lambda family: family.config,
)
def test_windows_that_layers_ask_for_are_kept(family):
    found, expected = losses(family)
    assert found == pytest.approx(expected, rel=1e-6)
    wide, _ = losses(Text(family.config, **{**family.own, "sliding_window": 512}))
    assert abs(wide - found) > 1e-4  # the windows matter


IN_THE_MASK = [
    windowed("PhimoeConfig", **PHIMOE),
    windowed("Qwen2MoeConfig", use_sliding_window=True, **QWEN2_MOE),
]


@pytest.mark.parametrize("family", IN_THE_MASK, ids=lambda family: family.config)
def test_windows_in_the_mask_alone_are_refused(family):
    said = r"window of 7 tokens in its mask alone.* longer than 7, set sliding_window to 512"
    with pytest.raises(UnsupportedModel, match=said):
        losses(family)


@pytest.mark.parametrize(
    "family",
    [
        windowed("PhimoeConfig", None, **PHIMOE),
        windowed("PhimoeConfig", 512, **PHIMOE),
        windowed("Qwen2MoeConfig", use_sliding_window=False, **QWEN2_MOE),
        windowed("Qwen2MoeConfig", 512, use_sliding_window=True, **QWEN2_MOE),
        windowed("LlamaConfig"),  # it has the number, and no windows
    ],
    ids=[
        "no window",
        "as long as any sample",
        "off",
        "as long as any",
        "a number that says nothing",
    ],
)
def test_windows_in_a_mask_that_hide_nothing_are_trained(family):
    found, expected = losses(family)
    assert found == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("family", IN_THE_MASK, ids=lambda family: family.config)
def test_a_model_whose_window_was_widened_as_the_refusal_says_is_trained(family):
    samples = random_samples(family)
    model, library = family.build(), family.build().eval()
    trainable(model)  # what it wrote down of the window is forgotten
    model.config.sliding_window = library.config.sliding_window = 512
    found = evaluated(trainable(model).eval(), samples)
    assert found == pytest.approx(one_at_a_time(family, library, samples)[0], rel=1e-10)
