"""Turns written texts into ids, labels and the places of the media.

All samples of an order go through each step together: the tokenizer gets all their texts at once,
and their ids lie one behind the other in one array, of which each sample is a part. What numpy asks
for each call is then asked once for all of them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, compress, pairwise

import numpy as np
from numpy.typing import NDArray

from dataservice.core.errors import SampleError, caught, uncaught
from dataservice.core.limits import DecodeLimits
from dataservice.core.quoting import quoted
from dataservice.decode.placeholders import PlaceholderTokens
from dataservice.decode.tokenizer import Ids, LoadedTokenizer, Tokens

IGNORED_LABEL = -100

Stretch = tuple[str, list[int]]
"""Text that is tokenised as a whole, and the characters at which loss switches on and off again, in
pairs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WrittenText:
    """A sample's text before it is tokenised: its stretches, and the runs of its `files`, each with
    the file, its number in the file, and its LLM tokens."""

    stretches: Sequence[Stretch]
    files: int
    runs: Sequence[tuple[int, int, int]]


@dataclass(frozen=True, slots=True)
class Slot:
    """A run of a medium among the tokens: the index of its file in the sample, that of the run in
    the file, and the position of its first pad token."""

    file: int
    run: int
    position: int


@dataclass(frozen=True, slots=True)
class TokenSequence:
    """A sample's tokens: `ids` int32[n], its `labels` int32[n], shifted (the next token where that
    is learnt, else -100; the last is -100), and its slots in order."""

    ids: Ids
    labels: NDArray[np.int32]
    slots: tuple[Slot, ...]

    def piece(self, number: int, tokens: int) -> "TokenSequence":
        """The `number`-th, from 1, of the consecutive runs of `tokens` tokens of a sequence without
        media; the last may be shorter. It is a sequence of its own: its first token has none before
        it that predicts it, and is no target."""
        run = slice((number - 1) * tokens, number * tokens)
        labels = self.labels[run].copy()
        labels[-1:] = IGNORED_LABEL
        return TokenSequence(self.ids[run].copy(), labels, ())

    @property
    def loss_tokens(self) -> int:
        """Number of labels other than -100."""
        return int(np.count_nonzero(self.labels != IGNORED_LABEL))


_Tokenised = tuple[WrittenText, Sequence[Tokens | Exception]]
"""A sample's text, and the tokens of each of its stretches or why it has none."""


class TokenSequences:
    """Tokenises written texts. Immutable, so it may be used from many threads."""

    def __init__(
        self,
        *,
        tokenizer: LoadedTokenizer,
        placeholders: Iterable[PlaceholderTokens],
        limits: DecodeLimits,
    ) -> None:
        self._tokenizer = tokenizer
        media = list(placeholders)
        self._pad_ids = self._ids(tokens.pad for tokens in media)
        self._media_ids = self._ids(token for tokens in media for token in tokens.tokens)
        self._limits = limits

    def __call__(self, written: Sequence[WrittenText]) -> list[TokenSequence | Exception]:
        """The tokens of samples, or why one has none: SampleError where placeholders do not survive
        tokenising, or the sample is above a limit. O(characters)."""
        found = iter(self._encoded([stretch for each in written for stretch in each.stretches]))
        samples = [(each, [next(found) for _ in each.stretches]) for each in written]
        try:
            return [*self._sequences(samples)]
        except Exception:  # of which sample, those one by one tell
            return [caught(self._sequence, sample) for sample in samples]

    def _encoded(self, stretches: Sequence[Stretch]) -> list[Tokens | Exception]:
        """Where tokens are not bytes, those of a text that is learnt in part come with their spans,
        which the library does not tell of many texts at once."""
        placed = [self._tokenizer.written is None and not _is_uniform(*each) for each in stretches]
        texts = [text for (text, _), apart in zip(stretches, placed, strict=True) if not apart]
        at_once = iter(self._tokenizer.encode_each(texts))
        return [
            caught(self._tokenizer.encode_placed, text) if apart else next(at_once)
            for (text, _), apart in zip(stretches, placed, strict=True)
        ]

    def _sequence(self, sample: _Tokenised) -> TokenSequence:
        return self._sequences([sample])[0]

    def _sequences(self, samples: Sequence[_Tokenised]) -> list[TokenSequence]:
        """Raises SampleError where one of them has no tokens."""
        if not samples:
            return []
        stretches = [stretch for written, _ in samples for stretch in written.stretches]
        tokens = [uncaught(one) for _, ones in samples for one in ones]
        ids = np.concatenate([one.ids for one in tokens])
        learnt = self._learnt(stretches, tokens) & ~among(ids, self._media_ids)
        pads = np.flatnonzero(among(ids, self._pad_ids))
        bounds = list(accumulate((_count(ones) for _, ones in samples), initial=0))
        self._check(samples, bounds, pads)
        runs = [run for written, _ in samples for run in written.runs]
        starts: list[int] = []
        if runs:  # repeat each run's pad once for each of its tokens
            repeats = np.ones(len(ids), np.int64)
            repeats[pads] = [count for *_, count in runs]
            places = np.append(0, np.cumsum(repeats))
            ids, learnt = np.repeat(ids, repeats), np.repeat(learnt, repeats)
            bounds, starts = places[bounds].tolist(), places[pads].tolist()
        labels = _labels(ids, learnt, bounds)
        left = iter(starts)
        return [
            TokenSequence(
                ids[start:end],
                labels[start:end],
                tuple([Slot(file, run, next(left) - start) for file, run, _ in written.runs]),
            )
            for (written, _), (start, end) in zip(samples, pairwise(bounds), strict=True)
        ]

    def _check(
        self, samples: Sequence[_Tokenised], bounds: Sequence[int], pads: NDArray[np.int64]
    ) -> None:
        """Raises SampleError where a sample's text has other media tokens than its files need, or
        too many tokens; a sample's lie between two neighbours of `bounds`."""
        pads_before = np.searchsorted(pads, bounds).tolist()
        spans = zip(samples, pairwise(bounds), pairwise(pads_before), strict=True)
        for (written, _), (start, end), (first, last) in spans:
            if last - first != len(written.runs):
                raise SampleError(
                    f"after tokenising, the sample has {last - first} media tokens for "
                    f"{len(written.runs)} runs of {written.files} files. The tokenizer "
                    f"{quoted(self._tokenizer.path)} reads a media token in its text; remove it "
                    "from the text."
                )
            size = end - start + sum([count for *_, count in written.runs])
            self._limits.check("max_llm_tokens", size, "the sample: tokens")

    def _learnt(self, stretches: Sequence[Stretch], tokens: Sequence[Tokens]) -> NDArray[np.bool_]:
        """Which tokens of stretches, one behind the other, are learnt, bool[n]."""
        counts = [len(one.ids) for one in tokens]
        learnt = np.repeat([bool(edges) for _, edges in stretches], counts)
        mixed = [not _is_uniform(*each) for each in stretches]
        if any(mixed):
            learnt[np.repeat(mixed, counts)] = self._learnt_in_part(
                list(compress(stretches, mixed)), list(compress(tokens, mixed))
            )
        return learnt

    def _learnt_in_part(
        self, stretches: Sequence[Stretch], tokens: Sequence[Tokens]
    ) -> NDArray[np.bool_]:
        """The same by where each token and each edge lies: in bytes if tokens are bytes, and in
        characters where they, end to end, are not the text."""
        if (written := self._tokenizer.written) is not None:
            texts = [text.encode() for text, _ in stretches]
            sizes = written.sizes([one.ids for one in tokens], texts)
            if sizes is not None:
                ends = np.cumsum(sizes)
                starts = accumulate([len(text) for text in texts[:-1]], initial=0)
                edges = [
                    start + edge
                    for start, stretch in zip(starts, stretches, strict=True)
                    for edge in _edges_in_bytes(*stretch)
                ]
                return _touched(ends - sizes, ends, edges)
        if len(stretches) > 1:
            each = zip(stretches, tokens, strict=True)
            return np.concatenate([self._learnt_in_part([a], [b]) for a, b in each])
        ((text, edges),), (placed,) = stretches, tokens
        if placed.spans is None:
            placed = self._tokenizer.encode_placed(text)
        assert placed.spans is not None, "encode_placed tells them"
        return _touched(placed.spans[:, 0], placed.spans[:, 1], edges)

    def _ids(self, tokens: Iterable[str]) -> Ids:
        ids = {self._tokenizer.id_of(token) for token in tokens}
        return np.array(sorted(i for i in ids if i is not None), dtype=np.int32)


def _count(tokens: Sequence[Tokens | Exception]) -> int:
    return sum([len(one.ids) for one in tokens if isinstance(one, Tokens)])


def _is_uniform(text: str, edges: Sequence[int]) -> bool:
    """Whether a text is learnt wholly or not at all."""
    return not edges or edges == [0, len(text)]


def _edges_in_bytes(text: str, edges: Sequence[int]) -> Sequence[int]:
    """The same edges of a text, counted in bytes of UTF-8 and not in characters; they ascend."""
    if text.isascii():
        return edges
    between = [text[start:end] for start, end in pairwise([0, *edges])]
    return list(accumulate(len(part.encode()) for part in between))


def _touched(
    starts: NDArray[np.int64], ends: NDArray[np.int64], edges: Sequence[int]
) -> NDArray[np.bool_]:
    """Whether loss is on, bool[n], for a token from `starts[k]` to `ends[k]`. A token is learnt if
    any of its characters is, as transformers has it: where a template writes the space before an
    answer, " Yes" is one token."""
    begun = np.searchsorted(edges, starts, side="right")
    ended = np.searchsorted(edges, np.maximum(ends - 1, starts), side="right")
    learnt: NDArray[np.bool_] = (begun & 1 == 1) | (ended > begun)
    return learnt


def among(ids: Ids, some: Ids) -> NDArray[np.bool_]:
    """Whether each id is one of `some`, bool[n]. `np.isin` takes twenty calls, and most of the time
    in which a short text is tokenised."""
    found = np.zeros(len(ids), dtype=np.bool_)
    for one in some.tolist():
        found |= ids == one
    return found


def _labels(ids: Ids, learnt: NDArray[np.bool_], bounds: Sequence[int]) -> NDArray[np.int32]:
    """The next token of the same sample where that is learnt, else -100: int32[n]."""
    labels = np.full(len(ids), IGNORED_LABEL, dtype=np.int32)
    np.copyto(labels[:-1], ids[1:], where=learnt[1:])
    labels[[end - 1 for end in bounds if end]] = IGNORED_LABEL
    return labels
