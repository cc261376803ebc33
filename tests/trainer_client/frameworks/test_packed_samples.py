"""A pack given to a model of transformers as it is: by their positions, no sample sees another."""

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

LENGTHS = (5, 8, 1, 12)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_position_ids_alone_keep_the_samples_of_a_pack_apart(attention):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        attn_implementation=attention,
    )
    model = AutoModelForCausalLM.from_config(config)
    samples = [torch.randint(64, (length,)) for length in LENGTHS]
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    packed = model(
        input_ids=torch.cat(samples)[None], position_ids=positions[None], use_cache=False
    )
    alone = [model(input_ids=sample[None], use_cache=False).logits[0] for sample in samples]
    torch.testing.assert_close(packed.logits[0], torch.cat(alone))
