import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataservice.core.errors import PlanningError
from dataservice.planning.standalone.node_exchange import compose_exchange


@settings(max_examples=80, deadline=None)
@given(
    items=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6), st.integers(0, 50)), max_size=60)
)
def test_an_all_to_all_by_the_plan_brings_every_item_to_its_llm_rank(items):
    source, target, tokens = np.array(items, dtype=np.int64).reshape(-1, 3).T
    plan = compose_exchange(source, target, tokens, ranks=7)
    splits = plan.send_splits
    assert splits.sum() == tokens.sum()
    np.testing.assert_array_equal(plan.receive_splits, splits.T)
    arrived = [[] for _ in range(7)]
    for rank in range(7):
        sent = plan.items_sent_by(rank).tolist()
        assert (source[sent] == rank).all()
        np.testing.assert_array_equal(plan.send_splits_of(rank), splits[rank])
        np.testing.assert_array_equal(plan.receive_splits_of(rank), splits[:, rank])
        # Cut what is sent by the splits, as a collective would, and deliver it.
        stream = [item for item in sent for _ in range(tokens[item])]
        begin = 0
        for other in range(7):
            arrived[other] += stream[begin : begin + splits[rank, other]]
            begin += splits[rank, other]
    for rank in range(7):
        received = plan.items_received_by(rank).tolist()
        assert (target[received] == rank).all()
        assert arrived[rank] == [item for item in received for _ in range(tokens[item])]
    assert sorted(plan.send_order) == sorted(plan.receive_order) == list(range(len(items)))


def test_items_already_in_place_move_nothing():
    plan = compose_exchange([0, 1, 1], [0, 1, 1], [5, 6, 7])
    assert plan.moved_tokens == 0
    assert plan.send_splits.tolist() == [[5, 0], [0, 13]]


def test_the_two_rearrangements_compose():
    plan = compose_exchange([0, 0, 1, 0, 1], [0, 1, 0, 1, 1], [1, 2, 4, 8, 16])
    assert plan.send_order.tolist() == [0, 1, 3, 2, 4]
    assert plan.receive_order.tolist() == [0, 2, 1, 3, 4]
    assert plan.send_splits.tolist() == [[1, 10], [4, 16]]
    assert plan.moved_tokens == 14


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: compose_exchange([0], [0, 1], [1]), "one value an item"),
        (lambda: compose_exchange([0], [5], [1], ranks=4), "at least 6"),
        (lambda: compose_exchange([-1], [0], [1]), "from 0"),
        (lambda: compose_exchange([0], [0], [-1]), "-1 tokens"),
    ],
)
def test_bad_input_says_what_is_wrong(call, words):
    with pytest.raises(PlanningError, match=words):
        call()
