"""When each action of a pipeline step ran: measured here, simulated by the planner, overlaid.

Axes are those of the planner's simulator: ``[microbatch, model chunk, 2]``, forward at 0 and
backward at 1, seconds; chunk c runs on stage c mod p. So the simulator's arrays make a ``Timeline``
too, and the durations of a measured one can be given to the simulator.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

IDLE = "·"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Timeline:
    """A pipeline step: ``start_s``, ``end_s`` float64[microbatch, chunk, 2].

    An action starts when its input has arrived, so waiting for another stage lies between
    actions; waiting for other replicas (a ring, an exchange) lies inside.
    """

    stages: int
    start_s: Floats
    end_s: Floats

    @property
    def makespan_s(self) -> float:
        """Seconds from the first start to the last end."""
        return float(self.end_s.max() - self.start_s.min()) if self.end_s.size else 0.0

    @property
    def forward_s(self) -> Floats:
        """Seconds of each forward [microbatch, chunk], as the simulator takes them."""
        return self.end_s[..., 0] - self.start_s[..., 0]

    @property
    def backward_s(self) -> Floats:
        """Seconds of each backward [microbatch, chunk]."""
        return self.end_s[..., 1] - self.start_s[..., 1]

    @property
    def bubble_fraction(self) -> float:
        """Fraction of the stages' time in which they ran nothing."""
        busy_s = float(self.forward_s.sum() + self.backward_s.sum())
        whole_s = self.stages * self.makespan_s
        return 1.0 - busy_s / whole_s if whole_s > 0 else 0.0


def gantt(timelines: Mapping[str, Timeline], *, columns: int = 96) -> str:
    """Timelines of the same pipeline as text, one under the other on one axis of seconds.

    A line a stage: 0-9 is the forward of the microbatch with that last digit, a-j its
    backward, a dot is idle.

        stage 0  measured   000111aaa·222bbb...
                 simulated  000111·aaa222bbb...
    """
    longest_s = max((each.makespan_s for each in timelines.values()), default=0.0)
    width = max((len(name) for name in timelines), default=0)
    lines = []
    for stage in range(max((each.stages for each in timelines.values()), default=0)):
        for number, (name, each) in enumerate(timelines.items()):
            head = f"stage {stage}" if number == 0 else ""
            row = _row(each, stage, longest_s, columns)
            lines.append(f"{head:<9}{name:<{width}}  {row}")
    lines += [
        f"{name}: {each.makespan_s:.4g} s, {each.bubble_fraction:.1%} bubble"
        for name, each in timelines.items()
    ]
    return "\n".join(lines)


def _row(timeline: Timeline, stage: int, longest_s: float, columns: int) -> str:
    row = [IDLE] * columns
    if longest_s <= 0:
        return "".join(row)
    begin_s = timeline.start_s.min()
    for microbatch in range(timeline.start_s.shape[0]):
        for chunk in range(stage, timeline.start_s.shape[1], timeline.stages):
            for kind in range(2):
                first, last = (
                    round((moment[microbatch, chunk, kind] - begin_s) / longest_s * columns)
                    for moment in (timeline.start_s, timeline.end_s)
                )
                mark = ("0123456789", "abcdefghij")[kind][microbatch % 10]
                row[first:last] = mark * (last - first)
    return "".join(row)
