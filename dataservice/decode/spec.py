"""The job file's `pipeline` section: how samples become tokens and encoder items."""

from dataclasses import dataclass, field, replace
from datetime import date
from typing import Annotated, ClassVar, Literal, get_args, get_type_hints

from pydantic import Field

from dataservice.core.errors import SpecError
from dataservice.core.job import STRICT, CodeSpec
from dataservice.core.positions import IN_SEQUENCE, PositionRule
from dataservice.decode.placeholders import PlaceholderTokens
from dataservice.decode.processors.frames import require_unit_frames
from dataservice.decode.processors.gemma3 import Gemma3Processor
from dataservice.decode.processors.idefics3 import Idefics3Processor
from dataservice.decode.processors.internvl import InternVLProcessor
from dataservice.decode.processors.llava import LlavaProcessor
from dataservice.decode.processors.llava_next import LlavaNextProcessor
from dataservice.decode.processors.qwen2_vl import Qwen2VLProcessor
from dataservice.decode.processors.qwen3_vl import Qwen3VLProcessor
from dataservice.decode.processors.siglip import SiglipProcessor
from dataservice.decode.processors.transformers_image import TransformersImageSpec
from dataservice.decode.processors.whisper import WhisperProcessor


@dataclass(frozen=True, kw_only=True, slots=True)
class CustomVisionSpec:
    """A vision processor of the user's own."""

    __pydantic_config__: ClassVar[dict[str, object]] = STRICT

    kind: Literal["custom"] = "custom"
    """Chooses a custom processor."""
    name: str
    """Its name in the service's config, or its import path `package.module:Class`, where the
    service takes one."""
    options: dict[str, object] = field(default_factory=dict)
    """Keyword arguments it is made with."""
    unit_frames: int = 0
    """Tiles or frames that the model's encoder takes together, where none attends to one outside:
    1 where it encodes each by itself. Between those, large pictures and clips may be cut for
    several replicas; by default they are whole."""

    def __post_init__(self) -> None:
        require_unit_frames(self.unit_frames)


@dataclass(frozen=True, kw_only=True, slots=True)
class AugmentSpec:
    """Code of the user's own, or a transform of torchvision's, that changes decoded pixels and
    sound otherwise in each epoch."""

    __pydantic_config__: ClassVar[dict[str, object]] = STRICT

    name: str
    """Its name in the service's config, or its import path `package.module:Class`, where the
    service takes one."""
    options: dict[str, object] = field(default_factory=dict)
    """Keyword arguments its class is made with."""
    seed: int = 0
    """Another seed gives other random changes."""


BuiltInVision = (
    Qwen2VLProcessor
    | Qwen3VLProcessor
    | InternVLProcessor
    | LlavaProcessor
    | LlavaNextProcessor
    | Gemma3Processor
    | Idefics3Processor
    | SiglipProcessor
)
BUILT_IN: tuple[str, ...] = tuple(
    name
    for processor in get_args(BuiltInVision)
    for name in get_args(get_type_hints(processor)["kind"])
)
"""The names of all families that are built in, beside transformers and custom."""
VisionProcessorSpec = Annotated[
    BuiltInVision | TransformersImageSpec | CustomVisionSpec, Field(discriminator="kind")
]
AudioSpec = WhisperProcessor


@dataclass(frozen=True, kw_only=True, slots=True)
class LongerThan:
    """What becomes of samples that have more tokens than a job wants."""

    __pydantic_config__: ClassVar[dict[str, object]] = STRICT

    tokens: int
    """LLM tokens that a sample may have, at least 2."""
    then: Literal["cut", "drop", "refuse"] = "refuse"
    """refuse: an index with longer samples is refused, and says how many there are; drop: they are
    left out, and counted; cut: a document of text becomes several samples of at most so many
    tokens."""
    otherwise: Literal["drop", "refuse"] = "refuse"
    """With cut, what becomes of longer samples that cannot be cut: conversations, and whatever has
    media."""

    def __post_init__(self) -> None:
        if self.tokens < 2:
            raise SpecError(
                f"longer_than.tokens is {self.tokens}; it must be at least 2: a token alone has no "
                "target."
            )
        if self.otherwise == "drop" and not self.cuts:
            raise SpecError(
                f"longer_than has otherwise: drop beside then: {self.then}; otherwise is for what "
                "cannot be cut. Write then: cut, or leave otherwise out."
            )

    @property
    def cuts(self) -> bool:
        """Whether documents of text are cut."""
        return self.then == "cut"

    @property
    def refuses(self) -> bool:
        """Whether an index is refused for longer samples that are not cut."""
        return (self.otherwise if self.cuts else self.then) == "refuse"


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineSpec:
    """How samples become tokens and encoder items. All decides lengths, but for `augment`, and for
    `positions` and `tokens_per_second`, which say where a model places its tokens."""

    __pydantic_config__: ClassVar[dict[str, object]] = STRICT

    tokenizer: str
    """Path of a tokenizer.json, or of a folder that holds it with its tokenizer_config.json."""
    tokenizer_code: CodeSpec | None = None
    """Code of the user's own in place of tokenizer.json. It is made with the path above as
    `folder`, where tokenizer_config.json and the chat template are read as ever."""
    chat_template: str = "auto"
    """auto (the tokenizer's own, else ChatML if it has its tokens), chatml, or the path of a
    .jinja file."""
    template_date: date = date(2025, 1, 1)
    """What a template that asks for today's date is told; a sample's length must not change
    with the day."""
    prepare: tuple[CodeSpec, ...] = ()
    """Code of the user's own that every sample passes through as it is read, in this order: it maps
    records and media, and leaves samples out."""
    augment: tuple[AugmentSpec, ...] = ()
    """Random changes of decoded pixels and sound, in this order: the same for a sample in an epoch,
    whoever decodes it. They keep every length, so no index is made again for them."""
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
    positions: Literal["auto", "sequence", "past_time"] = "auto"
    """How ranks are told to count positions. auto: as the processor's family of models does, M-RoPE
    for qwen2_vl; past_time: the same, but the text behind a clip begins past its last time, as
    transformers 4 counts; sequence: by place in the sample, whatever the processor."""
    tokens_per_second: float | None = None
    """Positions that one second of a clip takes in the model's configuration; by default the
    published models' number: 2 for qwen2_5_vl, and none for families that count patches."""
    max_sample_tokens: int | None = None
    """Longer samples are refused, with their length; by default none is."""
    longer_than: LongerThan | None = None
    """In its place: a length, and what becomes of longer samples."""

    def __post_init__(self) -> None:
        if self.max_sample_tokens is not None and self.longer_than is not None:
            raise SpecError(
                f"the pipeline has max_sample_tokens: {self.max_sample_tokens} and longer_than: "
                f"{self.longer_than.tokens} tokens; both bound a sample. Keep longer_than: with "
                "then: drop it does what max_sample_tokens does."
            )
        if self.max_sample_tokens is not None and self.max_sample_tokens < 1:
            raise SpecError(
                f"max_sample_tokens is {self.max_sample_tokens}; it must be at least 1, or absent."
            )
        if self.tokens_per_second is not None and not 0 <= self.tokens_per_second <= 1000:
            raise SpecError(
                f"tokens_per_second is {self.tokens_per_second}; it must be in 0..1000, or absent."
            )

    @property
    def own_code(self) -> bool:
        """Whether it runs code that a team chose."""
        custom = isinstance(self.vision, CustomVisionSpec)
        return bool(self.prepare or self.augment or self.tokenizer_code or custom)

    @property
    def unit_frames(self) -> int:
        """Frames of a picture or clip that the encoder takes together, and between which it may be
        cut; 0 where its processor does not say so."""
        return int(getattr(self.vision, "unit_frames", 0))

    @property
    def position_rule(self) -> PositionRule:
        """How the model counts positions."""
        if self.positions == "sequence":
            return IN_SEQUENCE
        # A processor without a rule of its own is of models that count in sequence.
        rule: PositionRule = getattr(self.vision, "positions", IN_SEQUENCE)
        seconds = self.tokens_per_second
        return replace(
            rule,
            tokens_per_second=rule.tokens_per_second if seconds is None else seconds,
            past_time=self.positions == "past_time",
        )
