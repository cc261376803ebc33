"""Clips: size and frame count from the container, and sampled frames through a processor's view."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from av.container import InputContainer
from av.error import FFmpegError
from av.video.frame import VideoFrame
from av.video.stream import VideoStream
from numpy.typing import NDArray

from dataservice.core.errors import SampleError
from dataservice.core.limits import DecodeLimits
from dataservice.core.sample import MediaBlob
from dataservice.decode.container import (
    header_seconds,
    last_packet_s,
    opened,
    prepare_decoder,
)
from dataservice.decode.frame_reader import FramesDisagree, read_frames
from dataservice.decode.frame_table import FrameTable, read_frame_table
from dataservice.decode.image import cut_views
from dataservice.decode.processors.base import VideoHeader, VisionPlan

# Containers count frames that an edit list hides from the decoder, and encoders cut a clip's last
# group short. Up to this many frames may be missing at the end; the last frame replaces them.
TOLERATED_FRAMES = 2
TOLERATED_SHARE = 0.02
# Whether to seek, and the number of key frames to begin early, from the cheapest way to the safest.
# H.264 with open groups needs to begin early: frames after a key frame name frames before it, only
# to say that these are no longer needed.
_WAYS = ((True, 0), (True, 1), (False, 1))


@dataclass(frozen=True, kw_only=True, slots=True)
class Clip:
    """A clip as its container describes it: the header for processors, and a table of packets."""

    header: VideoHeader
    table: FrameTable


def read_clip(blob: MediaBlob, limits: DecodeLimits) -> Clip:
    """Size, frame rate and frame count, without decoding; every packet is read.

    Raises:
        SampleError: the clip is unreadable, has no video stream or frames, is truncated, or is
            above a limit.
    """
    what = f"video {blob.name!r}"
    with opened(blob, limits) as container:
        stream = _video_stream(container, blob)
        width, height, rate = stream.width, stream.height, stream.average_rate
        limits.check("max_video_pixels", width * height, f"{what}: pixels a frame")
        limits.check("max_video_frames", stream.frames, f"{what}: frames")
        listed = len(stream.index_entries)  # before FFmpeg lists what it reads
        table = read_frame_table(container, stream, limits.max_video_frames)
        limits.check("max_video_frames", table.packets, f"{what}: frames")
        seconds = header_seconds(container, stream)
        _check_whole(
            blob, table, limits, promised=_promised(stream, listed, table), seconds=seconds
        )
    frames = table.frames
    if frames < 1 or width < 1 or height < 1:
        raise SampleError(
            f"{what} has {frames} frames of {width}×{height} pixels; at least one frame is "
            "needed. Replace the file or leave the sample out."
        )
    frames_per_s = float(rate) if rate else (frames / seconds if seconds else 0.0)
    if not 0 < frames_per_s < math.inf:
        raise SampleError(
            f"{what} has neither a frame rate nor a duration in its header. "
            "Write it again with timestamps, or leave the sample out."
        )
    limits.check("max_video_s", frames / frames_per_s, f"{what}: seconds")
    header = VideoHeader(width=width, height=height, frames=frames, frames_per_s=frames_per_s)
    return Clip(header=header, table=table)


def check_cost(blob: MediaBlob, clip: Clip, plan: VisionPlan, limits: DecodeLimits) -> None:
    """Raises SampleError when decoding the wanted frames, which begins at key frames before them,
    would exceed the limit."""
    _check_decoded(blob, clip, clip.table.decoded_frames(plan.frame_indices), limits)


def decode_video(
    blob: MediaBlob, clip: Clip, plan: VisionPlan, limits: DecodeLimits
) -> NDArray[np.uint8]:
    """The plan's frames: uint8[frames, height, width, 3].

    They are the frames that decoding everything from the first frame would give. When packets do
    not tell frames apart, or seeking finds other frames, everything is decoded from the first
    frame.

    Raises:
        SampleError: the clip is damaged, more frames are missing at the end than an encoder leaves
            out, or decoding would exceed the limit.
    """
    wanted = np.asarray(plan.frame_indices)
    if clip.table.exact and wanted.max() < clip.table.frames:
        for seeking, lead in _WAYS:
            pixels = _decode_runs(blob, clip, plan, limits, seeking=seeking, lead=lead)
            if pixels is not None:
                return pixels
    return _decode_all(blob, clip, plan, limits)


def _decode_runs(
    blob: MediaBlob,
    clip: Clip,
    plan: VisionPlan,
    limits: DecodeLimits,
    *,
    seeking: bool,
    lead: int,
) -> NDArray[np.uint8] | None:
    """Decodes from key frames to wanted frames; None when the packets or frames found differ from
    the table, or are damaged."""
    pixels = np.empty(plan.shape, dtype=np.uint8)
    wanted = np.asarray(plan.frame_indices)
    runs = clip.table.runs(plan.frame_indices, lead=lead)
    with opened(blob, limits) as container:
        stream = _video_stream(container, blob)
        prepare_decoder(stream, limits)
        try:
            for number, frame in read_frames(container, stream, clip.table, runs, seeking=seeking):
                places = np.flatnonzero(wanted == number)
                if len(places):
                    pixels[places] = _cut(frame, blob, plan, limits)
        except (FramesDisagree, FFmpegError):
            return None
    return pixels


def _decode_all(
    blob: MediaBlob, clip: Clip, plan: VisionPlan, limits: DecodeLimits
) -> NDArray[np.uint8]:
    """Decodes from the first frame to the last wanted one, and finds frames by counting."""
    pixels = np.empty(plan.shape, dtype=np.uint8)
    wanted = np.asarray(plan.frame_indices)
    _check_decoded(blob, clip, min(int(wanted.max()) + 1, clip.header.frames), limits)
    decoded, last = 0, None
    with opened(blob, limits) as container:
        for frame in _frames(container, blob, limits):
            if decoded > wanted.max():
                break
            places = np.flatnonzero(wanted == decoded)
            decoded += 1
            last = frame
            if len(places):
                pixels[places] = _cut(frame, blob, plan, limits)
        missing = np.flatnonzero(wanted >= decoded)
        if len(missing):
            _check_shortfall(blob, clip.header.frames, decoded)
            assert last is not None, "a clip without frames is refused above"
            pixels[missing] = _cut(last, blob, plan, limits)
    return pixels


def _check_decoded(blob: MediaBlob, clip: Clip, frames: int, limits: DecodeLimits) -> None:
    header = clip.header
    limits.check(
        "max_video_decoded_pixels",
        frames * header.width * header.height,
        f"video {blob.name!r}: pixels of the {frames:,} of its {header.frames:,} frames that must "
        f"be decoded to show those wanted ({int(clip.table.is_key.sum()):,} are key frames)",
    )


def _promised(stream: VideoStream, listed: int, table: FrameTable) -> int:
    """Number of packets that a header promises: those that an MP4 or AVI lists, 0 when a file has
    no such list. An AVI has it at its end: where more packets were found than FFmpeg saw `listed`
    it was lost, as where the file was cut off, and what the header counts is left."""
    return listed if stream.frames and listed >= table.packets else stream.frames


def _check_whole(
    blob: MediaBlob,
    table: FrameTable,
    limits: DecodeLimits,
    *,
    promised: int,
    seconds: float | None,
) -> None:
    """Raises SampleError when packets are missing at the end, or key frames at the beginning."""
    if promised:
        if promised - table.packets > _tolerated_frames(promised):
            raise _truncated(blob, f"{promised} frames", f"{table.packets} are there")
    elif seconds is not None and _is_short(table.spanned_s, seconds):
        # A clip may begin later than its file, or end sooner than the sound beside it. Where a file
        # was cut off, so were all its tracks.
        with opened(blob, limits) as container:
            ends_s = last_packet_s(container)
        if _is_short(ends_s, seconds):
            raise _truncated(blob, f"{seconds:.1f} s", f"its packets end after {ends_s:.1f} s")
    if table.headless_frames > _tolerated_frames(table.frames):
        raise SampleError(
            f"video {blob.name!r} was cut out of a longer one: {table.headless_frames} of its "
            f"{table.frames} frames come before its first key frame, and cannot be decoded "
            "without the one before. Cut it at a key frame, or leave the sample out."
        )


def _is_short(spanned_s: float, promised_s: float) -> bool:
    return spanned_s < 0.9 * promised_s - 0.5


def _video_stream(container: InputContainer, blob: MediaBlob) -> VideoStream:
    if not container.streams.video:
        raise SampleError(
            f"video {blob.name!r} ({len(blob.data):,} bytes) has no video stream: it is another "
            "kind of file, or its header is cut off. Replace it or leave the sample out."
        )
    return container.streams.video[0]


def _frames(
    container: InputContainer, blob: MediaBlob, limits: DecodeLimits
) -> Iterator[VideoFrame]:
    """Whole frames until the end or the first damage; the caller decides whether too many are
    missing."""
    stream = _video_stream(container, blob)
    prepare_decoder(stream, limits)
    try:
        for frame in container.decode(stream):
            if frame.is_corrupt:
                return
            yield frame
    except FFmpegError:
        return


def _cut(
    frame: VideoFrame, blob: MediaBlob, plan: VisionPlan, limits: DecodeLimits
) -> NDArray[np.uint8]:
    limits.check(
        "max_video_pixels", frame.width * frame.height, f"video {blob.name!r}: pixels a frame"
    )
    rgb = frame.reformat(
        format="rgb24",
        threads=1,  # otherwise one thread per CPU for each frame, while workers decode many
    )
    return cut_views(np.asarray(rgb.to_ndarray(), dtype=np.uint8), plan.views)


def _check_shortfall(blob: MediaBlob, promised: int, decoded: int) -> None:
    tolerated = _tolerated_frames(promised)
    if decoded < 1 or promised - decoded > tolerated:
        raise _truncated(
            blob,
            f"{promised} frames",
            f"{decoded} can be decoded; at most {tolerated} may be missing",
        )


def _tolerated_frames(promised: int) -> int:
    return max(TOLERATED_FRAMES, int(TOLERATED_SHARE * promised))


def _truncated(blob: MediaBlob, promised: str, found: str) -> SampleError:
    return SampleError(
        f"video {blob.name!r} is truncated or damaged: its header promises {promised} and "
        f"{found}. Replace the file or leave the sample out."
    )
