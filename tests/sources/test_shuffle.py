"""Orders computed by position: permutations, as random as true shuffles, and pinned for ever."""

import itertools
import math
import tracemalloc
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from dataservice.core.split_mix import split_mix
from dataservice.sources.interleave import Interleaving
from dataservice.sources.shuffle import permuted, permuted_each


def order(size: int, *names: int) -> NDArray[np.int64]:
    return permuted(np.arange(size), size, *names)


def is_permutation(places: NDArray[np.int64], size: int) -> bool:
    return len(places) == size and bool((np.bincount(places, minlength=size) == 1).all())


def test_orders_are_pinned() -> None:
    assert order(10, 1, 2, 3).tolist() == [9, 0, 4, 3, 7, 1, 6, 8, 2, 5]
    assert permuted(np.array([0, 1, 10**9 - 1]), 10**9, 5).tolist() == [
        123384270,
        916988367,
        969483178,
    ]


WORD = (1 << 64) - 1


def hash_of(word: int) -> int:
    """SplitMix64, as it is published."""
    word = word + 0x9E3779B97F4A7C15 & WORD
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 & WORD
    word = (word ^ word >> 27) * 0x94D049BB133111EB & WORD
    return word ^ word >> 31


def image_of(place: int, size: int, *names: int) -> int:
    """One place through the network as `shuffle.py` describes it, in whole numbers of Python."""
    state = 0
    for name in names:
        state = hash_of(state ^ name & WORD)
    rows = math.isqrt(size - 1) + 1
    rows += rows % 2
    sides = rows, -(-size // rows)
    while True:
        parts = list(divmod(place, sides[1]))
        for turn in range(12):
            mine, other = turn % 2, 1 - turn % 2
            shift = hash_of(hash_of(parts[other]) ^ hash_of(state ^ hash_of(turn))) >> 32
            parts[mine] = (parts[mine] + (shift * sides[mine] >> 32)) % sides[mine]
        place = parts[0] * sides[1] + parts[1]
        if place < size:
            return place


of_any_size = st.one_of(st.integers(1, 50), st.integers(1, 5000), st.integers(1, 2**62))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(of_any_size, st.integers(-(2**64), 2**64)), min_size=1, max_size=4),
    st.integers(0, 1500),
    st.integers(0, 2**32),
)
def test_every_place_is_where_the_network_leads_when_it_is_followed_by_hand(
    orders: list[tuple[int, int]], count: int, seed: int
) -> None:
    sizes, names = [size for size, _ in orders], [(name, 7) for _, name in orders]
    draw = np.random.default_rng(seed)
    which = draw.integers(0, len(orders), count)
    places = draw.integers(0, np.array(sizes)[which])
    found = permuted_each(places, which, sizes, names)
    some = range(0, count, max(1, count // 60))
    assert [int(found[k]) for k in some] == [
        image_of(int(places[k]), sizes[which[k]], *names[which[k]]) for k in some
    ]


def test_every_size_up_to_2000_is_permuted() -> None:
    assert order(0, 7).tolist() == []
    assert all(is_permutation(order(size, 7), size) for size in range(1, 2001))


@pytest.mark.parametrize("power", range(11, 21))
def test_sizes_around_powers_of_two_are_permuted(power: int) -> None:
    for size in (2**power - 1, 2**power, 2**power + 1):
        assert is_permutation(order(size, power, 3), size)


@settings(max_examples=30, deadline=None)
@given(st.integers(2001, 600_000), st.integers(-(2**70), 2**70), st.integers(0, 1000))
def test_any_size_seed_and_epoch_gives_a_permutation(size: int, seed: int, epoch: int) -> None:
    assert is_permutation(order(size, seed, epoch), size)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 2**62), st.integers(0, 2**62))
def test_no_two_places_of_huge_orders_meet(size: int, start: int) -> None:
    places = np.arange(start % size, min(start % size + 5000, size))
    found = permuted(places, size, 1)
    assert found.min() >= 0
    assert found.max() < size
    assert len(set(found.tolist())) == len(places)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 999_999), max_size=50))
def test_a_place_does_not_depend_on_what_is_asked_with_it(places: list[int]) -> None:
    alone = [int(permuted(np.array([place]), 10**6, 4)[0]) for place in places]
    assert permuted(np.array(places, dtype=np.int64), 10**6, 4).tolist() == alone


def test_a_place_does_not_depend_on_how_many_are_asked_together() -> None:
    sizes, names = [30_000, 70_000], [(1,), (2,)]
    which = np.arange(50_000) % 2
    places = np.arange(50_000) // 2
    together = permuted_each(places, which, sizes, names)
    assert (together[which == 0] == permuted(places[which == 0], sizes[0], *names[0])).all()
    assert (together[which == 1] == permuted(places[which == 1], sizes[1], *names[1])).all()
    apart = [permuted(np.arange(k, k + 7), 70_000, 2) for k in range(0, 70_000, 7)]
    assert order(70_000, 2).tolist() == np.concatenate(apart).tolist()


def test_a_large_draw_takes_little_more_memory_than_its_places() -> None:
    places = np.arange(400_000)
    alone = Interleaving(np.array([0, 400_000]), 3)
    permuted(places[:50_000], 400_000, 9)  # what is made once is not counted
    assert peak_bytes(lambda: permuted(places, 400_000, 9)) < 4 * places.nbytes
    assert peak_bytes(lambda: alone.turns(0, 400_000)) < 3 * places.nbytes


def peak_bytes(call: Callable[[], object]) -> int:
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_a_source_alone_has_every_turn() -> None:
    source, rank = Interleaving(np.array([0, 5000, 0]), 3).turns(1500, 4500)
    assert (source == 1).all()
    assert rank.tolist() == list(range(1500, 4500))


def test_other_names_give_other_orders() -> None:
    names = [(0,), (1,), (0, 0), (0, 1), (1, 0), (), (2**64 - 1,)]
    assert len({tuple(order(20, *each).tolist()) for each in names}) == len(names)
    assert order(20, -1).tolist() == order(20, 2**64 - 1).tolist()


# ---- as random as a true shuffle ----------------------------------------------------------
# Each bound is at least 5 standard deviations from what a true shuffle gives; nothing here is
# drawn anew, so the figures are the same in every run.


def test_all_orders_of_a_few_samples_are_as_frequent() -> None:
    for size in (3, 4, 5):
        seen = Counter(tuple(order(size, seed, 7).tolist()) for seed in range(1200))
        expected = 1200 / math.factorial(size)
        squares = sum(
            (seen[each] - expected) ** 2 / expected for each in itertools.permutations(range(size))
        )
        freedom = math.factorial(size) - 1
        assert squares < freedom + 5 * math.sqrt(2 * freedom)


@pytest.mark.parametrize("size", [100, 243, 1000, 4096, 10_000])
def test_samples_fall_everywhere_as_often(size: int) -> None:
    """Chi-square over 20 × 20 cells of (place, sample), in 300 orders."""
    cells = np.zeros((20, 20))
    for seed in range(300):
        np.add.at(cells, (np.arange(size) * 20 // size, order(size, seed, 1) * 20 // size), 1)
    before = np.bincount(np.arange(size) * 20 // size)
    expected = 300 * np.outer(before, before) / size
    squares = ((cells - expected) ** 2 / expected).sum()
    assert abs(squares - 361) < 5 * math.sqrt(2 * 361)


@pytest.mark.parametrize("size", [100, 243, 1000, 4096, 10_000])
def test_neighbours_are_apart_as_in_a_true_shuffle(size: int) -> None:
    shuffle = np.random.default_rng(0).permutation
    ours = [order(size, seed, 2) for seed in range(300)]
    true = [shuffle(size) for _ in range(300)]
    for lag in (1, 2, 16):
        for far in (1, 2, size // 10):
            counts = [sum((np.abs(p[lag:] - p[:-lag]) == far).sum() for p in each)
                      for each in (ours, true)]  # fmt: skip
            assert abs(counts[0] - counts[1]) < 5 * math.sqrt(sum(counts))


@pytest.mark.parametrize("size", [1000, 20_011])
def test_displacement_and_correlations_are_those_of_a_true_shuffle(size: int) -> None:
    ours = [order(size, 0, epoch) for epoch in range(40)]
    deviation = 1 / math.sqrt(size)
    for first, second in itertools.pairwise(ours):
        assert abs(np.corrcoef(first, np.arange(size))[0, 1]) < 5 * deviation
        assert abs(np.corrcoef(first, second)[0, 1]) < 5 * deviation
        assert abs(np.corrcoef(first[1:], first[:-1])[0, 1]) < 5 * deviation
        assert (first == second).sum() < 12  # 1 is to be expected, of Poisson
        displaced = np.sort(np.abs(first - np.arange(size))) / size
        expected = 1 - np.sqrt(1 - (np.arange(size) + 0.5) / size)  # of |x - y|, both uniform
        assert np.abs(displaced - expected).max() < 4 * deviation  # Kolmogorov and Smirnov's


def test_the_hash_is_splitmix64() -> None:
    first = split_mix(np.array([0], dtype=np.uint64))
    assert first.tolist() == [0xE220A8397B1DCDAF]  # the published first output of seed 0
