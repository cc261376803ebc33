"""The job's text and media pipeline: it measures raw samples, and decodes them to arrays of exactly
those lengths."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial

from dataservice.core.errors import RESTORE, SampleError, caught, uncaught
from dataservice.core.job import CodeSpec
from dataservice.core.limits import DEFAULT_LIMITS, DecodeLimits
from dataservice.core.own_code import source_of
from dataservice.core.ports import Finish, SampleDecoder, SampleMeasurer, ToDecode
from dataservice.core.quoting import quoted
from dataservice.core.sample import (
    DecodedSample,
    ItemArray,
    ItemLengths,
    MediaBlob,
    RawSample,
    SampleLengths,
    piece_key,
)
from dataservice.decode.augment import Augmentation, choose_augmentation
from dataservice.decode.chat_template import ChatTemplate
from dataservice.decode.choose import (
    check_named,
    choose_end_of_document,
    choose_placeholders,
    choose_template,
    choose_tokenizer,
    choose_vision,
    distinct_pads,
    guarded_tokens,
    media_tokens,
)
from dataservice.decode.conversation import Conversation, Document, read_record, text_parts
from dataservice.decode.length_rule import LengthRule
from dataservice.decode.media import (
    ItemCost,
    Media,
    MediaPipeline,
    run_costs,
    texts_of,
)
from dataservice.decode.prepare import Preparation, choose_preparation
from dataservice.decode.processors.base import VisionProcessor
from dataservice.decode.processors.transformers_image import TransformersImageProcessor
from dataservice.decode.spec import AugmentSpec, CustomVisionSpec, PipelineSpec
from dataservice.decode.text import MediumText, TextPipeline
from dataservice.decode.token_sequences import TokenSequence, WrittenText
from dataservice.decode.tokenizer import Guard

__all__ = [
    "AUGMENT",
    "CONTENT_VERSION",
    "LENGTHS_VERSION",
    "Pipeline",
    "PipelineSpec",
    "build_pipeline",
]

# Increase when a release changes the lengths that the same spec gives: old indexes become stale.
LENGTHS_VERSION = 5
# Increase when a release changes the delivered pixels, sound or tokens of the same spec, but not
# its lengths.
CONTENT_VERSION = 3
PREPARE, AUGMENT = "prepare", "augment"  # parts of the identity


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelinePart:
    """An input that affects the decoded samples: the place it was read from, and its digest."""

    place: str
    digest: str


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnFormats:
    """The formats of the user's own among a job's sources: what makes a sample of the bytes that
    such a source reads, by source, and the parts of the identity that they are. Each is a matter of
    its own source's index, so the fingerprint does not count them."""

    parse: Mapping[str, Callable[[RawSample], RawSample]] = field(default_factory=dict)
    identity: Mapping[str, PipelinePart] = field(default_factory=dict)


class Pipeline(SampleMeasurer, SampleDecoder):
    """Measures and decodes samples: `SampleMeasurer` and `SampleDecoder` in one. Two pipelines
    whose `identity` has the same digests give the same result for every sample.

    May be used from many threads at once. Both methods tokenise and read headers with the same
    code, so a sample either decodes to exactly its measured lengths or is refused.
    """

    def __init__(
        self,
        *,
        spec: PipelineSpec,
        formats: OwnFormats,
        preparation: Preparation,
        augmentation: Augmentation,
        text: TextPipeline,
        media: MediaPipeline,
        identity: Mapping[str, PipelinePart],
        pad_token_id: int,
    ) -> None:
        """Use `build_pipeline`."""
        self._rule = LengthRule.of(spec)
        self._formats = formats
        self._preparation = preparation
        self._augmentation = augmentation
        self._text = text
        self._media = media
        self.identity = {**identity, **formats.identity}
        self._fingerprint = _digest(
            {name: part.digest for name, part in identity.items() if name != AUGMENT}
        )
        self._pad_token_id = pad_token_id

    @property
    def digests(self) -> dict[str, str]:
        """Digests of the identity's parts, by name."""
        return {name: part.digest for name, part in self.identity.items()}

    @property
    def fingerprint(self) -> str:
        """Digest of all that every source's index depends on: the identity without augmentation,
        and without formats of the user's own."""
        return self._fingerprint

    @property
    def augments(self) -> bool:
        """Whether samples come out otherwise in each epoch."""
        return AUGMENT in self.identity

    @property
    def pad_token_id(self) -> int:
        """Fills padding and masked samples."""
        return self._pad_token_id

    def measure(self, raw: RawSample) -> SampleLengths:
        """Lengths from headers and tokenising, without decoding media: of the sample, or of the
        piece that `raw` names.

        Raises:
            SampleError: the sample cannot be used; the message says why.
        """
        return self._prepared(raw).lengths

    def measure_pieces(self, raw: RawSample) -> tuple[SampleLengths, ...]:
        """The same of all samples that a sample as read becomes: the whole, or its pieces in order.

        Raises:
            SampleTooLongError: it is longer than `longer_than` allows, and is not cut.
            SampleError: the sample cannot be used; the message says why.
        """
        whole = uncaught(self._wholes([raw])[0])
        pieces = self._rule.pieces(whole.source, whole.lengths)
        if pieces == 1:
            return (whole.lengths,)
        return tuple(self._piece(whole, number).lengths for number in range(1, pieces + 1))

    def decode(
        self,
        raw: RawSample,
        planned: SampleLengths,
        epoch: int | None = None,
        places: Sequence[ItemArray] = (),
    ) -> DecodedSample:
        """The sample as arrays of exactly the planned lengths: augmented as in this epoch, or with
        None as it is. An augmenter may keep what it is given, so that no place is used for it.

        Raises:
            SampleError: it cannot be decoded, or is no longer the sample that was measured.
        """
        (finish,) = self.begin([ToDecode(raw, planned, epoch)])
        return finish(places)

    def begin(self, samples: Sequence[ToDecode]) -> list[Finish]:
        """All of `decode` that comes before media, of several samples step by step. Each step then
        finds what it needs in the processor's caches, which a picture's pixels or a text's tokens
        have emptied otherwise."""
        raws = [sample.raw for sample in samples]
        prepared = map(self._piece_of, raws, self._wholes(raws))
        return [partial(self._finish, *of) for of in zip(samples, prepared, strict=True)]

    def _finish(
        self, sample: ToDecode, begun: "_Prepared | Exception", places: Sequence[ItemArray]
    ) -> DecodedSample:
        (raw, planned, epoch), prepared = sample, uncaught(begun)
        lengths, sequence, media = prepared.lengths, prepared.sequence, prepared.media
        if lengths != planned:
            raise SampleError(
                f"sample {quoted(raw.key)} has {_described(lengths)}, the plan says "
                f"{_described(planned)}: it changed since it was indexed. {RESTORE}"
            )
        places = () if self.augments else places
        items: list[ItemArray] = []
        for slot in sequence.slots:
            if slot.run == 0:  # the items of one file follow one another
                file, left = slot.file, places[len(items) :]
                items.extend(self._media.decode(prepared.blobs[file], media[file], left))
        for item, expected in zip(items, lengths.items, strict=True):
            assert item.shape == expected.shape, "media decode to their planned shape or raise"
        if epoch is not None:
            items = list(self._augmented(prepared, items, raw.key, epoch))
        return DecodedSample(input_ids=sequence.ids, labels=sequence.labels, items=tuple(items))

    def augment(self, raw: RawSample, decoded: DecodedSample, epoch: int) -> DecodedSample:
        """What `decode` gives in this epoch, of what it gives without one."""
        if not self.augments:
            return decoded
        items = self._augmented(self._prepared(raw), decoded.items, raw.key, epoch)
        return replace(decoded, items=items)

    def _augmented(
        self, prepared: "_Prepared", items: Sequence[ItemArray], key: str, epoch: int
    ) -> tuple[ItemArray, ...]:
        kinds = [(prepared.blobs[file].kind, file) for file in prepared.files_of_items]
        return self._augmentation(items, kinds, key, epoch)

    def media_of(self, raw: RawSample) -> tuple[tuple[MediaBlob, ...], tuple[int, ...]]:
        """The sample's media, as the user's own code leaves them; and for each encoder item, in the
        order of `SampleLengths.items`, the place of its file among them. Raises SampleError."""
        prepared = self._prepared(raw)
        return prepared.blobs, prepared.files_of_items

    def text_of(self, ids: Sequence[int], start: int, end: int) -> str:
        """What the tokens `ids[start:end]` of a sample write, control tokens included. Raises
        SampleError where the tokenizer fails."""
        return self._text.text_of(ids, start, end)

    def _prepared(self, raw: RawSample) -> "_Prepared":
        """The steps that measuring and decoding share, for the whole sample or the piece that `raw`
        names."""
        return uncaught(self._piece_of(raw, self._wholes([raw])[0]))

    def _piece_of(self, raw: RawSample, whole: "_Prepared | Exception") -> "_Prepared | Exception":
        """The sample or the piece that `raw` names. A piece is cut from the tokens of the whole:
        tokenised alone, its text could give others."""
        if isinstance(whole, Exception):
            return whole
        pieces = self._rule.pieces(whole.source, whole.lengths)
        if not raw.piece and pieces == 1:
            return whole
        if not raw.piece:
            return SampleError(
                f"sample {quoted(raw.key)} has {whole.lengths.llm_tokens} tokens and is cut into "
                f"{pieces} samples. Name one of them, as {quoted(piece_key(raw.key, 1))}."
            )
        if pieces == 1 or not 1 <= raw.piece <= pieces:
            return SampleError(
                f"sample {quoted(raw.key)} is piece {raw.piece} of a document that has "
                f"{pieces if pieces > 1 else 'no'} pieces: it changed since it was indexed. "
                f"{RESTORE}"
            )
        return self._piece(whole, raw.piece)

    def _piece(self, whole: "_Prepared", number: int) -> "_Prepared":
        sequence = whole.sequence.piece(number, self._rule.piece_tokens)
        return replace(whole, sequence=sequence, lengths=_lengths(sequence, whole.costs))

    def _wholes(self, raws: Sequence[RawSample]) -> list["_Prepared | Exception"]:
        """Samples as a whole, or the error of each: their records and headers, then the tokens of
        all at once."""
        read = [caught(self._read, raw) for raw in raws]
        written = [each.written for each in read if isinstance(each, _Read)]
        sequences = iter(self._text.tokens(written))
        return [
            each if isinstance(each, Exception) else each.prepared(next(sequences)) for each in read
        ]

    def _read(self, raw: RawSample) -> "_Read":
        if raw.unparsed is not None:
            raw = self._formats.parse[raw.unparsed.source](raw)
        raw = self._preparation(raw)
        limits = self._media.limits
        limits.check("max_media_items", len(raw.media), "the sample: media files")
        limits.check_nesting(raw.record, "the record")
        kinds = [blob.kind for blob in raw.media]
        source = read_record(raw.record, kinds, raw.placeholders)
        if isinstance(source, Conversation):  # its JSON strings included
            limits.check_nesting([source.tools, [m.extras for m in source.messages]], "the record")
        limits.check_text(text_parts(source))
        media = [self._media.plan(blob) for blob in raw.media]
        costs = [run_costs(one) for one in media]
        limits.check(
            "max_decoded_bytes",
            sum(item.size_bytes for cost in costs for run in cost for item in run),
            "the sample: bytes of its pixels and sound, decoded",
        )
        files = [
            MediumText(
                kind=blob.kind,
                texts=texts_of(one),
                tokens=tuple(sum(item.llm_tokens for item in run) for run in cost),
            )
            for blob, one, cost in zip(raw.media, media, costs, strict=True)
        ]
        return _Read(
            source=source,
            written=self._text.write(source, files),
            blobs=raw.media,
            media=media,
            costs=costs,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Read:
    """A sample before it is tokenised: its turns or text, its text as written, and its files with
    the cost of their items by run."""

    source: Conversation | Document
    written: WrittenText
    blobs: tuple[MediaBlob, ...]
    media: Sequence[Media]
    costs: Sequence[Sequence[Sequence[ItemCost]]]

    def prepared(self, sequence: TokenSequence | Exception) -> "_Prepared | Exception":
        """The sample with its tokens, where it has some."""
        if isinstance(sequence, Exception):
            return sequence
        return _Prepared(
            source=self.source,
            sequence=sequence,
            blobs=self.blobs,
            media=self.media,
            costs=self.costs,
            lengths=_lengths(sequence, self.costs),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Prepared:
    """A sample or a piece of one before its media are decoded: its turns or text, its tokens, and
    its files with the cost of their items by run."""

    source: Conversation | Document
    sequence: TokenSequence
    blobs: tuple[MediaBlob, ...]
    media: Sequence[Media]
    costs: Sequence[Sequence[Sequence[ItemCost]]]
    lengths: SampleLengths

    @property
    def files_of_items(self) -> tuple[int, ...]:
        """The file of each encoder item, in the order of `lengths.items`."""
        slots = self.sequence.slots
        return tuple(slot.file for slot in slots for _ in self.costs[slot.file][slot.run])


def build_pipeline(
    spec: PipelineSpec,
    *,
    custom_processors: Mapping[str, type] | None = None,
    limits: DecodeLimits = DEFAULT_LIMITS,
    formats: OwnFormats | None = None,
) -> Pipeline:
    """Load the tokenizer and template, choose processors and placeholder tokens.

    `custom_processors` has the classes that the service's config allows, by name; a job can refer
    only to these.

    Raises:
        SpecError: a file is missing or damaged, a processor or token is unknown.
    """
    custom = {} if custom_processors is None else custom_processors
    tokenizer = choose_tokenizer(spec, custom)
    vision = choose_vision(spec.vision, custom)
    preparation = choose_preparation(spec.prepare, custom)
    augmentation = choose_augmentation(spec.augment, custom)
    placeholders = choose_placeholders(spec, tokenizer)
    guarded = guarded_tokens(spec, tokenizer, placeholders)
    media = media_tokens(spec, placeholders)
    guard = Guard(guarded, tokenizer.normalizer_before(guarded), media)
    source = choose_template(spec, tokenizer)
    check_named(tokenizer, source)
    pads = distinct_pads(placeholders)
    template = ChatTemplate(source, guard=guard, pads=pads) if source else None
    end_of_document = choose_end_of_document(spec, tokenizer)
    return Pipeline(
        spec=spec,
        formats=formats or OwnFormats(),
        preparation=preparation,
        augmentation=augmentation,
        text=TextPipeline(
            tokenizer=tokenizer,
            guard=guard,
            template=template,
            placeholders=placeholders,
            end_of_document=end_of_document,
            limits=limits,
        ),
        media=MediaPipeline(vision=vision, audio=spec.audio, limits=limits),
        identity={
            "release": PipelinePart(
                place="this release", digest=_digest(LENGTHS_VERSION, CONTENT_VERSION)
            ),
            "tokenizer": PipelinePart(place=tokenizer.path, digest=tokenizer.digest),
            "special tokens": PipelinePart(
                place=str(tokenizer.folder / "tokenizer_config.json"),
                digest=_digest(
                    tokenizer.named,
                    tokenizer.adds_bos,
                    {kind: asdict(tokens) for kind, tokens in placeholders.items()},
                    end_of_document,
                    sorted(spec.content_tokens),
                ),
            ),
            "chat template": PipelinePart(
                place=source.name if source else "none",
                digest=_digest(source.text if source else None, str(spec.template_date)),
            ),
            "processors": PipelinePart(
                place="the job's pipeline and the operator's own processors",
                digest=_digest(
                    _told(spec, vision),
                    source_of(type(vision)) if isinstance(spec.vision, CustomVisionSpec) else None,
                    asdict(spec.audio) if spec.audio else None,
                ),
            ),
            **_code(PREPARE, preparation.sources, spec.prepare),
            **_code(AUGMENT, augmentation.sources, spec.augment),
            # With other limits, the index would contain other samples.
            "limits": PipelinePart(
                place="max_sample_tokens, longer_than and the service's limits",
                digest=_digest(LengthRule.of(spec).identity, limits.changed),
            ),
        },
        pad_token_id=tokenizer.pad_token_id,
    )


def _told(spec: PipelineSpec, vision: VisionProcessor | None) -> dict[str, object] | None:
    """What the job says of its vision processor; of one that a folder describes, what that says."""
    if isinstance(vision, TransformersImageProcessor):
        return vision.identity
    if spec.vision is None:
        return None
    told = asdict(spec.vision)
    told.pop("unit_frames", None)  # where items may be cut decides no pixel
    return told


def _code(
    part: str, sources: Sequence[tuple[str, str]], specs: Sequence[CodeSpec | AugmentSpec]
) -> dict[str, PipelinePart]:
    """A part of the identity that is the user's own code; jobs without have none."""
    if not specs:
        return {}
    digest = _digest(sources, [asdict(each) for each in specs])
    return {part: PipelinePart(place="the operator's own modules", digest=digest)}


def _lengths(
    sequence: TokenSequence, costs: Sequence[Sequence[Sequence[ItemCost]]]
) -> SampleLengths:
    return SampleLengths(
        llm_tokens=len(sequence.ids),
        loss_tokens=sequence.loss_tokens,
        items=_placed(sequence, costs),
    )


def _placed(
    sequence: TokenSequence, costs: Sequence[Sequence[Sequence[ItemCost]]]
) -> tuple[ItemLengths, ...]:
    """Items in the order of their tokens; `costs[file][run]` are those of one run, end to end."""
    items = []
    for slot in sequence.slots:
        position = slot.position
        for cost in costs[slot.file][slot.run]:
            items.append(
                ItemLengths(
                    modality=cost.modality,
                    encoder_tokens=cost.encoder_tokens,
                    llm_tokens=cost.llm_tokens,
                    position=position,
                    shape=cost.shape,
                    kind=cost.kind,
                    grid=cost.grid,
                    seconds_per_patch=cost.seconds_per_patch,
                )
            )
            position += cost.llm_tokens
    return tuple(items)


def _digest(*parts: object) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


def _described(lengths: SampleLengths) -> str:
    shapes = [item.shape for item in lengths.items]
    shown = ", ".join(map(str, shapes[:4])) + (" …" if len(shapes) > 4 else "")
    return f"{lengths.llm_tokens} tokens and items of shape [{shown}]"
