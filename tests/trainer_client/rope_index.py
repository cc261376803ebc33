"""`get_rope_index` of the Qwen-VL families, from transformers."""

import torch

from trainer_client.positions import MropeRule

FAMILIES = {
    "qwen2_vl": ("Qwen2VLConfig", "Qwen2VLModel", MropeRule()),
    "qwen2_5_vl": ("Qwen2_5_VLConfig", "Qwen2_5_VLModel", MropeRule(tokens_per_second=2.0)),
    "qwen3_vl": ("Qwen3VLConfig", "Qwen3VLModel", MropeRule()),
}


def rope_index_of(family):
    """`get_rope_index` of the family's model, which has no weights here."""
    import transformers

    config, model, _ = FAMILIES[family]
    with torch.device("meta"):
        small = getattr(transformers, config)(
            text_config={
                "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1,
                "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 64,
                "head_dim": 16,
                "rope_scaling": {"rope_type": "default", "mrope_section": [2, 3, 3]},
            },
            vision_config={
                "depth": 1, "hidden_size": 32, "num_heads": 2, "embed_dim": 32,
                "tokens_per_second": 2,  # as published; the class has another default
            },
        )  # fmt: skip
        return getattr(transformers, model)(small).get_rope_index
