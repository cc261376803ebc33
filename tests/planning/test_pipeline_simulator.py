import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataservice.core.errors import PlanningError
from dataservice.core.topology import Topology
from dataservice.planning.pipeline_parallel.simulator import simulate_1f1b


def lists_of_a_device(device, microbatches, stages, chunks, warm_up):
    """Forward and backward lists of Megatron's schedules, written out: those of whole rounds, less
    what is not there."""
    forwards, backwards = [], []
    for first in range(0, microbatches, stages):
        batch = range(first, first + stages)
        forwards += [("F", m, c * stages + device) for c in range(chunks) for m in batch]
        backwards += [("B", m, c * stages + device) for c in reversed(range(chunks)) for m in batch]
    row = forwards[:warm_up]
    rest = forwards[warm_up:]
    for forward in rest:
        row += [forward, backwards.pop(0)]
    return [each for each in row + backwards if each[1] < microbatches]


def by_waiting(forward, backward, stages, chunks):
    """The same pipeline, run by asking every device again and again what it can start."""
    count = forward.shape[0]
    last = stages * chunks - 1
    rows = []
    for device in range(stages):
        ahead = stages - 1 - device
        warm_up = ahead if chunks == 1 else 2 * ahead + (chunks - 1) * stages
        rows.append(lists_of_a_device(device, count, stages, chunks, warm_up))
    ends, clock = {}, [0.0] * stages
    while any(rows):
        for device, row in enumerate(rows):
            if not row:
                continue
            kind, m, c = row[0]
            if kind == "F":
                source = ("F", m, c - 1) if c else None
            else:
                source = ("F", m, c) if c == last else ("B", m, c + 1)
            if source is not None and source not in ends:
                continue
            row.pop(0)
            begin = max(clock[device], ends[source] if source else 0.0)
            clock[device] = begin + (forward if kind == "F" else backward)[m, c]
            ends[kind, m, c] = clock[device]
    return ends


@settings(deadline=None, max_examples=50)
@given(
    stages=st.integers(1, 5),
    chunks=st.integers(1, 3),
    rounds=st.integers(1, 3),
    odd=st.integers(0, 4),
    seed=st.integers(0, 99),
)
def test_every_operation_ends_when_its_device_and_its_input_allow(
    stages, chunks, rounds, odd, seed
):
    count = rounds * stages + odd
    rng = np.random.default_rng(seed)
    forward, backward = rng.lognormal(0, 1, (2, count, stages * chunks))
    times = simulate_1f1b(forward, backward, virtual_stages=chunks)
    ends = by_waiting(forward, backward, stages, chunks)
    for (kind, m, c), end in ends.items():
        assert times.end_s[m, c, "FB".index(kind)] == pytest.approx(end)
    assert times.makespan_s == pytest.approx(max(ends.values()))
    durations = np.stack([forward, backward], axis=2)
    assert times.end_s - times.start_s == pytest.approx(durations)


def test_equal_microbatches_have_the_textbook_bubble():
    forward = np.ones((8, 4))
    times = simulate_1f1b(forward, 2 * forward)
    assert times.makespan_s == (8 + 3) * 3
    assert times.bubble_fraction == pytest.approx(3 / 11)
    assert times.peak_in_flight.tolist() == [4, 3, 2, 1]


def test_virtual_stages_divide_the_bubble():
    forward = np.full((8, 8), 0.5)
    times = simulate_1f1b(forward, 2 * forward, virtual_stages=2)
    assert times.makespan_s == 8 * 3 + 3 * 3 / 2


def test_an_activation_limit_is_kept_and_costs_time():
    forward = np.random.default_rng(0).lognormal(0, 0.3, (12, 4))
    free = simulate_1f1b(forward, forward)
    for limit in (3, 2, 1):
        tight = simulate_1f1b(forward, forward, activation_limit=limit)
        assert tight.peak_in_flight.max() <= limit
        assert tight.makespan_s >= free.makespan_s
    per_stage = simulate_1f1b(forward, forward, activation_limit=[2, 3, 2, 1])
    assert (per_stage.peak_in_flight <= [2, 3, 2, 1]).all()


def test_a_limit_that_would_stop_an_interleaved_pipeline_is_refused():
    forward = np.ones((8, 8))
    with pytest.raises(PlanningError, match="wait for each other"):
        simulate_1f1b(forward, forward, virtual_stages=2, activation_limit=2)


@pytest.mark.parametrize(("stages", "virtual_stages"), [(4, 2), (8, 4), (3, 5), (16, 4)])
def test_microbatches_that_do_not_fill_their_last_round_keep_and_take_no_more_than_whole_ones(
    stages, virtual_stages
):
    topology = Topology(
        world_size=stages,
        ranks_per_replica=stages,
        pipeline_stages=stages,
        virtual_stages=virtual_stages,
    )
    chunks = stages * virtual_stages
    for count in range(1, 3 * stages + 1):
        forward = np.ones((count, chunks))
        times = simulate_1f1b(forward, 2 * forward, virtual_stages=virtual_stages)
        assert np.isfinite(times.end_s).all()
        whole = np.zeros((-(-count // stages) * stages, chunks))
        whole[:count] = 1.0
        padded = simulate_1f1b(whole, 2 * whole, virtual_stages=virtual_stages)
        assert times.makespan_s <= padded.makespan_s
        assert times.peak_in_flight[0] / virtual_stages <= topology.kept_microbatches


def test_a_round_that_is_not_whole_has_as_much_room_as_is_asked_for():
    for count in range(1, 9):
        forward = np.ones((count, 8))
        with pytest.raises(PlanningError, match="raise it, 11 always works"):
            simulate_1f1b(forward, forward, virtual_stages=2, activation_limit=1)
        times = simulate_1f1b(forward, forward, virtual_stages=2, activation_limit=11)
        assert times.peak_in_flight.max() <= 11


def test_an_order_is_the_same_as_reordered_input():
    rng = np.random.default_rng(1)
    forward, backward = rng.random((2, 6, 3))
    order = rng.permutation(6)
    ordered = simulate_1f1b(forward, backward, order=order)
    moved = simulate_1f1b(forward[order], backward[order])
    assert ordered.makespan_s == moved.makespan_s
    assert (ordered.end_s[order] == moved.end_s).all()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"forward_s": np.ones((2, 3)), "backward_s": np.ones((3, 2))}, r"\(2, 3\)"),
        ({"forward_s": np.ones((0, 3)), "backward_s": np.ones((0, 3))}, "at least one"),
        ({"forward_s": -np.ones((1, 1)), "backward_s": np.ones((1, 1))}, "forward_s"),
        ({"forward_s": np.ones((2, 3)), "backward_s": np.ones((2, 3)) * np.nan}, "backward_s"),
        (
            {"forward_s": np.ones((2, 3)), "backward_s": np.ones((2, 3)), "virtual_stages": 2},
            "divide",
        ),
        (
            {"forward_s": np.ones((2, 3)), "backward_s": np.ones((2, 3)), "order": [0, 0]},
            "once",
        ),
        (
            {"forward_s": np.ones((2, 3)), "backward_s": np.ones((2, 3)), "activation_limit": 0},
            "activation_limit is 0",
        ),
    ],
)
def test_bad_pipelines_are_refused(arguments, words):
    with pytest.raises(PlanningError, match=words):
        simulate_1f1b(**arguments)
