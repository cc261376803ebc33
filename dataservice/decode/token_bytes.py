"""Where the tokens of a byte-level tokenizer begin and end in a text, from their own bytes.

The library tells it too (`offsets`), but takes a fifth more time to tokenise a text with them, and
an object for each token. A byte-level token writes the same bytes everywhere, so their sizes tell,
once the tokens' bytes are found to be the text's.
"""

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

_SHOWN = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_HIDDEN = sorted(set(range(256)) - set(_SHOWN))
# The character by which byte-level vocabularies write each byte (GPT-2's `bytes_to_unicode`).
_BYTE_OF = {chr(byte): byte for byte in _SHOWN}
_BYTE_OF |= {chr(0x100 + place): byte for place, byte in enumerate(_HIDDEN)}
CHARACTERS = {byte: character for character, byte in _BYTE_OF.items()}
"""The same from bytes to characters."""


class TokenBytes:
    """What each token of a byte-level tokenizer writes, found out when a text first has it. May be
    used from many threads."""

    def __init__(
        self, token_of: Callable[[int], str | None], added: Mapping[int, str], tokens: int
    ) -> None:
        """`added` tokens write their own text, and others what the characters of `token_of` stand
        for. Ids are below `tokens`, or not known."""
        self._token_of, self._added = token_of, added
        # A token writes `_bytes[start : start + size]`; the size of one not yet met is below 0.
        self._sizes = np.full(tokens, -1, np.int64)
        self._starts = np.zeros(tokens, np.int64)
        self._bytes = np.zeros(0, np.uint8)
        self._lock = threading.Lock()

    def sizes(
        self, tokens: Sequence[NDArray[np.int32]], texts: Sequence[bytes]
    ) -> NDArray[np.int64] | None:
        """The bytes of each token of texts, one behind the other, int64[n]; None where a text is
        not its tokens, end to end: a normaliser has changed it, or a token swallowed white space.
        O(bytes)."""
        ids = np.concatenate(tokens).astype(np.intp)
        if ids.max(initial=0) >= len(self._sizes):
            return None
        sizes = self._sizes.take(ids)
        if sizes.min(initial=0) < 0:
            self._meet(ids)
            sizes = self._sizes.take(ids)
        before = np.append(0, np.cumsum(sizes))
        ends = before[list(accumulate(map(len, tokens)))].tolist()
        # A token that writes nothing could be of either text where two meet.
        if ends != list(accumulate(map(len, texts))) or not sizes.all():
            return None
        places = np.repeat(self._starts.take(ids) - before[:-1], sizes)
        places += np.arange(len(places))
        return sizes if self._bytes.take(places).tobytes() == b"".join(texts) else None

    def _meet(self, ids: NDArray[np.intp]) -> None:
        """Find out what the new ones among these write. Sizes come last: whoever sees one, finds
        the bytes."""
        with self._lock:
            new = np.unique(ids[self._sizes[ids] < 0])
            written = [self._written(token_id) for token_id in new.tolist()]
            sizes = np.array([len(each) for each in written], np.int64)
            self._starts[new] = len(self._bytes) + np.cumsum(sizes) - sizes
            more = np.frombuffer(b"".join(written), np.uint8)
            self._bytes = np.concatenate([self._bytes, more])
            self._sizes[new] = sizes

    def _written(self, token_id: int) -> bytes:
        if token_id in self._added:
            return self._added[token_id].encode()
        token = self._token_of(token_id) or ""
        # Nothing, if it has a character that stands for no byte: then no text is its bytes.
        known = all(character in _BYTE_OF for character in token)
        return bytes(map(_BYTE_OF.__getitem__, token)) if known else b""


def token_bytes(tokenizer: Tokenizer) -> TokenBytes | None:
    """None where tokens are not bytes, or the library's offsets leave out the white space around
    them (`trim_offsets`)."""
    trimmed = any(part.get("trim_offsets") for part in parts(tokenizer.post_processor))
    if trimmed or not any(part["type"] == "ByteLevel" for part in parts(tokenizer.decoder)):
        return None
    added = tokenizer.get_added_tokens_decoder().items()
    texts = {token_id: token.content for token_id, token in added}
    return TokenBytes(tokenizer.id_to_token, texts, tokenizer.get_vocab_size())


def parts(step: Any) -> list[dict[str, Any]]:
    """A step of a tokenizer as its file has it, and all steps in it where it is a sequence. To
    write out the whole tokenizer, whose vocabulary is large, would take a second."""
    parts = [] if step is None else [json.loads(step.__getstate__())]
    for part in parts:  # which grows meanwhile
        parts += [*part.get("decoders", ()), *part.get("processors", ())]
    return parts
