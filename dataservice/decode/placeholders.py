"""The tokens that stand for media in a sequence, found in the tokenizer's vocabulary."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from dataservice.core.errors import SpecError
from dataservice.core.job import STRICT
from dataservice.core.quoting import quoted
from dataservice.core.sample import MediaKind

# The job file names placeholders, and is read without loading a tokenizer.
if TYPE_CHECKING:
    from dataservice.decode.tokenizer import LoadedTokenizer


@dataclass(frozen=True, kw_only=True, slots=True)
class PlaceholderTokens:
    """The tokens of one kind of media: start, `pad` once for each LLM token, end."""

    __pydantic_config__: ClassVar[dict[str, object]] = STRICT

    pad: str
    """Repeated once for each LLM token of the item."""
    start: str | None = None
    """Before the first of them; none by default."""
    end: str | None = None
    """Behind the last of them; none by default."""
    template: str | None = None
    """What the model's chat template writes for one medium, if it leaves start and end to the
    processor; by default it writes start, pad and end."""

    @property
    def text(self) -> str:
        """One run before its pad token is repeated."""
        return f"{self.start or ''}{self.pad}{self.end or ''}"

    @property
    def written(self) -> str:
        """By which a medium is known in what the chat template writes."""
        return self.template or self.pad

    @property
    def slots(self) -> tuple[str, ...]:
        """The texts that are one medium in what the chat template writes."""
        return (self.text, self.pad) if self.written == self.pad else (self.written,)

    @property
    def tokens(self) -> tuple[str, ...]:
        """The tokens that are named."""
        return tuple(token for token in (self.start, self.pad, self.end) if token)


_QWEN_IMAGE = PlaceholderTokens(start="<|vision_start|>", pad="<|image_pad|>", end="<|vision_end|>")
_QWEN_VIDEO = PlaceholderTokens(start="<|vision_start|>", pad="<|video_pad|>", end="<|vision_end|>")
_INTERNVL = {"start": "<img>", "pad": "<IMG_CONTEXT>", "end": "</img>"}
_INTERNVL_IMAGE = PlaceholderTokens(**_INTERNVL, template="<IMG_CONTEXT>")
_INTERNVL_VIDEO = PlaceholderTokens(**_INTERNVL, template="<video>")
_IMAGE = PlaceholderTokens(pad="<image>")
_VIDEO = PlaceholderTokens(pad="<video>")
_VIDEO_OF_IMAGES = PlaceholderTokens(pad="<image>", template="<video>")
_GEMMA3 = PlaceholderTokens(
    start="<start_of_image>",
    pad="<image_soft_token>",
    end="<end_of_image>",
    template="<start_of_image>",
)

# Of an image and of a clip, by family. The first whose tokens are all in the vocabulary is used; a
# processor's own come first.
_QWEN = (_QWEN_IMAGE, _QWEN_VIDEO)
_VISION = {
    "internvl": (_INTERNVL_IMAGE, _INTERNVL_VIDEO),
    "llava": (_IMAGE, _VIDEO),
    "qwen2_vl": _QWEN,
    "gemma3": (_GEMMA3, _GEMMA3),
    "smolvlm": (_IMAGE, _VIDEO_OF_IMAGES),
}
# Processors that use another family's tokens.
_FAMILY = {
    "idefics3": "smolvlm",
    "internvl2": "internvl",
    "internvl2_5": "internvl",
    "internvl3": "internvl",
    "llava1_5": "llava",
    "llava1_6": "llava",
    "llava_next": "llava",
    "qwen2_5_vl": "qwen2_vl",
    "qwen3_vl": "qwen2_vl",
    "siglip": "llava",
    "siglip2": "llava",
    "smolvlm2": "smolvlm",
}
_AUDIO = (
    PlaceholderTokens(start="<|audio_start|>", pad="<|audio_pad|>", end="<|audio_end|>"),
    PlaceholderTokens(start="<|audio_bos|>", pad="<|AUDIO|>", end="<|audio_eos|>"),
    PlaceholderTokens(pad="<|audio_pad|>"),
    PlaceholderTokens(pad="<audio>"),
)


def default_tokens(
    kind: MediaKind, processor: str, tokenizer: "LoadedTokenizer"
) -> PlaceholderTokens | None:
    """The known tokens of this kind that the vocabulary has, or None; those of the processor's
    family are tried first."""
    if kind == "audio":
        candidates: Sequence[PlaceholderTokens] = _AUDIO
    else:
        families = sorted(_VISION, key=lambda family: family != _FAMILY.get(processor, processor))
        candidates = [_VISION[family][kind == "video"] for family in families]
    for candidate in candidates:
        if all(tokenizer.id_of(token) is not None for token in candidate.tokens):
            return candidate
    return None


def check_tokens(kind: MediaKind, tokens: PlaceholderTokens, tokenizer: "LoadedTokenizer") -> None:
    """Raises SpecError unless each of `tokens` is one token of the vocabulary, also within running
    text."""
    for token in tokens.tokens:
        if len(token) < 2 or not tokenizer.has_token(token):
            raise SpecError(
                f"placeholder token {quoted(token)} for {kind} is not an added token of the "
                f"tokenizer {quoted(tokenizer.path)}, but other tokens in a row. Name one that is, "
                f"as {kind}_tokens: {{start, pad, end}}, or add it to the tokenizer."
            )
    if tokens.pad in (tokens.start, tokens.end):
        raise SpecError(
            f"placeholder tokens for {kind} use {quoted(tokens.pad)} as pad and as start or end; "
            "the pad token must differ from both."
        )
