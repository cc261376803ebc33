"""Write the reference of the job file and the service's config into the README.

The text comes from the models that validate the files, so that every key is documented and
none that does not exist. `python -m tools.reference` writes it; `--check` exits 1 when the
README is out of step.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from dataservice.spec import JobSpec, ServiceConfig

README = Path(__file__).resolve().parent.parent / "README.md"
SECTIONS: dict[str, type[BaseModel]] = {"job": JobSpec, "config": ServiceConfig}

Schema = dict[str, Any]


def reference(model: type[BaseModel]) -> str:
    """A table of the model's keys, then one of each part it is made of."""
    schema = model.model_json_schema()
    parts = schema.get("$defs", {})
    tables = [_table(schema)]
    for name in sorted(parts, key=list(_named(schema, parts, [])).index):
        tables.append(f"**{name}**: {_first_line(parts[name])}\n\n{_table(parts[name])}")
    return "\n\n".join(tables)


def _named(schema: Schema, parts: dict[str, Schema], seen: list[str]) -> Iterator[str]:
    """Parts in the order in which a reader meets them."""
    for value in schema.get("properties", {}).values():
        for name in _references(value):
            if name not in seen:
                seen.append(name)
                yield name
                yield from _named(parts[name], parts, seen)


def _references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if "$ref" in value:
            yield value["$ref"].rpartition("/")[2]
        for inner in value.values():
            yield from _references(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _references(inner)


def _table(schema: Schema) -> str:
    required = set(schema.get("required", ()))
    rows = ["| key | type | default | meaning |", "|---|---|---|---|"]
    for key, value in schema.get("properties", {}).items():
        default = "required" if key in required else _default(value)
        meaning = " ".join(value.get("description", "").split()).replace("|", "\\|")
        rows.append(f"| `{key}` | {_type(value)} | {default} | {meaning} |")
    return "\n".join(rows)


def _default(value: Schema) -> str:
    default = value.get("default")
    if default is None or isinstance(default, dict):
        return "–"
    return f"`{str(default).lower() if isinstance(default, bool) else default}`"


def _type(value: Schema) -> str:
    if "$ref" in value:
        return str(value["$ref"]).rpartition("/")[2]
    if "const" in value:
        return f"`{value['const']}`"
    if "enum" in value:
        return " \\| ".join(f"`{choice}`" for choice in value["enum"])
    for union in ("anyOf", "oneOf"):
        if union in value:
            kinds = [_type(kind) for kind in value[union] if kind.get("type") != "null"]
            return " \\| ".join(dict.fromkeys(kinds))
    if value.get("type") == "array" and "items" in value:
        return f"list of {_type(value['items'])}"
    return str(value.get("type", "any"))


def _first_line(schema: Schema) -> str:
    paragraph: str = schema.get("description", "").split("\n\n")[0]
    return " ".join(paragraph.split())


def rendered(readme: str) -> str:
    """The README with every reference section made anew."""
    for name, model in SECTIONS.items():
        start, end = f"<!-- {name} reference -->", f"<!-- end of {name} reference -->"
        before, _, rest = readme.partition(start)
        _, _, after = rest.partition(end)
        readme = f"{before}{start}\n\n{reference(model)}\n\n{end}{after}"
    return readme


def main() -> None:
    """Write, or with --check compare."""
    text = README.read_text()
    fresh = rendered(text)
    if "--check" in sys.argv[1:]:
        if fresh != text:
            raise SystemExit("README.md's reference is out of step. Run `make reference`.")
        return
    README.write_text(fresh)


if __name__ == "__main__":
    main()
