"""Reads YAML files that users write.

Bounds their size, and says of a mistake in which line it is and what to write instead.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any, Self, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from dataservice.core.errors import SpecError
from dataservice.core.named_files import read_named
from dataservice.core.quoting import cut, quoted
from dataservice.jobs.expected import Place
from dataservice.jobs.mistakes import spec_error

Model = TypeVar("Model", bound=BaseModel)

MOST_PARTS = 100_000
_LINE_CHARACTERS = 100  # of a line that is shown
_NUMBER = "tag:yaml.org,2002:int"
_LONGEST_NUMBER = 100  # characters; 64 bits in binary, with room for underscores

# What a newcomer can do about an error of YAML's own, by a part of its words.
_REMEDIES = {
    "'\\t'": "Indent with spaces; YAML takes no tabs.",
    "cannot start any token": "Put quotes around a value that begins with such a character.",
    "while scanning an alias": "Put quotes around a value that begins with *.",
    "undefined alias": "Put quotes around a value that begins with *.",
    "while scanning an anchor": "Put quotes around a value that begins with &.",
    "mapping values are not allowed": "Put quotes around a value that holds a colon with a space "
    "behind it; and put a space behind the colon of each key, also in the line above.",
    "could not find expected ':'": "Put a colon and a space behind the key.",
    "while scanning a quoted scalar": "Close the quote.",
    "while parsing a flow": "Close the bracket, and put commas between its values.",
    "<block end>": "Indent it as far as the lines that it belongs with; and look for a quote above "
    "it that is not closed.",
}


class Strict(BaseModel):
    """A mapping in such a file; unknown keys are errors, and so are numbers that are not finite."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class Written:
    """What a file holds, and where: `node` is the file as YAML parsed it, if there is one.
    `changed_keys` have been given elsewhere since, and so have no line."""

    plain: dict[str, Any]
    node: yaml.Node | None = None
    changed_keys: frozenset[str] = field(default=frozenset())

    def changed(self, given: Mapping[str, Any]) -> Self:
        """The same file under values from elsewhere, such as flags."""
        return replace(self, plain={**self.plain, **given}, changed_keys=frozenset(given))

    def with_plain(self, plain: dict[str, Any]) -> Self:
        """The same file, some of its values replaced by what they stand for."""
        return replace(self, plain=plain)

    def line(self, place: Place) -> int | None:
        """The line of a place, from 1 on; for a key that is missing, that of what it is missing
        from, if this is not the whole file."""
        if not place or place[0] in self.changed_keys:
            return None
        here, line = self.node, None
        for part in place:
            found = _below(here, part)
            if found is None:
                break
            line, here = found
        return line


def read_text(path: Path, what: str) -> str:
    """The text of a file that the user named. Raises SpecError where it cannot be read."""
    try:
        return read_named(path).decode("utf-8")
    except OSError as error:
        raise SpecError(
            f"the {what} {path} cannot be read: {error.strerror}. Check the path."
        ) from error
    except UnicodeDecodeError as error:
        raise SpecError(
            f"the {what} {path} is not text in UTF-8 ({error.reason} at byte {error.start}). "
            "Give a YAML file."
        ) from error


def written(text: str, what: str) -> Written:
    """The mapping that a file holds. Raises SpecError where it holds none, or a key twice."""
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        parts = _parts(node, {}) if node is not None else 0
        if parts > MOST_PARTS:
            raise SpecError(
                f"the {what} has {parts:,} values once its aliases are written out; at most "
                f"{MOST_PARTS:,} are read. Use fewer aliases."
            )
        twice = next(_twice(node, set()), None) if node is not None else None
        plain = loader.construct_document(node) if node is not None else None
    except yaml.YAMLError as error:
        raise SpecError(f"the {what} is not YAML: {_syntax(error, text)}") from error
    except RecursionError as error:
        raise SpecError(f"the {what} cannot be read: it is nested too deeply. Mend it.") from error
    if twice is not None:
        raise SpecError(f"the {what} has {twice}")
    if plain is not None and not isinstance(plain, dict):
        kind = "a list" if isinstance(plain, list) else f"only {quoted(plain)}"
        raise SpecError(
            f"the {what} holds {kind}; it must be a mapping of keys to values, written "
            "`key: value`."
        )
    return Written(plain=plain or {}, node=node)


def validated(
    model: type[Model],
    file: Written,
    what: str,
    remedy: str = "docs/reference.md lists every key with its meaning.",
) -> Model:
    """What the file says, by its model. Raises SpecError that tells all mistakes at once, and last
    the `remedy`."""
    try:
        return model.model_validate(file.plain)
    except ValidationError as error:
        raise spec_error(model, file.plain, error, what, file.line, remedy) from error


class _Loader(yaml.SafeLoader):
    """Refuses values that cannot be made of their text, with their line, and numbers that no key
    has use for: Python itself reads those of up to 4,300 digits, and others for minutes."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> object:
        """The value of a node. Raises ConstructorError."""
        is_long = node.tag == _NUMBER and len(node.value) > _LONGEST_NUMBER
        try:
            value = None if is_long else super().construct_object(node, deep)
        except (ValueError, LookupError, AttributeError) as error:
            kind = node.tag.rpartition(":")[2]
            problem = f"{quoted(node.value, 40)} is no {kind}; quote it if it is a text"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark) from error
        if is_long or (isinstance(value, int) and value.bit_length() > 64):
            problem = f"a whole number of {len(node.value):,} characters, above 64 bits"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
        return value


def _parts(node: yaml.Node, known: dict[int, int]) -> int:
    """Number of values with every alias expanded, also where `<<` merges it: a few lines of YAML
    may expand to more than fits into memory. Raises RecursionError where a value is part of
    itself."""
    if isinstance(node, yaml.ScalarNode):
        return 1
    if id(node) not in known:
        pairs = isinstance(node, yaml.MappingNode)
        inner = chain.from_iterable(node.value) if pairs else node.value
        known[id(node)] = 1 + sum(_parts(each, known) for each in inner)
    return known[id(node)]


def _twice(node: yaml.Node, passed: set[int]) -> Iterator[str]:
    """Keys that a mapping has twice: YAML would take the last, without a word. Each node once."""
    if id(node) in passed or isinstance(node, yaml.ScalarNode):
        return
    passed.add(id(node))
    if isinstance(node, yaml.SequenceNode):
        for each in node.value:
            yield from _twice(each, passed)
        return
    lines: dict[tuple[str, str], int] = {}
    for key, value in node.value:
        if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
            line = key.start_mark.line + 1
            if (first := lines.get((key.tag, key.value))) is not None:
                yield (
                    f"the key {quoted(key.value)} twice, in lines {first} and {line}. Keep one of "
                    "them."
                )
            lines[key.tag, key.value] = line
        yield from _twice(value, passed)


def _below(node: yaml.Node | None, part: str | int) -> tuple[int, yaml.Node] | None:
    """The line and the node of a key's value, or of an entry of a list."""
    if isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
        entry = node.value[part]
        return entry.start_mark.line + 1, entry
    if isinstance(node, yaml.MappingNode):
        # From behind: keys that `<<` merges stand in front of the mapping's own.
        for key, value in reversed(node.value):
            if isinstance(key, yaml.ScalarNode) and key.value == str(part):
                return key.start_mark.line + 1, value
    return None


def _syntax(error: yaml.YAMLError, text: str) -> str:
    """What YAML could not read, where, the line itself, and what to do about it."""
    problem = str(getattr(error, "problem", None) or error)
    mark = getattr(error, "problem_mark", None)
    if mark is None:
        return f"{cut(problem)}. Mend it."
    said = f"{getattr(error, 'context', None) or ''} {problem}"
    remedy = next((text for part, text in _REMEDIES.items() if part in said), "Mend that line.")
    begins = getattr(error, "context_mark", None)
    since = ""
    if begins is not None and begins.line != mark.line:
        since = f" ({error.context}, which begins in line {begins.line + 1})"  # type: ignore[attr-defined]
    lines = text.splitlines()
    shown = lines[mark.line].strip() if mark.line < len(lines) else ""
    quote = f"\n  {cut(shown, _LINE_CHARACTERS)}" if shown else ""
    return f"line {mark.line + 1}, column {mark.column + 1}: {problem}{since}. {remedy}{quote}"
