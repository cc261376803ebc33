"""The demo's corpus: real files, every kind of them, the same each time, long-tailed."""

import hashlib
import io
import json
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import av
import jinja2
import pyarrow.parquet as pq
import pytest
from PIL import Image
from rich.console import Console
from tokenizers import Tokenizer
from webdataset.tariterators import group_by_keys, tar_file_expander

from demo.corpus import CorpusSummary, make_corpus, summary_table
from demo.media import draw_scene, encode_video
from demo.tokenizer import SPECIAL_TOKENS, train_tokenizer

IMAGE_FORMATS = {"jpg": "JPEG", "png": "PNG", "webp": "WEBP", "gif": "GIF"}
AUDIO_CODECS = {"wav": "pcm_s16le", "flac": "flac", "mp3": "mp3float", "ogg": "opus"}
REPLICA_TOKENS = 2_048


@dataclass
class Read:
    """A sample as read back: its media as (extension, bytes) and its text."""

    source: str
    media: list[tuple[str, bytes]]
    record: dict[str, Any]
    turns: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        record = self.record
        if "text" in record:
            self.turns = [record["text"]]
        else:
            turns = record.get("messages") or record["conversations"]
            self.turns = [flat(turn.get("content") or turn["value"]) for turn in turns]


def flat(content: str | list[dict[str, str]]) -> str:
    """Content with its typed parts, if it has any, written as placeholders."""
    if isinstance(content, str):
        return content
    return "".join(part.get("text", f"<{part['type']}>") for part in content)


def read_corpus(directory: Path) -> list[Read]:
    return [
        *(sample for path in sorted(directory.glob("*/*.tar")) for sample in read_tar(path)),
        *(
            Read("parquet", [(str(index), row["image"]["bytes"])], row)
            for path in sorted(directory.glob("parquet/*.parquet"))
            for index, row in enumerate(pq.read_table(path).to_pylist())
        ),
        *(
            Read(path.parent.name, relative_media(path, record), record)
            for path in sorted(directory.glob("*/*.jsonl"))
            for record in map(json.loads, path.read_text().splitlines())
        ),
    ]


def relative_media(path: Path, record: dict[str, Any]) -> list[tuple[str, bytes]]:
    name = record.get("image")
    return [(Path(name).suffix[1:], (path.parent / name).read_bytes())] if name else []


def read_tar(path: Path) -> list[Read]:
    return [
        Read(
            path.parent.name,
            [(name.rsplit(".", 1)[-1], data) for name, data in members.items()],
            json.loads(record),
        )
        for members in read_by_webdataset(path)
        for record in [members.pop("json")]
    ]


def read_by_webdataset(path: Path) -> list[dict[str, bytes]]:
    """Each sample's files by name, as WebDataset groups them; without its own fields."""
    with path.open("rb") as stream:  # WebDataset itself leaves the file to the collector
        groups = list(group_by_keys(tar_file_expander([{"url": str(path), "stream": stream}])))
    return [{k: v for k, v in group.items() if not k.startswith("__")} for group in groups]


def image_tokens(width: int, height: int) -> int:
    """Qwen2-VL's rule for images between its pixel limits: one token per 28 px square."""
    return max(4, round(width / 28) * round(height / 28))


def media_tokens(extension: str, content: bytes) -> int:
    """Tokens at 2 frames/s in pairs for video, 50 a second for audio."""
    if extension == "mp4":
        with av.open(io.BytesIO(content), "r") as container:
            stream = container.streams.video[0]
            assert container.duration is not None
            pairs = max(2, round(container.duration / av.time_base))
            return pairs * image_tokens(stream.width, stream.height)
    if extension in AUDIO_CODECS:
        with av.open(io.BytesIO(content), "r") as container:
            assert container.duration is not None
            return ceil(50 * container.duration / av.time_base)
    return image_tokens(*Image.open(io.BytesIO(content)).size)


def digests(directory: Path) -> dict[str, str]:
    return {
        str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in directory.rglob("*")
        if path.is_file()
    }


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> CorpusSummary:
    return make_corpus(tmp_path_factory.mktemp("whole") / "corpus")


@pytest.fixture(scope="module")
def samples(whole: CorpusSummary) -> list[Read]:
    return read_corpus(whole.directory)


@pytest.fixture(scope="module")
def tokenizer(whole: CorpusSummary, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_tokenizer(whole.directory, tmp_path_factory.mktemp("tokenizer") / "bpe")


def test_every_source_holds_the_samples_its_summary_counts(
    whole: CorpusSummary, samples: list[Read]
) -> None:
    assert whole.samples == len(samples) >= 640
    assert {s.name: s.samples for s in whole.sources} == Counter(s.source for s in samples)
    assert whole.size_bytes == sum(
        path.stat().st_size for path in whole.directory.rglob("*") if path.is_file()
    )


def test_every_image_decodes_in_the_format_its_name_says(samples: list[Read]) -> None:
    seen: Counter[str] = Counter()
    for sample in samples:
        for extension, content in sample.media:
            if extension in IMAGE_FORMATS:
                image = Image.open(io.BytesIO(content))
                image.load()
                assert image.format == IMAGE_FORMATS[extension]
                assert 28 <= min(image.size) <= max(image.size) <= 448
                seen[extension] += 1
    assert set(seen) == set(IMAGE_FORMATS)


def test_every_parquet_image_decodes_and_half_have_no_path(samples: list[Read]) -> None:
    images = [sample.record["image"] for sample in samples if sample.source == "parquet"]
    for image in images:
        Image.open(io.BytesIO(image["bytes"])).load()
    assert sum(image["path"] is None for image in images) == len(images) / 2


def test_every_clip_decodes_to_as_many_frames_as_its_header_says(samples: list[Read]) -> None:
    clips = [
        content for sample in samples for extension, content in sample.media if extension == "mp4"
    ]
    for content in clips:
        with av.open(io.BytesIO(content), "r") as container:
            stream = container.streams.video[0]
            assert stream.codec_context.name == "h264"
            assert len(list(container.decode(video=0))) == stream.frames > 0
    assert len(clips) >= 50


def test_every_sound_decodes_with_the_codec_its_name_says(samples: list[Read]) -> None:
    seen: Counter[str] = Counter()
    for sample in samples:
        for extension, content in sample.media:
            if extension in AUDIO_CODECS:
                with av.open(io.BytesIO(content), "r") as container:
                    stream = container.streams.audio[0]
                    assert stream.codec_context.name == AUDIO_CODECS[extension]
                    decoded = sum(frame.samples for frame in container.decode(audio=0))
                    assert decoded / stream.rate >= 0.1
                seen[extension] += 1
    assert set(seen) == set(AUDIO_CODECS)


def test_no_two_media_files_are_equal(samples: list[Read]) -> None:
    files = [content for sample in samples for _, content in sample.media]
    assert len(set(files)) == len(files) > 500


def test_placeholders_stand_for_the_media_one_by_one(samples: list[Read]) -> None:
    kinds = dict.fromkeys(AUDIO_CODECS, "audio") | {"mp4": "video"}
    for sample in samples:
        text = "".join(sample.turns)
        counts = {kind: text.count(f"<{kind}>") for kind in ("image", "video", "audio")}
        wanted = Counter(kinds.get(extension, "image") for extension, _ in sample.media)
        assert {kind: count for kind, count in counts.items() if count} == wanted


def test_conversations_come_in_three_forms_and_some_have_several_images(
    samples: list[Read],
) -> None:
    tars = [sample for sample in samples if sample.source in ("images", "clips")]
    forms = Counter(
        "openai" if "messages" in sample.record else sample.record["conversations"][0]["from"]
        for sample in tars
    )
    assert set(forms) == {"openai", "human", "system"}
    assert {len(sample.media) for sample in tars} == {1, 2, 3, 4, 5}


def test_webdataset_groups_the_files_of_a_sample(whole: CorpusSummary) -> None:
    shard = whole.directory / "images" / "images-00000.tar"
    keys = [set(sample) for sample in read_by_webdataset(shard)]
    assert len(keys) == 70
    assert all("json" in key for key in keys)
    assert any({"0.jpg", "1.png"} & key for key in keys)


def test_parquet_is_typed_as_hugging_face_datasets_types_it(whole: CorpusSummary) -> None:
    paths = sorted(whole.directory.glob("parquet/*.parquet"))
    assert len(paths) == 2
    for path in paths:
        file = pq.ParquetFile(path)
        assert file.num_row_groups == 4
        schema = file.schema_arrow
        assert str(schema.field("image").type) == "struct<bytes: binary, path: string>"
        turns = schema.field("conversations").type
        assert str(turns.value_type) == "struct<role: string, content: string>"


def test_lengths_are_long_tailed_and_the_longest_need_several_replicas(
    samples: list[Read], tokenizer: Path
) -> None:
    bpe = Tokenizer.from_file(str(tokenizer))
    lengths = [
        sum(len(bpe.encode(turn).ids) + 5 for turn in sample.turns)
        + sum(media_tokens(extension, content) for extension, content in sample.media)
        for sample in samples
    ]
    middle = median(lengths)
    assert 60 <= middle <= 120
    assert max(lengths) >= 60 * middle
    assert 3 * REPLICA_TOKENS < max(lengths) <= 3.5 * REPLICA_TOKENS
    degrees = Counter(ceil(length / REPLICA_TOKENS) for length in lengths)
    assert degrees[2] >= 5
    assert degrees[3] >= 2
    assert sum(10 <= length / middle <= 30 for length in lengths) >= 12


def test_the_same_seed_gives_the_same_bytes_and_another_does_not(tmp_path: Path) -> None:
    for name, seed in (("first", 7), ("again", 7), ("other", 8)):
        make_corpus(tmp_path / name, seed=seed, scale=0.05)
    first, again, other = (digests(tmp_path / name) for name in ("first", "again", "other"))
    assert first == again
    assert not set(first.values()) & set(other.values())


def test_a_clip_has_the_same_bytes_wherever_its_buffers_lie() -> None:
    def clip(seed: int) -> bytes:
        rng = Random(seed)
        scene = draw_scene(rng)
        return encode_video(scene, "right", side_px=112, frames=24, frames_per_s=8, rng=rng)

    elsewhere: list[bytes] = []
    for seed in range(8):
        made = set()
        for number in range(6):
            elsewhere.append(bytes(1 + 99_991 * number))  # moves what is allocated next
            made.add(clip(seed))
        assert len(made) == 1


def test_a_small_corpus_has_every_kind_and_a_sample_of_three_replicas(tmp_path: Path) -> None:
    summary = make_corpus(tmp_path / "corpus", scale=0.1)
    assert summary.samples < 100
    extensions = {kind for source in summary.sources for kind in source.media}
    assert extensions == {*IMAGE_FORMATS, *AUDIO_CODECS, "mp4"}
    bpe = Tokenizer.from_file(str(train_tokenizer(summary.directory, tmp_path / "bpe")))
    lengths = [
        sum(len(bpe.encode(turn).ids) for turn in s.turns) for s in read_corpus(summary.directory)
    ]
    assert 2 * REPLICA_TOKENS < max(lengths) <= 3.5 * REPLICA_TOKENS
    assert max(lengths) >= 50 * median(lengths)


def test_progress_counts_every_sample_of_every_source(tmp_path: Path) -> None:
    seen: dict[str, list[tuple[int, int]]] = defaultdict(list)
    summary = make_corpus(
        tmp_path / "corpus",
        scale=0.01,
        progress=lambda source, done, total: seen[source].append((done, total)),
    )
    for source in summary.sources:
        n = source.samples
        assert seen[source.name] == [(done, n) for done in range(1, n + 1)]


def test_the_printed_table_names_every_source(whole: CorpusSummary) -> None:
    console = Console(file=io.StringIO(), width=120, record=True)
    console.print(summary_table(whole))
    text = console.export_text()
    assert all(source.name in text for source in whole.sources)
    assert str(whole.samples) in text


def test_a_corpus_is_not_written_over_another(tmp_path: Path) -> None:
    make_corpus(tmp_path, scale=0.01)
    with pytest.raises(FileExistsError, match="images is already there"):
        make_corpus(tmp_path, scale=0.01)


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan")])
def test_a_scale_of_nothing_is_refused(tmp_path: Path, scale: float) -> None:
    with pytest.raises(ValueError, match="must be above 0"):
        make_corpus(tmp_path, scale=scale)


def test_the_tokenizer_is_byte_level_and_keeps_special_tokens_whole(tokenizer: Path) -> None:
    bpe = Tokenizer.from_file(str(tokenizer))
    assert 1_500 <= bpe.get_vocab_size() <= 2_000
    assert [bpe.token_to_id(token) for token in SPECIAL_TOKENS] == list(range(10))
    text = "Any text, even “日本語” or\n\ttabs 123 🙂."
    assert bpe.decode(bpe.encode(text).ids) == text
    assert len(bpe.encode("<|image_pad|>" * 7).ids) == 7


def test_the_tokenizer_is_the_same_each_time(
    whole: CorpusSummary, tokenizer: Path, tmp_path: Path
) -> None:
    again = train_tokenizer(whole.directory, tmp_path)
    assert again.read_bytes() == tokenizer.read_bytes()


def test_the_chat_template_renders_chatml_with_typed_parts(tokenizer: Path) -> None:
    config = json.loads((tokenizer.parent / "tokenizer_config.json").read_text())
    assert (config["eos_token"], config["pad_token"]) == ("<|im_end|>", "<|endoftext|>")
    template = jinja2.Environment().from_string(config["chat_template"])
    messages = [
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": " Why? "}]},
        {"role": "assistant", "content": "Because.\n"},
    ]
    assert template.render(messages=messages) == (
        "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|> Why? <|im_end|>\n"
        "<|im_start|>assistant\nBecause.\n<|im_end|>\n"
    )
    prompt = template.render(messages=messages[:1], add_generation_prompt=True)
    assert prompt.endswith("<|im_end|>\n<|im_start|>assistant\n")


def test_a_folder_without_text_gives_no_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="make a corpus there first"):
        train_tokenizer(tmp_path, tmp_path / "out")
