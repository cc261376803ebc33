"""Reads the list of actions that `schedule_bubbles` of the service's planner writes.

    bubbles 1                                                           0: EF0[0:2] F0 ...
    device kind encoder microbatch stage layer kernel start_s end_s ──▶ 1: F0 B0 ...
    0 forward 0 0 0 0 0 0.0 0.1                                         and when each should run

The list has single kernels; a trainer runs whole layers and whole model chunks. Each is put where
its first kernel begins. What it needs has ended by then, so the order of all of them can be run.
Gathers and scatters between replicas, which belong to no microbatch, are left to the runtime.

The list has no action of an encoder that the layout's samples had nothing for; those that it has
are numbered from 0 on, in their order.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from trainer_client.runtime.bubble_schedule import (
    ENCODE,
    RETURN,
    AnyAction,
    BubbleSchedule,
    EncoderAction,
)
from trainer_client.runtime.faults import LayoutError
from trainer_client.runtime.pipeline_schedule import BACKWARD, FORWARD, Action
from trainer_client.runtime.pipeline_timeline import EncoderSpan, Timeline

VERSION = "bubbles 1"
COLUMNS = "device kind encoder microbatch stage layer kernel start_s end_s"
_COLLECTIVES = ("gather", "scatter")
_FORWARDS, _BACKWARDS = ("forward", "forward_comm"), ("backward", "backward_comm")
_NONE = "-"
_SEVERAL_DEVICES = (
    "a list for encoders of fewer tensor-parallel ranks than the backbone, where a stage is "
    "several devices, cannot be run"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Span:
    """An action and when it runs, in seconds since the step began."""

    action: AnyAction
    start_s: float
    end_s: float


def read_bubbles(text: str, *, stages: int) -> tuple[BubbleSchedule, Timeline]:
    """The schedule of a list's text, and the times that the list gives it.

    ``stages`` of the backbone. The list is for ranks that are one device each: where an encoder has
    fewer tensor-parallel ranks than the backbone, a stage has several, and the list is refused.

    Raises LayoutError, with the line that cannot be read.
    """
    lines = text.splitlines()
    if lines[:2] != [VERSION, COLUMNS]:
        raise LayoutError(
            f"the list begins with {lines[:2]}; this client reads {VERSION!r} with the columns "
            f"{COLUMNS!r}: write it with format_actions of the same release"
        )
    spans: dict[tuple[int, AnyAction], _Span] = {}
    for number, line in enumerate(lines[2:], start=3):
        for device, span in _parsed(number, line, stages):
            known = spans.get((device, span.action), span)
            spans[device, span.action] = _joined(known, span)
    encoders = {action.encoder for _, action in spans if isinstance(action, EncoderAction)}
    number_of = {encoder: number for number, encoder in enumerate(sorted(encoders))}
    by_stage: list[list[_Span]] = [[] for _ in range(stages)]
    for (device, action), span in spans.items():
        if isinstance(action, EncoderAction):
            span = replace(span, action=replace(action, encoder=number_of[action.encoder]))
        by_stage[device].append(span)
    ordered = [tuple(_merged(sorted(mine, key=_begin))) for mine in by_stage]
    schedule = BubbleSchedule(
        actions=tuple(tuple(span.action for span in mine) for mine in ordered)
    )
    return schedule, _timeline(schedule, ordered)


def _parsed(number: int, line: str, stages: int) -> Iterator[tuple[int, _Span]]:
    """The device and the action of a kernel; of a collective, none."""
    words = line.split(" ")
    try:
        if len(words) != len(COLUMNS.split()):
            raise ValueError
        device, kind = int(words[0]), words[1]
        if kind in _COLLECTIVES:
            return
        passing = (_FORWARDS, _BACKWARDS).index(
            next(p for p in (_FORWARDS, _BACKWARDS) if kind in p)
        )
        microbatch, part, layer = (int(word) for word in words[3:6])
        start_s, end_s = float(words[7]), float(words[8])
        encoder = None if words[2] == _NONE else int(words[2])
    except (ValueError, StopIteration) as error:
        raise LayoutError(
            f"line {number} is {line!r}; an action is {len(COLUMNS.split())} words: {COLUMNS}"
        ) from error
    if not 0 <= device < stages:
        raise LayoutError(
            f"line {number} is of device {device}, and there are {stages} stages; "
            f"{_SEVERAL_DEVICES}"
        )
    action: AnyAction
    if encoder is None:
        if part % stages != device:
            raise LayoutError(
                f"line {number} has model chunk {part} on device {device} of {stages} stages; "
                f"chunk c runs on stage c mod p, and {_SEVERAL_DEVICES}"
            )
        action = Action((FORWARD, BACKWARD)[passing], microbatch, part // stages)
    else:
        action = EncoderAction((ENCODE, RETURN)[passing], microbatch, encoder, layer, layer + 1)
    yield device, _Span(action=action, start_s=start_s, end_s=end_s)


def _joined(one: _Span, other: _Span) -> _Span:
    return replace(one, start_s=min(one.start_s, other.start_s), end_s=max(one.end_s, other.end_s))


def _begin(span: _Span) -> tuple[float, float]:
    return span.start_s, span.end_s


def _merged(spans: Iterable[_Span]) -> Iterator[_Span]:
    """Neighbouring layers of one encoder and microbatch as one action."""
    last: _Span | None = None
    for span in spans:
        action = span.action
        held = last.action if last else None
        if (
            isinstance(action, EncoderAction)
            and isinstance(held, EncoderAction)
            and last is not None
            and (held.kind, held.microbatch, held.encoder)
            == (action.kind, action.microbatch, action.encoder)
            and (held.end == action.first if action.kind == ENCODE else held.first == action.end)
        ):
            both = replace(held, first=min(held.first, action.first), end=max(held.end, action.end))
            last = replace(_joined(last, span), action=both)
            continue
        if last is not None:
            yield last
        last = span
    if last is not None:
        yield last


def _timeline(schedule: BubbleSchedule, ordered: Iterable[Iterable[_Span]]) -> Timeline:
    backbone = schedule.backbone
    shape = (backbone.microbatches, backbone.chunks, 2)
    start_s, end_s = np.zeros(shape), np.zeros(shape)
    encoders = []
    for stage, mine in enumerate(ordered):
        for span in mine:
            if isinstance(span.action, EncoderAction):
                encoders.append(
                    EncoderSpan(
                        stage=stage, action=span.action, start_s=span.start_s, end_s=span.end_s
                    )
                )
                continue
            at = (
                span.action.microbatch,
                backbone.chunk(stage, span.action),
                int(span.action.kind == BACKWARD),
            )
            start_s[at], end_s[at] = span.start_s, span.end_s
    return Timeline(stages=backbone.stages, start_s=start_s, end_s=end_s, encoders=tuple(encoders))
