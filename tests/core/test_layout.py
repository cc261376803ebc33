import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dataservice.core.layout import locate, member_rows, padded_tokens, sample_starts

lengths = st.lists(st.integers(1, 200), min_size=1, max_size=12)


@given(lengths, st.integers(1, 7))
def test_members_of_a_group_share_the_padded_pack_without_overlap(tokens, degree):
    padded = padded_tokens(np.array(tokens), degree)
    rows = [member_rows(padded, degree, member) for member in range(degree)]
    assert len({len(part) for part in rows}) == 1
    assert sorted(np.concatenate(rows)) == list(range(padded.sum()))


@given(lengths, st.integers(2, 7))
def test_padding_is_the_least_that_zigzag_chunks_need(tokens, degree):
    padded = padded_tokens(np.array(tokens), degree)
    assert (padded % (2 * degree) == 0).all()
    assert (padded - np.array(tokens) < 2 * degree).all()


def test_a_pack_of_degree_one_is_not_padded():
    assert padded_tokens(np.array([3, 5]), 1).tolist() == [3, 5]


@given(lengths, st.integers(1, 7), st.data())
def test_locate_agrees_with_the_rows_each_member_holds(tokens, degree, data):
    padded = padded_tokens(np.array(tokens), degree)
    sample = data.draw(st.integers(0, len(tokens) - 1))
    position = data.draw(st.integers(0, tokens[sample] - 1))
    start = sample_starts(padded)[sample]
    member, row = locate(
        np.array([position]), padded[[sample]], np.array([degree]), np.array([start])
    )
    assert member_rows(padded, degree, int(member[0]))[row[0]] == start + position


@given(lengths, st.integers(2, 6))
def test_zigzag_gives_every_member_the_same_causal_work(tokens, degree):
    padded = padded_tokens(np.array(tokens), degree)
    starts = sample_starts(padded)

    def work(member):
        rows = member_rows(padded, degree, member)
        sample = np.searchsorted(starts, rows, side="right") - 1
        return int((rows - starts[sample] + 1).sum())

    assert len({work(member) for member in range(degree)}) == 1
