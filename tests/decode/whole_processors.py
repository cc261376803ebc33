"""transformers' processors as a user calls them, with real pictures and clips: the same token ids,
grids and numbers of tiles as decoded samples have. They need torchvision,
or its stand-in: test_parity_whole.py runs this file in a process of its own, where that is found.
"""

import io
import random
from collections.abc import Callable

import av
import numpy as np
import pytest
import transformers
from numpy.typing import NDArray
from PIL import Image
from transformers import PreTrainedTokenizerFast, ProcessorMixin

from dataservice.core.limits import DecodeLimits
from dataservice.core.sample import ItemLengths, MediaBlob, RawSample
from dataservice.decode.sample_pipeline import PipelineSpec, build_pipeline
from dataservice.decode.video import read_clip
from tests.decode.families import FAMILIES, family
from tests.decode.files import Files, train
from tests.decode.judges import metadata

pytestmark = pytest.mark.filterwarnings("ignore")
SAMPLES = 12


def _square(side: int) -> dict[str, int]:
    return {"height": side, "width": side}


def _qwen2_5_vl(tokenizer: PreTrainedTokenizerFast) -> ProcessorMixin:
    from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor

    size = {"shortest_edge": 3136, "longest_edge": 784 * 16384}
    return transformers.Qwen2_5_VLProcessor(
        transformers.Qwen2VLImageProcessor(size=size),
        tokenizer,
        Qwen2VLVideoProcessor(cap_pixels_per_frame=True, fps=2),
    )


def _qwen3_vl(tokenizer: PreTrainedTokenizerFast) -> ProcessorMixin:
    return transformers.Qwen3VLProcessor(
        transformers.Qwen2VLImageProcessor(
            patch_size=16, size={"shortest_edge": 65536, "longest_edge": 16777216}
        ),
        tokenizer,
        transformers.Qwen3VLVideoProcessor(
            size={"shortest_edge": 4096, "longest_edge": 25165824}, cap_pixels_per_frame=False
        ),
    )


def _internvl(tokenizer: PreTrainedTokenizerFast) -> ProcessorMixin:
    return transformers.InternVLProcessor(
        transformers.GotOcr2ImageProcessor(size=_square(448)),
        tokenizer,
        transformers.InternVLVideoProcessor(size=_square(448), num_frames=3),
    )


def _gemma3(tokenizer: PreTrainedTokenizerFast) -> ProcessorMixin:
    return transformers.Gemma3Processor(
        transformers.Gemma3ImageProcessor(size=_square(896)), tokenizer
    )


def _idefics3(tokenizer: PreTrainedTokenizerFast) -> ProcessorMixin:
    return transformers.Idefics3Processor(
        transformers.Idefics3ImageProcessor(), tokenizer, image_seq_len=169
    )


def _smolvlm(tokenizer: PreTrainedTokenizerFast) -> ProcessorMixin:
    sizes = {"size": {"longest_edge": 1536}, "max_image_size": {"longest_edge": 384}}
    sampling = {"fps": 1, "max_frames": 64, "video_size": {"longest_edge": 1536}}
    return transformers.SmolVLMProcessor(
        transformers.SmolVLMImageProcessor(**sizes),
        tokenizer,
        transformers.SmolVLMVideoProcessor(**sizes, video_sampling=sampling),
        image_seq_len=81,
    )


def _llava_next(tokenizer: PreTrainedTokenizerFast) -> ProcessorMixin:
    return transformers.LlavaNextProcessor(
        transformers.LlavaNextImageProcessor(size={"shortest_edge": 336}, crop_size=_square(336)),
        tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )


BUILD: dict[str, Callable[[PreTrainedTokenizerFast], ProcessorMixin]] = {
    "gemma3": _gemma3,
    "idefics3": _idefics3,
    "internvl": _internvl,
    "llava_next": _llava_next,
    "qwen2_5_vl": _qwen2_5_vl,
    "qwen3_vl": _qwen3_vl,
    "smolvlm": _smolvlm,
}
# How a tokenizer names the tokens of its family for a processor.
NAMES = {
    "gemma3": {
        "boi_token": "<start_of_image>",
        "eoi_token": "<end_of_image>",
        "image_token": "<image_soft_token>",
    },
    "internvl": {
        "start_image_token": "<img>",
        "end_image_token": "</img>",
        "context_image_token": "<IMG_CONTEXT>",
        "video_token": "<video>",
    },
}


def frames_of(data: bytes) -> NDArray[np.uint8]:
    """uint8[frames, height, width, 3]"""
    with av.open(io.BytesIO(data)) as container:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])


def grids(items: list[ItemLengths]) -> NDArray[np.int64]:
    """The grids of the pictures or clips of a sample, [t, h, w], of which a clip has each patch in
    time in an item of its own or all in one."""
    return np.array([item.grid[:3] for item in items])


@pytest.mark.parametrize("name", FAMILIES)
def test_a_processor_that_is_called_gives_the_same_tokens_and_shapes(name, tmp_path):
    judge, rng = family(name), random.Random(name)
    tokenizer = train([*judge.specials, "<pad>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "template.jinja").write_text(judge.template)
    pipeline = build_pipeline(
        PipelineSpec(
            tokenizer=str(tmp_path),
            chat_template=str(tmp_path / "template.jinja"),
            vision=judge.ours,
        )
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", extra_special_tokens=NAMES.get(name, {})
    )
    processor = BUILD[name](fast)
    for number in range(SAMPLES):
        # SmolVLM's processor counts the frames of the longest of several clips for each of them.
        most = 1 if name == "smolvlm" else 2
        kinds = rng.choices(["image", "video"] if judge.clip else ["image"], k=rng.randint(1, most))
        data = [
            Files.image(rng.randint(40, 900), rng.randint(40, 900), "PNG")
            if kind == "image"
            else Files.video(rng.randint(4, 14), rng.choice([1, 2, 5]), (96, 64))
            for kind in kinds
        ]
        content = [
            part for kind in kinds for part in ({"type": kind}, {"type": "text", "text": "a\n"})
        ]
        messages = [
            {"role": "user", "content": content},
            {"role": "assistant", "content": [{"type": "text", "text": "the cat"}]},
        ]
        blobs = [MediaBlob(kind=k, name="file", data=d) for k, d in zip(kinds, data, strict=True)]
        raw = RawSample(key=str(number), record={"messages": messages}, media=tuple(blobs))
        lengths = pipeline.measure(raw)
        sample = pipeline.decode(raw, lengths)
        images = [Image.open(io.BytesIO(b.data)) for b in blobs if b.kind == "image"]
        clips = [blob for blob in blobs if blob.kind == "video"]
        headers = [read_clip(clip, DecodeLimits()).header for clip in clips]
        shown = {"images": images} if images else {}
        if clips:
            shown["videos"] = [frames_of(clip.data) for clip in clips]
            shown["video_metadata"] = [metadata(header) for header in headers]
            shown["do_sample_frames"] = True
        given = processor(
            text=[fast.apply_chat_template(messages, chat_template=judge.template, tokenize=False)],
            add_special_tokens=False,
            return_tensors="pt",
            **shown,
        )
        assert sample.input_ids.tolist() == given["input_ids"][0].tolist(), number
        for kind, key in ((0, "image_grid_thw"), (1, "video_grid_thw")):
            ours = [item for item in lengths.items if item.kind == kind]
            if key in given:
                theirs = np.array(given[key])
                assert grids(ours).prod(axis=1).sum() == theirs.prod(axis=1).sum()
                assert set(map(tuple, grids(ours)[:, 1:])) == set(map(tuple, theirs[:, 1:]))
