"""Tokenizers that fail: what Rust panics on is refused like any other fault."""

import json

import pytest
from transformers import AutoTokenizer

from dataservice.core.errors import SampleError, SpecError
from dataservice.decode import tokenizer as module
from dataservice.decode.tokenizer import load_tokenizer

# Oniguruma gives up on a text of this kind: its retries are limited.
PATIENCE = {
    "type": "Split",
    "pattern": {"Regex": "(a+)+$"},
    "behavior": "Isolated",
    "invert": False,
}
HOPELESS = "a" * 40 + "b"


def altered(kitchen, **changes):
    """The kitchen's tokenizer.json with other parts."""
    file = kitchen.folder / "tokenizer.json"
    plain = json.loads(file.read_text())
    file.write_text(json.dumps(plain | changes))
    return kitchen


def broken_merges(kitchen):
    plain = json.loads((kitchen.folder / "tokenizer.json").read_text())
    model = plain["model"] | {
        "continuing_subword_prefix": "ééé",
        "vocab": {"a": 0, "b": 1, "ab": 2, "éa": 3, "aa": 4},
        "merges": ["a b", "a éa"],
    }
    return altered(kitchen, model=model, added_tokens=[])


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"pre_tokenizer": PATIENCE | {"pattern": {"Regex": "("}}}, "cannot be read: .*unmatched"),
        ({"pre_tokenizer": {"type": "FixedLength", "length": 0}}, "panics on plain text: chunk"),
    ],
)
def test_a_tokenizer_that_cannot_work_is_refused_when_it_is_loaded(kitchen, changes, reason):
    with pytest.raises(SpecError, match=reason):
        altered(kitchen, **changes).pipeline()


@pytest.mark.parametrize("name", ["Qwen/Qwen2.5-VL-7B-Instruct", ""])
def test_a_tokenizer_that_is_not_there_is_told_with_the_way_to_get_it(kitchen, name):
    (kitchen.folder / "tokenizer.json").unlink()
    with pytest.raises(SpecError, match=r"No such file.*of the Hugging Face Hub is not downloaded"):
        load_tokenizer(str(kitchen.folder / name))


def test_a_panic_while_loading_is_refused_like_any_other_damage(kitchen):
    with pytest.raises(SpecError, match="cannot be read: range end index"):
        broken_merges(kitchen).pipeline()


def test_a_text_on_which_the_tokenizer_panics_is_a_bad_sample(kitchen, sample):
    pipeline = altered(kitchen, pre_tokenizer=PATIENCE).pipeline()
    assert pipeline.measure(sample({"text": "the cat"})).llm_tokens
    with pytest.raises(SampleError, match=r"fails on the text \(\d+ characters\): Onig.*retry"):
        pipeline.measure(sample({"text": HOPELESS}))
    assert pipeline.measure(sample({"text": "the cat"})).llm_tokens


def test_a_text_without_a_token_is_a_bad_sample(kitchen, sample):
    model = {"type": "WordLevel", "vocab": {"cat": 0, "<|endoftext|>": 1}, "unk_token": "none"}
    words = altered(kitchen, model=model, pre_tokenizer={"type": "Whitespace"}, added_tokens=[])
    words.configure(None)
    pipeline = words.pipeline(vision=None, audio=None, end_of_document_token="cat")
    with pytest.raises(SampleError, match=r"fails on the text.*Missing"):
        pipeline.measure(sample({"text": "dog"}))


def test_an_id_that_no_int32_holds_is_a_bad_sample(kitchen, sample):
    model = {"type": "WordLevel", "vocab": {"cat": 2**32 - 1, "end": 1}, "unk_token": "end"}
    words = altered(kitchen, model=model, pre_tokenizer={"type": "Whitespace"}, added_tokens=[])
    words.configure(None)
    pipeline = words.pipeline(vision=None, audio=None, end_of_document_token="end")
    with pytest.raises(SampleError, match=r"id of 2\*\*31 or more"):
        pipeline.measure(sample({"text": "cat "}))


def test_panics_do_not_fill_the_log(kitchen, monkeypatch, capfd):
    monkeypatch.setattr(module, "MOST_PANICS", 3)
    loaded = load_tokenizer(str(altered(kitchen, pre_tokenizer=PATIENCE).folder))
    for offsets in (True, False, True):
        with pytest.raises(SampleError, match="fails on the text"):
            loaded.encode(HOPELESS, offsets=offsets)
    capfd.readouterr()
    for _ in range(5):
        with pytest.raises(SampleError, match="panicked on 3 texts and is used no more"):
            loaded.encode(HOPELESS)
    assert capfd.readouterr().err == ""


def test_the_end_of_the_process_is_no_fault_of_the_tokenizer(kitchen):
    loaded = load_tokenizer(str(kitchen.folder))

    class Interrupted:
        def encode(self, text, add_special_tokens):
            raise KeyboardInterrupt

    object.__setattr__(loaded, "tokenizer", Interrupted())
    with pytest.raises(KeyboardInterrupt):
        loaded.encode("cat")


@pytest.mark.parametrize("broken", [b"\xff\xfe", None])
def test_a_template_file_that_cannot_be_read_is_refused(kitchen, broken):
    file = kitchen.folder / "chat_template.jinja"
    file.write_bytes(broken) if broken else file.mkdir()
    with pytest.raises(SpecError, match=r"chat_template\.jinja cannot be read"):
        kitchen.pipeline()


def test_templates_by_name_may_be_of_any_form(kitchen, sample):
    kitchen.configure(None, chat_template=["x", {"name": "default", "template": "{{ messages }}"}])
    assert kitchen.pipeline().measure(sample({"text": "the cat"})).llm_tokens


def test_templates_of_which_none_is_for_chat_are_not_replaced_by_chatml(kitchen, sample):
    named = [{"name": "tool_use", "template": "{{ messages }}"}]
    kitchen.configure(None, chat_template=named, pad_token="<|endoftext|>")
    with pytest.raises(ValueError, match="no default"):  # transformers picks none either
        AutoTokenizer.from_pretrained(kitchen.folder).apply_chat_template(CHAT["messages"])
    pipeline = kitchen.pipeline()
    with pytest.raises(SampleError, match=r"templates 'tool_use', and none .* FILE\.jinja"):
        pipeline.measure(sample(CHAT))
    assert pipeline.measure(sample({"text": "the cat"})).llm_tokens
    chosen = kitchen.pipeline(chat_template="chatml")
    assert chosen.measure(sample(CHAT)).llm_tokens


BEGINS = "{{ bos_token }}{{ sep2 }}{% for m in messages %}{{ m.content }}{% endfor %}"
CHAT = {"messages": [{"role": "user", "content": "cat"}]}


@pytest.mark.parametrize(
    ("file", "tokens"),
    [
        ("special_tokens_map", {"bos_token": {"content": "<|im_start|>"}}),
        ("tokenizer_config", {"extra_special_tokens": {"sep2": "<|im_start|>"}}),
        ("tokenizer_config", {"model_specific_special_tokens": {"sep2": "<|im_start|>"}}),
    ],
)
def test_a_template_is_given_the_tokens_that_transformers_gives_it(kitchen, sample, file, tokens):
    kitchen.configure(BEGINS, pad_token="<|endoftext|>")
    place = kitchen.folder / f"{file}.json"
    given = json.loads(place.read_text()) if place.exists() else {}
    place.write_text(json.dumps(given | tokens))
    ids = AutoTokenizer.from_pretrained(kitchen.folder).apply_chat_template(
        CHAT["messages"], return_dict=True
    )["input_ids"]
    pipeline = kitchen.pipeline()
    decoded = pipeline.decode(sample(CHAT), pipeline.measure(sample(CHAT)))
    assert decoded.input_ids.tolist() == ids
    assert pipeline.text_of(ids, 0, len(ids)) == "<|im_start|>cat"


@pytest.mark.parametrize(
    ("template", "tokens"),
    [
        (BEGINS, {"bos_token": "<begin>"}),
        ("{{ messages }}", {"bos_token": "<begin>", "add_bos_token": True}),
        ("<begin>{{ messages }}", {"added_tokens_decoder": {"9": {"content": "<begin>"}}}),
        ("<begin>{{ messages }}", {"additional_special_tokens": ["<|im_end|>", "<begin>"]}),
    ],
)
def test_a_token_that_only_the_configuration_has_is_refused_where_it_would_be_written(
    kitchen, template, tokens
):
    kitchen.configure(template, **tokens)
    with pytest.raises(SpecError, match="does not have '<begin>', which its configuration names"):
        kitchen.pipeline()
    kitchen.configure(BEGINS, pad_token="<begin>")  # which it does not write
    kitchen.pipeline()


def test_so_is_one_of_the_file_that_older_releases_kept_added_tokens_in(kitchen):
    kitchen.configure("<begin>{{ messages }}")
    (kitchen.folder / "added_tokens.json").write_text('{"<begin>": 900}')
    with pytest.raises(SpecError, match=r"does not have '<begin>'.*'added_tokens\.json: 900'"):
        kitchen.pipeline()
