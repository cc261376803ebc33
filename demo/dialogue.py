"""Conversations about media, in the three formats in common use.

A turn is a role and a text in which `<image>`, `<video>` and `<audio>` stand for the media, in
the order of the sample's files.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Literal

from demo.language import Language

Role = Literal["system", "user", "assistant"]
Json = dict[str, object]

# Tokens per word, measured with the tokenizer that `demo.tokenizer` trains: converts a number of
# tokens into words.
TOKENS_PER_WORD = 1.5

_QUESTIONS = {
    "image": ("What does the picture show?", "Describe the picture.", "What can you see?"),
    "video": ("What happens in the clip?", "Describe the clip.", "Which way does it move?"),
    "audio": ("What do you hear?", "Describe the sound.", "Which tones are played?"),
}
_SHAREGPT_ROLES = {"system": "system", "user": "human", "assistant": "gpt"}
_PLACEHOLDER = re.compile(r"\s*<(image|video|audio)>\s*")


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """One message of a conversation."""

    role: Role
    text: str


def about(
    kind: str, truths: Sequence[str], rng: Random, language: Language, tokens: int
) -> list[Turn]:
    """A question about the media, and an answer of about `tokens` tokens that begins with the
    truth.

    `truths` describes the media one by one, so its length is the number of placeholders.
    """
    placeholders = f"<{kind}>\n" * len(truths)
    if len(truths) > 1 and rng.random() < 0.5:
        placeholders = "".join(f"Number {k + 1}: <{kind}>\n" for k in range(len(truths)))
    opening = f"I find {'; then '.join(truths)}."
    words = round(tokens / TOKENS_PER_WORD) - opening.count(" ") - 1
    answer = f"{opening} {language.prose(rng, words)}".strip()
    return [
        Turn(role="user", text=placeholders + rng.choice(_QUESTIONS[kind])),
        Turn(role="assistant", text=answer),
    ]


def chat(rng: Random, language: Language, tokens: int) -> list[Turn]:
    """A text-only conversation of about `tokens` tokens: one to five rounds on one topic."""
    topic = language.topic(rng)
    rounds = min(5, 1 + tokens // 80)
    words = max(3, round(tokens / TOKENS_PER_WORD / rounds) - 8)
    turns = [Turn(role="system", text="Answer briefly and truly.")] if rng.random() < 0.3 else []
    for _ in range(rounds):
        question = language.sentence(rng, topic)[:-1] + "?"
        turns.append(Turn(role="user", text=question))
        turns.append(Turn(role="assistant", text=language.prose(rng, words, topic)))
    return turns


def as_llava(turns: Sequence[Turn]) -> Json:
    """LLaVA: `conversations` of `from` human or gpt, placeholders inside the text."""
    return {"conversations": [{"from": _SHAREGPT_ROLES[t.role], "value": t.text} for t in turns]}


def as_sharegpt(turns: Sequence[Turn]) -> Json:
    """ShareGPT: as LLaVA, with the system prompt as a turn of its own."""
    system = Turn(role="system", text="You look and listen with care.")
    return as_llava([system, *turns])


def as_openai(turns: Sequence[Turn]) -> Json:
    """OpenAI messages: content is a list of typed parts where there are media, else a string."""
    return {"messages": [{"role": turn.role, "content": _content(turn.text)} for turn in turns]}


DIALECTS = {"llava": as_llava, "sharegpt": as_sharegpt, "openai": as_openai}


def _content(text: str) -> str | list[Json]:
    pieces = _PLACEHOLDER.split(text)  # text, kind, text, kind, …, text
    if len(pieces) == 1:
        return text
    parts: list[Json] = []
    for place, piece in enumerate(pieces):
        if place % 2:
            parts.append({"type": piece})
        elif piece:
            parts.append({"type": "text", "text": piece})
    return parts
