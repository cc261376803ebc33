"""Descriptions read from config.json count every weight that transformers makes for it."""

import json
from pathlib import Path

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText

from dataservice.core.errors import SpecError
from dataservice.jobs.transformers_config import read_transformers_config

QWEN2 = {
    "model_type": "qwen2", "hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14,
    "num_key_value_heads": 2, "intermediate_size": 4864, "vocab_size": 151674,
}  # fmt: skip
INTERNVIT_6B = {
    "hidden_size": 3200, "num_hidden_layers": 45, "num_attention_heads": 25,
    "intermediate_size": 12800, "use_qk_norm": True, "norm_type": "rms_norm",
}  # fmt: skip
CASES = {
    "qwen2_vl of 72B": ("qwen2_vl", {"vision_config": {"hidden_size": 8192}}),
    "qwen2_vl of 2B": (
        "qwen2_vl",
        {
            "text_config": {
                "hidden_size": 1536, "num_hidden_layers": 28, "num_attention_heads": 12,
                "num_key_value_heads": 2, "intermediate_size": 8960, "vocab_size": 151936,
            },
            "vision_config": {"hidden_size": 1536},
            "tie_word_embeddings": True,
        },
    ),
    "qwen2_5_vl of 72B": (
        "qwen2_5_vl",
        {"vision_config": {
            "hidden_size": 1280, "intermediate_size": 3456, "out_hidden_size": 8192,
        }},
    ),
    "qwen2_5_vl of 32B": (
        "qwen2_5_vl",
        {
            "text_config": {
                "hidden_size": 5120, "num_hidden_layers": 64, "num_attention_heads": 40,
                "num_key_value_heads": 8, "intermediate_size": 27648,
            },
            "vision_config": {
                "hidden_size": 1280, "intermediate_size": 3456, "out_hidden_size": 5120,
            },
        },
    ),
    "qwen3_vl of 2B": (
        "qwen3_vl",
        {
            "text_config": {
                "hidden_size": 2048, "num_hidden_layers": 28, "num_attention_heads": 16,
                "num_key_value_heads": 8, "intermediate_size": 6144,
            },
            "vision_config": {
                "depth": 24, "hidden_size": 1024, "intermediate_size": 4096,
                "out_hidden_size": 2048, "deepstack_visual_indexes": [5, 11, 17],
            },
            "tie_word_embeddings": True,
        },
    ),
    "qwen3_vl_moe with some dense layers": (
        "qwen3_vl_moe",
        {
            "text_config": {
                "mlp_only_layers": [0, 3], "num_experts_per_tok": 8, "hidden_size": 2048,
            },
            "vision_config": {"out_hidden_size": 2048},
        },
    ),
    "internvl, as it is by default": (
        "internvl", {"text_config": QWEN2, "tie_word_embeddings": False},
    ),
    "internvl with the encoder of 6B, tied": (
        "internvl",
        {"text_config": QWEN2, "vision_config": INTERNVIT_6B, "tie_word_embeddings": True},
    ),
    "internvl with biases and a last norm": (
        "internvl",
        {
            "text_config": {"model_type": "qwen3", "num_key_value_heads": 8},
            "vision_config": {
                "attention_bias": True, "use_mean_pooling": False, "use_mask_token": True,
                "use_absolute_position_embeddings": False,
            },
        },
    ),
    "llava of vicuna": ("llava", {"text_config": {"model_type": "llama", "vocab_size": 32064}}),
    "llava of features from two layers": (
        "llava",
        {"vision_feature_layer": [-2, -5], "multimodal_projector_bias": False},
    ),
    "llava_next of mistral": (
        "llava_next", {"text_config": {"model_type": "mistral", "num_key_value_heads": 8}},
    ),
    "llava_next of llama with biases": (
        "llava_next",
        {"text_config": {"model_type": "llama", "attention_bias": True, "mlp_bias": True}},
    ),
    "llava_onevision, as it is by default": ("llava_onevision", {"text_config": QWEN2}),
    "llava_onevision with a head that pools": (
        "llava_onevision",
        {
            "text_config": QWEN2,
            "vision_config": {
                "model_type": "siglip_vision_model", "hidden_size": 768, "num_hidden_layers": 3,
            },
        },
    ),
}  # fmt: skip


def counted(module: torch.nn.Module) -> int:
    return sum(each.numel() for each in module.parameters())


def judged(model: torch.nn.Module) -> dict[str, int]:
    """The weights of a model of transformers, in the description's parts."""
    inner = model.model
    if hasattr(inner, "visual"):
        mergers = [inner.visual.merger, getattr(inner.visual, "deepstack_merger_list", None)]
        projector = sum(counted(each) for each in mergers if each is not None)
        vision = counted(inner.visual) - projector
    else:
        projector, vision = counted(inner.multi_modal_projector), counted(inner.vision_tower)
    return {
        "vision": vision,
        "vision.projector": projector,
        "decoder": counted(model) - vision - projector,
    }


@pytest.mark.parametrize("case", CASES)
def test_every_module_has_the_weights_that_transformers_makes_for_it(
    case: str, tmp_path: Path
) -> None:
    family, given = CASES[case]
    config = CONFIG_MAPPING[family](**given)
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config)
    found = read_transformers_config(tmp_path)
    assert found.parameters_by_module() == judged(model)
    layers = model.model.language_model.layers
    assert [found.decoder.layer_parameters(n) for n in range(found.decoder.layers)] == [
        counted(layer) for layer in layers
    ]


@pytest.mark.parametrize(
    "family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "internvl", "llava"]
)
def test_keys_that_a_file_leaves_out_have_the_values_of_transformers(
    family: str, tmp_path: Path
) -> None:
    config = CONFIG_MAPPING[family]()
    text, vision = config.text_config.hidden_size, config.vision_config
    if hasattr(vision, "out_hidden_size"):
        vision.out_hidden_size = text
    elif family == "qwen2_vl":
        vision.hidden_size = text
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config)
    bare: dict[str, object] = {"model_type": family}
    if family == "qwen2_vl":
        bare["vision_config"] = {"hidden_size": text}
    elif hasattr(vision, "out_hidden_size"):
        bare["vision_config"] = {"out_hidden_size": text}
    (tmp_path / "config.json").write_text(json.dumps(bare))
    assert read_transformers_config(tmp_path).parameters_by_module() == judged(model)


def test_a_file_with_the_text_beside_the_model_is_read_as_hubs_have_it(tmp_path: Path) -> None:
    """Qwen2.5-VL-7B-Instruct as it was published in early 2025."""
    published = {
        "model_type": "qwen2_5_vl", "hidden_size": 3584, "intermediate_size": 18944,
        "num_attention_heads": 28, "num_hidden_layers": 28, "num_key_value_heads": 4,
        "tie_word_embeddings": False, "vocab_size": 152064, "sliding_window": 32768,
        "vision_config": {
            "depth": 32, "hidden_act": "silu", "hidden_size": 1280, "intermediate_size": 3420,
            "num_heads": 16, "in_chans": 3, "out_hidden_size": 3584, "patch_size": 14,
            "spatial_merge_size": 2, "spatial_patch_size": 14, "window_size": 112,
            "fullatt_block_indexes": [7, 15, 23, 31], "temporal_patch_size": 2,
        },
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(published))
    assert read_transformers_config(tmp_path).parameters == 8_292_166_656  # its published weights


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"model_type": "bert"}', "descriptions are made of internvl"),
        ("[1]", "holds no mapping"),
        ("{", "is not JSON"),
        ('{"model_type": "llava", "text_config": {"model_type": "gpt2"}}', "text_config of model"),
        (
            '{"model_type": "llava", "text_config": {"hidden_size": "wide"}}',
            "'wide' for text_config.hidden_size; it must be a whole number",
        ),
        ('{"model_type": "qwen2_vl"}', "vectors of 3584 numbers, the decoder takes 8192"),
    ],
)
def test_a_file_that_cannot_be_read_says_why(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(SpecError, match=said):
        read_transformers_config(tmp_path)
