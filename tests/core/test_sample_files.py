"""Files that hold samples come back as they were, whichever are taken and in whatever order."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataservice.core.sample_columns import SampleColumns
from dataservice.core.sample_files import SampleFiles, numbered
from tests.core.varied_samples import SAMPLES

names = st.text(st.characters(codec="utf-8"), max_size=20)
several_files = st.lists(st.tuples(st.sampled_from("abc") | names, names), max_size=30)
FILES = [("tars", "ä/1.tar"), ("texts", ""), ("tars", "12345678"), ("tars", "ä/1.tar"), ("", "x\0")]


@given(several_files, st.data())
def test_any_files_are_chosen_in_any_order(files, data):
    columns = SampleFiles.of(files)
    assert columns.named() == files
    assert len(columns) == len(files)
    assert [path.decode() for path in columns.utf8()] == [path for _, path in files]
    places = st.integers(0, max(0, len(files) - 1))
    chosen = data.draw(st.lists(places, max_size=40)) if files else []
    some = columns.only(np.array(chosen, np.int64))
    assert some.named() == [files[place] for place in chosen]
    assert set(some.sources) <= {source for source, _ in files}


@given(several_files)
def test_files_that_are_sent_come_as_they_were(files):
    sent = SampleFiles.of(files)
    read = SampleFiles.read(sent.sources, sent.source, sent.path_bytes, sent.paths.tobytes())
    assert read == sent == SampleFiles.of(files)
    assert read.named() == files
    assert sent != SampleFiles.of([*files, ("a", "b")])


def test_each_path_begins_a_word_and_each_source_is_named_once():
    columns = SampleFiles.of(FILES)
    assert columns.sources == ("tars", "texts", "")
    assert columns.source.tolist() == [0, 1, 0, 0, 2]
    assert columns.path_bytes.tolist() == [8, 0, 8, 8, 2]
    assert (
        columns.paths.tobytes().rstrip(b"\0") == ("ä/1.tar" + "12345678" + "ä/1.tar" + "x").encode()
    )
    assert len(columns.paths) == 4


def test_of_the_sources_those_of_the_chosen_files_stay():
    columns = SampleFiles.of(FILES).only(np.array([4, 1, 4]))
    assert columns.sources == ("texts", "")
    assert columns.named() == [FILES[4], FILES[1], FILES[4]]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"source": [0, 2]}, "files of source 0 to 2 of 2"),
        ({"source": [-1, 0]}, "files of source -1 to 0 of 2"),
        ({"sources": []}, "files of source 0 to 1 of 0"),
        ({"path_bytes": [3, 17]}, "the paths of 2 files came as 16 bytes"),
        ({"path_bytes": [-1, 8]}, "the paths of 2 files"),
        ({"path_bytes": [2**62, 2**62]}, "the paths of 2 files"),
        ({"path_bytes": [2**63 - 1, 1]}, "the paths of 2 files"),
        ({"paths": b"a.tar"}, "the paths of 2 files came as 5 bytes"),
        ({"paths": bytes(24)}, "the paths of 2 files came as 24 bytes"),
    ],
)
def test_columns_that_contradict_each_other_are_refused(change, said):
    sound = {"sources": ["a", "b"], "source": [0, 1], "path_bytes": [3, 7], "paths": bytes(16)}
    columns = sound | change
    for name in ("source", "path_bytes"):
        columns[name] = np.array(columns[name], np.int64)
    with pytest.raises(ValueError, match=said):
        SampleFiles.read(**columns)


@pytest.mark.parametrize("file", [-1, 2, 2**40])
def test_a_sample_of_a_file_that_there_is_not_is_refused(file):
    columns = SampleColumns.of(SAMPLES)
    columns.file[3] = file
    with pytest.raises(IndexError, match="of 2"):
        columns.samples()


@given(
    st.lists(st.integers(0, 40), max_size=200)
    | st.lists(st.integers(0, 2**40), min_size=60, max_size=100)
)
def test_numbers_are_counted_in_their_order(values):
    numbers, place = numbered(np.array(values, np.int64))
    assert numbers.tolist() == sorted(set(values))
    assert numbers[place].tolist() == values


def test_samples_share_the_files_of_all_and_send_their_own():
    columns = SampleColumns.of(SAMPLES)
    one = columns.take(np.array([4, 2]))
    assert one.files is columns.files
    files, file = one.own_files()
    assert (files.named(), file.tolist()) == ([("s0", "f0")], [0, 0])
    for start in (0, 1, 4):
        cut = columns.cut(start, start + 1)
        assert cut.own_files()[0].named() == [(f"s{start % 2}", f"f{start % 2}")]
