"""One sample of each kind, among them what cannot be used and what is hostile, and a job over
them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from dataservice.core.sample import DecodedSample, RawSample
from dataservice.jobs.indexing import index_job
from dataservice.jobs.job_file import JobSpec, read_job
from dataservice.jobs.sample_pipeline import pipeline_json, pipeline_of
from dataservice.sources.formats.registry import list_files, open_format
from tests.decode.files import Files, Kitchen

SEEN = "<script>alert(1)</script> & [red]no[/red] \x1b]0;owned\x07 \u202eturned ⟦not learnt⟧"
SAID = "<img src=x onerror=alert(2)> [bold]still[/bold] \x1b[2J"
PAGES = [" ".join(["page"] * words) for words in (3, 40, 9, 5)]
USABLE = ["picture", "clip", "tone", "hostile", "17", "both"]
BAD = {"lost": "there is no file 'lost.jpg'", "torn": "'torn.jpg'"}


def talk(question: str, answer: str) -> dict[str, Any]:
    """A conversation of two turns."""
    return {
        "messages": [
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer},
        ]
    }


def make_corpus(home: Path) -> Path:
    """`home`/job.yaml over a JSONL source `talks` and a Parquet source `pages`; returns `home`."""
    (home / "tokenizer").mkdir(parents=True)
    Kitchen(home / "tokenizer")
    media = {
        "cat.jpg": Files.image(112, 84),
        "mat.png": Files.image(56, 84, "PNG"),
        "walk.mp4": Files.video(24, 8, (56, 56)),
        "tone.wav": Files.audio(2.0),
        "torn.jpg": Files.image(112, 84)[:40],
    }
    for name, data in media.items():
        (home / name).write_bytes(data)
    records = [
        {"id": "lost", "image": "lost.jpg", **talk("<image>what is it?", "a cat")},
        {"id": "picture", "image": "cat.jpg", **talk("<image>\nwhat is it?", "a cat\non a mat")},
        {"id": "clip", "video": "walk.mp4", **talk("<video>and then?", "the cat sat")},
        {"id": "torn", "image": "torn.jpg", **talk("<image>what is it?", "a cat")},
        {"id": "tone", "audio": "tone.wav", **talk("<audio>heard?", "a tone")},
        {"id": "hostile", **talk(SEEN, SAID)},
        {"id": "17", **talk("the seventeenth?", "the cat")},
        {"id": "both", "images": ["cat.jpg", "mat.png"], **talk("<image> or <image>", "the mat")},
    ]
    lines = "".join(json.dumps(record) + "\n" for record in records)
    (home / "talks.jsonl").write_text(lines)
    names = [f"page-{number}" for number in range(len(PAGES))]
    pq.write_table(pa.table({"id": names, "text": PAGES}), home / "pages.parquet", row_group_size=2)
    write_job(home)
    return home


def write_job(home: Path, **changes: Any) -> Path:
    """`home`/job.yaml."""
    plain: dict[str, Any] = {
        "job": "job",
        "sources": [
            {"name": "talks", "format": "jsonl", "url": "talks.jsonl"},
            {"name": "pages", "format": "parquet", "url": "pages.parquet"},
        ],
        "index": "index",
        "pipeline": {
            "tokenizer": "tokenizer",
            "vision": {"kind": "qwen2_vl", "video_min_pixels": 3136},
            "audio": {"kind": "whisper"},
        },
        "batch": {"samples": 2},
        "plan": {"memory_tokens": 512},
    }
    path = home / "job.yaml"
    path.write_text(yaml.safe_dump({**plain, **changes}))
    return path


def job_of(home: Path) -> JobSpec:
    """The job file, read."""
    return read_job((home / "job.yaml").read_text(), home)


def indexed(home: Path) -> Path:
    """The same home, with an index."""
    index_job(job_of(home), custom_processors={})
    return home


def decoder(home: Path) -> Callable[[str], tuple[RawSample, DecodedSample]]:
    """By key of `talks`: a sample as it is read, and as the pipeline decodes it."""
    spec = job_of(home)
    pipeline = pipeline_of(pipeline_json(spec.pipeline), {})
    talks = spec.sources[0]
    raws = {
        each.key: each.raw
        for file in list_files(talks)
        for each in open_format(talks).scan(file)
        if isinstance(each.raw, RawSample)
    }

    def decoded(key: str) -> tuple[RawSample, DecodedSample]:
        raw = raws[key]
        return raw, pipeline.decode(raw, pipeline.measure(raw))

    return decoded
