"""The parts of a bubble schedule against everything that could be tried."""

import itertools

import numpy as np
import pytest

from dataservice.planning.layout.bubble_placement import (
    Gaps,
    Stream,
    gaps_without,
    place,
    reversed_gaps,
    reversed_stream,
)
from dataservice.planning.layout.bubble_search import PLACEMENTS, SplitSearch
from dataservice.planning.layout.bubble_split import (
    Problem,
    ends_by,
    is_feasible,
    least_before,
    run_pipeline,
)
from dataservice.planning.layout.bubble_timeline import timelines_of
from dataservice.planning.pipeline_parallel.simulator import simulate_1f1b
from tests.planning.layout.bubble_cases import backbone, uniform

FREE = np.inf


def random_gaps(rng, hops, until):
    """Free times of both resources of each hop, everything free before 0 and after `until`."""
    starts, ends, bounds = [], [], np.empty((hops, 2, 2), np.int64)
    for hop in range(hops):
        for resource in range(2):
            cuts = np.sort(rng.uniform(0, until, 2 * int(rng.integers(1, 12))))
            starts.append(np.concatenate([[-FREE], cuts[1::2]]))
            ends.append(np.concatenate([cuts[::2], [FREE]]))
            first = sum(map(len, starts[:-1]))
            bounds[hop, resource] = first, first + len(starts[-1])
    return Gaps(np.concatenate(starts), np.concatenate(ends), bounds)


def random_stream(rng, hops, encoders, kernels, scale):
    sizes = rng.integers(0, encoders * kernels + 1, hops)
    sizes[0] = max(1, sizes[0])
    total = int(sizes.sum())
    return Stream(
        rng.uniform(0.1, 1.0, total) * scale,
        rng.integers(0, 2, total),
        rng.integers(0, encoders, total),
        np.concatenate([[0], np.cumsum(sizes)]),
        rng.choice([0.0, 0.1], encoders),
    )


def random_problem(seed, *, trained, blocks, slices, microbatches):
    rng = np.random.default_rng(seed)
    hops = int(rng.integers(1, 3))
    until = 20.0
    scale = rng.choice([0.3, 1.0])
    forward = random_stream(rng, hops, 1, 3, scale)
    backward = random_stream(rng, hops, 1, 3 if trained else 0, scale)
    if not trained:
        none = np.zeros(0)
        whole = none.astype(np.int64)
        backward = Stream(none, whole, whole, np.zeros(hops + 1, np.int64), np.zeros(1))
    need_s = np.sort(rng.uniform(0, 0.6 * until, microbatches))
    return Problem(
        forward=forward,
        backward=backward,
        gaps=tuple(random_gaps(rng, hops, until) for _ in range(blocks)),
        slices=slices,
        need_s=need_s,
        gradient_s=np.sort(need_s + rng.uniform(0.2 * until, 0.4 * until, microbatches)),
        step_s=until,
        kept=np.zeros(hops),
        room=np.full((blocks, hops), np.inf),
    )


def all_splits(problem):
    return itertools.product(range(problem.pipelines), repeat=problem.microbatches)


def members(owner, pipeline):
    return tuple(j for j, own in enumerate(owner) if own == pipeline)


def all_runs(problem):
    """Every pipeline with every set of microbatches."""
    everyone = range(problem.microbatches)
    sets = [c for k in range(len(everyone) + 1) for c in itertools.combinations(everyone, k)]
    return {
        (i, chosen): run_pipeline(problem, i, chosen)
        for i in range(problem.pipelines)
        for chosen in sets
    }


@pytest.mark.parametrize("seed", range(40))
def test_counting_what_pipelines_can_finish_finds_what_the_best_of_all_splits_needs(seed):
    shape = ((2, 1, 6), (1, 2, 6), (3, 1, 5), (2, 2, 4))[seed % 4]
    blocks, slices, microbatches = shape
    problem = random_problem(
        seed, trained=False, blocks=blocks, slices=slices, microbatches=microbatches
    )
    runs = all_runs(problem)
    best = min(
        max(runs[i, members(owner, i)].before_s for i in range(problem.pipelines))
        for owner in all_splits(problem)
    )
    found, owner = least_before(problem)
    assert found == pytest.approx(best, abs=1e-4)
    needed = max(runs[i, members(owner, i)].before_s for i in range(problem.pipelines))
    assert needed <= found + 1e-9, "and its matching is a split that does it"


@pytest.mark.parametrize("seed", range(20))
def test_forwards_are_feasible_exactly_where_the_counts_say_so(seed):
    problem = random_problem(seed, trained=False, blocks=2, slices=2, microbatches=5)
    for before_s in (0.0, 0.5, 2.0, 8.0):
        ends, owners = ends_by(problem, before_s)
        counts = [
            sum(int(((owners == i) & (ends <= need)).sum()) for i in range(problem.pipelines))
            for need in problem.need_s
        ]  # Σ n_i(F_j)
        by_count = all(count >= j for j, count in enumerate(counts, start=1))
        assert is_feasible(problem, ends) == by_count


@pytest.mark.parametrize("seed", range(40))
def test_the_search_finds_the_best_of_all_splits_with_backward_passes(seed):
    few = seed % 8 < 4
    of_few, of_more = (
        ((2, 1, 6), (1, 2, 6), (3, 1, 5), (2, 2, 4)),
        ((2, 1, 10), (3, 1, 6), (2, 2, 5)),
    )
    blocks, slices, microbatches = of_few[seed % 4] if few else of_more[seed % 3]
    problem = random_problem(
        seed, trained=True, blocks=blocks, slices=slices, microbatches=microbatches
    )
    runs = all_runs(problem)

    def outside(owner):
        chosen = [runs[i, members(owner, i)] for i in range(problem.pipelines)]
        return max(run.before_s for run in chosen) + max(run.after_s for run in chosen)

    best = min(map(outside, all_splits(problem)))
    search = SplitSearch(problem)
    found = search.best().outside_s
    assert found <= best + (1e-9 if few else 0.005 * problem.step_s)
    assert few or search.placed <= PLACEMENTS + 2 * problem.pipelines, "work is limited"


@pytest.mark.parametrize("seed", range(30))
def test_kernels_start_as_early_as_order_and_gaps_allow(seed):
    rng = np.random.default_rng(seed)
    gaps = random_gaps(rng, 2, 20.0)
    stream = random_stream(rng, 2, 2, 3, 1.0)
    releases = np.sort(rng.uniform(-1, 10, 4))
    starts, ends, done = place(stream, gaps, releases, np.inf, True)
    assert done == 4
    clock = np.full((2, 2), -np.inf)
    for j in range(4):
        ready = releases[j] + stream.transfer_s
        for hop in range(2):
            kernels = range(*stream.offsets[hop : hop + 2])
            for u in kernels:
                number, resource = stream.encoder[u], stream.resource[u]
                now = max(clock[hop, resource], ready[number])
                first, last = gaps.bounds[hop, resource]
                fits = [
                    max(now, a)
                    for a, b in zip(gaps.start_s[first:last], gaps.end_s[first:last], strict=True)
                    if max(now, a) + stream.seconds[u] <= b
                ]
                assert starts[j, u] == min(fits)
                clock[hop, resource] = ready[number] = min(fits) + stream.seconds[u]
            for number in {stream.encoder[u] for u in kernels}:
                ready[number] += stream.transfer_s[number]
        assert ends[j] == pytest.approx(max(ready - stream.transfer_s))


@pytest.mark.parametrize("seed", range(20))
def test_what_is_left_of_gaps_is_what_was_there_without_the_kernels(seed):
    rng = np.random.default_rng(seed)
    gaps = random_gaps(rng, 2, 20.0)
    stream = random_stream(rng, 2, 1, 4, 1.0)
    starts, _, _ = place(stream, gaps, np.array([-1.0, 0.0, 3.0]), np.inf, True)
    left = gaps_without(gaps, stream, starts)
    ends = starts + stream.seconds
    for hop, resource in itertools.product(range(2), range(2)):
        low, high = stream.offsets[hop : hop + 2]
        own = np.arange(low, high)[stream.resource[low:high] == resource]
        for moment in rng.uniform(-5, 25, 300):
            used = ((starts[:, own] <= moment) & (moment < ends[:, own])).any()
            free, still_free = (
                any(
                    a <= moment < b
                    for a, b in zip(
                        g.start_s[slice(*g.bounds[hop, resource])],
                        g.end_s[slice(*g.bounds[hop, resource])],
                        strict=True,
                    )
                )
                for g in (gaps, left)
            )
            assert still_free == (free and not used)


def test_time_reversed_twice_is_time():
    rng = np.random.default_rng(0)
    gaps, stream = random_gaps(rng, 3, 9.0), random_stream(rng, 3, 2, 3, 1.0)
    for before, after in zip(gaps, reversed_gaps(reversed_gaps(gaps)), strict=True):
        assert (before == after).all()
    for before, after in zip(stream, reversed_stream(reversed_stream(stream)), strict=True):
        assert (before == after).all()


@pytest.mark.parametrize("virtual", [1, 2, 3])
@pytest.mark.parametrize("seed", range(4))
def test_deferred_forwards_cost_the_backbone_nothing(virtual, seed):
    rng = np.random.default_rng(seed)
    asked = backbone(rng, stages=4, virtual=virtual, ranks=1, microbatches=8, gather_s=2.0)
    forward, backward = (
        np.tile(times.seconds.sum(axis=1), (8, 1)) for times in (asked.forward, asked.backward)
    )
    alone = simulate_1f1b(forward, backward, virtual_stages=virtual)
    usual = timelines_of(asked)[-1]
    assert usual.step_s == pytest.approx(alone.makespan_s + 2.0)
    assert usual.gradient_s - 2.0 == pytest.approx(alone.end_s[:, 0, 1])
    assert (usual.need_s >= alone.start_s[:, 0, 0] + 2.0 - 1e-12).all()
    for other in timelines_of(asked):
        assert other.step_s <= usual.step_s + 1e-6


def test_the_last_four_of_eight_microbatches_are_needed_later_as_in_figure_12():
    asked = backbone(np.random.default_rng(0), stages=4, virtual=2, ranks=1, microbatches=8)
    even = uniform(8, [1.0], [False])
    asked = type(asked)(
        forward=even, backward=uniform(8, [2.0], [False]), microbatches=8,
        pipeline_parallel=4, virtual_stages=2,
    )  # fmt: skip
    alone = simulate_1f1b(np.ones((8, 8)), np.full((8, 8), 2.0), virtual_stages=2)
    first = alone.start_s[:, 0, 0]
    need_s = timelines_of(asked)[0].need_s
    assert (need_s[:4] == first[:4]).all()
    assert (need_s[4:] > first[4:]).all()
    assert timelines_of(asked)[0].step_s == alone.makespan_s
