"""From a spec to its parts: processor, placeholder tokens, template, end of document."""

from collections.abc import Mapping
from pathlib import Path
from typing import cast

from dataservice.core.errors import SpecError
from dataservice.core.sample import MediaKind
from dataservice.decode.chat_template import CHATML, TemplateSource
from dataservice.decode.placeholders import PlaceholderTokens, check_tokens, default_tokens
from dataservice.decode.processors.base import VisionProcessor
from dataservice.decode.spec import CustomVisionSpec, PipelineSpec, VisionProcessorSpec
from dataservice.decode.tokenizer import LoadedTokenizer


def choose_vision(
    spec: VisionProcessorSpec | None, custom: Mapping[str, type]
) -> VisionProcessor | None:
    if not isinstance(spec, CustomVisionSpec):
        return spec
    if spec.name not in custom:
        known = ", ".join(sorted(custom)) or "none"
        raise SpecError(
            f"vision processor {spec.name!r} is not in the service's config, which has: {known}. "
            "Ask who runs the service to add its import path, or use qwen2_vl, internvl or llava."
        )
    try:
        processor = custom[spec.name](**spec.options)
    except Exception as error:  # the user's own code may raise anything
        raise SpecError(
            f"vision processor {spec.name!r} cannot be made with options {spec.options}: {error}. "
            "Give the options that its class takes."
        ) from error
    missing = [name for name in ("plan_image", "plan_video") if not hasattr(processor, name)]
    if missing:
        raise SpecError(
            f"vision processor {spec.name!r} is a {type(processor).__name__} without "
            f"{' and '.join(missing)}; see VisionProcessor in decode/processors/base.py."
        )
    return cast(VisionProcessor, processor)


def choose_placeholders(
    spec: PipelineSpec, tokenizer: LoadedTokenizer
) -> dict[MediaKind, PlaceholderTokens]:
    """The tokens of each kind that the job has a processor for, checked."""
    given: dict[MediaKind, PlaceholderTokens | None] = {}
    if spec.vision is not None:
        own = spec.vision.kind
        image = spec.image_tokens or default_tokens("image", own, tokenizer)
        given["image"] = image
        given["video"] = spec.video_tokens or default_tokens("video", own, tokenizer) or image
    if spec.audio is not None:
        given["audio"] = spec.audio_tokens or default_tokens("audio", spec.audio.kind, tokenizer)
    found: dict[MediaKind, PlaceholderTokens] = {}
    for kind, tokens in given.items():
        if tokens is None:
            raise SpecError(
                f"the tokenizer {tokenizer.path!r} has no known placeholder tokens for {kind}, "
                "such as <|image_pad|>, <IMG_CONTEXT>, <image>, <|audio_pad|>. Add them to it, or "
                f"name its own as {kind}_tokens: {{start, pad, end}}."
            )
        check_tokens(kind, tokens, tokenizer)
        found[kind] = tokens
    return found


def guarded_tokens(
    spec: PipelineSpec,
    tokenizer: LoadedTokenizer,
    placeholders: Mapping[MediaKind, PlaceholderTokens],
) -> tuple[str, ...]:
    """The tokens that a sample's text cannot write: control tokens, unless the spec allows
    them, and those of media in any case."""
    media = {token for tokens in placeholders.values() for token in tokens.tokens}
    for token in spec.content_tokens:
        if tokenizer.id_of(token) is None or token in media:
            raise SpecError(
                f"content_tokens names {token!r}, which is "
                f"{'a media token' if token in media else 'not in the vocabulary'} of "
                f"{tokenizer.path!r}. Name control tokens of the vocabulary other than those of "
                "media."
            )
    return tuple((set(tokenizer.specials) - set(spec.content_tokens)) | media)


def distinct_pads(placeholders: Mapping[MediaKind, PlaceholderTokens]) -> dict[MediaKind, str]:
    """Pads that tell the kind. A template that writes a shared one cannot be read back."""
    pads = [tokens.pad for tokens in placeholders.values()]
    return {kind: t.pad for kind, t in placeholders.items() if pads.count(t.pad) == 1}


def choose_template(spec: PipelineSpec, tokenizer: LoadedTokenizer) -> TemplateSource:
    if spec.chat_template == "auto" and tokenizer.template is not None:
        name, text = f"{tokenizer.path} (its own)", tokenizer.template
    elif spec.chat_template in ("auto", "chatml"):
        name, text = "chatml", CHATML
    else:
        name = spec.chat_template
        try:
            text = Path(name).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise SpecError(
                f"chat template {name!r} cannot be read: {error}. Give auto, chatml, or the path "
                "of a .jinja file that workers can read too."
            ) from error
    return TemplateSource(name=name, text=text, tokens=tokenizer.named, today=spec.template_date)


def choose_end_of_document(spec: PipelineSpec, tokenizer: LoadedTokenizer) -> str | None:
    token = spec.end_of_document_token
    if token is not None and tokenizer.id_of(token) is None:
        raise SpecError(
            f"end_of_document_token {token!r} is not in the vocabulary of {tokenizer.path!r}. "
            "Name one of its tokens."
        )
    return token or tokenizer.end_of_document
