import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import omnibal
from dataservice.core.errors import PlanningError
from dataservice.planning import partition_stages, simulate_1f1b, time_stages


def every_split(layers, chunks):
    """All ways to cut so many layers into chunks with a layer each."""
    for inner in itertools.combinations(range(1, layers), chunks - 1):
        yield (0, *inner, layers)


def device_seconds(bounds, mean, stages):
    """What each device works on a mean microbatch, added up layer by layer."""
    loads = [0.0] * stages
    for chunk, (first, end) in enumerate(itertools.pairwise(bounds)):
        loads[chunk % stages] += sum(mean[layer] for layer in range(first, end))
    return loads


def step_seconds(bounds, forward, backward, stages, sent=None, returned=None):
    """A split's simulated step, its chunks' times added up layer by layer. `sent` and `returned`
    [layer]: seconds of a transfer after that layer, forward and back."""
    chunks = len(bounds) - 1
    times = np.zeros((2, len(forward), chunks))
    for chunk, (first, end) in enumerate(itertools.pairwise(bounds)):
        for layer in range(first, end):
            times[0, :, chunk] += forward[:, layer]
            times[1, :, chunk] += backward[:, layer]
        if sent is not None and chunk < chunks - 1:
            times[0, :, chunk] += sent[end - 1]
        if returned is not None and chunk > 0:
            times[1, :, chunk] += returned[first - 1]
    return simulate_1f1b(*times, virtual_stages=chunks // stages).makespan_s


def unequal(seed, microbatches, layers):
    """An encoder's layers and a decoder's, whose times follow their own share of a microbatch."""
    rng = np.random.default_rng(seed)
    vision, text = rng.lognormal(0, 0.6, (2, microbatches, 1))
    is_encoder = np.arange(layers) < layers // 2
    kind = np.where(is_encoder, vision, 2 * text) * rng.uniform(0.8, 1.2, layers)
    return kind, 2 * kind


@pytest.mark.parametrize("virtual_stages", [1, 2])
def test_the_anchors_slowest_device_is_the_fastest_of_all_splits(virtual_stages):
    for seed in range(100):
        rng = np.random.default_rng(seed)
        stages = int(rng.integers(1, 4))
        layers = int(rng.integers(stages * virtual_stages, 11))
        forward, backward = rng.lognormal(0, 1, (2, layers))
        found = partition_stages(
            forward, backward, stages=stages, virtual_stages=virtual_stages, microbatches=4
        )
        splits = every_split(layers, stages * virtual_stages)
        best = min(max(device_seconds(split, forward + backward, stages)) for split in splits)
        assert found.anchor.slowest_s == pytest.approx(best)
        assert found.device_bound_s == pytest.approx(best)


@pytest.mark.parametrize("virtual_stages", [1, 2])
def test_with_every_split_in_its_radius_the_step_is_the_shortest_of_all(virtual_stages):
    for seed in range(100):
        rng = np.random.default_rng(seed)
        stages = int(rng.integers(1, 4))
        layers = int(rng.integers(stages * virtual_stages, 10))
        forward, backward = unequal(seed, 6, layers)
        sent, returned = rng.uniform(0, 0.5, (2, layers))
        found = partition_stages(
            forward,
            backward,
            stages=stages,
            virtual_stages=virtual_stages,
            cut_bytes=sent * 100,
            gradient_bytes=returned * 100,
            bytes_per_s=100.0,
            radius=layers,
        )
        best = min(
            step_seconds(
                split, forward, backward, stages, *((sent, returned) if stages > 1 else ())
            )
            for split in every_split(layers, stages * virtual_stages)
        )
        assert found.complete
        assert found.best.step_s == pytest.approx(best)
        assert found.lower_bound_s <= best * (1 + 1e-9)


@settings(deadline=None, max_examples=40)
@given(
    stages=st.integers(1, 6),
    virtual_stages=st.integers(1, 3),
    more=st.integers(0, 40),
    microbatches=st.integers(1, 12),
    radius=st.integers(0, 4),
    seed=st.integers(0, 99),
)
def test_every_split_holds_each_layer_once_and_is_timed_as_the_simulator_times_it(
    stages, virtual_stages, more, microbatches, radius, seed
):
    layers = stages * virtual_stages + more
    forward, backward = unequal(seed, microbatches, layers)
    kept = forward.copy()
    found = partition_stages(
        forward, backward, stages=stages, virtual_stages=virtual_stages, radius=radius, top=5
    )
    assert (forward == kept).all()
    assert 1 <= len(found.splits) <= 5
    assert len({split.layers for split in found.splits}) == len(found.splits)
    mean = (forward + backward).mean(axis=0)
    for split in found.splits:
        assert sum(split.layers) == layers
        assert min(split.layers) >= 1
        assert split.device_s == pytest.approx(device_seconds(split.bounds, mean, stages))
        assert split.step_s == pytest.approx(step_seconds(split.bounds, forward, backward, stages))
        assert split.step_s >= found.lower_bound_s * (1 - 1e-9)
        assert split.slowest_s >= found.device_bound_s * (1 - 1e-9)
    steps = [split.step_s for split in found.splits]
    assert steps == sorted(steps)
    assert found.best.step_s <= found.anchor.step_s


@pytest.mark.parametrize("seed", range(10))
def test_ranked_by_the_metric_the_first_is_the_best_of_all_candidates(seed):
    layers, stages, radius = 12, 3, 2
    forward, backward = unequal(seed, 4, layers)
    sent = np.random.default_rng(seed).uniform(0, 0.2, layers)
    costs = {"cut_bytes": sent, "bytes_per_s": 1.0, "stages": stages}
    found = partition_stages(forward, backward, radius=radius, rank_by="metric", top=4, **costs)
    work = (forward + backward).mean(axis=0)
    share = work.sum() / stages
    judged = []
    for bounds in every_split(layers, stages):
        if np.abs(np.array(bounds) - found.anchor.bounds).max() <= radius:
            loads = np.array(device_seconds(bounds, work, stages))
            variance = ((loads / share - 1) ** 2).mean()
            judged.append(variance + 2 * sum(sent[b - 1] for b in bounds[1:-1]) / share / stages)
    metrics = [split.metric for split in found.splits]
    assert metrics == pytest.approx(sorted(judged)[:4])


def test_a_search_that_cannot_try_all_ends_near_its_bound():
    encoder, decoder = np.full(45, 1.0), np.full(155, 1.7)
    forward = np.concatenate([encoder, decoder])
    found = partition_stages(forward, 2 * forward, stages=16, microbatches=64)
    assert not found.complete
    assert found.gap <= 1e-9
    even = time_stages(
        np.linspace(0, 200, 17).astype(int), forward, 2 * forward, stages=16, microbatches=64
    )
    assert found.best.step_s <= 0.95 * even.step_s


@pytest.mark.parametrize("row", omnibal.TABLE_9, ids=lambda row: row.name)
def test_no_published_split_is_better_on_its_models_layer_times(row):
    layers = omnibal.layers_of(row, 16)
    costs = {
        "stages": len(row.split),
        "cut_bytes": layers.cut_bytes,
        "bytes_per_s": omnibal.LINK_BYTES_PER_S,
    }
    ours = partition_stages(layers.forward_s, layers.backward_s, **costs)
    theirs = time_stages(row.bounds, layers.forward_s, layers.backward_s, **costs)
    assert ours.best.step_s <= theirs.step_s
    assert ours.gap <= 0.02


def test_virtual_stages_are_balanced_by_device_and_not_by_chunk():
    # Two devices of two chunks: the costly layer at the front meets light ones at the back.
    forward = np.array([5.0, 3.0, 1.0, 3.0])
    found = partition_stages(forward, forward, stages=2, virtual_stages=2, microbatches=4)
    assert found.anchor.device_s.tolist() == [12.0, 12.0]


def test_what_a_cut_sends_moves_it():
    forward = np.ones(12)
    wide = np.full(12, 1.0)
    wide[5] = 100.0  # the middle is where the activations are widest
    found = partition_stages(
        forward, forward, stages=2, microbatches=8, cut_bytes=wide, bytes_per_s=10.0
    )
    free = partition_stages(forward, forward, stages=2, microbatches=8)
    assert free.best.layers == (6, 6)
    assert found.best.layers != (6, 6)
    assert found.best.sent_bytes == 1.0


def test_a_measurement_has_the_last_word():
    forward = np.ones(12)
    asked = []

    def measure(split):
        asked.append(split)
        return float(split.bounds[1])

    found = partition_stages(
        forward, forward, stages=3, microbatches=6, radius=1, top=4, measure=measure
    )
    assert len(asked) == len(found.splits) == 4
    assert found.best.measured_s == min(split.bounds[1] for split in asked)


def test_the_same_input_gives_the_same_splits():
    forward, backward = unequal(4, 16, 90)
    runs = [
        partition_stages(forward, backward, stages=8, virtual_stages=2, microbatches=16)
        for _ in range(2)
    ]
    first, second = ([split.layers for split in run.splits] for run in runs)
    assert first == second


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"stages": 0}, "stages is 0"),
        ({"stages": 3, "virtual_stages": 2}, "6 chunks for 4 layers"),
        ({"backward_s": np.ones(3)}, r"\(4,\) and backward_s \(3,\)"),
        ({"forward_s": np.array([1, 1, np.nan, 1])}, "forward_s spans"),
        ({"microbatches": 0}, "microbatches is 0"),
        ({"cut_bytes": np.ones(3)}, "cut_bytes has shape"),
        ({"cut_bytes": -np.ones(4)}, "cut_bytes spans"),
        ({"bytes_per_s": 0.0}, "bytes_per_s is 0"),
        ({"radius": -1}, "radius is -1"),
        ({"top": 0}, "top is 0"),
        ({"rank_by": "luck"}, "luck"),
        ({"measure": lambda split: np.nan}, "measure gave nan"),
    ],
)
def test_bad_input_is_refused_with_its_value(change, words):
    given = {"forward_s": np.ones(4), "backward_s": np.ones(4), "stages": 2} | change
    with pytest.raises(PlanningError, match=words):
        partition_stages(given.pop("forward_s"), given.pop("backward_s"), **given)


def test_bounds_that_leave_a_layer_out_are_refused():
    with pytest.raises(PlanningError, match=r"\[0, 2, 3\]"):
        time_stages([0, 2, 3], np.ones(4), np.ones(4), stages=2)
