"""Records of every dialect to turns and placeholders."""

import json

import pytest

from dataservice.core.errors import SampleError
from dataservice.decode.conversation import Conversation, Document, MediaPart, read_record

IMAGE, VIDEO, AUDIO = (MediaPart(kind=kind) for kind in ("image", "video", "audio"))


def turns(record, *media):
    conversation = read_record(record, media)
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
        ("user", (IMAGE, "What is this?", AUDIO)),
        ("assistant", ("A cat.",)),
    ]


def test_placeholder_like_text_beside_media_parts_stays_text():
    content = [{"type": "image"}, {"type": "text", "text": "Explain <image> and <video>."}]
    record = {"messages": [{"role": "user", "content": content}]}
    assert turns(record, "image") == [("user", (IMAGE, "Explain <image> and <video>."))]


def test_messages_without_parts_may_name_media_in_their_text():
    record = {"messages": [{"role": "user", "content": "<image>Look <video>"}]}
    assert turns(record, "image") == [("user", (IMAGE, "Look <video>"))]


def test_sharegpt_roles_become_chat_roles():
    senders = ["system", "human", "gpt", "user", "assistant", "tool", "observation"]
    record = {"conversations": [{"from": s, "value": "hello"} for s in senders]}
    roles = [role for role, _ in turns(record)]
    assert roles == ["system", "user", "assistant", "user", "assistant", "tool", "tool"]


def test_a_system_prompt_in_its_own_key_comes_first():
    record = {"system": "Be kind.", "conversations": [{"from": "human", "value": "hello"}]}
    assert turns(record) == [("system", ("Be kind.",)), ("user", ("hello",))]


def test_llava_text_holds_the_placeholders_of_its_files():
    record = {
        "image": "a.jpg",
        "conversations": [
            {"from": "human", "value": "<image>\n<video>\nWhat?"},
            {"from": "gpt", "value": "It is <audio> loud."},
        ],
    }
    assert turns(record, "image", "video") == [
        ("user", (IMAGE, "\n", VIDEO, "\nWhat?")),
        ("assistant", ("It is <audio> loud.",)),
    ]


def test_html_in_a_text_only_chat_stays_text():
    record = {"conversations": [{"from": "human", "value": "Write <video></video>, not <image>!"}]}
    assert turns(record) == [("user", ("Write <video></video>, not <image>!",))]


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
    assert read_record({"text": "an <image> tag"}, []) == Document(parts=("an <image> tag",))


@pytest.mark.parametrize(
    ("record", "media", "message"),
    [
        ({"caption": "x"}, (), r"keys \['caption'\]; it needs messages, conversations or text"),
        ({"messages": []}, (), "holds 0 turns"),
        ({"messages": ["hi"]}, (), "turns of type str"),
        ({"messages": "[{"}, (), "not JSON"),
        ({"messages": [{"content": "x"}]}, (), "role None"),
        ({"messages": [{"role": "user", "content": [{"type": "smell"}]}]}, (), "a part must be"),
        ({"messages": [{"role": "user", "content": 3}]}, (), "a part must be"),
        ({"conversations": [{"from": "cat", "value": "x"}]}, (), "from 'cat'"),
        ({"conversations": [{"from": "human", "value": None}]}, (), "type NoneType"),
        ({"text": "  \n"}, (), "empty"),
        ({"text": ""}, (), "empty"),
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
