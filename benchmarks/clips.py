"""What a clip costs: `python -m benchmarks.clips --out FILE`, three minutes on two cores.

The wanted frames of a clip of 30 s, and of half an hour made of the same packets 60 times, are
decoded by the pipeline (its packets read twice: for its plan, and for its pixels), and by PyAV
alone from the first frame on, as the service did before; by torchcodec and decord, which have an
environment of their own and are left out where they do not run (torchcodec wants FFmpeg's
libraries, as Debian's `libavdevice59` and `libavfilter8` bring them). Figures are seconds of the
processor. PyAV's pixels are compared too, bit by bit.
"""

import argparse
import io
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import cast

import av
import numpy as np
from av.video.stream import VideoStream
from numpy.typing import NDArray

from benchmarks.data.measured import environment
from benchmarks.harness import hardware, publish, side_by_side
from dataservice.core.limits import DEFAULT_LIMITS
from dataservice.core.sample import MediaBlob
from dataservice.decode.image import cut_views
from dataservice.decode.media import MediaPipeline
from dataservice.decode.processors.base import VideoHeader, View, VisionPlan
from dataservice.decode.processors.frames import evenly_spaced
from dataservice.decode.video import read_clip

WIDTH, HEIGHT, RATE, SECONDS = 1280, 720, 30, 30
LONG_TIMES = 60
SHOWN = 224
VIEW = View.whole(SHOWN, SHOWN)
X264, VPX = (
    {"preset": "veryfast", "crf": "26"},
    {"deadline": "realtime", "cpu-used": "8", "b": "1M"},
)
# Groups of 2 s are what video sites make; of 250 and 128 frames, what the encoders do by default.
CODECS = {
    "h264, groups of 60": ("libx264", "mp4", {**X264, "g": "60"}),
    "h264, groups of 250": ("libx264", "mp4", {**X264, "g": "250"}),
    "vp9, groups of 128": ("libvpx-vp9", "webm", {**VPX, "g": "128"}),
}
PEERS = {
    "torchcodec": ("torchcodec==0.12.0", "torch==2.13.0", "numpy"),
    "decord": ("decord==0.6.0", "numpy"),
}
PEER_PROGRAM = Path(__file__).parent / "peer_clips.py"
BAR_LONG_S = 2.0
BAR_SHORT = {"h264": 0.8, "vp9": 1.0}


@dataclass(frozen=True, kw_only=True)
class Spaced:
    """Frames at even distances, from the first to the last."""

    frames: int

    def plan_image(self, *, width: int, height: int) -> VisionPlan:
        raise NotImplementedError

    def plan_video(self, header: VideoHeader) -> VisionPlan:
        return VisionPlan(
            encoder_tokens=1,
            llm_tokens=1,
            views=(VIEW,),
            frame_indices=evenly_spaced(header.frames, self.frames),
        )


@dataclass(frozen=True, kw_only=True)
class Result:
    """Seconds of the processor for one clip; `all_s` is None where decoding all took too long, and
    `peers_s` has those of other libraries that run here."""

    clip: str
    frames: int
    key_frames: int
    size_bytes: int
    ours_s: float
    all_s: float | None
    peers_s: Mapping[str, float]
    is_equal: bool | None
    bar: str
    is_met: bool | None


def encoded(codec: str, container: str, options: dict[str, str]) -> tuple[bytes, bytes]:
    """A textured picture that moves sideways, with blocks that grow, for 30 s; and the same
    packets 60 times."""
    with tempfile.TemporaryDirectory() as folder:
        one, many = str(Path(folder) / "one"), str(Path(folder) / "many")
        with av.open(one, "w", format=container) as out:
            stream = cast(VideoStream, out.add_stream(codec, rate=RATE, options=options))
            stream.width, stream.height, stream.pix_fmt = WIDTH, HEIGHT, "yuv420p"
            for frame in map(_frame, range(SECONDS * RATE)):
                out.mux(stream.encode(frame))
            out.mux(stream.encode())
        _repeat(one, many, container, LONG_TIMES)
        return Path(one).read_bytes(), Path(many).read_bytes()


@cache
def _texture() -> NDArray[np.uint8]:
    base = np.add.outer(np.arange(HEIGHT), np.arange(2 * WIDTH)) // 4 % 200
    noise = np.random.default_rng(0).integers(0, 10, base.shape)
    return (base + noise).astype(np.uint8)


def _frame(number: int) -> av.VideoFrame:
    light = np.roll(_texture(), -3 * number, axis=1)[:, :WIDTH]
    light[40:80, 40 : 40 + number % 1000] = 235
    light[100 + number % 500 : 140 + number % 500, 200:240] = 16
    grey = np.full((HEIGHT // 2, WIDTH), 128, np.uint8)
    frame = av.VideoFrame.from_ndarray(np.concatenate([light, grey]), format="yuv420p")
    frame.pts, frame.time_base = number, Fraction(1, RATE)
    return frame


def _repeat(source: str, target: str, container: str, times: int) -> None:
    with av.open(source, mode="r") as opened, av.open(target, "w", format=container) as out:
        stream = opened.streams.video[0]
        packets = [packet for packet in opened.demux(stream) if packet.size]
        copy = out.add_stream_from_template(stream)
        tick_s = stream.time_base or Fraction(1)
        step = round(SECONDS / tick_s)
        for turn in range(times):
            for packet in packets:
                again = av.Packet(bytes(packet))
                again.pts = (packet.pts or 0) + turn * step
                again.dts = (packet.dts or 0) + turn * step
                again.is_keyframe, again.duration = packet.is_keyframe, packet.duration
                again.stream, again.time_base = copy, tick_s
                out.mux(again)


def decoded_from_the_first(data: bytes, wanted: Sequence[int]) -> NDArray[np.uint8]:
    """PyAV alone: every frame up to the last wanted one."""
    places = {number: place for place, number in enumerate(wanted)}
    pixels = np.empty((len(wanted), SHOWN, SHOWN, 3), np.uint8)
    with av.open(io.BytesIO(data), mode="r", options={"threads": "1"}) as container:
        stream = container.streams.video[0]
        stream.codec_context.thread_count = 1
        for number, frame in enumerate(container.decode(stream)):
            if number in places:
                rgb = frame.reformat(format="rgb24", threads=1).to_ndarray()
                pixels[places[number]] = cut_views(np.asarray(rgb, np.uint8), [VIEW])
            if number == max(wanted):
                break
    return pixels


class Peer:
    """Another library, in a process that has loaded it."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process

    def seconds(self, path: Path, wanted: Sequence[int]) -> float:
        """Of the processor, for the wanted frames of the clip at `path`."""
        assert self._process.stdin
        assert self._process.stdout
        print(path, ",".join(map(str, wanted)), file=self._process.stdin, flush=True)
        return float(self._process.stdout.readline())


@contextmanager
def peers(cache_dir: Path) -> Iterator[dict[str, Peer]]:
    """Those that install and load here."""
    found: dict[str, Peer] = {}
    started = []
    try:
        for name, packages in PEERS.items():
            python = environment(cache_dir, packages)
            if python is None:
                print(f"{name} does not install here: left out")
                continue
            process = subprocess.Popen(
                [str(python), str(PEER_PROGRAM), name],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            started.append(process)
            assert process.stdout is not None
            if process.stdout.readline() == "ready\n":
                found[name] = Peer(process)
            else:
                print(f"{name} does not load here: left out")
        yield found
    finally:
        for process in started:
            process.kill()
            process.communicate()


def measured(
    name: str,
    data: bytes,
    frames: int,
    repeats: int,
    others: Mapping[str, Peer],
    *,
    is_long: bool,
) -> Result:
    """One clip; a long one is not decoded from the first frame, which takes a minute or more."""
    blob = MediaBlob(kind="video", name=name, data=data)
    pipeline = MediaPipeline(vision=Spaced(frames=frames), audio=None, limits=DEFAULT_LIMITS)
    clip = read_clip(blob, DEFAULT_LIMITS)
    wanted = evenly_spaced(clip.header.frames, frames)

    def ours() -> NDArray[np.uint8]:
        (pixels,) = pipeline.decode(blob, pipeline.plan(blob))
        return np.asarray(pixels, np.uint8)

    calls: dict[str, Callable[[], object]] = {"ours": ours}
    if not is_long:
        calls["all"] = lambda: decoded_from_the_first(data, wanted)
    best = side_by_side(calls, repeats=repeats, most_s=60.0)
    ours_s = best["ours"].processor_s
    all_s = None if is_long else best["all"].processor_s
    peers_s = {}
    with tempfile.NamedTemporaryFile(suffix=f".{CODECS[name][1]}") as file:
        Path(file.name).write_bytes(data)
        for peer, asked in others.items():
            turns = (asked.seconds(Path(file.name), wanted) for _ in range(repeats))
            peers_s[peer] = min(turns)
    is_bar, codec = frames == 32 or is_long, name.split(",")[0]
    bar = f"≤ {BAR_LONG_S:g} s" if is_long else f"≤ {BAR_SHORT[codec]} ×"
    return Result(
        clip=f"{name}, {'30 min' if is_long else '30 s'}",
        frames=frames,
        key_frames=int(clip.table.is_key.sum()),
        size_bytes=len(data),
        ours_s=ours_s,
        all_s=all_s,
        peers_s=peers_s,
        is_equal=None if is_long else bool((ours() == decoded_from_the_first(data, wanted)).all()),
        bar=bar if is_bar else "–",
        is_met=_is_met(codec, ours_s, all_s, peers_s) if is_bar else None,
    )


def _is_met(codec: str, ours_s: float, all_s: float | None, peers_s: Mapping[str, float]) -> bool:
    """A short clip over the best of the others."""
    if all_s is None:
        return ours_s <= BAR_LONG_S
    return ours_s <= BAR_SHORT[codec] * min(all_s, *peers_s.values())


def to_markdown(results: Sequence[Result]) -> str:
    """The run as a results file."""
    lines = [
        "# Clips: seconds of the processor for the wanted frames",
        "",
        f"`python -m benchmarks.clips` on {hardware()}; PyAV {av.__version__}. "
        f"{WIDTH} × {HEIGHT} at {RATE} frames a second, shown at {SHOWN} × {SHOWN}.",
        "",
        "| clip | MB | key frames | wanted | ours | PyAV, all from the first | torchcodec | decord "
        "| over the best | bar | | equal |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for each in results:
        theirs = {"all": each.all_s, **dict.fromkeys(PEERS), **each.peers_s}
        ran = [seconds for seconds in theirs.values() if seconds is not None]
        ratio = f"{each.ours_s / min(ran):.2f}" if ran else "–"
        others = " | ".join("not run" if s is None else f"{s:.2f} s" for s in theirs.values())
        met = {True: "met", False: "NOT MET", None: ""}[each.is_met]
        equal = {True: "yes", False: "NO", None: "–"}[each.is_equal]
        lines.append(
            f"| {each.clip} | {each.size_bytes / 1e6:.1f} | {each.key_frames} | {each.frames} "
            f"| {each.ours_s:.2f} s | {others} | {ratio} | {each.bar} | {met} | {equal} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="write the table to this file too")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir()) / "bench-data")
    given = parser.parse_args()
    results = []
    with peers(given.cache) as others:
        for name, (codec, container, options) in CODECS.items():
            for is_long, data in enumerate(encoded(codec, container, options)):
                for frames in (8, 32):
                    results.append(
                        measured(name, data, frames, given.repeats, others, is_long=bool(is_long))
                    )
                    print(to_markdown(results[-1:]).splitlines()[-1], flush=True)
    text = to_markdown(results)
    publish(text, given.out)


if __name__ == "__main__":
    main()
