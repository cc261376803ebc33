"""A schedule as a list of actions: columns in memory, one line an action as text.

The text is for whoever runs it, and asks for nothing but splitting lines at spaces:

    bubbles 1
    device kind encoder microbatch stage layer kernel start_s end_s
    0 gather - - - - - 0.0 0.167
    0 forward 0 0 0 3 1 0.0021 0.0024
    0 backward_comm - 5 96 96 2 0.4 0.4003

The first line is the format's version, the second names the columns. Actions come by device, then
by start. `encoder` is the encoder's number, or `-` for the backbone. `stage` is the encoder's
pipeline stage, or the backbone's model chunk. `forward` and `backward` are kernels that compute,
`forward_comm` and `backward_comm` those that communicate between tensor-parallel ranks; `gather`
and `scatter` are the collectives between data-parallel replicas and belong to no microbatch.
Times are seconds since the step began, written so that reading them gives the same number.

To run it, a device takes its actions in the order of the list, those that compute in one queue and
those that communicate in another. A kernel waits for the one before it of the same encoder (or the
backbone), microbatch and direction, on the same device or, at the first kernel of a stage, on the
device of the stage before it: features and gradients are sent there. The backbone's stage 0 waits
for all encoders of its microbatch, the last stage of each encoder for the gradients of stage 0.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dataservice.core.errors import PlanningError

KINDS = ("gather", "forward", "forward_comm", "backward", "backward_comm", "scatter")
VERSION = "bubbles 1"
COLUMNS = (
    "device",
    "kind",
    "encoder",
    "microbatch",
    "stage",
    "layer",
    "kernel",
    "start_s",
    "end_s",
)
# Columns in which -1, no such thing, is written as a dash.
_OPTIONAL = ("encoder", "microbatch", "stage", "layer", "kernel")


@dataclass(frozen=True, kw_only=True, slots=True)
class Actions:
    """Columns of one length: `kind` int64 indexes KINDS; the other whole ones are int64 with -1 for
    none; `start_s` and `end_s` float64."""

    device: NDArray[np.int64]
    kind: NDArray[np.int64]
    encoder: NDArray[np.int64]
    microbatch: NDArray[np.int64]
    stage: NDArray[np.int64]
    layer: NDArray[np.int64]
    kernel: NDArray[np.int64]
    start_s: NDArray[np.float64]
    end_s: NDArray[np.float64]

    def __len__(self) -> int:
        return self.device.size

    def sorted(self) -> "Actions":
        """By device, start and end."""
        order = np.lexsort((self.kind, self.end_s, self.start_s, self.device))
        return Actions(**{name: getattr(self, name)[order] for name in COLUMNS})


def join_actions(parts: list[Actions]) -> Actions:
    """All of them, sorted."""
    joined = {name: np.concatenate([getattr(part, name) for part in parts]) for name in COLUMNS}
    return Actions(**joined).sorted()


def format_actions(actions: Actions) -> str:
    """The text form. O(actions)."""
    columns: list[list[str]] = []
    for name in COLUMNS:
        values = getattr(actions, name).tolist()
        if name == "kind":
            columns.append([KINDS[value] for value in values])
        elif name in _OPTIONAL:
            columns.append(["-" if value < 0 else str(value) for value in values])
        else:
            columns.append([repr(value) for value in values])
    lines = [VERSION, " ".join(COLUMNS), *map(" ".join, zip(*columns, strict=True))]
    return "\n".join(lines) + "\n"


def parse_actions(text: str) -> Actions:
    """The actions of a text. Raises PlanningError that names the line it cannot read."""
    lines = text.splitlines()
    if lines[:2] != [VERSION, " ".join(COLUMNS)]:
        raise PlanningError(
            f"the text begins with {lines[:2]}; it must begin with {VERSION!r} and the names of "
            "the columns: write it with format_actions of the same version"
        )
    rows = [_parsed(number, line) for number, line in enumerate(lines[2:], start=3)]
    columns = list(zip(*rows, strict=True)) or [()] * len(COLUMNS)
    whole = [np.array(column, np.int64) for column in columns[:-2]]
    start_s, end_s = (np.array(column, np.float64) for column in columns[-2:])
    return Actions(**dict(zip(COLUMNS[:-2], whole, strict=True)), start_s=start_s, end_s=end_s)


def _parsed(number: int, line: str) -> list[float]:
    words = line.split(" ")
    try:
        if len(words) != len(COLUMNS):
            raise ValueError
        whole = [-1 if word == "-" else int(word) for word in words[2:7]]
        start_s, end_s = float(words[7]), float(words[8])
        device = int(words[0])
        if not (device >= 0 and min(whole) >= -1 and -np.inf < start_s <= end_s < np.inf):
            raise ValueError
        return [device, KINDS.index(words[1]), *whole, start_s, end_s]
    except ValueError as error:
        raise PlanningError(
            f"line {number} is {line!r}; an action is {len(COLUMNS)} words: {' '.join(COLUMNS)}, "
            f"with a kind of {', '.join(KINDS)}"
        ) from error
