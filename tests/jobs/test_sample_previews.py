"""A preview is what the job trains: the same tokens, the same loss, the same arrays."""

import json

import numpy as np
import pytest
from tokenizers import Tokenizer

from dataservice.cli.show_preview import lengths_line, preview_fields
from dataservice.core.errors import SourceError, SpecError
from dataservice.jobs.find_samples import Wanted
from dataservice.jobs.preview import preview_job
from tests.jobs.corpus import BAD, USABLE, decoder, indexed, job_of, write_job


def previews(home, sources=(), **wanted):
    made = preview_job(job_of(home), Wanted(**wanted), sources=sources, custom_processors={})
    return list(made)


def preview(home, sample):
    (made,) = previews(home, ["talks"], sample=f"key={sample}")
    return made


def mask(made):
    """Which tokens the pieces say are learnt: bool[tokens]."""
    runs = [np.full(piece.tokens, piece.learnt) for piece in made.pieces]
    return np.concatenate(runs)


@pytest.mark.parametrize("key", USABLE)
def test_what_is_learnt_is_what_has_a_label_and_nothing_else(home, key):
    made = preview(home, key)
    _, decoded = decoder(home)(key)
    learnt = mask(made)
    assert len(learnt) == len(decoded.input_ids) == made.lengths.llm_tokens
    assert learnt[1:].tolist() == (decoded.labels[:-1] != -100).tolist()
    assert not learnt[0]
    assert int(learnt.sum()) == made.lengths.loss_tokens > 0
    judge = Tokenizer.from_file(str(home / "tokenizer" / "tokenizer.json"))
    targets = decoded.labels[decoded.labels != -100].tolist()
    said = "".join(piece.text for piece in made.pieces if piece.learnt)
    assert said == judge.decode(targets, skip_special_tokens=False)


@pytest.mark.parametrize("key", USABLE)
def test_the_pieces_write_the_whole_sequence(home, key):
    made = preview(home, key)
    _, decoded = decoder(home)(key)
    judge = Tokenizer.from_file(str(home / "tokenizer" / "tokenizer.json"))
    kept = decoded.input_ids.copy()
    start = 0
    for piece in made.pieces:
        if piece.medium is not None:
            kept[start : start + piece.tokens] = -1
            assert piece.text == ""
            assert not piece.learnt
        start += piece.tokens
    written = judge.decode(kept[kept >= 0].tolist(), skip_special_tokens=False)
    assert "".join(piece.text for piece in made.pieces) == written


def test_media_are_the_arrays_that_the_encoders_get_file_by_file(home):
    decode = decoder(home)
    for key, kinds in (
        ("picture", ["image"]),
        ("clip", ["video"]),
        ("tone", ["audio"]),
        ("both", ["image", "image"]),
    ):
        made = preview(home, key)
        raw, decoded = decode(key)
        assert [medium.kind for medium in made.media] == kinds
        assert [medium.name for medium in made.media] == [blob.name for blob in raw.media]
        arrays = [array for medium in made.media for array in medium.arrays]
        assert len(arrays) == len(decoded.items)
        for array, judge in zip(arrays, decoded.items, strict=True):
            assert array.tobytes() == judge.tobytes()
            assert array.shape == judge.shape
    assert [medium.number for medium in made.media] == [1, 2]


def test_a_preview_tells_what_its_loss_weighs(home):
    assert preview(home, "17").loss_weight == 1
    source = {"name": "talks", "format": "jsonl", "url": "talks.jsonl", "loss_weight": 0.5}
    write_job(home, sources=[source])
    assert preview(home, "17").loss_weight == 0.5
    with (home / "talks.jsonl").open("a") as lines:
        lines.write(json.dumps({"id": "rare", "text": "a cat", "score": 3}) + "\n")
    write_job(home, sources=[{**source, "columns": {"loss_weight": "score"}}])
    assert preview(home, "rare").loss_weight == 1.5
    assert preview(home, "17").loss_weight == 0.5
    assert "of them learnt with loss weight 1.5" in lengths_line(preview(home, "rare"))
    assert preview_fields(preview(home, "rare"))["loss_weight"] == 1.5


def test_a_clip_of_several_items_is_one_file(home):
    write_job(
        home,
        pipeline={"tokenizer": "tokenizer", "vision": {"kind": "qwen3_vl"}},
        sources=[{"name": "talks", "format": "jsonl", "url": "talks.jsonl"}],
    )
    made = preview(home, "clip")
    (clip,) = made.media
    assert len(clip.items) > 1
    runs = [(piece.part, piece.tokens) for piece in made.pieces if piece.medium is not None]
    assert runs == [(part, item.llm_tokens) for part, item in enumerate(clip.items)]


@pytest.mark.parametrize("with_index", [False, True])
def test_a_sample_that_cannot_be_used_has_its_reason_and_nothing_else(home, with_index):
    if with_index:
        indexed(home)
    for key, reason in BAD.items():
        made = preview(home, key)
        assert reason in made.problem
        assert made.location.file.endswith("talks.jsonl")
        assert (made.lengths, made.pieces, made.media) == (None, (), ())


def test_a_sample_that_changed_since_it_was_indexed_says_so(home):
    indexed(home)
    file = home / "cat.jpg"
    data = bytearray(file.read_bytes())
    data[-20] ^= 0xFF
    file.write_bytes(bytes(data))
    assert "changed since indexing" in preview(home, "picture").problem


def test_by_default_the_first_sample_of_each_source_and_the_bad_ones_before_it(home):
    made = previews(home)
    assert [(each.source, each.key) for each in made] == [
        ("talks", "lost"),
        ("talks", "picture"),
        ("pages", "page-0"),
    ]
    assert [each.number for each in made] == [None, 0, 0]
    assert [(each.source, each.key) for each in previews(indexed(home))] == [
        ("talks", "picture"),
        ("pages", "page-0"),
    ]


def test_a_source_that_cannot_be_read_stops_no_other(home):
    (home / "talks.jsonl").write_text("[]")
    made = preview_job(job_of(home), Wanted(), custom_processors={})
    assert next(made).source == "pages"
    with pytest.raises(SourceError, match=r"source 'talks'.*one JSON array"):
        next(made)


def test_an_empty_source_says_so(home):
    (home / "talks.jsonl").write_text("\n")
    with pytest.raises(SourceError, match=r"'talks' is empty: .* hold no jsonl sample"):
        previews(home)


def test_an_unknown_source_is_answered_with_those_there_are(home):
    with pytest.raises(SpecError, match="no source 'tolks'; its sources are 'talks', 'pages'"):
        previews(home, ["tolks"])


def test_one_sample_is_of_one_source(home):
    with pytest.raises(SpecError, match=r"'talks', 'pages'\. Give one of them as --source"):
        previews(home, sample="0")
