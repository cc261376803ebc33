"""Opens a clip or a recording with PyAV, and turns PyAV's errors into ours."""

import io
from collections.abc import Iterator
from contextlib import contextmanager

import av
from av.audio.stream import AudioStream
from av.container import InputContainer
from av.error import FFmpegError
from av.stream import Stream
from av.video.stream import VideoStream

from dataservice.core.errors import SampleError
from dataservice.core.limits import DecodeLimits
from dataservice.core.sample import MediaBlob
from dataservice.decode.mp4_tables import check_tables
from dataservice.decode.tags import without_tags

_MICROSECONDS = 1_000_000
# Formats whose duration is the time at which the last packet ends, not that between both ends.
_TIMED_FROM_ZERO = frozenset({"matroska,webm"})
# Formats that contain their media. Playlists and scripts (HLS, DASH, ffconcat) would make FFmpeg
# open other files and addresses that the sample names.
FORMATS = "mov,mp4,matroska,webm,avi,mpegts,mpeg,flv,wav,w64,aiff,caf,flac,mp3,ogg,aac,amr"
# In these formats, a stream cut out of a longer one begins with frames that refer to the part cut
# off: an error there is not damage.
_CUT_ANYWHERE = frozenset({"mp3", "mp3float", "mp2", "mp2float", "mp1", "mp1float"})


@contextmanager
def opened(blob: MediaBlob, limits: DecodeLimits) -> Iterator[InputContainer]:
    """The blob as an open container.

    Raises:
        SampleError: FFmpeg cannot read it, now or later inside the `with`, or its header states
            more than a limit allows.
    """
    check_tables(blob, limits)
    options = {
        "format_whitelist": FORMATS,
        "protocol_whitelist": "none",
        "max_streams": str(limits.max_media_streams),
        # Opening decodes a first frame when the header leaves something out.
        "max_pixels": str(limits.max_video_pixels),
        "threads": "1",
    }
    try:
        with av.open(
            io.BytesIO(without_tags(blob.data)),
            mode="r",
            metadata_errors="ignore",
            options=options,
        ) as container:
            yield container
    except SampleError:
        raise
    # Besides FFmpeg's own errors, damaged bytes make PyAV raise ValueError, AttributeError (a
    # stream of an unknown codec) and IndexError, so any exception counts as this sample's error.
    except Exception as error:
        text = str(error) or type(error).__name__
        raise SampleError(
            f"{blob.kind} {blob.name!r} ({len(blob.data):,} bytes) cannot be read: {text}. "
            "The file is damaged, truncated or of a kind that is not read; replace it or leave the "
            f"sample out. Readable are {FORMATS.replace(',', ', ')}."
        ) from error


def prepare_decoder(stream: VideoStream | AudioStream, limits: DecodeLimits) -> None:
    """Have the decoder work in this thread, within the limits, and end the stream at damage.

    By default, FFmpeg conceals damage and ignores checksums.
    """
    context = stream.codec_context
    # Workers decode many samples at once; FFmpeg's own threads would only slow them down.
    context.thread_count = 1
    strict = "crccheck" if context.name in _CUT_ANYWHERE else "crccheck+explode"
    context.options = {"err_detect": strict, "max_pixels": str(limits.max_video_pixels)}


def header_seconds(container: InputContainer, stream: Stream) -> float | None:
    """Duration in s from the stream's header, or else from the container's."""
    if stream.duration is not None and stream.time_base is not None and stream.duration > 0:
        return float(stream.duration * stream.time_base)
    if container.duration is not None and container.duration > 0:
        return container.duration / _MICROSECONDS
    return None


def count_packets(
    container: InputContainer, stream: Stream, most: int | None = None
) -> tuple[int, float]:
    """(Number of packets of a stream, seconds they span); decodes nothing. Reads all packets, or
    until there are more than `most`."""
    count, first, last = 0, None, 0
    for packet in container.demux(stream):
        stamp = packet.pts if packet.pts is not None else packet.dts
        if not packet.size:
            continue
        count += 1
        if most is not None and count > most:
            break
        if stamp is not None:
            first = stamp if first is None else min(first, stamp)
            last = max(last, stamp + (packet.duration or 0))
    if first is None or stream.time_base is None:
        return count, 0.0
    return count, float((last - first) * stream.time_base)


def last_packet_s(container: InputContainer) -> float:
    """Seconds at which the last packet of any track ends, as the container's duration counts them;
    decodes nothing. Reads from the current position, up to the end or the first damage."""
    last_s = 0.0
    try:
        for packet in container.demux():
            stamp = packet.pts if packet.pts is not None else packet.dts
            if packet.size and stamp is not None and packet.time_base is not None:
                end = (stamp + (packet.duration or 0)) * packet.time_base
                last_s = max(last_s, float(end))
    except FFmpegError:
        pass  # what comes behind it is missing
    from_zero = container.format.name in _TIMED_FROM_ZERO
    return last_s if from_zero else last_s - (container.start_time or 0) / _MICROSECONDS
