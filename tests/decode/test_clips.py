"""Clips: wanted frames are those of decoding everything, and cost what lies before them."""

import io
from collections.abc import Iterator, Sequence
from functools import cache

import av
import numpy as np
import pytest
from numpy.typing import NDArray

from dataservice.core.errors import SampleError
from dataservice.core.limits import DEFAULT_LIMITS, DecodeLimits
from dataservice.core.sample import MediaBlob
from dataservice.decode import frame_reader
from dataservice.decode.media import MediaPipeline
from dataservice.decode.processors.base import VideoHeader, View, VisionPlan
from dataservice.decode.processors.llava import LlavaProcessor
from dataservice.decode.video import Clip, decode_video, read_clip
from tests.decode.clips import MAKES, SIZE, Make, encoded, samples_of, x264

# Clips that begin in the middle of a group.
CUT = {"h264, cut", "h265, cut"}
# What packets do not tell: how many frames they hold, or when those are shown.
COUNTED = {name for name in MAKES if name.startswith("mpeg4")}
COUNTED |= {"h264, interlaced", "h264, avi", "h264, without times"}


@cache
def clip_of(name: str) -> tuple[MediaBlob, Clip]:
    blob = MediaBlob(kind="video", name=name, data=encoded(MAKES[name]))
    return blob, read_clip(blob, DEFAULT_LIMITS)


def picked(indices: Sequence[int]) -> VisionPlan:
    return VisionPlan(
        encoder_tokens=1,
        llm_tokens=1,
        views=(View.whole(*SIZE),),
        frame_indices=tuple(indices),
    )


def shown_by_ffmpeg(data: bytes) -> Iterator[NDArray[np.uint8]]:
    """Every frame from the first one on, as FFmpeg shows them."""
    with av.open(io.BytesIO(data)) as container:
        container.streams.video[0].codec_context.thread_count = 1
        for frame in container.decode(container.streams.video[0]):
            yield frame.to_ndarray(format="rgb24")


@pytest.fixture
def always_seeking(monkeypatch):
    monkeypatch.setattr(frame_reader, "SEEK_FROM_PACKETS", 0)


@pytest.mark.parametrize("name", sorted(MAKES.keys() - CUT))
def test_wanted_frames_are_those_of_decoding_everything(name, always_seeking):
    blob, clip = clip_of(name)
    every = list(shown_by_ffmpeg(blob.data))
    assert clip.header.frames == len(every) == len({frame.tobytes() for frame in every})
    for indices in samples_of(len(every), seed=1):
        pixels = decode_video(blob, clip, picked(indices), DEFAULT_LIMITS)
        assert (pixels == np.stack([every[index] for index in indices])).all(), indices


@pytest.mark.parametrize("name", sorted(MAKES.keys() - CUT))
def test_it_is_known_from_the_packets_whether_they_tell_frames_apart(name):
    assert clip_of(name)[1].table.exact == (name not in COUNTED)


@pytest.mark.parametrize("container", ["mp4", "matroska"])
def test_damage_between_wanted_frames_is_neither_decoded_nor_seen(container):
    """So it is with what is not wanted at all: only the groups of wanted frames are decoded."""
    blob = MediaBlob(
        kind="video",
        name="long",
        data=encoded(Make(container=container, frames=300, options=x264(bframes=2))),
    )
    clip = read_clip(blob, DEFAULT_LIMITS)
    every = list(shown_by_ffmpeg(blob.data))
    damaged = bytearray(blob.data)
    with av.open(io.BytesIO(blob.data)) as opened:
        for place, packet in enumerate(opened.demux(opened.streams.video[0])):
            if packet.size > 8 and not (place < 15 or 150 <= place < 165):
                start = blob.data.index(bytes(packet))
                damaged[start + 8 : start + packet.size] = bytes(packet.size - 8)
    broken = MediaBlob(kind="video", name="broken", data=bytes(damaged))
    pixels = decode_video(broken, clip, picked([0, 155, 161]), DEFAULT_LIMITS)
    assert (pixels == np.stack([every[0], every[155], every[161]])).all()
    with pytest.raises(SampleError, match="'broken' is truncated or damaged"):
        decode_video(broken, clip, picked([0, 80]), DEFAULT_LIMITS)


def planned(blob: MediaBlob, limits: DecodeLimits) -> object:
    pipeline = MediaPipeline(vision=LlavaProcessor(video_frames=3), audio=None, limits=limits)
    return pipeline.plan(blob)


def test_a_clip_of_too_few_key_frames_is_refused_when_it_is_measured():
    """Its last wanted frame is number 49: 50 frames of 112 × 80 pixels."""
    limits = DecodeLimits(max_video_decoded_pixels=400_000)
    planned(clip_of("h264, only key frames")[0], limits)
    with pytest.raises(
        SampleError,
        match=r"'h264, one key frame': pixels of the \d\d of its 60 frames that must be decoded "
        r"to show those wanted \(1 are key frames\) is 4\d\d,\d\d0; the limit "
        r"max_video_decoded_pixels is 400,000",
    ):
        planned(clip_of("h264, one key frame")[0], limits)
    for name in ("mpeg4", "h264, interlaced"):  # whose frames are counted from the first
        with pytest.raises(SampleError, match="max_video_decoded_pixels is 400,000"):
            planned(clip_of(name)[0], limits)


def test_a_clip_whose_key_frames_are_none_is_not_decoded_beyond_the_limit():
    """x264 calls frames key frames at which it begins to refresh the picture, bit by bit."""
    blob, clip = clip_of("h264, refreshed")
    limits = DecodeLimits(max_video_decoded_pixels=20 * SIZE[0] * SIZE[1])
    with pytest.raises(SampleError, match=r"51 of its 60 frames .* max_video_decoded_pixels"):
        decode_video(blob, clip, picked([0, 50]), limits)


class Beyond:
    """A processor that wants frames which no clip has."""

    def __init__(self, frames: tuple[int, ...]) -> None:
        self.frames = frames

    def plan_video(self, header: VideoHeader) -> VisionPlan:
        return picked(self.frames)


@pytest.mark.parametrize(
    ("frames", "words"),
    [((-1, 3), "frames -1 to 3"), ((0, 60), "frames 0 to 60"), ((), "no frames")],
)
def test_a_processor_wants_frames_that_the_clip_has(frames, words):
    pipeline = MediaPipeline(vision=Beyond(frames), audio=None, limits=DEFAULT_LIMITS)
    with pytest.raises(SampleError, match=f"plans {words} of a clip that has frames 0 to 59"):
        pipeline.plan(clip_of("h264")[0])


def test_an_edit_list_hides_frames_from_the_count():
    _, clip = clip_of("h264, edited")
    assert (clip.header.frames, clip.table.packets) == (40, 45)


@pytest.mark.parametrize("name", sorted(CUT))
def test_a_clip_that_was_cut_in_the_middle_of_a_group_is_refused_when_measured(name):
    with pytest.raises(SampleError, match=r"\d+ of its \d+ frames come before its first key frame"):
        clip_of(name)
