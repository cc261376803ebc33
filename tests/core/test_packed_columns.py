"""Columns of numbers on the wire: lists come out as arrays do."""

import numpy as np
from dataservice_proto.columns import packed
from hypothesis import given
from hypothesis import strategies as st


@given(
    st.one_of(
        st.lists(st.integers(0, 200)),
        st.lists(st.integers(-(2**62), 2**62)),
        st.lists(st.floats(0, 200), min_size=1),
    )
)
def test_a_list_is_packed_as_its_array_is(values):
    assert packed(values) == packed(np.array(values))
