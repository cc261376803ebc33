"""Pictures, clips and sounds with real codecs, drawn so that a caption can be true of them.

Everything is a function of its arguments and encodes bit for bit the same each time: encoders
run on one thread and containers leave out dates and random serial numbers.
"""

import io
from dataclasses import dataclass
from fractions import Fraction
from random import Random

import av
import numpy as np
from av.audio.stream import AudioStream
from numpy.typing import NDArray
from PIL import Image, ImageDraw

COLOURS = {
    "red": (214, 48, 49),
    "green": (38, 166, 91),
    "blue": (41, 98, 220),
    "yellow": (244, 208, 63),
    "purple": (142, 68, 173),
    "white": (240, 240, 240),
    "black": (24, 24, 24),
}
SHAPES = ("circle", "square", "triangle", "cross")
DIRECTIONS = ("right", "left", "down", "up")
PITCHES_HZ = {"low": 220.0, "middle": 440.0, "high": 880.0}

IMAGE_FORMATS = {"jpg": "JPEG", "png": "PNG", "webp": "WEBP", "gif": "GIF"}
# extension -> (container, codec, sample rate of the file in Hz, channel layout)
AUDIO_FORMATS = {
    "wav": ("wav", "pcm_s16le", 16_000, "mono"),
    "flac": ("flac", "flac", 22_050, "stereo"),
    "mp3": ("mp3", "libmp3lame", 24_000, "mono"),
    "ogg": ("ogg", "libopus", 48_000, "mono"),
}

_BIT_EXACT = {"fflags": "+bitexact"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Scene:
    """What a picture shows: enough to draw it and to say it."""

    shape: str
    colour: str
    ground: str

    def __str__(self) -> str:
        return f"a {self.colour} {self.shape} on a {self.ground} ground"


@dataclass(frozen=True, kw_only=True, slots=True)
class Melody:
    """What a sound plays: equal beeps of one pitch."""

    pitch: str
    beeps: int

    def __str__(self) -> str:
        return f"{self.beeps} {self.pitch} beep{'s' if self.beeps > 1 else ''}"


def draw_scene(rng: Random) -> Scene:
    """A scene whose shape differs in colour from its ground."""
    colour, ground = rng.sample(tuple(COLOURS), 2)
    return Scene(shape=rng.choice(SHAPES), colour=colour, ground=ground)


def draw_melody(rng: Random) -> Melody:
    """A melody of 1–4 beeps."""
    return Melody(pitch=rng.choice(tuple(PITCHES_HZ)), beeps=rng.randint(1, 4))


def encode_image(scene: Scene, size_px: tuple[int, int], extension: str, rng: Random) -> bytes:
    """The scene as an image file; `size_px` is (width, height).

    A few PNGs carry an alpha channel and a few JPEGs are progressive, as on the web.
    """
    image = _paint(scene, _noise(scene.ground, size_px, rng), centre=(0.5, 0.5))
    options: dict[str, int | bool] = {}
    if extension == "jpg":
        options = {"quality": rng.randint(60, 92), "progressive": rng.random() < 0.2}
    elif extension == "webp":
        options = {"quality": rng.randint(50, 90), "method": 2}
    elif extension == "png" and rng.random() < 0.2:
        image.putalpha(rng.randint(160, 255))
    buffer = io.BytesIO()
    image.save(buffer, IMAGE_FORMATS[extension], **options)
    return buffer.getvalue()


def encode_video(
    scene: Scene, direction: str, *, side_px: int, frames: int, frames_per_s: int, rng: Random
) -> bytes:
    """An H.264 MP4, square and silent, in which the shape crosses the picture every 4 seconds."""
    ground = _noise(scene.ground, (side_px, side_px), rng)
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4", container_options=_BIT_EXACT) as container:
        # A key frame every 2 s, so that a reader can seek. Without cpu-independent, x264 sums in an
        # order that depends on where its buffers lie, and a seed gives other bytes now and then.
        options = {"preset": "veryfast", "crf": "30", "g": str(2 * frames_per_s)}
        options["x264-params"] = "cpu-independent=1"
        stream = container.add_stream("libx264", rate=frames_per_s, options=options)
        stream.codec_context.thread_count = 1
        stream.width = stream.height = side_px
        stream.pix_fmt = "yuv420p"
        for k in range(frames):
            centre = _centre_at(direction, (k / (4 * frames_per_s)) % 1.0)
            pixels = np.asarray(_paint(scene, ground, centre=centre))
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            frame.pts, frame.time_base = k, Fraction(1, frames_per_s)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return buffer.getvalue()


def encode_audio(melody: Melody, duration_s: float, extension: str, rng: Random) -> bytes:
    """The melody spread over `duration_s` with a little noise, as an audio file."""
    container_format, codec, rate, layout = AUDIO_FORMATS[extension]
    samples = _waveform(melody, duration_s, rate, rng)
    # Packed s16: channels interleaved along the one axis that PyAV's packed formats have.
    interleaved = np.repeat(samples, 2) if layout == "stereo" else samples
    frame = av.AudioFrame.from_ndarray(interleaved[None, :], format="s16", layout=layout)
    frame.sample_rate = rate
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=container_format, container_options=_BIT_EXACT) as container:
        stream = container.add_stream(codec, rate=rate, layout=layout)
        assert isinstance(stream, AudioStream)
        container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return buffer.getvalue()


def _noise(colour: str, size_px: tuple[int, int], rng: Random) -> Image.Image:
    """A ground of one colour with grain, so that no two files are equal; size is (w, h)."""
    width, height = size_px
    grain = np.frombuffer(rng.randbytes(width * height), np.uint8).reshape(height, width, 1) >> 3
    pixels = np.clip(np.array(COLOURS[colour], np.int16) + grain - 16, 0, 255)  # [h, w, rgb]
    return Image.fromarray(pixels.astype(np.uint8))


def _paint(scene: Scene, ground: Image.Image, *, centre: tuple[float, float]) -> Image.Image:
    """A copy of `ground` with the shape at `centre`, given as shares of width and height."""
    image = ground.copy()
    pen, fill = ImageDraw.Draw(image), COLOURS[scene.colour]
    radius = 0.3 * min(image.size)
    x, y = centre[0] * image.width, centre[1] * image.height
    box = (x - radius, y - radius, x + radius, y + radius)
    if scene.shape == "circle":
        pen.ellipse(box, fill=fill)
    elif scene.shape == "square":
        pen.rectangle(box, fill=fill)
    elif scene.shape == "triangle":
        pen.polygon([(x, box[1]), (box[2], box[3]), (box[0], box[3])], fill=fill)
    else:
        bar = radius / 3
        pen.rectangle((box[0], y - bar, box[2], y + bar), fill=fill)
        pen.rectangle((x - bar, box[1], x + bar, box[3]), fill=fill)
    return image


def _centre_at(direction: str, share: float) -> tuple[float, float]:
    """The shape's position after `share` of its way across."""
    along = share if direction in ("right", "down") else 1.0 - share
    return (along, 0.5) if direction in ("right", "left") else (0.5, along)


def _waveform(melody: Melody, duration_s: float, rate_hz: int, rng: Random) -> NDArray[np.int16]:
    """Mono samples, int16[duration_s · rate_hz]: a beep fills the first 60 % of each beat."""
    time_s = np.arange(max(1, round(duration_s * rate_hz))) / rate_hz
    phase = time_s * melody.beeps / duration_s % 1.0
    envelope = np.where(phase < 0.6, np.sin(np.pi * np.minimum(phase / 0.6, 1.0)), 0.0)
    tone = 9_000 * envelope * np.sin(2 * np.pi * PITCHES_HZ[melody.pitch] * time_s)
    hiss = np.frombuffer(rng.randbytes(len(time_s)), np.int8)
    return (tone + hiss).astype(np.int16)
