"""Conversations to marked text through a chat template.

Templates are Jinja as Hugging Face runs it: sandboxed, `trim_blocks` and `lstrip_blocks`, with
`raise_exception`, `strftime_now`, `tojson`, loop controls and `{% generation %}`. One thing
differs: `strftime_now` gives a fixed date, or a sample's length would change overnight.

What carries loss:
- a template with `{% generation %}` says so itself;
- otherwise a turn is what it adds to the text rendered before it, generation prompt included
  (the prefix difference), up to and including its last control token: the white space that
  templates put behind the end-of-turn token is not learnt.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime, time
from typing import NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from dataservice.core.errors import SampleError, SpecError
from dataservice.core.sample import MediaKind
from dataservice.decode.conversation import Conversation, MediaPart, Message, Part
from dataservice.decode.marks import LOSS_CLOSE, LOSS_OPEN, SLOTS
from dataservice.decode.tokenizer import Guard

# ChatML, as written in OpenAI's "chatml.md": role line, content, end of turn.
CHATML = """\
{%- for message in messages -%}
{{- '<|im_start|>' ~ message['role'] ~ '\\n' -}}
{%- if message['role'] == 'assistant' -%}
{%- generation -%}
{{- message['content'] ~ '<|im_end|>' -}}
{%- endgeneration -%}
{{- '\\n' -}}
{%- else -%}
{{- message['content'] ~ '<|im_end|>\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""

_GENERATION = re.compile(r"\{%[-+]?\s*generation\b")
_PROBE = "Is the kettle warm?"


class GenerationTag(Extension):
    """`{% generation %} … {% endgeneration %}`: what the model learns to say."""

    tags = {"generation"}  # noqa: RUF012 - the type that the base class gives it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The body with a mark at each end."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        ends = [
            nodes.Output([nodes.TemplateData(mark)]).set_lineno(line)
            for mark in (LOSS_OPEN, LOSS_CLOSE)
        ]
        return [ends[0], *body, ends[1]]


@dataclass(frozen=True, kw_only=True, slots=True)
class TemplateSource:
    """A template, its name in errors, and what it may refer to."""

    name: str
    text: str
    tokens: Mapping[str, str]
    today: date


class ChatTemplate:
    """A compiled template, and what it can make of content.

    Content is handed over as a list of parts where the template itself writes the media
    token of every such kind, else as a string in which a mark keeps the medium's place.
    """

    def __init__(
        self, source: TemplateSource, *, guard: Guard, pads: Mapping[MediaKind, str]
    ) -> None:
        """`pads[kind]` is the token that one medium becomes. Compiles and tries the template.

        Raises:
            SpecError: it does not compile, or shows neither a string nor a list of parts.
        """
        self.name = source.name
        self._guard = guard
        self._tokens = dict(source.tokens)
        self._marks_loss = _GENERATION.search(source.text) is not None
        try:
            self._template = _environment(source.today).from_string(source.text)
        except TemplateError as error:
            raise SpecError(
                f"chat template {source.name!r} does not compile: {error}. Repair it, or choose "
                "chat_template: chatml."
            ) from error
        self._takes_parts = self._shows([{"type": "text", "text": _PROBE}])
        # One that refuses a lone user turn altogether may still take longer conversations.
        self._takes_strings = self._shows(_PROBE) or self._tried(_PROBE) is None
        if not (self._takes_strings or self._takes_parts):
            raise SpecError(
                f"chat template {source.name!r} shows the content of a user turn neither when it "
                "is a string nor when it is a list of parts. Choose chat_template: chatml."
            )
        self.writes = frozenset(kind for kind in pads if self._writes(kind, pads[kind]))

    def render(self, conversation: Conversation) -> str:
        """The conversation as marked text: LOSS around what is learnt, SLOTS or the template's
        own media tokens where media go, BREAK inside text that looks like a control token.

        Raises:
            SampleError: the template refuses the conversation, or is not prefix-stable and
                has no `{% generation %}`.
        """
        turns = [self._turn(message) for message in conversation.messages]
        tools = self._guard.protect_all(conversation.tools)
        text = self._render(turns, tools, prompt=False)
        if self._marks_loss:
            return text
        return self._mark_turns(text, turns, tools)

    # ---- loss by prefix difference ----

    def _mark_turns(self, text: str, turns: Sequence[dict[str, object]], tools: object) -> str:
        pieces, done = [], 0
        for place, turn in enumerate(turns):
            if turn["role"] != "assistant":
                continue
            before = self._render(turns[:place], tools, prompt=True)
            after = self._render(turns[: place + 1], tools, prompt=False)
            if not (after.startswith(before) and text.startswith(after)):
                raise SampleError(
                    f"chat template {self.name!r} is not prefix-stable: turn {place + 1} of "
                    f"{len(turns)} changes the text of what comes before it, so its loss cannot "
                    "be placed. Add {% generation %} to the template, or choose chatml."
                )
            start, end = len(before), _end_of_turn(after, len(before), self._guard)
            pieces += [text[done:start], LOSS_OPEN, text[start:end], LOSS_CLOSE]
            done = end
        return "".join([*pieces, text[done:]])

    # ---- content ----

    def _turn(self, message: Message) -> dict[str, object]:
        extras = {key: self._guard.protect_all(value) for key, value in message.extras.items()}
        role = self._guard.protect(message.role)
        return {**extras, "role": role, "content": self._content(message.parts)}

    def _content(self, parts: Sequence[Part]) -> str | list[dict[str, str]]:
        media = {part.kind for part in parts if isinstance(part, MediaPart)}
        if self._takes_strings and not media & self.writes:
            return "".join(self._text(part) for part in parts)
        content: list[dict[str, str]] = []
        for part in parts:
            if isinstance(part, MediaPart) and part.kind in self.writes:
                content.append({"type": part.kind, part.kind: part.kind})
            else:
                content.append({"type": "text", "text": self._text(part)})
        return content

    def _text(self, part: Part) -> str:
        return SLOTS[part.kind] if isinstance(part, MediaPart) else self._guard.protect(part)

    # ---- trying the template out ----

    def _shows(self, content: object) -> bool:
        text = self._tried(content)
        return text is not None and _PROBE in text and "'type'" not in text

    def _writes(self, kind: MediaKind, pad: str) -> bool:
        """Whether the template turns a part of this kind into exactly one of its tokens."""
        probe = [{"type": kind, kind: kind}, {"type": "text", "text": _PROBE}]
        text = self._tried(probe) if self._takes_parts else None
        return text is not None and text.count(pad) == 1 and _PROBE in text

    def _tried(self, content: object) -> str | None:
        try:
            return self._render([{"role": "user", "content": content}], None, prompt=False)
        except SampleError:
            return None

    def _render(self, turns: Sequence[dict[str, object]], tools: object, *, prompt: bool) -> str:
        try:
            return self._template.render(
                {
                    **self._tokens,
                    "messages": turns,
                    "tools": tools,
                    "documents": None,
                    "add_generation_prompt": prompt,
                }
            )
        # A template is a program over the sample's values: it may raise what it likes.
        except Exception as error:
            raise SampleError(
                f"chat template {self.name!r} refuses the conversation ({len(turns)} turns): "
                f"{error}. Leave the sample out, or choose another template."
            ) from error


def _environment(today: date) -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols]
    )
    now = datetime.combine(today, time())
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = now.strftime
    environment.filters["tojson"] = _tojson
    return environment


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes for HTML, which templates for models do not want."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _end_of_turn(text: str, start: int, guard: Guard) -> int:
    """Where a turn `text[start:]` ends: white space behind a control token is not part of it."""
    stripped = text.rstrip()
    return len(stripped) if len(stripped) > start and guard.ends(stripped) else len(text)
