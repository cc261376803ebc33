"""The pictures of the benchmark, made by script: JPEGs of 1.5 megapixels in tars, with captions."""

import io
import json
import tarfile
from collections.abc import Iterator
from pathlib import Path

import yaml

from benchmarks.pictures import photograph
from demo.tokenizer import train_tokenizer

WIDTH, HEIGHT = 1500, 1000
MAX_PIXELS = 768 * 28 * 28
"""Of a picture as delivered, by the rule of Qwen2-VL: 924 × 616, 0.57 megapixels."""
AHEAD = 200
"""Pictures that a corpus has beside those that are counted: loaders decode some before."""
DISTINCT, SHARD_PICTURES = 48, 125
BATCH, CAPTION = 32, "A picture of soft shapes under noise, the {}th of them."


def make_corpus(home: Path, pictures: int, width: int = WIDTH, height: int = HEIGHT) -> None:
    """`tars/*.tar` of `pictures` JPEGs of that size, a tokenizer, and a job over them. Of 48
    photographs, each file has a comment of its own, so that no two are equal."""
    (home / "tars").mkdir(parents=True)
    (home / "texts").mkdir()
    distinct = [photograph(width, height, seed=seed) for seed in range(min(DISTINCT, pictures))]
    for first in range(0, pictures, SHARD_PICTURES):
        with tarfile.open(home / "tars" / f"{first // SHARD_PICTURES:04}.tar", "w") as tar:
            for number in range(first, min(first + SHARD_PICTURES, pictures)):
                _add(tar, f"{number:06}.jpg", _named(distinct[number % len(distinct)], number))
                _add(tar, f"{number:06}.txt", CAPTION.format(number).encode())
    lines = (json.dumps({"id": str(k), "text": CAPTION.format(k)}) for k in range(200))
    (home / "texts" / "texts.jsonl").write_text("\n".join(lines))
    train_tokenizer(home / "texts", home / "tokenizer")
    plain = {
        "job": "pictures",
        "sources": [{"name": "pictures", "format": "webdataset", "url": "tars/*.tar"}],
        "index": "index",
        "pipeline": {
            "tokenizer": "tokenizer",
            "vision": {"kind": "qwen2_vl", "max_pixels": MAX_PIXELS},
        },
        "batch": {"samples": BATCH},
        "plan": {"memory_tokens": 32_768},
        "epochs": 1000,
    }
    (home / "job.yaml").write_text(yaml.safe_dump(plain))


def read_pictures(home: Path) -> Iterator[tuple[bytes, str]]:
    """(JPEG, caption) of every picture, from the tars, without end."""
    while True:
        for path in sorted((home / "tars").glob("*.tar")):
            with tarfile.open(path) as tar:
                members = [extracted.read() for m in tar if (extracted := tar.extractfile(m))]
            yield from zip(members[::2], map(bytes.decode, members[1::2]), strict=True)


def _add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(data)
    tar.addfile(member, io.BytesIO(data))


def _named(jpeg: bytes, number: int) -> bytes:
    comment = f"picture {number}".encode()
    return jpeg[:2] + b"\xff\xfe" + (2 + len(comment)).to_bytes(2, "big") + comment + jpeg[2:]
