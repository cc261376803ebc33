"""The whole room: what is measured is what is decoded, and specs travel as JSON."""

import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
from pydantic import TypeAdapter, ValidationError

from dataservice.core.errors import SampleError, SpecError
from dataservice.core.limits import DecodeLimits
from dataservice.core.sample import ItemKind, Modality
from dataservice.decode import media
from dataservice.decode.placeholders import PlaceholderTokens
from dataservice.decode.processors.base import VideoHeader, View, VisionPlan
from dataservice.decode.processors.idefics3 import Idefics3Processor
from dataservice.decode.processors.internvl import InternVLProcessor
from dataservice.decode.processors.llava import LlavaProcessor
from dataservice.decode.processors.qwen2_vl import Qwen2VLProcessor
from dataservice.decode.processors.qwen3_vl import Qwen3VLProcessor
from dataservice.decode.processors.whisper import WhisperProcessor
from dataservice.decode.sample_pipeline import PipelineSpec, build_pipeline
from dataservice.decode.spec import CustomVisionSpec, LongerThan
from dataservice.decode.video import decode_video

ADAPTER = TypeAdapter(PipelineSpec)
VISION = [
    Qwen2VLProcessor(max_pixels=56 * 56, video_min_pixels=784, video_max_pixels=3136),
    InternVLProcessor(max_tiles=2, video_frames=2),
    LlavaProcessor(aspect="pad", video_frames=2),
    Qwen3VLProcessor(min_pixels=1024, max_pixels=4096, video_max_pixels=8 * 4096),
    Idefics3Processor(kind="smolvlm", tile=32, patch=8, shuffle=2, longest=64),
]


WORDS = ["the", "cat", "sat", "é", "猫", "<b>", "<|im_end|>", "<|image_pad|>", "\n"]


class Stamps:
    """A user's processor: every picture is one stamp of `side` pixels and one token."""

    def __init__(self, side: int = 32) -> None:
        self.side = side

    def plan_image(self, *, width: int, height: int) -> VisionPlan:
        return VisionPlan(encoder_tokens=4, llm_tokens=1, views=(View.whole(self.side, self.side),))

    def plan_video(self, header: VideoHeader) -> VisionPlan:
        return replace(self.plan_image(width=1, height=1), frame_indices=(0, header.frames - 1))


@pytest.fixture(scope="module")
def shelf(files):
    """Real files of every kind to draw from."""
    return {
        "image": [
            files.image(90, 40, "JPEG"),
            files.image(30, 70, "PNG"),
            files.image(50, 50, "WEBP"),
            files.image(33, 31, "GIF"),
        ],
        "video": [files.video(7, 5), files.video(12, 10, (48, 64), "webm", "libvpx-vp9")],
        "audio": [
            files.audio(0.3),
            files.audio(1.23, 22_050, "flac", "flac"),
            files.audio(0.7, 24_000, "mp3", "libmp3lame"),
        ],
    }


def random_sample(rng, shelf, files, sample):
    """A record in a random dialect with up to five media."""
    kinds = rng.choices(list(shelf), k=rng.randrange(6))
    media = [files.blob(kind, rng.choice(shelf[kind]), f"{k}.x") for k, kind in enumerate(kinds)]

    def words():
        return " ".join(rng.choices(WORDS, k=9))

    dialect = rng.choice(["openai", "llava", "text"])
    if dialect == "text":
        return sample({"text": words() + "".join(f"<{k}>{words()}" for k in kinds)}, *media)
    if dialect == "llava":
        text = words() + "".join(f"<{kind}>{words()}" for kind in kinds)
        turns = [{"from": "human", "value": text}, {"from": "gpt", "value": words()}]
        return sample({"conversations": turns}, *media)
    parts = [{"type": kind} for kind in kinds] + [{"type": "text", "text": words()}]
    turns = [{"role": "user", "content": parts}, {"role": "assistant", "content": words()}]
    return sample({"messages": [*turns, {"role": "user", "content": words()}]}, *media)


@pytest.mark.parametrize("vision", VISION, ids=lambda vision: vision.kind)
@pytest.mark.parametrize("template", ["auto", "chatml"])
def test_measured_lengths_are_decoded_lengths(kitchen, shelf, files, sample, vision, template):
    pipeline = kitchen.pipeline(
        vision=vision, audio=WhisperProcessor(chunk_s=1.0), chat_template=template
    )
    pads = [kitchen.id(t) for t in ("<|image_pad|>", "<|video_pad|>", "<|audio_pad|>")]
    pads += [kitchen.id(t) for t in ("<IMG_CONTEXT>", "<image>", "<video>")]
    rng = random.Random(f"{vision.kind}{template}")
    for _ in range(12):
        raw = random_sample(rng, shelf, files, sample)
        lengths = pipeline.measure(raw)
        decoded = pipeline.decode(raw, lengths)
        assert decoded.input_ids.shape == decoded.labels.shape == (lengths.llm_tokens,)
        assert int((decoded.labels >= 0).sum()) == lengths.loss_tokens
        assert [item.shape for item in decoded.items] == [item.shape for item in lengths.items]
        media = np.zeros(lengths.llm_tokens, dtype=bool)
        for item, array in zip(lengths.items, decoded.items, strict=True):
            media[item.position : item.position + item.llm_tokens] = True
            assert array.dtype == (np.float32 if item.modality is Modality.AUDIO else np.uint8)
        assert (np.isin(decoded.input_ids, pads) == media).all()
        assert not media[1:][decoded.labels[:-1] >= 0].any()
        assert lengths.text_tokens == int((~media).sum())


def test_a_clip_of_several_items_is_decoded_once(kitchen, files, sample, monkeypatch):
    decoded = []

    def decode(blob, *rest):
        decoded.append(blob.name)
        return decode_video(blob, *rest)

    monkeypatch.setattr(media, "decode_video", decode)
    vision = Qwen3VLProcessor(video_min_pixels=1024, video_max_pixels=6 * 1024)
    pipeline = kitchen.pipeline(vision=vision)
    clips = [files.blob("video", files.video(6, 2), name) for name in ("first", "second")]
    raw = sample({"text": "<video> and <video>"}, *clips)
    lengths = pipeline.measure(raw)
    items = pipeline.decode(raw, lengths).items
    assert decoded == ["first", "second"]
    assert [item.shape for item in items] == [(2, 32, 32, 3)] * 6
    # Frame k is grey of level 10 · k.
    assert [int(frame.mean().round(-1)) for item in items[:3] for frame in item] == [
        0, 10, 20, 30, 40, 50,
    ]  # fmt: skip
    assert {(item.kind, item.grid) for item in lengths.items} == {(ItemKind.CLIP, (1, 2, 2, 2))}


def test_texts_between_the_runs_of_a_medium_are_not_learnt(kitchen, files, sample):
    pipeline = kitchen.pipeline(vision=Qwen3VLProcessor(video_max_pixels=6 * 1024))
    raw = sample({"text": "the cat <video> sat"}, files.blob("video", files.video(4, 2)))
    decoded = pipeline.decode(raw, pipeline.measure(raw))
    text = kitchen.decoded(decoded.input_ids)
    pads = "<|vision_start|><|video_pad|><|vision_end|>"
    written = f"<|vision_start|><0.2 seconds>{pads}<1.2 seconds>{pads}<|vision_end|>"
    assert text == f"the cat {written} sat<|endoftext|>"
    assert kitchen.learnt(decoded.labels) == [" cat ", " sat<|endoftext|>"]


def test_a_tokenizer_without_the_tokens_that_a_processor_writes_is_refused(tmp_path, make_kitchen):
    kitchen = make_kitchen(tmp_path, specials=["<|endoftext|>", "<|im_end|>", "<image>"])
    with pytest.raises(
        SpecError, match=r"does not have '<fake_token_around_image>', which smolvlm"
    ):
        kitchen.pipeline(vision=Idefics3Processor(kind="smolvlm"), audio=None)


def test_one_pipeline_serves_many_threads(kitchen, shelf, files, sample):
    pipeline = kitchen.pipeline(vision=VISION[0])
    raws = [random_sample(random.Random(k), shelf, files, sample) for k in range(12)]

    def both(raw):
        lengths = pipeline.measure(raw)
        return lengths, pipeline.decode(raw, lengths)

    alone = [both(raw) for raw in raws]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(both, raws * 2))
    for (lengths, one), (again, other) in zip(alone * 2, together, strict=True):
        assert lengths == again
        assert (one.input_ids == other.input_ids).all()
        assert all((a == b).all() for a, b in zip(one.items, other.items, strict=True))


def test_a_changed_sample_is_refused_with_both_shapes(kitchen, sample, files):
    pipeline = kitchen.pipeline()
    planned = pipeline.measure(sample({"text": "a"}, files.blob("image", files.image(56, 56))))
    changed = sample({"text": "a"}, files.blob("image", files.image(112, 56)))
    with pytest.raises(SampleError, match=r"\(1, 56, 112, 3\).*plan says.*checkpoints do not fit"):
        pipeline.decode(changed, planned)


def test_a_long_recording_is_several_items_under_one_placeholder(kitchen, sample, files):
    pipeline = kitchen.pipeline(audio=WhisperProcessor(chunk_s=1.0))
    raw = sample({"text": "<audio>"}, files.blob("audio", files.audio(2.5)))
    first, second, third = pipeline.measure(raw).items
    assert [item.llm_tokens for item in (first, second, third)] == [25, 25, 12]
    assert second.position == first.position + 25
    assert third.position == second.position + 25
    assert [len(item) for item in pipeline.decode(raw, pipeline.measure(raw)).items] == [
        16_000,
        16_000,
        8_000,
    ]


def test_samples_longer_than_the_limit_are_refused_with_their_length(kitchen, sample):
    pipeline = kitchen.pipeline(max_sample_tokens=3)
    with pytest.raises(SampleError, match=r"tokens.*max_sample_tokens is 3"):
        pipeline.measure(sample({"text": "the cat sat on a mat"}))


def test_text_and_media_counts_have_limits(kitchen, sample, files):
    limits = DecodeLimits(max_text_bytes=5, max_media_items=1)
    pipeline = build_pipeline(kitchen.spec(), limits=limits)
    with pytest.raises(SampleError, match="max_text_bytes is 5"):
        pipeline.measure(sample({"text": "the cat"}))
    image = files.blob("image", files.image(28, 28))
    with pytest.raises(SampleError, match="max_media_items is 1"):
        pipeline.measure(sample({"text": "the"}, image, image))


@pytest.mark.filterwarnings("ignore")  # Pillow's remarks on damaged metadata
def test_whatever_is_wrong_with_a_file_only_a_sample_error_comes_out(kitchen, shelf, files, sample):
    pipeline = kitchen.pipeline(vision=VISION[0])
    rng, refused = random.Random(5), 0
    for _ in range(200):
        kind = rng.choice(list(shelf))
        data = bytearray(rng.choice(shelf[kind]))
        if rng.random() < 0.5:
            del data[rng.randrange(len(data)) :]
        else:
            for _ in range(rng.choice([1, 4, 20])):
                data[rng.randrange(min(len(data), 80))] = rng.randrange(256)
        raw = sample({"text": "the cat"}, files.blob(kind, bytes(data)))
        try:
            pipeline.decode(raw, pipeline.measure(raw))
        except SampleError:
            refused += 1
    assert 50 < refused < 200


# ---- specs --------------------------------------------------------------------------------

YAML_FORM = {
    "tokenizer": "models/tok",
    "chat_template": "chatml",
    "template_date": "2024-07-26",
    "vision": {"kind": "internvl", "max_tiles": 6},
    "audio": {"pool": 4},
    "image_tokens": {"pad": "<image>"},
    "max_sample_tokens": 100,
}


@pytest.mark.parametrize(
    "vision",
    [
        None,
        {"kind": "qwen2_vl", "max_pixels": 50176},
        {"kind": "internvl"},
        {"kind": "llava", "aspect": "pad"},
        {"kind": "custom", "name": "stamps", "options": {"side": 8, "more": [1, "a", None]}},
    ],
)
def test_a_spec_goes_to_json_and_back(vision):
    spec = ADAPTER.validate_python({**YAML_FORM, "vision": vision})
    assert ADAPTER.validate_json(ADAPTER.dump_json(spec)) == spec
    assert spec.audio == WhisperProcessor(pool=4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vision": {"kind": "resnet"}}, "'qwen2_vl', 'qwen2_5_vl', .*'siglip', .*'custom'"),
        ({"vision": {"kind": "llava", "side": 3}}, "side"),
        ({"tokeniser": "x"}, "tokeniser"),
        ({"audio": {"pool": 0}}, "pool is 0"),
        ({"max_sample_tokens": 0}, "max_sample_tokens is 0"),
        ({"longer_than": {"tokens": 9}}, "Keep longer_than"),
        ({"longer_than": {"tokens": 9, "then": "keep"}}, "'cut', 'drop' or 'refuse'"),
    ],
)
def test_a_wrong_job_file_is_refused_by_key(change, message):
    with pytest.raises(ValidationError, match=message):
        ADAPTER.validate_python({**YAML_FORM, **change})


def test_a_pipeline_rebuilt_from_json_is_the_same(kitchen, sample, files):
    spec = kitchen.spec()
    rebuilt = build_pipeline(ADAPTER.validate_json(ADAPTER.dump_json(spec)))
    raw = sample({"text": "<image>the cat"}, files.blob("image", files.image()))
    assert rebuilt.fingerprint == build_pipeline(spec).fingerprint
    assert rebuilt.measure(raw) == build_pipeline(spec).measure(raw)
    assert rebuilt.pad_token_id == kitchen.id("<|endoftext|>")


def test_the_fingerprint_follows_whatever_decides_lengths(kitchen, tmp_path):
    specs = [
        kitchen.spec(),
        kitchen.spec(vision=Qwen2VLProcessor(max_pixels=50_176)),
        kitchen.spec(vision=LlavaProcessor()),
        kitchen.spec(vision=None),
        kitchen.spec(audio=WhisperProcessor(pool=1)),
        kitchen.spec(chat_template="chatml"),
        kitchen.spec(max_sample_tokens=9),
        kitchen.spec(longer_than=LongerThan(tokens=9)),
        kitchen.spec(image_tokens=PlaceholderTokens(pad="<image>")),
        kitchen.spec(end_of_document_token="<|im_end|>"),
        kitchen.spec(content_tokens=("<|im_end|>",)),
    ]
    digests = [build_pipeline(spec).fingerprint for spec in specs]
    assert len(set(digests)) == len(digests)
    kitchen.tokenizer.add_special_tokens(["<|more|>"])
    kitchen.tokenizer.save(str(kitchen.folder / "tokenizer.json"))
    assert kitchen.pipeline().fingerprint not in digests


def test_the_fingerprint_does_not_follow_the_path(kitchen, tmp_path):
    before = kitchen.pipeline().fingerprint
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (moved / name).write_bytes((kitchen.folder / name).read_bytes())
    spec = replace(kitchen.spec(), tokenizer=str(moved / "tokenizer.json"))
    assert build_pipeline(spec).fingerprint == before


def test_a_users_own_processor_is_found_by_its_name(kitchen, sample, files):
    spec = kitchen.spec(vision=CustomVisionSpec(name="stamps", options={"side": 8}))
    pipeline = build_pipeline(spec, custom_processors={"stamps": Stamps})
    media = (files.blob("image", files.image()), files.blob("video", files.video(6)))
    raw = sample({"text": "<image><video>"}, *media)
    lengths = pipeline.measure(raw)
    assert [item.shape for item in lengths.items] == [(1, 8, 8, 3), (2, 8, 8, 3)]
    assert len(pipeline.decode(raw, lengths).items) == 2
    cut = kitchen.spec(vision=replace(spec.vision, unit_frames=1))
    same = build_pipeline(cut, custom_processors={"stamps": Stamps})
    assert same.fingerprint == pipeline.fingerprint, "pixels are the same"
    other = kitchen.spec(vision=CustomVisionSpec(name="stamps", options={"side": 9}))
    assert (
        build_pipeline(other, custom_processors={"stamps": Stamps}).fingerprint
        != pipeline.fingerprint
    )


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("secret", {}, "'secret' is not in the service's config, which has: bare, stamps"),
        ("stamps", {"size": 3}, "cannot be made with options"),
        ("bare", {}, "without plan_image and plan_video"),
    ],
)
def test_a_processor_that_cannot_be_used_says_why(kitchen, name, options, message):
    spec = kitchen.spec(vision=CustomVisionSpec(name=name, options=options))
    with pytest.raises(SpecError, match=message):
        build_pipeline(spec, custom_processors={"stamps": Stamps, "bare": object})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tokenizer": "/nowhere"}, "tokenizer '/nowhere' cannot be read"),
        ({"chat_template": "/nowhere.jinja"}, "chat template '/nowhere.jinja' cannot be read"),
        ({"image_tokens": PlaceholderTokens(pad="<nope>")}, "'<nope>' for image is not an added"),
        ({"image_tokens": PlaceholderTokens(pad="the")}, "'the' for image is not an added"),
        (
            {"audio_tokens": PlaceholderTokens(start="<img>", pad="<img>")},
            "pad token must differ",
        ),
        ({"end_of_document_token": "<nope>"}, "end_of_document_token '<nope>' is not in"),
    ],
)
def test_a_spec_that_names_what_is_not_there_is_refused(kitchen, fields, message):
    with pytest.raises(SpecError, match=message):
        build_pipeline(replace(kitchen.spec(), **fields))


def test_a_tokenizer_without_media_tokens_is_refused_only_if_they_are_needed(
    make_kitchen, tmp_path, sample
):
    bare = make_kitchen(tmp_path, specials=["<|im_start|>", "<|im_end|>"])
    with pytest.raises(SpecError, match="no known placeholder tokens for image"):
        bare.pipeline(audio=None)
    with pytest.raises(SpecError, match="no known placeholder tokens for audio"):
        bare.pipeline(vision=None)
    pipeline = bare.pipeline(vision=None, audio=None)
    assert pipeline.measure(sample({"text": "the cat"})).items == ()
