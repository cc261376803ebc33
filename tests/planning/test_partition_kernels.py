import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dataservice.planning.kernels.sort import argsort_descending, argsort_falling, radix_argsort
from dataservice.planning.loads.problem import certify


@settings(max_examples=80, deadline=None)
@given(
    st.lists(
        st.one_of(st.integers(0, 9).map(float), st.floats(0, 1e12, allow_subnormal=False)),
        max_size=300,
    )
)
def test_the_radix_sort_is_stable_and_falling(values):
    costs = np.array(values, dtype=np.float64)
    np.testing.assert_array_equal(argsort_descending(costs), np.argsort(-costs, kind="stable"))


@settings(max_examples=80, deadline=None)
@given(
    sizes=st.one_of(
        st.lists(st.one_of(st.integers(0, 9), st.integers(0, 2**31 - 1)), max_size=300),
        st.lists(st.integers(0, 40).map(lambda tiles: 256 * tiles), max_size=300),
    ),
    dtype=st.sampled_from([np.int32, np.int64]),
    shift=st.sampled_from([0, 9, 31]),
)
def test_whole_numbers_are_sorted_stably_however_many_bits_differ(sizes, dtype, shift):
    values = np.array(sizes, dtype=dtype) << (shift if dtype is np.int64 else 0)
    falling = np.argsort(-values.astype(np.int64), kind="stable")
    np.testing.assert_array_equal(argsort_falling(values), falling)
    np.testing.assert_array_equal(argsort_falling(values[falling]), np.arange(values.size))
    keys = values.astype(np.uint64)
    np.testing.assert_array_equal(radix_argsort(keys), np.argsort(keys, kind="stable"))


@settings(max_examples=80, deadline=None)
@given(
    heights=st.lists(st.sampled_from([0, 1, 7, 2**20, 2**31]), min_size=1, max_size=4),
    count=st.integers(0, 700),
    below=st.sampled_from([1, 5, 1 << 9, 1 << 33]),
    seed=st.integers(0, 9),
)
def test_keys_that_differ_in_their_lowest_bits_alone_are_sorted_by_them(
    heights, count, below, seed
):
    draw = np.random.default_rng(seed)
    keys = np.array(heights, np.uint64)[draw.integers(0, len(heights), count)] << np.uint64(32)
    keys |= draw.integers(0, below, count).astype(np.uint64)
    np.testing.assert_array_equal(radix_argsort(keys), np.argsort(keys, kind="stable"))


def test_crowded_ranks_raise_the_certificate():
    # Four items of 3 on three ranks: some rank holds two of them, whatever the mean says.
    assert certify(np.array([3.0, 3.0, 3.0, 3.0]), 3, equal_count=False) == 6


def test_whole_costs_round_the_mean_up():
    assert certify(np.array([1.0] * 7), 2, equal_count=False) == 4


def test_whole_tiles_round_the_mean_up_to_a_tile():
    # 7 tiles over 2 ranks: one holds 4 tiles, 1,024 tokens, and not 896.
    assert certify(np.array([768.0, 256.0, 256.0, 256.0, 256.0]), 2, equal_count=False) == 1024


def test_equal_counts_give_the_largest_item_company():
    falling = np.array([10.0, 2.0, 2.0, 2.0, 2.0, 2.0])
    assert certify(falling, 2, equal_count=False) == 10
    assert certify(falling, 2, equal_count=True) == 14
