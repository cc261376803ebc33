"""Data sets as they are published: each row's media and text, read as their layout means them."""

import base64
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from datasets import Dataset, Features, Sequence, Value
from datasets import Image as ImageFeature
from PIL import Image

from dataservice.core.errors import SampleError, SourceError, SpecError
from dataservice.core.job import ColumnMap, SourceSpec
from dataservice.core.limits import DecodeLimits
from dataservice.core.sample import RawSample
from dataservice.decode.conversation import Conversation, Document, MediaPart, read_record
from dataservice.sources.formats.registry import list_files, open_format
from tests.sources.support import scan

Spec = Callable[..., SourceSpec]

IMAGE, AUDIO = MediaPart(kind="image"), MediaPart(kind="audio")


def png(shade: int) -> bytes:
    file = io.BytesIO()
    Image.fromarray(np.full((8, 12, 3), shade, np.uint8)).save(file, "PNG")
    return file.getvalue()


A, B = png(10), png(200)


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    (tmp_path / "a.png").write_bytes(A)
    (tmp_path / "b.png").write_bytes(B)
    return tmp_path


def read(source: SourceSpec) -> list[RawSample]:
    """All samples, each read a second time by where it lies."""
    samples = scan(source)
    opened = open_format(source)
    for sample in samples:
        assert not isinstance(sample.raw, SampleError), sample.raw
        assert opened.read(sample.key, sample.location) == sample.raw
    return [sample.raw for sample in samples]


def understood(raw: RawSample) -> Conversation | Document:
    return read_record(raw.record, [blob.kind for blob in raw.media], raw.placeholders)


def turns(raw: RawSample) -> list[tuple[str, tuple[object, ...]]]:
    found = understood(raw)
    assert isinstance(found, Conversation)
    return [(message.role, message.parts) for message in found.messages]


def data_of(raw: RawSample) -> list[bytes]:
    return [blob.data for blob in raw.media]


def written(path: Path, rows: list[dict[str, Any]], **features: object) -> Path:
    """A Parquet file as `datasets` writes it."""
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    Dataset.from_dict(columns, features=Features(features)).to_parquet(path)
    return path


# ---- JSON arrays and text -----------------------------------------------------------------

LLAVA = [
    {
        "id": "1",
        "image": "a.png",
        "conversations": [
            {"from": "human", "value": "<image>\nWas ist das – größer?"},
            {"from": "gpt", "value": 'Eine „Kachel“ "]}, {'},
        ],
    },
    {
        "id": "2",
        "conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Ho"}],
    },
]


@pytest.mark.parametrize("indent", [None, 4])
@pytest.mark.parametrize("ascii_only", [True, False])
def test_a_json_array_is_read_object_by_object(
    pictures: Path, spec: Spec, indent: int | None, ascii_only: bool
) -> None:
    path = pictures / "llava.json"
    path.write_text(json.dumps(LLAVA, indent=indent, ensure_ascii=ascii_only))
    first, second = read(spec(path, "json"))
    assert (first.key, second.key) == ("1", "2")
    assert data_of(first) == [A]
    assert turns(first) == [
        ("user", (IMAGE, "\nWas ist das – größer?")),
        ("assistant", ('Eine „Kachel“ "]}, {',)),
    ]
    assert not second.media


def test_objects_across_the_chunks_of_a_large_array_are_whole(tmp_path: Path, spec: Spec) -> None:
    records = [{"id": k, "text": "ß" * (k * 7919 % 300_000)} for k in range(40)]
    (tmp_path / "a.json").write_text("﻿ " + json.dumps(records, ensure_ascii=False) + "\n")
    assert [raw.record for raw in read(spec(tmp_path / "a.json", "json"))] == records


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{"a": 1}', "is not one array of objects"),
        ("", "is not one array of objects"),
        ('[{"text": "a"}, 7]', "something else than an object as element 1"),
        ('[{"text": "a"} {"text": "b"}]', "no comma behind element 0"),
        ('[{"text": "a"}, {"text": ', "damaged or truncated"),
        ('[{"text": "a"}', "no comma behind element 0"),
        ('[{"text": "a"}] []', "goes on behind its array"),
        ("[" + '{"a":' * 100_000, "nests too deep|damaged or truncated"),
        ('[{"text": "' + "a" * 5000, "more than max_record_bytes = 1,000"),
    ],
)
def test_a_damaged_array_is_named_with_its_byte(
    tmp_path: Path, spec: Spec, text: str, problem: str
) -> None:
    path = tmp_path / "a.json"
    path.write_text(text)
    source = spec(path, "json")
    opened = open_format(source, DecodeLimits(max_record_bytes=1000))
    (file,) = list_files(source)
    with pytest.raises(SourceError, match=rf"a\.json .*({problem}).*from byte [\d,]+ on"):
        list(opened.scan(file))


def test_an_empty_array_has_no_samples(tmp_path: Path, spec: Spec) -> None:
    (tmp_path / "a.json").write_text(" [ ] ")
    assert read(spec(tmp_path / "a.json", "json")) == []


def test_a_text_file_is_a_document(tmp_path: Path, spec: Spec) -> None:
    (tmp_path / "a.txt").write_text("größer\n\n<b>")
    (tmp_path / "b.txt").write_bytes(b"\xff")
    good, bad = scan(spec(tmp_path / "*.txt", "text"))
    assert good.key == "a.txt"
    assert understood(good.raw) == Document(parts=("größer\n\n<b>",))
    assert "is not UTF-8" in str(bad.raw)


# ---- layouts of published data sets -------------------------------------------------------


def test_the_cauldron_is_turns_in_pairs_behind_their_images(tmp_path: Path, spec: Spec) -> None:
    pairs = [
        {"user": "Which?", "assistant": "This.", "source": "vqa"},
        {"user": "Why?", "assistant": "So.", "source": "vqa"},
    ]
    path = written(
        tmp_path / "a.parquet",
        [{"images": [{"bytes": A}, {"bytes": B}], "texts": pairs}],
        images=Sequence(ImageFeature()),
        texts=[{"user": Value("string"), "assistant": Value("string"), "source": Value("string")}],
    )
    (raw,) = read(spec(path, "parquet"))
    assert data_of(raw) == [A, B]
    assert turns(raw) == [
        ("user", (IMAGE, IMAGE, "Which?")),
        ("assistant", ("This.",)),
        ("user", ("Why?",)),
        ("assistant", ("So.",)),
    ]


def test_interleaved_documents_have_an_image_at_each_null(tmp_path: Path, spec: Spec) -> None:
    rows = [{"images": [None, {"bytes": A}, None, {"bytes": B}], "texts": ["x", None, "y", None]}]
    path = written(
        tmp_path / "a.parquet",
        rows,
        images=Sequence(ImageFeature()),
        texts=Sequence(Value("string")),
    )
    (raw,) = read(spec(path, "parquet"))
    assert understood(raw) == Document(parts=("x", IMAGE, "y", IMAGE))
    assert data_of(raw) == [A, B]


def test_interleaved_jsonl_names_its_images_beside_nulls(
    pictures: Path, spec: Spec, write_jsonl
) -> None:
    record = {"images": ["a.png", None, "b.png"], "texts": [None, "between", None]}
    (raw,) = read(spec(write_jsonl(pictures / "a.jsonl", [record]), "jsonl"))
    assert understood(raw) == Document(parts=(IMAGE, "between", IMAGE))


def test_an_interleaved_document_that_lost_an_image_is_refused(
    pictures: Path, spec: Spec, write_jsonl
) -> None:
    record = {"images": ["a.png", None], "texts": [None, None]}
    (raw,) = read(spec(write_jsonl(pictures / "a.jsonl", [record]), "jsonl"))
    with pytest.raises(SampleError, match="2 placeholders for image and the sample has 1"):
        understood(raw)


@pytest.mark.parametrize("question", ["question", "problem"])
def test_a_question_stands_behind_its_image_and_only_the_answer_is_the_assistants(
    tmp_path: Path, spec: Spec, question: str
) -> None:
    path = written(
        tmp_path / "a.parquet",
        [{"image": {"bytes": A}, question: "How many?", "answer": "3"}],
        **{"image": ImageFeature(), question: Value("string"), "answer": Value("string")},
    )
    (raw,) = read(spec(path, "parquet"))
    assert turns(raw) == [("user", (IMAGE, "How many?")), ("assistant", ("3",))]


def test_a_question_may_place_its_images_itself(pictures: Path, spec: Spec, write_jsonl) -> None:
    record = {"images": ["a.png", "b.png"], "problem": "Is <image> in <image>?", "answer": "no"}
    (raw,) = read(spec(write_jsonl(pictures / "a.jsonl", [record]), "jsonl"))
    assert turns(raw)[0] == ("user", ("Is ", IMAGE, " in ", IMAGE, "?"))


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"question": "Which?", "answer": "b", "choices": ["a", "b"]}, "has choices, which"),
        ({"question": "Which?", "answer": 2}, "both must be texts"),
        ({"question": ["Which?"], "answer": "b"}, "both must be texts"),
        ({"texts": [{"user": "a"}]}, "the texts user and assistant"),
        ({"texts": ["a", {"user": "b", "assistant": "c"}]}, "the texts user and assistant"),
        ({"caption": "x"}, "the record has the keys"),
    ],
)
def test_a_layout_that_would_lose_something_is_refused(record, message) -> None:
    with pytest.raises(SampleError, match=message):
        read_record(record, ())


def test_an_image_with_a_caption_is_a_document(tmp_path: Path, spec: Spec) -> None:
    path = written(
        tmp_path / "a.parquet",
        [{"image": {"bytes": A}, "caption": "A tile."}],
        image=ImageFeature(),
        caption=Value("string"),
    )
    (raw,) = read(spec(path, "parquet"))
    assert understood(raw) == Document(parts=(IMAGE, "A tile."))


@pytest.mark.parametrize("column", ["sentence", "text", "transcription"])
def test_speech_of_a_datasets_column_comes_before_its_transcript(
    tmp_path: Path, spec: Spec, write_parquet, column: str
) -> None:
    sound = pa.array([{"bytes": b"RIFF....WAVE", "path": None}])
    path = write_parquet(tmp_path / "a.parquet", {"audio": sound, column: ["hello"]})
    (raw,) = read(spec(path, "parquet"))
    assert understood(raw) == Document(parts=(AUDIO, "hello"))
    assert data_of(raw) == [b"RIFF....WAVE"]


# ---- media in the parts of messages -------------------------------------------------------


def chat(*parts: object) -> dict[str, object]:
    return {
        "messages": [
            {"role": "user", "content": [*parts, {"type": "text", "text": "See?"}]},
            {"role": "assistant", "content": "Yes."},
        ]
    }


def uri(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


PARTS = {
    "Qwen's path": {"type": "image", "image": "a.png"},
    "Qwen's file URI": {"type": "image", "image": "file://{folder}/a.png"},
    "OpenAI's data URI": {"type": "image_url", "image_url": {"url": uri(A), "detail": "low"}},
    "a data URI for its object": {"type": "image_url", "image_url": uri(A)},
    "transformers' path": {"type": "image", "path": "a.png"},
    "transformers' base64": {"type": "image", "base64": base64.b64encode(A).decode()},
}


@pytest.mark.parametrize("name", PARTS)
def test_a_part_may_name_or_hold_its_image(
    pictures: Path, spec: Spec, write_jsonl, name: str
) -> None:
    part = json.loads(json.dumps(PARTS[name]).replace("{folder}", str(pictures)))
    path = write_jsonl(pictures / "a.jsonl", [chat(part, {"type": "image", "image": "b.png"})])
    (raw,) = read(spec(path, "jsonl"))
    assert data_of(raw) == [A, B]
    assert turns(raw)[0] == ("user", (IMAGE, IMAGE, "See?"))
    assert "base64" not in json.dumps(raw.record), "what the record holds is held once"


def test_openais_sound_is_read(tmp_path: Path, spec: Spec, write_jsonl) -> None:
    sound = b"RIFF\x24\0\0\0WAVEfmt " + bytes(60)
    held = {"data": base64.b64encode(sound).decode(), "format": "wav"}
    path = write_jsonl(tmp_path / "a.jsonl", [chat({"type": "input_audio", "input_audio": held})])
    (raw,) = read(spec(path, "jsonl"))
    assert data_of(raw) == [sound]
    assert turns(raw)[0] == ("user", (AUDIO, "See?"))


def test_an_image_column_may_hold_data_uris(tmp_path: Path, spec: Spec, write_jsonl) -> None:
    record = {"image": uri(A), "text": "a tile"}
    (raw,) = read(spec(write_jsonl(tmp_path / "a.jsonl", [record]), "jsonl"))
    assert data_of(raw) == [A]
    assert raw.record == {"text": "a tile"}


def test_parts_of_a_parquet_column_name_files_too(pictures: Path, spec: Spec) -> None:
    part = {"type": Value("string"), "text": Value("string"), "image": Value("string")}
    content = [
        {"type": "image", "text": None, "image": "b.png"},
        {"type": "text", "text": "See?", "image": None},
    ]
    path = written(
        pictures / "a.parquet",
        [{"messages": [{"role": "user", "content": content}]}],
        messages=[{"role": Value("string"), "content": [part]}],
    )
    (raw,) = read(spec(path, "parquet"))
    assert data_of(raw) == [B]
    assert turns(raw) == [("user", (IMAGE, "See?"))]


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"type": "image", "image": "https://example.com/a.png"}, "which is not fetched"),
        ({"type": "image", "image": "../a.png"}, "inside the folder"),
        ({"type": "image", "image": "file:///etc/passwd"}, "inside the folder"),
        ({"type": "image", "image": "data:image/png,plain"}, "not base64"),
        ({"type": "image", "image": "data:image/png;base64,%%%"}, "which is not base64"),
        ({"type": "video", "video": ["a.png", "b.png"]}, "must be a relative path, or under a key"),
    ],
)
def test_a_part_that_cannot_be_read_is_refused(
    pictures: Path, spec: Spec, write_jsonl, part, message
) -> None:
    (sample,) = scan(spec(write_jsonl(pictures / "d" / "a.jsonl", [chat(part)]), "jsonl"))
    assert isinstance(sample.raw, SampleError)
    assert message in str(sample.raw)


# ---- columns by name ----------------------------------------------------------------------


def test_columns_say_what_is_what(pictures: Path, spec: Spec, write_jsonl) -> None:
    record = {
        "meta": {"q": "How many?", "photo": "a.png"},
        "second": "b.png",
        "reply": "3",
        "role": "Be brief.",
        "text": "not this",
        "image": "none.png",
    }
    columns = ColumnMap(
        image=["meta.photo", "second"], question="meta.q", answer="reply", system="role"
    )
    path = write_jsonl(pictures / "a.jsonl", [record])
    (raw,) = read(spec(path, "jsonl", columns=columns))
    assert data_of(raw) == [A, B]
    assert turns(raw) == [
        ("system", ("Be brief.",)),
        ("user", (IMAGE, IMAGE, "How many?")),
        ("assistant", ("3",)),
    ]


def test_columns_of_a_table_are_read_in_the_order_named(tmp_path: Path, spec: Spec) -> None:
    row = {"one": {"bytes": A}, "other": {"bytes": B}, "thumb": {"bytes": A}, "legend": "Both."}
    images = dict.fromkeys(("one", "other", "thumb"), ImageFeature())
    path = written(tmp_path / "a.parquet", [row], **images, legend=Value("string"))
    columns = ColumnMap(image=("other", "one"), caption="legend")
    (raw,) = read(spec(path, "parquet", columns=columns))
    assert data_of(raw) == [B, A]
    assert understood(raw) == Document(parts=(IMAGE, IMAGE, "Both."))


def test_columns_name_the_conversation_of_a_tar(tmp_path: Path, spec: Spec, write_tar) -> None:
    said = [{"role": "user", "content": "<image>?"}, {"role": "assistant", "content": "!"}]
    members = [("a.png", A), ("a.json", json.dumps({"chat": said, "text": "not this"}).encode())]
    path = write_tar(tmp_path / "a.tar", members)
    (raw,) = read(spec(path, "webdataset", columns=ColumnMap(conversation="chat")))
    assert turns(raw) == [("user", (IMAGE, "?")), ("assistant", ("!",))]


def test_a_record_without_a_named_column_is_refused_by_its_name(
    tmp_path: Path, spec: Spec, write_jsonl
) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "a"}])
    columns = ColumnMap(question="prompt", answer="response")
    (sample,) = scan(spec(path, "jsonl", columns=columns))
    assert "columns.answer of the source is 'response'" in str(sample.raw)


def test_a_table_without_a_named_column_is_refused_by_its_name(tmp_path: Path, spec: Spec) -> None:
    path = written(tmp_path / "a.parquet", [{"a": "x"}], a=Value("string"))
    for columns in (ColumnMap(image="photo"), ColumnMap(text="body")):
        with pytest.raises(SourceError, match=r"no column '(photo|body)'.*first, are a\."):
            scan(spec(path, "parquet", columns=columns))


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"question": "q"}, "needs both"),
        ({"text": "a", "caption": "b"}, "names caption and text"),
        ({"system": "s", "text": "a"}, "system without a conversation"),
    ],
)
def test_columns_that_contradict_one_another_are_refused(columns, message) -> None:
    with pytest.raises(SpecError, match=message):
        ColumnMap(**columns)


def test_media_of_a_tar_are_told_by_their_suffixes(spec: Spec, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="suffixes"):
        spec(tmp_path / "a.tar", "webdataset", columns=ColumnMap(image="a"))
