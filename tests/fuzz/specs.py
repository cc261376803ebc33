"""Job files and service configs that are nearly right."""

import copy
import random
from typing import Any

import yaml

from tests.fuzz.mutate import mutated

JOB = """\
job: vlm-sft
seed: 3
epochs: 2
ready_steps: 4
sources:
  - {name: captions, format: webdataset, url: "data/captions-{000..003}.tar", weight: 2.0}
  - name: ocr
    format: parquet
    url: "data/ocr/*.parquet"
    image_column: picture
    storage_options: {anon: "true"}
    error_budget: {rate: 0.1, window_samples: 100, min_bad_samples: 5}
  - {name: chat, format: jsonl, url: data/chat.jsonl, media_root: data/media}
index: index/
pipeline:
  tokenizer: tokenizer/
  chat_template: chatml
  template_date: 2025-02-03
  vision: {kind: qwen2_vl, max_pixels: 1003520, video_fps: 1.0}
  audio: {kind: whisper, pool: 2, chunk_s: 30.0}
  image_tokens: {start: "<|vision_start|>", pad: "<|image_pad|>", end: "<|vision_end|>"}
  content_tokens: ["<|box_start|>"]
  max_sample_tokens: 32768
batch: {samples: 256}
plan:
  memory_tokens: 8192
  window_steps: 2
topology: {tensor_parallel: 2, pipeline_parallel: 2, replicas_per_node: 4}
"""
CONFIG = """\
listen: 127.0.0.1:50051
state_dir: state
workers: 4
slots_per_worker: 2
decode_timeout_s: 30.0
worker_host: 127.0.0.1
pool: local
attempt_timeout_s: 60.0
metrics_listen: 127.0.0.1:9090
custom_processors: {stamps: "package.module:Class"}
limits: {max_image_pixels: 1000000, max_audio_s: 60.0}
teams:
  vision: {weight: 2.0}
allowed_roots: [/data, "s3://bucket/{team}"]
"""
WORDS = (
    "",
    " ",
    "a",
    "null",
    "-",
    "é😀",
    "x" * 5000,
    "../../etc",
    "a\0b",
    "\ud7ff",
    "{0..9}",
    "1e9",
)
VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 1, 2**31, 2**63, 10**40, -0.5, 1e308, float("inf"), float("nan"), *WORDS,
    [], {}, [[]], [None], {"a": 1}, {"kind": "custom", "name": "x", "options": {}},
    {"kind": "internvl", "video_frames": 10**12}, {"kind": "nothing"}, [1, "a", {}],
)  # fmt: skip


def nearly_right(seed: str) -> tuple[str, str, list[str]]:
    """("job" or "config", a text, the keys on the way to the one change, where it is known)."""
    rng = random.Random(seed)
    kind = rng.choice(("job", "job", "config"))
    text = JOB if kind == "job" else CONFIG
    if rng.random() < 0.3:
        damaged = mutated(text.encode(), [JOB.encode(), CONFIG.encode()], rng)
        return kind, damaged.decode(errors="replace"), []
    tree = copy.deepcopy(yaml.safe_load(text))
    path = _change(tree, rng)
    return kind, yaml.safe_dump(tree, allow_unicode=True), path


def _change(tree: Any, rng: random.Random) -> list[str]:
    """Change one place of a tree; the keys that lead there."""
    path: list[str] = []
    while True:
        keys = list(tree) if isinstance(tree, dict) else list(range(len(tree)))
        key = rng.choice(keys)
        path.append(str(key))
        inner = tree[key]
        if isinstance(inner, dict | list) and inner and rng.random() < 0.8:
            tree = inner
            continue
        break
    what = rng.randrange(6)
    if what == 0:
        del tree[key]
    elif what == 1 and isinstance(tree, dict):
        path[-1] = f"{key}s"
        tree[f"{key}s"] = tree.pop(key)
    elif what == 2 and isinstance(tree, dict):
        path[-1] = str(odd := rng.choice((1, None, "other", 2.5, "")))
        tree[odd] = 1
    else:
        tree[key] = rng.choice(VALUES)
    return path
