"""Finds samples of a source by number, key, chance or length: in its index if that is current, and
otherwise by reading its files from the beginning."""

import heapq
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from random import Random
from typing import Protocol

import numpy as np

from dataservice.core.errors import (
    IndexStaleError,
    NotFoundError,
    SampleError,
    SourceError,
    SpecError,
)
from dataservice.core.job import SourceSpec
from dataservice.core.limits import DecodeLimits
from dataservice.core.ports import SampleMeasurer
from dataservice.core.quoting import quoted
from dataservice.core.sample import SampleLengths, SampleLocation, SampleRef, piece_key
from dataservice.sources.catalog import IndexedCatalog, find_index
from dataservice.sources.filesystem import translate
from dataservice.sources.formats.protocol import ScannedSample
from dataservice.sources.formats.registry import list_files, open_format
from dataservice.sources.index_folder import LEFT_OUT, MANIFEST, IndexFolder
from dataservice.sources.index_part import measured_pieces, usable
from dataservice.sources.manifest import SkippedSample

SCANNED_SAMPLES = 200
"""Samples at the beginning of a source among which random and longest ones are chosen, where it
has no index."""
MOST_BAD_FIRST = 5
"""Bad samples at the beginning of a source that are shown before its first usable one."""
BY_KEY = "key="
UNKNOWN_ID = -1
_NUMBER = re.compile(r"0|[1-9][0-9]{0,17}")  # 000017 is a key


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """Which samples of each source: one by `sample`, some at `random`, the `longest`, or, where
    all are None, the first. `sample` is a number in the source if it reads as one, else a key;
    `key=…` is always a key."""

    sample: str | None = None
    random: int | None = None
    longest: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        given = [w for w in (self.sample, self.random, self.longest) if w is not None]
        if len(given) > 1:
            raise SpecError("give one of --sample, --random and --longest, not several.")


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """A sample's place. `number` counts the usable samples of its source; `planned` has the
    lengths that its index states; `problem` says why it cannot be used."""

    ref: SampleRef
    number: int | None = None
    planned: SampleLengths | None = None
    problem: str = ""


class Samples(Protocol):
    """The samples of one source."""

    def first(self) -> Iterator[Found]:
        """The first usable sample."""
        ...

    def numbered(self, number: int) -> Found:
        """The usable sample of this number, from 0. Raises NotFoundError."""
        ...

    def keyed(self, key: str) -> Found:
        """The first sample with this key, usable or not; the first piece, where that is a document
        that was cut. Raises NotFoundError."""
        ...

    def random(self, count: int, seed: int) -> Iterator[Found]:
        """So many different samples, or all; the same for the same seed."""
        ...

    def longest(self, count: int) -> Iterator[Found]:
        """The samples with the most LLM tokens, the longest first."""
        ...


def find(
    source: SourceSpec,
    index_dir: str,
    wanted: Wanted,
    measurer: SampleMeasurer,
    *,
    limits: DecodeLimits,
    note: Callable[[str], None],
) -> Iterator[Found]:
    """The wanted samples of a source. `note` is told why an index is not used. Raises
    NotFoundError where there is no such sample, SourceError where the source cannot be read."""
    samples: Samples
    try:
        catalog = find_index([source], index_dir, measurer.fingerprint, limits=limits).read()
        samples = IndexedSamples(source, index_dir, catalog)
    except IndexStaleError as error:
        samples = ScannedSamples(source, measurer, limits)
        missing = IndexFolder(index_dir, source.name).read(MANIFEST) is None
        why = "no index yet" if missing else str(error)
        note(f"the files of source {source.name!r} are read from their beginning: {why}")
    if wanted.random is not None or wanted.longest is not None:
        if isinstance(samples, ScannedSamples):
            note(f"chosen among the first {SCANNED_SAMPLES} samples of {source.name!r}.")
        if wanted.random is not None:
            yield from samples.random(wanted.random, wanted.seed)
        else:
            yield from samples.longest(wanted.longest or 0)
    elif wanted.sample is None:
        yield from samples.first()
    elif _NUMBER.fullmatch(wanted.sample):
        yield samples.numbered(int(wanted.sample))
    else:
        key = wanted.sample.removeprefix(BY_KEY)
        yield samples.keyed(key.encode(errors="replace").decode())  # keys are UTF-8


class IndexedSamples:
    """The samples of a source by its index."""

    def __init__(self, source: SourceSpec, index_dir: str, catalog: IndexedCatalog) -> None:
        """`catalog` is of this source alone."""
        self._source = source
        self._index_dir = index_dir
        self._catalog = catalog

    def first(self) -> Iterator[Found]:
        """The first sample."""
        yield self._at(0)

    def numbered(self, number: int) -> Found:
        """The sample of this number. Raises NotFoundError."""
        samples = self._catalog.samples
        if number >= samples:
            raise _no_number(self._source, number, samples)
        return self._at(number)

    def keyed(self, key: str) -> Found:
        """The first sample with this key, among those left out too. Raises NotFoundError."""
        for name in (key, piece_key(key, 1)):
            number = self._catalog.find_key(name)
            if number is not None:
                return self._at(number)
        for left_out in self._left_out():
            if left_out.key == key:
                location = SampleLocation(file=left_out.file)
                return _found(self._source, key, location, left_out.reason)
        raise _no_key(self._source, key, self._catalog.samples, [self._at(0).ref.key])

    def random(self, count: int, seed: int) -> Iterator[Found]:
        """So many different samples; the same for the same seed."""
        samples = self._catalog.samples
        for number in _random(self._source, seed).sample(range(samples), min(count, samples)):
            yield self._at(number)

    def longest(self, count: int) -> Iterator[Found]:
        """The samples with the most LLM tokens, the longest first."""
        order = np.argsort(-self._catalog.llm_tokens.astype(np.int64), kind="stable")
        yield from map(self._at, order[:count].tolist())

    def _left_out(self) -> Iterator[SkippedSample]:
        folder = IndexFolder(self._index_dir, self._source.name)
        with suppress(FileNotFoundError), folder.open(LEFT_OUT) as lines:
            yield from SkippedSample.from_lines(lines, f"{folder.path}/{LEFT_OUT}")

    def _at(self, number: int) -> Found:
        ((ref, lengths),) = self._catalog.details(np.array([number]))
        return Found(ref=ref, number=number, planned=lengths)


class ScannedSamples:
    """The samples of a source as its files have them. What is looked for is measured on the way;
    only places are kept."""

    def __init__(self, source: SourceSpec, measurer: SampleMeasurer, limits: DecodeLimits) -> None:
        self._source = source
        self._measurer = measurer
        self._format = open_format(source, limits)

    def first(self) -> Iterator[Found]:
        """The first usable sample, behind at most MOST_BAD_FIRST that are not. Raises SourceError
        where there is no sample at all."""
        none = True
        for found, _ in islice(self._measured(), MOST_BAD_FIRST + 1):
            none = False
            yield found
            if not found.problem:
                return
        if none:
            raise SourceError(
                f"source {self._source.name!r} is empty: its files at {self._source.url!r} hold no "
                f"{self._source.format} sample. Correct the source's url or format."
            )

    def numbered(self, number: int) -> Found:
        """The usable sample of this number. Raises NotFoundError."""
        samples = 0
        for found, _ in self._measured():
            if found.number == number:
                return found
            samples += not found.problem
        raise _no_number(self._source, number, samples)

    def keyed(self, key: str) -> Found:
        """The first sample with this key, usable or not. Raises NotFoundError."""
        samples, some = 0, []
        for each in self._scanned():
            found = self._named(each, key)
            if found is not None:
                return found
            samples += 1
            if samples == 1:
                some.append(each.key)
        raise _no_key(self._source, key, samples, some)

    def random(self, count: int, seed: int) -> Iterator[Found]:
        """So many different ones of the first SCANNED_SAMPLES, bad ones among them."""
        found = [each for each, _ in islice(self._measured(), SCANNED_SAMPLES)]
        yield from _random(self._source, seed).sample(found, min(count, len(found)))

    def longest(self, count: int) -> Iterator[Found]:
        """The longest usable ones of the first SCANNED_SAMPLES."""
        found = [each for each in islice(self._measured(), SCANNED_SAMPLES) if each[1]]
        for each, _ in heapq.nlargest(count, found, key=lambda pair: pair[1]):
            yield each

    def _measured(self) -> Iterator[tuple[Found, int]]:
        """Every sample with its LLM tokens, 0 where it cannot be used."""
        number = 0
        for each in self._scanned():
            for found, tokens in self._samples_of(each):
                if found.problem:
                    yield found, 0
                else:
                    yield replace(found, number=number), tokens
                    number += 1

    def _named(self, each: ScannedSample, key: str) -> Found | None:
        """What is read as `each`, or the piece of it that has this key; None where neither does."""
        if each.key != key and not key.startswith(f"{each.key}#"):
            return None
        samples = [found for found, _ in self._samples_of(each)]
        named = [found for found in samples if found.ref.key == key]
        return named[0] if named else samples[0] if each.key == key else None

    def _samples_of(self, each: ScannedSample) -> Iterator[tuple[Found, int]]:
        """What is read as one sample, or its pieces, with LLM tokens."""
        try:
            pieces = measured_pieces(usable(each), self._measurer)
        except SampleError as error:
            yield _found(self._source, each.key, each.location, str(error)), 0
            return
        for piece, lengths in pieces:
            location = replace(each.location, piece=piece)
            yield _found(self._source, piece_key(each.key, piece), location), lengths.llm_tokens

    def _scanned(self) -> Iterator[ScannedSample]:
        for file in list_files(self._source):
            with translate(f"source {self._source.name!r}", file.path, "be read"):
                yield from self._format.scan(file)


def _found(source: SourceSpec, key: str, location: SampleLocation, problem: str = "") -> Found:
    ref = SampleRef(sample_id=UNKNOWN_ID, source=source.name, key=key, location=location)
    return Found(ref=ref, problem=problem)


def _random(source: SourceSpec, seed: int) -> Random:
    """Sources of one job are chosen from independently."""
    return Random(f"{seed}/{source.name}")


def _no_number(source: SourceSpec, number: int, samples: int) -> NotFoundError:
    if samples:
        remedy = (
            f"Give a number from 0 to {samples - 1}, or a key; a key that reads as a number is "
            f"written {BY_KEY}{number}."
        )
    else:
        remedy = "Leave the number out to see what is wrong with its first ones, or give a key."
    return NotFoundError(
        f"source {source.name!r} has {samples:,} usable samples, so there is no sample {number}. "
        f"{remedy}"
    )


def _no_key(source: SourceSpec, key: str, samples: int, some: list[str]) -> NotFoundError:
    like = f"; its first key is {quoted(some[0])}" if some else ""
    return NotFoundError(
        f"source {source.name!r} has no sample with the key {quoted(key)} among its {samples:,}"
        f"{like}. Give a key as the source has it, or a number from 0."
    )
