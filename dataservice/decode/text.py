"""Turns marked text into tokens, and finds the places of the media among them.

Measuring and decoding both use this code, so their lengths agree by construction. A medium is
tokenised within the surrounding text, exactly as the model's own processor does: as its texts with
`start pad end` between them; then each pad is repeated.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise

import numpy as np
from numpy.typing import NDArray

from dataservice.core.errors import SampleError, caught, uncaught
from dataservice.core.limits import DecodeLimits
from dataservice.core.quoting import quoted
from dataservice.core.sample import MediaKind
from dataservice.decode.chat_template import ChatTemplate, no_chatml
from dataservice.decode.conversation import Conversation, Document, MediaPart
from dataservice.decode.marks import BREAK, LOSS_CLOSE, LOSS_OPEN, SLOTS
from dataservice.decode.placeholders import PlaceholderTokens
from dataservice.decode.tokenizer import Guard, LoadedTokenizer

IGNORED_LABEL = -100


@dataclass(frozen=True, kw_only=True, slots=True)
class MediumText:
    """What one file is in the text: runs of `tokens[k]` LLM tokens, each between two of `texts`."""

    kind: MediaKind
    texts: tuple[str, ...]
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Slot:
    """A run of a medium among the tokens: the index of its file in the sample, that of the run in
    the file, and the position of its first pad token."""

    file: int
    run: int
    position: int


@dataclass(frozen=True, slots=True)
class TokenSequence:
    """A sample's tokens: `ids` int32[n], `learnt` bool[n], and its slots in order."""

    ids: NDArray[np.int32]
    learnt: NDArray[np.bool_]
    slots: tuple[Slot, ...]

    def labels(self) -> NDArray[np.int32]:
        """int32[n], shifted: the next token where that is learnt, else -100; last is -100."""
        labels = np.empty(len(self.ids), dtype=np.int32)
        labels[:-1] = self.ids[1:]
        labels[:-1][~self.learnt[1:]] = IGNORED_LABEL
        labels[-1:] = IGNORED_LABEL
        return labels

    def piece(self, number: int, tokens: int) -> "TokenSequence":
        """The `number`-th, from 1, of the consecutive runs of `tokens` tokens of a sequence without
        media; the last may be shorter. It is a sequence of its own: its first token has none before
        it that predicts it, and is no target."""
        run = slice((number - 1) * tokens, number * tokens)
        return TokenSequence(self.ids[run].copy(), self.learnt[run].copy(), ())

    @property
    def loss_tokens(self) -> int:
        """Number of labels other than -100."""
        return int(np.count_nonzero(self.learnt[1:]))


Stretch = tuple[str, list[int]]
"""Text that is tokenised as a whole, and the characters at which loss switches on or off."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WrittenText:
    """A sample's text before it is tokenised: its stretches, and the runs of its `files`, each with
    the file, its number in the file, and its LLM tokens."""

    stretches: Sequence[Stretch]
    files: int
    runs: Sequence[tuple[int, int, int]]


class TextPipeline:
    """Turns conversations and documents into tokens. Immutable, so it may be used from many
    threads."""

    def __init__(
        self,
        *,
        tokenizer: LoadedTokenizer,
        guard: Guard,
        template: ChatTemplate | None,
        placeholders: Mapping[MediaKind, PlaceholderTokens],
        end_of_document: str | None,
        limits: DecodeLimits,
    ) -> None:
        """`placeholders` has the tokens of the kinds that the job has a processor for. Without a
        template, only documents can be tokenised."""
        self._tokenizer = tokenizer
        self._guard = guard
        self._template = template
        self._placeholders = placeholders
        self._kind_of = {SLOTS[kind]: kind for kind in placeholders}
        for kind in template.writes if template else ():
            self._kind_of |= dict.fromkeys(placeholders[kind].slots, kind)
        # Of two that begin alike, the longer one comes first.
        slots = sorted(self._kind_of, key=len, reverse=True)
        self._slot = re.compile("|".join(map(re.escape, slots)) or r"(?!)")
        self._pad_ids = self._ids(tokens.pad for tokens in placeholders.values())
        self._media_ids = self._ids(t for tokens in placeholders.values() for t in tokens.tokens)
        self._end_of_document = end_of_document
        self._limits = limits

    def write(self, source: Conversation | Document, files: Sequence[MediumText]) -> WrittenText:
        """A sample's text as it is tokenised; `files[k]` says what its k-th file is in it.

        The k-th placeholder of a kind shows the k-th file of that kind. O(characters).

        Raises:
            SampleError: the template refuses the sample, or it is above a limit.
        """
        if isinstance(source, Document):
            marked = self._document(source)
        else:
            self._limits.check("max_turns", len(source.messages), "the sample: turns")
            if self._template is None:
                raise SampleError(f"{no_chatml(self._tokenizer)} The job's plain texts need none.")
            marked = self._template.render(source)
        # A template may repeat text that the sample has once.
        self._limits.check("max_text_bytes", len(marked.encode()), "the sample: bytes of text")
        has_slots = any(slot in marked for slot in self._kind_of)  # quicker than the pattern
        places = list(self._slot.finditer(marked)) if has_slots else []
        order = _files_in_order([self._kind_of[place[0]] for place in places], files)
        text = self._with_media(marked, places, [files[file] for file in order])
        return WrittenText(
            stretches=_stretches(text),
            files=len(order),
            runs=[(file, run, n) for file in order for run, n in enumerate(files[file].tokens)],
        )

    def tokens(self, written: Sequence[WrittenText]) -> list[TokenSequence | Exception]:
        """The tokens of samples, or why one has none: SampleError where placeholders do not survive
        tokenising, or the sample is above a limit. The tokenizer gets all texts at once.
        O(characters)."""
        stretches = [stretch for each in written for stretch in each.stretches]
        by_ids = [_is_uniform(*each) or self._tokenizer.written is not None for each in stretches]
        found = iter(
            self._tokenizer.encode_each(
                [t for (t, _), ids in zip(stretches, by_ids, strict=True) if ids]
            )
        )
        encoded = iter([next(found) if ids else None for ids in by_ids])
        return [
            caught(self._sequence, each, [next(encoded) for _ in each.stretches])
            for each in written
        ]

    def _sequence(
        self, written: WrittenText, encoded: Sequence[Sequence[int] | SampleError | None]
    ) -> TokenSequence:
        ids, learnt = self._joined(written.stretches, encoded)
        runs = written.runs
        pads = np.flatnonzero(among(ids, self._pad_ids))
        if len(pads) != len(runs):
            raise SampleError(
                f"after tokenising, the sample has {len(pads)} media tokens for {len(runs)} runs "
                f"of {written.files} files. The tokenizer {quoted(self._tokenizer.path)} reads a "
                "media token in its text; remove it from the text."
            )
        self._limits.check(
            "max_llm_tokens", len(ids) + sum(n for *_, n in runs), "the sample: tokens"
        )
        learnt &= ~among(ids, self._media_ids)
        return _expanded(ids, learnt, pads, runs)

    def text_of(self, ids: Sequence[int], start: int, end: int) -> str:
        """What the tokens `ids[start:end]` write behind the token before them. Many tokenizers
        take the space off the first token that they decode, which this one is not. O(end - start).
        Raises SampleError."""
        if start == end:
            return ""
        before = self._tokenizer.decode(ids[max(start - 1, 0) : start])
        whole = self._tokenizer.decode(ids[max(start - 1, 0) : end])
        if whole.startswith(before):
            return whole.removeprefix(before)
        return self._tokenizer.decode(ids[start:end])  # the token before is part of a character

    def _with_media(
        self, marked: str, places: Sequence[re.Match[str]], media: Sequence[MediumText]
    ) -> str:
        """The marked text with the media written into its slots, in order. Loss pauses for the
        texts of media; their tokens never carry any."""
        pieces, done, learning = [], 0, False
        for match, medium in zip(places, media, strict=True):
            before = marked[done : match.start()]
            opened, closed = before.rfind(LOSS_OPEN), before.rfind(LOSS_CLOSE)
            learning = opened > closed or (learning and closed < 0)
            text = self._written(match[0], medium)
            if learning and any(medium.texts):
                text = f"{LOSS_CLOSE}{text}{LOSS_OPEN}"
            pieces += [before, text]
            done = match.end()
        return "".join([*pieces, marked[done:]])

    def _written(self, slot: str, medium: MediumText) -> str:
        """What is written in a slot for a medium: its texts, and `start pad end` between them."""
        tokens = self._placeholders[medium.kind]
        if slot == tokens.pad and tokens.template is None and not any(medium.texts):
            return slot  # the template writes what stands around the pad
        return tokens.text.join(medium.texts)

    def _document(self, document: Document) -> str:
        """BOS if the tokenizer's configuration adds one, the text, and the end-of-document
        token."""
        if self._end_of_document is None:
            raise SampleError(
                f"the tokenizer {quoted(self._tokenizer.path)} has no end-of-document token. Name "
                "one of its vocabulary as end_of_document_token in the job's pipeline."
            )
        begin = self._tokenizer.named.get("bos_token", "") if self._tokenizer.adds_bos else ""
        body = "".join(
            SLOTS[part.kind] if isinstance(part, MediaPart) else self._guard.protect(part)
            for part in document.parts
        )
        return f"{begin}{LOSS_OPEN}{body}{self._end_of_document}{LOSS_CLOSE}"

    def _joined(
        self,
        stretches: Sequence[Stretch],
        encoded: Sequence[Sequence[int] | SampleError | None],
    ) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        """(ids, learnt) of stretches one behind the other."""
        pieces = [
            self._learnt(text, edges, ids)
            for (text, edges), ids in zip(stretches, encoded, strict=True)
        ]
        if len(pieces) == 1:
            return pieces[0]
        return (
            np.concatenate([ids for ids, _ in pieces]),
            np.concatenate([learnt for _, learnt in pieces]),
        )

    def _learnt(
        self, text: str, edges: Sequence[int], encoded: Sequence[int] | SampleError | None
    ) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        encoded = uncaught(encoded)
        if encoded is not None and _is_uniform(text, edges):
            ids = self._numbers(encoded)
            return ids, np.full(len(ids), bool(edges))
        ids, starts, ends, edges = self._placed(text, edges, encoded)
        # A token is learnt if any of its characters is, as transformers has it: where a template
        # writes the space before an answer, " Yes" is one token.
        begun = np.searchsorted(edges, starts, side="right")
        ended = np.searchsorted(edges, np.maximum(ends - 1, starts), side="right")
        return ids, (begun % 2 == 1) | (ended > begun)

    def _placed(
        self, text: str, edges: Sequence[int], encoded: Sequence[int] | None
    ) -> tuple[NDArray[np.int32], NDArray[np.int64], NDArray[np.int64], Sequence[int]]:
        """(ids, starts, ends, edges) of a text: where each token and each edge lies, in bytes or in
        characters."""
        if encoded is not None and (written := self._tokenizer.written) is not None:
            ids = self._numbers(encoded)
            sizes = written.sizes(ids, text.encode())
            if sizes is not None:
                ends = np.cumsum(sizes)
                return ids, ends - sizes, ends, _in_bytes(text, edges)
        encoding = self._tokenizer.encode(text)
        ids = self._numbers(encoding.ids)
        places = chain.from_iterable(encoding.offsets)  # of pairs, numpy makes an array slowly
        spans = np.fromiter(places, np.int64, 2 * len(ids)).reshape(-1, 2)
        return ids, spans[:, 0], spans[:, 1], edges

    def _numbers(self, ids: Sequence[int]) -> NDArray[np.int32]:
        try:
            return np.array(ids, dtype=np.int32)
        except OverflowError as error:
            raise SampleError(
                f"the tokenizer {quoted(self._tokenizer.path)} gives the text an id of 2**31 or "
                "more; ids are int32. Repair its vocabulary."
            ) from error

    def _ids(self, tokens: Iterable[str]) -> NDArray[np.int32]:
        ids = {self._tokenizer.id_of(token) for token in tokens}
        return np.array(sorted(i for i in ids if i is not None), dtype=np.int32)


def _is_uniform(text: str, edges: Sequence[int]) -> bool:
    """Whether a text is learnt wholly or not at all."""
    return not edges or edges in ([0], [0, len(text)])


def _stretches(marked: str) -> list[Stretch]:
    """The text between breaks, and within each the places at which loss switches on or off."""
    stretches: list[Stretch] = []
    run: list[str] = []
    edges: list[int] = []
    length, learning = 0, False
    for mark, part in _structure(marked):
        if mark == BREAK:
            stretches.append(("".join(run), edges))
            run, edges, length = [], [0] if learning else [], 0
        elif mark:
            learning = mark == LOSS_OPEN
            edges.append(length)
        run.append(part)
        length += len(part)
    return [*stretches, ("".join(run), edges)]


def _structure(marked: str) -> Iterator[tuple[str, str]]:
    """The text between marks other than slots, each with the mark before it, "" at first. A pattern
    takes twenty times as long."""
    for breaks, whole in enumerate(marked.split(BREAK)):
        for opened, begun in enumerate(whole.split(LOSS_OPEN)):
            for closed, part in enumerate(begun.split(LOSS_CLOSE)):
                mark = LOSS_CLOSE if closed else LOSS_OPEN if opened else BREAK if breaks else ""
                yield mark, part


def _in_bytes(text: str, places: Sequence[int]) -> Sequence[int]:
    """The same places in a text, counted in bytes of UTF-8 and not in characters; they ascend."""
    if text.isascii():
        return places
    between = [text[start:end] for start, end in pairwise([0, *places])]
    return list(accumulate(len(part.encode()) for part in between))


def among(ids: NDArray[np.int32], some: NDArray[np.int32]) -> NDArray[np.bool_]:
    """Whether each id is one of `some`, bool[n]. `np.isin` takes twenty calls, and most of the time
    in which a short text is tokenised."""
    found = np.zeros(len(ids), dtype=np.bool_)
    for one in some.tolist():
        found |= ids == one
    return found


def _files_in_order(kinds: Sequence[MediaKind], files: Sequence[MediumText]) -> list[int]:
    """The file of each slot: the k-th slot of a kind shows the k-th file of that kind."""
    waiting: dict[MediaKind, list[int]] = {}
    for file, medium in enumerate(files):
        waiting.setdefault(medium.kind, []).append(file)
    order = []
    for kind in kinds:
        if not waiting.get(kind):
            raise SampleError(
                f"the chat template shows {kinds.count(kind)} media of kind {kind} and the sample "
                f"has {sum(file.kind == kind for file in files)}. Choose another template."
            )
        order.append(waiting[kind].pop(0))
    if len(order) != len(files):
        raise SampleError(
            f"the chat template shows {len(order)} of the sample's {len(files)} media: it leaves "
            "out turns or parts. Choose another template."
        )
    return order


def _expanded(
    ids: NDArray[np.int32],
    learnt: NDArray[np.bool_],
    pads: NDArray[np.int64],
    runs: Sequence[tuple[int, int, int]],
) -> TokenSequence:
    """Repeat each run's pad once for each of its LLM tokens; `runs` are (file, run, tokens)."""
    if not runs:
        return TokenSequence(ids, learnt, ())
    repeats = np.ones(len(ids), dtype=np.int64)
    repeats[pads] = [tokens for _, _, tokens in runs]
    starts = np.cumsum(repeats) - repeats
    slots = tuple(
        Slot(file, run, int(position))
        for (file, run, _), position in zip(runs, starts[pads], strict=True)
    )
    return TokenSequence(np.repeat(ids, repeats), np.repeat(learnt, repeats), slots)
