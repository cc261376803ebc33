import itertools

import numpy as np
import pytest

from dataservice.core.errors import PlanningError
from dataservice.planning import choose_recompute, simulate_1f1b

NONE, SELECTIVE, FULL = range(3)


class Replay:
    """The schedule once more: what each device holds is added up event by event."""

    def __init__(self, forward, backward, bounds, stages, limit=None):
        count, layers = forward.shape
        self.stages, self.chunks = stages, len(bounds) - 1
        self.chunk_of = np.searchsorted(bounds, np.arange(layers), side="right") - 1
        times = np.zeros((2, count, self.chunks))
        for layer, chunk in enumerate(self.chunk_of):
            times[0, :, chunk] += forward[:, layer]
            times[1, :, chunk] += backward[:, layer]
        # Every operation takes some time, so that events have one order.
        ran = simulate_1f1b(
            *(times + 1e-3), virtual_stages=self.chunks // stages, activation_limit=limit
        )
        begins, frees, backs = [], [], []
        for m, chunk in itertools.product(range(count), range(self.chunks)):
            begins.append((ran.start_s[m, chunk, 0], 1, m, chunk))
            backs.append((ran.start_s[m, chunk, 1], 2, m, chunk))
            frees.append((ran.end_s[m, chunk, 1], 0, m, chunk))
        self.events = sorted(begins + frees + backs)

    def held_at_most(self, choice, kept, working):
        """Bytes of each device: a layer's activations stay from the start of its microbatch's
        forward to the end of its backward, in which whatever recomputes needs room besides."""
        layers = np.arange(len(choice))
        by_layer = kept[:, layers, choice]
        of_chunk = np.stack(
            [by_layer[:, self.chunk_of == chunk].sum(axis=1) for chunk in range(self.chunks)]
        )
        moment = [working[layers, choice][self.chunk_of == c].max() for c in range(self.chunks)]
        held, peak = np.zeros(self.stages), np.zeros(self.stages)
        for _, kind, m, chunk in self.events:
            device = chunk % self.stages
            if kind != 2:
                held[device] += of_chunk[chunk, m] * (1 if kind else -1)
            besides = moment[chunk] if kind == 2 else 0
            peak[device] = max(peak[device], held[device] + besides)
        return peak


def made_up(seed, layers, microbatches, kinds=2, equal=True):
    """Layers of a few kinds: seconds, kept and working bytes, and seconds to recompute."""
    rng = np.random.default_rng(seed)
    kind = np.sort(rng.integers(0, kinds, layers))
    forward = rng.integers(1, 9, kinds)[kind] / 8.0
    size = np.ones(microbatches) if equal else rng.integers(1, 4, microbatches).astype(float)
    full_keeps = rng.integers(1, 4, kinds)
    everything = full_keeps + rng.integers(8, 30, kinds)
    some = rng.integers(full_keeps, everything + 1)
    kept = np.stack([everything, some, full_keeps], axis=1)[kind].astype(float)
    working = np.stack([0 * some, everything - some, everything - full_keeps], axis=1)[kind] / 4
    added = np.stack([0 * forward, forward * rng.uniform(0.1, 0.4), forward], axis=1)
    return (
        np.outer(size, forward),
        np.outer(size, 2 * forward),
        size[:, None, None] * kept,
        working,
        size[:, None, None] * added,
    )


def even_bounds(layers, chunks):
    return np.linspace(0, layers, chunks + 1).astype(int)


def every_choice(layers):
    return itertools.product((NONE, SELECTIVE, FULL), repeat=layers)


@pytest.mark.parametrize("equal", [True, False])
@pytest.mark.parametrize("virtual_stages", [1, 2])
def test_each_device_adds_the_least_of_all_choices_that_fit(virtual_stages, equal):
    tried = 0
    for seed in range(50):
        rng = np.random.default_rng(seed)
        stages, layers = 2, int(rng.integers(2 * virtual_stages, 9))
        forward, backward, kept, working, added = made_up(seed, layers, 5, 3, equal)
        bounds = even_bounds(layers, stages * virtual_stages)
        on = (np.searchsorted(bounds, np.arange(layers), side="right") - 1) % stages
        memory = rng.uniform(20, 300)
        best = np.full(stages, np.inf)
        mean = added.mean(axis=0)
        replay = Replay(forward, backward, bounds, stages)
        for device in range(stages):
            mine = np.flatnonzero(on == device)
            for some in every_choice(mine.size):
                choice = np.full(layers, FULL)
                choice[mine] = some
                # Any layer of the device may need its moment when it holds most.
                moment = np.ceil(working)[mine, some].max()
                held = replay.held_at_most(choice, kept, 0 * working)[device]
                if held + moment <= memory:
                    best[device] = min(best[device], mean[mine, some].sum())
        arguments = {
            "bounds": bounds,
            "stages": stages,
            "virtual_stages": virtual_stages,
            "memory_bytes": memory,
            "working_bytes": working,
            "objective": "stage",
        }
        if np.isinf(best).any():
            with pytest.raises(PlanningError, match="too much"):
                choose_recompute(forward, backward, kept, added, **arguments)
            continue
        tried += 1
        found = choose_recompute(forward, backward, kept, added, **arguments)
        assert found.added_s == pytest.approx(best)
        assert found.added_bound_s == pytest.approx(best)
        assert found.proven
    assert tried >= 20
