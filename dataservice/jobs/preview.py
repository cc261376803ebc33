"""Samples as a job trains them, to be looked at: their text by token, their media as arrays.

    job file ──▶ find_samples ──▶ read ──▶ Pipeline.measure, decode ──▶ SamplePreview

Reading and decoding are those of the workers. A sample that cannot be used is a preview too, which
has the reason.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from dataservice.core.errors import SampleError, SourceError, SpecError
from dataservice.core.job import SourceSpec
from dataservice.core.limits import DEFAULT_LIMITS, DecodeLimits
from dataservice.core.sample import (
    DecodedSample,
    ItemArray,
    ItemLengths,
    MediaBlob,
    MediaKind,
    SampleLengths,
    SampleLocation,
    SampleRef,
)
from dataservice.decode.sample_pipeline import Pipeline
from dataservice.decode.saved_processor import saved_differences
from dataservice.decode.token_sequences import IGNORED_LABEL
from dataservice.jobs.find_samples import Found, Wanted, find
from dataservice.jobs.job_file import JobSpec
from dataservice.jobs.own_formats import format_codes
from dataservice.jobs.sample_pipeline import pipeline_json, pipeline_of
from dataservice.jobs.storage_profiles import NO_PROFILES, StorageProfiles, opened_sources
from dataservice.sources.index_part import measured
from dataservice.sources.reader import SourceReader

Note = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """A run of tokens of one kind: text that is learnt (its tokens are targets of the loss), text
    that is not, or the tokens of one encoder item: part `part` of `media[medium]`."""

    text: str
    tokens: int
    learnt: bool
    medium: int | None = None
    part: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Medium:
    """One file of a sample, the `number`-th of its kind from 1: its encoder items in order, and
    what the encoder gets of each. Where they are augmented, `before` has what they were."""

    kind: MediaKind
    number: int
    name: str
    items: tuple[ItemLengths, ...]
    arrays: tuple[ItemArray, ...]
    before: tuple[ItemArray, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplePreview:
    """One sample. `number` counts the usable samples of its source from 0, as the index does;
    None where it is unknown. `loss_weight` is its own weight times its source's. Where `problem`
    says why the sample cannot be used, all behind it is empty."""

    source: str
    key: str
    number: int | None
    location: SampleLocation
    problem: str = ""
    lengths: SampleLengths | None = None
    loss_weight: float = 1.0
    pieces: tuple[Piece, ...] = ()
    media: tuple[Medium, ...] = ()


def preview_job(
    spec: JobSpec,
    wanted: Wanted,
    *,
    sources: Sequence[str] = (),
    custom_processors: dict[str, str],
    limits: DecodeLimits = DEFAULT_LIMITS,
    epoch: int = 0,
    note: Note = lambda text: None,
    storage_profiles: StorageProfiles = NO_PROFILES,
) -> Iterator[SamplePreview]:
    """The wanted samples of these sources, by default of all, one after another, augmented as in
    this epoch. `note` is told where a source has no usable index, and what that means for the
    choice, and what a saved image processor does otherwise. Held-out sources are never augmented.

    Raises:
        SpecError: there is no such source, or the pipeline cannot be built.
        NotFoundError: there is no such sample.
        SourceError: sources cannot be read; raised behind the samples of the others.
    """
    named = _chosen(spec, sources, wanted)
    codes = format_codes(named, custom_processors)
    chosen = opened_sources(named, storage_profiles, codes=codes)
    for difference in saved_differences(spec.pipeline):
        note(difference)
    pipeline = pipeline_of(pipeline_json(spec.pipeline), custom_processors, limits, named)
    preview = _Previews(chosen, limits, pipeline, epoch, spec.sources)
    problems = []
    for source in chosen:
        try:
            for found in find(source, spec.index, wanted, pipeline, limits=limits, note=note):
                yield preview.of(found)
        except SourceError as error:
            problems.append(str(error))
    if problems:
        raise SourceError("\n".join(problems))


def preview_sample(
    spec: JobSpec,
    ref: SampleRef,
    *,
    custom_processors: dict[str, str],
    limits: DecodeLimits = DEFAULT_LIMITS,
    storage_profiles: StorageProfiles = NO_PROFILES,
) -> SamplePreview:
    """One sample of a job, whose place is known, augmented as in epoch 0. Raises SpecError where
    the pipeline cannot be built, SourceError where the source cannot be read."""
    sources = [source for source in spec.all_sources if source.name == ref.source]
    pipeline = pipeline_of(pipeline_json(spec.pipeline), custom_processors, limits, sources)
    opened = opened_sources(sources, storage_profiles)
    return _Previews(opened, limits, pipeline, 0, spec.sources).of(Found(ref=ref))


def _chosen(spec: JobSpec, names: Sequence[str], wanted: Wanted) -> list[SourceSpec]:
    by_name = {source.name: source for source in spec.all_sources}
    known = ", ".join(map(repr, by_name))
    unknown = [name for name in names if name not in by_name]
    if unknown:
        raise SpecError(
            f"job {spec.job!r} has no source {unknown[0]!r}; its sources are {known}. Give one of "
            "them as --source."
        )
    if wanted.sample is not None and len(by_name) > 1 and len(names) != 1:
        raise SpecError(
            f"--sample names a sample of one source, and job {spec.job!r} has {known}. Give one of "
            "them as --source."
        )
    return [source for name, source in by_name.items() if not names or name in names]


class _Previews:
    """Reads and decodes samples of a job as its workers do; those of `trained` sources augmented as
    in this epoch, where the job augments."""

    def __init__(
        self,
        sources: Sequence[SourceSpec],
        limits: DecodeLimits,
        pipeline: Pipeline,
        epoch: int,
        trained: Sequence[SourceSpec],
    ) -> None:
        self._reader = SourceReader(sources, limits=limits)
        self._loss_weights = {source.name: source.loss_weight for source in sources}
        self._pipeline = pipeline
        self._epoch = epoch
        self._trained = {source.name for source in trained}

    def of(self, found: Found) -> SamplePreview:
        """The preview of one sample."""
        pipeline = self._pipeline
        shown = partial(
            SamplePreview,
            source=found.ref.source,
            key=found.ref.key,
            number=found.number,
            location=found.ref.location,
        )
        if found.problem:
            return shown(problem=found.problem)
        try:
            raw = self._reader.read(found.ref)
            lengths = measured(raw, pipeline)
            planned = found.planned or lengths
            decoded = plain = pipeline.decode(raw, planned)
            if pipeline.augments and found.ref.source in self._trained:
                decoded = pipeline.decode(raw, planned, self._epoch)
            media = _media(lengths, plain, decoded, *pipeline.media_of(raw))
            pieces = tuple(_pieces(decoded, media, pipeline))
        except SampleError as error:
            return shown(problem=str(error))
        return shown(
            lengths=lengths,
            loss_weight=self._loss_weights[found.ref.source] * raw.loss_weight,
            pieces=pieces,
            media=media,
        )


def _media(
    lengths: SampleLengths,
    plain: DecodedSample,
    decoded: DecodedSample,
    blobs: Sequence[MediaBlob],
    files: Sequence[int],
) -> tuple[Medium, ...]:
    items: list[list[int]] = [[] for _ in blobs]
    for item, file in enumerate(files):
        items[file].append(item)
    kinds = [blob.kind for blob in blobs]
    changed = [
        any(not np.array_equal(plain.items[item], decoded.items[item]) for item in of_file)
        for of_file in items
    ]
    return tuple(
        Medium(
            kind=blob.kind,
            number=kinds[: file + 1].count(blob.kind),
            name=blob.name,
            items=tuple(lengths.items[item] for item in items[file]),
            arrays=tuple(decoded.items[item] for item in items[file]),
            before=tuple(plain.items[item] for item in items[file] if changed[file]),
        )
        for file, blob in enumerate(blobs)
    )


def _pieces(decoded: DecodedSample, media: Sequence[Medium], pipeline: Pipeline) -> Iterator[Piece]:
    """The sample's tokens, cut wherever loss begins or ends, and around each item."""
    ids, total = decoded.input_ids.tolist(), len(decoded.input_ids)
    learnt = np.zeros(total, dtype=np.bool_)
    learnt[1:] = decoded.labels[:-1] != IGNORED_LABEL  # labels[i] is the target behind token i
    parts = [(file, part) for file, one in enumerate(media) for part in range(len(one.items))]
    part_of = np.full(total, -1, dtype=np.int64)
    for place, (file, part) in enumerate(parts):
        item = media[file].items[part]
        part_of[item.position : item.position + item.llm_tokens] = place
    edges = np.flatnonzero((np.diff(learnt) != 0) | (np.diff(part_of) != 0)) + 1
    ends = [*edges.tolist(), total]
    for start, end in zip([0, *ends[:-1]], ends, strict=True):
        place, tokens = int(part_of[start]), end - start
        if place < 0:
            text = pipeline.text_of(ids, start, end)
            yield Piece(text=text, tokens=tokens, learnt=bool(learnt[start]))
        else:
            file, part = parts[place]
            yield Piece(text="", tokens=tokens, learnt=False, medium=file, part=part)
