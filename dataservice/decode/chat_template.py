"""Renders conversations to marked text with a chat template.

Templates are Jinja as Hugging Face runs it; see `template_environment.py`.

Which text carries loss: a template with `{% generation %}` marks it itself. Otherwise it is the
text that the template writes for each assistant's turn, from behind the generation prompt up to and
including the turn's last control token: the white space that templates put after the end-of-turn
token is not learnt. Where earlier text stays as it is when a turn is added, that is the difference
between the texts rendered up to the turn and with it (the prefix difference). Where it does not, as
with templates that drop earlier thoughts, `template_turns.py` finds the text of each turn.

A conversation is refused when the template does not show all of it (a turn, the tools, their
calls), since that part would be lost silently. Templates may leave out parts of a turn, as those of
reasoning models leave out earlier thoughts.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from typing import cast

from jinja2 import Template, TemplateError

from dataservice.core.errors import SampleError, SpecError
from dataservice.core.quoting import cut, quoted
from dataservice.core.sample import MediaKind
from dataservice.decode.conversation import Conversation, MediaPart, Message
from dataservice.decode.marks import BREAK, LOSS_CLOSE, LOSS_OPEN, SLOTS
from dataservice.decode.template_environment import environment
from dataservice.decode.template_omissions import CALLS, THOUGHTS, Beside, omissions
from dataservice.decode.template_turns import (
    TracedText,
    Turn,
    compile_traced,
    place_of,
    read_traced,
)
from dataservice.decode.tokenizer import Guard, LoadedTokenizer

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

# What PaliGemma's processor writes, whose models have no template: BOS behind the pictures, a line
# break behind the prompt, and the answer, whose tokens are found apart from those of the prompt.
PALIGEMMA = """\
{%- if messages | map(attribute='role') | join(' ') not in ('user', 'user assistant') -%}
{{- raise_exception('PaliGemma takes one question and its answer') -}}
{%- endif -%}
{%- set prompt = messages[0]['content'] -%}
{%- set images = prompt | selectattr('type', 'equalto', 'image') | list | length -%}
{%- set seen = namespace(images=0) -%}
{{- '' if images else bos_token -}}
{%- for part in prompt -%}
{%- if part['type'] == 'image' -%}
{%- set seen.images = seen.images + 1 -%}
{{- '<image>' ~ (bos_token if seen.images == images else '') -}}
{%- else -%}
{{- part['text'] -}}
{%- endif -%}
{%- endfor -%}
{{- '\\nBREAK' -}}
{%- for message in messages[1:] -%}
{%- generation -%}
{%- for part in message['content'] -%}{{- part['text'] -}}{%- endfor -%}
{{- eos_token -}}
{%- endgeneration -%}
{%- endfor -%}
""".replace("BREAK", BREAK)

CHATML_TOKENS = ("<|im_start|>", "<|im_end|>")

_GENERATION = re.compile(r"\{%[-+]?\s*generation\b")
_PROBE = "Is the kettle warm?"
# In the middle of what an assistant, and what all others say. Digits are the same in upper case, in
# JSON and after stripping.
_ASSISTANTS_NUMBER, _OTHERS_NUMBER = "50917364250917", "62840391762840"


def no_template(tokenizer: LoadedTokenizer) -> str:
    """The message that a tokenizer has no template for chat, and lacks ChatML's tokens. As several
    ordinary tokens they would be plain text, which a sample's own text can contain as well."""
    if tokenizer.others:
        return (
            f"the tokenizer {quoted(tokenizer.path)} has the chat templates "
            f"{', '.join(map(quoted, tokenizer.others))}, and none named 'default' to show "
            "conversations with. Give the one to use as chat_template: FILE.jinja."
        )
    return (
        f"the tokenizer {quoted(tokenizer.path)} has neither a chat template nor the tokens of "
        f"ChatML ({' and '.join(CHATML_TOKENS)}) to show conversations with. Give the model's own "
        "as chat_template: FILE.jinja, or a tokenizer that has those tokens."
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class TemplateSource:
    """A template, its name for error messages, and the variables that it may use."""

    name: str
    text: str
    tokens: Mapping[str, str]
    today: date


class ChatTemplate:
    """A compiled template, and the forms of content that it accepts.

    Content is passed as the record has it, a string or a list of parts, where the template takes
    that and itself writes the media tokens of every kind in it; else in the other form, or as a
    string in which a mark stands for each medium.
    """

    def __init__(
        self, source: TemplateSource, *, guard: Guard, pads: Mapping[MediaKind, str]
    ) -> None:
        """Compiles and tries the template. `pads[kind]` is the token that one medium becomes.

        Raises:
            SpecError: it does not compile, or shows neither a string nor a list of parts.
        """
        self.name = source.name
        self._guard = guard
        self._tokens = dict(source.tokens)
        self._reads_thoughts = any(name in source.text for name in THOUGHTS)
        self._traced: Template | None = None
        try:
            self._template = environment(source.today).from_string(source.text)
            if _GENERATION.search(source.text) is None:
                self._traced = compile_traced(environment(source.today), source.text)
        # Blocks that are nested too deep for Python are no TemplateError.
        except (TemplateError, SyntaxError, RecursionError) as error:
            raise SpecError(
                f"chat template {quoted(source.name)} does not compile: {cut(error)}. Repair it, "
                "or choose chat_template: chatml."
            ) from error
        self._takes_parts = self._shows([{"type": "text", "text": _PROBE}])
        # A template that refuses a single user turn may still accept longer conversations.
        self._takes_strings = self._shows(_PROBE) or self._tried(_PROBE) is None
        if not (self._takes_strings or self._takes_parts):
            raise SpecError(
                f"chat template {quoted(source.name)} shows the content of a user turn neither "
                "when it is a string nor when it is a list of parts. Choose chat_template: chatml."
            )
        self.writes = frozenset(kind for kind in pads if self._writes(kind, pads[kind]))
        self._usual_prompt = self._found_prompt()

    def render(self, conversation: Conversation) -> str:
        """The conversation as marked text: LOSS around learnt text, SLOTS or the template's own
        media tokens in place of media, and BREAK inside text that looks like a control token.

        Raises:
            SampleError: the template refuses the conversation, does not show all of it, or does
                not tell what an assistant's turn is and has no `{% generation %}`.
        """
        messages = enumerate(conversation.messages)
        turns = [Turn(self._turn(message), place) for place, message in messages]
        beside = {"tools": conversation.tools, **conversation.values}
        beside = {name: self._guard.protect_all(value) for name, value in beside.items()}
        text = self._render(turns, beside, prompt=False)
        self._require_shown(text, turns, beside)
        silent = frozenset(k for k, said in enumerate(conversation.messages) if not said.learnt)
        if self._traced is None:
            return self._without_loss(text, turns, silent)
        learnt = self._learnt_by_prefix(text, turns, beside, silent)
        if learnt is None:
            learnt = self._learnt_by_turns(text, turns, beside, silent)
        if learnt is None:
            raise SampleError(
                f"chat template {quoted(self.name)} does not tell which text the assistant's turns "
                f"of the conversation ({len(turns)} turns) generate: it changes the text of "
                "earlier turns when one is added, and does not write each turn in a loop over the "
                "turns. Add {% generation %} to the template, or choose chatml."
            )
        return _marked(text, learnt)

    def _without_loss(self, text: str, turns: Sequence[Turn], silent: frozenset[int]) -> str:
        """The marked text of a template with `{% generation %}`, without the marks of assistants'
        turns that are `silent`. Raises SampleError where it is unclear which are theirs."""
        assistants = [k for k, turn in enumerate(turns) if turn["role"] == "assistant"]
        if not silent.intersection(assistants):
            return text
        pieces = text.split(LOSS_OPEN)
        if len(pieces) != len(assistants) + 1:
            raise SampleError(
                f"a turn of the conversation has weight 0, and chat template {quoted(self.name)} "
                f"has {len(pieces) - 1} stretches of {{% generation %}} for {len(assistants)} "
                "turns of the assistant, so that it is unclear which is that turn's. Remove the "
                "weight, or choose a template with one for each turn."
            )
        first, *others = pieces
        for turn, piece in zip(assistants, others, strict=True):
            first += piece.replace(LOSS_CLOSE, "", 1) if turn in silent else LOSS_OPEN + piece
        return first

    # ---- nothing is lost ----

    def _require_shown(self, text: str, turns: Sequence[dict[str, object]], beside: Beside) -> None:
        """Raises SampleError when leaving out a part of the conversation gives the same text."""
        parts = omissions(text, turns, beside, thoughts=not self._reads_thoughts)
        for what, fewer, less in parts:
            try:
                shown = self._render(fewer, less, prompt=False) != text
            except SampleError:
                shown = True  # the template needs the part left out
            if not shown:
                raise SampleError(
                    f"chat template {quoted(self.name)} does not show the conversation's {what}: "
                    "they would be lost without a word. Choose a template that shows them, take "
                    "them out of the record, or leave the sample out."
                )

    # ---- loss by prefix difference ----

    def _learnt_by_prefix(
        self, text: str, turns: Sequence[Turn], beside: Beside, silent: frozenset[int]
    ) -> list[tuple[int, int]] | None:
        """The learnt parts of `text`, (start, end) in order, of turns that are not `silent`; None
        when a turn changes the text of what comes before it, or earlier turns are no conversation
        of their own."""
        usual = self._usual_prompt or ""
        learnt = []
        for place, turn in enumerate(turns):
            if turn["role"] != "assistant":
                continue
            try:
                before = self._render(turns[:place], beside, prompt=True)
                after = self._render(turns[: place + 1], beside, prompt=False)
            except SampleError:
                return None
            if not (after.startswith(before) and text.startswith(after)):
                return None
            start = len(before)
            # Some templates give no prompt after a tool's answer, and yet write the header.
            if not before.endswith(usual) and after.startswith(usual, start):
                start += len(usual)
            if place not in silent:
                learnt.append((start, _end_of_turn(after, start, self._guard)))
        return learnt

    # ---- loss of the text that turns write ----

    def _learnt_by_turns(
        self, text: str, turns: Sequence[Turn], beside: Beside, silent: frozenset[int]
    ) -> list[tuple[int, int]] | None:
        """The learnt parts of `text`, (start, end) in order, of turns that are not `silent`; None
        when the template's loops do not tell whose text is whose."""
        shown = self._traced_text(turns, beside, prompt=False)
        if shown is None or shown.text != text or not self._kept_apart(turns, beside):
            return None
        learnt: list[tuple[int, int]] = []
        for place, turn in enumerate(turns):
            if turn["role"] != "assistant":
                continue
            own = shown.of(place)
            says = any(turn.get(key) for key in ("content", *CALLS))
            if own is None or (says and not own):
                return None
            parts = [(one.start, one.end) for one in own]
            if parts and place == len(turns) - 1:  # and what ends the conversation
                parts.append((shown.end_of_turns, len(text)))
            written = "".join(text[start:end] for start, end in parts)
            header = self._header(written, turns, place, beside)
            if header is None:
                return None
            if place in silent:
                continue
            learnt += _within(parts, header, _end_of_turn(written, header, self._guard))
        return sorted(learnt)

    def _kept_apart(self, turns: Sequence[Turn], beside: Beside) -> bool:
        """Whether the text found for assistants' turns holds what assistants say, and nothing that
        others say. It is tried out with numbers in the middle of what they say."""
        said = [_numbered(turn) for turn in turns]
        try:
            traced = self._traced_text(said, beside, prompt=False)
        except SampleError:
            return False
        if traced is None:
            return False
        assistants = frozenset(k for k, turn in enumerate(turns) if turn["role"] == "assistant")
        own, other = traced.split(assistants)
        return _OTHERS_NUMBER not in own and _ASSISTANTS_NUMBER not in other

    def _header(
        self, written: str, turns: Sequence[Turn], place: int, beside: Beside
    ) -> int | None:
        """How many characters of a turn's text are the prompt to generate it; None if unknown."""
        prompt = self._prompt_before(turns, place, beside)
        if prompt is None:
            return None
        usual = self._usual_prompt or ""
        # The usual one where a template gives none after a tool's answer.
        known = max((p for p in (prompt, usual) if written.startswith(p)), key=len, default="")
        if known or not prompt:
            return len(known)
        # The first turn may begin the text. What it says cannot contain a prompt's control tokens.
        if place == 0 and usual in written and self._guard.protect(usual) != usual:
            return written.index(usual) + len(usual)
        # Only the beginning of the prompt, as where an earlier turn has lost its thoughts, which
        # the prompt opens: all that both have up to a control token or the end of a line, since
        # what the turn says may begin as the prompt goes on.
        shared = prompt[: _common([prompt, written])]
        header = max((k for k in range(len(shared) + 1) if self._ends(shared[:k])), default=0)
        return header if header or not shared else None

    def _ends(self, text: str) -> bool:
        return text.endswith("\n") or self._guard.ends(text)

    def _prompt_before(self, turns: Sequence[Turn], place: int, beside: Beside) -> str | None:
        """What the template adds to earlier turns where the model is to go on; as after a user's
        turn if earlier turns are no conversation of their own, or show nothing."""
        try:
            prompt = self._prompt_after(turns[:place], beside) if place else None
        except SampleError:
            prompt = None
        return self._usual_prompt if prompt is None else prompt

    def _prompt_after(self, turns: Sequence[Turn], beside: Beside) -> str | None:
        asked = self._traced_text(turns, beside, prompt=True)
        if asked is None or not asked.stretches:
            return None
        if asked.end_of_turns < len(asked.text):
            return asked.text[asked.end_of_turns :]
        # There is none, or the last turn's iteration writes it.
        closed = self._render(turns, beside, prompt=False)
        return asked.text[len(closed) :] if asked.text.startswith(closed) else None

    # ---- content ----

    def _turn(self, message: Message) -> dict[str, object]:
        spoken: dict[str, object] = {
            "role": self._guard.protect(message.role),
            "content": self._content(message),
        }
        if not message.extras:
            return spoken
        extras = {key: self._guard.protect_all(value) for key, value in message.extras.items()}
        thoughts = next((extras[key] for key in THOUGHTS if key in extras), None)
        if thoughts is not None:
            extras = {"thinking": thoughts, **extras, THOUGHTS[0]: thoughts}
        return {**spoken, **extras, **spoken}

    def _content(self, message: Message) -> str | list[dict[str, str]]:
        parts = message.parts
        media = {part.kind for part in parts if isinstance(part, MediaPart)}
        as_listed = message.listed and self._takes_parts and media <= self.writes
        texts = iter(self._guard.protect_texts([p for p in parts if isinstance(p, str)]))
        shown = [SLOTS[p.kind] if isinstance(p, MediaPart) else next(texts) for p in parts]
        if self._takes_strings and not media & self.writes and not as_listed:
            return "".join(shown)
        content: list[dict[str, str]] = []
        for part, text in zip(parts, shown, strict=True):
            if isinstance(part, MediaPart) and part.kind in self.writes:
                content.append({"type": part.kind, part.kind: part.kind})
            else:
                content.append({"type": "text", "text": text})
        # Templates look at the first part, even of a turn that says nothing.
        return content or [{"type": "text", "text": ""}]

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
            return self._render([{"role": "user", "content": content}], {}, prompt=False)
        except SampleError:
            return None

    def _found_prompt(self) -> str | None:
        """The generation prompt after a single turn of a user."""
        content = _PROBE if self._takes_strings else [{"type": "text", "text": _PROBE}]
        try:
            return self._prompt_after([Turn({"role": "user", "content": content}, 0)], {})
        except SampleError:
            return None

    def _traced_text(
        self, turns: Sequence[Turn], beside: Beside, *, prompt: bool
    ) -> TracedText | None:
        """The rendered text with the stretches of its turns; None when it cannot be traced."""
        if self._traced is None:
            return None
        return read_traced(self._render(turns, beside, prompt=prompt, template=self._traced))

    def _render(
        self,
        turns: Sequence[dict[str, object]],
        beside: Beside,
        *,
        prompt: bool,
        template: Template | None = None,
    ) -> str:
        try:
            return (template or self._template).render(
                {
                    **self._tokens,
                    "tools": None,
                    "documents": None,
                    **beside,
                    "messages": turns,
                    "add_generation_prompt": prompt,
                }
            )
        except MemoryError:
            raise  # this process is out of memory; the conversation is not to blame
        # A template is a program over the sample's values: it may raise any exception.
        except Exception as error:
            raise SampleError(
                f"chat template {quoted(self.name)} refuses the conversation ({len(turns)} turns): "
                f"{cut(error)}. Leave the sample out, or choose another template."
            ) from error


def _numbered(turn: Turn) -> Turn:
    """The turn with a number in the middle of each of its texts."""
    number = _ASSISTANTS_NUMBER if turn["role"] == "assistant" else _OTHERS_NUMBER

    def change(text: str) -> str:
        middle = len(text) // 2
        return f"{text[:middle]}{number}{text[middle:]}" if text else text

    content = turn["content"]
    if isinstance(content, str):
        return Turn({**turn, "content": change(content)}, place_of(turn))
    parts = cast("list[dict[str, str]]", content)
    parts = [{**part, "text": change(part["text"])} if "text" in part else part for part in parts]
    return Turn({**turn, "content": parts}, place_of(turn))


def _within(parts: Sequence[tuple[int, int]], start: int, end: int) -> list[tuple[int, int]]:
    """What characters `start` to `end` of some parts of a text, taken together, are in the text."""
    found, done = [], 0
    for first, last in parts:
        length = last - first
        low, high = max(start - done, 0), min(end - done, length)
        if low < high:
            found.append((first + low, first + high))
        done += length
    return found


def _common(texts: Sequence[str]) -> int:
    """The length of the beginning that texts have in common."""
    low, high = min(texts), max(texts)
    differ = (k for k, (a, b) in enumerate(zip(low, high, strict=False)) if a != b)
    return next(differ, len(low))


def _marked(text: str, learnt: Sequence[tuple[int, int]]) -> str:
    pieces, done = [], 0
    for start, end in learnt:
        pieces += [text[done:start], LOSS_OPEN, text[start:end], LOSS_CLOSE]
        done = end
    return "".join([*pieces, text[done:]])


def _end_of_turn(text: str, start: int, guard: Guard) -> int:
    """Where the turn that begins at `start` ends: white space after a control token is not part of
    it."""
    stripped = text.rstrip()
    return len(stripped) if len(stripped) > start and guard.ends(stripped) else len(text)
