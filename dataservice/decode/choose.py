"""Chooses a spec's parts: processors, placeholder tokens, template, end-of-document token."""

from collections.abc import Mapping
from pathlib import Path
from typing import cast

from dataservice.core.errors import SpecError
from dataservice.core.named_files import read_named
from dataservice.core.own_code import made_of
from dataservice.core.quoting import cut, quoted
from dataservice.core.sample import MediaKind
from dataservice.decode.chat_template import (
    CHATML,
    CHATML_TOKENS,
    PALIGEMMA,
    TemplateSource,
    no_template,
)
from dataservice.decode.own_tokenizer import load_own_tokenizer
from dataservice.decode.placeholders import PlaceholderTokens, check_tokens, default_tokens
from dataservice.decode.processors.base import VisionProcessor
from dataservice.decode.processors.transformers_image import TransformersImageSpec
from dataservice.decode.spec import BUILT_IN, CustomVisionSpec, PipelineSpec, VisionProcessorSpec
from dataservice.decode.tokenizer import LoadedTokenizer, load_tokenizer


def choose_tokenizer(spec: PipelineSpec, custom: Mapping[str, type]) -> LoadedTokenizer:
    """The tokenizer.json of the spec, or the tokenizer of the user's own. Raises SpecError."""
    if spec.tokenizer_code is None:
        return load_tokenizer(spec.tokenizer)
    return load_own_tokenizer(spec.tokenizer_code, spec.tokenizer, custom)


def choose_vision(
    spec: VisionProcessorSpec | None, custom: Mapping[str, type]
) -> VisionProcessor | None:
    if isinstance(spec, TransformersImageSpec):
        return spec.load()
    if not isinstance(spec, CustomVisionSpec):
        return spec
    processor = made_of(
        custom,
        spec.name,
        spec.options,
        what="vision processor",
        instead=f", or use one that is built in: {', '.join(BUILT_IN)}",
    )
    missing = [name for name in ("plan_image", "plan_video") if not hasattr(processor, name)]
    if missing:
        raise SpecError(
            f"vision processor {quoted(spec.name)} is a {type(processor).__name__} without "
            f"{' and '.join(missing)}; see VisionProcessor in decode/processors/base.py."
        )
    return cast(VisionProcessor, processor)


def choose_placeholders(
    spec: PipelineSpec, tokenizer: LoadedTokenizer
) -> dict[MediaKind, PlaceholderTokens]:
    """The checked placeholder tokens of each kind that the job has a processor for."""
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
                f"the tokenizer {quoted(tokenizer.path)} has no known placeholder tokens for "
                f"{kind}, such as <|image_pad|>, <IMG_CONTEXT>, <image>, <|audio_pad|>. Add them "
                f"to it, or name its own as {kind}_tokens: {{start, pad, end}}."
            )
        check_tokens(kind, tokens, tokenizer)
        found[kind] = tokens
    _check_literals(spec, tokenizer)
    return found


def _check_literals(spec: PipelineSpec, tokenizer: LoadedTokenizer) -> None:
    """Raises SpecError when the processor writes control tokens that the vocabulary lacks: they
    would be read as plain text."""
    for token in _literals(spec):
        if not tokenizer.has_token(token):
            raise SpecError(
                f"the tokenizer {quoted(tokenizer.path)} does not have {quoted(token)}, which "
                f"{getattr(spec.vision, 'kind', 'the processor')} writes around media. Use the "
                "tokenizer of its model, or add the token."
            )


def _literals(spec: PipelineSpec) -> tuple[str, ...]:
    """Control tokens that the job's processor itself writes into the texts of media."""
    return getattr(spec.vision, "literals", ())


def guarded_tokens(
    spec: PipelineSpec,
    tokenizer: LoadedTokenizer,
    placeholders: Mapping[MediaKind, PlaceholderTokens],
) -> tuple[str, ...]:
    """The tokens that a sample's text cannot write: control tokens, unless the spec allows them,
    and always the tokens of media."""
    media = media_tokens(spec, placeholders)
    for token in spec.content_tokens:
        if tokenizer.id_of(token) is None or token in media:
            raise SpecError(
                f"content_tokens names {quoted(token)}, which is "
                f"{'a media token' if token in media else 'not in the vocabulary'} of "
                f"{quoted(tokenizer.path)}. Name control tokens of the vocabulary other than those "
                "of media."
            )
    control = {*tokenizer.specials, *(t for t in CHATML_TOKENS if tokenizer.id_of(t) is not None)}
    return tuple((control - set(spec.content_tokens)) | media)


def media_tokens(
    spec: PipelineSpec, placeholders: Mapping[MediaKind, PlaceholderTokens]
) -> set[str]:
    """The tokens that only media may be written with."""
    named = {
        token for tokens in placeholders.values() for token in (*tokens.tokens, tokens.written)
    }
    return named | {*_literals(spec)}


def distinct_pads(placeholders: Mapping[MediaKind, PlaceholderTokens]) -> dict[MediaKind, str]:
    """What a template writes for one medium. Where it writes the same for several kinds, the kind
    cannot be told from the text, and the first has it: an image before the clips of a family that
    writes them as images or takes none."""
    found: dict[MediaKind, str] = {}
    for kind, tokens in placeholders.items():
        if tokens.written not in found.values():
            found[kind] = tokens.written
    return found


def choose_template(spec: PipelineSpec, tokenizer: LoadedTokenizer) -> TemplateSource | None:
    """The template named by the spec, or the tokenizer's own, or its model's processor's, or ChatML
    if the tokenizer has its tokens and no templates of its own; else None. A job of plain texts
    needs no template."""
    name = spec.chat_template
    if name == "auto" and tokenizer.template is not None:
        name, text = f"{tokenizer.path} (its own)", tokenizer.template
    elif name == "auto" and tokenizer.is_paligemma:
        name, text = "paligemma", PALIGEMMA
    elif name == "auto" and tokenizer.others:
        return None  # shown by ChatML, turns would be tokens that its model has never seen
    elif name in ("auto", "chatml"):
        if not all(map(tokenizer.has_token, CHATML_TOKENS)):
            if name == "auto":
                return None
            raise SpecError(no_template(tokenizer))
        name, text = "chatml", CHATML
    else:
        try:
            text = read_named(Path(name)).decode("utf-8")
        except (OSError, ValueError) as error:
            raise SpecError(
                f"chat template {quoted(name)} cannot be read: {cut(error)}. Give auto, chatml, or "
                "the path of a .jinja file that workers can read too."
            ) from error
    return TemplateSource(name=name, text=text, tokens=tokenizer.named, today=spec.template_date)


def check_named(tokenizer: LoadedTokenizer, template: TemplateSource | None) -> None:
    """Raises SpecError where samples would be written with a token that the configuration names and
    the vocabulary lacks: it would be read as plain text."""
    written = template.text if template else ""
    for name, token in tokenizer.absent.items():
        begins = tokenizer.adds_bos and name == "bos_token"
        if begins or name in written or token in written:
            raise SpecError(
                f"the tokenizer {quoted(tokenizer.path)} does not have {quoted(token)}, which its "
                f"configuration names as {quoted(name)}: it would be read as several tokens of "
                "plain text. Run, in Python, transformers.AutoTokenizer.from_pretrained('FOLDER')"
                ".save_pretrained('FOLDER'), which adds it to tokenizer.json."
            )


def choose_end_of_document(spec: PipelineSpec, tokenizer: LoadedTokenizer) -> str | None:
    token = spec.end_of_document_token
    if token is not None and tokenizer.id_of(token) is None:
        raise SpecError(
            f"end_of_document_token {quoted(token)} is not in the vocabulary of "
            f"{quoted(tokenizer.path)}. Name one of its tokens."
        )
    return token or tokenizer.end_of_document
