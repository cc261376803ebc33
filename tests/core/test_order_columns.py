"""Orders of packs as columns are the orders, however they are chosen and shared out."""

from dataclasses import replace

import numpy as np

from dataservice.core.order_columns import FEW_SAMPLES, PackOrders
from dataservice.core.orders import PackKey, PackKeys, PackOrder
from dataservice.core.sample_columns import FoundSamples, SampleColumns
from dataservice.core.team import TeamShare
from tests.core.varied_samples import SAMPLES

COUNTS = (2, 0, 3, 1, 3)  # samples of each pack


def orders() -> list[PackOrder]:
    ends = np.cumsum(COUNTS).tolist()
    return [
        PackOrder(
            key=PackKey(job="job", step=3, plan_digest="digest", pack=2 * k),
            degree=k + 1,
            pipeline="{}",
            samples=SAMPLES[end - count : end],
            share=TeamShare(weight=2.0),
        )
        for k, (count, end) in enumerate(zip(COUNTS, ends, strict=True))
    ]


def test_orders_come_back_as_they_were():
    columns = PackOrders.of(orders())
    assert [*columns] == orders()
    assert PackOrders.of(columns) is columns
    assert [*columns[1:3]] == orders()[1:3]
    assert [*columns.only([4, 0])] == [orders()[4], orders()[0]]
    assert [*PackOrders.of([])] == []


def test_packs_are_named_one_by_one_or_together():
    columns = PackOrders.of(orders())
    assert columns.key(2) == orders()[2].key
    keys = columns.keys([3, 1])
    assert isinstance(keys, PackKeys)
    assert [*keys] == [orders()[3].key, orders()[1].key]
    assert [*keys[1:]] == [orders()[1].key]


def test_shares_are_looked_up_together_once():
    asked: list[list[int]] = []
    samples = SampleColumns.of(SAMPLES)

    def find(rows):
        asked.append(rows.tolist())
        return samples.take(rows)

    columns = replace(PackOrders.of(orders()), samples=FoundSamples(find))
    first, none, second = columns.shared_out([[4, 0], [], [2, 1]])
    assert not asked, "nothing is looked up before it is sent"
    assert second.columns().samples() == SAMPLES[2:5]
    assert [*first] == [orders()[4], orders()[0]]
    assert first[1:].columns().samples() == SAMPLES[:2]
    assert len(none) == 0
    assert asked == [[6, 7, 8, 0, 1, 2, 3, 4]]
    assert columns.shared_out([]) == []


def test_orders_that_do_not_follow_one_another_are_taken():
    columns = PackOrders.of(orders())
    assert columns.only([2, 0]).columns().samples() == [*SAMPLES[2:5], *SAMPLES[:2]]
    assert columns.only([]).columns().samples() == []


def test_few_samples_at_hand_are_shared_out_as_they_are_and_written_soon():
    columns = PackOrders.of(orders())
    first, second = columns.shared_out([[4, 0], [2, 1]])
    assert [*first] == [orders()[4], orders()[0]]
    assert [*second] == [orders()[2], orders()[1]]
    assert first.written_soon
    looked_up = replace(columns, samples=FoundSamples(columns.samples.take))
    assert not looked_up.written_soon, "a look into the index may wait for a disk"
    many = replace(columns, counts=columns.counts * FEW_SAMPLES)
    assert not many.written_soon
