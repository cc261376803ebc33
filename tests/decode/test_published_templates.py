"""Templates as models publish them, from the package trl, which has them beside variants with
generation marks of its own."""

import importlib.util
import random
import re
from datetime import datetime
from pathlib import Path

import pytest
from transformers.utils import chat_template_utils

from dataservice.core.errors import SampleError
from tests.decode.chat_templates import SPECIALS, Family
from tests.decode.files import train
from tests.decode.template_bench import Bench, conversation, served

# Found, and not imported, which would load much.
FOLDER = Path(importlib.util.find_spec("trl").origin).parent / "chat_templates"
NAMES = sorted(file.stem for file in FOLDER.glob("*.jinja"))
# What looks like a control token.
_CONTROL = re.compile(
    r"<[|｜][^<>{}]{1,40}[|｜]>|</?s>|<eos>|<bos>|<(?:start|end)_of_[a-z]+>|\[/?INST\]|<[a-z_]+\|>"
)
# Families that take lists of parts only.
_PARTS = ("idefics", "smolvlm", "llava")


class NewYear(datetime):
    """The date that the service gives to templates."""

    @classmethod
    def now(cls, tz=None):
        return cls(2025, 1, 1, tzinfo=tz)


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_a_published_template_has_the_tokens_of_transformers(name, tmp_path, monkeypatch):
    monkeypatch.setattr(chat_template_utils, "datetime", NewYear)
    text = (FOLDER / f"{name}.jinja").read_text(encoding="utf-8")
    family = Family(
        marked=text,
        thoughts="reasoning_content" in text,
        tags="</think>" in text,
        calls="tool_calls" in text,
        parts=name.startswith(_PARTS),
        strict_roles=True,
        config={"bos_token": "<s>", "eos_token": "</s>"},
    )
    tokenizer = train(sorted({*SPECIALS, *_CONTROL.findall(text)}))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    bench = Bench(family, tmp_path, tokenizer)
    pipeline = bench.pipeline(text)
    draw = random.Random(0)
    compared = 0
    for _ in range(30):
        record = conversation(draw, family)
        try:
            ids, learnt = bench.judged(record, text)
        except Exception:  # a template raises whatever it likes
            continue
        try:
            ours, ours_learnt = served(pipeline, record)
        except SampleError as refused:
            assert "does not show the conversation's" in str(refused), record  # noqa: PT017
            continue
        assert ours == ids, record
        if "endgeneration" in text:
            assert ours_learnt[1:] == learnt[1:], record
        compared += 1
    assert compared >= 6


def test_the_package_brings_templates():
    assert len(NAMES) > 20
