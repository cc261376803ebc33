"""Samples are found by number, key, chance and length, with an index and without one."""

import pytest

from dataservice.core.errors import NotFoundError, SpecError
from dataservice.core.limits import DEFAULT_LIMITS
from dataservice.jobs.find_samples import MOST_BAD_FIRST, Wanted, find
from dataservice.jobs.sample_pipeline import pipeline_json, pipeline_of
from tests.jobs.corpus import BAD, PAGES, USABLE, indexed, job_of


@pytest.fixture(params=["scanned", "indexed"])
def either(request, home):
    """The corpus, without an index and with one."""
    return indexed(home) if request.param == "indexed" else home


def found(home, source, notes=None, **wanted):
    spec = job_of(home)
    (chosen,) = (each for each in spec.sources if each.name == source)
    pipeline = pipeline_of(pipeline_json(spec.pipeline), {})
    told = notes.append if notes is not None else lambda text: None
    made = find(chosen, spec.index, Wanted(**wanted), pipeline, limits=DEFAULT_LIMITS, note=told)
    return list(made)


def keys(samples):
    return [each.ref.key for each in samples]


def test_a_number_is_the_same_sample_with_an_index_and_without(either):
    for number, key in enumerate(USABLE):
        (sample,) = found(either, "talks", sample=str(number))
        assert (sample.ref.key, sample.number, sample.problem) == (key, number, "")
    (page,) = found(either, "pages", sample="3")
    assert (page.ref.location.row_group, page.ref.location.row) == (1, 1)


def test_a_key_finds_its_sample_usable_or_not(either):
    assert keys(found(either, "talks", sample="both")) == ["both"]
    assert keys(found(either, "talks", sample="key=17")) == ["17"]
    (lost,) = found(either, "talks", sample="lost")
    assert BAD["lost"] in lost.problem


def test_what_is_not_there_is_answered_with_what_is(either):
    with pytest.raises(NotFoundError, match=r"has 6 usable samples.* from 0 to 5.*key=17"):
        found(either, "talks", sample="17")
    with pytest.raises(NotFoundError, match="no sample with the key '0017' among its"):
        found(either, "talks", sample="0017")
    with pytest.raises(NotFoundError, match=r"no sample with the key 'b.ot"):
        found(either, "talks", sample="b\udcffoth")
    with pytest.raises(NotFoundError, match="no sample with the key '9999"):
        found(either, "talks", sample="9" * 5000)


def test_of_a_source_without_a_usable_sample_no_number_is_asked_for(home):
    (home / "talks.jsonl").write_text('{"id": "bad", "image": "none.jpg"}\n')
    with pytest.raises(NotFoundError, match=r"0 usable samples.* what is wrong with its first"):
        found(home, "talks", sample="0")


def test_the_longest_come_longest_first(either):
    assert keys(found(either, "pages", longest=3)) == ["page-1", "page-2", "page-3"]


def test_random_ones_differ_from_one_another_and_repeat_with_their_seed(either):
    first, again = (keys(found(either, "pages", random=3, seed=5)) for _ in range(2))
    assert first == again
    assert len(set(first)) == 3
    assert any(keys(found(either, "pages", random=3, seed=s)) != first for s in range(9))
    assert len(found(either, "pages", random=99)) == len(PAGES)


def test_bad_samples_before_the_first_usable_one_are_not_shown_without_end(home):
    (home / "talks.jsonl").write_text('{"id": "bad", "image": "none.jpg"}\n' * 99)
    assert len(found(home, "talks")) == MOST_BAD_FIRST + 1


def test_an_index_that_is_missing_or_stale_is_said(home):
    notes = []
    found(home, "pages", notes, longest=1)
    assert "source 'pages' are read from their beginning: no index yet" in notes[0]
    assert "the first 200 samples of 'pages'" in notes[1]
    indexed(home)
    notes.clear()
    found(home, "talks", notes, longest=1)
    assert notes == []
    with (home / "talks.jsonl").open("a") as stream:
        stream.write('{"id": "new", "text": "the cat"}\n')
    assert keys(found(home, "talks", notes, sample="6")) == ["new"]
    assert "`dataservice index JOB.yaml`" in notes[0]


def test_one_way_of_choosing_at_a_time():
    with pytest.raises(SpecError, match="one of --sample, --random and --longest"):
        Wanted(sample="0", random=3)
