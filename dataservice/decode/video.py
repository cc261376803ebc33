"""Clips: size and frame count from the header, sampled frames through a processor's view."""

import math
from collections.abc import Iterator

import numpy as np
from av.container import InputContainer
from av.error import FFmpegError
from av.video.frame import VideoFrame
from av.video.reformatter import Interpolation
from av.video.stream import VideoStream
from numpy.typing import NDArray

from dataservice.core.errors import SampleError
from dataservice.core.limits import DecodeLimits
from dataservice.core.sample import MediaBlob
from dataservice.decode.container import (
    count_packets,
    header_seconds,
    opened,
    prepare_decoder,
)
from dataservice.decode.image import cut_tiles
from dataservice.decode.processors.base import VideoHeader, VisionPlan

# Containers count frames that an edit list hides from the decoder, and encoders cut a clip's
# last group short. Up to this much may be missing at the end; the last frame stands in.
TOLERATED_FRAMES = 2
TOLERATED_SHARE = 0.02


def video_header(blob: MediaBlob, limits: DecodeLimits) -> VideoHeader:
    """Size, frame count and rate, without decoding.

    Where the header has no frame count (Matroska, WebM) packets are counted, one a frame.

    Raises:
        SampleError: unreadable, without a video stream or frames, truncated so that packets
            end before 90 % of the header's duration, or above a limit.
    """
    with opened(blob, limits) as container:
        stream = _video_stream(container, blob)
        seconds, frames = header_seconds(container, stream), stream.frames
        width, height, rate = stream.width, stream.height, stream.average_rate
        limits.check("max_video_pixels", width * height, f"video {blob.name!r}: pixels a frame")
        if frames < 1:
            frames, spanned_s = count_packets(container, stream, limits.max_video_frames)
            limits.check("max_video_frames", frames, f"video {blob.name!r}: frames")
            if seconds is not None and spanned_s < 0.9 * seconds - 0.5:
                raise SampleError(
                    f"video {blob.name!r} is truncated: its header says {seconds:.1f} s, its "
                    f"packets end after {spanned_s:.1f} s. Replace the file or leave it out."
                )
    if frames < 1 or width < 1 or height < 1:
        raise SampleError(
            f"video {blob.name!r} has {frames} frames of {width}×{height} pixels; at least one "
            "frame is needed. Replace the file or leave the sample out."
        )
    frames_per_s = float(rate) if rate else (frames / seconds if seconds else 0.0)
    if not 0 < frames_per_s < math.inf:
        raise SampleError(
            f"video {blob.name!r} has neither a frame rate nor a duration in its header. "
            "Write it again with timestamps, or leave the sample out."
        )
    limits.check("max_video_frames", frames, f"video {blob.name!r}: frames")
    limits.check("max_video_s", frames / frames_per_s, f"video {blob.name!r}: seconds")
    return VideoHeader(width=width, height=height, frames=frames, frames_per_s=frames_per_s)


def decode_video(
    blob: MediaBlob, header: VideoHeader, plan: VisionPlan, limits: DecodeLimits
) -> NDArray[np.uint8]:
    """The plan's frames: uint8[frames, height, width, 3].

    Frames are counted as they are presented; those behind the last wanted one are not decoded.

    Raises:
        SampleError: damaged, or more frames missing at the end than an encoder leaves out.
    """
    pixels = np.empty(plan.shape, dtype=np.uint8)
    wanted = np.asarray(plan.frame_indices)
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
            _check_shortfall(blob, header.frames, decoded)
            assert last is not None, "a clip without frames is refused above"
            pixels[missing] = _cut(last, blob, plan, limits)
    return pixels


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
    """Whole frames until the end or the first damage: what is missing is judged by the caller."""
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
    view = plan.views[0]
    resized = frame.reformat(
        width=view.width,
        height=view.height,
        format="rgb24",
        interpolation=Interpolation.BICUBIC,
        threads=1,  # else a thread for every CPU, frame by frame: workers decode many at once
    )
    return cut_tiles(np.asarray(resized.to_ndarray(), dtype=np.uint8), view)


def _check_shortfall(blob: MediaBlob, promised: int, decoded: int) -> None:
    tolerated = max(TOLERATED_FRAMES, int(TOLERATED_SHARE * promised))
    if decoded < 1 or promised - decoded > tolerated:
        raise SampleError(
            f"video {blob.name!r} is truncated or damaged: its header promises {promised} frames "
            f"and {decoded} can be decoded; at most {tolerated} may be missing. Replace the file "
            "or leave the sample out."
        )
