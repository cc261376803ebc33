"""A stranger's data, written by `datasets`, and a stranger's model, of transformers, end to end.

The judge has the same pictures and conversations, and only transformers: its image processor, its
chat template, its positions, masks and loss, one sample at a time.
"""

import io
import json
import os
import random
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import numpy as np
import PIL.Image
import pytest
import torch
import yaml

from soak.service import ROOT
from tests.decode.chat_templates import FAMILIES, SPECIALS
from tests.decode.files import Files, train
from tests.decode.transformers_judge import TransformersJudge
from tests.service.support import dataservice, serving

pytestmark = pytest.mark.long

RANKS, SAMPLES, BATCH = 3, 24, 8
VISION = FAMILIES["vision"]
AREA = {"shortest_edge": 56 * 56, "longest_edge": 96 * 28 * 28}
IMAGE_MEAN = [0.48145466, 0.4578275, 0.40821073]
IMAGE_STD = [0.26862954, 0.26130258, 0.27577711]
SAID = ["What is this?", "Describe it.", "Is it warm\nin there?", "The cat sat on the mat.", "No. "]


def write_data(folder: Path) -> list[dict]:
    """Rows as people have them: a list of pictures, and messages that say <image>."""
    from datasets import Dataset, Features, Image, List, Value

    rng, rows = random.Random(4), []
    for number in range(SAMPLES):
        pictures = [
            Files.image(rng.randint(40, 300), rng.randint(40, 300), rng.choice(["JPEG", "PNG"]))
            for _ in range(number % 3)
        ]
        messages = []
        for turn in range(rng.randint(1, 3)):
            shown = "<image>" * len(pictures) if turn == 0 else ""
            messages.append({"role": "user", "content": shown + rng.choice(SAID)})
            messages.append({"role": "assistant", "content": rng.choice(SAID) * rng.randint(1, 6)})
        images = [{"bytes": data, "path": None} for data in pictures]
        rows.append({"images": images, "messages": messages})
    turn = {"role": Value("string"), "content": Value("string")}
    features = Features({"images": List(Image()), "messages": List(turn)})
    Dataset.from_list(rows, features=features).to_parquet(folder / "rows.parquet")
    return rows


def write_model(folder: Path) -> None:
    """A tiny Qwen2.5-VL of random weights, its tokenizer and its image processor."""
    from transformers import (
        Qwen2_5_VLConfig,
        Qwen2_5_VLForConditionalGeneration,
        Qwen2VLImageProcessorPil,
    )

    tokenizer = train(SPECIALS)
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"chat_template": VISION.published, "pad_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    size = {"hidden_size": 32, "intermediate_size": 48}
    mrope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "rope_parameters": mrope}
    vocabulary = tokenizer.get_vocab_size()
    torch.manual_seed(3)
    Qwen2_5_VLForConditionalGeneration(
        Qwen2_5_VLConfig(
            text_config={**size, **heads, "vocab_size": vocabulary, "num_hidden_layers": 2},
            vision_config={
                **size, "depth": 2, "num_heads": 2, "out_hidden_size": 32, "tokens_per_second": 2,
                "fullatt_block_indexes": [1], "window_size": 56,
            },
            image_token_id=tokenizer.token_to_id("<|image_pad|>"),
            video_token_id=tokenizer.token_to_id("<|video_pad|>"),
            vision_start_token_id=tokenizer.token_to_id("<|vision_start|>"),
            vision_end_token_id=tokenizer.token_to_id("<|vision_end|>"),
        )
    ).double().save_pretrained(folder)  # fmt: skip
    Qwen2VLImageProcessorPil(size=AREA).save_pretrained(folder)


def write_job(folder: Path) -> Path:
    path = folder / "stranger.yaml"
    job = {
        "job": "stranger",
        "sources": [{"name": "rows", "format": "parquet", "url": "rows.parquet"}],
        "index": "index",
        "pipeline": {
            "tokenizer": "model",
            "vision": {"kind": "qwen2_5_vl", "max_pixels": AREA["longest_edge"]},
        },
        "batch": {"samples": BATCH},
        "plan": {"memory_tokens": 160},
    }
    path.write_text(yaml.safe_dump(job))
    return path


def trained(loop: str, address: str, folder: Path) -> list[list[dict]]:
    """What each rank tells of its steps."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "protos")])
    out = folder / "told"
    subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(RANKS),
         str(Path(__file__).with_name("stranger_trainer.py")), loop, address, str(folder / "model"),
         str(out)],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PET_STANDALONE": "1"},
        check=True,
        timeout=300,
    )  # fmt: skip
    return [json.loads(Path(f"{out}.{rank}").read_text()) for rank in range(RANKS)]


def as_parts(row: dict) -> list[dict]:
    """The messages as transformers takes them: pictures are parts before the text."""
    turns = []
    for turn in row["messages"]:
        shown = [{"type": "image"}] * turn["content"].count("<image>")
        text = {"type": "text", "text": turn["content"].replace("<image>", "")}
        turns.append({"role": turn["role"], "content": [*shown, text]})
    return turns


class Judge:
    """transformers alone, one sample at a time."""

    def __init__(self, folder: Path, rows: list[dict]) -> None:
        from transformers import AutoModelForImageTextToText, PreTrainedTokenizerFast

        model = folder / "model"
        self._rows = rows
        self._pictures = TransformersJudge(folder)
        self._tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(model / "tokenizer.json"))
        self.model = AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float64).train()

    def sample(self, number: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """The model's inputs, and the labels [tokens - 1] of what follows each token."""
        pixels, grids = [], []
        for image in self._rows[number]["images"]:
            options = {"size": AREA, "image_mean": IMAGE_MEAN, "image_std": IMAGE_STD}
            rows = self._pictures.pixels("Qwen2VLImageProcessor", options, image["bytes"])
            pixels.append(torch.from_numpy(rows).double())
            grids.append(self._grid(image["bytes"]))
            assert len(rows) == np.prod(grids[-1])
        out = self._tokenizer.apply_chat_template(
            as_parts(self._rows[number]),
            chat_template=VISION.own_marks,
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
        pad = self._tokenizer.convert_tokens_to_ids("<|image_pad|>")
        sizes = iter([h * w // 4 for _, h, w in grids])
        repeats = [next(sizes) if token == pad else 1 for token in out["input_ids"]]
        ids = torch.tensor(np.repeat(out["input_ids"], repeats))
        learnt = torch.tensor(np.repeat(out["assistant_masks"], repeats)).bool()
        inputs = {"input_ids": ids[None], "mm_token_type_ids": (ids == pad).int()[None]}
        if pixels:
            inputs["pixel_values"] = torch.cat(pixels)
            inputs["image_grid_thw"] = torch.tensor(grids)
        return inputs, torch.where(learnt, ids, -100)[1:]

    def _grid(self, data: bytes) -> tuple[int, int, int]:
        from transformers import Qwen2VLImageProcessorPil

        made = Qwen2VLImageProcessorPil(size=AREA)(PIL.Image.open(io.BytesIO(data)).convert("RGB"))
        return tuple(made["image_grid_thw"][0].tolist())

    def step(self, numbers: list[int], optimizer: torch.optim.Optimizer) -> float:
        """The mean loss of the batch's learnt tokens, and one step down its gradient."""
        samples = [self.sample(number) for number in numbers]
        tokens = sum(int((labels >= 0).sum()) for _, labels in samples)
        total = 0.0
        for inputs, labels in samples:
            logits = self.model(**inputs, use_cache=False).logits[0, :-1]
            loss = torch.nn.functional.cross_entropy(
                logits, labels, ignore_index=-100, reduction="sum"
            )
            (loss / tokens).backward()
            total += float(loss.detach()) / tokens
        optimizer.step()
        optimizer.zero_grad()
        return total

    def close(self) -> None:
        self._pictures.close()


@pytest.mark.parametrize(
    "loop",
    [
        "loop",
        pytest.param("Trainer", marks=pytest.mark.full),
        pytest.param("Lightning", marks=pytest.mark.full),
    ],
)
def test_steps_have_the_losses_that_transformers_has_one_sample_at_a_time(tmp_path, loop):
    rows = write_data(tmp_path)
    write_model(tmp_path / "model")
    job = write_job(tmp_path)
    dataservice("index", str(job))
    with serving(tmp_path / "service") as service:
        service.cli("job", "submit", str(job))
        ranks = trained(loop, service.address, tmp_path)
    seen = []
    with closing(Judge(tmp_path, rows)) as judge:
        optimizer = torch.optim.SGD(judge.model.parameters(), lr=0.05)
        for step in range(SAMPLES // BATCH):
            numbers = [sample for rank in ranks for sample in rank[step]["samples"]]
            expected = judge.step(sorted(numbers), optimizer)
            for rank in ranks:  # pixels are equal within 1e-6
                assert rank[step]["loss"] == pytest.approx(expected, rel=1e-6)
            seen += numbers
    assert sorted(seen) == list(range(SAMPLES))
    assert max(degree for step in ranks[0] for degree in step["degrees"]) > 1
