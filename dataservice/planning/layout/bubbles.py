"""Encoders in the bubbles of the backbone (Optimus): the front door.

Every encoder plan whose PP and TP divide the backbone's and that fits in memory is scheduled twice
over the backbone's fixed timeline: coarse, whole layers before a device's first forward and after
its last backward; and fine, single kernels in every bubble. The shortest step wins.

    coarse  EEEE│F F F F B B B B│EEEEEE          E encoder   F, B backbone
    fine      EE│FeFeFeF B B eBeB│EEE             e in the bubbles between
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from dataservice.core.errors import PlanningError
from dataservice.planning.layout.actions import Actions, join_actions
from dataservice.planning.layout.bubble_actions import (
    backbone_actions,
    collective_actions,
    in_kernels,
    inside_share,
    pipeline_actions,
)
from dataservice.planning.layout.bubble_bound import least_step_s
from dataservice.planning.layout.bubble_check import check_schedule
from dataservice.planning.layout.bubble_inputs import BackboneTimes, EncoderPlan, EncoderTimes
from dataservice.planning.layout.bubble_placement import Gaps, Stream
from dataservice.planning.layout.bubble_search import SplitSearch
from dataservice.planning.layout.bubble_split import Problem, Split
from dataservice.planning.layout.bubble_streams import (
    LabelledStream,
    bytes_left,
    bytes_of_hops,
    encoder_streams,
    possible_plans,
)
from dataservice.planning.layout.bubble_timeline import (
    KernelRows,
    Timeline,
    coarse_gaps,
    fine_gaps,
    gaps_of_hops,
    kernel_rows,
    timelines_of,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class BubbleSchedule:
    """One step of backbone and encoders.

    `actions`: every kernel of both, with device and time. `pipeline_of` int64[microbatch]: the
    encoder pipeline of each. `before_s`, `after_s`: what encoding adds to the backbone's own
    `backbone_s`; `step_s` is their sum. `efficiency` is the share of encoder compute that runs
    within the backbone's own time (§5.3.2). The coarse figures are those of the best schedule of
    whole layers, under whatever plan suits it. `lower_bound_s`: no schedule of any plan that fits
    takes less, as long as the backbone keeps its timeline. `peak_bytes` float64[device].
    """

    plan: EncoderPlan
    actions: Actions
    pipeline_of: NDArray[np.int64]
    step_s: float
    before_s: float
    after_s: float
    backbone_s: float
    coarse_step_s: float
    lower_bound_s: float
    efficiency: float
    coarse_efficiency: float
    peak_bytes: NDArray[np.float64]
    is_fine: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class _Task:
    """What is asked."""

    backbone: BackboneTimes
    encoders: tuple[EncoderTimes, ...]
    memory_bytes: float


@dataclass(frozen=True, kw_only=True, slots=True)
class _Setting:
    """One plan over one timeline, and what no schedule of it goes below."""

    plan: EncoderPlan
    timeline: Timeline
    rows: KernelRows
    forward: LabelledStream
    backward: LabelledStream
    bound_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class _Found:
    """A split with the starts of the streams' kernels."""

    setting: _Setting
    forward: LabelledStream
    backward: LabelledStream
    split: Split
    is_fine: bool

    @property
    def step_s(self) -> float:
        return self.setting.timeline.step_s + self.split.outside_s

    @property
    def rank(self) -> tuple[float, float]:
        """Bytes too many, then seconds."""
        return self.split.excess_bytes, self.step_s

    @property
    def efficiency(self) -> float:
        step_s = self.setting.timeline.step_s
        return inside_share(self.split.runs, self.forward, self.backward, step_s)


def schedule_bubbles(
    backbone: BackboneTimes,
    encoders: Sequence[EncoderTimes],
    *,
    memory_bytes: float = np.inf,
) -> BubbleSchedule:
    """The shortest step in which encoders run in the bubbles of the backbone.

    Optimus (§4), with forwards found feasible by n_i(t) instead of by enumerating splits. The
    backbone's order and times are those of the simulator of (interleaved) 1F1B, its forwards
    deferred as far as the step's time allows; encoders never delay one of its kernels against
    another. Encoder communication never runs beside the backbone's: it runs under backbone compute,
    or where the device does nothing for the backbone. `memory_bytes` of a GPU.

    Some 400 placements of a pipeline a plan, each O(kernels + bubbles). Raises PlanningError on
    bad input, and if no plan fits in memory.
    """
    if not encoders:
        raise PlanningError("encoders are none; give at least one, or ask simulate_1f1b")
    if not memory_bytes > 0:
        raise PlanningError(f"memory_bytes is {memory_bytes}; it must be above 0")
    task = _Task(backbone=backbone, encoders=tuple(encoders), memory_bytes=memory_bytes)
    settings = _settings(task)
    coarse = min((_coarse(task, setting) for setting in settings), key=lambda found: found.rank)
    best = coarse
    for setting in sorted(settings, key=lambda setting: setting.bound_s):
        if best.split.excess_bytes > 0 or setting.bound_s < best.step_s:
            best = min(best, *_fine(task, setting), key=lambda found: found.rank)
    if best.split.excess_bytes > 0:
        raise _too_large(memory_bytes, best.split.excess_bytes)
    return _schedule(task, best, coarse, min(setting.bound_s for setting in settings))


def _settings(task: _Task) -> list[_Setting]:
    """Every plan that fits, over every timeline."""
    plans = _plans_that_fit(task)
    made = []
    for timeline in timelines_of(task.backbone):
        rows = kernel_rows(task.backbone, timeline)
        for plan in plans:
            forward, backward = encoder_streams(task.encoders, plan)
            made.append(
                _Setting(
                    plan=plan,
                    timeline=timeline,
                    rows=rows,
                    forward=forward,
                    backward=backward,
                    bound_s=least_step_s(task.backbone, task.encoders, plan, timeline, rows),
                )
            )
    return made


def _plans_that_fit(task: _Task) -> list[EncoderPlan]:
    fitting, least_over = [], np.inf
    for plan in possible_plans(task.backbone, task.encoders):
        states, _ = bytes_of_hops(task.encoders, plan)
        over = -float(bytes_left(task.backbone, states, task.memory_bytes).min())
        least_over = min(least_over, over)
        if over <= 0:
            fitting.append(plan)
    if not fitting:
        raise _too_large(task.memory_bytes, least_over)
    return fitting


def _too_large(memory_bytes: float, over: float) -> PlanningError:
    return PlanningError(
        f"memory_bytes is {memory_bytes:.0f}; backbone and encoders need {over:.0f} bytes more on "
        "some device, under the plan that needs least: use more pipeline stages or tensor-parallel "
        "ranks, recompute more layers, or give times at larger tensor-parallel degrees"
    )


def _coarse(task: _Task, setting: _Setting) -> _Found:
    """Whole layers, before a device's first kernel and after its last."""
    forward, of_forward, after_forward = setting.forward.by_layer()
    backward, of_backward, after_backward = setting.backward.by_layer()
    problem = _problem(task, setting, coarse_gaps(setting.timeline), forward, backward)
    split = SplitSearch(problem).best()
    runs = tuple(
        replace(
            run,
            forward_s=in_kernels(run.forward_s, of_forward, after_forward),
            backward_s=in_kernels(run.backward_s, of_backward, after_backward),
        )
        for run in split.runs
    )
    return _Found(
        setting=setting,
        forward=setting.forward,
        backward=setting.backward,
        split=replace(split, runs=runs),
        is_fine=False,
    )


def _fine(task: _Task, setting: _Setting) -> list[_Found]:
    """Single kernels, in every bubble: encoder after encoder, and several in turn."""
    both = setting.forward, setting.backward
    seconds = np.concatenate([stream.kernels.seconds for stream in both])
    gaps = fine_gaps(task.backbone, setting.rows, float(seconds.min(initial=np.inf)))
    choices = [both]
    if len(task.encoders) > 1:
        choices.append((setting.forward.interleaved(), setting.backward.interleaved()))
    found = []
    for forward, backward in choices:
        problem = _problem(task, setting, gaps, forward.kernels, backward.kernels)
        split = SplitSearch(problem).best()
        found.append(
            _Found(setting=setting, forward=forward, backward=backward, split=split, is_fine=True)
        )
    return found


def _problem(
    task: _Task, setting: _Setting, gaps: Gaps, forward: Stream, backward: Stream
) -> Problem:
    plan, timeline = setting.plan, setting.timeline
    states, kept = bytes_of_hops(task.encoders, plan)
    hops = np.arange(plan.pipeline_parallel)
    return Problem(
        forward=forward,
        backward=backward,
        gaps=tuple(gaps_of_hops(gaps, block * hops.size + hops) for block in range(plan.blocks)),
        slices=plan.slices,
        need_s=np.ascontiguousarray(timeline.need_s),
        gradient_s=np.ascontiguousarray(timeline.gradient_s),
        step_s=timeline.step_s,
        kept=kept,
        room=bytes_left(task.backbone, states, task.memory_bytes),
        floor_s=setting.bound_s - timeline.step_s,
    )


def _schedule(task: _Task, best: _Found, coarse: _Found, bound_s: float) -> BubbleSchedule:
    setting, split = best.setting, best.split
    plan, timeline = setting.plan, setting.timeline
    before_s = split.before_s
    parts = [
        collective_actions(task.backbone, timeline, plan, before_s),
        backbone_actions(task.backbone, setting.rows, plan, before_s),
    ]
    for pipeline, run in enumerate(split.runs):
        for stream, starts in (
            (best.forward, run.forward_s),
            (best.backward, run.backward_s),
        ):
            parts.append(
                pipeline_actions(
                    stream, starts + before_s, run.members, plan, pipeline,
                    backward=stream is best.backward,
                )
            )  # fmt: skip
    actions = join_actions(parts)
    check_schedule(actions, task.backbone, task.encoders, plan, best.step_s)
    return BubbleSchedule(
        plan=plan,
        actions=actions,
        pipeline_of=split.owner,
        step_s=best.step_s,
        before_s=before_s,
        after_s=split.after_s,
        backbone_s=timeline.step_s,
        coarse_step_s=coarse.step_s,
        lower_bound_s=min(bound_s, best.step_s),
        efficiency=best.efficiency,
        coarse_efficiency=coarse.efficiency,
        peak_bytes=_peak_bytes(task, best),
        is_fine=best.is_fine,
    )


def _peak_bytes(task: _Task, best: _Found) -> NDArray[np.float64]:
    """Model states and activations of backbone and encoders, float64[device]."""
    plan = best.setting.plan
    states, _ = bytes_of_hops(task.encoders, plan)
    held = task.backbone.stage_bytes.reshape(plan.blocks, 1, plan.pipeline_parallel) + states
    active = np.stack([run.peak_bytes for run in best.split.runs])  # float64[pipeline, hop]
    peak = held + active.reshape(plan.blocks, plan.slices, plan.pipeline_parallel)
    return np.ascontiguousarray(peak.transpose(0, 2, 1)).ravel()
