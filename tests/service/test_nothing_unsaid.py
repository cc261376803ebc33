"""Files as people have them: what looks like data reaches a rank, or is refused by name."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import webdataset
import yaml

from tests.decode.files import Files, Kitchen
from tests.service.support import Ranks, dataservice, serving
from tests.sources.support import held

pytestmark = pytest.mark.long

SPEECH = {"info": {"features": {"audio": {"sampling_rate": 16000, "_type": "Audio"}}}}
# Each picture has a size of its own (in patches of 28 px), by which it is known again.
SIZES = iter((28 * w, 28 * h) for w in range(2, 12) for h in range(2, 12))


def talk(shown):
    return [
        {"from": "human", "value": f"What is on {shown}here?"},
        {"from": "gpt", "value": "a shape on a ground"},
    ]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    made = tmp_path_factory.mktemp("nothing-unsaid")
    (made / "tokenizer").mkdir()
    Kitchen(made / "tokenizer")
    return made


def job(home, name, *sources, **pipeline):
    """A job file over sources that lie in `home`."""
    plain = {
        "job": name,
        "sources": list(sources),
        "index": f"index-{name}",
        "pipeline": {
            "tokenizer": "tokenizer",
            "vision": {"kind": "qwen2_vl"},
            "audio": {"kind": "whisper"},
            **pipeline,
        },
        "batch": {"samples": 2},
        "plan": {"memory_tokens": 2048},
    }
    path = home / f"{name}.yaml"
    path.write_text(yaml.safe_dump(plain))
    return str(path)


def source(name, format, url, **more):
    return {"name": name, "format": format, "url": url, **more}


# ---- what arrives ---------------------------------------------------------------------------


def make_layouts(home):
    """Each layout that lost its media; the sizes of its pictures, and how many sounds."""
    sizes, sounds = [], 0

    def picture(format):
        sizes.append(size := next(SIZES))
        return Files.image(*size, format)

    columns = {"audio": held(Files.audio(0.5), Files.audio(0.7)), "text": ["the cat", "a mat"]}
    table = pa.table(columns).replace_schema_metadata({"huggingface": json.dumps(SPEECH)})
    pq.write_table(table, home / "speech.parquet")
    sounds += 2
    for name in ("jpg", "img"):
        columns = {name: held(picture("JPEG")), "conversations": [talk("<image> ")]}
        pq.write_table(pa.table(columns), home / f"{name}.parquet")
    columns = {
        "image": held(picture("PNG")),
        "image_2": held(picture("PNG")),
        "conversations": [talk("<image> and <image> ")],
    }
    pq.write_table(pa.table(columns), home / "two.parquet")
    with webdataset.TarWriter(str(home / "members.tar")) as tar:
        for format, suffix in (("BMP", "bmp"), ("TIFF", "tiff"), ("AVIF", "avif"),
                               ("JPEG", "image"), ("WEBP", "unheard")):  # fmt: skip
            tar.write({"__key__": suffix, "txt": "a <image> shape", suffix: picture(format)})
        tar.write(
            {"__key__": "sound", "txt": "a tone", "m4a": Files.audio(0.4, 48_000, "ipod", "aac")}
        )
        sounds += 1
        clip = Files.video(8, 4, (112, 56), "mov")
        tar.write({"__key__": "clip", "txt": "it moves", "mov": clip})
    return sizes, sounds


def test_media_of_every_layout_reach_a_rank(home):
    sizes, sounds = make_layouts(home)
    names = ("speech", "jpg", "img", "two")
    path = job(
        home,
        "arrives",
        *(source(name, "parquet", f"{name}.parquet") for name in names),
        source("members", "webdataset", "members.tar"),
    )
    said = json.loads(dataservice("index", path, "--json").stdout)
    assert [len(one["skipped"]) for one in said] == [0] * 5
    with serving(home / "state") as service:
        service.cli("job", "submit", path)
        ranks = Ranks(service.address, 1, job="arrives").start().join()
        service.stop()
    assert ranks.visits == dict.fromkeys(range(12), 1)
    batches = [m for shard in ranks.shards[0] for m in shard.microbatches]
    shown = [shape for m in batches if m.vision for shape in m.vision.shapes]
    heard = [shape for m in batches if m.audio for shape in m.audio.shapes]
    stills = [(width, height) for frames, height, width, _ in shown if frames == 1]
    assert sorted(stills) == sorted(sizes)
    assert [shape[0] > 1 for shape in shown].count(True) == 1
    assert len(heard) == sounds
    # A placeholder in the middle of a turn is the picture, and no text.
    decoded = [m.input_ids for m in batches]
    image = Kitchen(home / "tokenizer").tokenizer.token_to_id("<image>")
    assert not any((ids == image).any() for ids in decoded)


# ---- what is refused ------------------------------------------------------------------------


def refusal(path):
    done = dataservice("index", path, check=False)
    assert done.returncode != 0, done.stdout
    assert "Traceback" not in done.stderr
    return " ".join(f"{done.stdout} {done.stderr}".split())


def left_out(path):
    (said,) = json.loads(dataservice("index", path, "--json").stdout)
    return {skipped["key"]: skipped["reason"] for skipped in said["skipped"]}


def write_jsonl(home, name, *records):
    (home / name).write_text("".join(json.dumps(record) + "\n" for record in records))
    return source("lines", "jsonl", name)


def test_lines_that_name_media_nobody_reads_are_left_out_by_name(home):
    (home / "a.jpg").write_bytes(Files.image(28, 28))
    lines = write_jsonl(
        home,
        "lines.jsonl",
        {"id": "good", "image": "a.jpg", "text": "the cat", "url": "https://e.org/b.jpg"},
        {"id": "img", "img": "a.jpg", "text": "the cat"},
        {"id": "audio", "audio_filepath": "a.wav", "text": "the cat", "duration": 1.0},
        {"id": "second", "image": "a.jpg", "image_2": "a.jpg", "text": "the cat"},
        {"id": "lost", "conversations": talk("<image> ")},
        {"id": "html", "text": "a <video> has an end, </video>"},
    )
    reasons = left_out(job(home, "lines", lines))
    assert sorted(reasons) == ["audio", "img", "lost", "second"]
    assert "key 'img' names image 'a.jpg', which is not read" in reasons["img"]
    assert "placeholders: text" in reasons["lost"]
    lines |= {"placeholders": "text", "ignore": ["img", "audio_filepath", "image_2"]}
    assert left_out(job(home, "lines-as-text", lines)) == {}


def test_a_column_of_media_that_nobody_spoke_of_is_refused_by_name(home):
    columns = {"mask": [Files.image(28, 28, "PNG")], "text": ["the cat"]}
    pq.write_table(pa.table(columns), home / "mask.parquet")
    masks = source("masks", "parquet", "mask.parquet")
    said = refusal(job(home, "mask", masks))
    assert "column 'mask' holds image files" in said
    assert "ignore: [mask]" in said
    assert left_out(job(home, "mask-ignored", masks | {"ignore": ["mask"]})) == {}


def test_members_that_nobody_reads_are_said_aloud(home):
    with webdataset.TarWriter(str(home / "arrays.tar")) as tar:
        tar.write({"__key__": "0", "txt": "the cat", "npy": b"\x93NUMPY"})
    done = dataservice("index", job(home, "arrays", source("arrays", "webdataset", "arrays.tar")))
    assert "1 members ending in .npy are not read" in " ".join(done.stderr.split())


def test_tools_that_the_template_does_not_show_are_refused_by_name(home):
    tools = [{"type": "function", "function": {"name": "f"}}]
    talks = {"messages": [{"role": "user", "content": "hello"}], "tools": tools}
    said = refusal(job(home, "tools", write_jsonl(home, "tools.jsonl", talks)))
    assert "does not show the conversation's tools" in said
    call = {"type": "function", "function": {"name": "f", "arguments": {"size": 3}}}
    asks = {"role": "assistant", "content": "", "tool_calls": [call]}
    calls = {"messages": [talks["messages"][0], asks, {"role": "tool", "content": "a cat"}]}
    said = refusal(job(home, "calls", write_jsonl(home, "calls.jsonl", calls)))
    assert "does not show the conversation's tool_calls" in said


def test_conversations_of_a_tokenizer_without_chatml_are_refused_and_its_texts_are_not(home):
    (home / "base").mkdir()
    Kitchen(home / "base", specials=["<|endoftext|>"]).configure(None)
    base = {"tokenizer": "base", "vision": None, "audio": None}
    chat = write_jsonl(home, "chat.jsonl", {"conversations": talk("")})
    said = refusal(job(home, "chat", chat, **base))
    assert "neither a chat template nor the tokens of ChatML" in said
    assert "chat_template: FILE.jinja" in said
    text = write_jsonl(home, "text.jsonl", {"text": "the cat"})
    assert left_out(job(home, "text", text, **base)) == {}


def test_a_tokenizer_that_panics_is_refused_like_any_other(home):
    (home / "panics").mkdir()
    Kitchen(home / "panics")
    file = home / "panics" / "tokenizer.json"
    plain = json.loads(file.read_text()) | {"pre_tokenizer": {"type": "FixedLength", "length": 0}}
    file.write_text(json.dumps(plain))
    text = write_jsonl(home, "panics.jsonl", {"text": "the cat"})
    said = refusal(job(home, "panics", text, tokenizer="panics"))
    assert "panics on plain text: chunk size must be non-zero" in said
