"""Records to conversations and documents: who says what, and where the media go.

    {"messages": [{"role", "content"}]}           OpenAI: content is a string or a list of parts
    {"conversations": [{"from", "value"}]}        ShareGPT and LLaVA: <image> <video> <audio> in
                                                  the text; {"role", "content"} is read too
    {"text": "..."}                               a plain document

Which text is a placeholder: parts, wherever there are any. `<image>` in text counts in the
other dialects, and in messages without media parts, but only for a kind that the sample has
(its media, or a non-empty key such as "image" or "images"); elsewhere it is text that happens
to look so, as HTML does. A sample without any media is refused when a user turn begins or
ends with `<image>`: that is how LLaVA writes, so its file got lost. A document with media and
no placeholders shows its media first, as caption sets mean it.
"""

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast, get_args

from dataservice.core.errors import SampleError
from dataservice.core.sample import MediaKind

KINDS: tuple[MediaKind, ...] = get_args(MediaKind)
_PLACEHOLDER = re.compile("<(image|video|audio)>")
_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
}
_PART_KINDS: dict[str, MediaKind] = {
    "image": "image",
    "image_url": "image",
    "input_image": "image",
    "video": "video",
    "video_url": "video",
    "audio": "audio",
    "audio_url": "audio",
    "input_audio": "audio",
}
_TEXT_PARTS = frozenset({"text", "input_text", "output_text"})


@dataclass(frozen=True, kw_only=True, slots=True)
class MediaPart:
    """The place of the next medium of this kind."""

    kind: MediaKind


Part = str | MediaPart


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    """One turn. `extras` are the record's other keys, such as `tool_calls` or `name`."""

    role: str
    parts: tuple[Part, ...]
    extras: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversation:
    """Turns in order, and the tools offered to the model."""

    messages: tuple[Message, ...]
    tools: object = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    """Running text for pre-training."""

    parts: tuple[Part, ...]


def read_record(
    record: Mapping[str, object], media: Sequence[MediaKind]
) -> Conversation | Document:
    """Read a record of any dialect, whose sample has `media` of these kinds.

    Raises:
        SampleError: no known dialect, no text, or another number of placeholders than of media
            of some kind.
    """
    present = set(media) | {kind for kind in KINDS if _names_media(record, kind)}
    if record.get("messages") is not None:
        result: Conversation | Document = _openai(record, "messages", present)
    elif record.get("conversations") is not None:
        result = _conversations(record, present)
    elif isinstance(record.get("text"), str):
        result = _document(cast(str, record["text"]), media, present)
    else:
        raise SampleError(
            f"the record has the keys {sorted(record)}; it needs messages, conversations or text. "
            "Rename its column, or convert it to one of these."
        )
    _check(result, media)
    return result


def text_bytes(source: Conversation | Document) -> int:
    """Text of all parts in UTF-8."""
    texts = (part for part in _parts(source) if isinstance(part, str))
    return sum(len(text.encode(errors="surrogatepass")) for text in texts)


def _parts(source: Conversation | Document) -> list[Part]:
    pieces = source.messages if isinstance(source, Conversation) else (source,)
    return [part for piece in pieces for part in piece.parts]


def _names_media(record: Mapping[str, object], kind: MediaKind) -> bool:
    return bool(record.get(kind)) or bool(record.get(f"{kind}s"))


def _document(text: str, media: Sequence[MediaKind], present: set[MediaKind]) -> Document:
    parts = _split(text, present)
    if media and not any(isinstance(part, MediaPart) for part in parts):
        parts = (*(MediaPart(kind=kind) for kind in media), *parts)
    return Document(parts=parts)


def _conversations(record: Mapping[str, object], present: set[MediaKind]) -> Conversation:
    turns = _turns(record, "conversations")
    if turns[0].get("from") is None:
        return _openai(record, "conversations", present)
    messages = []
    for turn in turns:
        sender, value = turn.get("from"), turn.get("value")
        role = _ROLES.get(str(sender))
        if role is None or not isinstance(value, str):
            raise SampleError(
                f"a turn of conversations has from {sender!r} and a value of type "
                f"{type(value).__name__}; from must be one of {', '.join(_ROLES)}, and value a "
                "string."
            )
        lost = not present and _opens_with_image(role, value)
        messages.append(Message(role=role, parts=_split(value, {"image"} if lost else present)))
    return _with_system(record, messages)


def _with_system(record: Mapping[str, object], messages: list[Message]) -> Conversation:
    """Some ShareGPT sets keep the system prompt in a key of its own."""
    system = record.get("system")
    if isinstance(system, str) and system and not any(m.role == "system" for m in messages):
        messages = [Message(role="system", parts=(system,)), *messages]
    return Conversation(messages=tuple(messages), tools=record.get("tools") or None)


def _opens_with_image(role: str, value: str) -> bool:
    text = value.strip()
    return role == "user" and (text.startswith("<image>") or text.endswith("<image>"))


def _openai(record: Mapping[str, object], key: str, present: set[MediaKind]) -> Conversation:
    turns = _turns(record, key)
    has_parts = any(_is_media_part(part) for turn in turns for part in _list(turn.get("content")))
    in_text: set[MediaKind] = set() if has_parts else present
    messages = []
    for turn in turns:
        role = turn.get("role")
        if not isinstance(role, str) or not role:
            raise SampleError(
                f"a turn of {key} has the keys {sorted(turn)} and role {role!r}; each needs role "
                "and content, or from and value."
            )
        # Parquet writes every key in every row: None is what the row does not have.
        extras = {k: v for k, v in turn.items() if k not in ("role", "content") and v is not None}
        parts = _content(turn.get("content"), in_text)
        messages.append(Message(role=role, parts=parts, extras=extras))
    return Conversation(messages=tuple(messages), tools=record.get("tools") or None)


def _turns(record: Mapping[str, object], key: str) -> list[Mapping[str, object]]:
    turns = record[key]
    if isinstance(turns, str):  # some Parquet sets keep the list as a JSON string
        try:
            turns = json.loads(turns)
        except (ValueError, RecursionError) as error:
            raise SampleError(
                f"{key} is a string that is not JSON: {turns[:60]!r}. Store a list of turns."
            ) from error
    listed = _list(turns)
    if not listed or not all(isinstance(turn, Mapping) for turn in listed):
        raise SampleError(
            f"{key} holds {len(listed)} turns of type "
            f"{', '.join(sorted({type(t).__name__ for t in listed})) or type(turns).__name__}; it "
            "needs a list of at least one object. Leave empty samples out."
        )
    return cast("list[Mapping[str, object]]", listed)


def _list(value: object) -> list[object]:
    return list(value) if isinstance(value, list | tuple) else []


def _is_media_part(part: object) -> bool:
    return isinstance(part, Mapping) and str(part.get("type")) in _PART_KINDS


def _content(content: object, in_text: set[MediaKind]) -> tuple[Part, ...]:
    if content is None:
        return ()
    if isinstance(content, str):
        return _split(content, in_text)
    parts: list[Part] = []
    for part in _list(content) if isinstance(content, list | tuple) else [content]:
        if isinstance(part, str):
            parts.extend(_split(part, in_text))
        elif isinstance(part, Mapping) and str(part.get("type")) in _PART_KINDS:
            parts.append(MediaPart(kind=_PART_KINDS[str(part["type"])]))
        elif isinstance(part, Mapping) and part.get("type") in _TEXT_PARTS:
            parts.extend(_split(str(part.get("text") or ""), in_text))
        else:
            raise SampleError(
                f"a message's content holds {str(part)[:80]!r}; a part must be a string or an "
                f"object whose type is one of {', '.join([*sorted(_TEXT_PARTS), *_PART_KINDS])}."
            )
    return _joined(parts)


def _split(text: str, kinds: set[MediaKind]) -> tuple[Part, ...]:
    """Text around the placeholders of these kinds; other placeholders stay text."""
    parts: list[Part] = []
    start = 0
    for match in _PLACEHOLDER.finditer(text):
        kind = cast(MediaKind, match[1])
        if kind in kinds:
            parts += [text[start : match.start()], MediaPart(kind=kind)]
            start = match.end()
    return _joined([*parts, text[start:]])


def _joined(parts: Sequence[Part]) -> tuple[Part, ...]:
    """Neighbouring texts as one, so that nothing can hide across their border."""
    joined: list[Part] = []
    for part in parts:
        if isinstance(part, str) and joined and isinstance(joined[-1], str):
            joined[-1] += part
        elif part != "":
            joined.append(part)
    return tuple(joined)


def _check(result: Conversation | Document, media: Sequence[MediaKind]) -> None:
    parts = _parts(result)
    texts = [part for part in parts if isinstance(part, str)]
    if not any(text.strip() for text in texts) and not media:
        raise SampleError("the sample is empty: it has neither text nor media. Leave it out.")
    placeholders = Counter(part.kind for part in parts if isinstance(part, MediaPart))
    files = Counter(media)
    for kind in KINDS:
        if placeholders[kind] != files[kind]:
            raise SampleError(
                f"the text has {placeholders[kind]} placeholders for {kind} and the sample has "
                f"{files[kind]} {kind} files; they must be equal. Add the missing "
                f"{'file' if placeholders[kind] > files[kind] else '<' + kind + '>'}, or leave "
                "the sample out."
            )
