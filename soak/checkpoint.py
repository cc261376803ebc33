"""Checkpoints of the audited trainers: one file per rank, and all files or none.

    checkpoints/step-00000008-of-3/rank-0.json, rank-1.json, rank-2.json

A rename makes each file appear whole; a checkpoint exists when every rank's file does. So after a
kill during saving, the checkpoint before is the newest.
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path

State = dict[str, str | int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """A complete checkpoint: training continues with `step`."""

    step: int
    state: State


def save(folder: Path, *, rank: int, world_size: int, state: State) -> None:
    """Write one rank's file."""
    place = folder / f"step-{int(state['step']):08d}-of-{world_size}"
    place.mkdir(parents=True, exist_ok=True)
    unfinished = place / f"rank-{rank}.tmp"
    unfinished.write_text(json.dumps(state))
    os.replace(unfinished, place / f"rank-{rank}.json")


def newest(folder: Path) -> Checkpoint | None:
    """The complete checkpoint of the highest step."""
    found = [each for place in folder.glob("step-*") if (each := _complete(place)) is not None]
    return max(found, key=lambda each: each.step, default=None)


def _complete(place: Path) -> Checkpoint | None:
    world_size = int(place.name.rpartition("-")[2])
    files = sorted(place.glob("rank-*.json"))
    if len(files) < world_size:
        return None
    states = [json.loads(path.read_text()) for path in files]
    assert all(state == states[0] for state in states), f"ranks disagree in {place}: {states}"
    return Checkpoint(step=int(states[0]["step"]), state=states[0])
