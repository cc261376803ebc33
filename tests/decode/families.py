"""Whole families: transformers' processor, our own beside it, and what a chat template writes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerFast
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma3.processing_gemma3 import Gemma3Processor
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.idefics3.processing_idefics3 import Idefics3Processor
from transformers.models.internvl.processing_internvl import InternVLProcessor
from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.smolvlm import processing_smolvlm as smolvlm
from transformers.models.smolvlm.processing_smolvlm import SmolVLMProcessor
from transformers.models.smolvlm.video_processing_smolvlm import SmolVLMVideoProcessor
from transformers.utils import is_torchvision_available

from dataservice.decode.processors.base import VideoHeader
from dataservice.decode.processors.gemma3 import Gemma3Processor as OursGemma3
from dataservice.decode.processors.idefics3 import Idefics3Processor as OursIdefics3
from dataservice.decode.processors.internvl import InternVLProcessor as OursInternVL
from dataservice.decode.processors.llava_next import LlavaNextProcessor as OursLlavaNext
from dataservice.decode.processors.qwen2_vl import Qwen2VLProcessor as Ours2VL
from dataservice.decode.processors.qwen3_vl import Qwen3VLProcessor as Ours3VL
from dataservice.decode.spec import VisionProcessorSpec
from tests.decode.files import train
from tests.decode.judges import (
    Idefics3Tiles,
    LlavaNextSquares,
    Qwen3Clips,
    internvl_tiles,
    made,
    metadata,
    qwen_grid,
)


@dataclass(frozen=True, kw_only=True)
class Family:
    """A family's processor, which writes media into text, and ours beside it.

    `image(width, height)` and `clip(header)` are what one medium becomes; `template` writes media
    as the family's published chat template does.
    """

    ours: VisionProcessorSpec
    specials: tuple[str, ...]
    template: str
    processor: Any
    image: Callable[[int, int], str]
    clip: Callable[[VideoHeader], str] | None = None

    def text(
        self, prompt: str, images: Sequence[tuple[int, int]], clips: Sequence[VideoHeader]
    ) -> str:
        """A rendered prompt with its media written into it, in order."""
        (text,), _ = self.processor.get_text_with_replacements(
            [prompt],
            images_replacements=[self.image(*size) for size in images],
            videos_replacements=[self.clip(header) for header in clips] if self.clip else [],
        )
        return str(text)


def family(name: str) -> Family:
    """One of FAMILIES."""
    return FAMILIES[name]()


def _qwen2_vl() -> Family:
    """Qwen2.5-VL's; its clips only where torchvision is installed."""
    images = Qwen2VLImageProcessorPil(size={"shortest_edge": 3136, "longest_edge": 784 * 16384})
    processor = made(
        Qwen2_5_VLProcessor,
        image_processor=images,
        image_token="<|image_pad|>",
        video_token="<|video_pad|>",
    )
    # The area that transformers gives a clip: 0.9 of the 128,000 tokens that it assumes.
    ours = Ours2VL(kind="qwen2_5_vl", video_total_pixels=int(128_000 * 784 * 0.9))
    clip = None
    if is_torchvision_available():
        from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor

        videos = Qwen2VLVideoProcessor(cap_pixels_per_frame=True, fps=2)
        processor.video_processor = videos

        def clip(header: VideoHeader) -> str:
            frames = ours.frame_count(header)
            patches = videos.get_num_of_video_patches(frames, header.height, header.width, {})
            grid = np.array([(1, 1, patches)])
            return str(processor.replace_video_token({"video_grid_thw": grid}, 0))

    return Family(
        ours=ours,
        specials=_QWEN_SPECIALS,
        template=_QWEN_TEMPLATE,
        processor=processor,
        image=lambda width, height: processor.replace_image_token(
            {"image_grid_thw": _grid(width, height, patch=14, least=3136, most=784 * 16384)}, 0
        ),
        clip=clip,
    )


def _qwen3_vl() -> Family:
    clips = Qwen3Clips()
    clips.processor.image_processor = Qwen2VLImageProcessorPil(patch_size=16)
    return Family(
        ours=Ours3VL(),
        specials=_QWEN_SPECIALS,
        template=_QWEN_TEMPLATE,
        processor=clips.processor,
        image=lambda width, height: clips.processor.replace_image_token(
            {"image_grid_thw": _grid(width, height, patch=16, least=65536, most=16777216)}, 0
        ),
        clip=clips.text,
    )


def _grid(width: int, height: int, **limits: int) -> NDArray[np.int64]:
    return np.array([(1, *qwen_grid(width, height, **limits))])


def _internvl() -> Family:
    processor = made(
        InternVLProcessor,
        image_token="<IMG_CONTEXT>",
        video_token="<video>",
        start_image_token="<img>",
        end_image_token="</img>",
        image_seq_length=256,
    )
    return Family(
        ours=OursInternVL(kind="internvl3", video_frames=3),
        specials=("<|im_start|>", "<|im_end|>", "<img>", "</img>", "<IMG_CONTEXT>", "<video>"),
        template=_CHATML.replace("IMAGE", "<IMG_CONTEXT>\\n").replace("VIDEO", "<video>\\n"),
        processor=processor,
        image=lambda width, height: processor.replace_image_token(
            {"num_patches": [internvl_tiles(width, height)]}, 0
        ),
        clip=lambda header: processor.replace_video_token(
            {"pixel_values_videos": np.zeros((1, 3))}, 0
        ),
    )


def _gemma3() -> Family:
    names = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"}
    names["image_token"] = "<image_soft_token>"
    specials = ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>", *names.values())
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=train(list(specials)), extra_special_tokens=names
    )
    processor = Gemma3Processor(Gemma3ImageProcessorPil(), tokenizer)
    return Family(
        ours=OursGemma3(),
        specials=specials,
        template=_CHATML.replace("<|im_start|>", "<start_of_turn>")
        .replace("<|im_end|>", "<end_of_turn>")
        .replace("IMAGE", "<start_of_image>")
        # As the published one does, which takes plain text too:
        .replace("part['text']", "part['text'] | trim")
        .replace(
            "{% for part",
            "{% if m['content'] is string %}{{ m['content'] | trim }}{% else %}{% for part",
        )
        .replace("{% endfor %}<end", "{% endfor %}{% endif %}<end"),
        processor=processor,
        image=lambda width, height: processor.replace_image_token({"num_crops": [0]}, 0),
    )


def _idefics3() -> Family:
    specials = ("<|im_start|>", "<end_of_utterance>", "<image>", *_TILE_TOKENS)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=train(list(specials)))
    processor = Idefics3Processor(Idefics3ImageProcessorPil(), tokenizer, image_seq_len=169)
    return Family(
        ours=OursIdefics3(),
        specials=specials,
        template=_SMOLVLM_TEMPLATE,
        processor=processor,
        image=lambda width, height: _tiles_text(processor, Idefics3Tiles(364), width, height),
    )


def _smolvlm() -> Family:
    specials = ("<|im_start|>", "<end_of_utterance>", "<image>", *_TILE_TOKENS)
    processor = made(
        SmolVLMProcessor,
        image_token="<image>",
        video_token="<video>",
        fake_image_token="<fake_token_around_image>",
        global_image_token="<global-img>",
        image_seq_len=81,
    )
    videos = SmolVLMVideoProcessor(
        video_sampling={"fps": 1, "max_frames": 64, "video_size": {"longest_edge": 384}}
    )

    def clip(header: VideoHeader) -> str:
        about = metadata(header, list(map(int, videos.sample_frames(metadata(header)))))
        frames = {
            "pixel_values": np.zeros((1, len(about.frames_indices))),
            "video_metadata": [about],
        }
        return str(processor.replace_video_token(frames, 0))

    return Family(
        ours=OursIdefics3(kind="smolvlm2"),
        specials=specials,
        template=_SMOLVLM_TEMPLATE,
        processor=processor,
        image=lambda width, height: _tiles_text(processor, Idefics3Tiles(384), width, height),
        clip=clip if smolvlm.num2words else None,
    )


def _tiles_text(processor: Any, judge: Idefics3Tiles, width: int, height: int) -> str:
    rows, columns = judge.rows_and_columns(width, height)
    return str(processor.replace_image_token({"rows": [[rows]], "cols": [[columns]]}, 0))


def _llava_next() -> Family:
    judge = LlavaNextSquares()
    return Family(
        ours=OursLlavaNext(),
        specials=("<|im_start|>", "<|im_end|>", "<image>"),
        template=_CHATML.replace("IMAGE", "<image>\\n"),
        processor=judge.processor,
        image=judge.text,
    )


_QWEN_SPECIALS = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>",
    "<|image_pad|>", "<|video_pad|>",
)  # fmt: skip
_TILE_TOKENS = (
    "<fake_token_around_image>",
    "<global-img>",
    *(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)),
)
_CHATML = """{% for m in messages %}<|im_start|>{{ m['role'] }}\n\
{% for part in m['content'] %}{% if part['type'] == 'image' %}{{ 'IMAGE' }}\
{% elif part['type'] == 'video' %}{{ 'VIDEO' }}{% else %}{{ part['text'] }}{% endif %}\
{% endfor %}<|im_end|>\n{% endfor %}\
{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"""
_QWEN_TEMPLATE = _CHATML.replace("IMAGE", "<|vision_start|><|image_pad|><|vision_end|>").replace(
    "VIDEO", "<|vision_start|><|video_pad|><|vision_end|>"
)
_SMOLVLM_TEMPLATE = """<|im_start|>{% for m in messages %}{{ m['role'] | capitalize }}: \
{% for part in m['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}\
{% elif part['type'] == 'image' %}{{ '<image>' }}{% elif part['type'] == 'video' %}{{ '<video>' }}\
{% endif %}{% endfor %}<end_of_utterance>\n{% endfor %}\
{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"""
FAMILIES: dict[str, Callable[[], Family]] = {
    "gemma3": _gemma3,
    "idefics3": _idefics3,
    "internvl": _internvl,
    "llava_next": _llava_next,
    "qwen2_5_vl": _qwen2_vl,
    "qwen3_vl": _qwen3_vl,
    "smolvlm": _smolvlm,
}
