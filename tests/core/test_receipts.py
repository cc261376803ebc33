"""Receipts as columns say what they said one by one."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataservice.core.orders import BadSample, PackKey, PackReceipt, SourceWork
from dataservice.core.receipts import PackReceipts, summed
from tests.one_order import each_of

KEY = PackKey(job="job", step=3, plan_digest="d", pack=0)

whole_s = st.integers(0, 8).map(float)
works = st.lists(
    st.builds(
        SourceWork,
        source=st.sampled_from("ab"),
        samples=st.integers(0, 9),
        read_s=whole_s,
        decode_s=whole_s,
        read_bytes=st.integers(0, 99),
        read_cpu_s=whole_s,
        decode_cpu_s=whole_s,
    ),
    max_size=3,
).map(tuple)
bad_samples = st.lists(
    st.builds(
        BadSample,
        sample_id=st.integers(0, 99),
        source=st.just("a"),
        key=st.text(max_size=3),
        reason=st.text(max_size=3),
    ),
    max_size=3,
).map(tuple)
receipts = st.lists(
    st.builds(
        PackReceipt,
        key=st.integers(0, 99).map(lambda pack: replace(KEY, pack=pack)),
        size_bytes=st.integers(0, 2**40),
        decode_s=whole_s,
        room_s=whole_s,
        bad_samples=bad_samples,
        sources=works,
        sample_digests=st.integers(0, 3).flatmap(
            lambda n: st.binary(min_size=8 * n, max_size=8 * n)
        ),
    ),
    min_size=1,
    max_size=6,
)


@settings(deadline=None)
@given(receipts, st.data())
def test_columns_keep_every_receipt_and_those_that_are_chosen(told, data):
    kept = data.draw(st.lists(st.booleans(), min_size=len(told), max_size=len(told)))
    columns = PackReceipts.of(told)
    sums = columns.sources
    assert each_of(columns) == [replace(each, sources=sums) for each in told]
    chosen = [replace(each, sources=sums) for each, stays in zip(told, kept, strict=True) if stays]
    assert each_of(columns.only(np.array(kept))) == chosen


@given(receipts)
def test_the_work_of_a_source_is_summed_over_packs(told):
    sums = {work.source: work for work in PackReceipts.of(told).sources}
    all_of_it = [work for each in told for work in each.sources]
    assert sums.keys() == {work.source for work in all_of_it}
    for name in ("samples", "read_s", "decode_s", "read_bytes", "read_cpu_s", "decode_cpu_s"):
        for source, work in sums.items():
            assert getattr(work, name) == sum(
                getattr(each, name) for each in all_of_it if each.source == source
            )
    assert summed(tuple(sums.values())) == tuple(sums.values())


def test_no_receipts_are_no_columns():
    assert len(PackReceipts.of([])) == 0


def test_receipts_know_the_plan_that_they_are_of():
    columns = PackReceipts.of([PackReceipt(key=KEY, size_bytes=1, decode_s=0.5)])
    assert columns.is_of(replace(KEY, pack=9))
    assert not columns.is_of(replace(KEY, plan_digest="other"))
    assert not columns.is_of(replace(KEY, step=4))


@pytest.mark.parametrize("size_bytes", [7, 9])
def test_bytes_that_are_no_digests_tell_nothing(size_bytes):
    told = PackReceipt(key=KEY, size_bytes=1, decode_s=0.5, sample_digests=bytes(size_bytes))
    assert PackReceipts.of([told]).digests.tolist() == [0]
