"""The ids of a text from those of its words.

A byte-level BPE tokenizer cuts a text at its added tokens and, by its pattern, into words; each of
these becomes tokens by itself. The library makes several copies of every word of every text for
that, which is half of its time. Here the library cuts, and what its model makes of a word is kept:
most words of a text have been met before. The ids are the same by construction.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, PreTokenizedString, Tokenizer, models
from tokenizers.pre_tokenizers import PreTokenizer

from dataservice.decode.token_bytes import CHARACTERS, parts

# They take 6 MB in a language, and 30 at most. One word more, and all are met anew.
MOST_WORDS, LONGEST_WORD_CHARACTERS = 2**15, 32
# A word that is new takes twice as long as in the library. Where more than this part of a text is,
# so many texts are left to the library before another is tried.
MOST_NEW, TEXTS_LEFT = 0.25, 16
# Of a vocabulary with more added tokens, or more beginnings of two characters among them, the
# library finds them sooner.
MOST_ADDED, MOST_BEGINNINGS = 1024, 64
MOST_PROBED = 64  # added tokens
_PROBE = " The cat's 1234 mats,\n\n  (it'LL) say:\t\"sat\"...  \r\n x=y+1;\u0000 abcABC__42 "
_PROBE_BEYOND_ASCII = "Où est l'été ? Ça va — naïve Ångström’s ½ e\u0301 猫\U0001f431\u200d "
# Normalisers that leave a text of ASCII alone.
_UNICODE_FORMS = ("NFC", "NFD", "NFKC", "NFKD")


class WordTokens:
    """The ids of texts of one tokenizer. May be used from many threads: what they change of it
    decides which way is taken, and every way gives the same ids."""

    def __init__(
        self,
        steps: Sequence[PreTokenizer],
        model: models.BPE,
        added: Mapping[int, str],
        *,
        only_ascii: bool,
    ) -> None:
        """`steps` cut a text into words; `added` tokens stand for themselves in it."""
        self._steps = steps
        self._only_ascii = only_ascii
        self._kept = _Kept(model)
        self._texts_left = 0
        self._added = {text: _packed([token_id]) for token_id, text in added.items()}
        self._cut = re.compile(f"({_pattern(_by_beginning(self._added)) or '(?!)'})")

    @property
    def probes(self) -> list[str]:
        """Texts whose ids tell whether the library makes tokens as this module takes it to."""
        some = list(self._added)[:MOST_PROBED]
        texts = [_PROBE, _PROBE.join(some), "".join(some), " ".join(reversed(some))]
        return texts if self._only_ascii else [*texts, _PROBE_BEYOND_ASCII, "é".join(some)]

    def takes(self, text: str) -> bool:
        """Whether the ids of this text, which is the next, are likely to be found sooner here than
        by the library. Texts in other scripts than Latin are left to it: some write no spaces."""
        if self._texts_left > 0:
            self._texts_left -= 1
            return False
        if text.isascii():
            return True
        return not self._only_ascii and 4 * len(text.encode()) < 5 * len(text)

    def ids(self, text: str) -> NDArray[np.int32]:
        """The ids of a text: int32[n]. O(characters)."""
        found: list[bytes] = []
        known = self._kept.met
        for place, part in enumerate(self._cut.split(text)):
            if place % 2:
                found.append(self._added[part])
            elif part:
                cut = PreTokenizedString(part)
                for step in self._steps:
                    step.pre_tokenize(cut)
                words = cut.get_splits(offset_referential="original", offset_type="byte")
                found += [self._kept[word] for word, _, _ in words]
        if self._kept.met - known > MOST_NEW * len(found):
            self._texts_left = TEXTS_LEFT
        return np.frombuffer(b"".join(found), np.int32)


class _Kept(dict[str, bytes]):
    """The ids of words, and how many were new."""

    def __init__(self, model: models.BPE) -> None:
        super().__init__()
        self._model = model
        self.met = 0

    def __missing__(self, word: str) -> bytes:
        written = "".join(map(CHARACTERS.__getitem__, word.encode()))
        ids = _packed([token.id for token in self._model.tokenize(written)])
        self.met += 1
        if len(word) <= LONGEST_WORD_CHARACTERS:
            if len(self) >= MOST_WORDS:
                self.clear()
            self[word] = ids
        return ids


def word_tokens(tokenizer: Tokenizer) -> WordTokens | None:
    """None for a tokenizer that may make something else of a text than of its words."""
    added, model = tokenizer.get_added_tokens_decoder(), tokenizer.model
    normalizers, steps = parts(tokenizer.normalizer), _steps(tokenizer)
    if (
        not steps
        or not isinstance(model, models.BPE)
        or model.dropout
        or any(each["type"] not in _UNICODE_FORMS for each in normalizers)
        or not all(map(_is_plain, added.values()))
        or not all(map(_adds_only, parts(tokenizer.post_processor)))
    ):
        return None
    texts = {token_id: token.content for token_id, token in added.items()}
    if len(texts) > MOST_ADDED or len(_by_beginning(texts.values())) > MOST_BEGINNINGS:
        return None
    return WordTokens(steps, model, texts, only_ascii=bool(normalizers))


def _steps(tokenizer: Tokenizer) -> list[PreTokenizer]:
    """The steps that cut a text into words, where only writing these as bytes comes behind them."""
    sequence: Any = tokenizer.pre_tokenizer
    *_, states = [], *(part.get("pretokenizers", []) for part in parts(sequence))
    if [state["type"] for state in states] != ["Split"] * (len(states) - 1) + ["ByteLevel"]:
        return []
    if states[-1]["use_regex"] or states[-1]["add_prefix_space"]:
        return []
    return [sequence[place] for place in range(len(states) - 1)]


def _by_beginning(texts: Iterable[str]) -> dict[str, list[str]]:
    """What follows the first two characters of texts, by these; the longest first."""
    ends: dict[str, list[str]] = {}
    for text in sorted(filter(None, texts), key=len, reverse=True):
        ends.setdefault(text[:2], []).append(text[2:])
    return ends


def _pattern(ends: Mapping[str, Sequence[str]]) -> str:
    """Finds the longest of the texts that begin at a place, as the library does. Most places are
    the beginning of none, and none of the ends is tried there."""
    return "|".join(
        f"{re.escape(beginning)}(?:{'|'.join(map(re.escape, each))})"
        for beginning, each in ends.items()
    )


def _is_plain(token: AddedToken) -> bool:
    """Whether an added token is found as it is written, and takes nothing from around it."""
    return not (token.normalized or token.lstrip or token.rstrip or token.single_word)


def _adds_only(processor: Mapping[str, Any]) -> bool:
    """Whether a step behind the model only adds special tokens, which are not asked for."""
    if processor["type"] == "TemplateProcessing":
        return sum("Sequence" in piece for piece in processor["single"]) == 1
    return processor["type"] in ("ByteLevel", "Sequence")


def _packed(ids: Sequence[int]) -> bytes:
    return np.array(ids, np.int32).tobytes()
