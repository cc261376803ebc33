"""Token ids and loss of conversations, against transformers' `apply_chat_template`.

The judge renders and tokenises each template with its generation marks, and says which tokens they
cover. The service gets the template with them, and without them, as models publish it: then it must
find out by itself what an assistant's turn is.
"""

import functools
import random
import re

import pytest

from dataservice.core.errors import SampleError
from tests.decode.chat_templates import FAMILIES, SPECIALS
from tests.decode.parity import FACTOR
from tests.decode.template_bench import TOKENIZERS, Bench, conversation, served


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    @functools.cache
    def make(name: str, kind: str) -> Bench:
        folder = tmp_path_factory.mktemp("bench")
        tokenizer = TOKENIZERS[kind](SPECIALS)
        tokenizer.save(str(folder / "tokenizer.json"))
        return Bench(FAMILIES[name], folder, tokenizer)

    return make


def compare(bench: Bench, conversations: int) -> None:
    """Every conversation has the judge's ids, and learns what the marks cover: with the template's
    own marks, and without any."""
    family = bench.family
    pipelines = [bench.pipeline(template) for template in (family.own_marks, family.published)]
    draw = random.Random(0)
    for _ in range(conversations):
        record = conversation(draw, family)
        ids, learnt = bench.judged(record, family.own_marks)
        for pipeline in pipelines:
            ours, ours_learnt = served(pipeline, record)
            assert ours == ids, record
            assert ours_learnt == [False, *learnt[1:]], (
                record,
                bench.judge.decode(ids),
                [bench.judge.decode([i]) for i, a in zip(ids, ours_learnt, strict=True) if a],
            )


@pytest.mark.parametrize("name", FAMILIES)
def test_conversations_have_the_tokens_and_the_loss_of_transformers(bench, name):
    compare(bench(name, "byte level"), 25)


CHOOSY = (
    "{% if custom_instructions %}<|im_start|>system\n{{ custom_instructions }}<|im_end|>{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% generation %}{% if think is defined and not think %}nothing: {% endif %}{{ m.content }}"
    "<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TURNS = [{"role": "user", "content": "is it a cat"}, {"role": "assistant", "content": "it is"}]


@pytest.mark.parametrize(
    "values",
    [{"think": False}, {"think": True}, {"custom_instructions": "be kind", "think": None}, {}],
)
def test_a_template_is_given_the_values_that_the_record_has_for_it(bench, values):
    one = bench("default_system", "byte level")
    record = {"messages": TURNS, "chat_template_kwargs": values}
    ids, learnt = one.judged(record, CHOOSY)
    for template in (CHOOSY, re.sub(r"{% (end)?generation %}", "", CHOOSY)):
        assert served(one.pipeline(template), record) == (ids, learnt)
    plain = served(one.pipeline(CHOOSY), {"messages": TURNS})
    assert (plain == (ids, learnt)) == (values in ({"think": True}, {}))


def test_a_value_that_the_template_does_not_show_and_one_that_it_has_anyway_are_refused(bench):
    one = bench("default_system", "byte level")
    pipeline = one.pipeline(CHOOSY)
    for values, reason in (
        ({"xml_tools": "[find]"}, "does not show the conversation's xml_tools"),
        ({"messages": []}, "none of .*messages"),
        ("{}", "must be an object"),
    ):
        with pytest.raises(SampleError, match=reason):
            served(pipeline, {"messages": TURNS, "chat_template_kwargs": values})
    control = {"custom_instructions": "<|im_end|>"}
    ids, _ = served(pipeline, {"messages": TURNS, "chat_template_kwargs": control})
    assert ids.count(one.tokenizer.token_to_id("<|im_end|>")) == 3  # those of the template


@pytest.mark.parametrize("name", ["plain_roles", "instructions"])
def test_a_token_that_carries_the_space_before_an_answer_is_learnt(bench, name):
    compare(bench(name, "sentencepiece"), 15)


@pytest.mark.long
@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("name", FAMILIES)
def test_many_more_conversations_have_the_tokens_and_the_loss_of_transformers(bench, name, kind):
    compare(bench(name, kind), 25 * FACTOR)
