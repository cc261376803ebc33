"""What may stand at a place of a YAML file, in words.

It is read from the JSON schema that pydantic makes of the file's model, so that names, bounds and
keys are never listed a second time.
"""

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dataservice.core.quoting import quoted

Schema = Mapping[str, Any]
Place = tuple[str | int, ...]

SOME_NUMBER = 8192  # the example of a whole number that has neither a default nor a hint
_AMOUNT = re.compile(r"\s*(\d[\d,_ ]*(?:\.\d+)?)\s*([kmg]?)", re.IGNORECASE)
_NAME = re.compile(r"\^\[A-Za-z0-9\]\[A-Za-z0-9\._-\]\{0,(\d+)\}\$")  # a pattern of names
PORTS = r"^\d{1,5}-\d{1,5}$"
_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string"}


class Expected:
    """The alternatives that a model allows at one place of a file. `value` is what stands there:
    where its `kind` names one alternative, the others do not count."""

    def __init__(self, schema: Schema, definitions: Schema, value: object = None) -> None:
        self._definitions, self._value = definitions, value
        self.description = str(schema.get("description", "")).replace("\n", " ")
        self._default = schema.get("default")
        self._forms = list(self._alternatives(schema, value))

    @staticmethod
    def of_file(schema: Schema, value: object) -> "Expected":
        """Of the whole file."""
        return Expected(schema, schema.get("$defs", {}), value)

    def inside(self, part: str | int, value: object) -> "Expected":
        """Of what stands under a key, or at an index of a list."""
        for form in self._forms:
            inner = form.get("properties", {}).get(part)
            if inner is None and isinstance(part, int):
                inner = form.get("items")
            elif inner is None:
                inner = form.get("additionalProperties") or _only(form.get("patternProperties"))
            if isinstance(inner, Mapping):
                return Expected(inner, self._definitions, value)
        return Expected({}, self._definitions, value)

    @property
    def keys(self) -> list[str]:
        """The keys that a mapping here may have, in the order of the model."""
        return list(
            dict.fromkeys(key for form in self._forms for key in form.get("properties", ()))
        )

    def places_of(self, key: str) -> set[str]:
        """Where else, below this place, a key of that name may stand: dotted, lists as `[]`. Both
        the walk and the answer are bounded by the model, whatever the file holds."""
        return set(_places(self, key, "", frozenset()))

    def wanted(self, name: str, seen: object) -> str:
        """What to write instead of `seen`, for the key `name`."""
        names = self._names()
        if names and not any(form.get("type") == "array" for form in self._forms):
            return choice(names, seen)
        said = dict.fromkeys(self._said(form, name, seen) for form in self._forms)
        said.pop("", None)
        return f"give {' or '.join(said)}" if said else "see the reference"

    def _alternatives(self, schema: Schema, value: object) -> Iterator[Schema]:
        if "$ref" in schema:
            yield from self._alternatives(_resolved(schema, self._definitions), value)
        elif "discriminator" in schema:
            tag = schema["discriminator"]
            named = value.get(tag["propertyName"]) if isinstance(value, Mapping) else None
            if isinstance(named, str) and named in tag["mapping"]:
                yield from self._alternatives({"$ref": tag["mapping"][named]}, value)
            else:
                kinds = {tag["propertyName"]: {"enum": list(tag["mapping"])}}
                yield {"type": "object", "properties": kinds, "required": list(kinds)}
        elif "anyOf" in schema or "oneOf" in schema:
            for each in (*schema.get("anyOf", ()), *schema.get("oneOf", ())):
                yield from self._alternatives(each, value)
        elif schema.get("type") != "null":
            yield schema

    def _names(self) -> list[str]:
        """The words to choose from."""
        found = ((*form.get("enum", ()), form.get("const")) for form in self._forms)
        return list(dict.fromkeys(str(name) for each in found for name in each if name is not None))

    def _said(self, form: Schema, name: str, seen: object) -> str:
        kind = form.get("type")
        if "enum" in form or "const" in form:
            return f"one of {listed([str(each) for each in form.get('enum', [form.get('const')])])}"
        if kind in ("integer", "number"):
            what = "a whole number" if kind == "integer" else "a number"
            example = self._number(seen, whole=kind == "integer", least=form.get("minimum", 0))
            return f"{what}{_bounds(form)}, such as {example}"
        if kind == "string":
            return _text(form, name, seen)
        if kind == "array":
            return self._list(form, name, seen)
        if kind == "object":
            return self._mapping(form, name, seen)
        return {"boolean": "true or false"}.get(str(kind), "")

    def _number(self, seen: object, *, whole: bool, least: float) -> str:
        """An example: what was meant by `8k` or `8,192`, else the default."""
        found = _AMOUNT.match(seen) if isinstance(seen, str) else None
        if found is not None:
            amount = float(re.sub(r"[,_ ]", "", found[1])) * 1024 ** " kmg".index(
                found[2].lower() or " "
            )
            if amount >= least and amount < 1e15:
                return str(round(amount)) if whole else f"{amount:g}"
        default = self._default
        if isinstance(default, int | float) and not isinstance(default, bool):
            return f"{default}"
        return str(max(SOME_NUMBER, round(least))) if whole else "0.5"

    def _list(self, form: Schema, name: str, seen: object) -> str:
        entry = Expected(form.get("items", {}), self._definitions)
        if entry.keys:
            keys = listed(entry._required() or entry.keys, "and")
            return f"a list: entries that each begin with `- ` and have the keys {keys}"
        if isinstance(seen, str | int | float):
            return f"a list, such as `{name}: [{_short(seen)}]`"
        return "a list"

    def _mapping(self, form: Schema, name: str, seen: object) -> str:
        keys, required = list(form.get("properties", ())), list(form.get("required", ()))
        if not keys:
            return "a mapping of names to values"
        if len(required) <= 1:
            for key in required or keys:
                inner = self.inside(key, None)
                if inner._takes(seen):
                    value = nearest(str(seen), inner._names()) or _short(seen)
                    return f"a mapping: `{name}: {{{key}: {value}}}`"
        if not required:
            return f"a mapping with keys such as {listed(keys[:4], 'and')}"
        return f"a mapping with the key{'s' * (len(required) > 1)} {listed(required, 'and')}"

    def _required(self) -> list[str]:
        return [key for form in self._forms for key in form.get("required", ())]

    def _takes(self, seen: object) -> bool:
        """Whether a value of this kind may stand here; of names, one that is at least near."""
        if names := self._names():
            return nearest(str(seen), names) is not None
        kind = _TYPES.get(type(seen))
        kinds = {form.get("type") for form in self._forms}
        return kind in kinds or (kind == "integer" and "number" in kinds)


def choice(names: Sequence[str], seen: object) -> str:
    """The names to choose from, and the one that was perhaps meant."""
    near = nearest(str(seen), names)
    one = f"give {names[0]}" if len(names) == 1 else f"choose one of {listed(names)}"
    return one + (f"; did you mean {near}?" if near and len(names) > 1 else "")


def nearest(seen: str, names: Sequence[str]) -> str | None:
    """The name that was perhaps meant, as qwen2_5_vl by `Qwen/Qwen2.5-VL-7B`; or None."""
    plain = re.sub(r"[^a-z0-9]+", "_", seen[:200].lower())
    if misspelt := difflib.get_close_matches(plain, names, n=1, cutoff=0.9):
        return misspelt[0]
    if held := [name for name in names if name in plain]:
        return max(held, key=len)
    return next(iter(difflib.get_close_matches(plain, names, n=1)), None)


def listed(names: Sequence[str], last: str = "or") -> str:
    """`a, b or c`."""
    return f" {last} ".join(part for part in (", ".join(names[:-1]), names[-1]) if part)


def seen_words(seen: object) -> str:
    """What stands in the file, in words."""
    if seen is None:
        return "empty"
    if isinstance(seen, bool):
        return str(seen).lower()
    if isinstance(seen, Mapping):
        return "a mapping" if seen else "an empty mapping"
    if isinstance(seen, list | tuple):
        return "a list" if seen else "an empty list"
    return quoted(seen if isinstance(seen, str | int | float) else str(seen))


def _resolved(schema: Schema, definitions: Schema) -> Schema:
    found: Schema = definitions[str(schema["$ref"]).rpartition("/")[2]]
    return found


def _only(patterns: Schema | None) -> Any:
    return next(iter(patterns.values())) if patterns else None


def _text(form: Schema, name: str, seen: object) -> str:
    if form.get("format") in ("date", "date-time"):
        return "a date, such as 2026-01-31"
    if isinstance(seen, str):  # it is text, and yet refused: it has not the form
        return form_words(str(form.get("pattern", "")))
    if isinstance(seen, bool | int | float):
        return f'text: `{name}: "{seen_words(seen)}"`'
    return "text, as one value"


def form_words(pattern: str) -> str:
    """What a text of this pattern looks like."""
    if name := _NAME.fullmatch(pattern):
        return (
            f"1 to {int(name[1]) + 1} letters, digits, dots, dashes and underscores, of which the "
            "first is a letter or a digit"
        )
    return "a range of ports, such as 20100-20115" if pattern == PORTS else f"text like {pattern}"


def _bounds(form: Schema) -> str:
    low, high = form.get("minimum"), form.get("maximum")
    above = form.get("exclusiveMinimum")
    if low is not None and high is not None:
        return f" from {low} to {high}"
    least = f" of at least {low}" if low is not None else f" above {above}"
    least = "" if low is None and above is None else least
    return least + (f"{' and' * bool(least)} of at most {high}" if high is not None else "")


def _short(seen: object) -> str:
    return seen[:60] if isinstance(seen, str) else str(seen)[:60]


def _places(here: Expected, key: str, at: str, passed: frozenset[int]) -> Iterator[str]:
    for form in here._forms:
        if id(form) in passed:
            continue
        for name, inner in form.get("properties", {}).items():
            if name == key:
                yield at
            value = here._value.get(name) if isinstance(here._value, Mapping) else None
            below = Expected(inner, here._definitions, value)
            yield from _places(below, key, f"{at}.{name}".lstrip("."), passed | {id(form)})
        if isinstance(form.get("items"), Mapping):
            entry = Expected(form["items"], here._definitions)
            yield from _places(entry, key, f"{at}[]", passed | {id(form)})
