"""Tables as Hugging Face datasets and others write it: which columns are media."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset, Features, Json, List

from dataservice.core.errors import SampleError, SourceError
from dataservice.core.limits import DecodeLimits
from dataservice.core.sample import RawSample
from dataservice.sources.formats.registry import list_files, open_format
from tests.decode.files import Files
from tests.sources.support import FILE, held, scan

PNG, JPEG = Files.image(8, 8, "PNG"), Files.image(8, 8, "JPEG")
WAV, MP4 = Files.audio(0.1), Files.video(3)


def write(path, columns, features=None):
    """A file with the features that datasets would put into its schema."""
    table = pa.table(columns)
    if features is not None:
        stated = json.dumps({"info": {"features": features}})
        table = table.replace_schema_metadata({"huggingface": stated})
    pq.write_table(table, path, row_group_size=2)
    return path


def samples(spec, path, **more):
    """What is scanned, having checked that each reads the same by its location."""
    source = spec(path, "parquet", **more)
    opened, scanned = open_format(source), scan(source)
    for sample in scanned:
        if isinstance(sample.raw, RawSample):
            assert opened.read(sample.key, sample.location) == sample.raw
        else:
            with pytest.raises(SampleError):
                opened.read(sample.key, sample.location)
    return [sample.raw for sample in scanned]


def media(raw):
    assert isinstance(raw, RawSample), raw
    return [(blob.kind, blob.data) for blob in raw.media]


def test_speech_sets_of_hugging_face_bring_their_sound(tmp_path, spec):
    features = {
        "audio": {"sampling_rate": 16000, "_type": "Audio"},
        "text": {"dtype": "string", "_type": "Value"},
    }
    columns = {"audio": held(WAV, WAV + b"\0"), "text": pa.array(["a", "b"])}
    for number, stated in enumerate((features, None)):
        path = write(tmp_path / f"{number}.parquet", columns, stated)
        first, second = samples(spec, path)
        assert (media(first), first.record) == ([("audio", WAV)], {"text": "a"})
        assert media(second) == [("audio", WAV + b"\0")]


@pytest.mark.parametrize("name", ["jpg", "img", "photo", "image_bytes", "picture.png", "Image"])
@pytest.mark.parametrize("column", [held(PNG), pa.array([PNG]), pa.array([[PNG]])])
def test_images_under_other_names_are_read(tmp_path, spec, name, column):
    path = write(tmp_path / "a.parquet", {name: column, "text": pa.array(["t"])})
    (raw,) = samples(spec, path)
    assert media(raw) == [("image", PNG)]


@pytest.mark.parametrize("use_dictionary", [True, False])
def test_columns_that_a_writer_kept_as_views_are_read_as_any_others(tmp_path, spec, use_dictionary):
    table = pa.table(
        {
            "jpg": pa.array([JPEG, None], pa.binary_view()),
            "thing": pa.array([b"a", None], pa.binary_view()),
            "question": pa.array(["Which?", "Who?"], pa.string_view()),
            "answer": ["This.", "They."],
        }
    )
    pq.write_table(table, tmp_path / "a.parquet", use_dictionary=use_dictionary)
    first, second = samples(spec, tmp_path / "a.parquet")
    assert media(first) == [("image", JPEG)]
    assert first.record == {"question": "Which?", "answer": "This."}
    assert (media(second), second.record["question"]) == ([], "Who?")


def test_all_media_are_read_by_kind_and_then_in_the_order_of_the_schema(tmp_path, spec):
    columns = {
        "audio": held(WAV),
        "image_2": held(JPEG),
        "clip": held(MP4),
        "image": held(PNG),
        "images": pa.array([[{"bytes": JPEG, "path": None}, {"bytes": PNG, "path": None}]]),
        "text": pa.array(["t"]),
    }
    (raw,) = samples(spec, write(tmp_path / "a.parquet", columns))
    assert media(raw) == [
        ("image", JPEG), ("image", PNG), ("image", JPEG), ("image", PNG),
        ("video", MP4), ("audio", WAV),
    ]  # fmt: skip
    assert raw.record == {"text": "t"}


@pytest.mark.parametrize(
    "feature",
    [
        {"_type": "Video"},
        {"feature": {"_type": "Video"}, "_type": "Sequence"},
        {"feature": {"_type": "Video"}, "_type": "List"},
        [{"_type": "Video"}],
    ],
)
def test_features_say_of_what_kind_a_column_is(tmp_path, spec, feature):
    column = held(MP4) if feature == {"_type": "Video"} else pa.array([[held(MP4)[0].as_py()]])
    path = write(tmp_path / "a.parquet", {"thing": column}, {"thing": feature})
    (raw,) = samples(spec, path)
    assert media(raw) == [("video", MP4)]


def test_files_without_a_kind_tell_it_by_their_bytes_or_their_path(tmp_path, spec):
    cells = [
        {"bytes": WAV, "path": None},
        {"bytes": b"\xff\xfb\x90\0", "path": "a.mp3"},
        {"bytes": b"%PDF-1.7", "path": "a.pdf"},
        {"bytes": None, "path": None},
    ]
    path = write(tmp_path / "a.parquet", {"thing": pa.array(cells, FILE)})
    sound, mp3, pdf, nothing = samples(spec, path)
    assert [media(sound)[0][0], media(mp3)[0][0]] == ["audio", "audio"]
    assert "thing[0] holds 8 bytes that are no known image" in str(pdf)
    assert "ignore: [thing]" in str(pdf)
    assert "neither bytes nor a path" in str(nothing)


def test_an_image_column_of_choice_is_the_only_one(tmp_path, spec):
    columns = {"image": held(PNG), "thumb": held(JPEG), "big": held(JPEG), "audio": held(WAV)}
    path = write(tmp_path / "a.parquet", columns)
    (raw,) = samples(spec, path, image_column="big")
    assert media(raw) == [("image", JPEG), ("audio", WAV)]
    (raw,) = samples(spec, path, ignore=("thumb", "audio", "big"))
    assert media(raw) == [("image", PNG)]


def test_paths_are_read_under_the_usual_names_and_refused_under_others(tmp_path, spec):
    (tmp_path / "a.wav").write_bytes(WAV)
    path = write(tmp_path / "a.parquet", {"audio": pa.array(["a.wav", None])})
    assert [media(raw) for raw in samples(spec, path)] == [[("audio", WAV)], []]
    path = write(tmp_path / "b.parquet", {"audio_path": ["a.wav"], "text": ["t"]})
    (refused,) = samples(spec, path)
    assert "key 'audio_path' names audio 'a.wav'" in str(refused)


def test_an_image_that_is_null_leaves_what_names_it_to_be_refused(tmp_path, spec):
    columns = {"image": held(PNG, None), "image_path": ["a.png", "b.png"], "text": ["t", "u"]}
    columns["image"] = pa.array([{"bytes": PNG, "path": None}, None], FILE)
    first, second = samples(spec, write(tmp_path / "a.parquet", columns))
    assert media(first) == [("image", PNG)]
    assert "image_path" in str(second)


@pytest.mark.parametrize(
    ("name", "column"),
    [
        ("image", pa.array([[[1, 2], [3, 4]]])),
        ("audio", pa.array([{"array": [0.5, 0.25], "sampling_rate": 16000, "path": "a"}])),
        ("speech", pa.array([{"array": [0.5, 0.25], "sampling_rate": 16000}])),
        ("video", pa.array([3])),
        ("messages", pa.array([[{"role": "user", "content": {"bytes": PNG}}]])),
        ("text", pa.array([b"text as bytes"])),
    ],
)
def test_what_cannot_be_read_as_it_is_kept_is_refused_by_name(tmp_path, spec, name, column):
    path = write(tmp_path / "a.parquet", {name: column, "caption": ["t"]})
    with pytest.raises(SourceError, match=rf"column '{name}' is read as .*ignore: \[{name}\]"):
        samples(spec, path)
    assert len(samples(spec, path, ignore=(name,))) == 1


def test_pieces_of_json_are_refused_with_the_way_to_write_them(tmp_path, spec):
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho", "calls": {}}]
    rows = Dataset.from_dict({"messages": [turns]}, features=Features(messages=List(Json())))
    path = tmp_path / "a.parquet"
    rows.to_parquet(path)
    with pytest.raises(SourceError, match=r"column 'messages' .*JSON.*\.rename_column\('other'"):
        samples(spec, path)
    written = rows.map(
        lambda row: {"other": json.dumps(row["messages"])}, remove_columns="messages"
    )
    written.rename_column("other", "messages").to_parquet(path)
    (sample,) = samples(spec, path)
    assert sample.record["messages"] == turns


def test_media_nested_in_other_features_are_refused_by_name(tmp_path, spec):
    column = pa.array([[{"crop": {"bytes": b"?", "path": None}, "label": "cat"}]])
    feature = [{"crop": {"_type": "Image"}, "label": {"_type": "Value"}}]
    path = write(tmp_path / "a.parquet", {"objects": column}, {"objects": feature})
    with pytest.raises(SourceError, match="column 'objects'"):
        samples(spec, path)


@pytest.mark.parametrize(
    "column",
    [
        pa.array([b"\0" * 9, PNG]),
        pa.array([None, PNG]).dictionary_encode(),
        pa.array([None, [PNG]], pa.list_(pa.large_binary())),
        pa.array([[], [{"crop": {"raw": PNG}}]]),
        pa.array([None, [b"\0", PNG]], pa.list_(pa.binary(), 2)),
        pa.array([[], [("left", PNG)]], pa.map_(pa.string(), pa.binary())),
    ],
)
def test_bytes_of_no_known_use_that_are_media_are_refused_by_name(tmp_path, spec, column):
    path = write(tmp_path / "a.parquet", {"mask": column, "text": ["t", "u"]})
    with pytest.raises(
        SourceError, match=r"'mask' holds image files .*columns: \{image: mask\}.*ignore"
    ):
        samples(spec, path)
    assert [raw.record for raw in samples(spec, path, ignore=("mask",))] == [
        {"text": "t"},
        {"text": "u"},
    ]


def test_bytes_and_vectors_that_are_no_media_stay_unread(tmp_path, spec):
    columns = {
        "text": ["t"],
        "embedding": pa.array([[0.5] * 4]),
        "clip_embedding": pa.array([b"\x01\x02" * 8]),
        "image_hash": pa.array([b"\x9f" * 16]),
        "when": pa.array([0], pa.timestamp("s")),
        "fetched": pa.array(
            [{"head": [("server", "x")], "sum": b"\x9f" * 16}],
            pa.struct([("head", pa.map_(pa.string(), pa.string())), ("sum", pa.binary())]),
        ),
    }
    (raw,) = samples(spec, write(tmp_path / "a.parquet", columns))
    assert (raw.record, raw.media) == ({"text": "t"}, ())


def test_conversations_keep_their_numbers(tmp_path, spec):
    call = {"role": "assistant", "content": "", "tool_calls": [{"name": "f", "at": [1.5, 2.5]}]}
    path = write(tmp_path / "a.parquet", {"messages": pa.array([[call]])})
    (raw,) = samples(spec, path)
    assert raw.record == {"messages": [call]}


def test_rows_of_all_their_media_together_are_weighed(tmp_path, spec):
    path = write(tmp_path / "a.parquet", {"image": held(b"x" * 600), "audio": held(b"y" * 600)})
    source = spec(path, "parquet")
    opened = open_format(source, DecodeLimits(max_sample_bytes=1000))
    (sample,) = opened.scan(list_files(source)[0])
    assert "max_sample_bytes" in str(sample.raw)


def test_damaged_features_are_none(tmp_path, spec):
    for number, stated in enumerate((b"[", b"[]", b'{"info": {"features": 3}}', b"[" * 99_999)):
        table = pa.table({"image": held(PNG)}).replace_schema_metadata({b"huggingface": stated})
        pq.write_table(table, tmp_path / f"{number}.parquet")
    assert all(media(raw) == [("image", PNG)] for raw in samples(spec, tmp_path / "*.parquet"))
