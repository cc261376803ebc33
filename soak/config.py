"""The service's config for soaks and fault tests: the held processor, and tokens of teams."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from dataservice.operate.tokens_file import make_token
from soak.vision import IMPORT_PATH, NAME


def write_config(
    path: Path, *, teams: Sequence[str] = (), **settings: str | float
) -> dict[str, str]:
    """Write a config for `serve --config`; returns the token of each team, if there are teams."""
    config: dict[str, Any] = {"custom_processors": {NAME: IMPORT_PATH}, **settings}
    tokens, entries = {}, []
    for team in teams:
        tokens[team], record = make_token(team=team, role="team", name=f"{team}-trainers")
        entries.append(record.model_dump(mode="json", exclude_none=True))
    if entries:
        tokens_file = path.with_suffix(".tokens.yaml")
        tokens_file.write_text(yaml.safe_dump(entries))
        config["tokens_file"] = str(tokens_file)
        config.setdefault("allowed_roots", "any")
    path.write_text(yaml.safe_dump(config))
    return tokens
