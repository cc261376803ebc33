"""What no schedule goes below, as long as the backbone keeps its timeline.

For every j, the forwards of j microbatches are done by F_j, so their compute fits into the time
before it in which processors are free, over all devices; likewise backwards after B_j. The first
microbatch is encoded before F_1, the last one's gradients go back after B_N; and all compute fits
into the step.

    before    Σ devices (x + free time before F_j)  ≥  j · compute of a microbatch
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dataservice.planning.layout.bubble_inputs import BackboneTimes, EncoderPlan, EncoderTimes
from dataservice.planning.layout.bubble_timeline import KernelRows, Timeline


def least_step_s(
    backbone: BackboneTimes,
    encoders: Sequence[EncoderTimes],
    plan: EncoderPlan,
    timeline: Timeline,
    rows: KernelRows,
) -> float:
    """Seconds of a step that no schedule of this plan goes below. O(microbatches · kernels)."""
    count = backbone.microbatches
    forward = _Work(encoders, plan, backward=False)
    backward = _Work(encoders, plan, backward=True)
    compute_s = backbone.forward.compute_s + backbone.backward.compute_s
    compute_s += (forward.compute_s + backward.compute_s) / plan.slices
    spread_s = count * compute_s / backbone.pipeline_parallel
    computing = ~rows.communicates
    begin, end = rows.start_s[computing], rows.end_s[computing]
    need_s, gradient_s = timeline.need_s, timeline.gradient_s
    busy = [np.minimum(end, need).clip(begin).sum() - begin.sum() for need in need_s]
    before = forward.outside_s(need_s, np.array(busy), backbone)
    tail_s = (timeline.step_s - gradient_s)[::-1]  # float64[j - 1]: after the j-th last B
    busy = [end.sum() - np.maximum(begin, known).clip(max=end).sum() for known in gradient_s[::-1]]
    after = backward.outside_s(tail_s, np.array(busy), backbone)
    return max(spread_s, timeline.step_s + before + after)


class _Work:
    """What one microbatch asks of one pipeline, in one direction."""

    def __init__(
        self, encoders: Sequence[EncoderTimes], plan: EncoderPlan, *, backward: bool
    ) -> None:
        self.plan = plan
        self.compute_s = self.way_s = 0.0
        for encoder in encoders:
            tables = encoder.backward if backward else encoder.forward
            if tables is None or not tables[plan.tensor_parallel].seconds.any():
                continue
            times = tables[plan.tensor_parallel]
            self.compute_s += times.compute_s
            self.way_s = max(self.way_s, float(times.seconds.sum()) + encoder.transfer_s)

    def outside_s(
        self, until_s: NDArray[np.float64], busy_s: NDArray[np.float64], backbone: BackboneTimes
    ) -> float:
        """Least seconds beyond the backbone's step, when `until_s`[j − 1] lie in it for the first j
        microbatches, of which backbone compute takes `busy_s`[j − 1], summed over its stages."""
        stages = backbone.pipeline_parallel
        some = np.arange(1, until_s.size + 1)
        work_s = some * self.compute_s / self.plan.slices
        by_compute = (work_s - (stages * until_s - busy_s)) / stages
        by_way = self.way_s - until_s[0]
        return max(0.0, float(by_compute.max()), float(by_way))
