"""Reads records as conversations and documents: the turns, and the places of the media.

    {"messages": [{"role", "content"}]}           OpenAI: content is a string or a list of parts
    {"conversations": [{"from", "value"}]}        ShareGPT and LLaVA: <image> <video> <audio> in
                                                  the text; {"role", "content"} is read too
    {"texts": [{"user", "assistant"}]}            the_cauldron: turns in pairs
    {"texts": ["...", null, "..."]}               OBELICS: each null is the place of an image
    {"question" or "problem", "answer"}           one turn each
    {"text": "..."}                               a plain document
    {"caption": "..."}                            the same, behind its media

Placeholders: where content has parts of media, those parts are the placeholders. Elsewhere
`<image>`, `<video>` and `<audio>` in text are, even if the sample has no such file: it is then
refused, since its file was lost. Only markup is exempt: `<video>` in a text that also has
`</video>`, or between back-ticks, when the sample has no such file. A source whose texts contain
these words otherwise says placeholders: text; then they count only for the kinds of file that a
sample has.

A document with media and no placeholders shows its media first, as caption datasets intend; so do
a question, and the first of several pairs. Sound with a transcript (`sentence`, `transcription`,
`transcript`) and no text is such a document.
"""

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast, get_args

from dataservice.core.errors import SampleError
from dataservice.core.quoting import cut, quoted
from dataservice.core.sample import PART_KINDS, PART_OPTIONS, MediaKind, PlaceholderRule

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
_QUESTIONS = ("question", "problem")
# What a question may refer to, and the reader would not show.
_BESIDE_QUESTIONS = ("choices", "options", "context", "passage")
# What a template is given of every conversation.
_GIVEN = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
_TRANSCRIPTS = ("sentence", "transcription", "transcript")
# Of a turn: whether it is learnt, by 0 and 1 in OpenAI's sets, by false and true in those of
# ms-swift and axolotl.
_WEIGHTS = ("weight", "loss", "train", "training")
_LISTS = (list, tuple)
_TEXT_PARTS = frozenset({"text", "input_text", "output_text"})


@dataclass(frozen=True, kw_only=True, slots=True)
class MediaPart:
    """The place of the next medium of this kind."""

    kind: MediaKind


Part = str | MediaPart


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    """One turn. `extras` are the record's other keys, such as `tool_calls` or `name`; `listed` is
    true where the record has the content as a list, whose texts then stay apart. Of an assistant's
    turn, `learnt` says whether its text is."""

    role: str
    parts: tuple[Part, ...]
    listed: bool = False
    learnt: bool = True
    extras: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversation:
    """The turns in order, the tools offered to the model, and what else its template is given."""

    messages: tuple[Message, ...]
    tools: object = None
    values: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    """Running text for pre-training."""

    parts: tuple[Part, ...]


def read_record(
    record: Mapping[str, object],
    media: Sequence[MediaKind],
    placeholders: PlaceholderRule = "strict",
) -> Conversation | Document:
    """Read a record of any dialect; `media` has the kinds of its sample's files.

    Raises:
        SampleError: the dialect is unknown, there is no text, or the numbers of placeholders and
            files of some kind differ.
    """
    split = _Splitter(files=frozenset(media), rule=placeholders)
    if record.get("messages") is not None:
        result: Conversation | Document = _openai(record, "messages", split)
    elif record.get("conversations") is not None:
        result = _conversations(record, split)
    elif isinstance(texts := record.get("texts"), list) and texts:
        result = _texts(record, texts, media, split)
    elif (text := _document_text(record, media)) is not None:
        result = _document(text, media, split)
    elif (key := _question_key(record)) is not None:
        result = _answered(record, key, media, split)
    else:
        raise _no_text(record, media)
    _check(result, media)
    return result


def _no_text(record: Mapping[str, object], media: Sequence[MediaKind]) -> SampleError:
    """Why no dialect takes a record: a value of another type, or no key that is known."""
    strings = ("text", "caption", *(_TRANSCRIPTS if "audio" in media else ()))
    for key, kind in (*((key, str) for key in strings), ("texts", list)):
        value = record.get(key)
        if value is not None and not isinstance(value, kind):
            form = "a list of texts" if kind is list else "a text"
            return SampleError(
                f"{key} is {quoted(value, 40)}, of type {type(value).__name__}; it must be {form}. "
                "Write it so, or name under columns in the source the key that holds the text."
            )
    return SampleError(
        f"the record has the keys {quoted(sorted(record))}; it needs messages, conversations, "
        "texts, text, question and answer, or, with media, caption. Say under columns in the "
        "source which of its keys are these, as in columns: {question: prompt, answer: response}."
    )


def text_parts(source: Conversation | Document) -> list[str]:
    """The text of all parts."""
    return [part for part in _parts(source) if isinstance(part, str)]


def _parts(source: Conversation | Document) -> list[Part]:
    pieces = source.messages if isinstance(source, Conversation) else (source,)
    return [part for piece in pieces for part in piece.parts]


def _document_text(record: Mapping[str, object], media: Sequence[MediaKind]) -> str | None:
    keys = ["text", *(_TRANSCRIPTS if "audio" in media else ())]
    if media and _question_key(record) is None:
        keys.append("caption")
    return next((text for key in keys if isinstance(text := record.get(key), str)), None)


def _document(text: str, media: Sequence[MediaKind], split: "_Splitter") -> Document:
    return Document(parts=_with_media([split(text)], media)[0])


def _with_media(
    texts: Sequence[tuple[Part, ...]], media: Sequence[MediaKind]
) -> list[tuple[Part, ...]]:
    """The texts, the first of them behind the media where none says where they belong."""
    first, *others = texts
    if media and not any(isinstance(part, MediaPart) for text in texts for part in text):
        first = (*(MediaPart(kind=kind) for kind in media), *first)
    return [first, *others]


def _texts(
    record: Mapping[str, object],
    texts: list[object],
    media: Sequence[MediaKind],
    split: "_Splitter",
) -> Conversation | Document:
    """Pairs of user and assistant, or the texts between a document's images."""
    if all(text is None or isinstance(text, str) for text in texts):
        places = [
            (MediaPart(kind="image"),) if text is None else split(str(text)) for text in texts
        ]
        return Document(parts=_joined([part for parts in places for part in parts]))
    pairs = [text for text in texts if isinstance(text, Mapping)]
    said = [pair.get(role) for pair in pairs for role in ("user", "assistant")]
    if len(pairs) != len(texts) or not all(isinstance(text, str) for text in said):
        raise SampleError(
            f"texts holds {cut(texts, 80)!r}; it must be a list of objects with the texts user and "
            "assistant, or of texts and nulls, where a null is the place of an image."
        )
    return _in_turns(record, [str(text) for text in said], media, split)


def _question_key(record: Mapping[str, object]) -> str | None:
    answered = record.get("answer") is not None
    return next((key for key in _QUESTIONS if answered and record.get(key) is not None), None)


def _answered(
    record: Mapping[str, object], key: str, media: Sequence[MediaKind], split: "_Splitter"
) -> Conversation:
    question, answer = record[key], record["answer"]
    if not isinstance(question, str) or not isinstance(answer, str):
        raise SampleError(
            f"{key} is {cut(question, 40)!r} and answer {cut(answer, 40)!r}; both must be texts. "
            "Write the answer as the model is to say it."
        )
    if hidden := [other for other in _BESIDE_QUESTIONS if record.get(other)]:
        raise SampleError(
            f"the record has {hidden[0]}, which {key!r} and 'answer' do not show. Write them into "
            f"the question, or ignore: [{hidden[0]}] in the source to train without them."
        )
    return _in_turns(record, [question, answer], media, split)


def _in_turns(
    record: Mapping[str, object],
    texts: Sequence[str],
    media: Sequence[MediaKind],
    split: "_Splitter",
) -> Conversation:
    """Texts of user and assistant in turn."""
    parts = _with_media([split(text) for text in texts], media)
    roles = ("user", "assistant") * (len(texts) // 2)
    turns = zip(roles, parts, strict=True)
    return _with_system(record, [Message(role=role, parts=each) for role, each in turns])


def _conversations(record: Mapping[str, object], split: "_Splitter") -> Conversation:
    turns = _turns(record, "conversations")
    if turns[0].get("from") is None:
        return _openai(record, "conversations", split)
    messages = []
    for turn in turns:
        sender, value = turn.get("from"), turn.get("value")
        role = _ROLES.get(str(sender))
        if role is None or not isinstance(value, str):
            raise SampleError(
                f"a turn of conversations has from {quoted(sender)} and a value of type "
                f"{type(value).__name__}; from must be one of {', '.join(_ROLES)}, and value a "
                "string."
            )
        messages.append(
            Message(
                role=role,
                parts=split(value),
                learnt=_is_learnt(turn, role),
                extras=_extras(turn, "from", "value"),
            )
        )
    return _with_system(record, messages)


def _openai(record: Mapping[str, object], key: str, split: "_Splitter") -> Conversation:
    turns = _turns(record, key)
    contents = [turn.get("content") for turn in turns]
    lists = [content for content in contents if isinstance(content, _LISTS)]
    if any(_is_media_part(part) for content in lists for part in content):
        split = _Splitter(files=frozenset(), rule="text")
    messages = []
    _require_listed_order([part for content in lists for part in content])
    for turn, content in zip(turns, contents, strict=True):
        role = turn.get("role")
        if not isinstance(role, str) or not role:
            raise SampleError(
                f"a turn of {key} has the keys {quoted(sorted(turn))} and role {quoted(role)}; "
                "each needs role and content, or from and value."
            )
        if turn.get("refusal") and not content:
            raise SampleError(
                f"a turn of {key} has a refusal, {quoted(turn['refusal'], 40)}, and no content: "
                "templates do not show it, and the model would learn to say nothing. Write it as "
                "content, or leave the sample out."
            )
        messages.append(
            Message(
                role=role,
                parts=_content(content, split),
                listed=isinstance(content, _LISTS),
                learnt=_is_learnt(turn, role),
                extras=_extras(turn, "role", "content"),
            )
        )
    return _with_system(record, messages)


def _extras(turn: Mapping[str, object], *read: str) -> dict[str, object]:
    """The turn's other keys. Parquet writes every key in every row, with None for those that the
    row does not have."""
    read = (*read, *_WEIGHTS)
    return {key: value for key, value in turn.items() if key not in read and value is not None}


def _is_learnt(turn: Mapping[str, object], role: str) -> bool:
    """What the first of `_WEIGHTS` that a turn has says of it."""
    for key in _WEIGHTS:
        weight = turn.get(key)
        if weight is None:
            continue
        if not isinstance(weight, int | float if key == "weight" else bool) or weight not in (
            (0, 1) if role == "assistant" else (0,)
        ):
            raise SampleError(
                f"a turn of role {quoted(role, 40)} has {key} {quoted(weight, 40)}; an assistant's "
                "weight may be 0, which is not learnt, or 1, its loss and train false or true, "
                "and others' 0 and false. Correct or remove it; a weight of the whole sample is "
                "named by columns: {loss_weight: …} in the source."
            )
        return bool(weight)
    return True


def _with_system(record: Mapping[str, object], messages: list[Message]) -> Conversation:
    """The conversation with the system prompt, which some datasets keep in a separate key."""
    if system := record.get("system"):
        if not isinstance(system, str):
            raise SampleError(
                f"system is {quoted(system, 60)}, of type {type(system).__name__}; it must be a "
                "text. Write it so, or write ignore: [system] in the source to train without it."
            )
        first = Message(role="system", parts=(system,))
        own = [message.parts for message in messages if message.role == "system"]
        if own not in ([], [first.parts]):
            raise SampleError(
                f"the record has system {quoted(system, 60)}, and other system turns too. Keep "
                "one, or write ignore: [system] in the source."
            )
        messages = messages if own else [first, *messages]
    return Conversation(messages=tuple(messages), tools=_tools(record), values=_values(record))


def _values(record: Mapping[str, object]) -> Mapping[str, object]:
    """What the record gives its template besides, in the column that TRL reads it from."""
    given = record.get("chat_template_kwargs") or {}
    if not isinstance(given, Mapping) or not _GIVEN.isdisjoint(given):
        raise SampleError(
            f"chat_template_kwargs is {quoted(given, 60)}; it must be an object, with none of "
            f"{quoted(sorted(_GIVEN))}, which the template is given anyway. Correct it, or write "
            "ignore: [chat_template_kwargs] in the source."
        )
    return given


def _tools(record: Mapping[str, object]) -> object:
    """The tools offered, which some datasets keep as a JSON string."""
    if record.get("functions"):
        raise SampleError(
            "the record has functions, which chat templates no longer read. Write them as tools: "
            '[{"type": "function", "function": …}].'
        )
    tools = record.get("tools") or None
    if isinstance(tools, str):
        try:
            tools = json.loads(tools) or None
        except (ValueError, RecursionError) as error:
            raise SampleError(
                f"tools is a string that is not JSON: {quoted(tools, 60)}. Store a list of tools."
            ) from error
    listed = _list(tools)
    if tools and not (listed and all(isinstance(tool, Mapping) for tool in listed)):
        raise SampleError(
            f"tools is {quoted(tools, 60)}; it must be a list of objects, or such a list as one "
            "string of JSON: templates would write strings in it as JSON a second time. Parse "
            "them, or leave the sample out."
        )
    return tools


def _turns(record: Mapping[str, object], key: str) -> list[Mapping[str, object]]:
    turns = record[key]
    if isinstance(turns, str):  # some Parquet datasets keep the list as a JSON string
        try:
            turns = json.loads(turns)
        except (ValueError, RecursionError) as error:
            raise SampleError(
                f"{key} is a string that is not JSON: {quoted(turns, 60)}. Store a list of turns."
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
    return list(value) if isinstance(value, _LISTS) else []


def _is_media_part(part: object) -> bool:
    return isinstance(part, Mapping) and str(part.get("type")) in PART_KINDS


def _content(content: object, split: "_Splitter") -> tuple[Part, ...]:
    if content is None:
        return ()
    if isinstance(content, str):
        return split(content)
    parts: list[Part] = []
    for part in content if isinstance(content, _LISTS) else [content]:
        if isinstance(part, str):
            parts.extend(split(part))
        elif isinstance(part, Mapping) and str(part.get("type")) in PART_KINDS:
            _refuse_options(part)
            parts.append(MediaPart(kind=PART_KINDS[str(part["type"])]))
        elif isinstance(part, Mapping) and str(part.get("type")) in _TEXT_PARTS:
            # A template may write something around an empty text as well.
            parts.extend(split(str(part.get("text") or "")) or [""])
        else:
            raise SampleError(
                f"a message's content holds {cut(part, 80)!r}; a part must be a string or an "
                f"object whose type is one of {', '.join([*sorted(_TEXT_PARTS), *PART_KINDS])}."
            )
    return tuple(parts)


def _require_listed_order(parts: Sequence[object]) -> None:
    """Raises SampleError where parts say by `index` that their files come in another order than the
    record lists them."""
    seen: Counter[MediaKind] = Counter()
    for part in parts:
        if not isinstance(part, Mapping) or (kind := PART_KINDS.get(str(part.get("type")))) is None:
            continue
        index = part.get("index")
        if index is not None and index != seen[kind]:
            raise SampleError(
                f"a part of type {part['type']!r} has index {quoted(index, 40)}, and shows number "
                f"{seen[kind]} of the sample's {kind} files, counted from 0: files are shown in "
                "the order in which the record lists them. List them in the order of the parts, "
                "each as often as it is shown."
            )
        seen[kind] += 1


def _refuse_options(part: Mapping[str, object]) -> None:
    """Raises SampleError on what would be shown otherwise by who reads Qwen's options."""
    given = sorted(key for key in PART_OPTIONS if part.get(key) is not None)
    if given:
        raise SampleError(
            f"a part of type {part['type']!r} has {given[0]}: {quoted(part[given[0]], 40)}, which "
            "is not read: pipeline.vision says how many frames and pixels all have. Cut or resize "
            f"the file itself, or write ignore: [{', '.join(given)}] in the source to train on all "
            "of it."
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Splitter:
    """Cuts text at its placeholders, for a sample that has files of these kinds."""

    files: frozenset[MediaKind]
    rule: PlaceholderRule

    def __call__(self, text: str) -> tuple[Part, ...]:
        """Splits text at its placeholders; all other text stays as it is. O(characters)."""
        if _PLACEHOLDER.search(text) is None:
            return (text,) if text else ()
        parts: list[Part] = []
        start = ticks = counted = 0
        last_tick = text.rfind("`")
        closed = {kind for kind in KINDS if f"</{kind}>" in text}
        for match in _PLACEHOLDER.finditer(text):
            kind = cast(MediaKind, match[1])
            ticks += text.count("`", counted, match.start())
            counted = match.start()
            is_markup = kind in closed or (ticks % 2 == 1 and last_tick > match.end() - 1)
            if kind in self.files or (self.rule == "strict" and not is_markup):
                parts += [text[start : match.start()], MediaPart(kind=kind)]
                start = match.end()
        return _joined([*parts, text[start:]])


def _joined(parts: Sequence[Part]) -> tuple[Part, ...]:
    """The parts with neighbouring texts joined, so that no control token can hide across their
    boundary."""
    joined: list[Part] = []
    for part in parts:
        if isinstance(part, str) and joined and isinstance(joined[-1], str):
            joined[-1] += part
        elif part != "":
            joined.append(part)
    return tuple(joined)


def _check(result: Conversation | Document, media: Sequence[MediaKind]) -> None:
    parts = _parts(result)
    if not any(isinstance(part, MediaPart) or part.strip() for part in parts) and not media:
        raise SampleError("the sample is empty: it has neither text nor media. Leave it out.")
    shown = [part.kind for part in parts if isinstance(part, MediaPart)]
    if not shown and not media:
        return
    placeholders, files = Counter(shown), Counter(media)
    for kind in KINDS:
        if placeholders[kind] != files[kind]:
            raise SampleError(
                f"the text has {placeholders[kind]} placeholders for {kind} and the sample has "
                f"{files[kind]} {kind} files; they must be equal. "
                f"{_remedy(kind, placeholders[kind], files[kind])}, or leave the sample out."
            )


def _remedy(kind: MediaKind, placeholders: int, files: int) -> str:
    if placeholders < files:
        return f"Add the missing <{kind}>, name a file that is no part of it under ignore"
    if files:
        return "Add the missing file"
    return (
        f"Add the missing file, write placeholders: text in the source if <{kind}> is only a "
        "word in its texts"
    )
