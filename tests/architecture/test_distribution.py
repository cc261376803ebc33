"""Whoever follows an install line of ours gets our package, or one that we depend on."""

import re
import subprocess
import sys
import tomllib
from importlib.metadata import metadata
from itertools import chain
from pathlib import Path

import pytest

from dataservice.core import distribution

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
TOOLS = {"pip", "setuptools", "wheel", "build", "tomli"}
INSTALL = re.compile(r"\bpip3? install\s+(?P<rest>[^\n`#]+(?:\\\n[^\n`#]+)*)")
NAME = re.compile(r"[A-Za-z][A-Za-z0-9._-]*")
TAKES_A_VALUE = {"-c", "-r", "-e", "--constraint", "--requirement", "--target", "--index-url"}


def texts() -> list[Path]:
    """Every text that is tracked, or would be."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.split()  # fmt: skip
    kinds = {".md", ".py", ".toml", ".yaml", ".yml", ".Dockerfile", ".sh", ""}
    paths = [ROOT / name for name in listed if Path(name).suffix in kinds]
    return [path for path in paths if path.is_file() and path != Path(__file__).resolve()]


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def dependencies() -> set[str]:
    lines = chain(PROJECT["dependencies"], *PROJECT["optional-dependencies"].values())
    return {normal(NAME.match(line)[0]) for line in lines}


def asked_for(text: str) -> list[str]:
    """The distributions that install lines take from an index, by name."""
    names = []
    for found in INSTALL.finditer(text):
        command = re.split(r"&&|;|\|", found["rest"].replace("\\\n", " "))[0]
        words = [word.strip("'\",().") if word != "." else word for word in command.split()]
        value = False
        for word in words:
            value, skip = word in TAKES_A_VALUE, value
            if skip or not word or word[0] in "-.$/{<" or "/" in word or ".whl" in word:
                continue
            match = NAME.match(word)
            if match is None or word.isupper():  # a placeholder, such as WHEEL
                continue
            names.append(normal(match[0]))
            if not re.fullmatch(r"[\w.-]+(\[[\w,]+\])?([=<>~!]=?[\w.*]+)?", word):
                break
    return names


@pytest.mark.parametrize(
    ("line", "names"),
    [
        ("pip install dataservice", ["dataservice"]),
        ("`pip install 'dataservice[s3]'` or", ["dataservice"]),
        ("python -m pip install --quiet -c constraints.txt -e '.[service,dev]'", []),
        ("RUN /x/bin/pip install --no-deps . \\\n && rm -rf x", []),
        ("pip install -r requirements.txt setuptools", ["setuptools"]),
        ("pip install torch==2.13.0 'dist/x-1-py3-none-any.whl[service]'", ["torch"]),
    ],
)
def test_what_an_install_line_asks_for_is_understood(line, names):
    assert asked_for(line) == names


def test_no_text_installs_a_stranger():
    ours = dependencies() | TOOLS
    read = {path: asked_for(path.read_text(encoding="utf-8", errors="ignore")) for path in texts()}
    strangers = {
        str(path.relative_to(ROOT)): wrong
        for path, names in read.items()
        if (wrong := sorted(set(names) - ours))
    }
    assert not strangers  # our own name is none of them either: it is not published
    assert sum(map(len, read.values())) >= 3, "install lines are there, and were read"


def test_no_text_names_the_strangers_extras():
    named = re.compile(r"(?<![\w./-])dataservice\[\w+")
    assert not [path for path in texts() if named.search(path.read_text(errors="ignore"))]


def test_a_python_that_only_the_client_runs_on_is_told_so_by_the_service():
    code = "import sys; sys.version_info = (3, 10, 13); import dataservice"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    assert "the service needs Python 3.11 or later; this is 3.10." in done.stderr
    assert PROJECT["requires-python"] == ">=3.10"


def test_what_is_installed_has_the_name_that_messages_give():
    assert PROJECT["name"] == distribution.NAME == metadata(distribution.NAME)["Name"]
    for extra in ("s3", "gs", "az", "traces"):
        assert extra in PROJECT["optional-dependencies"]
