import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataservice.core.cost import ContextCost
from dataservice.core.layout import padded_tokens
from dataservice.planning.context import seconds
from dataservice.planning.context.bound import wave_bound
from dataservice.planning.context.cut import cut_waves
from dataservice.planning.context.memory_fit import group_by_memory
from dataservice.planning.context.plan import place_groups
from dataservice.planning.context.units import (
    fitting_degrees,
    least_degrees,
    make_setting,
    make_units,
    plain_units,
)

COST = ContextCost.flexsp_7b()


def setting(ranks, memory, node=None, degrees="any"):
    return make_setting(
        ranks=ranks, memory_tokens=memory, cost=COST, ranks_per_node=node, degrees=degrees
    )


def test_single_coefficients_are_read_in_one_place():
    def readers(folder: Path, pattern: str) -> set[str]:
        return {s.name for s in folder.rglob("*.py") if re.search(pattern, s.read_text())}

    context = Path(seconds.__file__).parent
    assert readers(context, r"(coefficients|cost)\[|_s_per_token") == {"seconds.py"}
    # The other is that of an encoder's item, `units_seconds`.
    assert readers(context.parent, r"coefficients\[") == {"seconds.py", "dispatch.py"}


@settings(deadline=None)
@given(tokens=st.lists(st.integers(1, 5000), min_size=1, max_size=30), memory=st.integers(50, 900))
def test_least_degree_is_the_first_whose_padded_share_fits(tokens, memory):
    machine = setting(512, memory)
    lengths = np.array(tokens)
    for size, least in zip(
        tokens, least_degrees(make_units(lengths, None, COST), machine), strict=True
    ):
        fits = [d for d in range(1, 513) if padded_tokens([size], d)[0] <= memory * d]
        assert least == (fits[0] if fits else 513)


@settings(deadline=None)
@given(
    tokens=st.lists(st.integers(1, 9000), min_size=2, max_size=40),
    ranks=st.integers(9, 200),
    node=st.integers(1, 9),
    ring=st.sampled_from([0.0, 1e-6, 1e-4]),
)
def test_a_bound_is_the_same_in_any_order_of_the_samples(tokens, ranks, node, ring):
    cost = ContextCost(
        attention_s_per_token2=2e-9,
        linear_s_per_token=5e-5,
        group_s=0.02,
        ring_intra_s_per_token=ring / 20,
        ring_inter_s_per_token=ring,
        ring_hop_s=ring,
    )
    machine = make_setting(
        ranks=ranks, memory_tokens=1024, cost=cost, ranks_per_node=node, degrees="any"
    )
    longest_first = np.sort(tokens)[::-1].copy()
    bounds_s = []
    for sizes in (longest_first, longest_first[::-1].copy()):  # the first by degree, not by sample
        units = plain_units(sizes, machine)
        bounds_s.append(wave_bound(units, fitting_degrees(units, machine), machine))
    assert bounds_s[0] == pytest.approx(bounds_s[1], rel=1e-6)


@settings(deadline=None)
@given(tokens=st.lists(st.integers(1, 5000), min_size=1, max_size=60))
def test_best_fit_groups_hold_what_they_are_given(tokens):
    machine = setting(512, 1024)
    units = make_units(tokens, None, COST)
    group_of, degree = group_by_memory(units, least_degrees(units, machine), machine)
    lengths = np.array(tokens)
    for group, width in enumerate(degree):
        inside = padded_tokens(lengths[group_of == group], int(width)).sum()
        assert 0 < inside <= 1024 * width


def test_best_fit_fills_the_tightest_room_first():
    units = make_units([60, 55, 45, 40], None, COST)
    machine = setting(4, 100)
    group_of, degree = group_by_memory(units, least_degrees(units, machine), machine)
    assert group_of.tolist() == [0, 1, 1, 0]
    assert degree.tolist() == [1, 1]


@settings(deadline=None)
@given(
    degrees=st.lists(st.integers(1, 20), min_size=1, max_size=30),
    spare=st.integers(0, 5),
    node=st.integers(1, 9),
)
def test_placed_groups_share_no_rank(degrees, spare, node):
    widths = np.array(degrees)
    ranks = int(widths.sum()) + spare
    placed, offsets, crosses = place_groups(
        widths, np.zeros(widths.size), ranks=ranks, ranks_per_node=node
    )
    assert len(set(placed.tolist())) == widths.sum()
    assert placed.min() >= 0
    assert placed.max() < ranks
    for g in range(widths.size):
        nodes = set((placed[offsets[g] : offsets[g + 1]] // node).tolist())
        assert crosses[g] == (len(nodes) > 1 or widths[g] > node)


def test_groups_stay_inside_nodes_when_they_can():
    widths = np.array([5, 5, 3, 3, 1, 1, 1, 5])
    _, _, crosses = place_groups(widths, np.zeros(8), ranks=24, ranks_per_node=8)
    assert not crosses.any()


def test_what_is_left_of_wide_groups_does_not_take_the_room_of_narrower_ones():
    widths = np.array([9, 9, 9, 8, 8, 8, 7, 6])
    placed, offsets, _ = place_groups(widths, np.zeros(8), ranks=64, ranks_per_node=8)
    for group, width in enumerate(widths.tolist()):
        nodes = set((placed[offsets[group] : offsets[group + 1]] // 8).tolist())
        assert len(nodes) == -(-width // 8)


def test_a_group_wider_than_a_node_takes_whole_nodes():
    placed, offsets, crosses = place_groups(
        np.array([3, 12, 1]), np.zeros(3), ranks=24, ranks_per_node=8
    )
    wide = placed[offsets[1] : offsets[2]]
    assert crosses.tolist() == [False, True, False]
    assert len(set((wide // 8).tolist())) == 2


@settings(deadline=None)
@given(
    units=st.lists(st.tuples(st.integers(1, 6), st.floats(0.1, 9.0)), min_size=1, max_size=40),
    whole=st.booleans(),
)
def test_every_wave_of_a_cut_fits_the_ranks(units, whole):
    least = np.array([d for d, _ in units])
    natural = np.array([t for _, t in units])
    order = np.argsort(-natural, kind="stable")
    least, natural = least[order], natural[order]
    ends = cut_waves(natural, least, natural * least, np.zeros(least.size), 8, 0.5, whole, 1.0)
    assert ends[-1] == least.size
    for start, end in zip(np.r_[0, ends[:-1]], ends, strict=True):
        assert start < end
        assert least[start:end].sum() <= 8


def test_a_cut_separates_slow_units_from_fast_ones():
    natural = np.array([9.0] * 4 + [1.0] * 4)
    least = np.full(8, 1)
    ends = cut_waves(natural, least, natural, np.zeros(8), 4, 0.1, True, 1.0)
    assert ends.tolist() == [4, 8]


def test_power_of_two_degrees_round_the_least_degree_up():
    machine = setting(16, 100, degrees="power_of_two")
    units = make_units([290, 410, 100], None, COST)
    assert least_degrees(units, machine).tolist() == [4, 8, 1]


@pytest.mark.parametrize("memory", [1 << 10, 1 << 20])
def test_best_fit_is_as_tight_as_a_plain_one(memory):
    rng = np.random.default_rng(0)
    tokens = (rng.random(400) * memory * 0.7).astype(np.int64) + 1
    units = make_units(tokens, None, COST)
    machine = setting(4000, memory)
    _, degree = group_by_memory(units, least_degrees(units, machine), machine)
    rooms: list[int] = []
    for size in sorted(tokens.tolist(), reverse=True):
        fitting = [r for r in rooms if r >= size]
        if fitting:
            tightest = min(fitting)
            rooms[rooms.index(tightest)] -= size
        else:
            rooms.append(memory - size)
    assert degree.sum() <= len(rooms) + 1
