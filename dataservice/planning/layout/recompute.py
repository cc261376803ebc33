"""Which layers recompute their activations (OmniBal §4.3): no more than memory asks for.

Each device's layers keep everything, recompute selectively, or recompute in full, so that all
microbatches it holds at once fit and the added time is least, exactly. Which of several such
choices makes the step shortest is asked of the simulator.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dataservice.core.plan_options import algorithm_named
from dataservice.planning.invariants import require
from dataservice.planning.layout.recompute_need import Need, device_needs, does_not_fit
from dataservice.planning.layout.recompute_search import (
    CHOICES,
    DeviceChoices,
    choose_counts,
    least_counts,
    peak_bytes,
)
from dataservice.planning.layout.recompute_step import StepSearch, best_combination
from dataservice.planning.layout.stage_times import check_bounds, stage_times
from dataservice.planning.pipeline_parallel.simulator import Program, make_program

Objective = Literal["step", "stage"]
NONE, SELECTIVE, FULL = range(CHOICES)

# Choices of each device that the simulator compares: those that add least.
OBJECTIVES: dict[Objective, int] = {"step": 12, "stage": 1}


@dataclass(frozen=True, kw_only=True, slots=True)
class RecomputeChoice:
    """What every layer does, and what that takes.

    `choice` int8[layer]: 0 keeps everything, 1 recomputes selectively, 2 in full. By device,
    float64[p]: `peak_bytes` it holds at most, of `memory_bytes`; `added_s` to its mean microbatch;
    `added_bound_s`, below which nothing that fits goes. `in_flight` int64[p]: most microbatches of
    a chunk that it holds at once. `step_s` is the simulated step, `step_bound_s` what no choice
    that fits goes below, `free_step_s` the step if nothing had to recompute. `proven`: every
    device adds the least it can, or, by step, none of its choices could be better.
    """

    choice: NDArray[np.int8]
    peak_bytes: NDArray[np.float64]
    memory_bytes: NDArray[np.float64]
    in_flight: NDArray[np.int64]
    added_s: NDArray[np.float64]
    added_bound_s: NDArray[np.float64]
    step_s: float
    step_bound_s: float
    free_step_s: float
    proven: bool

    def counts(self, bounds: ArrayLike) -> NDArray[np.int64]:
        """Layers of each choice in each chunk, int64[chunk, choice]."""
        cuts = np.asarray(bounds)
        chunk = np.searchsorted(cuts, np.arange(self.choice.size), side="right") - 1
        table = np.zeros((cuts.size - 1, CHOICES), np.int64)
        np.add.at(table, (chunk, self.choice), 1)
        return table


def choose_recompute(
    forward_s: ArrayLike,
    backward_s: ArrayLike,
    kept_bytes: ArrayLike,
    recompute_s: ArrayLike,
    *,
    bounds: ArrayLike,
    stages: int,
    memory_bytes: ArrayLike,
    fixed_bytes: ArrayLike = 0,
    working_bytes: ArrayLike | None = None,
    virtual_stages: int = 1,
    microbatches: int | None = None,
    activation_limit: ArrayLike | None = None,
    cut_bytes: ArrayLike | None = None,
    gradient_bytes: ArrayLike | None = None,
    bytes_per_s: float = np.inf,
    objective: Objective = "step",
) -> RecomputeChoice:
    """Choose for each layer of each device what it recomputes, under the device's memory.

    Times, `bounds`, cuts and stages as for `time_stages`. `kept_bytes` [layer, 3] or [microbatch,
    layer, 3]: what a layer keeps of a microbatch until its backward, with no, selective and full
    recomputation (a layer without a selective way repeats another); `recompute_s`, of either shape:
    seconds that its backward takes longer; `working_bytes` [layer, 3]: what that needs for a moment
    besides, as the activations that full recomputation makes anew. `memory_bytes`, `fixed_bytes`
    (weights, gradients, optimizer), one number or [p]. What is held at once is read off the
    schedule, with its `activation_limit`. "stage" adds least to every device, so to the slowest
    too; "step" also asks the simulator which of the best choices make the shortest step.
    Raises PlanningError on bad input, and where nothing fits: by how many bytes, and what would.
    """
    keep = algorithm_named(OBJECTIVES, objective, "objective")
    times = stage_times(
        forward_s,
        backward_s,
        stages=stages,
        microbatches=microbatches,
        cut_bytes=cut_bytes,
        gradient_bytes=gradient_bytes,
        bytes_per_s=bytes_per_s,
    )
    count, layers = times.forward.shape[0], times.forward.shape[1] - 1
    cuts = check_bounds(bounds, layers, stages, virtual_stages)
    program = make_program(count, stages, virtual_stages, activation_limit)
    need = device_needs(
        kept_bytes,
        recompute_s,
        working_bytes,
        memory_bytes=memory_bytes,
        fixed_bytes=fixed_bytes,
        bounds=cuts,
        program=program,
        stages=stages,
        microbatches=count,
    )
    if need.equal_microbatches and virtual_stages == 1:
        keep = 1  # the least added to each device is then the shortest step
    devices = [_device(need, device, keep, cuts, program) for device in range(stages)]
    search = StepSearch(need=need, times=times, bounds=cuts, program=program, devices=devices)
    picked, step_s = best_combination(search)
    return _answer(search, picked, step_s, objective)


def _device(
    need: Need, device: int, keep: int, bounds: NDArray[np.int64], program: Program
) -> DeviceChoices:
    """The best choices of one device. Raises PlanningError if none fits."""
    groups = need.groups[device]
    room = float(need.memory_bytes[device] - need.fixed_bytes[device])
    found = choose_counts(groups, room, 1)
    if len(found.cost):
        return found if keep == 1 else _with_others(found, choose_counts(groups, room, keep))
    least = least_counts(groups)
    if peak_bytes(groups, least) > room:
        raise does_not_fit(need, device, bounds, program)
    # The nodes ran out before any that fits was met.
    cost = np.array([float((groups.cost * least).sum())])
    return DeviceChoices(least[None], cost, found.bound, False)


def _with_others(least: DeviceChoices, others: DeviceChoices) -> DeviceChoices:
    """The choice that adds least, and after it those of a longer list that add as little."""
    other = ~(others.counts == least.counts[0]).all(axis=(1, 2)) & (others.cost >= least.cost[0])
    return DeviceChoices(
        np.concatenate([least.counts, others.counts[other]]),
        np.concatenate([least.cost, others.cost[other]]),
        least.bound,
        least.proven,
    )


def _answer(
    search: StepSearch, picked: list[int], step_s: float, objective: Objective
) -> RecomputeChoice:
    need = search.need
    counts = [found.counts[k] for found, k in zip(search.devices, picked, strict=True)]
    peak = np.array(
        [
            need.fixed_bytes[device] + peak_bytes(groups, counts[device])
            for device, groups in enumerate(need.groups)
        ]
    )
    fits = bool((peak <= need.memory_bytes).all())
    require(fits, "a device holds more than its memory under the chosen recomputation")
    added = np.array(
        [found.cost[k] for found, k in zip(search.devices, picked, strict=True)], np.float64
    )
    choice = np.zeros(need.added_s.shape[1], np.int8)
    for device, chosen in enumerate(counts):
        for group, layers in enumerate(need.members[device]):
            choice[layers] = np.repeat((FULL, SELECTIVE, NONE), chosen[group][::-1])
    bound, free = search.step_bound(), search.seconds(None)
    least = all(found.proven for found in search.devices)
    return RecomputeChoice(
        choice=choice,
        peak_bytes=peak,
        memory_bytes=need.memory_bytes,
        in_flight=np.array([int(held.sum(axis=2).max()) for held in need.held]),
        added_s=added,
        added_bound_s=np.array([found.bound for found in search.devices]),
        step_s=step_s,
        step_bound_s=min(bound, step_s),
        free_step_s=free,
        proven=least and (objective == "stage" or step_s <= bound * (1 + 1e-9)),
    )
