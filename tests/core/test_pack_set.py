"""A PackSet is the set of its keys."""

from hypothesis import given
from hypothesis import strategies as st

from dataservice.core.orders import PackKeys, PackSet

keys = st.builds(
    PackKeys,
    job=st.sampled_from(["a", "b"]),
    step=st.integers(0, 2),
    plan_digest=st.sampled_from(["d", "e"]),
    packs=st.lists(st.integers(0, 4), max_size=4),
)
some = st.lists(keys, max_size=4)


@given(some, some)
def test_a_pack_set_is_the_set_of_its_keys(ours, theirs):
    mine, other = PackSet(ours), PackSet(theirs)
    as_set = {key for each in ours for key in each}
    others = {key for each in theirs for key in each}
    assert mine == as_set
    assert len(mine) == len(as_set)
    assert all(key in mine for key in as_set)
    assert all((key in mine) == (key in as_set) for key in others)
    assert mine - other == mine - others == as_set - other == as_set - others
