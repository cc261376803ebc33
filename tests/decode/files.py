"""Small, real media files and a real tokenizer, made by script."""

import io
import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
from av.container import OutputContainer
from numpy.typing import NDArray
from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from dataservice.core.sample import MediaBlob, MediaKind
from dataservice.decode.processors.qwen2_vl import Qwen2VLProcessor
from dataservice.decode.processors.whisper import WhisperProcessor
from dataservice.decode.sample_pipeline import Pipeline, PipelineSpec, build_pipeline

SPECIALS = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<|audio_start|>",
    "<|audio_pad|>",
    "<|audio_end|>",
    "<img>",
    "<IMG_CONTEXT>",
    "</img>",
    "<image>",
    "<video>",
    "<fake_token_around_image>",
    "<global-img>",
    "<row_1_col_1>",
]
# A template in the manner of Qwen2-VL: it takes strings and parts, and writes media tokens.
TEMPLATE = """{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}\
{% if message['content'] is string %}{{ message['content'] }}{% else %}\
{% for part in message['content'] %}\
{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>\
{% elif part['type'] == 'video' %}<|vision_start|><|video_pad|><|vision_end|>\
{% elif part['type'] == 'audio' %}<|audio_start|><|audio_pad|><|audio_end|>\
{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}{{ '<|im_end|>\\n' }}\
{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
WORDS = "the cat sat on a warm mat and heard what the user said to an assistant in the system"


@contextmanager
def written(
    format: str, options: dict[str, str] | None
) -> Iterator[tuple[OutputContainer, Callable[[], bytes]]]:
    """A container to fill, and how to get its bytes afterwards. In a real file: moving an
    MP4's header to the front (faststart) reads the file again."""
    data = b""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "media"
        with av.open(str(path), "w", format=format, options=options or {}) as out:
            yield out, lambda: data
        data = path.read_bytes()


class Files:
    """Encoders of small, real files."""

    @staticmethod
    def image(width: int = 64, height: int = 48, format: str = "JPEG", **options: object) -> bytes:
        """A picture whose red grows to the right and whose green grows downwards."""
        x = np.linspace(0, 255, width, dtype=np.uint8)[None, :].repeat(height, 0)
        y = np.linspace(0, 255, height, dtype=np.uint8)[:, None].repeat(width, 1)
        picture = Image.fromarray(np.stack([x, y, np.full_like(x, 40)], axis=-1))
        return Files.saved(picture, format, **options)

    @staticmethod
    def saved(picture: Image.Image, format: str, **options: object) -> bytes:
        buffer = io.BytesIO()
        picture.save(buffer, format, **options)
        return buffer.getvalue()

    @staticmethod
    def video(
        frames: int = 20,
        rate: int = 10,
        size: tuple[int, int] = (64, 48),
        container: str = "mp4",
        codec: str = "libx264",
        options: dict[str, str] | None = None,
    ) -> bytes:
        """Frame k is grey of level 10·k, so that a decoded frame tells its number."""
        with written(container, options) as (out, done):
            stream = out.add_stream(codec, rate=rate, options={"crf": "10", "g": "8"})
            stream.width, stream.height = size
            stream.pix_fmt = "yuv420p"
            stream.codec_context.thread_count = 1
            for k in range(frames):
                grey = np.full((size[1], size[0], 3), 10 * k % 250, dtype=np.uint8)
                frame = av.VideoFrame.from_ndarray(grey, format="rgb24")
                frame.pts, frame.time_base = k, Fraction(1, rate)
                out.mux(stream.encode(frame))
            out.mux(stream.encode())
        return done()

    @staticmethod
    def audio(
        seconds: float = 1.0,
        rate: int = 16_000,
        container: str = "wav",
        codec: str = "pcm_s16le",
        layout: str = "mono",
        options: dict[str, str] | None = None,
    ) -> bytes:
        """A tone of 440 Hz at half of full scale."""
        time_s = np.arange(round(seconds * rate)) / rate
        wave = (16_000 * np.sin(2 * np.pi * 440 * time_s)).astype(np.int16)
        wave = np.repeat(wave, 2) if layout == "stereo" else wave
        frame = av.AudioFrame.from_ndarray(wave[None], format="s16", layout=layout)
        frame.sample_rate = rate
        with written(container, options) as (out, done):
            stream = out.add_stream(codec, rate=rate, layout=layout)
            out.mux(stream.encode(frame))
            out.mux(stream.encode())
        return done()

    @staticmethod
    def blob(kind: MediaKind, data: bytes, name: str | None = None) -> MediaBlob:
        return MediaBlob(kind=kind, name=name or f"some.{kind}", data=data)


def train(specials: list[str]) -> Tokenizer:
    """A byte-level BPE tokenizer as Qwen's, trained on a line."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=[AddedToken(token, special=True) for token in specials],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([WORDS] * 3, trainer)
    return tokenizer


class Kitchen:
    """Pipelines over one tokenizer, with what a test needs to look into their tokens."""

    def __init__(self, folder: Path, *, specials: list[str] = SPECIALS) -> None:
        self.folder = folder
        self.tokenizer = train(specials)
        self.tokenizer.save(str(folder / "tokenizer.json"))
        self.configure(TEMPLATE)

    def configure(self, template: str | None, **more: object) -> None:
        config = {"eos_token": "<|im_end|>", "pad_token": {"content": "<|endoftext|>"}, **more}
        if template is not None:
            config["chat_template"] = template
        (self.folder / "tokenizer_config.json").write_text(json.dumps(config))

    def spec(self, **fields: object) -> PipelineSpec:
        given = {"vision": Qwen2VLProcessor(), "audio": WhisperProcessor(), **fields}
        return PipelineSpec(tokenizer=str(self.folder), **given)

    def pipeline(self, **fields: object) -> Pipeline:
        return build_pipeline(self.spec(**fields))

    def decoded(self, ids: NDArray[np.int32]) -> str:
        return str(self.tokenizer.decode(ids.tolist(), skip_special_tokens=False))

    def learnt(self, labels: NDArray[np.int32]) -> list[str]:
        """The texts of the runs of labels that are not -100."""
        runs = np.split(labels, np.flatnonzero(np.diff(labels >= 0)) + 1)
        return [self.decoded(run) for run in runs if len(run) and run[0] >= 0]

    def id(self, token: str) -> int:
        token_id = self.tokenizer.token_to_id(token)
        assert token_id is not None
        return token_id
