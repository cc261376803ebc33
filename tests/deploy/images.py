"""The Dockerfiles, as far as they can be judged without an engine that builds them."""

import fnmatch
import io
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from dockerfile_parse import DockerfileParser

ROOT = Path(__file__).resolve().parents[2]
PINNED = re.compile(r"^[\w./-]+(:\d+\.\d+\.\d+[\w.-]*|@sha256:[0-9a-f]{64})$")
SECRET = re.compile(r"(PASSWORD|TOKEN|SECRET|_KEY)=", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Dockerfile:
    """Its instructions in order, comments left out."""

    text: str

    @property
    def steps(self) -> list[tuple[str, str]]:
        parser = DockerfileParser(fileobj=io.BytesIO(self.text.encode()))
        return [
            (step["instruction"], step["value"])
            for step in parser.structure
            if step["instruction"] != "COMMENT"
        ]

    def values(self, instruction: str) -> list[str]:
        return [value for name, value in self.steps if name == instruction]

    @property
    def last_stage(self) -> "list[tuple[str, str]]":
        steps = self.steps
        start = max(k for k, (name, _) in enumerate(steps) if name == "FROM")
        return steps[start:]


class Ignored:
    """What .dockerignore keeps out of a build: the last pattern that matches a path or one of
    the folders above it decides."""

    def __init__(self, text: str) -> None:
        lines = [line.strip() for line in text.splitlines()]
        self._patterns = [line for line in lines if line and not line.startswith("#")]

    def holds(self, path: str) -> bool:
        parts = PurePosixPath(path).parts
        above = ["/".join(parts[:k]) for k in range(1, len(parts) + 1)]
        ignored = False
        for line in self._patterns:
            pattern = line.removeprefix("!").strip("/")
            if any(_matches(place, pattern) for place in above):
                ignored = not line.startswith("!")
        return ignored


def _matches(path: str, pattern: str) -> bool:
    if pattern.startswith("**/"):
        pattern = pattern.removeprefix("**/")
        return any(
            _matches("/".join(PurePosixPath(path).parts[k:]), pattern)
            for k in range(len(PurePosixPath(path).parts))
        )
    one, other = PurePosixPath(path).parts, PurePosixPath(pattern).parts
    return len(one) == len(other) and all(map(fnmatch.fnmatchcase, one, other))


def mistakes(file: Dockerfile, ignored: Ignored, root: Path = ROOT) -> Iterator[str]:
    """What would fail or should not be."""
    defaults = dict(value.split("=", 1) for value in file.values("ARG") if "=" in value)
    stages = {value.rpartition(" AS ")[2] for value in file.values("FROM") if " AS " in value}
    for value in file.values("FROM"):
        image = re.sub(r"\$\{(\w+)\}", lambda m: defaults.get(m[1], ""), value.partition(" AS ")[0])
        if not PINNED.match(image):
            yield f"FROM {image} is not pinned to a version"
    for value in file.values("ADD"):
        yield f"ADD {value}: COPY says what it does"
    for value in file.values("COPY"):
        yield from _copies(value, stages, ignored, root)
    for value in file.values("RUN"):
        if (
            "pip install" in value
            and "--no-deps" not in value
            and "-c constraints.txt" not in value
        ):
            yield f"RUN {value[:60]}: versions are not those of constraints.txt"
        if "--mount" in value or "<<" in value:
            yield f"RUN {value[:60]}: needs BuildKit"
        if re.search(r"\b(sudo|curl|wget)\b", value):
            yield f"RUN {value[:60]}: fetches what no lock names"
    for name in ("ENV", "ARG"):
        for value in file.values(name):
            if SECRET.search(value):
                yield f"{name} {value}: a secret would stay in the image"
    users = [value for name, value in file.last_stage if name == "USER"]
    if not users or not re.fullmatch(r"[1-9]\d*(:\d+)?", users[-1]):
        yield f"USER {users[-1:]} is not a number above 0"
    if not any("org.opencontainers.image.version" in value for value in file.values("LABEL")):
        yield "there is no label with the version"


def _copies(value: str, stages: set[str], ignored: Ignored, root: Path) -> Iterator[str]:
    words = shlex.split(value)
    if words[0].startswith("--from="):
        if words[0].removeprefix("--from=") not in stages:
            yield f"COPY {value}: there is no such stage"
        return
    for source in words[:-1]:
        name = source.removeprefix("./")
        if not (root / name).exists():
            yield f"COPY {name}: it does not exist"
        elif ignored.holds(name):
            yield f"COPY {name}: .dockerignore keeps it out"
