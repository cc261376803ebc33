"""What a bubble schedule shows of itself before it leaves the planner. O(actions · log actions)."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dataservice.planning.invariants import require
from dataservice.planning.layout.actions import KINDS, Actions
from dataservice.planning.layout.bubble_inputs import BackboneTimes, EncoderPlan, EncoderTimes

# Times are sums of kernels in various orders: what differs by less is the same.
_ROUNDING = 1e-9
_COMPUTE = [KINDS.index(name) for name in ("forward", "backward")]
_LINKS = [KINDS.index(name) for name in ("forward_comm", "backward_comm")]
_FORWARD = [KINDS.index(name) for name in ("forward", "forward_comm")]
_BACKWARD = [KINDS.index(name) for name in ("backward", "backward_comm")]


def check_schedule(
    actions: Actions,
    backbone: BackboneTimes,
    encoders: Sequence[EncoderTimes],
    plan: EncoderPlan,
    step_s: float,
) -> None:
    """Every kernel is there; no device computes twice at a time, nor communicates twice; features
    are there before the backbone needs them, and gradients before an encoder does; nothing lies
    outside the step. Raises PlanningError that asks for a report."""
    slack_s = _ROUNDING * max(step_s, _ROUNDING)
    wanted = _kernels(backbone, encoders, plan)
    require(len(actions) == wanted, f"a bubble schedule has {len(actions)} actions of {wanted}")
    inside = actions.start_s.min() >= -slack_s and actions.end_s.max() <= step_s + slack_s
    require(bool(inside), "an action lies outside its step")
    for kinds, what in ((_COMPUTE, "computes"), (_LINKS, "communicates")):
        least = _least_pause(actions, np.isin(actions.kind, kinds))
        require(least >= -slack_s, f"a device {what} twice at a time, for {-least} s")
    for number, encoder in enumerate(encoders):
        count, ours = backbone.microbatches, actions.encoder == number
        features = _ends(actions, ours & np.isin(actions.kind, _FORWARD), count)
        needed = _starts(actions, _first_chunk(actions, _FORWARD), count)
        late = features + encoder.transfer_s - needed
        require(bool((late <= slack_s).all()), f"features of encoder {number} come late")
        begin = _starts(actions, ours & np.isin(actions.kind, _BACKWARD), count)
        gradients = _ends(actions, _first_chunk(actions, _BACKWARD), count)
        early = gradients + encoder.transfer_s - begin
        require(bool((early <= slack_s).all()), f"encoder {number} begins before its gradients")


def _kernels(backbone: BackboneTimes, encoders: Sequence[EncoderTimes], plan: EncoderPlan) -> int:
    """Actions that a schedule has."""
    theirs = sum(int((t.seconds > 0).sum()) for t in (backbone.forward, backbone.backward))
    ours = sum(
        int((tables[plan.tensor_parallel].seconds > 0).sum())
        for encoder in encoders
        for tables in (encoder.forward, encoder.backward)
        if tables is not None
    )
    devices = backbone.pipeline_parallel * plan.slices
    return backbone.microbatches * (theirs * plan.slices + ours) + 2 * devices


def _least_pause(actions: Actions, chosen: NDArray[np.bool_]) -> float:
    """Least seconds between one action and the next of the same device; below 0 they overlap."""
    device, start, end = actions.device[chosen], actions.start_s[chosen], actions.end_s[chosen]
    order = np.lexsort((end, start, device))
    same = device[order][1:] == device[order][:-1]
    pause = start[order][1:] - end[order][:-1]
    return float(pause[same].min(initial=np.inf))


def _first_chunk(actions: Actions, kinds: list[int]) -> NDArray[np.bool_]:
    """Kernels of the backbone's first chunk."""
    first: NDArray[np.bool_] = (actions.encoder < 0) & (actions.stage == 0)
    return first & np.isin(actions.kind, kinds)


def _starts(actions: Actions, chosen: NDArray[np.bool_], count: int) -> NDArray[np.float64]:
    """First start of each microbatch, float64[microbatch]; inf where none is chosen."""
    first = np.full(count, np.inf)
    np.minimum.at(first, actions.microbatch[chosen], actions.start_s[chosen])
    return first


def _ends(actions: Actions, chosen: NDArray[np.bool_], count: int) -> NDArray[np.float64]:
    """Last end of each microbatch, float64[microbatch]; -inf where none is chosen."""
    last = np.full(count, -np.inf)
    np.maximum.at(last, actions.microbatch[chosen], actions.end_s[chosen])
    return last
