"""Where a processor says that an item may be cut, its family's own encoder gives the same rows."""

from functools import partial

import pytest
import torch
from transformers import (
    CLIPVisionConfig,
    CLIPVisionModel,
    InternVLVisionConfig,
    InternVLVisionModel,
)
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import (
    Qwen2_5_VisionTransformerPretrainedModel,
)
from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLVisionConfig
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel

from dataservice.core.errors import SpecError
from dataservice.decode.processors.internvl import InternVLProcessor
from dataservice.decode.processors.llava import LlavaProcessor
from dataservice.decode.processors.qwen2_vl import Qwen2VLProcessor
from dataservice.decode.processors.transformers_image import TransformersImageSpec
from dataservice.decode.spec import CustomVisionSpec, PipelineSpec
from trainer_client.encoder_inputs import patch_rows, square_pixels

MEAN = STD = (0.5, 0.5, 0.5)
SIZE = {"depth": 3, "num_heads": 2}


def qwen2_vl():
    config = Qwen2VLVisionConfig(embed_dim=32, hidden_size=48, mlp_ratio=2, **SIZE)
    return Qwen2VisionTransformerPretrainedModel(config)


def qwen2_5_vl():
    # Windows in two layers, whole frames in the third.
    config = Qwen2_5_VLVisionConfig(
        hidden_size=32, out_hidden_size=48, intermediate_size=40, fullatt_block_indexes=[1], **SIZE
    )
    return Qwen2_5_VisionTransformerPretrainedModel(config)


def rows_of(encoder, clips):
    """The encoder's feature rows of clips uint8[frames, height, width, 3], end to end."""
    inputs = patch_rows(clips, MEAN, STD, dtype=torch.float64)
    found = encoder(inputs.pixel_values, grid_thw=inputs.grid_thw)
    return getattr(found, "pooler_output", found)


@pytest.mark.parametrize("family", [qwen2_vl, qwen2_5_vl])
@pytest.mark.parametrize("cuts", [(2,), (4, 6), (2, 4, 6, 8, 10)])
def test_a_clip_encoded_in_pieces_has_the_rows_of_the_whole_clip(family, cuts):
    torch.manual_seed(0)
    encoder = family().double()
    clip = torch.randint(0, 256, (12, 140, 196, 3), dtype=torch.uint8)
    assert all(cut % Qwen2VLProcessor.unit_frames == 0 for cut in cuts)
    pieces = torch.tensor_split(clip, cuts)
    whole = rows_of(encoder, [clip])
    torch.testing.assert_close(rows_of(encoder, pieces), whole, rtol=1e-12, atol=1e-12)
    apart = torch.cat([rows_of(encoder, [piece]) for piece in pieces])
    torch.testing.assert_close(apart, whole, rtol=1e-12, atol=1e-12)


def test_a_clip_cut_inside_a_pair_of_frames_has_other_rows():
    """So the test above would see a wrong unit."""
    torch.manual_seed(0)
    encoder = qwen2_vl().double()
    clip = torch.randint(0, 256, (4, 56, 56, 3), dtype=torch.uint8)
    whole = rows_of(encoder, [clip])
    assert not torch.allclose(rows_of(encoder, [clip[:1], clip[1:]])[: len(whole)], whole)


@pytest.mark.parametrize(
    "make",
    [
        partial(CustomVisionSpec, name="stamps"),
        partial(TransformersImageSpec, folder="model", patch=14),
    ],
    ids=["code of ones own", "a folder of transformers"],
)
def test_whoever_names_a_processor_of_another_model_says_where_its_items_may_be_cut(make):
    def unit_frames(**more):
        return PipelineSpec(tokenizer="tokenizer", vision=make(**more)).unit_frames

    assert (unit_frames(), unit_frames(unit_frames=2)) == (0, 2)
    with pytest.raises(SpecError, match=r"unit_frames is -1; it must be in 0\.\.65,536: 1 where"):
        unit_frames(unit_frames=-1)


LAYERS = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "image_size": 56, "patch_size": 14,
}  # fmt: skip


@pytest.mark.parametrize(
    ("processor", "make"),
    [
        (InternVLProcessor, lambda: InternVLVisionModel(InternVLVisionConfig(**LAYERS))),
        (LlavaProcessor, lambda: CLIPVisionModel(CLIPVisionConfig(**LAYERS))),
    ],
    ids=["tiles of InternVL", "frames of LLaVA"],
)
def test_tiles_encoded_apart_have_the_features_of_the_whole_picture(processor, make):
    torch.manual_seed(0)
    encoder = make().double().eval()
    tiles = torch.randint(0, 256, (5, 56, 56, 3), dtype=torch.uint8)
    assert processor.unit_frames == 1

    def features(items):
        return encoder(square_pixels(items, MEAN, STD, dtype=torch.float64)).last_hidden_state

    apart = torch.cat([features([tiles[:2]]), features([tiles[2:3], tiles[3:]])])
    torch.testing.assert_close(apart, features([tiles]), rtol=1e-12, atol=1e-12)
