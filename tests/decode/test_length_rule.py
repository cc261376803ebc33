"""What becomes of samples that are longer than a job wants: cut, left out, or refused."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataservice.core.errors import SampleError, SampleTooLongError, SpecError
from dataservice.core.sample import RawSample
from dataservice.decode.sample_pipeline import Pipeline, build_pipeline
from dataservice.decode.spec import LongerThan
from dataservice.decode.token_sequences import IGNORED_LABEL
from tests.decode.files import WORDS, Kitchen

TALK = {"messages": [{"role": "user", "content": WORDS}, {"role": "assistant", "content": WORDS}]}
texts = st.lists(st.sampled_from([*WORDS.split(), "<|endoftext|>", "é漢😀", "a\n"]), min_size=1)
limits = st.integers(2, 40)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Kitchen:
    """A tokenizer for all tests of this file."""
    return Kitchen(tmp_path_factory.mktemp("kitchen"))


def cutting(kitchen: Kitchen, tokens: int, otherwise: str = "refuse") -> Pipeline:
    rule = LongerThan(tokens=tokens, then="cut", otherwise=otherwise)  # type: ignore[arg-type]
    return kitchen.pipeline(longer_than=rule)


def document(text: str, piece: int = 0) -> RawSample:
    return RawSample(key="doc", record={"text": text}, piece=piece)


# ---- cut ----------------------------------------------------------------------------------


@settings(deadline=None, max_examples=60)
@given(words=texts, limit=limits)
def test_the_pieces_of_a_document_are_its_tokens_each_once(shared, words, limit):
    text = " ".join(words)
    plain, pipeline = shared.pipeline(), cutting(shared, limit)
    whole = plain.decode(document(text), plain.measure(document(text)))
    planned = pipeline.measure_pieces(document(text))
    assert len(planned) == -(-len(whole.input_ids) // limit)
    assert all(each.llm_tokens == limit for each in planned[:-1])
    assert 1 <= planned[-1].llm_tokens <= limit
    numbers = range(1, len(planned) + 1) if len(planned) > 1 else [0]
    joined = []
    for number, lengths in zip(numbers, planned, strict=True):
        raw = document(text, number)
        assert pipeline.measure(raw) == lengths
        piece = pipeline.decode(raw, lengths)
        assert len(piece.input_ids) == lengths.llm_tokens
        assert lengths.loss_tokens == np.count_nonzero(piece.labels != IGNORED_LABEL)
        assert piece.labels[:-1].tolist() == piece.input_ids[1:].tolist()
        assert piece.labels[-1] == IGNORED_LABEL
        joined += piece.input_ids.tolist()
    assert joined == whole.input_ids.tolist()
    end = shared.id("<|endoftext|>")
    assert joined.count(end) == 1
    assert joined[-1] == end


def test_a_document_of_the_limit_stays_whole(shared):
    tokens = shared.pipeline().measure(document(WORDS)).llm_tokens
    assert len(cutting(shared, tokens).measure_pieces(document(WORDS))) == 1
    assert [x.llm_tokens for x in cutting(shared, tokens - 1).measure_pieces(document(WORDS))] == [
        tokens - 1,
        1,
    ]


def test_a_conversation_and_whatever_has_media_cannot_be_cut(shared, files, sample):
    pipeline = cutting(shared, 8)
    picture = sample({"text": f"<image>{WORDS}"}, files.blob("image", files.image()))
    for raw in (RawSample(key="talk", record=TALK), picture):
        with pytest.raises(SampleTooLongError, match="only documents of text can be cut") as found:
            pipeline.measure_pieces(raw)
        assert found.value.tokens == shared.pipeline().measure(raw).llm_tokens


def test_a_document_that_is_cut_is_not_read_as_one_sample(shared):
    with pytest.raises(SampleError, match=r"is cut into \d+ samples.* 'doc#1'"):
        cutting(shared, 8).measure(document(WORDS))


def test_a_piece_that_is_not_there_is_told_as_a_change(shared):
    planned = cutting(shared, 8).measure_pieces(document(WORDS))
    for text, piece in ((WORDS, len(planned) + 1), (WORDS, -1), ("the cat", 1)):
        with pytest.raises(SampleError, match=r"is piece -?\d+ of .* changed since it was indexed"):
            cutting(shared, 8).decode(document(text, piece), planned[0])


# ---- dropped and refused ------------------------------------------------------------------


@pytest.mark.parametrize("then", ["drop", "refuse"])
def test_a_longer_sample_is_named_with_its_length(shared, then):
    pipeline = shared.pipeline(longer_than=LongerThan(tokens=3, then=then))
    with pytest.raises(SampleTooLongError, match=r"has \d+ tokens.* longer_than.tokens is 3"):
        pipeline.measure(document(WORDS))


def test_an_index_that_drops_serves_a_job_that_refuses_and_no_other_rule(shared):
    def fingerprint(**rule):
        return build_pipeline(shared.spec(longer_than=LongerThan(**rule))).fingerprint

    drop, cut = fingerprint(tokens=9, then="drop"), fingerprint(tokens=9, then="cut")
    assert drop == fingerprint(tokens=9, then="refuse")
    assert cut == fingerprint(tokens=9, then="cut", otherwise="drop")
    shorter = [fingerprint(tokens=8, then=then) for then in ("drop", "cut")]
    others = [shared.spec(), shared.spec(max_sample_tokens=9)]
    digests = [drop, cut, *shorter, *(build_pipeline(spec).fingerprint for spec in others)]
    assert len(set(digests)) == len(digests)


# ---- job files ----------------------------------------------------------------------------


def test_two_limits_are_refused_and_which_to_keep_is_said(shared):
    with pytest.raises(SpecError, match=r"max_sample_tokens: 9 and longer_than: 8.*Keep longer"):
        shared.spec(max_sample_tokens=9, longer_than=LongerThan(tokens=8))


def test_a_limit_that_leaves_nothing_to_learn_is_refused():
    with pytest.raises(SpecError, match=r"longer_than\.tokens is 1; it must be at least 2"):
        LongerThan(tokens=1)


def test_otherwise_is_for_what_cannot_be_cut():
    with pytest.raises(SpecError, match="otherwise: drop beside then: refuse"):
        LongerThan(tokens=9, otherwise="drop")
