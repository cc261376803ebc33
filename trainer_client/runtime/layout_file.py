"""Reads the file that `dataservice layout` writes, as plain data and without the service.

    layout.yaml    format, job: {topology, plan: {cost}}, stages: [{stage, layers, full, selective}]

The file is YAML, for which the client brings no reader: PyYAML is used where it is installed, as it
is wherever transformers is. The JSON that `dataservice layout --json` prints is read without it.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer_client.runtime.faults import LayoutError

FORMAT = 1
_AGAIN = "write it again with `dataservice layout` of this release"


def read_layout_file(path: str | Path) -> Mapping[str, Any]:
    """The file's mapping, whose format is known here. Raises LayoutError."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise LayoutError(f"the layout file {path} cannot be read: {error}") from error
    plain = _parsed(text, path)
    found = plain.get("format") if isinstance(plain, dict) else None
    if found != FORMAT:
        raise LayoutError(
            f"the layout file {path} has format {found!r}, and this client reads {FORMAT}; {_AGAIN}"
        )
    return checked_layout(plain, f"the layout file {path}")


def checked_layout(plain: Mapping[str, Any], what: str) -> Mapping[str, Any]:
    """The mapping, if it has all that a trainer takes from it. Raises LayoutError."""
    job, chunks = plain.get("job"), plain.get("stages")
    parts = ("topology", "plan")
    whole = isinstance(job, dict) and all(isinstance(job.get(part), dict) for part in parts)
    if not (whole and isinstance(chunks, list) and all(_is_chunk(chunk) for chunk in chunks)):
        raise LayoutError(
            f"{what} lacks `job` with `topology` and `plan`, or `stages` with `layers`; {_AGAIN}"
        )
    return plain


def _is_chunk(chunk: object) -> bool:
    if not isinstance(chunk, dict) or not isinstance(chunk.get("stage"), int):
        return False
    lists = [chunk.get("layers"), chunk.get("full", []), chunk.get("selective", [])]
    return all(isinstance(names, list) and all(map(_is_text, names)) for names in lists)


def _is_text(name: object) -> bool:
    return isinstance(name, str)


def _parsed(text: str, path: str | Path) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        pass  # then it is the YAML that the command writes
    try:
        import yaml
    except ImportError as error:
        raise LayoutError(
            f"the layout file {path} is YAML, and PyYAML, which reads it, is not installed here: "
            "pip install pyyaml; or give the JSON that `dataservice layout --json` prints"
        ) from error
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise LayoutError(f"the layout file {path} is neither JSON nor YAML: {error}") from error
