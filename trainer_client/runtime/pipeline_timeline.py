"""When each action of a pipeline step ran: measured here, or simulated, overlaid.

Axes are those of the planner's simulator: ``[microbatch, model chunk, 2]``, forward at 0 and
backward at 1, seconds; chunk c runs on stage c mod p. So the planner's arrays make a ``Timeline``
too, and ``simulate`` makes one of any schedule and its actions' seconds.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast

import numpy as np
import numpy.typing as npt
import torch

from trainer_client.runtime.bubble_schedule import (
    ENCODE,
    AnyAction,
    BubbleSchedule,
    EncoderAction,
)
from trainer_client.runtime.clock import start_clock
from trainer_client.runtime.pipeline_schedule import FORWARD, PipelineSchedule

Floats = npt.NDArray[np.float64]

IDLE = "·"
ENCODING, RETURNING = "E", "G"


@dataclass(frozen=True, kw_only=True, slots=True)
class EncoderSpan:
    """Layers of an encoder that a stage ran by themselves: one `EncoderAction` of its schedule."""

    stage: int
    action: EncoderAction
    start_s: float
    end_s: float


class ActionTimes:
    """When the actions of one stage ran, in their order."""

    def __init__(self, device: torch.device) -> None:
        self._clock = start_clock(device)
        self._marks: list[tuple[int, int]] = []

    @contextmanager
    def of_next(self) -> Iterator[None]:
        """The body is the stage's next action."""
        begun = self._clock.mark()
        yield
        self._marks.append((begun, self._clock.mark()))

    def read(self) -> Floats:
        """Start and end of each, float64[action, 2], in seconds since this was made. Waits for the
        device to come that far."""
        moments_s = self._clock.read()
        spans = [(moments_s[begun], moments_s[ended]) for begun, ended in self._marks]
        return np.array(spans, np.float64).reshape(-1, 2)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Timeline:
    """A pipeline step: ``start_s``, ``end_s`` float64[microbatch, chunk, 2]; ``encoders``: what ran
    beside the chunks, where encoders are scheduled by themselves. Chunks before ``first_chunk``
    have encoder layers alone: they ran nothing else, and their times are 0.

    An action starts when its input has arrived, so waiting for another stage lies between
    actions; waiting for other replicas (a ring, an exchange) lies inside.
    """

    stages: int
    start_s: Floats
    end_s: Floats
    encoders: tuple[EncoderSpan, ...] = ()
    first_chunk: int = 0

    @staticmethod
    def of_actions(
        schedule: PipelineSchedule | BubbleSchedule,
        spans_s: Iterable[tuple[tuple[int, AnyAction], tuple[float, float]]],
    ) -> "Timeline":
        """From start and end of each (stage, action) of a schedule."""
        backbone = schedule.backbone if isinstance(schedule, BubbleSchedule) else schedule
        start_s, end_s = np.zeros((2, backbone.microbatches, backbone.chunks, 2))
        encoders: list[EncoderSpan] = []
        for (stage, action), (begun, ended) in spans_s:
            if isinstance(action, EncoderAction):
                span = EncoderSpan(stage=stage, action=action, start_s=begun, end_s=ended)
                encoders.append(span)
            else:
                at = (
                    action.microbatch,
                    backbone.chunk(stage, action),
                    int(action.kind != FORWARD),
                )
                start_s[at], end_s[at] = begun, ended
        return Timeline(
            stages=backbone.stages,
            start_s=start_s,
            end_s=end_s,
            encoders=tuple(encoders),
            first_chunk=backbone.first_chunk,
        )

    @property
    def begin_s(self) -> float:
        """The first start."""
        spans = min((span.start_s for span in self.encoders), default=np.inf)
        return float(min(self.start_s[:, self.first_chunk :].min(initial=np.inf), spans))

    @property
    def makespan_s(self) -> float:
        """Seconds from the first start to the last end."""
        if not self.end_s.size:
            return 0.0
        spans = max((span.end_s for span in self.encoders), default=-np.inf)
        return float(max(self.end_s.max(), spans)) - self.begin_s

    @property
    def forward_s(self) -> Floats:
        """Seconds of each forward [microbatch, chunk], as the simulator takes them."""
        return self.end_s[..., 0] - self.start_s[..., 0]

    @property
    def backward_s(self) -> Floats:
        """Seconds of each backward [microbatch, chunk]."""
        return self.end_s[..., 1] - self.start_s[..., 1]

    @property
    def encoder_s(self) -> dict[tuple[int, EncoderAction], float]:
        """Seconds of each encoder action of each stage."""
        return {(span.stage, span.action): span.end_s - span.start_s for span in self.encoders}

    @property
    def bubble_fraction(self) -> float:
        """Fraction of the stages' time in which they ran nothing."""
        busy_s = float(self.forward_s.sum() + self.backward_s.sum())
        busy_s += sum(self.encoder_s.values())
        whole_s = self.stages * self.makespan_s
        return 1.0 - busy_s / whole_s if whole_s > 0 else 0.0


def simulate(
    schedule: PipelineSchedule | BubbleSchedule,
    forward_s: Floats,
    backward_s: Floats,
    encoder_s: Mapping[tuple[int, EncoderAction], float] | None = None,
) -> Timeline:
    """The schedule, each action begun as soon as its stage is free and its input is there.

    ``forward_s``, ``backward_s`` float64[microbatch, chunk]. ``encoder_s``: seconds of the encoder
    actions of each stage; 0 where they are left out. Messages take no time. O(actions).
    """
    backbone = schedule.backbone if isinstance(schedule, BubbleSchedule) else schedule
    free_s = [0.0] * backbone.stages
    spans_s: dict[tuple[int, AnyAction], tuple[float, float]] = {}
    # A schedule is asked about its own actions alone.
    needs = cast(Callable[[int, AnyAction], Iterable[tuple[int, AnyAction]]], schedule.needs)
    for stage, action in schedule.walk():
        begin_s = max(free_s[stage], *(spans_s[need][1] for need in needs(stage, action)), 0.0)
        if isinstance(action, EncoderAction):
            seconds = (encoder_s or {}).get((stage, action), 0.0)
        else:
            of_kind = forward_s if action.kind == FORWARD else backward_s
            seconds = float(of_kind[action.microbatch, backbone.chunk(stage, action)])
        free_s[stage] = begin_s + seconds
        spans_s[stage, action] = begin_s, free_s[stage]
    return Timeline.of_actions(schedule, spans_s.items())


def gantt(timelines: Mapping[str, Timeline], *, columns: int = 96) -> str:
    """Timelines of the same pipeline as text, one under the other on one axis of seconds.

    A line a stage: 0-9 is the forward of the microbatch with that last digit, a-j its
    backward, a dot is idle. E is an encoder that runs by itself, G its backward.

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

    def fill(start_s: float, end_s: float, mark: str) -> None:
        first, last = (
            round((moment - timeline.begin_s) / longest_s * columns) for moment in (start_s, end_s)
        )
        row[first:last] = mark * (last - first)

    for span in timeline.encoders:
        if span.stage == stage:
            fill(span.start_s, span.end_s, ENCODING if span.action.kind == ENCODE else RETURNING)
    for microbatch in range(timeline.start_s.shape[0]):
        for chunk in range(stage, timeline.start_s.shape[1], timeline.stages):
            if chunk < timeline.first_chunk:
                continue
            for kind in range(2):
                at = microbatch, chunk, kind
                mark = ("0123456789", "abcdefghij")[kind][microbatch % 10]
                fill(timeline.start_s[at], timeline.end_s[at], mark)
    return "".join(row)
