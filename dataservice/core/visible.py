"""Foreign text, made safe for logs, terminals and memory: nothing in it acts, and it is bounded.

What is not printable (control characters, escape sequences, marks that turn the direction of
writing, line separators) is written as Python would: `\\x1b`, `\\u202e`. O(`most_chars`), whatever
the length of the text.
"""

import traceback

LINE_BREAKS = "\n\t"
TRACEBACK_CHARS = 16_384
TRACEBACK_END_CHARS = 4096
"""The end of a traceback that is kept when it is cut: it names the error."""


def visible(text: str, most_chars: int, *, keep: str = "", ending: int = 0) -> str:
    """The text with what is not printable written out, but for the characters of `keep`. A text
    that would be longer than `most_chars` is cut, and says so; its last `ending` characters stay
    too."""
    size = len(text)
    if size <= most_chars and len(whole := _plain(text, keep)) <= most_chars:
        return whole
    cut = f"... (cut, of {size:,} characters)"
    end = f" ...{_plain(text[-ending:], keep)[-ending:]}" if ending else ""
    begins = max(0, most_chars - len(cut) - len(end))
    return f"{_plain(text[:begins], keep)[:begins]}{cut}{end}"


def visible_traceback(error: BaseException) -> str:
    """An error's traceback and message, bounded."""
    text = "".join(traceback.format_exception(error)).rstrip()
    return visible(text, TRACEBACK_CHARS, keep=LINE_BREAKS, ending=TRACEBACK_END_CHARS)


def _plain(text: str, keep: str) -> str:
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() or char in keep else _written(char) for char in text)


def _written(char: str) -> str:
    return char.encode("unicode_escape").decode("ascii")
