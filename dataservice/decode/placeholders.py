"""The tokens that stand for media in the sequence, found in the tokenizer's vocabulary."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from dataservice.core.errors import SpecError
from dataservice.core.job import STRICT
from dataservice.core.sample import MediaKind
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

    @property
    def text(self) -> str:
        """One medium before its pad token is repeated."""
        return f"{self.start or ''}{self.pad}{self.end or ''}"

    @property
    def tokens(self) -> tuple[str, ...]:
        """The tokens that are named."""
        return tuple(token for token in (self.start, self.pad, self.end) if token)


_QWEN_IMAGE = PlaceholderTokens(start="<|vision_start|>", pad="<|image_pad|>", end="<|vision_end|>")
_QWEN_VIDEO = PlaceholderTokens(start="<|vision_start|>", pad="<|video_pad|>", end="<|vision_end|>")
_INTERNVL = PlaceholderTokens(start="<img>", pad="<IMG_CONTEXT>", end="</img>")
_LLAVA_IMAGE = PlaceholderTokens(pad="<image>")
_LLAVA_VIDEO = PlaceholderTokens(pad="<video>")

# The first whose tokens are all in the vocabulary is taken; a processor's own come first.
_VISION = {
    "image": {"internvl": _INTERNVL, "llava": _LLAVA_IMAGE, "qwen2_vl": _QWEN_IMAGE},
    "video": {"internvl": _INTERNVL, "llava": _LLAVA_VIDEO, "qwen2_vl": _QWEN_VIDEO},
}
_AUDIO = (
    PlaceholderTokens(start="<|audio_start|>", pad="<|audio_pad|>", end="<|audio_end|>"),
    PlaceholderTokens(start="<|audio_bos|>", pad="<|AUDIO|>", end="<|audio_eos|>"),
    PlaceholderTokens(pad="<|audio_pad|>"),
    PlaceholderTokens(pad="<audio>"),
)


def default_tokens(
    kind: MediaKind, processor: str, tokenizer: LoadedTokenizer
) -> PlaceholderTokens | None:
    """The known tokens of this kind that the vocabulary has; `processor` names whose are
    tried first. None when it has none."""
    if kind == "audio":
        candidates: Sequence[PlaceholderTokens] = _AUDIO
    else:
        known = _VISION[kind]
        own = [known[processor]] if processor in known else []
        candidates = [*own, *(tokens for name, tokens in known.items() if name != processor)]
    for candidate in candidates:
        if all(tokenizer.id_of(token) is not None for token in candidate.tokens):
            return candidate
    return None


def check_tokens(kind: MediaKind, tokens: PlaceholderTokens, tokenizer: LoadedTokenizer) -> None:
    """Raises SpecError unless each is one token of the vocabulary, also in running text."""
    for token in tokens.tokens:
        token_id = tokenizer.id_of(token)
        shown = tokenizer.tokenizer.encode(f"a{token}b", add_special_tokens=False).ids
        if token_id is None or shown.count(token_id) != 1 or len(token) < 2:
            raise SpecError(
                f"placeholder token {token!r} for {kind} is not an added token of the tokenizer "
                f"{tokenizer.path!r} (it becomes {len(shown) - 2} other tokens). Name one that is, "
                f"as {kind}_tokens: {{start, pad, end}}, or add it to the tokenizer."
            )
    if tokens.pad in (tokens.start, tokens.end):
        raise SpecError(
            f"placeholder tokens for {kind} use {tokens.pad!r} as pad and as start or end; "
            "the pad token must differ from both."
        )
