"""The job file's `pipeline` section: how samples become tokens and encoder items."""

from dataclasses import dataclass, field
from datetime import date
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from dataservice.core.errors import SpecError
from dataservice.core.job import STRICT
from dataservice.decode.placeholders import PlaceholderTokens
from dataservice.decode.processors.internvl import InternVLProcessor
from dataservice.decode.processors.llava import LlavaProcessor
from dataservice.decode.processors.qwen2_vl import Qwen2VLProcessor
from dataservice.decode.processors.whisper import WhisperProcessor


@dataclass(frozen=True, kw_only=True, slots=True)
class CustomVisionSpec:
    """A vision processor of the user's own, which the service's config names by import path."""

    __pydantic_config__: ClassVar[dict[str, object]] = STRICT

    kind: Literal["custom"] = "custom"
    """Chooses a custom processor."""
    name: str
    """Its name in the service's config."""
    options: dict[str, object] = field(default_factory=dict)
    """Keyword arguments it is made with."""


VisionProcessorSpec = Annotated[
    Qwen2VLProcessor | InternVLProcessor | LlavaProcessor | CustomVisionSpec,
    Field(discriminator="kind"),
]
AudioSpec = WhisperProcessor


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineSpec:
    """How samples become tokens and encoder items. All of it decides lengths."""

    __pydantic_config__: ClassVar[dict[str, object]] = STRICT

    tokenizer: str
    """Path of a tokenizer.json, or of a folder that holds it with its tokenizer_config.json."""
    chat_template: str = "auto"
    """auto (the tokenizer's own, else ChatML), chatml, or the path of a .jinja file."""
    template_date: date = date(2025, 1, 1)
    """What a template that asks for today's date is told; a sample's length must not change
    with the day."""
    vision: VisionProcessorSpec | None = None
    """Processor of images and video; none refuses samples that have them."""
    audio: AudioSpec | None = None
    """Processor of audio; none refuses samples that have it."""
    image_tokens: PlaceholderTokens | None = None
    """Tokens around and for an image; by default the known ones that the vocabulary has."""
    video_tokens: PlaceholderTokens | None = None
    """The same for a clip; by default its own, else those of an image."""
    audio_tokens: PlaceholderTokens | None = None
    """The same for a recording."""
    content_tokens: tuple[str, ...] = ()
    """Control tokens that the samples' own text may write, such as <|box_start|>; all others
    are read as plain text there."""
    end_of_document_token: str | None = None
    """Behind a plain document; by default <|endoftext|> or its like, else the eos token."""
    max_sample_tokens: int | None = None
    """Longer samples are refused, with their length; by default none is."""

    def __post_init__(self) -> None:
        if self.max_sample_tokens is not None and self.max_sample_tokens < 1:
            raise SpecError(
                f"max_sample_tokens is {self.max_sample_tokens}; it must be at least 1, or absent."
            )
