"""The job's text and media pipeline: raw samples to lengths, and to arrays of those lengths."""

import hashlib
import inspect
import json
from collections.abc import Mapping
from dataclasses import asdict

from dataservice.core.errors import SampleError
from dataservice.core.limits import DEFAULT_LIMITS, DecodeLimits
from dataservice.core.ports import SampleDecoder, SampleMeasurer
from dataservice.core.sample import DecodedSample, ItemLengths, RawSample, SampleLengths
from dataservice.decode.chat_template import ChatTemplate
from dataservice.decode.choose import (
    choose_end_of_document,
    choose_placeholders,
    choose_template,
    choose_vision,
    distinct_pads,
    guarded_tokens,
)
from dataservice.decode.conversation import Conversation, read_record, text_bytes
from dataservice.decode.media import ItemArray, ItemCost, Media, MediaPipeline, item_costs
from dataservice.decode.spec import CustomVisionSpec, PipelineSpec
from dataservice.decode.text import TextPipeline, TokenSequence
from dataservice.decode.tokenizer import Guard, load_tokenizer

__all__ = ["LENGTHS_VERSION", "Pipeline", "PipelineSpec", "build_pipeline"]

# Raise when a release changes the lengths that the same spec gives: old indexes turn stale.
LENGTHS_VERSION = 1


class Pipeline(SampleMeasurer, SampleDecoder):
    """Measures and decodes samples: `SampleMeasurer` and `SampleDecoder` in one.

    May be used from many threads at once. Both methods tokenise and read headers by the same
    code, so a sample decodes to exactly the lengths it was measured with or is refused.
    """

    def __init__(
        self,
        *,
        spec: PipelineSpec,
        text: TextPipeline,
        media: MediaPipeline,
        fingerprint: str,
        pad_token_id: int,
    ) -> None:
        """Use `build_pipeline`."""
        self._spec = spec
        self._text = text
        self._media = media
        self._fingerprint = fingerprint
        self._pad_token_id = pad_token_id

    @property
    def fingerprint(self) -> str:
        """Digest of the tokenizer, template and processors that decide the lengths."""
        return self._fingerprint

    @property
    def pad_token_id(self) -> int:
        """Fills padding and masked samples."""
        return self._pad_token_id

    def measure(self, raw: RawSample) -> SampleLengths:
        """Lengths from headers and tokenising, without decoding media.

        Raises:
            SampleError: the sample cannot be used; says why.
        """
        lengths, _, _ = self._prepared(raw)
        return lengths

    def decode(self, raw: RawSample, planned: SampleLengths) -> DecodedSample:
        """The sample as arrays of exactly the planned lengths.

        Raises:
            SampleError: it cannot be decoded, or is no longer what was measured.
        """
        lengths, sequence, media = self._prepared(raw)
        if lengths != planned:
            raise SampleError(
                f"sample {raw.key!r} has {_described(lengths)}, the plan says "
                f"{_described(planned)}: it changed since it was indexed. Index its source again."
            )
        items: list[ItemArray] = []
        for slot in sequence.slots:
            items.extend(self._media.decode(raw.media[slot.file], media[slot.file]))
        for item, expected in zip(items, lengths.items, strict=True):
            assert item.shape == expected.shape, "media decode to their planned shape or raise"
        return DecodedSample(input_ids=sequence.ids, labels=sequence.labels(), items=tuple(items))

    def _prepared(self, raw: RawSample) -> tuple[SampleLengths, TokenSequence, list[Media]]:
        """What measuring and decoding share: tokens, media plans, and the lengths they give."""
        limits = self._media.limits
        limits.check("max_media_items", len(raw.media), "the sample: media files")
        limits.check_nesting(raw.record, "the record")
        source = read_record(raw.record, [blob.kind for blob in raw.media])
        if isinstance(source, Conversation):  # from strings of JSON too
            limits.check_nesting([source.tools, [m.extras for m in source.messages]], "the record")
        limits.check("max_text_bytes", text_bytes(source), "the sample: bytes of text")
        media = [self._media.plan(blob) for blob in raw.media]
        costs = [item_costs(one) for one in media]
        limits.check(
            "max_decoded_bytes",
            sum(item.size_bytes for cost in costs for item in cost),
            "the sample: bytes of its pixels and sound, decoded",
        )
        files = [
            (blob.kind, sum(item.llm_tokens for item in cost))
            for blob, cost in zip(raw.media, costs, strict=True)
        ]
        sequence = self._text.tokens(source, files)
        lengths = SampleLengths(
            llm_tokens=len(sequence.ids),
            loss_tokens=sequence.loss_tokens,
            items=_placed(sequence, costs),
        )
        self._check_length(lengths)
        return lengths, sequence, media

    def _check_length(self, lengths: SampleLengths) -> None:
        limit = self._spec.max_sample_tokens
        if limit is not None and lengths.llm_tokens > limit:
            raise SampleError(
                f"the sample has {lengths.llm_tokens} tokens ({lengths.text_tokens} of text, "
                f"{len(lengths.items)} media items); max_sample_tokens is {limit}. Raise the "
                "limit, lower the processor's resolution, or split the sample."
            )


def build_pipeline(
    spec: PipelineSpec,
    *,
    custom_processors: Mapping[str, type] | None = None,
    limits: DecodeLimits = DEFAULT_LIMITS,
) -> Pipeline:
    """Load the tokenizer and template, choose processors and placeholder tokens.

    `custom_processors` are the classes that the service's config allows, by name; a job can
    refer to these and no others.

    Raises:
        SpecError: a file is missing or damaged, a processor or token is unknown.
    """
    tokenizer = load_tokenizer(spec.tokenizer)
    vision = choose_vision(spec.vision, custom_processors or {})
    placeholders = choose_placeholders(spec, tokenizer)
    guard = Guard(guarded_tokens(spec, tokenizer, placeholders))
    source = choose_template(spec, tokenizer)
    template = ChatTemplate(source, guard=guard, pads=distinct_pads(placeholders))
    end_of_document = choose_end_of_document(spec, tokenizer)
    return Pipeline(
        spec=spec,
        text=TextPipeline(
            tokenizer=tokenizer,
            guard=guard,
            template=template,
            placeholders=placeholders,
            end_of_document=end_of_document,
            limits=limits,
        ),
        media=MediaPipeline(vision=vision, audio=spec.audio, limits=limits),
        fingerprint=_digest(
            LENGTHS_VERSION,
            tokenizer.digest,
            tokenizer.named,
            tokenizer.adds_bos,
            source.text,
            str(source.today),
            {kind: asdict(tokens) for kind, tokens in placeholders.items()},
            end_of_document,
            sorted(spec.content_tokens),
            asdict(spec.vision) if spec.vision else None,
            _source_of(type(vision)) if isinstance(spec.vision, CustomVisionSpec) else None,
            asdict(spec.audio) if spec.audio else None,
            spec.max_sample_tokens,
            # Other limits leave other samples in the index.
            limits.changed,
        ),
        pad_token_id=tokenizer.pad_token_id,
    )


def _placed(sequence: TokenSequence, costs: list[tuple[ItemCost, ...]]) -> tuple[ItemLengths, ...]:
    """Items in the order of their tokens; those of one file lie end to end."""
    items = []
    for slot in sequence.slots:
        position = slot.position
        for cost in costs[slot.file]:
            items.append(
                ItemLengths(
                    modality=cost.modality,
                    encoder_tokens=cost.encoder_tokens,
                    llm_tokens=cost.llm_tokens,
                    position=position,
                    shape=cost.shape,
                )
            )
            position += cost.llm_tokens
    return tuple(items)


def _source_of(kind: type) -> str:
    """A custom class by name and, where Python has it, by its text: new rules, new digest."""
    try:
        text = inspect.getsource(kind)
    except (OSError, TypeError):
        text = ""
    return f"{kind.__module__}.{kind.__qualname__}\n{text}"


def _digest(*parts: object) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


def _described(lengths: SampleLengths) -> str:
    shapes = [item.shape for item in lengths.items]
    shown = ", ".join(map(str, shapes[:4])) + (" …" if len(shapes) > 4 else "")
    return f"{lengths.llm_tokens} tokens and items of shape [{shown}]"
