"""Writes conversations and documents as the text that is tokenised, with the media in it.

Measuring and decoding both use this code, so their lengths agree by construction. A medium is
tokenised within the surrounding text, exactly as the model's own processor does: as its texts with
`start pad end` between them; then each pad is repeated.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dataservice.core.errors import SampleError
from dataservice.core.limits import DecodeLimits
from dataservice.core.quoting import quoted
from dataservice.core.sample import MediaKind
from dataservice.decode.chat_template import ChatTemplate, no_template
from dataservice.decode.conversation import Conversation, Document, MediaPart
from dataservice.decode.marks import BREAK, LOSS_CLOSE, LOSS_OPEN, SLOTS
from dataservice.decode.placeholders import PlaceholderTokens
from dataservice.decode.token_sequences import (
    Stretch,
    TokenSequence,
    TokenSequences,
    WrittenText,
)
from dataservice.decode.tokenizer import Guard, LoadedTokenizer


@dataclass(frozen=True, kw_only=True, slots=True)
class MediumText:
    """What one file is in the text: runs of `tokens[k]` LLM tokens, each between two of `texts`."""

    kind: MediaKind
    texts: tuple[str, ...]
    tokens: tuple[int, ...]


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
        self._sequences = TokenSequences(
            tokenizer=tokenizer, placeholders=placeholders.values(), limits=limits
        )
        self._end_of_document = end_of_document
        self._limits = limits

    def write(self, source: Conversation | Document, files: Sequence[MediumText]) -> WrittenText:
        """A sample's text as it is tokenised; `files[k]` says what its k-th file is in it.

        The k-th placeholder of a kind shows the k-th file of that kind. O(characters).

        Raises:
            SampleError: the template refuses the sample, or it is above a limit.
        """
        if isinstance(source, Document):
            if self._tokenizer.is_paligemma:
                raise SampleError(
                    "PaliGemma's text is a prompt and its answer, and this sample has no prompt. "
                    "Give it a question, such as 'caption en', and the caption as its answer, or "
                    "name such keys as columns: {question: …, answer: …} in the source."
                )
            marked = self._document(source)
        else:
            self._limits.check("max_turns", len(source.messages), "the sample: turns")
            if self._template is None:
                said = no_template(self._tokenizer)
                raise SampleError(f"{said} The job's plain texts need none.")
            marked = self._template.render(source)
        # A template may repeat text that the sample has once.
        self._limits.check_text([marked])
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
        """The tokens of samples, or why one has none; see `TokenSequences`."""
        return self._sequences(written)

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
        """BOS if the tokenizer's configuration adds one, the text, and the end-of-document token.
        The text is tokenised apart from BOS, as the tokenizer itself does it: some write the
        beginning of a text otherwise than what follows a token."""
        if self._end_of_document is None:
            raise SampleError(
                f"the tokenizer {quoted(self._tokenizer.path)} has no end-of-document token. Name "
                "one of its vocabulary as end_of_document_token in the job's pipeline."
            )
        bos = self._tokenizer.named.get("bos_token", "") if self._tokenizer.adds_bos else ""
        begin = f"{bos}{BREAK}" if bos else ""
        body = "".join(
            SLOTS[part.kind] if isinstance(part, MediaPart) else self._guard.protect(part)
            for part in document.parts
        )
        return f"{begin}{LOSS_OPEN}{body}{self._end_of_document}{LOSS_CLOSE}"


def _stretches(marked: str) -> list[Stretch]:
    """The text between breaks, and within each the places at which loss switches on or off. A
    pattern takes twenty times as long as to split at each mark."""
    stretches: list[Stretch] = []
    learning = False
    for whole in marked.split(BREAK):
        parts: list[str] = []
        edges, length = [0] if learning else [], 0
        for opened, begun in enumerate(whole.split(LOSS_OPEN)):
            if opened:
                learning = True
                edges.append(length)
            for closed, part in enumerate(begun.split(LOSS_CLOSE)):
                if closed:
                    learning = False
                    edges.append(length)
                parts.append(part)
                length += len(part)
        if len(edges) % 2:  # marks of a template's own making need not alternate
            edges.append(length)
        stretches.append(("".join(parts), edges))
    return stretches


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
