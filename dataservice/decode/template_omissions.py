"""The parts of a conversation that a rendered text may lack: what to leave out to find out."""

from collections.abc import Iterator, Mapping, Sequence

from dataservice.core.quoting import quoted

CALLS = ("tool_calls", "function_call")
# The names of a turn's thoughts. Templates read the first; transformers copies the others to it.
THOUGHTS = ("reasoning_content", "thinking", "reasoning")
_ROLES = ("system", "user", "assistant")  # roles that every template has

Beside = Mapping[str, object]
"""What a template is given besides the turns, by name: `tools`, and the record's own values."""
Omission = tuple[str, Sequence[dict[str, object]], Beside]


def omissions(
    text: str, turns: Sequence[dict[str, object]], beside: Beside, *, thoughts: bool
) -> Iterator[Omission]:
    """The parts that may be missing in a rendered text: each part's name, with the turns, and
    what is beside them, without it. Of `thoughts`, a template that reads them may leave out any."""
    for name, value in beside.items():  # a choice, such as enable_thinking, may be the usual one
        if value and not isinstance(value, bool | int | float):
            yield name, turns, {key: each for key, each in beside.items() if key != name}
    if thoughts and any(turn.get(THOUGHTS[0]) for turn in turns):
        silent = [{k: v for k, v in turn.items() if k not in THOUGHTS} for turn in turns]
        yield f"thoughts ({THOUGHTS[0]})", silent, beside
    at = 0
    for place, turn in enumerate(turns):
        for key in CALLS:
            if turn.get(key):
                without = {k: v for k, v in turn.items() if k != key}
                yield key, _with(turns, place, without), beside
        # Nearly every turn appears in the text unchanged, after the turns before it.
        said = _said(turn)
        found = _end_in(text, said, at)
        at = at if found is None else found
        if said and (found is None or turn["role"] not in _ROLES):
            without = {**turn, "content": ""}
            yield f"turns of role {quoted(turn['role'], 40)}", _with(turns, place, without), beside


def _with(
    turns: Sequence[dict[str, object]], place: int, turn: dict[str, object]
) -> Sequence[dict[str, object]]:
    """The turns with another one in a place."""
    return [*turns[:place], turn, *turns[place + 1 :]]


def _said(turn: Mapping[str, object]) -> object:
    """A turn's content without the thoughts that templates of reasoning models leave out later;
    nothing if that is all."""
    content = turn["content"]
    if isinstance(content, list):
        return content if any(part.get("text", part["type"]) for part in content) else ""
    text = str(content)
    is_thoughtful = turn["role"] == "assistant" and "</think>" in text
    return text.rpartition("</think>")[2].strip() if is_thoughtful else text


def _end_in(text: str, content: object, at: int) -> int | None:
    """The position in `text` where the texts of a turn end, searched in order from `at`; None when
    one is missing."""
    texts = [part.get("text", "") for part in content] if isinstance(content, list) else [content]
    for written in texts:
        shown = str(written).strip()
        found = text.find(shown, at)
        if found < 0:
            return None
        at = found + len(shown)
    return at
