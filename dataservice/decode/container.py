"""Opening a clip or a recording with PyAV: the border at which its errors become ours."""

import io
from collections.abc import Iterator
from contextlib import contextmanager

import av
from av.audio.stream import AudioStream
from av.container import InputContainer
from av.stream import Stream
from av.video.stream import VideoStream

from dataservice.core.errors import SampleError
from dataservice.core.limits import DecodeLimits
from dataservice.core.sample import MediaBlob
from dataservice.decode.mp4_tables import check_tables
from dataservice.decode.tags import without_tags

_MICROSECONDS = 1_000_000
# Formats that hold their media. Playlists and scripts (HLS, DASH, ffconcat) would make FFmpeg
# open other files and addresses that the sample names.
FORMATS = "mov,mp4,matroska,webm,avi,mpegts,mpeg,flv,wav,w64,aiff,caf,flac,mp3,ogg,aac,amr"
# Of these, a stream that was cut out of a longer one begins with frames that refer to what was
# cut off: an error there is no damage.
_CUT_ANYWHERE = frozenset({"mp3", "mp3float", "mp2", "mp2float", "mp1", "mp1float"})


@contextmanager
def opened(blob: MediaBlob, limits: DecodeLimits) -> Iterator[InputContainer]:
    """The blob as an open container.

    Raises:
        SampleError: FFmpeg cannot read it, here or later inside the `with`, or its header
            states more than a limit allows.
    """
    check_tables(blob, limits)
    options = {
        "format_whitelist": FORMATS,
        "protocol_whitelist": "none",
        "max_streams": str(limits.max_media_streams),
        # Opening decodes a first frame where the header leaves something out.
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
    # Beside FFmpeg's own errors, damaged bytes make PyAV raise ValueError, AttributeError (a
    # stream of an unknown codec) and IndexError, so all of it is this sample's fault.
    except Exception as error:
        text = str(error) or type(error).__name__
        raise SampleError(
            f"{blob.kind} {blob.name!r} ({len(blob.data):,} bytes) cannot be read: {text}. "
            "The file is damaged or truncated; replace it or leave the sample out."
        ) from error


def prepare_decoder(stream: VideoStream | AudioStream, limits: DecodeLimits) -> None:
    """Decode in this thread, within the limits, and let damage end the stream.

    FFmpeg by default paints over damage and checks no checksums.
    """
    context = stream.codec_context
    # Workers decode many samples at once; FFmpeg's own threads would only get in their way.
    context.thread_count = 1
    strict = "crccheck" if context.name in _CUT_ANYWHERE else "crccheck+explode"
    context.options = {"err_detect": strict, "max_pixels": str(limits.max_video_pixels)}


def header_seconds(container: InputContainer, stream: Stream) -> float | None:
    """Duration in s that the stream's header gives, or else the container's."""
    if stream.duration is not None and stream.time_base is not None and stream.duration > 0:
        return float(stream.duration * stream.time_base)
    if container.duration is not None and container.duration > 0:
        return container.duration / _MICROSECONDS
    return None


def count_packets(
    container: InputContainer, stream: Stream, most: int | None = None
) -> tuple[int, float]:
    """Packets of a stream, and the seconds they span; decodes nothing. Reads all, or until
    there are more than `most`."""
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
