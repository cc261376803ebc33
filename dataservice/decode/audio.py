"""Recordings: length from the header, samples at 16 kHz mono.

The planned length comes from the header, since only decoding tells the true one: codecs add
delay and padding, and resampling rounds. Decoding makes up small differences at the end,
with silence or by cutting, and refuses larger ones.
"""

from collections.abc import Iterator
from itertools import chain

import av
import numpy as np
from av.audio.frame import AudioFrame
from av.audio.stream import AudioStream
from av.container import InputContainer
from av.error import FFmpegError
from numpy.typing import NDArray

from dataservice.core.errors import SampleError
from dataservice.core.sample import MediaBlob
from dataservice.decode.container import count_packets, header_seconds, opened
from dataservice.decode.limits import DecodeLimits
from dataservice.decode.processors.whisper import SAMPLE_RATE_HZ, AudioChunk

# The longest delay and padding of a codec in use (MP3, AAC, Opus) is under 0.1 s.
TOLERATED_S = 0.1
TOLERATED_SHARE = 0.01
_FULL_SCALE = np.float32(32768)
# Without an index in the file, their headers' durations are guesses from the first bit rate.
_GUESSED_DURATION_FORMATS = frozenset({"mp3", "aac"})


def audio_samples(blob: MediaBlob, limits: DecodeLimits) -> int:
    """Samples at 16 kHz that the recording is planned with, without decoding.

    The header's duration; or, where it is missing or (MP3, raw AAC) disagrees with them, the
    duration of all packets.

    Raises:
        SampleError: unreadable, without sound, or longer than the limit.
    """
    with opened(blob) as container:
        stream = _audio_stream(container, blob)
        seconds = header_seconds(container, stream)
        if seconds is None or container.format.name in _GUESSED_DURATION_FORMATS:
            _, spanned_s = count_packets(container, stream)
            if seconds is None or abs(spanned_s - seconds) > _tolerated_s(seconds):
                seconds = spanned_s
    samples = round(seconds * SAMPLE_RATE_HZ)
    if samples < 1:
        raise SampleError(
            f"audio {blob.name!r} has no sound: its duration is {seconds:g} s. Leave it out."
        )
    limits.check("max_audio_s", seconds, f"audio {blob.name!r}: seconds")
    return samples


def decode_audio(
    blob: MediaBlob, samples: int, chunks: tuple[AudioChunk, ...]
) -> tuple[NDArray[np.float32], ...]:
    """The planned chunks, float32[chunk.samples] each, in [-1, 1).

    `samples` is what `audio_samples` gave. Channels are averaged and resampled at 16 bits, as
    Whisper's own loader does; at floating point FFmpeg would mix stereo 3 dB louder.

    Raises:
        SampleError: damaged, or decodes to more than 0.1 s and 1 % longer or shorter.
    """
    tolerated = round(_tolerated_s(samples / SAMPLE_RATE_HZ) * SAMPLE_RATE_HZ)
    pieces, decoded = [], 0
    with opened(blob) as container:
        resampler = av.AudioResampler(format="s16", layout="mono", rate=SAMPLE_RATE_HZ)
        for frame in chain(_frames(container, blob), (None,)):  # None flushes the resampler
            for resampled in resampler.resample(frame):
                pieces.append(resampled.to_ndarray()[0].astype(np.float32) / _FULL_SCALE)
                decoded += resampled.samples
            if decoded > samples + tolerated:
                break
    if abs(decoded - samples) > tolerated:
        raise SampleError(
            f"audio {blob.name!r} is truncated or damaged: its header promises "
            f"{samples / SAMPLE_RATE_HZ:.2f} s and {decoded / SAMPLE_RATE_HZ:.2f} s were decoded; "
            f"they may differ by {tolerated / SAMPLE_RATE_HZ:.2f} s. Replace the file or leave "
            "the sample out."
        )
    return _cut(pieces, samples, chunks)


def _audio_stream(container: InputContainer, blob: MediaBlob) -> AudioStream:
    if not container.streams.audio:
        raise SampleError(
            f"audio {blob.name!r} ({len(blob.data):,} bytes) has no audio stream: it is another "
            "kind of file, or its header is cut off. Replace it or leave the sample out."
        )
    return container.streams.audio[0]


def _frames(container: InputContainer, blob: MediaBlob) -> Iterator[AudioFrame]:
    """Frames until the end or the first error: what is missing is judged by the caller."""
    stream = _audio_stream(container, blob)
    stream.codec_context.thread_count = 1
    try:
        for frame in container.decode(stream):
            frame.pts = None  # samples are joined as they come; gaps in time are not filled
            yield frame
    except FFmpegError:
        return


def _tolerated_s(seconds: float) -> float:
    return max(TOLERATED_S, TOLERATED_SHARE * seconds)


def _cut(
    pieces: list[NDArray[np.float32]], samples: int, chunks: tuple[AudioChunk, ...]
) -> tuple[NDArray[np.float32], ...]:
    sound = np.concatenate(pieces)[:samples] if pieces else np.zeros(0, dtype=np.float32)
    items, start = [], 0
    for chunk in chunks:
        item = np.zeros(chunk.samples, dtype=np.float32)
        piece = sound[start : start + chunk.samples]
        item[: len(piece)] = piece
        items.append(item)
        start += chunk.samples
    return tuple(items)
