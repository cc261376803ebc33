"""The journal in which each rank records what it trained: one line of JSON per step.

A line is one `write`, so after a kill it is whole or absent. It is written before the step is
committed, so every step that a checkpoint counts as trained is in the journal.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class PackPart:
    """A rank's part of one pack. `tokens` is a digest of its chunk of ids, labels and positions."""

    wave: int
    pack: int
    group: tuple[int, ...]
    cp_rank: int
    samples: tuple[int, ...]
    tokens: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One rank's part of one step; `items` has digests of frames and recordings that it encodes.

    `launch` counts the starts of the trainers; `attempt` is the service's number for the launch.
    """

    launch: int
    attempt: int
    rank: int
    world_size: int
    step: int
    plan: str
    parts: tuple[PackPart, ...]
    items: tuple[str, ...]


class JournalWriter:
    """Appends rows to one rank's file."""

    def __init__(self, folder: Path, *, launch: int, rank: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = (folder / f"launch-{launch:04d}-rank-{rank:02d}.jsonl").open("ab", buffering=0)

    def write(self, row: Row) -> None:
        """Append a row."""
        self._file.write(json.dumps(asdict(row)).encode() + b"\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_journals(folder: Path) -> list[Row]:
    """All whole rows of all ranks and launches."""
    return [_row(line) for line in _lines(folder)]


def steps_of_launch(folder: Path, launch: int) -> dict[int, int]:
    """Number of steps that each rank of a launch has written, by rank."""
    files = folder.glob(f"launch-{launch:04d}-rank-*.jsonl")
    return {int(path.stem[-2:]): path.read_bytes().count(b"\n") for path in files}


def _lines(folder: Path) -> Iterator[dict[str, Any]]:
    for path in sorted(folder.glob("launch-*.jsonl")):
        for line in path.read_text().splitlines():
            if line.endswith("}"):
                yield json.loads(line)


def _row(plain: dict[str, Any]) -> Row:
    parts = tuple(
        PackPart(
            **{**part, "group": tuple(part["group"]), "samples": tuple(part["samples"])},
        )
        for part in plain.pop("parts")
    )
    return Row(parts=parts, items=tuple(plain.pop("items")), **plain)
