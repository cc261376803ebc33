"""Tokenizers of the user's own: they stand in for a tokenizer.json, and are held to it."""

import hashlib
from pathlib import Path

import numpy as np
import pytest
import tokenizers

from dataservice.core.errors import SampleError, SpecError
from dataservice.core.job import CodeSpec
from dataservice.decode.sample_pipeline import build_pipeline


class Wrapped:
    """Somebody's tokenizer: the kitchen's file, read by code of their own."""

    def __init__(self, folder: str, strip: bool = False) -> None:
        data = (Path(folder) / "tokenizer.json").read_bytes()
        self.model = tokenizers.Tokenizer.from_str(data.decode())
        self.digest = hashlib.sha256(data).hexdigest()
        added = self.model.get_added_tokens_decoder()
        self.special_tokens = {token.content: number for number, token in added.items()}
        self.strip = strip

    def encode(self, text):
        made = self.model.encode(text.strip() if self.strip else text, add_special_tokens=False)
        return made.ids, made.offsets

    def decode(self, ids):
        return self.model.decode(ids, skip_special_tokens=False)


class Newer(Wrapped):
    version = 2


class Astray(Wrapped):
    """Says wrongly which characters its tokens write."""

    def encode(self, text):
        ids, spans = super().encode(text)
        return ids, [(start, end + 1) for start, end in spans]


class Short(Wrapped):
    """Forgets a span where a text has a question."""

    def encode(self, text):
        ids, spans = super().encode(text)
        return ids, spans[:-1] if "?" in text else spans


class Fails(Wrapped):
    """Cannot take a question."""

    def encode(self, text):
        if "?" in text:
            raise ValueError("questions are not for me")
        return super().encode(text)


class Spelt(Wrapped):
    """Reads control tokens as plain text."""

    def encode(self, text):
        return super().encode(text.replace("<", "< "))


class Nameless:
    """Has no special_tokens and no digest."""

    def __init__(self, folder: str) -> None: ...

    def encode(self, text): ...

    def decode(self, ids): ...


CUSTOM = {
    kind.__name__.lower(): kind for kind in (Wrapped, Newer, Astray, Short, Fails, Spelt, Nameless)
}


@pytest.fixture
def pipeline(kitchen):
    def make(name, **options):
        spec = kitchen.spec(tokenizer_code=CodeSpec(name=name, options=options))
        return build_pipeline(spec, custom_processors=CUSTOM)

    return make


def talk(question: str) -> dict[str, object]:
    said = [("user", question), ("assistant", "the cat sat"), ("user", "and"), ("assistant", "so")]
    return {"messages": [{"role": role, "content": text} for role, text in said]}


def test_ids_labels_and_places_of_media_are_those_of_the_same_tokenizer_json(
    kitchen, pipeline, sample, files
):
    pictures = [files.blob("image", files.image()), files.blob("video", files.video(6))]
    theirs, ours = pipeline("wrapped"), kitchen.pipeline()
    for raw in (
        sample({"text": "the cat <|im_end|> sat"}),
        sample(talk("what did the user hear <|im_start|> ?")),
        sample(talk("<image> and <video>?"), *pictures),
    ):
        lengths = theirs.measure(raw)
        assert lengths == ours.measure(raw)
        made, wanted = theirs.decode(raw, lengths), ours.decode(raw, lengths)
        assert np.array_equal(made.input_ids, wanted.input_ids)
        assert np.array_equal(made.labels, wanted.labels)
        ids = made.input_ids.tolist()
        assert theirs.text_of(ids, 0, len(ids)) == ours.text_of(ids, 0, len(ids))


def test_its_code_its_options_and_its_files_are_part_of_the_identity(kitchen, pipeline):
    before = pipeline("wrapped").digests["tokenizer"]
    assert pipeline("wrapped").digests["tokenizer"] == before
    assert pipeline("newer").digests["tokenizer"] != before
    assert pipeline("wrapped", strip=True).digests["tokenizer"] != before
    kitchen.tokenizer.add_tokens(["catsat"])
    kitchen.tokenizer.save(str(kitchen.folder / "tokenizer.json"))
    assert pipeline("wrapped").digests["tokenizer"] != before


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("secret", {}, r"tokenizer 'secret' is not in the service's config"),
        ("wrapped", {"folder": "/etc"}, r"has the option folder, which is the pipeline's"),
        ("wrapped", {"upper": True}, r"cannot be made with options"),
        ("nameless", {}, r"is a Nameless without encode\(text\), .*OwnTokenizer"),
        ("spelt", {}, r"special token '<\|endoftext\|>' and does not encode it as its one id"),
    ],
)
def test_a_tokenizer_that_cannot_be_used_says_why(pipeline, name, options, message):
    with pytest.raises(SpecError, match=message):
        pipeline(name, **options)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("fails", r"'fails' failed with ValueError: questions are not for me"),
        ("short", r"there is a span for each id"),
    ],
)
def test_a_text_that_it_fails_on_is_left_out_with_the_reason(pipeline, sample, name, message):
    made = pipeline(name)
    assert made.measure(sample({"text": "the cat"})).llm_tokens
    with pytest.raises(SampleError, match=message):
        made.measure(sample({"text": "the cat?"}))


def test_spans_that_leave_the_text_are_refused_when_it_is_loaded(pipeline):
    with pytest.raises(SpecError, match=r"'astray' has the special token"):
        pipeline("astray")
