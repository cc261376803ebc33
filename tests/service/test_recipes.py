"""The data sets of docs/recipes.md, from files that people's libraries wrote to trained steps."""

import base64
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import webdataset
import yaml
from datasets import Dataset, Features, Sequence, Value
from datasets import Image as ImageFeature

from dataservice.core.job import SourceSpec
from dataservice.decode.conversation import Conversation, read_record
from dataservice.jobs.job_file import read_job
from dataservice.sources.formats.registry import open_format
from tests.decode.files import Files, Kitchen
from tests.documents import ROOT, blocks
from tests.service.support import Ranks, dataservice, differing_bytes, serving
from tests.sources import mds_writer
from tests.sources.support import held, scan

pytestmark = pytest.mark.long

PAGE = ROOT / "docs" / "recipes.md"
SIZES = iter((28 * w, 28 * h) for w in range(2, 12) for h in range(2, 12))


@dataclass(frozen=True)
class Wrote:
    """A sample as it was written: the bytes of its media, and its texts, in their order."""

    texts: list[str]
    media: list[bytes] = field(default_factory=list)


def picture() -> bytes:
    """No two are alike."""
    return Files.image(*next(SIZES), "PNG")


def turns(*texts: str) -> list[dict[str, str]]:
    return [
        {"from": ("human", "gpt")[number % 2], "value": text} for number, text in enumerate(texts)
    ]


def rows_of(rows: list[dict[str, object]], **features: object) -> Dataset:
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    return Dataset.from_dict(columns, features=Features(features))


def table(path: Path, rows: list[dict[str, object]], **features: object) -> None:
    """A Parquet file as `datasets` writes it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows_of(rows, **features).to_parquet(path)


def lines(path: Path, records: list[dict[str, object]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def llava(data: Path) -> list[Wrote]:
    (data / "pictures" / "coco").mkdir(parents=True)
    shown = [picture() for _ in range(3)]
    records: list[dict[str, object]] = []
    for number, image in enumerate(shown):
        (data / "pictures" / "coco" / f"{number}.png").write_bytes(image)
        talk = turns("<image>\nWhat is this?", f"Shape {number}.", "And its colour?", "Größer.")
        records.append({"id": number, "image": f"coco/{number}.png", "conversations": talk})
    records.append({"id": "text", "conversations": turns("Hello?", "Hello.")})
    (data / "llava_v1_5_mix665k.json").write_text(json.dumps(records, indent=1))
    said = ["\nWhat is this?", "Shape {}.", "And its colour?", "Größer."]
    made = [Wrote([text.format(n) for text in said], [image]) for n, image in enumerate(shown)]
    return [*made, Wrote(["Hello?", "Hello."])]


def sharegpt(data: Path) -> list[Wrote]:
    texts = [["Who?", "Me."], ["Why?", "So.", "Then?", 'Now [1], {2} "3".']]
    records = [{"id": f"s{n}", "conversations": turns(*said)} for n, said in enumerate(texts)]
    (data / "sharegpt.json").write_text(json.dumps(records, ensure_ascii=False))
    return [Wrote(said) for said in texts]


def cauldron(data: Path) -> list[Wrote]:
    shown = [[picture()], [picture(), picture()]]
    pair = {name: Value("string") for name in ("user", "assistant", "source")}
    rows = [
        {
            "images": [{"bytes": image} for image in images],
            "texts": [
                {"user": f"Ask {k}", "assistant": f"Say {k}", "source": "vqa"} for k in range(n + 1)
            ],
        }
        for n, images in enumerate(shown)
    ]
    table(data / "cauldron" / "0.parquet", rows, images=Sequence(ImageFeature()), texts=[pair])
    said = [["Ask 0", "Say 0"], ["Ask 0", "Say 0", "Ask 1", "Say 1"]]
    return [Wrote(texts, images) for texts, images in zip(said, shown, strict=True)]


def geometry(data: Path) -> list[Wrote]:
    shown = [picture(), picture()]
    rows = [
        {"image": {"bytes": image}, "problem": f"How many in {n}?", "answer": f"{n}", "source": "g"}
        for n, image in enumerate(shown)
    ]
    text = Value("string")
    path = data / "geometry.parquet"
    table(path, rows, image=ImageFeature(), problem=text, answer=text, source=text)
    return [Wrote([f"How many in {n}?", f"{n}"], [image]) for n, image in enumerate(shown)]


def charts(data: Path) -> list[Wrote]:
    shown = [picture(), picture()]
    rows = [
        {"picture": {"bytes": image}, "prompt": "Rising?", "response": "Yes.", "persona": "Brief."}
        for image in shown
    ]
    text = Value("string")
    path = data / "charts.parquet"
    table(path, rows, picture=ImageFeature(), prompt=text, response=text, persona=text)
    return [Wrote(["Brief.", "Rising?", "Yes."], [image]) for image in shown]


def captions(data: Path) -> list[Wrote]:
    shown = [picture() for _ in range(4)]
    with webdataset.ShardWriter(str(data / "captions-%03d.tar"), maxcount=2, verbose=0) as writer:
        for number, image in enumerate(shown):
            writer.write({"__key__": f"{number:06d}", "png": image, "txt": f"Caption {number}"})
    return [Wrote([f"Caption {number}"], [image]) for number, image in enumerate(shown)]


def interleaved(data: Path) -> list[Wrote]:
    one, other = picture(), picture()
    rows = [
        {
            "images": [None, {"bytes": one}, None, {"bytes": other}],
            "texts": ["Before.", None, "Between.", None],
        }
    ]
    features = {"images": Sequence(ImageFeature()), "texts": Sequence(Value("string"))}
    table(data / "interleaved.parquet", rows, **features)
    return [Wrote(["Before.", "Between."], [one, other])]


def qwen(data: Path) -> list[Wrote]:
    image, clip = picture(), Files.video(8, size=(56, 56))
    (data / "q.png").write_bytes(image)
    (data / "q.mp4").write_bytes(clip)
    parts = [
        {"type": "image", "image": f"file://{data}/q.png"},
        {"type": "video", "video": "q.mp4"},
        {"type": "text", "text": "See?"},
    ]
    answer = [{"type": "text", "text": "Seen."}]
    said = [{"role": "user", "content": parts}, {"role": "assistant", "content": answer}]
    lines(data / "qwen.jsonl", [{"messages": said}])
    return [Wrote(["See?", "Seen."], [image, clip])]


def openai(data: Path) -> list[Wrote]:
    image, sound = picture(), Files.audio(0.5)
    url = f"data:image/png;base64,{base64.b64encode(image).decode()}"
    parts = [
        {"type": "text", "text": "Both:"},
        {"type": "image_url", "image_url": {"url": url}},
        {
            "type": "input_audio",
            "input_audio": {"data": base64.b64encode(sound).decode(), "format": "wav"},
        },
    ]
    said = [{"role": "user", "content": parts}, {"role": "assistant", "content": "Noted."}]
    lines(data / "openai.jsonl", [{"messages": said}])
    return [Wrote(["Both:", "Noted."], [image, sound])]


def speech(data: Path) -> list[Wrote]:
    sounds, texts = [Files.audio(0.4), Files.audio(0.7)], ["the cat", "a mat"]
    feature = {"info": {"features": {"audio": {"sampling_rate": 16000, "_type": "Audio"}}}}
    made = pa.table({"audio": held(*sounds), "sentence": texts})
    made = made.replace_schema_metadata({"huggingface": json.dumps(feature)})
    pq.write_table(made, data / "speech.parquet")
    return [Wrote([text], [sound]) for text, sound in zip(texts, sounds, strict=True)]


def saved(data: Path) -> list[Wrote]:
    shown = [picture() for _ in range(3)]
    rows = [{"image": {"bytes": image}, "caption": f"Row {n}"} for n, image in enumerate(shown)]
    made = rows_of(rows, image=ImageFeature(), caption=Value("string"))
    made.save_to_disk(data / "saved", num_shards=2)
    return [Wrote([f"Row {n}"], [image]) for n, image in enumerate(shown)]


def shards(data: Path) -> list[Wrote]:
    shown = [picture() for _ in range(3)]
    rows = [{"image": image, "text": f"Shard {n}".encode()} for n, image in enumerate(shown)]
    encodings = {"image": "png", "text": "str"}
    mds_writer.listed(
        [mds_writer.shard(encodings, part) for part in (rows[:2], rows[2:])], data / "shards"
    )
    return [Wrote([f"Shard {n}"], [image]) for n, image in enumerate(shown)]


def books(data: Path) -> list[Wrote]:
    (data / "books").mkdir()
    texts = ["Es war einmal – größer.\n\nEnde.", "Once upon a time, `<image>` was a word."]
    for number, text in enumerate(texts):
        (data / "books" / f"{number}.txt").write_text(text)
    return [Wrote([text]) for text in texts]


WRITERS: dict[str, Callable[[Path], list[Wrote]]] = {
    writer.__name__: writer
    for writer in (
        llava, sharegpt, cauldron, geometry, charts, captions, interleaved, qwen, openai, speech,
        saved, shards, books,
    )
}  # fmt: skip


def recipes() -> dict[str, dict[str, object]]:
    """The sources of the page, by name."""
    found = [yaml.safe_load(block.text) for block in blocks(PAGE) if block.language == "yaml"]
    return {source["name"]: source for each in found for source in each["sources"]}


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> dict[str, list[Wrote]]:
    """Each recipe's data, and a job file over all of them."""
    home = tmp_path_factory.mktemp("recipes")
    (home / "data").mkdir()
    (home / "tokenizer").mkdir()
    Kitchen(home / "tokenizer")
    made = {name: writer(home / "data") for name, writer in WRITERS.items()}
    job = {
        "job": "recipes",
        "sources": list(recipes().values()),
        "index": "index",
        "pipeline": {
            "tokenizer": "tokenizer",
            "vision": {"kind": "qwen2_vl", "video_min_pixels": 3136},
            "audio": {"kind": "whisper"},
            "positions": "sequence",
        },
        "batch": {"samples": 5},
        "plan": {"memory_tokens": 1024},
    }
    (home / "job.yaml").write_text(yaml.safe_dump(job))
    return {"home": home, **made}


def test_each_recipe_has_its_data_set():
    assert set(recipes()) == set(WRITERS)
    assert len(WRITERS) >= 10


@pytest.mark.parametrize("name", WRITERS)
def test_media_and_texts_are_those_that_were_written(written, name):
    spec = read_job((written["home"] / "job.yaml").read_text(), written["home"])
    source = next(source for source in spec.sources if source.name == name)
    samples = [read_again(source, sample) for sample in scan(source)]
    media = [[blob.data for blob in raw.media] for raw in samples]
    assert media == [sample.media for sample in written[name]]
    assert [texts_of(raw) for raw in samples] == [sample.texts for sample in written[name]]


def read_again(source: SourceSpec, sample):
    return open_format(source).read(sample.key, sample.location)


def texts_of(raw) -> list[str]:
    said = read_record(raw.record, [blob.kind for blob in raw.media], raw.placeholders)
    turns = said.messages if isinstance(said, Conversation) else (said,)
    return [part for turn in turns for part in turn.parts if isinstance(part, str)]


def test_all_recipes_train_by_one_job_file(written):
    home = written["home"]
    said = dataservice("index", str(home / "job.yaml"), "--json").stdout
    assert [source["skipped"] for source in json.loads(said)] == [[]] * len(WRITERS)
    with serving(home / "service") as service:
        service.cli("job", "submit", str(home / "job.yaml"))
        ranks = Ranks(service.address, 2, job="recipes").start().join()
    samples = sum(len(made) for name, made in written.items() if name != "home")
    assert ranks.visits == dict.fromkeys(range(samples), 1)
    assert differing_bytes(ranks, home / "job.yaml") == []
