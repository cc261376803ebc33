"""Marked text to tokens, and where the media lie among them.

Measuring and decoding both come through here, so their lengths agree by construction. A
medium is tokenised as `start pad end`, in its surroundings, exactly as the model's own
processor does; then each pad is repeated.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dataservice.core.errors import SampleError
from dataservice.core.limits import DecodeLimits
from dataservice.core.sample import MediaKind
from dataservice.decode.chat_template import ChatTemplate
from dataservice.decode.conversation import Conversation, Document, MediaPart
from dataservice.decode.marks import BREAK, LOSS_CLOSE, LOSS_OPEN, SLOTS
from dataservice.decode.placeholders import PlaceholderTokens
from dataservice.decode.tokenizer import Guard, LoadedTokenizer

IGNORED_LABEL = -100
_STRUCTURE = re.compile(f"([{BREAK}{LOSS_OPEN}{LOSS_CLOSE}])")


@dataclass(frozen=True, slots=True)
class Slot:
    """A medium among the tokens: which file of the sample, and its first pad token."""

    file: int
    position: int


@dataclass(frozen=True, slots=True)
class TokenSequence:
    """A sample's tokens: `ids` int32[n], `learnt` bool[n], and its slots in order."""

    ids: NDArray[np.int32]
    learnt: NDArray[np.bool_]
    slots: tuple[Slot, ...]

    def labels(self) -> NDArray[np.int32]:
        """int32[n], shifted: the next token where that is learnt, else -100; last is -100."""
        labels = np.full(len(self.ids), IGNORED_LABEL, dtype=np.int32)
        labels[:-1] = np.where(self.learnt[1:], self.ids[1:], IGNORED_LABEL)
        return labels

    @property
    def loss_tokens(self) -> int:
        """How many labels are not -100."""
        return int(self.learnt[1:].sum())


class TextPipeline:
    """Conversations and documents to tokens. Used from many threads; nothing in it changes."""

    def __init__(
        self,
        *,
        tokenizer: LoadedTokenizer,
        guard: Guard,
        template: ChatTemplate,
        placeholders: Mapping[MediaKind, PlaceholderTokens],
        end_of_document: str | None,
        limits: DecodeLimits,
    ) -> None:
        """`placeholders` are the tokens of the kinds that the job has a processor for."""
        self._tokenizer = tokenizer
        self._guard = guard
        self._template = template
        self._slot_text = {SLOTS[kind]: tokens.text for kind, tokens in placeholders.items()}
        self._kind_of = {SLOTS[kind]: kind for kind in placeholders}
        self._kind_of |= {placeholders[kind].pad: kind for kind in template.writes}
        self._slot = re.compile("|".join(map(re.escape, self._kind_of)) or r"(?!)")
        self._pad_ids = self._ids(tokens.pad for tokens in placeholders.values())
        self._media_ids = self._ids(t for tokens in placeholders.values() for t in tokens.tokens)
        self._end_of_document = end_of_document
        self._limits = limits

    def tokens(
        self, source: Conversation | Document, files: Sequence[tuple[MediaKind, int]]
    ) -> TokenSequence:
        """Tokens of a sample whose k-th file has the kind and LLM tokens `files[k]`.

        The k-th placeholder of a kind shows the k-th file of that kind. O(characters).

        Raises:
            SampleError: the template refuses it, placeholders do not survive tokenising, or it
                is above a limit.
        """
        if isinstance(source, Document):
            marked = self._document(source)
        else:
            self._limits.check("max_turns", len(source.messages), "the sample: turns")
            marked = self._template.render(source)
        # A template may repeat what the sample has once.
        self._limits.check("max_text_bytes", len(marked.encode()), "the sample: bytes of text")
        kinds = [self._kind_of[match[0]] for match in self._slot.finditer(marked)]
        text = self._slot.sub(lambda match: self._slot_text.get(match[0], match[0]), marked)
        ids, learnt = self._encode(text)
        order = _files_in_order(kinds, files)
        pads = np.flatnonzero(np.isin(ids, self._pad_ids))
        if len(pads) != len(order):
            raise SampleError(
                f"after tokenising, the sample has {len(pads)} media tokens for {len(order)} "
                f"files. The tokenizer {self._tokenizer.path!r} reads a media token in its text; "
                "remove it from the text."
            )
        repeats = sum(tokens for _, tokens in files)
        self._limits.check("max_llm_tokens", len(ids) + repeats, "the sample: tokens")
        learnt &= ~np.isin(ids, self._media_ids)
        return _expanded(ids, learnt, pads, order, [tokens for _, tokens in files])

    def _document(self, document: Document) -> str:
        """BOS where the tokenizer's configuration adds one, the text, the end of document."""
        if self._end_of_document is None:
            raise SampleError(
                f"the tokenizer {self._tokenizer.path!r} has no end-of-document token. Name one "
                "of its vocabulary as end_of_document_token in the job's pipeline."
            )
        begin = self._tokenizer.named.get("bos_token", "") if self._tokenizer.adds_bos else ""
        body = "".join(
            SLOTS[part.kind] if isinstance(part, MediaPart) else self._guard.protect(part)
            for part in document.parts
        )
        return f"{begin}{LOSS_OPEN}{body}{self._end_of_document}{LOSS_CLOSE}"

    def _encode(self, marked: str) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        """Ids and what is learnt, of text whose media are already written as tokens."""
        pieces: list[tuple[NDArray[np.int32], NDArray[np.bool_]]] = []
        run: list[str] = []
        edges: list[int] = []  # offsets in the run at which loss switches on or off
        length, learning = 0, False
        for part in _STRUCTURE.split(marked):
            if part == BREAK:
                pieces.append(self._encode_run("".join(run), edges))
                run, edges, length = [], [0] if learning else [], 0
            elif part in (LOSS_OPEN, LOSS_CLOSE):
                learning = part == LOSS_OPEN
                edges.append(length)
            else:
                run.append(part)
                length += len(part)
        pieces.append(self._encode_run("".join(run), edges))
        return (
            np.concatenate([ids for ids, _ in pieces]),
            np.concatenate([learnt for _, learnt in pieces]),
        )

    def _encode_run(
        self, text: str, edges: Sequence[int]
    ) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        encoding = self._tokenizer.tokenizer.encode(text, add_special_tokens=False)
        ids = np.array(encoding.ids, dtype=np.int32)
        if not edges or edges in ([0], [0, len(text)]):  # all of one kind, as documents are
            return ids, np.full(len(ids), bool(edges))
        # A token belongs to where its first character lies.
        starts = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2)[:, 0]
        return ids, np.searchsorted(edges, starts, side="right") % 2 == 1

    def _ids(self, tokens: Iterable[str]) -> NDArray[np.int32]:
        ids = {self._tokenizer.id_of(token) for token in tokens}
        return np.array(sorted(i for i in ids if i is not None), dtype=np.int32)


def _files_in_order(
    kinds: Sequence[MediaKind], files: Sequence[tuple[MediaKind, int]]
) -> list[int]:
    """The file shown by each slot: the k-th slot of a kind shows the k-th file of the kind."""
    waiting: dict[MediaKind, list[int]] = {}
    for file, (kind, _) in enumerate(files):
        waiting.setdefault(kind, []).append(file)
    order = []
    for kind in kinds:
        if not waiting.get(kind):
            raise SampleError(
                f"the chat template shows {kinds.count(kind)} media of kind {kind} and the sample "
                f"has {sum(k == kind for k, _ in files)}. Choose another template."
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
    order: Sequence[int],
    llm_tokens: Sequence[int],
) -> TokenSequence:
    """Repeat the pad of each slot as often as its file has LLM tokens."""
    repeats = np.ones(len(ids), dtype=np.int64)
    repeats[pads] = [llm_tokens[file] for file in order]
    starts = np.cumsum(repeats) - repeats
    slots = tuple(
        Slot(file, int(position)) for file, position in zip(order, starts[pads], strict=True)
    )
    return TokenSequence(np.repeat(ids, repeats), np.repeat(learnt, repeats), slots)
