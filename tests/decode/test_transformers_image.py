"""Image processors of transformers, run by the service: their tiles, their tokens, and which are
refused. The judge is the same library, asked for everything at once."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

from dataservice.core.errors import SampleError, SpecError
from dataservice.decode.placeholders import PlaceholderTokens
from dataservice.decode.processors.base import View, VisionPlan
from dataservice.decode.processors.transformers_image import (
    OTHER_TEXT,
    TransformersImageProcessor,
    TransformersImageSpec,
)
from dataservice.decode.sample_pipeline import build_pipeline
from dataservice.decode.spec import BUILT_IN, CustomVisionSpec
from tests.decode.pictures import soft_picture
from trainer_client.encoder_inputs import square_pixels

TOLERANCE = 1e-6
SMALL = {"size": {"height": 56, "width": 56}}
# Of models whose family is not built in, with the numbers of the model's configuration.
MODELS = {
    "BlipImageProcessor": ({"size": {"height": 84, "width": 84}}, {"patch": 14}),
    "DeepseekVLImageProcessor": (SMALL, {"patch": 14}),
    "JanusImageProcessor": (SMALL, {"patch": 14}),
    "BitImageProcessor": (
        {"size": {"shortest_edge": 84}, "crop_size": {"height": 70, "width": 70}},
        {"patch": 14},
    ),
    "Idefics2ImageProcessor": (
        {"size": {"shortest_edge": 56, "longest_edge": 140}},
        {"patch": 14, "tokens_per_tile": 64},
    ),
    "PixtralImageProcessor": (
        {"size": {"longest_edge": 128}, "patch_size": {"height": 16, "width": 16}},
        {"patch": 16, "merge": 2},
    ),
}
SIZES = [(640, 480), (61, 300), (200, 150)]


def folder_of(home: Path, kind: str, **options: object) -> str:
    """A model's folder, as published, with what its processor needs of it."""
    home.mkdir(exist_ok=True)
    plain = {"image_processor_type": kind, **options}
    (home / "preprocessor_config.json").write_text(json.dumps(plain))
    return str(home)


def spec_of(home: Path, kind: str) -> TransformersImageSpec:
    options, numbers = MODELS[kind]
    return TransformersImageSpec(folder=folder_of(home, kind, **options), **numbers)


def theirs(folder: str, picture: Image.Image) -> tuple[torch.Tensor, object]:
    judge = transformers.AutoImageProcessor.from_pretrained(folder)
    values = np.asarray(judge(images=picture, return_tensors="np")["pixel_values"])
    return torch.from_numpy(values.reshape(-1, *values.shape[-3:])), judge


@pytest.mark.parametrize("kind", MODELS)
def test_a_rank_has_the_pixels_of_transformers(kitchen, sample, files, tmp_path, kind):
    spec = spec_of(tmp_path / "model", kind)
    pipeline = kitchen.pipeline(vision=spec)
    for size in SIZES:
        picture = soft_picture(*size)
        raw = sample({"text": "<image>"}, files.blob("image", files.saved(picture, "PNG")))
        lengths = pipeline.measure(raw)
        (item,) = pipeline.decode(raw, lengths).items
        wanted, judge = theirs(spec.folder, picture)
        made = square_pixels([torch.from_numpy(item)], judge.image_mean, judge.image_std)
        assert made.shape == wanted.shape
        assert float((made - wanted).abs().max()) <= TOLERANCE
        kernel = torch.ones(1, 1, spec.patch, spec.patch)  # of the encoder's patch embedding
        patches = torch.nn.functional.conv2d(wanted[:, :1], kernel, stride=spec.patch)
        assert lengths.items[0].encoder_tokens == patches.numel()


@pytest.mark.parametrize("size", SIZES)
def test_tokens_are_as_many_as_the_models_own_processor_writes(
    kitchen, sample, files, tmp_path, size
):
    """LLaVA's writes one for each patch, and Idefics 2's a fixed number for each tile."""
    named = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(kitchen.folder / "tokenizer.json"), **named
    )
    picture = soft_picture(*size)
    raw = sample({"text": "<image>"}, files.blob("image", files.saved(picture, "PNG")))
    pad = kitchen.id("<image>")
    for kind in ("BlipImageProcessor", "Idefics2ImageProcessor"):
        spec = spec_of(tmp_path / kind, kind)
        judge = transformers.AutoImageProcessor.from_pretrained(spec.folder)
        if kind == "BlipImageProcessor":
            whole = transformers.LlavaProcessor(
                judge, tokenizer, patch_size=spec.patch, vision_feature_select_strategy="full"
            )
        else:
            whole = transformers.Idefics2Processor(judge, tokenizer, image_seq_len=64)
        wanted = whole(images=picture, text="<image>")["input_ids"][0]
        pipeline = kitchen.pipeline(vision=spec, image_tokens=PlaceholderTokens(pad="<image>"))
        ids = pipeline.decode(raw, pipeline.measure(raw)).input_ids
        assert list(ids).count(pad) == list(wanted).count(pad) > 0


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("Qwen2VLImageProcessor", {}, r"makes pixel_values .* neither patches nor"),
        ("PaddleOCRVLImageProcessor", {}, r"makes pixel_values .* and image_grid_thw"),
        ("DeepseekVLHybridImageProcessor", SMALL, r"and high_res_pixel_values"),
        ("ChameleonImageProcessor", {}, r"does more behind resizing than"),
        ("LightGlueImageProcessor", {}, r"fails on a picture of 64×48 pixels with ValueError"),
        ("NoImageProcessor", {}, r"has no image processor for the vision folder"),
    ],
)
def test_a_processor_that_ranks_or_plans_cannot_follow_is_refused(
    kitchen, tmp_path, kind, options, message
):
    spec = TransformersImageSpec(folder=folder_of(tmp_path / "model", kind, **options), patch=14)
    with pytest.raises(SpecError, match=message):
        kitchen.pipeline(vision=spec)


@pytest.mark.parametrize(
    ("kind", "options", "remedy"),
    [
        ("LlavaNextImageProcessor", {}, r"vision: {kind: llava_next}, which is built in"),
        ("Idefics3ImageProcessor", {}, r"vision: {kind: idefics3}, which is built in"),
        ("SmolVLMImageProcessor", {}, r"vision: {kind: smolvlm}, which is built in"),
        ("LlavaOnevisionImageProcessor", SMALL, r"by vision: {kind: custom}"),
        ("Ovis2ImageProcessor", {}, r"by vision: {kind: custom}"),
        (
            "PixtralImageProcessor",
            {"processor_class": "PixtralProcessor"},
            r"by vision: {kind: custom}",
        ),
    ],
)
def test_a_model_whose_tokens_are_not_those_of_its_tiles_is_refused_by_name(
    kitchen, tmp_path, kind, options, remedy
):
    spec = TransformersImageSpec(folder=folder_of(tmp_path / "model", kind, **options), patch=14)
    with pytest.raises(SpecError, match=rf"their tokens would be counted wrongly\. .*{remedy}"):
        kitchen.pipeline(vision=spec)


def test_the_classes_that_are_refused_are_those_of_transformers():
    for name, kind in OTHER_TEXT.items():
        assert hasattr(transformers, name)
        assert kind in ("", *BUILT_IN)


class BordersCut:
    """A processor whose tiles follow from what a picture shows: it cuts off black rows."""

    do_normalize = False

    def __call__(self, images, **_options):
        pixels = np.asarray(images)
        kept = pixels[pixels.any(axis=(1, 2))] if pixels.any() else pixels[:1]
        return {"pixel_values": kept.transpose(2, 0, 1)[None]}


def test_a_processor_whose_tiles_follow_from_what_a_picture_shows_is_refused():
    with pytest.raises(SpecError, match=r"\[1, 48, 64, 3\] of one .* \[1, 1, 64, 3\] of another"):
        TransformersImageProcessor(TransformersImageSpec(folder="", patch=1), BordersCut())


def test_code_in_the_folder_is_never_run(kitchen, tmp_path):
    home = tmp_path / "model"
    folder = folder_of(home, "TheirImageProcessor", auto_map={"AutoImageProcessor": "theirs.Their"})
    (home / "theirs.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Their: pass\n")
    with pytest.raises(SpecError, match=r"Code that lies in it is never run"):
        kitchen.pipeline(vision=TransformersImageSpec(folder=folder, patch=14))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("folder", ["openai/clip-vit-base-patch32", "/nowhere"])
def test_a_folder_that_is_not_there_is_no_name_of_a_published_model(kitchen, folder):
    with pytest.raises(SpecError, match=r"has no preprocessor_config\.json"):
        kitchen.pipeline(vision=TransformersImageSpec(folder=folder, patch=14))


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"patch": 0}, r"vision patch is 0; it must be in 1\.\.4096"),
        ({"patch": 14, "merge": 2, "tokens_per_tile": 64}, r"Keep one"),
    ],
)
def test_numbers_that_cannot_be_are_refused(numbers, message):
    with pytest.raises(SpecError, match=message):
        TransformersImageSpec(folder="model", **numbers)


def test_the_identity_follows_the_folders_content_and_not_its_place(kitchen, tmp_path):
    def digest(place: str, unit_frames: int = 0, **options: object) -> str:
        folder = folder_of(tmp_path / place, "BlipImageProcessor", **options)
        spec = TransformersImageSpec(folder=folder, patch=14, unit_frames=unit_frames)
        return kitchen.pipeline(vision=spec).digests["processors"]

    here = digest("here", **SMALL)
    assert digest("there", **SMALL) == here
    assert digest("here", unit_frames=1, **SMALL) == here, "pixels are the same"
    assert digest("there", **SMALL, image_mean=[0.5, 0.5, 0.5]) != here
    assert digest("there", size={"height": 28, "width": 28}) != here


def test_a_picture_that_the_processor_cannot_take_is_left_out_with_the_reason(
    kitchen, sample, files, tmp_path
):
    folder = folder_of(tmp_path / "model", "BlipImageProcessor", **SMALL)
    pipeline = kitchen.pipeline(vision=TransformersImageSpec(folder=folder, patch=64))
    raw = sample({"text": "<image>"}, files.blob("image", files.image()))
    with pytest.raises(SampleError, match=r"plans 0 encoder and 0 LLM tokens"):
        pipeline.measure(raw)
    clip = sample({"text": "<video>"}, files.blob("video", files.video(4)))
    with pytest.raises(SampleError, match=r"BlipImageProcessor\w* takes pictures only"):
        pipeline.measure(clip)


class Negative:
    """A processor of a user's own that makes pixels itself; `more` rows than it plans."""

    def __init__(self, more: int = 0) -> None:
        self.more = more

    def plan_image(self, *, width, height):
        return VisionPlan(encoder_tokens=4, llm_tokens=1, views=(View.whole(width, height),))

    def plan_video(self, header):
        raise SampleError("no clips.")

    def make_pixels(self, picture):
        made = 255 - picture[None]
        return np.pad(made, [(0, 0), (0, self.more), (0, 0), (0, 0)])


@pytest.mark.parametrize("more", [0, 1])
def test_a_users_own_processor_may_make_pixels_of_the_size_that_it_plans(
    kitchen, sample, files, more
):
    spec = kitchen.spec(vision=CustomVisionSpec(name="negative", options={"more": more}))
    pipeline = build_pipeline(spec, custom_processors={"negative": Negative})
    raw = sample({"text": "<image>"}, files.blob("image", files.image(8, 6, "PNG")))
    lengths = pipeline.measure(raw)
    if more:
        with pytest.raises(SampleError, match=r"pixels \[1, 7, 8, 3\], and planned \[1, 6, 8, 3\]"):
            pipeline.decode(raw, lengths)
    else:
        (item,) = pipeline.decode(raw, lengths).items
        assert item[0, 0, 0].tolist() == [255, 255, 215]
