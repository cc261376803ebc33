"""A corpus of two dozen samples with real codecs, and ways to spoil it."""

import io
import json
import os
import tarfile
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import webdataset
import yaml

from dataservice.jobs.indexing import index_job
from dataservice.jobs.job_file import read_job
from demo.media import draw_scene, encode_image, encode_video
from demo.tokenizer import train_tokenizer

IMAGES, CLIPS, TEXTS = 8, 3, 12
SAMPLES = IMAGES + CLIPS + TEXTS
LONG_TEXT = "long"
# Chat templates that never end, and that want 3 GB.
LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
LARGE = "{% set a = 'a' * 3000000000 %}{{ a }}"
Change = Callable[[bytes], bytes]


def make_corpus(home: Path) -> Path:
    """Two tars of images, JSONL of clips, JSONL of texts, and a tokenizer; returns `home`."""
    rng = Random(5)
    for folder in ("images", "clips", "texts"):
        (home / folder).mkdir(parents=True)
    for number in range(2):
        names = [f"image-{number}{k}.{ext}" for k, ext in enumerate(("jpg", "jpg", "png", "gif"))]
        write_tar(
            home / "images" / f"images-{number}.tar",
            {
                name: encode_image(draw_scene(rng), (112, 84), name[-3:], rng)
                for name in names[: IMAGES // 2]
            },
        )
    records = []
    for number in range(CLIPS):
        clip = encode_video(
            draw_scene(rng), "right", side_px=56, frames=24, frames_per_s=8, rng=rng
        )
        (home / "clips" / f"clip-{number}.mp4").write_bytes(clip)
        records.append({"id": f"clip-{number}", "video": f"clip-{number}.mp4", **talk("<video>")})
    write_jsonl(home / "clips" / "clips.jsonl", records)
    words = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "today"]
    texts: list[dict[str, Any]] = [
        {"id": f"text-{k}", "text": " ".join(rng.choices(words, k=rng.randint(20, 60)))}
        for k in range(TEXTS - 1)
    ]
    texts.append({"id": LONG_TEXT, "text": " ".join(rng.choices(words, k=700))})
    write_jsonl(home / "texts" / "texts.jsonl", texts)
    train_tokenizer(home, home / "tokenizer")
    return home


def talk(shown: str) -> dict[str, Any]:
    """A conversation about one medium."""
    return {
        "conversations": [
            {"from": "human", "value": f"{shown}\nwhat is it?"},
            {"from": "gpt", "value": "a shape on a ground"},
        ]
    }


def write_tar(path: Path, images: dict[str, bytes]) -> None:
    """A WebDataset tar: each image by its file name, and KEY.json."""
    record = json.dumps(talk("<image>")).encode()
    with webdataset.TarWriter(str(path), encoder=False) as tar:
        for name, image in images.items():
            key, _, suffix = name.partition(".")
            tar.write({"__key__": key, suffix: image, "json": record})


def write_jsonl(path: Path, records: list[dict[str, Any]]) -> None:
    """One record a line."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def write_job(home: Path, *, job: str = "job", **changes: Any) -> Path:
    """`home`/JOB.yaml over the corpus in `home`."""
    plain: dict[str, Any] = {
        "job": job,
        "sources": [
            {"name": "images", "format": "webdataset", "url": "images/images-*.tar"},
            {"name": "clips", "format": "jsonl", "url": "clips/clips.jsonl"},
            {"name": "texts", "format": "jsonl", "url": "texts/*.jsonl"},
        ],
        "index": "index",
        "pipeline": {
            "tokenizer": "tokenizer",
            "vision": {"kind": "qwen2_vl", "video_min_pixels": 3136},
            "positions": "sequence",  # of the tests' models
        },
        "batch": {"samples": 6},
        "plan": {"memory_tokens": 512},
    }
    path = home / f"{job}.yaml"
    path.write_text(yaml.safe_dump({**plain, **changes}))
    return path


def indexed_job(home: Path, *, processors: dict[str, str] | None = None, **changes: Any) -> Path:
    """The same, and its index."""
    path = write_job(home, **changes)
    index_job(read_job(path.read_text(), home), custom_processors=processors or {})
    return path


def cut_off(path: Path) -> None:
    """Keep the first half of a file."""
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])


def damaged_member(name: str) -> Change:
    """Overwrites the middle third of a tar's member with zeros."""

    def change(data: bytes) -> bytes:
        with tarfile.open(fileobj=io.BytesIO(data)) as tar:
            member = tar.getmember(name)
        start = member.offset_data + member.size // 3
        return data[:start] + bytes(member.size // 3) + data[start + member.size // 3 :]

    return change


def beheaded_member(name: str) -> Change:
    """Overwrites the first 16 bytes of a tar's member with zeros."""

    def change(data: bytes) -> bytes:
        with tarfile.open(fileobj=io.BytesIO(data)) as tar:
            start = tar.getmember(name).offset_data
        return data[:start] + bytes(16) + data[start + 16 :]

    return change


def spoil(path: Path, change: Change) -> None:
    """Change a file's bytes but neither its size nor its time of change: an index that was made
    before still counts as current."""
    before = path.stat()
    data = change(path.read_bytes())
    assert len(data) == before.st_size
    path.write_bytes(data)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
