"""Token ids of whole samples are those of transformers: its chat template, its processors' text for
media, its tokenizer.

Headers of pictures suffice, since neither side looks at pixels for its tokens. Text that looks like
a control token is left out: transformers reads it as one, this service never does.
"""

import random
import struct
import zlib

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image
from transformers import PreTrainedTokenizerFast
from transformers.models.paligemma.processing_paligemma import PaliGemmaProcessor
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from dataservice.core.errors import SampleError
from dataservice.core.limits import DecodeLimits
from dataservice.core.sample import ItemKind, MediaBlob, RawSample
from dataservice.decode import media
from dataservice.decode.processors.base import VisionPlan
from dataservice.decode.processors.siglip import SiglipProcessor
from dataservice.decode.sample_pipeline import Pipeline, PipelineSpec, build_pipeline
from dataservice.decode.video import read_clip
from tests.decode.families import FAMILIES, Family, family
from tests.decode.files import Files, train
from tests.decode.parity import FACTOR

WORDS = ["the", "cat", "sat", "é", "猫", "<b>", "\n", "\n\n", "'s", " 12", "  ", "<", ":"]
LIMITS = DecodeLimits()


def header_of_png(width: int, height: int) -> bytes:
    """The beginning of a PNG, up to its pixels."""
    data = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunk = struct.pack(">I", 13) + data + struct.pack(">I", zlib.crc32(data))
    return b"\x89PNG\r\n\x1a\n" + chunk + struct.pack(">I", 9) + b"IDAT"


PALIGEMMA = {
    "a question": ("what is the cat", "the cat sat"),
    "a picture within": ("the <image> cat", "<loc0010><loc0999><seg001> cat"),
    "lines": ("the cat\n", "\nthe cat"),
}


@pytest.mark.parametrize("name", PALIGEMMA)
def test_a_question_and_its_answer_are_written_as_paligemmas_processor_does(name, tmp_path):
    question, answer = PALIGEMMA[name]
    fast = PreTrainedTokenizerFast(
        tokenizer_object=train(["<pad>", "<eos>", "<bos>", "<image>"]),
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        extra_special_tokens={"image_token": "<image>"},
    )
    pictures = SiglipImageProcessorPil(size={"height": 224, "width": 224})
    pictures.image_seq_length = 256
    processor = PaliGemmaProcessor(pictures, fast)
    processor.save_pretrained(tmp_path)
    shown = question if "<image>" in question else f"<image>{question}"
    picture = Image.new("RGB", (300, 200))
    given = processor(images=picture, text=shown, suffix=answer)
    pipeline = build_pipeline(
        PipelineSpec(tokenizer=str(tmp_path), vision=SiglipProcessor(side=224))
    )

    def sample(**record: str) -> RawSample:
        blob = MediaBlob(kind="image", name="a.png", data=header_of_png(300, 200))
        return RawSample(key="a", record=record, media=(blob,))

    raw = sample(question=question, answer=answer)
    ours = pipeline.decode(raw, pipeline.measure(raw))
    assert ours.input_ids.tolist() == list(given["input_ids"][0])
    assert [*ours.labels[:-1].tolist()] == [int(label) for label in given["labels"][0][1:]]
    with pytest.raises(SampleError, match="a prompt and its answer, and this sample has no prompt"):
        pipeline.measure(sample(caption="the cat"))


@pytest.fixture(autouse=True)
def no_pixels(monkeypatch):
    for name in ("decode_image", "decode_video"):
        monkeypatch.setattr(media, name, lambda _, *given: black(given))


def black(given: tuple[object, ...]) -> NDArray[np.uint8]:
    """The pixels of the plan among these, in no memory."""
    (plan,) = (each for each in given if isinstance(each, VisionPlan))
    return np.broadcast_to(np.uint8(0), plan.shape)


@pytest.fixture(scope="module")
def clips() -> list[bytes]:
    """Clips of odd and even numbers of frames, fast and slow, some longer than a minute."""
    makes = [(2, 1), (3, 2), (5, 4), (8, 30), (9, 25), (20, 10), (61, 5), (75, 1), (130, 1)]
    return [Files.video(frames, rate, (64, 48)) for frames, rate in makes]


def random_sample(rng: random.Random, judge: Family, clips: list[bytes], key: str) -> RawSample:
    """Up to three turns with up to three media each, in their places between words."""
    blobs: list[MediaBlob] = []
    messages = []
    for turn in range(rng.randint(1, 3)):
        parts: list[dict[str, str]] = []
        for _ in range(rng.randint(0, 3)):
            parts.append(
                {"type": "text", "text": " ".join(rng.choices(WORDS, k=rng.randint(1, 6)))}
            )
            if rng.random() < 0.7:
                kind = "video" if judge.clip and rng.random() < 0.4 else "image"
                size = rng.choice([(60, 60), (1500, 1500), (2500, 400), (400, 2500)])
                size = (rng.randint(20, size[0]), rng.randint(20, size[1]))
                data = rng.choice(clips) if kind == "video" else header_of_png(*size)
                blobs.append(MediaBlob(kind=kind, name=f"{len(blobs)}.{kind}", data=data))
                parts.append({"type": kind})
        parts.append({"type": "text", "text": f"turn {turn}"})
        messages += [
            {"role": "user", "content": parts},
            {"role": "assistant", "content": [{"type": "text", "text": rng.choice(WORDS) + "a"}]},
        ]
    return RawSample(key=key, record={"messages": messages}, media=tuple(blobs))


def theirs(judge: Family, tokenizer: PreTrainedTokenizerFast, raw: RawSample) -> list[int]:
    """Token ids as transformers gives them."""
    prompt = tokenizer.apply_chat_template(
        raw.record["messages"], chat_template=judge.template, tokenize=False
    )
    images = [struct.unpack(">II", blob.data[16:24]) for blob in raw.media if blob.kind == "image"]
    headers = [read_clip(blob, LIMITS).header for blob in raw.media if blob.kind == "video"]
    return tokenizer(judge.text(prompt, images, headers), add_special_tokens=False)["input_ids"]


def kitchen(judge: Family, folder) -> tuple[Pipeline, PreTrainedTokenizerFast]:
    """Our pipeline, and transformers' tokenizer on the same file."""
    tokenizer = train([*judge.specials, "<pad>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "template.jinja").write_text(judge.template)
    spec = PipelineSpec(
        tokenizer=str(folder), chat_template=str(folder / "template.jinja"), vision=judge.ours
    )
    return build_pipeline(spec), PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def compare(name: str, count: int, folder, clips: list[bytes]) -> int:
    """Compares `count` samples of a family; returns how many of them we refuse."""
    judge, rng, refused = family(name), random.Random(name), 0
    pipeline, tokenizer = kitchen(judge, folder)
    for number in range(count):
        raw = random_sample(rng, judge, clips, f"{name} {number}")
        try:
            lengths = pipeline.measure(raw)
        except SampleError as error:
            if "llava_next needs at least one" not in str(error):
                raise
            refused += 1
            continue
        sample = pipeline.decode(raw, lengths)
        assert sample.input_ids.tolist() == theirs(judge, tokenizer, raw), raw.key
        for item in lengths.items:  # each lies on its pads
            run = slice(item.position, item.position + item.llm_tokens)
            assert len(np.unique(sample.input_ids[run])) == 1
        clips_shown = sum(blob.kind == "video" for blob in raw.media)
        assert any(item.kind is ItemKind.CLIP for item in lengths.items) == (clips_shown > 0)
    return refused


@pytest.mark.parametrize("name", FAMILIES)
def test_the_tokens_of_a_sample_are_those_of_transformers(name, tmp_path, clips):
    assert compare(name, 25, tmp_path, clips) < 5


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", FAMILIES)
def test_the_tokens_of_many_samples_are_those_of_transformers(name, tmp_path, clips):
    assert compare(name, 120 * FACTOR, tmp_path, clips) < 12 * FACTOR
