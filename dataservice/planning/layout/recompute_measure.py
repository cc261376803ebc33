"""OmniBal's four measured steps (§4.3) over a callback: what layers keep is told by a few runs.

1. Every layer recomputes: what each device has left, M_r.
2. For each kind of layer, a few on every device that has them do not: what is left now, M'_r.
3. What fell, by layer that kept its activations: M_v, M_t, of each device and kind.
4. The best choice by those estimates is run. A device on which it does not fit recomputes one more
   layer, the one that adds least for what it saves, until it fits.

Step 4 is exact where the paper estimates, and ends: each run that fails takes a layer, and with all
of them recomputed step 1 has run.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dataservice.core.errors import PlanningError
from dataservice.planning.layout.recompute_search import LayerGroups, choose_counts
from dataservice.planning.layout.stage_times import at_least, check_bounds

NONE, FULL = 0, 2

MeasurePeak = Callable[[NDArray[np.int8]], ArrayLike]
"""Runs a few iterations with that choice, int8[layer] of 0 (keeps everything) and 2 (recomputes),
and returns the peak bytes of each device, [p]: infinite where it ran out of memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RecomputeTrial:
    """One run: which of the four steps it belongs to, why it was made, what was tried, and the peak
    bytes of each device, float64[p]."""

    step: int
    why: str
    choice: NDArray[np.int8]
    peak_bytes: NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredRecompute:
    """A choice that ran, int8[layer], and all runs on the way to it.

    `peak_bytes` float64[p] as last measured; `saved_bytes` float64[p, kind]: what one layer's
    recomputation saves on a device, as estimated (0: none of that kind there); `added_s`
    float64[p]: seconds that the choice adds to each device.
    """

    choice: NDArray[np.int8]
    peak_bytes: NDArray[np.float64]
    saved_bytes: NDArray[np.float64]
    added_s: NDArray[np.float64]
    trials: tuple[RecomputeTrial, ...]


def measure_recompute(
    measure: MeasurePeak,
    *,
    kind_of: ArrayLike,
    added_s: ArrayLike,
    bounds: ArrayLike,
    stages: int,
    memory_bytes: float,
    virtual_stages: int = 1,
    trial_layers: int = 1,
    max_trials: int = 50,
) -> MeasuredRecompute:
    """Find by a few runs which layers recompute in full, and which need not.

    `kind_of` [layer] numbers kinds from 0, encoder's and decoder's; `added_s` [kind]: what
    recomputing one such layer adds, its forward. `trial_layers` of each kind keep everything in
    step 2. After `max_trials` runs whatever still fails recomputes all, as in step 1.
    Raises PlanningError on bad input, and where recomputing everything does not fit.
    """
    kinds = np.asarray(kind_of, dtype=np.int64)
    seconds = np.asarray(added_s, dtype=np.float64)
    cuts = check_bounds(bounds, kinds.size, stages, virtual_stages)
    at_least("trial_layers", trial_layers, 1)
    at_least("max_trials", max_trials, 1)
    if kinds.min() < 0 or seconds.shape != (kinds.max() + 1,) or not (seconds >= 0).all():
        raise PlanningError(
            f"added_s is {seconds.tolist()} for kinds {kinds.min()}..{kinds.max()}; give seconds ≥ "
            "0 of each kind, numbered from 0"
        )
    chunk = np.searchsorted(cuts, np.arange(kinds.size), side="right") - 1
    driver = _Driver(
        measure=measure,
        kinds=kinds,
        seconds=seconds,
        device_of=chunk % stages,
        stages=stages,
        memory_bytes=float(memory_bytes),
    )
    all_recompute = driver.run(1, "every layer recomputes", driver.keeping_none())
    if not (all_recompute <= driver.memory_bytes).all():
        raise _nothing_fits(all_recompute, driver.memory_bytes)
    saved = driver.savings(all_recompute, trial_layers)
    kept = driver.best_by(saved, driver.memory_bytes - all_recompute)
    return driver.settle(kept, saved, all_recompute, max_trials)


class _Driver:
    """The runs and their record. `kept` int64[device, kind]: layers that keep everything."""

    def __init__(
        self,
        *,
        measure: MeasurePeak,
        kinds: NDArray[np.int64],
        seconds: NDArray[np.float64],
        device_of: NDArray[np.int64],
        stages: int,
        memory_bytes: float,
    ) -> None:
        self._measure, self._kinds, self._device_of = measure, kinds, device_of
        self._seconds, self.memory_bytes = seconds, memory_bytes
        self._has = np.zeros((stages, seconds.size), np.int64)
        np.add.at(self._has, (device_of, kinds), 1)
        self._trials: list[RecomputeTrial] = []

    def keeping_none(self) -> NDArray[np.int64]:
        return np.zeros_like(self._has)

    def choice(self, kept: NDArray[np.int64]) -> NDArray[np.int8]:
        """The last layers of a kind on a device keep everything: their backward comes first."""
        choice = np.full(self._kinds.size, FULL, np.int8)
        for device, kind in np.argwhere(kept > 0):
            mine = np.flatnonzero((self._device_of == device) & (self._kinds == kind))
            choice[mine[mine.size - kept[device, kind] :]] = NONE
        return choice

    def run(self, step: int, why: str, kept: NDArray[np.int64]) -> NDArray[np.float64]:
        choice = self.choice(kept)
        peak = np.asarray(self._measure(choice.copy()), dtype=np.float64)
        if peak.shape != (len(self._has),) or not (peak >= 0).all():
            raise PlanningError(
                f"measure gave {peak.tolist()}; it returns the peak bytes of each of "
                f"{len(self._has)} devices, infinite where memory ran out"
            )
        self._trials.append(RecomputeTrial(step=step, why=why, choice=choice, peak_bytes=peak))
        return peak

    def savings(self, before: NDArray[np.float64], layers: int) -> NDArray[np.float64]:
        """Steps 2 and 3: bytes that one layer's recomputation saves, float64[device, kind]."""
        saved = np.zeros(self._has.shape)
        for kind in range(self._seconds.size):
            kept = self.keeping_none()
            kept[:, kind] = np.minimum(self._has[:, kind], layers)
            peak = self.run(2, f"{layers} of kind {kind} keep everything on each device", kept)
            tried = kept[:, kind] > 0
            # A device that ran out of memory is not asked to keep any of that kind.
            rose = np.maximum(peak - before, 0.0)
            saved[tried, kind] = rose[tried] / kept[tried, kind]
        return saved

    def best_by(self, saved: NDArray[np.float64], room: NDArray[np.float64]) -> NDArray[np.int64]:
        """Step 4: layers that may keep everything, exactly, if the estimates are right."""
        kept = self.keeping_none()
        for device, has in enumerate(self._has):
            held = np.where(np.isfinite(saved[device]), saved[device], room[device] + 1.0)
            kinds = np.flatnonzero(has)
            used = np.zeros((1, kinds.size, 3))
            used[0, :, NONE] = held[kinds]
            cost = np.zeros((kinds.size, 3))
            cost[:, 1:] = self._seconds[kinds, None]
            groups = LayerGroups(has[kinds], used, np.zeros_like(cost), cost)
            kept[device, kinds] = choose_counts(groups, float(room[device]), 1).counts[0][:, NONE]
        return kept

    def settle(
        self,
        kept: NDArray[np.int64],
        saved: NDArray[np.float64],
        all_recompute: NDArray[np.float64],
        max_trials: int,
    ) -> MeasuredRecompute:
        """Step 4: run it; where it does not fit, recompute one more layer."""
        why = "the best choice by the estimates"
        peak = all_recompute
        while kept.any():
            if len(self._trials) >= max_trials:
                failed = ~(peak <= self.memory_bytes)
                kept[failed] = 0
            peak = self.run(4, why, kept)
            over = np.flatnonzero(~(peak <= self.memory_bytes))
            if not over.size:
                break
            for device in over:
                # Least added for what it saves; of no known saving, least added.
                worth = self._seconds / np.maximum(saved[device], 1.0)
                kind = np.where(kept[device] > 0, worth, np.inf).argmin()
                kept[device, kind] = max(0, kept[device, kind] - 1)
            why = f"devices {over.tolist()} ran out of memory: one layer more recomputes there"
        else:
            peak = all_recompute
        return MeasuredRecompute(
            choice=self.choice(kept),
            peak_bytes=peak,
            saved_bytes=np.where(np.isfinite(saved), saved, np.inf),
            added_s=(self._has - kept) @ self._seconds,
            trials=tuple(self._trials),
        )


def _nothing_fits(peak: NDArray[np.float64], memory: float) -> PlanningError:
    device = int(peak.argmax())
    over = peak[device] - memory
    how = "ran out of memory" if np.isinf(over) else f"took {over:,.0f} bytes too much"
    return PlanningError(
        f"stage {device} {how} of its {memory:,.0f} with every layer recomputed: give it fewer "
        "layers or shorter microbatches, or split its weights further"
    )
