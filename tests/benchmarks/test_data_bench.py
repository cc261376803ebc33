"""The data benchmark: its pictures, its bare loaders, and its page."""

import argparse
from itertools import islice

import numpy as np
import pytest

from benchmarks.data import indexing
from benchmarks.data.__main__ import to_markdown
from benchmarks.data.corpus import MAX_PIXELS, make_corpus, read_pictures
from benchmarks.data.measured import Span
from benchmarks.data.programs import bare, by_pillow, by_service_code


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    home = tmp_path_factory.mktemp("corpus")
    make_corpus(home, 2)
    return home


def test_no_two_pictures_are_equal_and_they_come_round_again(home):
    jpegs = [jpeg for jpeg, _ in islice(read_pictures(home), 4)]
    assert len(set(jpegs)) == 2
    assert jpegs[:2] == jpegs[2:]


def test_pillow_and_the_service_make_the_same_picture_up_to_their_weights(home):
    jpeg, caption = next(read_pictures(home))
    ours, theirs = by_service_code(jpeg), by_pillow(jpeg)
    assert ours.shape == theirs.shape
    assert ours.shape[0] * ours.shape[1] <= MAX_PIXELS
    assert np.abs(ours.astype(int) - theirs).max() <= 4
    assert caption.startswith("A picture")


def test_a_bare_loader_delivers_every_picture(home):
    assert list(islice(bare(by_service_code, home), 3)) == [1, 1, 1]


def test_the_page_sets_the_service_beside_its_floor_and_the_better_peer():
    def span(ms, **roles):
        return [Span(pictures=100, wall_s=1.0, cpu_s=roles or {"client": ms / 10})]

    spans = {
        "pillow": span(20.0),
        "kernel": span(8.0),
        "grpc": span(1.0),
        "webdataset": span(22.0),
        "ray_data": span(30.0),
        "service": span(11.0, decoders=0.8, client=0.3),
    }
    given = argparse.Namespace(pictures=100, warm=10, rounds=1, pool="local")
    page = to_markdown(spans, given)
    assert "| bare, with this service's code | 8.0 | 0.40 | 100 |" in page
    assert "decoders 8.0, workers 0.0, coordinator 0.0, client 3.0" in page
    assert "(9.0 ms): 1.22; the bar is 1.15: NOT MET." in page
    assert "better of the other loaders: 0.50; the bar is 0.8: met." in page


@pytest.mark.long
def test_indexes_are_timed_as_whole_commands_and_a_peer_that_is_not_there_is_left_out(home):
    tars_s, jsonl_s = indexing.of_tars_s(home, None, 1), indexing.of_jsonl_s(home, 20_000, 1)
    given = argparse.Namespace(pictures=2, jsonl_bytes=20_000, rounds=1)
    page = indexing.to_markdown(given, {**tars_s, "prepare": [1e-3]}, jsonl_s)
    assert "| `energon prepare --num-workers 1` | 0.0 | 2,000 |" in page
    assert "over `energon prepare --num-workers 1`: 0.00; the bar is to be ahead: NOT MET" in page
    assert "One JSONL of 0 MB" in page
    assert tars_s["ours"][0] > 0.1, "it has loaded Python, at least"
