"""Phases that are sliced where a replica is full: every unit once, few pieces, near the bound."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataservice.core.layout import locate, padded_tokens
from dataservice.planning import CostModel, PhaseCost, PlanOptions, Topology, compose_step
from dataservice.planning.kernels.integers import ring_member
from dataservice.planning.nodes.phases import phase_bounds
from dataservice.planning.nodes.slices import slice_phases
from dataservice.planning.pieces import Cut, by_row
from dataservice.planning.stages.dispatch import encoder_items
from tests.planning.step_samples import step_samples

UNIT_S, FIXED_S = 0.01, 0.001


def sliced(
    units: list[int],
    home: list[int],
    phase: list[int],
    ranks: int,
    node: int,
    rooms: np.ndarray | None = None,
):
    """Items of so many units, all alike, of a byte each, and what `slice_phases` makes of them."""
    held = np.array(units, np.int32)
    costs = held * UNIT_S + FIXED_S
    phases = 2 * (max(phase) + 1)
    items = np.array(phase, np.int64), costs, np.full(held.size, UNIT_S + FIXED_S), held * 7, held
    bounds = phase_bounds(*(items[i] for i in (0, 1, 3, 4, 2)), phases, ranks)
    slices = slice_phases(
        *items,
        np.array(home, np.int32) % ranks,
        bounds=bounds,
        ranks=ranks,
        ranks_per_node=node,
        unit_bytes=None if rooms is None else np.ones(held.size, np.int64),
        rooms=rooms,
    )
    return slices, bounds


items = st.lists(
    st.tuples(
        st.one_of(st.integers(1, 8), st.integers(1, 400)), st.integers(0, 99), st.integers(0, 2)
    ),
    min_size=1,
    max_size=40,
)


@settings(deadline=None, max_examples=80)
@given(items, st.integers(1, 11), st.sampled_from([1, 3, 4]))
def test_slices_hold_every_unit_once_and_few_items_are_cut(items, ranks, node):
    units, home, phase = (list(column) for column in zip(*items, strict=True))
    slices, bounds = sliced(units, home, phase, ranks, node)
    cut, rank = by_row(slices.cut, slices.rank, len(units))
    begins = np.searchsorted(cut.row, np.arange(len(units)))
    assert (cut.first[begins] == 0).all()
    inside = np.flatnonzero(np.diff(cut.row) == 0)
    assert (cut.first[inside + 1] == cut.first[inside] + cut.held[inside]).all()
    assert np.bincount(cut.row, weights=cut.held).tolist() == units
    assert cut.held.min() > 0
    assert rank.min() >= 0
    assert rank.max() < ranks
    assert cut.row.size <= len(units) + ranks * len(set(phase)), "cut only where a rank is full"
    loads = np.zeros((bounds.size, ranks))
    np.add.at(loads, (np.array(phase)[cut.row], rank), cut.held * UNIT_S + FIXED_S)
    assert loads.max(axis=1) == pytest.approx(slices.slowest_s)
    assert (bounds <= slices.slowest_s * (1 + 1e-9)).all()


@settings(deadline=None, max_examples=80)
@given(
    items, st.integers(1, 11), st.sampled_from([1, 3, 4]), st.floats(0.7, 2.0), st.integers(0, 9)
)
def test_phases_of_a_wave_share_the_bytes_that_ranks_have_left(items, ranks, node, part, seed):
    """Whatever has pieces has all its units, and no rank more than its room; a phase that finds
    none has no pieces."""
    units, home, phase = (list(column) for column in zip(*items, strict=True))
    waves = max(phase) + 1  # of two phases each
    share = np.random.default_rng(seed).dirichlet(np.full(ranks, 5.0), waves)
    rooms = np.ceil(share * sum(units) * part).astype(np.int64)
    slices, _ = sliced(units, home, phase, ranks, node, rooms)
    row, _, held = slices.cut
    of_row = np.bincount(row, weights=held, minlength=len(units))
    assert (of_row == np.where(np.isfinite(slices.slowest_s[phase]), units, 0)).all()
    kept = np.zeros_like(rooms)
    np.add.at(kept, (np.array(phase)[row] // 2, slices.rank), held)
    assert (kept <= rooms).all()


def test_ranks_with_little_room_take_fewer_units_and_the_others_more():
    rooms = np.array([[10, 90, 90, 90]])
    slices, _ = sliced([120, 120], [0, 1], [0, 0], 4, 4, rooms)
    held = np.bincount(slices.rank, weights=slices.cut.held, minlength=4)
    assert held.sum() == 240
    assert held[0] == 10
    assert held.max() <= 78
    full, _ = sliced([120, 120], [0, 1], [0, 0], 4, 4, rooms - 15)
    assert full.slowest_s[0] == np.inf
    assert full.cut.row.size == 0


def test_long_clips_end_within_a_percent_and_a_piece_of_the_bound():
    units = np.random.default_rng(0).integers(10, 400, 60).tolist()
    slices, bounds = sliced(units, list(range(60)), [0] * 60, 64, 8)
    assert slices.slowest_s[0] <= bounds[0] * 1.01 + 2 * FIXED_S


def test_a_clip_with_room_in_its_node_stays_in_it():
    slices, _ = sliced([40, 40], [1, 5], [0, 0], 8, 4)
    assert (slices.rank // 4 == slices.cut.row).all()


def test_pieces_are_sorted_by_row_and_by_first_unit():
    cut = Cut(
        np.array([1, 0, 1, 0, 2]), np.array([3, 2, 0, 0, 0], np.int32), np.full(5, 2, np.int32)
    )
    by, replica = by_row(cut, np.arange(5, dtype=np.int32), 3)
    assert by.row.tolist() == [0, 0, 1, 1, 2]
    assert by.first.tolist() == [0, 2, 0, 3, 0]
    assert replica.tolist() == [3, 1, 2, 0, 4]


@settings(deadline=None)
@given(st.integers(1, 5000), st.integers(1, 40), st.data())
def test_the_member_of_a_ring_that_kernels_see_is_the_one_where_the_token_lies(
    tokens, degree, data
):
    position = data.draw(st.integers(0, tokens - 1))
    padded = padded_tokens(np.array([tokens]), degree)
    member, _ = locate(np.array([position]), padded, np.array([degree]), np.array([0]))
    assert ring_member(position, tokens, degree) == member[0]


@pytest.mark.parametrize("seed", range(4))
def test_items_take_in_a_plan_what_their_cost_says(seed):
    """The formula of `PhaseCost` stands in a kernel too."""
    random = np.random.default_rng(seed)
    vision, audio = (
        PhaseCost(
            linear_s_per_token=random.uniform(0, 1e-3),
            quadratic_s_per_token2=random.uniform(0, 1e-6),
            item_s=random.uniform(0, 1e-2),
        )
        for _ in range(2)
    )
    plan = compose_step(
        step_samples(60, seed, longest=1000),
        step=0,
        topology=Topology(world_size=4),
        options=PlanOptions(memory_tokens=2048),
    )
    units = random.integers(1, 6, len(plan.item_sample)).astype(np.int32)
    items = encoder_items(replace(plan, item_units=units), CostModel(vision=vision, audio=audio))
    for cost, mine in ((vision, plan.item_modality == 0), (audio, plan.item_modality == 1)):
        tokens, held = plan.item_encoder_tokens[mine], units[mine]
        assert items.seconds[mine] == pytest.approx(cost.item_seconds(tokens, held), rel=1e-12)
        one = cost.item_seconds(tokens / held)
        assert items.unit_seconds[mine] == pytest.approx(one, rel=1e-12)
