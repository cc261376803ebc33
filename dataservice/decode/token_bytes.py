"""Where the tokens of a byte-level tokenizer begin and end in a text, from their own bytes.

The library tells it too (`offsets`), but takes a fifth more time to tokenise a text with them, and
an object for each token. A byte-level token writes the same bytes everywhere, so their sizes tell,
once the tokens' bytes are found to be the text's.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

_SHOWN = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_HIDDEN = sorted(set(range(256)) - set(_SHOWN))
# The character by which byte-level vocabularies write each byte (GPT-2's `bytes_to_unicode`).
_BYTE_OF = {chr(byte): byte for byte in _SHOWN}
_BYTE_OF |= {chr(0x100 + place): byte for place, byte in enumerate(_HIDDEN)}


class _Written(dict[int, bytes]):
    """The bytes of tokens by id, each found out when first asked for; of an unknown one none."""

    def __init__(self, token_of: Callable[[int], str | None], added: dict[int, bytes]) -> None:
        super().__init__(added)
        self._token_of = token_of

    def __missing__(self, token_id: int) -> bytes:
        token = self._token_of(token_id) or ""
        known = all(character in _BYTE_OF for character in token)
        written = bytes(map(_BYTE_OF.__getitem__, token)) if known else b""
        self[token_id] = written
        return written


@dataclass(frozen=True, slots=True)
class TokenBytes:
    """What each token of a byte-level tokenizer writes. May be used from many threads."""

    written: _Written

    def sizes(self, ids: Sequence[int], text: bytes) -> NDArray[np.int64] | None:
        """The bytes of each of these tokens, int64[n]; None where they, end to end, are not the
        text: a normaliser has changed it, or a token swallowed white space. O(bytes)."""
        pieces = [self.written[token_id] for token_id in ids]
        if b"".join(pieces) != text:
            return None
        return np.fromiter(map(len, pieces), np.int64, len(pieces))


def token_bytes(tokenizer: Tokenizer) -> TokenBytes | None:
    """None where tokens are not bytes, or the library's offsets leave out the white space around
    them (`trim_offsets`)."""
    spec = json.loads(tokenizer.to_str())
    trimmed = any(part.get("trim_offsets") for part in _parts(spec["post_processor"]))
    if trimmed or not any(part["type"] == "ByteLevel" for part in _parts(spec["decoder"])):
        return None
    added = {token["id"]: token["content"].encode() for token in spec["added_tokens"]}
    return TokenBytes(_Written(tokenizer.id_to_token, added))


def _parts(spec: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    """A step of a tokenizer and, where it is a sequence, those in it."""
    if spec is not None:
        yield spec
        for part in (*spec.get("decoders", ()), *spec.get("processors", ())):
            yield from _parts(part)
