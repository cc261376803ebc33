"""Gradients under the last backward pass: against a simulation event by event."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataservice.planning.layout.gradients import shown_gradients_s, whole_gradients_s

SECONDS = st.lists(st.sampled_from([0.0, 0.1, 0.5, 1.0, 2.0]), min_size=8, max_size=8)


@settings(max_examples=200)
@given(
    scatter=SECONDS,
    gather=SECONDS,
    forward=SECONDS,
    backward=SECONDS,
    shape=st.sampled_from([(1, 1), (2, 1), (4, 1), (2, 2)]),
)
def test_what_is_shown_is_what_events_one_after_another_leave(
    scatter, gather, forward, backward, shape
):
    stages, virtual = shape
    chunks = stages * virtual
    bounds = np.linspace(0, 8, chunks + 1).astype(np.int64)
    shown = shown_gradients_s(
        np.array(scatter),
        np.array(gather),
        np.array([forward, backward]),
        bounds=bounds,
        stages=stages,
    )
    after = max(scattered(stage, scatter, backward, bounds, stages) for stage in range(stages))
    before = max(gathered(stage, gather, forward, bounds, stages) for stage in range(stages))
    assert shown == pytest.approx(after + before)


def scattered(stage, scatter, backward, bounds, stages):
    """Seconds after the step's last backward pass, which is that of chunk 0."""
    end = float(sum(backward[bounds[0] : bounds[stages]]))  # the last pass through the stages
    clock = float(sum(backward[bounds[stage + 1] : bounds[stages]]))
    link = clock
    for chunk in range(stage + stages, len(bounds) - 1, stages):  # ended before
        link += sum(scatter[bounds[chunk] : bounds[chunk + 1]])
    for layer in reversed(range(bounds[stage], bounds[stage + 1])):
        clock += backward[layer]
        link = max(link, clock) + scatter[layer]
    return max(0.0, link - end)


def gathered(stage, gather, forward, bounds, stages):
    """The longest that a layer of the stage waits for its weights in the first forward passes."""
    link, longest = 0.0, 0.0
    for chunk in range(stage, len(bounds) - 1, stages):
        clock = float(sum(forward[: bounds[chunk]]))
        for layer in range(bounds[chunk], bounds[chunk + 1]):
            link += gather[layer]
            longest = max(longest, link - clock)
            clock += forward[layer]
    return longest


def test_one_rank_sums_nothing():
    assert whole_gradients_s(np.array([5.0]), 1, 10.0).tolist() == [0.0]


def test_gradients_of_the_first_layer_are_never_hidden():
    shown = shown_gradients_s(
        np.full(4, 0.1), np.zeros(4), np.ones((2, 4)), bounds=np.array([0, 4]), stages=1
    )
    assert shown == pytest.approx(0.1)
