"""Conversations as people have them, and transformers' own reading of a template, with its
generation marks, beside the service's."""

import copy
import functools
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, trainers

from dataservice.core.sample import RawSample
from dataservice.decode.placeholders import PlaceholderTokens
from dataservice.decode.processors.qwen2_vl import Qwen2VLProcessor
from dataservice.decode.sample_pipeline import Pipeline, PipelineSpec, build_pipeline
from tests.decode.chat_templates import Family
from tests.decode.files import WORDS, Files, train

# ---- conversations -------------------------------------------------------------------------

PIECES = ["the cat", "sat", " on\n", "a mat", "été", "猫", "  ", "\n\n", "x=1", "<b>", "{}", "'it'"]
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
IMAGE_LLM_TOKENS = 4  # of the smallest picture


def said(draw: random.Random, *, empty: bool = True) -> str:
    """A text with white space at its ends, or nothing."""
    text = "".join(draw.choice(PIECES) + draw.choice([" ", ""]) for _ in range(draw.randint(0, 6)))
    return text if empty or text.strip() else "the mat"


def conversation(draw: random.Random, family: Family) -> dict[str, object]:
    """A record with up to six rounds, in the form that the family takes."""
    turns: list[dict[str, object]] = []
    tools = TOOLS if family.calls and draw.random() < 0.5 else None
    if draw.random() < 0.5:
        turns.append({"role": "system", "content": said(draw, empty=False)})
    if not family.strict_roles and draw.random() < 0.05:
        turns.append(answer(draw, family))
    for _ in range(draw.randint(1, 6)):
        turns.append({"role": "user", "content": said(draw, empty=False)})
        while tools and draw.random() < 0.5:
            turns += calls_with_answers(draw, family)
        turns.append(answer(draw, family))
    if draw.random() < 0.1:
        turns.pop()
    if family.parts:
        for turn in turns:
            turn["content"] = listed(draw, turn, family)
    return {"messages": turns, **({"tools": tools} if tools else {})}


def answer(draw: random.Random, family: Family) -> dict[str, object]:
    content, extras = said(draw), {}
    if family.tags and draw.random() < 0.3:
        content = f"<think>\n{said(draw)}\n</think>\n\n{content}"
    elif family.thoughts and draw.random() < 0.5:
        name = draw.choice(["reasoning_content", "thinking", "reasoning"])
        extras = {name: said(draw, empty=False)}
    return {"role": "assistant", "content": content, **extras}


def calls_with_answers(draw: random.Random, family: Family) -> Iterator[dict[str, object]]:
    call = {"name": "weather", "arguments": {"place": said(draw), "days": draw.randint(0, 9)}}
    calls = [{"type": "function", "function": call}] * draw.randint(1, 2)
    yield {**answer(draw, family), "tool_calls": calls}
    for _ in calls:
        yield {"role": "tool", "name": "weather", "content": said(draw, empty=False)}


def listed(draw: random.Random, turn: dict[str, object], family: Family) -> list[dict[str, str]]:
    """The turn's content as parts: a text, or two, and pictures that a user shows."""
    parts = [{"type": "text", "text": str(turn["content"])}]
    if turn["role"] == "user":
        parts += [{"type": "text", "text": said(draw)}] * draw.randint(0, 1)
        images = draw.randint(0, 2) if family.media else 0
        for _ in range(images):
            parts.insert(draw.randint(0, len(parts)), {"type": "image"})
    return parts


def images_of(record: dict[str, object]) -> int:
    turns = record["messages"]
    return sum(part["type"] == "image" for t in turns for part in t["content"] if part is not str)


# ---- the judge and the service ---------------------------------------------------------------


def train_like_sentencepiece(specials: list[str]) -> Tokenizer:
    """A tokenizer whose tokens carry the space before a word, as Llama 2's."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=[AddedToken(token, special=True) for token in specials],
        initial_alphabet=[*"abcdefghijklmnopqrstuvwxyzASTINUER<>{}'=1/:_\n\"", "é", "▁"],
        show_progress=False,
    )
    tokenizer.train_from_iterator([WORDS, *PIECES] * 3, trainer)
    return tokenizer


TOKENIZERS = {"byte level": train, "sentencepiece": train_like_sentencepiece}


@dataclass(frozen=True)
class Bench:
    """One tokenizer with one family's template: the judge, and pipelines of the service."""

    family: Family
    folder: Path
    tokenizer: Tokenizer

    @functools.cached_property
    def judge(self):
        from transformers import PreTrainedTokenizerFast

        file = str(self.folder / "tokenizer.json")
        return PreTrainedTokenizerFast(tokenizer_file=file, **self.family.config)

    def pipeline(self, template: str) -> Pipeline:
        config = {**self.family.config, "chat_template": template, "pad_token": "<|endoftext|>"}
        (self.folder / "tokenizer_config.json").write_text(json.dumps(config))
        media = {}
        if self.family.media:
            tokens = {
                "<image>": PlaceholderTokens(pad="<image>"),
                "<|image_pad|>": None,  # the processor's own
            }[self.family.media]
            media = {"vision": Qwen2VLProcessor(), "image_tokens": tokens}
        return build_pipeline(PipelineSpec(tokenizer=str(self.folder), **media))

    def judged(self, record: dict[str, object], template: str) -> tuple[list[int], list[bool]]:
        """(ids, learnt) of the judge; a picture's pad is repeated as processors do."""
        out = self.judge.apply_chat_template(
            copy.deepcopy(record["messages"]),
            tools=record.get("tools"),
            chat_template=template,
            **record.get("chat_template_kwargs", {}),
            return_dict=True,
            return_assistant_tokens_mask=True,
            tokenizer_kwargs={"return_offsets_mapping": True},
        )
        learnt = list(map(bool, out["assistant_masks"]))
        # transformers takes only the first token of a stretch's last character.
        for k, (before, here) in enumerate(
            zip(out["offset_mapping"], out["offset_mapping"][1:], strict=False), 1
        ):
            learnt[k] |= learnt[k - 1] and tuple(before) == tuple(here)
        pad = self.tokenizer.token_to_id(self.family.media) if self.family.media else None
        repeats = [IMAGE_LLM_TOKENS if token == pad else 1 for token in out["input_ids"]]
        ids = np.repeat(out["input_ids"], repeats)
        return ids.tolist(), np.repeat(learnt, repeats).tolist()


def served(pipeline: Pipeline, record: dict[str, object]) -> tuple[list[int], list[bool]]:
    """(ids, learnt) of the service; the first token is never a label."""
    images = images_of(record) if isinstance(record["messages"][0]["content"], list) else 0
    media = [Files.blob("image", PICTURE)] * images
    raw = RawSample(key="0", record=copy.deepcopy(record), media=tuple(media))
    decoded = pipeline.decode(raw, pipeline.measure(raw))
    return decoded.input_ids.tolist(), [False, *(decoded.labels[:-1] >= 0).tolist()]


PICTURE = Files.image(28, 28)
