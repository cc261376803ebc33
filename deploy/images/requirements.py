"""Print what an image installs: the project's dependencies, of these extras too.

python requirements.py service s3 --without torch
"""

import argparse
import re
from pathlib import Path

try:
    import tomllib
except ModuleNotFoundError:  # a trainer's image with Python 3.10
    import tomli as tomllib

NAME = re.compile(r"[A-Za-z0-9._-]+")


def requirements(extras: list[str], without: list[str]) -> list[str]:
    """The lines of pyproject.toml beside the working folder. Raises KeyError for an unknown
    extra, ValueError where a package to leave out is not there."""
    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    wanted: list[str] = list(project["dependencies"])
    for extra in extras:
        wanted += project["optional-dependencies"][extra]
    names = [NAME.match(line)[0] for line in wanted]  # type: ignore[index]
    if missing := sorted(set(without) - set(names)):
        raise ValueError(f"cannot leave out {missing}: no dependency has that name")
    return [line for line, name in zip(wanted, names, strict=True) if name not in without]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("extras", nargs="*")
    parser.add_argument("--without", nargs="*", default=[])
    options = parser.parse_args()
    print("\n".join(requirements(options.extras, options.without)))
