"""The ids of a text from those of its words are the library's own."""

import numpy as np
import pytest
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from dataservice.decode import word_tokens
from dataservice.decode.tokenizer import load_tokenizer

SPECIALS = ["<|end|>", "<|end|>s", "<|start|>", "<b>", "<", "\u00a7"]
QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LATIN = [*"the cat sat on a warm mat  \n\r\t'S'll12\u00a0\u017f", "\0", "!?", "<|", *SPECIALS]
ANY = [*LATIN, *"éß猫\U0001f431\u0301\u1100\u1161日本\u200d"]
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


def split(pattern: str = QWEN, behavior: str = "isolated") -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Split(Regex(pattern), behavior)


@pytest.fixture
def tokenizer() -> Tokenizer:
    """Byte-level BPE with Qwen's pattern."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.Sequence([split(), BYTES])
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(["the cat sat on a warm mat; that's what they'll say\n"], trainer)
    return made


@pytest.fixture
def load(tmp_path):
    def load(tokenizer: Tokenizer):
        file = tmp_path / "tokenizer.json"
        tokenizer.save(str(file))
        return load_tokenizer(str(file))

    return load


def texts(alphabet: list[str], count: int = 400) -> list[str]:
    rng = np.random.default_rng(0)
    return ["".join(rng.choice(alphabet, length)) for length in rng.integers(0, 120, count)]


CHANGES = {
    "as Qwen has it, without its normaliser": {},
    "as Qwen has it": {"normalizer": normalizers.NFC()},
    "another normaliser": {"normalizer": normalizers.NFKD()},
    "two patterns, of which one drops what it finds": {
        "pre_tokenizer": pre_tokenizers.Sequence([split(r"\s", "removed"), split(), BYTES])
    },
    "as Llama has it": {
        "post_processor": processors.Sequence(
            [
                processors.ByteLevel(trim_offsets=False),
                processors.TemplateProcessing(
                    single="<|start|> $A", pair="$A $B", special_tokens=[("<|start|>", 2)]
                ),
            ]
        )
    },
}


@pytest.mark.parametrize("alphabet", [LATIN, ANY], ids=["latin", "any"])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_ids_of_words_are_those_of_the_text(tokenizer, load, change, alphabet):
    for name, value in change.items():
        setattr(tokenizer, name, value)
    loaded = load(tokenizer)
    given = texts(alphabet)
    found = loaded.encode_each(given)
    for text, tokens in zip(given, found, strict=True):
        assert tokens.ids.dtype == np.int32
        assert tokens.ids.tolist() == tokenizer.encode(text, add_special_tokens=False).ids


@pytest.fixture
def always(monkeypatch):
    """No text is left to the library because the ones before it had new words."""
    monkeypatch.setattr(word_tokens, "MOST_NEW", 1.0)


@pytest.mark.parametrize("most_words", [2**15, 5])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_so_they_are_where_no_text_is_left_to_the_library(
    tokenizer, load, monkeypatch, always, change, most_words
):
    for name, value in change.items():
        setattr(tokenizer, name, value)
    monkeypatch.setattr(word_tokens, "MOST_WORDS", most_words)
    words = load(tokenizer).words
    taken = [
        text for text in texts(ANY if "normalizer" not in change else LATIN) if words.takes(text)
    ]
    assert len(taken) > 10
    for text in taken * 2:
        assert words.ids(text).tolist() == tokenizer.encode(text, add_special_tokens=False).ids


def test_texts_of_new_words_are_left_to_the_library_for_a_while(tokenizer, load):
    words = load(tokenizer).words
    words.ids("the cat sat")
    assert [words.takes("the cat") for _ in range(18)] == [False] * 16 + [True] * 2
    words.ids("the cat sat")
    assert words.takes("the cat")


def test_so_are_the_next_texts_of_the_same_order(tokenizer, load, monkeypatch):
    loaded = load(tokenizer)
    cut, ids = [], loaded.words.ids
    monkeypatch.setattr(
        type(loaded.words), "ids", lambda words, text: (cut.append(text), ids(text))[1]
    )
    loaded.encode_each([f"{word} the cat" for word in "abcdefghijklmnop"])
    assert cut == ["a the cat"]


@pytest.mark.parametrize("text", ["日本語の文", "кот сидел на"])
def test_texts_of_scripts_other_than_latin_are_left_to_the_library(tokenizer, load, text):
    words = load(tokenizer).words
    assert words.takes("the cat")
    assert words.takes("Müllers Katze saß warm")
    assert not words.takes(text)


def lowercase(tokenizer):
    tokenizer.normalizer = normalizers.Lowercase()


def dropout(tokenizer):
    tokenizer.model.dropout = 0.1


def no_pattern(tokenizer):
    tokenizer.pre_tokenizer = BYTES


def pattern_of_its_own(tokenizer):
    own = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split(), own])


def space_in_front(tokenizer):
    spaced = pre_tokenizers.ByteLevel(add_prefix_space=True, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split(), spaced])


def other_step(tokenizer):
    digits = pre_tokenizers.Metaspace()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, BYTES])


def swallows_space(tokenizer):
    tokenizer.add_tokens([AddedToken("<c>", lstrip=True, normalized=False)])


def only_between_words(tokenizer):
    tokenizer.add_tokens([AddedToken("at", single_word=True, normalized=False)])


def found_behind_the_normaliser(tokenizer):
    tokenizer.add_tokens([AddedToken("cat", normalized=True)])


def twice(tokenizer):
    tokenizer.post_processor = processors.TemplateProcessing(single="$A $A", pair="$A $B")


def many_beginnings(tokenizer):
    tokenizer.add_special_tokens([f"{chr(0x4E00 + k)}>" for k in range(100)])


def unigram(tokenizer):
    tokenizer.model = models.Unigram([("<unk>", 0.0), *((c, -1.0) for c in "the cat")], 0)


@pytest.mark.parametrize(
    "change",
    [
        lowercase,
        dropout,
        no_pattern,
        pattern_of_its_own,
        space_in_front,
        other_step,
        swallows_space,
        only_between_words,
        found_behind_the_normaliser,
        twice,
        many_beginnings,
        unigram,
    ],
)
def test_a_tokenizer_that_does_more_than_that_is_the_librarys(tokenizer, load, change):
    change(tokenizer)
    assert load(tokenizer).words is None


def test_where_the_library_makes_something_else_of_a_probe_it_gets_all_texts(
    tokenizer: Tokenizer, load, monkeypatch: pytest.MonkeyPatch
):
    assert load(tokenizer).words is not None
    monkeypatch.setattr(word_tokens.WordTokens, "ids", lambda _, text: np.zeros(1, np.int32))
    assert load(tokenizer).words is None


def test_where_a_probe_fails_the_library_gets_all_texts(
    tokenizer: Tokenizer, load, monkeypatch: pytest.MonkeyPatch
):
    def fails(_: object, text: str):
        raise RuntimeError("no such step")

    monkeypatch.setattr(word_tokens.WordTokens, "ids", fails)
    assert load(tokenizer).words is None
