import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataservice.core.content import PRIME, StepContent, content_of, differing_place

uint64s = st.integers(0, 2**64 - 1)


def splitmix64(place):
    """As published, in whole numbers."""
    mixed = place * 0x9E3779B97F4A7C15 % 2**64
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB % 2**64
    return mixed ^ (mixed >> 31)


def samples(digests):
    """Ids that are no places, and their digests."""
    return np.arange(len(digests), dtype=np.int64) * 7 + 3, np.array(digests, dtype=np.uint64)


@settings(deadline=None)
@given(digests=st.lists(uint64s, min_size=1, max_size=40))
def test_the_sums_are_what_they_are_defined_to_be(digests):
    ids, values = samples(digests)
    content = content_of(ids, values, masked=())
    kept = [value % 2**61 for value in digests]
    assert content.total == sum(kept) % PRIME
    weights = [splitmix64(i + 1) % 2**61 for i in range(len(digests))]
    weighted = sum(weight * value for weight, value in zip(weights, kept, strict=True))
    assert content.weighted == weighted % PRIME


def test_it_takes_twenty_bytes_and_is_read_back():
    content = content_of(*samples([1, 2**64 - 1]), masked=())
    assert len(content.to_bytes()) == 20
    assert StepContent.from_bytes(content.to_bytes()) == content
    with pytest.raises(ValueError, match="takes 20 bytes, not 3"):
        StepContent.from_bytes(b"abc")


@settings(deadline=None)
@given(data=st.data(), digests=st.lists(uint64s, min_size=1, max_size=40))
def test_one_sample_that_differs_is_named(data, digests):
    place = data.draw(st.integers(0, len(digests) - 1))
    ids, before = samples(digests)
    now = before.copy()
    now[place] ^= np.uint64(data.draw(st.integers(1, 2**60)))
    changed = content_of(ids, now, ()), content_of(ids, before, ())
    assert differing_place(changed[1], changed[0], len(digests)) == place


def test_several_that_differ_even_by_the_same_are_told_from_one():
    rng = np.random.default_rng(0)
    ids, before = samples(rng.integers(0, 2**63, 5000).tolist())
    first = content_of(ids, before, ())
    for count in (2, 3, 5000):
        now = before.copy()
        now[rng.choice(5000, count, replace=False)] += np.uint64(12345)
        other = content_of(ids, now, ())
        assert other != first
        assert differing_place(first, other, 5000) is None
    swapped = before.copy()
    swapped[[10, 20]] = before[[20, 10]]
    assert content_of(ids, swapped, ()) != first


def test_masked_samples_do_not_count_and_are_named_by_the_checksum():
    ids, before = samples(range(100, 110))
    now = before.copy()
    now[4] = 7
    masked = {int(ids[4])}
    assert content_of(ids, now, masked) == content_of(ids, before, masked)
    assert content_of(ids, now, masked).which != content_of(ids, now, ()).which
    assert content_of(ids, now, {*masked, -5}) == content_of(ids, now, masked)


def test_other_samples_are_never_taken_for_the_same():
    ids, values = samples(range(10))
    assert content_of(ids, values, ()).which != content_of(ids[::-1], values, ()).which
    assert content_of(ids, values, ()).which != content_of(ids[:-1], values[:-1], ()).which
