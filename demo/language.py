"""A small made-up language: enough grammar and word statistics for a model to learn something.

A few thousand pronounceable words follow Zipf's law, sentences follow a handful of templates,
and each text keeps to a topic, so that words come in bursts as they do in real prose.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from random import Random

_ONSETS = (
    *("b", "br", "c", "ch", "d", "dr", "f", "fl", "g", "gr", "h", "j", "k", "l", "m", "n"),
    *("p", "pl", "r", "s", "sh", "st", "t", "th", "tr", "v", "w"),
)
_VOWELS = ("a", "e", "i", "o", "u", "ai", "ea", "ee", "oo", "ou")
_CODAS = ("", "", "", "l", "m", "n", "nd", "r", "rk", "s", "st", "t", "x")

# N noun, V verb, J adjective, D adverb; anything else is itself.
_TEMPLATES = tuple(
    line.split()
    for line in (
        "the J N V the N",
        "a N of N V near the J N",
        "when the N V , the J N D V it",
        "it is J that the N V in the N",
        "every N and its N V D",
        "no N V the J N before the N V",
        "D , the N V a N and a J N",
        "we V that the N of the N is J",
        "the N V",
    )
)
_VOCABULARY_SIZES = {"N": 1_600, "V": 800, "J": 500, "D": 200}
_TOPIC_SIZES = {"N": 24, "V": 10, "J": 8, "D": 4}
_TOPIC_SHARE = 0.6


@dataclass(frozen=True, kw_only=True, slots=True)
class Topic:
    """The words one text prefers, by part of speech (`N`, `V`, `J`, `D`)."""

    words: dict[str, list[str]]


class Language:
    """A vocabulary with Zipf frequencies, made from a seed; immutable after construction."""

    def __init__(self, seed: int) -> None:
        words = _distinct_words(Random(f"{seed}/vocabulary"))
        self._words = {
            part: [next(words) for _ in range(n)] for part, n in _VOCABULARY_SIZES.items()
        }
        self._cumulative = {
            part: list(accumulate(1.0 / (rank + 3) for rank in range(len(vocabulary))))
            for part, vocabulary in self._words.items()
        }

    def topic(self, rng: Random) -> Topic:
        """Draw the words of a new topic, by frequency."""
        return Topic(words={part: self._draw(rng, part, n) for part, n in _TOPIC_SIZES.items()})

    def sentence(self, rng: Random, topic: Topic) -> str:
        """One capitalised sentence of 3–12 words."""
        slots = (
            self._fill(rng, topic, slot) if slot in _TOPIC_SIZES else slot
            for slot in rng.choice(_TEMPLATES)
        )
        text = " ".join(slots).replace(" ,", ",")
        return text[0].upper() + text[1:] + rng.choice((".", ".", ".", ".", "!"))

    def prose(self, rng: Random, words: int, topic: Topic | None = None) -> str:
        """Sentences on one topic, in paragraphs; at least `words` words, over by one sentence."""
        topic = topic or self.topic(rng)
        pieces: list[str] = []
        while words > 0:
            sentence = self.sentence(rng, topic)
            words -= sentence.count(" ") + 1
            pieces += (sentence, "\n\n" if rng.random() < 0.1 else " ")
        return "".join(pieces).strip()

    def document(self, rng: Random, words: int) -> str:
        """Prose of at least `words` words, in sections of up to 200 that each have a topic."""
        sections = [min(200, words - start) for start in range(0, words, 200)]
        return "\n\n".join(self.prose(rng, section) for section in sections)

    def _fill(self, rng: Random, topic: Topic, part: str) -> str:
        if rng.random() < _TOPIC_SHARE:
            return rng.choice(topic.words[part])
        return self._draw(rng, part, 1)[0]

    def _draw(self, rng: Random, part: str, count: int) -> list[str]:
        return rng.choices(self._words[part], cum_weights=self._cumulative[part], k=count)


def _distinct_words(rng: Random) -> Iterator[str]:
    """Pronounceable words without end, none twice; short ones first, as frequent words are."""
    seen: set[str] = set()
    while True:
        syllables = 1 if len(seen) < 200 else rng.choice((2, 2, 3))
        word = "".join(rng.choice(_ONSETS) + rng.choice(_VOWELS) for _ in range(syllables))
        word += rng.choice(_CODAS)
        if word not in seen:
            seen.add(word)
            yield word
