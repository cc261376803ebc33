"""What a rank did when, as a file that Perfetto (ui.perfetto.dev) and chrome://tracing open.

    step         ├────────────────────────── step 7 ──────────────────────────┤
                 ├─ microbatch 0 ─────────────────┤├─ microbatch 1 ──────────┤
                 ├ vision ┤├ exchange ┤├ llm ─────┤ …
    waits                   ├ exchange ┤   ├ ring ┤     what no computing hid
    copies       ├ microbatch 1 ┤                       to the device, beside computing
    encoders                            ├ vision ┤      on a stream of their own
    transfers    rings, exchanges and sums, from being posted to being waited for

The phases of a step follow one another without a gap, so that they add up to its seconds. Times are
those of the clock of ``clock.py``: of a GPU's stream, where one computes. Transfers of a backward
pass are seen there too. Source of the format: "Trace Event Format", Google, 2016.
"""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from trainer_client.device import CopyTimes, telling_copies
from trainer_client.runtime.clock import OTHER, PhaseClock, telling_clocks
from trainer_client.runtime.encoder_stream import EncoderTimes, telling_encoders
from trainer_client.runtime.phases import BUBBLE, GRADIENTS, OfWave, Place

Event = dict[str, Any]

STEPS, WAITS, COPIES, ENCODERS = 0, 1, 2, 3  # tracks
TRACKS = {
    STEPS: "step",
    WAITS: "waits for transfers",
    COPIES: "copies to the device",
    ENCODERS: "encoders beside the decoder",
}
BETWEEN = (OTHER, GRADIENTS, BUBBLE)  # phases that belong to no microbatch


@dataclass(kw_only=True, slots=True)
class _TracedStep:
    clock: PhaseClock
    copies: list[CopyTimes]
    encoded: list[EncoderTimes]


@dataclass(kw_only=True, slots=True)
class Trace:
    """The steps that ran in ``traced``, of this rank. `rank` names its process in the file."""

    rank: int = 0
    _steps: list[_TracedStep] = field(default_factory=list)
    _copies: list[CopyTimes] = field(default_factory=list)
    _encoded: list[EncoderTimes] = field(default_factory=list)

    def events(self) -> list[Event]:
        """The events of the format, times in µs. Waits for the device."""
        named: list[Event] = [self._named("process_name", STEPS, f"rank {self.rank}")]
        named += [self._named("thread_name", track, name) for track, name in TRACKS.items()]
        steps = [self._step(number, step) for number, step in enumerate(self._steps)]
        return [*named, *(event for of_step in steps for event in of_step)]

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the file. Files of several ranks can be opened together, if joined by
        ``join_traces``."""
        _write(self.events(), path)

    def _named(self, what: str, track: int, name: str) -> Event:
        return {"ph": "M", "pid": self.rank, "tid": track, "name": what, "args": {"name": name}}

    def _step(self, number: int, step: _TracedStep) -> Iterator[Event]:
        clock = step.clock
        spans = clock.spans()
        moments_s, origin_s = clock.moments_s(), clock.began_s

        def at_us(moment_s: float) -> int:
            # Whole: Perfetto cuts beginning and length off, each by itself, and drops a span that
            # then ends behind the one around it.
            return round((origin_s + moment_s) * 1e6)

        def span(track: int, name: str, begun_s: float, ended_s: float, **args: object) -> Event:
            begun_us = at_us(begun_s)
            return {
                "ph": "X", "pid": self.rank, "tid": track, "name": name, "args": args,
                "ts": begun_us, "dur": max(0, at_us(ended_s) - begun_us),
            }  # fmt: skip

        yield span(STEPS, f"step {number}", spans[0][2], spans[-1][3])
        for name, begun_s, ended_s in _microbatches(spans, clock.labels):
            yield span(STEPS, name, begun_s, ended_s)
        for phase, place, begun_s, ended_s in spans:
            yield span(STEPS, phase, begun_s, ended_s, **_args(place))
        for serial, note in enumerate(clock.notes or ()):
            posted_s, began_s, ended_s = (
                moments_s[moment] for moment in (note.posted, note.began, note.ended)
            )
            yield span(WAITS, note.name, began_s, ended_s)
            flight = {
                "cat": "transfer", "id": f"{self.rank}.{number}.{serial}", "pid": self.rank,
                "tid": WAITS, "name": note.name,
            }  # fmt: skip
            yield {**flight, "ph": "b", "ts": at_us(posted_s)}
            yield {**flight, "ph": "e", "ts": at_us(ended_s)}
        for times in step.copies:
            begun_s, ended_s = _copied_s(times, clock)
            yield span(COPIES, f"wave {times.wave}", begun_s, ended_s, bytes=times.size_bytes)
        for encoded in step.encoded:
            begun_s, ended_s = clock.seconds_at(encoded.began), clock.seconds_at(encoded.ended)
            yield span(ENCODERS, encoded.modality, begun_s, ended_s, wave=encoded.wave)

    def add_copies(self, times: CopyTimes) -> None:
        """Copies of the step that runs."""
        self._copies.append(times)

    def add_encoded(self, times: EncoderTimes) -> None:
        """What the step that runs encodes beside its decoder."""
        self._encoded.append(times)

    def add_step(self, clock: PhaseClock) -> None:
        """A step that has ended."""
        self._steps.append(_TracedStep(clock=clock, copies=self._copies, encoded=self._encoded))
        self._copies, self._encoded = [], []


@contextmanager
def traced(rank: int | None = None) -> Iterator[Trace]:
    """Trace the steps that this thread runs in the body:

        with traced() as trace:
            for shard in itertools.islice(dataset, 3):
                run_step(model, shard, groups)
        trace.write("trace.json")

    ``rank`` is that of torch.distributed, where it is not given. A traced step notes three moments
    more for each transfer; leave it out of what you measure.
    """
    ready = rank is None and dist.is_initialized()
    trace = Trace(rank=dist.get_rank() if ready else rank or 0)
    with (
        telling_clocks(trace.add_step),
        telling_copies(trace.add_copies),
        telling_encoders(trace.add_encoded),
    ):
        yield trace


def join_traces(paths: list[Path], path: Path) -> None:
    """Join the files of several ranks of a host into one; hosts' clocks differ."""
    events = [event for each in paths for event in json.loads(each.read_text())["traceEvents"]]
    _write(events, path)


def _write(events: list[Event], path: str | os.PathLike[str]) -> None:
    Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))


def _args(place: object) -> dict[str, object]:
    """What a phase is of: an exchange of a wave, a pack in a chunk, the items of a wave."""
    return dict(place._asdict()) if isinstance(place, Place | OfWave) else {}


def _microbatches(
    spans: list[tuple[str, object, float, float]], labels: Mapping[int, str]
) -> Iterator[tuple[str, float, float]]:
    """Name, start and end of each microbatch: phases that follow one another, up to its backward
    pass; or of each pass that has a label, as in a pipeline."""
    found = 0
    held: list[int] = []  # spans of one microbatch
    backward = True
    for number, (phase, place, _, _) in [*enumerate(spans), (len(spans), (OTHER, None, 0.0, 0.0))]:
        is_backward = phase.endswith("backward") or getattr(place, "direction", "") == "backward"
        if held and (phase in BETWEEN or (backward and not is_backward)):
            label = next((labels[each] for each in held if each in labels), None)
            yield label or f"microbatch {found}", spans[held[0]][2], spans[held[-1]][3]
            found += 1
            held = []
        if phase not in BETWEEN:
            held.append(number)
            backward = is_backward


def _copied_s(times: CopyTimes, clock: PhaseClock) -> tuple[float, float]:
    """When a microbatch was copied, in the clock's seconds."""
    if times.began is not None and times.copied is not None:
        return clock.seconds_at(times.began), clock.seconds_at(times.copied)
    return times.began_s - clock.began_s, times.ended_s - clock.began_s
