"""Opening a clip or a recording with PyAV: the border at which its errors become ours."""

import io
from collections.abc import Iterator
from contextlib import contextmanager

import av
from av.container import InputContainer
from av.stream import Stream

from dataservice.core.errors import SampleError
from dataservice.core.sample import MediaBlob

_MICROSECONDS = 1_000_000
# Formats that hold their media. Playlists and scripts (HLS, DASH, ffconcat) would make FFmpeg
# open other files and addresses that the sample names.
FORMATS = "mov,mp4,matroska,webm,avi,mpegts,mpeg,flv,wav,w64,aiff,caf,flac,mp3,ogg,aac,amr"
_OPTIONS = {"format_whitelist": FORMATS, "protocol_whitelist": "none"}


@contextmanager
def opened(blob: MediaBlob) -> Iterator[InputContainer]:
    """The blob as an open container.

    Raises:
        SampleError: FFmpeg cannot read it, here or later inside the `with`.
    """
    try:
        with av.open(
            io.BytesIO(blob.data), mode="r", metadata_errors="ignore", options=_OPTIONS
        ) as container:
            yield container
    except SampleError:
        raise
    # Beside FFmpeg's own errors, damaged bytes make PyAV raise ValueError, AttributeError (a
    # stream of an unknown codec) and IndexError, so all of it is this sample's fault.
    except Exception as error:
        raise SampleError(
            f"{blob.kind} {blob.name!r} ({len(blob.data):,} bytes) cannot be read: {error}. "
            "The file is damaged or truncated; replace it or leave the sample out."
        ) from error


def header_seconds(container: InputContainer, stream: Stream) -> float | None:
    """Duration in s that the stream's header gives, or else the container's."""
    if stream.duration is not None and stream.time_base is not None and stream.duration > 0:
        return float(stream.duration * stream.time_base)
    if container.duration is not None and container.duration > 0:
        return container.duration / _MICROSECONDS
    return None


def count_packets(container: InputContainer, stream: Stream) -> tuple[int, float]:
    """Packets of a stream, and the seconds they span; reads all, decodes nothing."""
    count, first, last = 0, None, 0
    for packet in container.demux(stream):
        stamp = packet.pts if packet.pts is not None else packet.dts
        if not packet.size:
            continue
        count += 1
        if stamp is not None:
            first = stamp if first is None else min(first, stamp)
            last = max(last, stamp + (packet.duration or 0))
    if first is None or stream.time_base is None:
        return count, 0.0
    return count, float((last - first) * stream.time_base)
