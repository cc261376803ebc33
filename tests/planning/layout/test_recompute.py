import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataservice.core.errors import PlanningError
from dataservice.planning import choose_recompute, measure_recompute, simulate_1f1b

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


@settings(deadline=None, max_examples=60)
@given(
    stages=st.integers(1, 4),
    virtual_stages=st.integers(1, 3),
    more=st.integers(0, 12),
    microbatches=st.integers(1, 9),
    equal=st.booleans(),
    share=st.floats(0.1, 1.1),
    limited=st.booleans(),
    objective=st.sampled_from(["step", "stage"]),
    seed=st.integers(0, 99),
)
def test_no_device_ever_holds_more_than_its_memory(
    stages, virtual_stages, more, microbatches, equal, share, limited, objective, seed
):
    chunks = stages * virtual_stages
    layers = chunks + more
    forward, backward, kept, working, added = made_up(seed, layers, microbatches, 3, equal)
    bounds = even_bounds(layers, chunks)
    limit = max(1, stages - 1) if limited and virtual_stages == 1 else None
    replay = Replay(forward, backward, bounds, stages, limit)
    everything = replay.held_at_most(np.full(layers, NONE), kept, working)
    memory, fixed = np.ceil(share * everything) + 500, 500
    arguments = {
        "bounds": bounds,
        "stages": stages,
        "virtual_stages": virtual_stages,
        "working_bytes": working,
        "memory_bytes": memory,
        "fixed_bytes": fixed,
        "activation_limit": limit,
        "objective": objective,
    }
    refused = ""
    try:
        found = choose_recompute(forward, backward, kept, added, **arguments)
    except PlanningError as error:
        refused = str(error)
    if refused:
        least = replay.held_at_most(np.full(layers, FULL), kept, working)
        assert "too much" in refused
        assert share < 1
        assert (least + working.max() + fixed > memory).any()
        return
    held = replay.held_at_most(found.choice, kept, working)
    assert (held + fixed <= memory).all()
    assert (held + fixed <= found.peak_bytes).all()
    assert (found.peak_bytes <= memory).all()
    assert found.free_step_s <= found.step_s * (1 + 1e-9)
    assert found.step_bound_s <= found.step_s
    assert (found.added_bound_s <= found.added_s * (1 + 1e-9)).all()
    on = (np.searchsorted(bounds, np.arange(layers), side="right") - 1) % stages
    mean = added.mean(axis=0)[np.arange(layers), found.choice]
    assert found.added_s == pytest.approx(np.bincount(on, mean, minlength=stages))
    if share >= 1:
        assert (found.choice == NONE).all() or (mean[found.choice > 0] == 0).all()


def step_of(choice, forward, backward, added, bounds, stages):
    layers = np.arange(len(choice))
    slower = backward + added[:, layers, choice]
    chunks = len(bounds) - 1
    times = np.zeros((2, len(forward), chunks))
    for chunk, (first, end) in enumerate(itertools.pairwise(bounds)):
        times[0, :, chunk] = forward[:, first:end].sum(axis=1)
        times[1, :, chunk] = slower[:, first:end].sum(axis=1)
    return simulate_1f1b(*times, virtual_stages=chunks // stages).makespan_s


@pytest.mark.parametrize("virtual_stages", [1, 2])
@pytest.mark.parametrize("equal", [True, False])
def test_the_step_is_the_shortest_that_any_choice_that_fits_makes(equal, virtual_stages):
    over = []
    for seed in range(12):
        forward, backward, kept, working, added = made_up(seed, 6, 4, 3, equal)
        bounds = even_bounds(6, 2 * virtual_stages)
        replay = Replay(forward, backward, bounds, 2)
        memory = 0.6 * replay.held_at_most(np.full(6, NONE), kept, 0 * working)
        best = np.inf
        for some in every_choice(6):
            choice = np.array(some)
            if (replay.held_at_most(choice, kept, 0 * working) <= memory).all():
                best = min(best, step_of(choice, forward, backward, added, bounds, 2))
        places = {"bounds": bounds, "stages": 2, "virtual_stages": virtual_stages}
        if np.isinf(best):
            continue
        found, by_stage = (
            choose_recompute(
                forward,
                backward,
                kept if not equal else kept[0],
                added if not equal else added[0],
                memory_bytes=memory,
                objective=objective,
                **places,
            )
            for objective in ("step", "stage")
        )
        assert found.step_s == pytest.approx(
            step_of(found.choice, forward, backward, added, bounds, 2)
        )
        assert found.step_bound_s <= best * (1 + 1e-9)
        assert found.step_s <= by_stage.step_s * (1 + 1e-9)
        if equal and virtual_stages == 1:
            assert found.proven
        over.append(found.step_s / best - 1)
    assert len(over) >= 6
    assert max(over) <= 1e-9


def transformer(layers=24, microbatches=16):
    """Equal layers: seconds, and bytes kept with no, selective and full recomputation."""
    forward = np.full(layers, 0.1)
    kept = np.tile([1.2e9, 0.6e9, 0.1e9], (layers, 1)) * 24 / layers
    added = np.tile([0.0, 0.01, 0.1], (layers, 1))
    return {
        "forward_s": forward,
        "backward_s": 2 * forward,
        "kept_bytes": kept,
        "recompute_s": added,
        "bounds": even_bounds(layers, 4),
        "stages": 4,
        "microbatches": microbatches,
        "fixed_bytes": 10e9,
    }


def test_only_the_first_stages_recompute_as_they_hold_most_microbatches():
    found = choose_recompute(**transformer(), memory_bytes=24.4e9)
    assert found.in_flight.tolist() == [4, 3, 2, 1]
    assert found.counts(even_bounds(24, 4)).tolist() == [[0, 6, 0], [2, 4, 0], [6, 0, 0], [6, 0, 0]]
    assert found.proven


def test_what_recomputation_needs_for_a_moment_is_part_of_the_peak():
    free = choose_recompute(**transformer(), memory_bytes=26e9)
    working = np.tile([0.0, 2.0e9, 2.0e9], (24, 1))
    found = choose_recompute(**transformer(), memory_bytes=26e9, working_bytes=working)
    assert found.added_s[0] > free.added_s[0]
    assert (found.peak_bytes <= 26e9).all()


def test_what_does_not_fit_says_where_by_how_much_and_what_would():
    work = transformer()
    with pytest.raises(PlanningError) as caught:
        choose_recompute(**work, memory_bytes=11.4e9)
    words = str(caught.value)
    # With all recomputed, stage 0 keeps four microbatches of 6 layers of 1e8 bytes.
    assert "stage 0" in words
    assert "1,000,000,000 bytes too much" in words
    assert "activation_limit=2" in words
    assert "58% of their tokens" in words
    assert "3 of its 6 layers" in words
    assert choose_recompute(**work, memory_bytes=11.4e9, activation_limit=2)
    work["kept_bytes"] = work["kept_bytes"] * 0.58
    assert choose_recompute(**work, memory_bytes=11.4e9)


def test_fixed_bytes_that_fill_the_memory_ask_for_more_sharding():
    with pytest.raises(PlanningError, match=r"fixed bytes alone.*shard the optimizer"):
        choose_recompute(**transformer(), memory_bytes=9e9)


def test_interleaved_stages_that_do_not_fit_name_a_limit_that_does():
    work = transformer() | {"bounds": even_bounds(24, 8), "virtual_stages": 2}
    with pytest.raises(PlanningError, match="too much") as caught:
        choose_recompute(**work, memory_bytes=12.6e9)
    limit = int(str(caught.value).split("activation_limit=")[1].split(",")[0])
    assert choose_recompute(**work, memory_bytes=12.6e9, activation_limit=limit)


def test_layers_that_all_differ_a_little_are_bounded_closely():
    rng = np.random.default_rng(3)
    work = transformer(layers=96)
    for name in ("kept_bytes", "recompute_s"):
        work[name] = work[name] * rng.uniform(0.98, 1.02, (96, 1))
    found = choose_recompute(**work, memory_bytes=24.4e9)
    assert (found.added_s <= found.added_bound_s + 0.1).all()  # no layer's worth above
    assert found.step_s <= found.step_bound_s * 1.005


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"kept_bytes": np.ones((24, 2))}, r"kept_bytes has shape \(24, 2\)"),
        ({"recompute_s": -np.ones((24, 3))}, "recompute_s spans -1"),
        ({"working_bytes": np.ones(24)}, "working_bytes has shape"),
        ({"memory_bytes": [1e9, 1e9]}, r"memory_bytes has shape \(2,\)"),
        ({"fixed_bytes": np.nan}, "fixed_bytes spans nan"),
        ({"bounds": [0, 24]}, "5 bounds"),
        ({"activation_limit": 0}, "activation_limit is 0"),
        ({"objective": "luck"}, "luck"),
    ],
)
def test_bad_input_is_refused_with_its_value(change, words):
    with pytest.raises(PlanningError, match=words):
        choose_recompute(**(transformer() | {"memory_bytes": 30e9} | change))


class Trainer:
    """Runs a choice and reports the peaks of devices whose layers keep known bytes."""

    def __init__(self, kind_of, device_of, keeps, memory, noise=0.0):
        self.kind_of, self.device_of = np.asarray(kind_of), np.asarray(device_of)
        self.keeps, self.memory, self.noise = np.asarray(keeps, float), memory, noise
        self.asked = []

    def peaks(self, choice):
        """What a run takes: its layers' bytes, and more the more of them keep, as allocators do."""
        layers = np.where(choice == NONE, self.keeps[self.kind_of], 1.0)
        peak = np.bincount(self.device_of, layers)
        return peak * (1 + self.noise * np.bincount(self.device_of, choice == NONE))

    def __call__(self, choice):
        self.asked.append(choice)
        peak = self.peaks(choice)
        return np.where(peak <= self.memory, peak, np.inf)


@pytest.mark.parametrize("noise", [0.0, 0.06])
def test_the_four_measured_steps_end_with_a_choice_that_runs(noise):
    kind_of, bounds = [0] * 6 + [1] * 10, [0, 4, 8, 12, 16]
    trainer = Trainer(kind_of, np.repeat(np.arange(4), 4), [11.0, 7.0], 31.0, noise)
    found = measure_recompute(
        trainer, kind_of=kind_of, added_s=[0.1, 0.2], bounds=bounds, stages=4, memory_bytes=31.0
    )
    assert (trainer.peaks(found.choice) <= 31.0).all()
    assert [trial.step for trial in found.trials][:4] == [1, 2, 2, 4]
    assert all(trial.why for trial in found.trials)
    assert (found.trials[0].choice == FULL).all()
    assert (found.trials[-1].choice == found.choice).all()
    kept = np.bincount(np.repeat(np.arange(4), 4), found.choice == NONE)
    if noise == 0:
        assert len(found.trials) == 4
        assert found.saved_bytes[0, 0] == 10.0
        assert kept.tolist() == [2, 3, 4, 4]
    else:
        assert len(found.trials) > 4
        assert kept.tolist() == [2, 3, 3, 3]


def test_a_kind_that_runs_out_of_memory_alone_is_recomputed():
    trainer = Trainer([0, 0, 1, 1], [0, 0, 0, 0], [90.0, 3.0], 10.0)
    found = measure_recompute(
        trainer, kind_of=[0, 0, 1, 1], added_s=[1, 1], bounds=[0, 4], stages=1, memory_bytes=10.0
    )
    assert found.choice.tolist() == [FULL, FULL, NONE, NONE]
    assert found.added_s.tolist() == [2.0]


def test_a_model_that_does_not_fit_with_everything_recomputed_is_refused():
    trainer = Trainer([0, 0], [0, 1], [9.0], 0.5)
    with pytest.raises(PlanningError, match="stage 0 ran out of memory"):
        measure_recompute(
            trainer, kind_of=[0, 0], added_s=[1], bounds=[0, 1, 2], stages=2, memory_bytes=0.5
        )


def test_measured_steps_stop_after_the_runs_that_are_allowed():
    trainer = Trainer([0] * 20, [0] * 20, [2.0], 30.0, 0.1)
    found = measure_recompute(
        trainer,
        kind_of=[0] * 20,
        added_s=[1],
        bounds=[0, 20],
        stages=1,
        memory_bytes=30.0,
        max_trials=4,
    )
    assert (trainer.peaks(found.choice) <= 30.0).all()
    assert len(found.trials) <= 5
