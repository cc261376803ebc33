"""Samples that pass through the user's own code before they are measured and decoded."""

import importlib
import itertools
import os
import sys
from dataclasses import replace

import pytest

from dataservice.core.errors import SampleError, SpecError
from dataservice.core.job import CodeSpec
from dataservice.decode.sample_pipeline import build_pipeline
from dataservice.decode.spec import LongerThan


class Upper:
    """Changes the record in place, which it may."""

    def prepare(self, sample):
        sample.record["text"] = sample.record["text"].upper() + "!"
        return sample


class Least:
    """Leaves short texts out."""

    def __init__(self, characters=5):
        self.characters = characters

    def prepare(self, sample):
        return sample if len(sample.record["text"]) >= self.characters else None


class First:
    """Keeps the first picture alone."""

    version = 1

    def prepare(self, sample):
        text = "<image>" + sample.record["text"].replace("<image>", "")
        return replace(sample, record={"text": text}, media=sample.media[:1], key="another")


class Refuses:
    def prepare(self, sample):
        raise SampleError("a word that is not wanted")


class Fails:
    def prepare(self, sample):
        return sample.record["nothing"]


class Wrong:
    def prepare(self, sample):
        return {"text": "a dict"}


class Newer(First):
    version = 2


CUSTOM = {
    kind.__name__.lower(): kind for kind in (Upper, Least, First, Refuses, Fails, Wrong, Newer)
}


@pytest.fixture
def pipeline(kitchen):
    def make(*names, custom=CUSTOM, **options):
        steps = tuple(CodeSpec(name=name, options=options) for name in names)
        return build_pipeline(kitchen.spec(prepare=steps), custom_processors=custom)

    return make


def text_of(pipeline, raw):
    ids = pipeline.decode(raw, pipeline.measure(raw)).input_ids.tolist()
    return pipeline.text_of(ids, 0, len(ids))


def test_a_record_is_trained_as_the_code_leaves_it_however_often_it_is_read(pipeline, sample):
    raw = sample({"text": "the sky"})
    made = pipeline("upper")
    assert text_of(made, raw).startswith("THE SKY!")
    assert text_of(made, raw).count("!") == 1, "the record that was read stays as it was"
    assert raw.record == {"text": "the sky"}


def test_code_runs_in_the_order_of_the_job(pipeline, sample):
    raw = sample({"text": "abcd"})
    with pytest.raises(SampleError, match="'least' leaves it out"):
        pipeline("least").measure(raw)
    assert text_of(pipeline("upper", "least"), raw).startswith("ABCD!")
    with pytest.raises(SampleError, match="leaves it out"):
        pipeline("least", "upper").measure(raw)


def test_media_that_the_code_drops_are_neither_planned_nor_decoded(pipeline, sample, files):
    pictures = [files.blob("image", files.image(56, 56)), files.blob("image", b"damaged")]
    raw = sample({"text": "<image><image>two"}, *pictures)
    made = pipeline("first")
    lengths = made.measure(raw)
    assert len(lengths.items) == len(made.decode(raw, lengths).items) == 1
    assert made.media_of(raw) == (tuple(pictures[:1]), (0,))


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("refuses", "'refuses': a word that is not wanted"),
        ("fails", "'fails' failed with KeyError: 'nothing'. Mend its code"),
        ("wrong", "'wrong' returned 'dict'.*Return the RawSample"),
    ],
)
def test_code_that_fails_spoils_its_sample_alone_and_is_named(pipeline, sample, name, reason):
    with pytest.raises(SampleError, match=reason):
        pipeline(name).measure(sample({"text": "the sky"}))


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("secret", {}, "preparer 'secret' is not in the service's config, which has: .*upper"),
        ("upper", {"size": 3}, "preparer 'upper' cannot be made with options"),
        ("bare", {}, "preparer 'bare' is a object without a method prepare"),
    ],
)
def test_code_that_cannot_be_used_says_why(pipeline, name, options, reason):
    with pytest.raises(SpecError, match=reason):
        pipeline(name, custom={**CUSTOM, "bare": object}, **options)


def test_code_is_part_of_the_identity_by_its_version_options_and_order(pipeline):
    made = [
        pipeline(),
        pipeline("upper"),
        pipeline("least"),
        pipeline("least", characters=6),
        pipeline("upper", "least"),
        pipeline("least", "upper"),
        pipeline("first"),
        pipeline("newer"),
    ]
    assert len({each.fingerprint for each in made}) == len(made)
    assert "prepare" not in made[0].digests, "jobs without such code are what they were"


def test_changed_code_is_another_pipeline_unless_it_declares_its_version(
    pipeline, tmp_path, monkeypatch
):
    monkeypatch.syspath_prepend(tmp_path)
    body = "    def prepare(self, sample):\n        return sample\n"

    seconds = itertools.count(1)

    def fingerprint(source):
        path = tmp_path / "their_code.py"
        path.write_text(source)
        # Python takes a source of the same size and time for the one that it has read before.
        os.utime(path, (0, next(seconds)))
        importlib.invalidate_caches()
        sys.modules.pop("their_code", None)
        kind = importlib.import_module("their_code").Theirs
        return pipeline("theirs", custom={"theirs": kind}).fingerprint

    plain = fingerprint(f"WORDS = 3\nclass Theirs:\n{body}")
    assert plain == fingerprint(f"WORDS = 3\nclass Theirs:\n{body}")
    assert plain != fingerprint(f"WORDS = 4\nclass Theirs:\n{body}"), "its helpers count"
    declared = f"class Theirs:\n    version = 7\n{body}"
    assert fingerprint(f"WORDS = 3\n{declared}") == fingerprint(f"WORDS = 4\n{declared}")


def test_documents_are_prepared_before_they_are_cut(kitchen, sample):
    spec = kitchen.spec(
        prepare=(CodeSpec(name="upper"),), longer_than=LongerThan(tokens=8, then="cut")
    )
    made = build_pipeline(spec, custom_processors=CUSTOM)
    raw = sample({"text": "the quick brown fox jumps over the lazy dog " * 3})
    lengths = made.measure_pieces(raw)
    assert len(lengths) > 1
    said = ""
    for number, planned in enumerate(lengths, 1):
        ids = made.decode(replace(raw, piece=number), planned).input_ids.tolist()
        said += made.text_of(ids, 0, len(ids))
    assert said.startswith("THE QUICK")
    assert said.count("!") == 1
