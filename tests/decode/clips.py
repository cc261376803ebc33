"""Clips of every make, in which each frame differs from all others."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fractions import Fraction

import av
import numpy as np
from av.packet import Packet

from tests.decode.files import written

SIZE = (112, 80)
TICKS_PER_S = 600


@dataclass(frozen=True, kw_only=True)
class Make:
    """How a clip is encoded and packed.

    `times` are those of showing, in 1/600 s (None: 25 a second). `shift` moves all times once
    encoded, in the same unit: below 0, an MP4 gets an edit list that hides what comes before 0.
    """

    codec: str = "libx264"
    container: str = "mp4"
    frames: int = 60
    key_every: int = 15
    options: dict[str, str] = field(default_factory=dict)
    muxer: dict[str, str] = field(default_factory=dict)
    times: Callable[[int], int] | None = None
    shift: int = 0
    untimed: bool = False
    """Times are those of decoding, as old muxers wrote them."""
    drop: Callable[[int], bool] = lambda place: False
    """Packets that are left out, by place: a clip that was cut out of a longer one."""


def encoded(make: Make) -> bytes:
    """The clip's bytes."""
    with _same_scheduling(), written(make.container, make.muxer) as (out, done):
        options = {"g": str(make.key_every), **make.options}
        stream = out.add_stream(make.codec, rate=25, options=options)
        stream.width, stream.height = SIZE
        stream.pix_fmt = "yuv420p"
        stream.time_base = stream.codec_context.time_base = Fraction(1, TICKS_PER_S)
        stream.codec_context.thread_count = 1
        place = 0
        for number in range(make.frames + 1):
            for packet in stream.encode(_frame(number, make) if number < make.frames else None):
                if not make.drop(place):
                    out.mux(_timed(packet, make))
                place += 1
    return done()


@contextmanager
def _same_scheduling() -> Iterator[None]:
    """SVT-AV1, run by root, makes the thread that opens it a real-time one (FIFO, 99). All that
    the thread starts later would be so too, and starve the rest of the machine."""
    policy, param = os.sched_getscheduler(0), os.sched_getparam(0)
    try:
        yield
    finally:
        os.sched_setscheduler(0, policy, param)


def _frame(number: int, make: Make) -> av.VideoFrame:
    """A noisy picture with a bright block that moves on."""
    width, height = SIZE
    rng = np.random.default_rng(7)
    pixels = np.kron(rng.integers(0, 180, (height // 8, width // 8 + 8, 3)), np.ones((8, 8, 1)))
    shown = np.roll(pixels, number, axis=1)[:, :width].astype(np.uint8)
    at = number * 5 % (width - 16)
    shown[number % 60 : number % 60 + 16, at : at + 16] = (255, number * 7 % 256, number % 256)
    frame = av.VideoFrame.from_ndarray(shown, format="rgb24")
    frame.pts = make.times(number) if make.times else number * TICKS_PER_S // 25
    frame.time_base = Fraction(1, TICKS_PER_S)
    return frame


def _timed(packet: Packet, make: Make) -> Packet:
    if make.untimed:
        packet.pts = packet.dts
    if make.shift:
        packet.pts, packet.dts = packet.pts + make.shift, packet.dts + make.shift
    return packet


_X264 = {"crf": "20", "preset": "ultrafast", "bf": "3"}


def x264(**params: object) -> dict[str, str]:
    """Options of x264: B-frames at ultrafast, and further parameters of its own."""
    given = ":".join(f"{name.replace('_', '-')}={value}" for name, value in params.items())
    return {**_X264, **({"x264-params": given} if given else {})}


def uneven(number: int) -> int:
    """Times of a phone's camera: no two gaps are equal."""
    return number * 24 + number * number % 17


MAKES: dict[str, Make] = {
    "h264": Make(options=x264()),
    "h264, no B-frames": Make(options=x264(bframes=0)),
    "h264, pyramids": Make(options=x264(bframes=5, b_pyramid="normal", b_adapt=0)),
    "h264, open groups": Make(options=x264(open_gop=1, bframes=4, b_pyramid="normal", b_adapt=0)),
    "h264, one key frame": Make(key_every=1000, options=x264(scenecut=0)),
    "h264, only key frames": Make(key_every=1, options=x264()),
    "h264, refreshed": Make(options=x264(intra_refresh=1, bframes=0)),
    "h264, interlaced": Make(options=x264(interlaced=1)),
    "h264, uneven": Make(options=x264(), times=uneven),
    "h264, starts late": Make(options=x264(), shift=5000),
    "h264, edited": Make(options=x264(), shift=-20 * 24),
    "h264, fragments": Make(options=x264(), muxer={"movflags": "frag_keyframe+empty_moov"}),
    "h264, without times": Make(options=x264(b_adapt=0), untimed=True),
    "h264, cut": Make(container="matroska", options=x264(open_gop=1, b_adapt=0, bframes=3),
                      drop=lambda place: place < 15),
    "h264, matroska": Make(container="matroska", options=x264()),
    "h264, transport": Make(container="mpegts", options=x264()),
    "h264, flash": Make(container="flv", options=x264()),
    "h264, avi": Make(container="avi", options=x264()),
    "h265": Make(codec="libx265", options={"preset": "ultrafast", "x265-params": "log-level=0"}),
    "h265, pyramids": Make(codec="libx265", key_every=20, options={
        "x265-params": "log-level=0:b-pyramid=1:bframes=6:b-adapt=0:open-gop=1"}),
    "h265, cut": Make(codec="libx265", container="matroska", drop=lambda place: place < 15,
                      options={"x265-params": "log-level=0:open-gop=1:bframes=4:b-adapt=0"}),
    "vp9": Make(codec="libvpx-vp9", container="webm", options={"deadline": "realtime",
                "cpu-used": "8", "lag-in-frames": "12", "auto-alt-ref": "1"}),
    "vp8": Make(codec="libvpx", container="webm", options={"deadline": "good", "cpu-used": "4",
                "lag-in-frames": "16", "auto-alt-ref": "1", "b": "100k"}),
    "av1": Make(codec="libsvtav1", options={"preset": "12", "svtav1-params": "lp=1"}),
    "av1, matroska": Make(codec="libsvtav1", container="matroska", options={"preset": "12"}),
    "mpeg4": Make(codec="mpeg4", options={"bf": "2"}),
    "mpeg4, avi": Make(codec="mpeg4", container="avi"),
    "mpeg4, transport": Make(codec="mpeg4", container="mpegts", options={"bf": "2"}),
}  # fmt: skip


def samples_of(frames: int, seed: int) -> list[Sequence[int]]:
    """Choices of frames: one, a few, many, all, and some twice in no order."""
    rng = np.random.default_rng(seed)
    chosen = [rng.choice(frames, count, replace=False) for count in (1, 1, 3, 8) if count <= frames]
    return [
        *(sorted(map(int, each)) for each in chosen),
        [frames - 1],
        range(frames),
        [int(k) for k in rng.integers(0, frames, 10)],
    ]
