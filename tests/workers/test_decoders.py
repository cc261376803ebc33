"""One contract over decoders in threads and in processes."""

import re
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from dataservice.core.errors import SpecError
from dataservice.core.sample import Modality
from dataservice.workers.process_decoders import ProcessDecoders
from dataservice.workers.thread_decoders import ThreadDecoders
from tests.workers.trouble import FACTORY, a_sample, decode, pipeline_in


@pytest.fixture(scope="module", params=[ThreadDecoders, ProcessDecoders])
def decoders(request):
    made = request.param(FACTORY, slots=2)
    made.start()
    yield made
    made.close()


@pytest.fixture
def pipeline(tmp_path):
    return pipeline_in(tmp_path)


@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"tokens": 200_000},
        {"sounds": 1},
        {"images": 3, "sounds": 2, "tokens": 7},
        {"images": 1, "tokens": 1},
    ],
)
def test_arrays_come_back_as_they_were_decoded(decoders, pipeline, shape):
    first, second = decode(decoders, pipeline, "good", "good", **shape)
    for number, outcome in enumerate((first, second), 1):
        assert outcome.reason == ""
        sample, planned = outcome.sample, a_sample(number, "good", **shape).lengths
        assert sample.input_ids.tolist() == [number] * planned.llm_tokens
        assert sample.labels.tolist() == [-number] * planned.llm_tokens
        assert [item.shape for item in sample.items] == [item.shape for item in planned.items]
        for item, lengths in zip(sample.items, planned.items, strict=True):
            vision = lengths.modality is Modality.VISION
            assert item.dtype == (np.uint8 if vision else np.float32)
            assert np.all(item == (number if vision else number / 8))


def test_items_made_in_the_memory_that_is_handed_over_arrive_whole(tmp_path):
    """Those before and behind them keep theirs while somebody looks at them."""
    decoders = ProcessDecoders(FACTORY, slots=1)
    decoders.start()
    pipeline, held, in_place = pipeline_in(tmp_path), [], 0
    for _ in range(6):
        held = held[-1:] + decode(decoders, pipeline, "good", "place", images=2, sounds=1)
        for outcome in held:
            number = outcome.sample.input_ids[0]
            assert all(np.all(item == number) for item in outcome.sample.items[:2])
            assert np.all(outcome.sample.items[2] == number / 8)
    in_place = len(list(tmp_path.glob("place.in-place")))
    decoders.close()
    assert in_place, "memory of earlier samples was given"


@pytest.mark.parametrize(
    ("key", "reason"),
    [
        ("refuse", "the image is truncated"),
        ("gone", "the source has vanished"),
        ("surprise", "ZeroDivisionError: in the codec"),
        ("short", r"int32\[3\] where int32\[4\] was planned"),
    ],
)
def test_a_sample_that_raises_is_masked_alone(decoders, pipeline, key, reason):
    outcomes = decode(decoders, pipeline, "good-1", key, "good-2")
    assert [outcome.sample is None for outcome in outcomes] == [False, True, False]
    assert outcomes[1].reason
    assert re.search(reason, outcomes[1].reason)


def test_a_pipeline_that_is_refused_raises_its_own_error_and_the_next_one_works(decoders, tmp_path):
    with pytest.raises(SpecError, match="unknown processor 'odd'"):
        decoders.open(pipeline_in(tmp_path, refused=True))
    with pytest.raises(SpecError, match="unknown processor 'odd'"):
        decode(decoders, pipeline_in(tmp_path, refused=True), "good")
    assert decoders.open(pipeline_in(tmp_path)) == 9


def test_a_worker_without_slots_is_refused(decoders):
    with pytest.raises(SpecError, match="0 decoding slots"):
        type(decoders)(FACTORY, slots=0)


def test_two_slots_decode_at_once(decoders, tmp_path):
    """Each waits for the other."""
    with ThreadPoolExecutor(2) as callers:
        pipeline = pipeline_in(tmp_path)
        calls = [callers.submit(decode, decoders, pipeline, key) for key in ("meet-a", "meet-b")]
        assert [call.result(90)[0].reason for call in calls] == ["", ""]
