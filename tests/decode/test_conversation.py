"""Records of every dialect to turns and placeholders."""

import json

import pytest

from dataservice.core.errors import SampleError
from dataservice.decode.conversation import Conversation, Document, MediaPart, read_record

IMAGE, VIDEO, AUDIO = (MediaPart(kind=kind) for kind in ("image", "video", "audio"))


def turns(record, *media, placeholders="strict"):
    conversation = read_record(record, media, placeholders)
    assert isinstance(conversation, Conversation)
    return [(message.role, message.parts) for message in conversation.messages]


def test_openai_messages_hold_strings_or_parts():
    record = {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {
                "role": "user",
                "content": [
                    {"type": "image_url", "image_url": {"url": "a.jpg"}},
                    {"type": "text", "text": "What is "},
                    {"type": "text", "text": "this?"},
                    {"type": "input_audio", "input_audio": {}},
                ],
            },
            {"role": "assistant", "content": "A cat."},
        ]
    }
    assert turns(record, "image", "audio") == [
        ("system", ("Be brief.",)),
        ("user", (IMAGE, "What is ", "this?", AUDIO)),
        ("assistant", ("A cat.",)),
    ]


def test_placeholder_like_text_beside_media_parts_stays_text():
    content = [{"type": "image"}, {"type": "text", "text": "Explain <image> and <video>."}]
    record = {"messages": [{"role": "user", "content": content}]}
    assert turns(record, "image") == [("user", (IMAGE, "Explain <image> and <video>."))]


def test_messages_without_parts_may_name_media_in_their_text():
    record = {"messages": [{"role": "user", "content": "<image>Look <video>"}]}
    assert turns(record, "image", "video") == [("user", (IMAGE, "Look ", VIDEO))]


def test_sharegpt_roles_become_chat_roles():
    senders = ["system", "human", "gpt", "user", "assistant", "tool", "observation"]
    record = {"conversations": [{"from": s, "value": "hello"} for s in senders]}
    roles = [role for role, _ in turns(record)]
    assert roles == ["system", "user", "assistant", "user", "assistant", "tool", "tool"]


def test_a_system_prompt_in_its_own_key_comes_first():
    record = {"system": "Be kind.", "conversations": [{"from": "human", "value": "hello"}]}
    assert turns(record) == [("system", ("Be kind.",)), ("user", ("hello",))]


def test_a_system_prompt_that_is_there_twice_is_shown_once():
    turn = {"role": "system", "content": "Be brief."}
    record = {"system": "Be brief.", "messages": [turn, {"role": "user", "content": "Hi"}]}
    assert turns(record) == [("system", ("Be brief.",)), ("user", ("Hi",))]


def test_parts_may_say_which_of_the_record_s_files_they_show():
    parts = [{"type": "image", "index": 0}, {"type": "text", "index": None, "text": "and"}]
    again = [{"type": "image", "index": 1}, {"type": "audio", "index": 0}]
    record = {"messages": [{"role": "user", "content": each} for each in (parts, again)]}
    assert turns(record, "image", "image", "audio") == [
        ("user", (IMAGE, "and")),
        ("user", (IMAGE, AUDIO)),
    ]


def test_llava_text_holds_the_placeholders_of_its_files():
    record = {
        "image": "a.jpg",
        "conversations": [
            {"from": "human", "value": "<image>\n<video>\nWhat?"},
            {"from": "gpt", "value": "It is <audio> loud."},
        ],
    }
    assert turns(record, "image", "video", "audio") == [
        ("user", (IMAGE, "\n", VIDEO, "\nWhat?")),
        ("assistant", ("It is ", AUDIO, " loud.")),
    ]


@pytest.mark.parametrize(
    "text",
    [
        "Write <video></video>, not <video>!",
        "RSS has <image><url>a.png</url></image>.",
        "Use the `<image>` element of SVG.",
        "```html\n<audio>\n<source>\n```",
        "An <image href='a.png'/>, an <IMAGE>, an <img>.",
    ],
)
@pytest.mark.parametrize("placeholders", ["strict", "text"])
def test_markup_in_a_text_without_media_stays_text(text, placeholders):
    record = {"conversations": [{"from": "human", "value": text}]}
    assert turns(record, placeholders=placeholders) == [("user", (text,))]


@pytest.mark.parametrize(
    "text",
    [
        "<image>\nWhat?",
        "See the <image> here",
        "A `tick`, an <image>",
        "a ` and <image>",
        "<audio>",
    ],
)
def test_a_placeholder_whose_file_is_lost_is_no_text_unless_the_source_says_so(text):
    chat = {"conversations": [{"from": "human", "value": text}]}
    for record in (chat, {"text": text}, {"messages": [{"role": "user", "content": text}]}):
        with pytest.raises(SampleError, match=r"1 placeholders .*placeholders: text in the source"):
            read_record(record, [])
        read_record(record, [], "text")
    assert turns(chat, placeholders="text") == [("user", (text,))]


def test_with_placeholders_as_text_those_of_the_samples_own_files_still_count():
    record = {"conversations": [{"from": "human", "value": "<image> or <video>?"}]}
    assert turns(record, "image", placeholders="text") == [("user", (IMAGE, " or <video>?"))]


def test_many_placeholders_in_one_text_take_linear_time():
    text = "`<image>` " * 100_000
    assert turns({"messages": [{"role": "user", "content": text}]}) == [("user", (text,))]


def test_conversations_may_be_written_with_role_and_content():
    record = {"conversations": [{"role": "user", "content": "<image>hi", "from": None}]}
    assert turns(record, "image") == [("user", (IMAGE, "hi"))]


def test_rows_of_parquet_have_nulls_and_json_strings():
    content = [{"type": "text", "text": "hi", "image": None}, {"type": "image", "text": None}]
    messages = [{"role": "user", "content": content, "tool_calls": None}]
    record = {"messages": messages, "conversations": None, "text": None}
    assert turns(record, "image") == [("user", ("hi", IMAGE))]
    conversations = json.dumps([{"from": "human", "value": "hi"}])
    assert turns({"messages": None, "conversations": conversations}) == [("user", ("hi",))]


def test_other_keys_of_a_message_are_kept_for_the_template():
    record = {
        "messages": [{"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}],
        "tools": [{"name": "f"}],
    }
    with pytest.raises(SampleError, match="empty"):
        read_record(record, [])
    record["messages"].insert(0, {"role": "user", "content": "call f", "name": "ann"})
    conversation = read_record(record, [])
    assert conversation.messages[0].extras == {"name": "ann"}
    assert conversation.messages[1].extras == {"tool_calls": [{"name": "f"}]}
    assert conversation.tools == [{"name": "f"}]


def test_a_document_shows_media_where_it_says_or_else_first():
    assert read_record({"text": "a <image> b"}, ["image"]) == Document(parts=("a ", IMAGE, " b"))
    assert read_record({"text": "a cat"}, ["image"]) == Document(parts=(IMAGE, "a cat"))
    with pytest.raises(SampleError, match="0 placeholders for audio"):
        read_record({"text": "a <image> b"}, ["image", "audio"])


@pytest.mark.parametrize("key", ["sentence", "transcription", "transcript"])
def test_a_transcript_beside_sound_is_a_document_behind_it(key):
    assert read_record({key: "a cat"}, ["audio"]) == Document(parts=(AUDIO, "a cat"))
    with pytest.raises(SampleError, match=r"needs messages, .*with media, caption"):
        read_record({key: "a cat"}, [])


def test_tools_may_be_a_string_of_json_and_turns_of_sharegpt_keep_their_calls():
    record = {
        "system": "Be kind.",
        "tools": '[{"name": "f"}]',
        "conversations": [
            {"from": "human", "value": "call f"},
            {"from": "gpt", "value": "", "tool_calls": [{"name": "f"}], "weight": None},
        ],
    }
    conversation = read_record(record, [])
    assert conversation.tools == [{"name": "f"}]
    assert conversation.messages[2].extras == {"tool_calls": [{"name": "f"}]}
    openai = {"system": "Be kind.", "messages": [{"role": "user", "content": "hello"}]}
    assert turns(openai) == [("system", ("Be kind.",)), ("user", ("hello",))]


@pytest.mark.parametrize(
    ("record", "media", "message"),
    [
        ({"caption": "x"}, (), r"keys \['caption'\]; it needs messages, .*with media, caption"),
        ({"caption": 3}, ("image",), "caption is 3, of type int; it must be a text"),
        ({"text": ["a", "b"]}, (), r"text is \['a', 'b'\], of type list; it must be a text"),
        ({"sentence": {"en": "a"}}, ("audio",), "sentence is .* of type dict; it must be a text"),
        ({"texts": "a", "id": 1}, (), "texts is 'a', of type str; it must be a list of texts"),
        ({"messages": []}, (), "holds 0 turns"),
        ({"messages": ["hi"]}, (), "turns of type str"),
        ({"messages": "[{"}, (), "not JSON"),
        ({"messages": [{"content": "x"}]}, (), "role None"),
        ({"messages": [{"role": "user", "content": [{"type": "smell"}]}]}, (), "a part must be"),
        ({"messages": [{"role": "user", "content": [{"type": ["text"]}]}]}, (), "a part must be"),
        ({"messages": [{"role": "user", "content": 3}]}, (), "a part must be"),
        (
            {"messages": [{"role": "assistant", "content": "x", "weight": 0.5}]},
            (),
            "role 'assistant' has weight 0.5; an assistant's weight may be 0",
        ),
        (
            {"messages": [{"role": "assistant", "content": "x", "loss": 1}]},
            (),
            "role 'assistant' has loss 1; .* its loss and train false or true",
        ),
        (
            {"conversations": [{"from": "human", "value": "x", "weight": 1}]},
            (),
            "role 'user' has weight 1; .* others' 0 and false",
        ),
        (
            {"messages": [{"role": "assistant", "content": None, "refusal": "I can't."}]},
            (),
            'a turn of messages has a refusal, "I can\'t.", and no content',
        ),
        (
            {"system": "A", "messages": [{"role": "system", "content": "B"}]},
            (),
            r"system 'A', and other system turns too.*ignore: \[system\]",
        ),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "image", "index": 0}]},
                    {"role": "user", "content": [{"type": "image", "index": 0}]},
                ]
            },
            ("image", "image"),
            "has index 0, and shows number 1 of the sample's image files",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "video", "fps": 2.0}]}]},
            ("video",),
            r"of type 'video' has fps: 2.0, which is not read.*ignore: \[fps\]",
        ),
        ({"conversations": [{"from": "cat", "value": "x"}]}, (), "from 'cat'"),
        ({"conversations": [{"from": "human", "value": None}]}, (), "type NoneType"),
        ({"text": "  \n"}, (), "empty"),
        ({"text": ""}, (), "empty"),
        (
            {"messages": [{"role": "user", "content": "x"}], "tools": "[{"},
            (),
            "tools is a string that is not JSON",
        ),
        (
            {"messages": [{"role": "user", "content": "x"}], "tools": ['{"name": "f"}']},
            (),
            "tools is .*it must be a list of objects",
        ),
        (
            {"messages": [{"role": "user", "content": "x"}], "tools": {"name": "f"}},
            (),
            "tools is .*it must be a list of objects",
        ),
        (
            {"messages": [{"role": "user", "content": "x"}], "functions": [{"name": "f"}]},
            (),
            "functions, which chat templates no longer read. Write them as tools",
        ),
        (
            {"question": "where?", "answer": "France", "context": "Paris is in France."},
            (),
            r"has context, which 'question' and 'answer' do not show.*ignore: \[context\]",
        ),
        (
            {"messages": [{"role": "user", "content": "x"}], "system": ["Be brief."]},
            (),
            r"system is \['Be brief.'\], of type list; it must be a text",
        ),
        ({"messages": [{"role": "user", "content": ""}]}, (), "empty"),
        (
            {"conversations": [{"from": "human", "value": "<image><image>"}]},
            ("image",),
            "2 placeholders for image and the sample has 1 image files.*missing file",
        ),
        (
            {"conversations": [{"from": "human", "value": "hello"}]},
            ("image",),
            "0 placeholders for image and the sample has 1",
        ),
        (
            {"conversations": [{"from": "human", "value": "<image>\nWhat?"}]},
            (),
            "1 placeholders for image and the sample has 0",
        ),
        (
            {"image": "a.jpg", "conversations": [{"from": "human", "value": "See <image> ?"}]},
            (),
            "1 placeholders for image and the sample has 0",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "video"}]}]},
            ("image",),
            "0 placeholders for image and the sample has 1",
        ),
    ],
)
def test_records_that_cannot_be_used_say_why(record, media, message):
    with pytest.raises(SampleError, match=message):
        read_record(record, media)


@pytest.mark.parametrize(
    ("record", "media"),
    [
        ({"x" * 5000: 1}, ()),
        ({f"k{k}": 1 for k in range(5000)}, ()),
        ({"messages": [{"x" * 5000: 1}]}, ()),
        ({"messages": "[" + "x" * 5000}, ()),
        ({"messages": [{"role": "user", "content": [{"type": "x" * 5000}]}]}, ()),
        ({"conversations": [{"from": "x" * 5000, "value": ""}]}, ()),
        ({"messages": [{"role": "user", "content": "x"}], "tools": "x" * 5000}, ()),
    ],
)
def test_reasons_quote_no_more_of_a_record_than_can_be_read(record, media):
    with pytest.raises(SampleError) as refused:
        read_record(record, media)
    assert len(str(refused.value)) < 1000
