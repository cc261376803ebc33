"""Whose text is whose in a rendered template, whatever the template makes of the turns."""

import json

import pytest

from dataservice.core.errors import SampleError

TURN = "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
PROMPT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
# What it shows of the past depends on what follows, so that the prefix difference is of no use.
FORGETFUL = TURN.replace("m.content", "(m.content if loop.last else m.content | upper)")
CHAT = [
    {"role": "user", "content": "ask"},
    {"role": "assistant", "content": "yes"},
    {"role": "user", "content": "again"},
    {"role": "assistant", "content": "no"},
]
LEARNT = ["YES<|im_end|>", "no<|im_end|>"]


@pytest.fixture
def learnt(kitchen, sample):
    """The texts that a template teaches of a conversation."""

    def of(template: str, messages: list[dict[str, object]] = CHAT) -> list[str]:
        kitchen.configure(template)
        pipeline = kitchen.pipeline(vision=None, audio=None)
        raw = sample({"messages": messages})
        return kitchen.learnt(pipeline.decode(raw, pipeline.measure(raw)).labels)

    return of


@pytest.mark.parametrize(
    "loop",
    [
        "{% for m in messages %}{turn}{% endfor %}",
        "{% for m in messages | rejectattr('role', 'equalto', 'none') %}{turn}{% endfor %}",
        "{% for m in messages if m.content %}{turn}{% endfor %}",
        "{% for m in messages %}{turn}{% set m = 'over' %}{% endfor %}",
        "{% for m in messages %}{% if m.role == 'user' %}{turn}{% continue %}{% endif %}{turn}"
        "{% endfor %}",
        "{% for m in messages %}{turn}{% if loop.last %}{% break %}{% endif %}{% endfor %}",
        "{% for m in [] %}{% else %}{% for m in messages %}{turn}{% endfor %}{% endfor %}",
        "{% for m in messages %}{% for other in messages %}{% endfor %}{turn}{% endfor %}",
        "{% for m in messages %}{% for other in messages %}\n\n{% endfor %}{% endfor %}"
        "{% for m in messages %}{turn}{% endfor %}",
        "{% for k, m in [(1, messages)] %}{% for m in m %}{turn}{% endfor %}{% endfor %}",
        "{% for k in range(messages | length) %}{% set m = messages[k] %}{turn}{% endfor %}",
        "{% macro show(m, loop) %}{turn}{% endmacro %}"
        "{% for m in messages %}{{ show(m, loop) }}{% endfor %}",
        "{% set all %}{% for m in messages %}{turn}{% endfor %}{% endset %}{{ all }}",
    ],
)
def test_a_turn_is_found_in_any_loop_over_turns(learnt, loop):
    assert learnt(loop.replace("{turn}", FORGETFUL) + PROMPT) == LEARNT


@pytest.mark.parametrize(
    "opaque",
    [
        # Copies of turns, and texts without them.
        "{% set ns = namespace(all=[]) %}{% for m in messages %}"
        "{% set ns.all = ns.all + [{'role': m.role, 'content': m.content}] %}{% endfor %}"
        "{% for m in ns.all %}{turn}{% endfor %}",
        "{% set roles = messages | map(attribute='role') | list %}"
        "{% for m in messages | map(attribute='content') %}"
        "{{ '<|im_start|>' + roles[loop.index0] + '\n' + (m if loop.last else m | upper) }}"
        "{% endfor %}",
        # An assistant's iteration that shows the next question too.
        "{% for m in messages %}{% if m.role == 'assistant' %}{turn}{% if not loop.last %}"
        "{{ messages[loop.index].content }}{% endif %}{% elif loop.first %}{turn}{% endif %}"
        "{% endfor %}",
        # An answer that is quoted elsewhere, and one that is written twice.
        "{{ messages[-1].content }}{% for m in messages %}{turn}{% endfor %}",
        "{% for m in messages %}{turn}{% endfor %}{% for m in messages %}{turn}{% endfor %}",
        # Marks that a filter cuts.
        "{% set all %}{% for m in messages %}{turn}{% endfor %}{% endset %}{{ all[:-1] }}",
    ],
)
def test_a_sample_is_refused_where_it_cannot_be_told_whose_text_is_whose(learnt, opaque):
    with pytest.raises(SampleError, match=r"does not tell which text.*\(4 turns\).*generation"):
        learnt(opaque.replace("{turn}", FORGETFUL) + PROMPT)


def test_what_leaves_earlier_turns_as_they_are_needs_no_loop_over_them(learnt):
    copied = (
        "{% set ns = namespace(all=[]) %}{% for m in messages %}"
        "{% set ns.all = ns.all + [{'role': m.role, 'content': m.content}] %}{% endfor %}"
        "{% for m in ns.all %}" + TURN + "{% endfor %}" + PROMPT
    )
    assert learnt(copied) == ["yes<|im_end|>", "no<|im_end|>"]


@pytest.mark.parametrize(
    "turn",
    [
        TURN,
        FORGETFUL,
        "{% if m.role == 'assistant' %}{{ '<|im_start|>assistant\n' }}"
        "{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
        "{% else %}" + TURN + "{% endif %}",
    ],
)
@pytest.mark.parametrize("weights", [(0, 1), (1, 0), (0.0, None), (None, None), (0, 0)])
def test_an_answer_of_weight_0_is_not_learnt(learnt, turn, weights):
    template = "{% for m in messages %}" + turn + "{% endfor %}" + PROMPT
    first, last = (weight is None or weight > 0 for weight in weights)
    weighed = [dict(said) for said in CHAT]
    weighed[1]["weight"], weighed[3]["weight"] = weights
    weighed[0]["weight"] = 0  # as some write of all that is not learnt
    expected = learnt(template)
    assert len(expected) == 2
    assert learnt(template, weighed) == [*expected[: 1 * first], *expected[1 : 1 + last]]
    for key in ("loss", "train", "training"):
        told = [
            {
                **{k: v for k, v in turn.items() if k != "weight"},
                key: None if weight is None else weight > 0,
            }
            for turn in weighed
            for weight in [turn.get("weight")]
        ]
        assert learnt(template, told) == [*expected[: 1 * first], *expected[1 : 1 + last]]


def test_a_weight_is_refused_where_it_is_unclear_which_text_is_that_turn_s(learnt):
    once = "{% generation %}{% for m in messages %}" + TURN + "{% endfor %}{% endgeneration %}"
    weighed = [*CHAT[:3], {**CHAT[3], "weight": 0}]
    with pytest.raises(SampleError, match=r"weight 0, and .* 1 stretches .* for 2 turns"):
        learnt(once, weighed)


@pytest.mark.parametrize("said", ["＜|im_end|＞", "<|IM_END|>", "<|im_end|>"])
def test_no_text_becomes_a_control_token_by_the_tokenizer_s_normalizer(kitchen, sample, said):
    written = json.loads((kitchen.folder / "tokenizer.json").read_text())
    kinds = [{"type": "NFKC"}, {"type": "Lowercase"}]
    written["normalizer"] = {"type": "Sequence", "normalizers": kinds}
    for token in written["added_tokens"]:
        token["normalized"] = True
    (kitchen.folder / "tokenizer.json").write_text(json.dumps(written))
    pipeline = kitchen.pipeline(vision=None, audio=None)
    plain = sample({"messages": [CHAT[0], CHAT[1]]})
    ends = pipeline.decode(plain, pipeline.measure(plain)).input_ids.tolist()
    raw = sample({"messages": [{"role": "user", "content": f"a {said} b"}, CHAT[1]]})
    if said == "<|im_end|>":  # which is broken as ever
        found = pipeline.decode(raw, pipeline.measure(raw)).input_ids.tolist()
        assert found.count(kitchen.id(said)) == ends.count(kitchen.id(said))
    else:
        with pytest.raises(SampleError, match="normalizer turns into a control token"):
            pipeline.measure(raw)


def test_a_processor_s_template_comes_before_the_tokenizer_s(kitchen, sample):
    ask = sample({"messages": [CHAT[0], CHAT[1]]})

    def text() -> str:
        pipeline = kitchen.pipeline(vision=None, audio=None)
        return kitchen.decoded(pipeline.decode(ask, pipeline.measure(ask)).input_ids)

    shown = "{% for m in messages %}{{ m.content + 'MARK' }}{% endfor %}"
    kitchen.configure(shown.replace("MARK", "!"))
    assert text() == "ask!yes!"
    json_file = kitchen.folder / "chat_template.json"
    json_file.write_text(json.dumps({"chat_template": shown.replace("MARK", "?")}))
    assert text() == "ask?yes?"
    (kitchen.folder / "chat_template.jinja").write_text(shown.replace("MARK", ";"))
    assert text() == "ask;yes;"


def test_a_turn_that_says_nothing_learns_its_end(learnt):
    silent = [*CHAT[:3], {"role": "assistant", "content": ""}]
    template = "{% for m in messages %}" + FORGETFUL + "{% endfor %}" + PROMPT
    assert learnt(template, silent) == ["YES<|im_end|>", "<|im_end|>"]


def test_a_prompt_that_opens_thoughts_is_not_learnt_where_it_is_all_there(learnt):
    opens = PROMPT.replace("assistant\n", "assistant\n<think>\n")
    thinks = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
        "{% if loop.last and m.role == 'assistant' %}{{ '<think>\nhm\n' }}{% endif %}"
        "{{ m.content + '<|im_end|>\n' }}{% endfor %}" + opens
    )
    assert learnt(thinks) == ["yes<|im_end|>", "hm\nno<|im_end|>"]
    # Nor is an answer cut short because it begins as the prompt goes on.
    tagged = [CHAT[0], {"role": "assistant", "content": "<this>"}, *CHAT[2:]]
    assert learnt(thinks, tagged) == ["<this><|im_end|>", "hm\nno<|im_end|>"]


def test_templates_do_not_see_that_they_are_traced(learnt):
    template = "{% for m in messages %}" + FORGETFUL + "{{ m._place }}{% endfor %}" + PROMPT
    assert learnt(template) == LEARNT
    named = [{**turn, "place": "here"} for turn in CHAT]
    shown = "{% for m in messages %}" + FORGETFUL.replace("m.role +", "m.role + m.place +")
    assert learnt(shown + "{% endfor %}", named)[-1].endswith("assistanthere\nno<|im_end|>")


def test_numbers_too_long_to_read_are_no_marks(learnt):
    opened = "\ufdd1" + "9" * 5000 + "\ufdd1"
    with pytest.raises(SampleError, match="does not tell which text"):
        learnt("{% for m in messages %}" + FORGETFUL + opened + "{% endfor %}" + PROMPT)


# ---- as transformers hands conversations over --------------------------------------------------


@pytest.mark.parametrize("name", ["reasoning_content", "thinking", "reasoning"])
def test_thoughts_are_read_under_any_of_their_names(learnt, name):
    template = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
        "{% if m.reasoning_content %}{{ '<think>' + m.reasoning_content + '</think>' }}{% endif %}"
        "{{ m.content + '<|im_end|>\n' }}{% endfor %}" + PROMPT
    )
    thoughtful = [CHAT[0], {**CHAT[1], name: "hm"}]
    assert learnt(template, thoughtful) == ["<think>hm</think>yes<|im_end|>"]


def test_thoughts_that_a_template_never_reads_are_refused(learnt):
    template = "{% for m in messages %}" + TURN + "{% endfor %}" + PROMPT
    with pytest.raises(SampleError, match=r"does not show the conversation's thoughts"):
        learnt(template, [CHAT[0], {**CHAT[1], "reasoning_content": "hm"}])


def test_parts_stay_apart_where_the_template_takes_parts(learnt):
    trims = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.content is string %}"
        "{{ m.content | trim }}{% else %}{% for part in m.content %}{{ part.text | trim }}"
        "{% endfor %}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}" + PROMPT
    )
    parts = [{"type": "text", "text": " a "}, {"type": "text", "text": " b "}]
    assert learnt(trims, [CHAT[0], {"role": "assistant", "content": parts}]) == ["ab<|im_end|>"]
    assert learnt(trims, [CHAT[0], {"role": "assistant", "content": " a  b "}]) == [
        "a  b<|im_end|>"
    ]


@pytest.mark.parametrize("halves", [("<|im_", "end|>"), ("<|im_ ", " end|>")])
def test_no_control_token_hides_in_parts_that_a_template_joins(kitchen, sample, halves):
    kitchen.configure(
        "{% for m in messages %}{% for part in m.content %}{{ part.text | trim }}{% endfor %}"
        "{{ '<|im_end|>' }}{% endfor %}"
    )
    parts = [{"type": "text", "text": half} for half in halves]
    pipeline = kitchen.pipeline(vision=None, audio=None)
    raw = sample({"messages": [{"role": "user", "content": parts}]})
    ids = pipeline.decode(raw, pipeline.measure(raw)).input_ids
    assert ids.tolist().count(kitchen.id("<|im_end|>")) == 1
