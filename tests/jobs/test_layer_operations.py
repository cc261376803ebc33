"""The operations of described layers are those that torch counts in transformers' own layers."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText

from dataservice.jobs.transformers_config import read_transformers_config
from dataservice.planning.layout.layers import LayerShape, layer_shapes
from dataservice.planning.layout.model import ModelDescription

TOKENS = 17
TEXT = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 160, "vocab_size": 300,
}  # fmt: skip
CLIP = {
    "model_type": "clip_vision_model", "hidden_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 2, "intermediate_size": 72, "image_size": 28, "patch_size": 14,
}  # fmt: skip


def made(tmp_path: Path, text: dict[str, object]) -> tuple[torch.nn.Module, ModelDescription]:
    """A small model and its description; attention is written out, so that torch counts it."""
    config = CONFIG_MAPPING["llava"](text_config={**TEXT, **text}, vision_config=CLIP)
    config.save_pretrained(tmp_path)
    model = AutoModelForImageTextToText.from_config(config, attn_implementation="eager")
    return model, read_transformers_config(tmp_path)


def said(rows: list[LayerShape], *, backward: bool, causal: bool) -> float:
    """Operations of these layers at TOKENS tokens. Attention that is written out works on every
    pair, also on those behind a causal mask."""
    pairs = TOKENS * TOKENS * (2 if causal else 1)
    found = [row.backward_flops if backward else row.forward_flops for row in rows]
    return sum(flat * TOKENS + square * pairs for flat, square in found)


def of(model: ModelDescription, *names: str) -> list[LayerShape]:
    return [row for row in layer_shapes(model) if row.name in names]


@pytest.mark.parametrize(
    "text",
    [
        {"model_type": "qwen2"},
        {"model_type": "qwen3", "head_dim": 32},
        {"model_type": "llama", "num_key_value_heads": 4},
        {"model_type": "mistral", "sliding_window": None},
    ],
    ids=lambda text: text["model_type"],
)
@pytest.mark.parametrize("frozen", [False, True])
def test_a_decoder_works_as_much_as_its_description_says(
    text: dict[str, object], frozen: bool, tmp_path: Path
) -> None:
    """The vision encoder trains, so that gradients pass through the decoder even where it is
    frozen."""
    model, description = made(tmp_path, text)
    decoder = model.model.language_model.requires_grad_(not frozen)
    described = replace(description, decoder=replace(description.decoder, frozen=frozen))
    rows = of(described, "decoder.0", "decoder.1")
    inputs = torch.randn(1, TOKENS, 64, requires_grad=True)
    with FlopCounterMode(display=False) as forward:
        states = decoder(inputs_embeds=inputs).last_hidden_state
    with FlopCounterMode(display=False) as backward:
        states.sum().backward()
    assert forward.get_total_flops() == said(rows, backward=False, causal=True)
    assert backward.get_total_flops() == said(rows, backward=True, causal=True)


def test_an_encoder_and_its_projector_work_as_much_as_their_description_says(
    tmp_path: Path,
) -> None:
    model, description = made(tmp_path, {"model_type": "qwen2"})
    rows = of(description, "vision.0", "vision.1")
    states = torch.randn(1, TOKENS, 32, requires_grad=True)
    with FlopCounterMode(display=False) as forward:
        features = model.model.vision_tower.encoder(inputs_embeds=states).last_hidden_state
    with FlopCounterMode(display=False) as projected:
        made_rows = model.model.multi_modal_projector(features)
    with FlopCounterMode(display=False) as backward:
        made_rows.sum().backward()
    assert forward.get_total_flops() == said(rows, backward=False, causal=False)
    projector = of(description, "vision.projector")
    assert projected.get_total_flops() == said(projector, backward=False, causal=False)
    both = said([*rows, *projector], backward=True, causal=False)
    assert backward.get_total_flops() == both
