"""Which of the devices' best choices make the shortest step, by the simulator.

A device that nobody waits for may add time for nothing, and of two choices that add as much the one
on the layers that a long microbatch skips is better. Where there are few combinations all are
simulated; else one device after the other takes what is best beside the others, until none gains.
"""

import itertools
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dataservice.planning.layout.recompute_need import Need
from dataservice.planning.layout.recompute_search import DeviceChoices
from dataservice.planning.layout.stage_times import StageTimes, chunk_durations
from dataservice.planning.pipeline_parallel.simulator import Program, makespan, operation_offsets

# Operations simulated at most. Sets the time of a search, not its clock.
_OPERATIONS = 2_000_000


class StepSearch:
    """Simulated seconds of combinations of the devices' choices."""

    def __init__(
        self,
        *,
        need: Need,
        times: StageTimes,
        bounds: NDArray[np.int64],
        program: Program,
        devices: list[DeviceChoices],
    ) -> None:
        self.need, self.devices, self.bounds, self.program = need, devices, bounds, program
        self.times = times
        count, chunks = len(times.forward), bounds.size - 1
        self._free = np.empty(2 * count * chunks)
        chunk_durations(times, bounds, self._free)
        self._offsets = operation_offsets(program, count, chunks)
        self._order = np.arange(count)
        self._ends = np.zeros(program.kind.size + 1)
        # Of each device: its choices that no other is as good as, and what they add.
        self.choices: list[list[int]] = []
        self._added: list[NDArray[np.float64]] = []
        for device in range(len(devices)):
            added = self._added_by(device)
            self.choices.append(_undominated(added))
            self._added.append(added)

    def _added_by(self, device: int) -> NDArray[np.float64]:
        """Seconds added to every backward, float64[choice of the device, microbatch, chunk]."""
        counts = self.devices[device].counts.astype(np.float64)
        added = np.zeros((len(counts), len(self._order), self.bounds.size - 1))
        for group, layers in enumerate(self.need.members[device]):
            chunk = int(np.searchsorted(self.bounds, layers[0], side="right")) - 1
            each = self.need.added_s[:, layers[0]]  # [microbatch, choice]
            added[:, :, chunk] += (counts[:, None, group] * each).sum(axis=2)
        return added

    def seconds(self, picked: Sequence[int] | None) -> float:
        """The step under one choice of each device; None: nothing is recomputed."""
        durations = self._free.copy()
        if picked is not None:
            backward = durations[durations.size // 2 :]
            for added, choice in zip(self._added, picked, strict=True):
                backward += added[choice].reshape(-1)
        return self._simulate(durations)

    def _simulate(self, durations: NDArray[np.float64]) -> float:
        chunks = self.bounds.size - 1
        return float(
            makespan(durations, self._offsets, self._order, chunks, self.program, self._ends)
        )

    def step_bound(self) -> float:
        """What no choice that fits goes below.

        With equal microbatches and one chunk a device, the step in which each device adds its
        least. Else the step that recomputes nothing, or what the busiest device works beside its
        least, and waits for at both ends.
        """
        least = np.array([found.bound for found in self.devices])
        count, chunks, stages = len(self._order), self.bounds.size - 1, len(self.devices)
        durations = self._free.reshape(2, count, chunks).copy()
        if self.need.equal_microbatches and chunks == stages:
            durations[1] += least
            return self._simulate(durations.reshape(-1))
        first = self.bounds[:stages]
        times = self.times
        fill = times.forward[0, first] + times.send[0, first] + times.backward[-1, first]
        busy = durations.sum(axis=(0, 1)).reshape(-1, stages).sum(axis=0)
        return max(self.seconds(None), float((busy + fill + count * least).max()))


def _undominated(added: NDArray[np.float64]) -> list[int]:
    """Choices that no earlier one, which adds no more in all, is as good as everywhere."""
    kept: list[int] = []
    for k, table in enumerate(added):
        if not any((added[other] <= table).all() for other in kept):
            kept.append(k)
    return kept


def best_combination(search: StepSearch) -> tuple[list[int], float]:
    """One choice of each device, and the step's seconds: never longer than with the least added to
    each."""
    trials = _OPERATIONS // search.program.kind.size
    best = [choices[0] for choices in search.choices]
    value = search.seconds(best)
    if math.prod(len(choices) for choices in search.choices) <= trials:
        for every in itertools.product(*search.choices):
            seconds = search.seconds(every)
            if seconds < value:
                best, value = list(every), seconds
        return best, value
    gained = True
    while gained:
        gained = False
        for device, choices in enumerate(search.choices):
            for choice in choices:
                trials -= 1
                if trials < 0:
                    return best, value
                picked = [*best[:device], choice, *best[device + 1 :]]
                seconds = search.seconds(picked)
                if seconds < value:
                    best, value, gained = picked, seconds, True
    return best, value
