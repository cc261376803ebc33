"""Write the reference of job file, service's config, a layout's files and commands:
`docs/reference.md`.

The text comes from the models that validate the files and from the commands themselves, so that
whatever exists is documented, and nothing else. `python -m tools.reference` writes it; `--check`
exits 1 when the page is out of step.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from typer.main import get_command

from dataservice.cli.connection import PANEL
from dataservice.cli.main import app
from dataservice.jobs.file_schema import schema_of
from dataservice.jobs.job_file import JobFile
from dataservice.jobs.layout_files import ClusterFile, ModelFile
from dataservice.operate.config import ServiceConfig

PAGE = Path(__file__).resolve().parent.parent / "docs" / "reference.md"

Schema = dict[str, Any]


def reference(model: type[BaseModel]) -> str:
    """A table of the model's keys, then one of each part it is made of."""
    schema = schema_of(model)
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


def commands() -> str:
    """A table of the commands and their options, and one of the options of a connection."""
    rows = ["| command | what it does | options |", "|---|---|---|"]
    shared: dict[str, str] = {}
    for words, command in _commands(get_command(app), ["dataservice"]):
        options = {_spelled(each): each for each in command.params}
        mine = [name for name, each in options.items() if _panel(each) != PANEL]
        shared |= {
            name: f"| {name} | {_variable(each)} | {each.help} |"
            for name, each in options.items()
            if _panel(each) == PANEL
        }
        connects = len(mine) < len(options)
        what = _first_line({"description": command.help.partition("Example:")[0]})
        shown = [*mine, "and those of a connection"] if connects else mine
        rows.append(f"| `{' '.join(words)}` | {what} | {', '.join(shown)} |")
    connection = ["| option | variable | meaning |", "|---|---|---|", *shared.values()]
    return "\n".join(rows) + "\n\n**Connection**\n\n" + "\n".join(connection)


def _commands(command: Any, words: list[str]) -> Iterator[tuple[list[str], Any]]:
    if not hasattr(command, "commands"):
        yield words, command
        return
    for name, inner in command.commands.items():
        yield from _commands(inner, [*words, name])


def _spelled(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return f"`{parameter.name.upper()}`"
    return "`" + "/".join([*parameter.opts, *parameter.secondary_opts]) + "`"


def _panel(parameter: Any) -> str | None:
    return getattr(parameter, "rich_help_panel", None)


def _variable(parameter: Any) -> str:
    return f"`{parameter.envvar}`" if parameter.envvar else "–"


def rendered(page: str) -> str:
    """The page with every section made anew."""
    sections = {
        "job": reference(JobFile),
        "config": reference(ServiceConfig),
        "model": reference(ModelFile),
        "cluster": reference(ClusterFile),
        "commands": commands(),
    }
    for name, text in sections.items():
        start, end = f"<!-- {name} reference -->", f"<!-- end of {name} reference -->"
        before, _, rest = page.partition(start)
        _, _, after = rest.partition(end)
        page = f"{before}{start}\n\n{text}\n\n{end}{after}"
    return page


def main() -> None:
    """Write, or with --check compare."""
    text = PAGE.read_text()
    fresh = rendered(text)
    if "--check" in sys.argv[1:]:
        if fresh != text:
            raise SystemExit("docs/reference.md is out of step. Run `make reference`.")
        return
    PAGE.write_text(fresh)


if __name__ == "__main__":
    main()
