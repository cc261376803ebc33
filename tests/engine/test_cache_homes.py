"""In which cache a sample is looked for first."""

import numpy as np

from dataservice.engine.cache_homes import BUCKETS, cache_homes


def test_a_cache_that_comes_or_goes_moves_its_own_buckets_alone():
    names = [f"cache-{k}" for k in range(9)]
    all_of_them = dict.fromkeys(names, 2)
    homes = np.array(names)[cache_homes(all_of_them)]
    for gone in names:
        left = {name: 2 for name in names if name != gone}
        now = np.array(list(left))[cache_homes(left)]
        assert (now[homes != gone] == homes[homes != gone]).all()
    assert (cache_homes(dict(reversed(all_of_them.items()))) == 8 - cache_homes(all_of_them)).all()


def test_one_more_worker_at_a_cache_only_takes_buckets_to_it():
    homes = cache_homes({"a": 1, "b": 2, "c": 1})
    now = cache_homes({"a": 1, "b": 3, "c": 1})
    assert set(now[now != homes].tolist()) == {1}


def test_caches_have_buckets_by_their_workers():
    parts = {"a": 1, "b": 2, "c": 4, "d": 1}
    counts = np.bincount(cache_homes(parts), minlength=4)
    assert counts.sum() == BUCKETS
    shares = np.array(list(parts.values())) / 8
    assert (np.abs(counts / BUCKETS - shares) < 4 * np.sqrt(shares / BUCKETS)).all()
    assert (cache_homes({}) == -1).all()
