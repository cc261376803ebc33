"""The hash and the orders made from it; these values may never change."""

import numpy as np

from dataservice.sources.shuffle import _mix, keys, permutation


def test_orders_are_pinned() -> None:
    assert permutation(10, 1, 2, 3).tolist() == [7, 6, 9, 4, 1, 3, 2, 0, 5, 8]
    assert keys(np.arange(2), 5).tolist() == [17286874536754031684, 6221399531979976949]


def test_a_permutation_holds_every_place_once() -> None:
    for size in (0, 1, 2, 1000):
        assert sorted(permutation(size, 7).tolist()) == list(range(size))


def test_other_names_give_other_orders() -> None:
    orders = {tuple(permutation(20, *names)) for names in ((0,), (1,), (0, 0), (0, 1), (1, 0), ())}
    assert len(orders) == 6


def test_negative_and_huge_names_are_allowed() -> None:
    assert permutation(5, -1).tolist() == permutation(5, 2**64 - 1).tolist()


def test_keys_are_spread_evenly() -> None:
    buckets = np.bincount((keys(np.arange(100_000), 3) >> np.uint64(60)).astype(int), minlength=16)
    assert buckets.max() - buckets.min() < 600  # the standard deviation of one is 77
    order = permutation(20_000, 3)
    assert abs(np.corrcoef(order, np.arange(20_000))[0, 1]) < 0.03
    assert abs(np.corrcoef(order, permutation(20_000, 4))[0, 1]) < 0.03


def test_the_hash_is_splitmix64() -> None:
    first = _mix(np.array([0], dtype=np.uint64))
    assert first.tolist() == [0xE220A8397B1DCDAF]  # the published first output of seed 0
