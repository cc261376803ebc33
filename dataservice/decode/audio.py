"""Recordings: their length from the header, and their samples at 16 kHz mono.

The planned length comes from the header, since only decoding would tell the true length: codecs add
delay and padding, and resampling rounds. Decoding corrects small differences at the end, with
silence or by cutting, and refuses larger ones.
"""

from collections.abc import Iterator
from typing import Any

import av
import numpy as np
from av.audio.frame import AudioFrame
from av.audio.stream import AudioStream
from av.container import InputContainer
from av.error import FFmpegError
from numpy.typing import NDArray

from dataservice.core.errors import SampleError
from dataservice.core.kernels import array, kernel, read_only
from dataservice.core.limits import DecodeLimits
from dataservice.core.sample import MediaBlob
from dataservice.decode.container import (
    count_packets,
    header_seconds,
    last_packet_s,
    opened,
    prepare_decoder,
)
from dataservice.decode.flac import plain_flac, read_plain
from dataservice.decode.processors.whisper import SAMPLE_RATE_HZ, AudioChunk
from dataservice.decode.wav import missing_wav_s

# Delay and padding of the codecs in use (MP3, AAC, Opus) are below 0.1 s; at low rates they are
# longer, and below two frames of MP3, in samples of the file's own rate.
TOLERATED_S = 0.1
TOLERATED_SAMPLES = 2 * 1152
TOLERATED_SHARE = 0.01
# Silence takes 20 bytes per second in Opus and 50 in FLAC.
FEWEST_BYTES_PER_S = 8
LEAST_RATE_HZ = 1000
_FULL_SCALE = np.float32(32768)
_OF_FULL_SCALE = 1 / _FULL_SCALE  # a power of two: dividing gives the same
_WHOLE_NUMBERS, _FLOATS = frozenset({"s16", "s16p"}), frozenset({"flt", "fltp"})
# Without an index in the file, the durations in these formats' headers are guesses from the first
# bit rate.
_GUESSED_DURATION_FORMATS = frozenset({"mp3", "aac", "amr"})


def audio_samples(blob: MediaBlob, limits: DecodeLimits) -> int:
    """Number of samples at 16 kHz that the recording is planned with, without decoding.

    It follows from the header's duration; when that is missing, or (MP3, raw AAC, AMR) differs
    from the duration of all packets, from the latter. So it does where the header only has the
    duration of the whole file (Matroska, WebM), and the sound ends before the clip beside it.

    Raises:
        SampleError: the recording is unreadable or without sound, its header promises more than its
            bytes can hold, or it is above a limit.
    """
    with opened(blob, limits) as container:
        stream = _audio_stream(container, blob)
        _check_signal(blob, stream.rate, stream.channels, limits)
        seconds = header_seconds(container, stream)
        is_guessed = container.format.name in _GUESSED_DURATION_FORMATS
        if seconds is None or is_guessed or stream.duration is None:
            _, spanned_s = count_packets(container, stream)
            if seconds is None or (
                abs(spanned_s - seconds) > _tolerated_s(seconds)
                and (is_guessed or _is_whole(blob, limits, seconds))
            ):
                seconds = spanned_s
    promised_s = seconds + missing_wav_s(blob.data)
    if promised_s - seconds > _tolerated_s(promised_s):
        raise SampleError(
            f"audio {blob.name!r} is truncated or damaged: its header promises {promised_s:.2f} s "
            f"and {seconds:.2f} s are there. Replace the file or leave the sample out."
        )
    limits.check("max_audio_s", seconds, f"audio {blob.name!r}: seconds")
    samples = round(seconds * SAMPLE_RATE_HZ)
    if samples < 1:
        raise SampleError(
            f"audio {blob.name!r} has no sound: its duration is {seconds:g} s. Leave it out."
        )
    if seconds * FEWEST_BYTES_PER_S > len(blob.data):
        raise SampleError(
            f"audio {blob.name!r} is truncated or damaged: its header promises {seconds:.0f} s in "
            f"{len(blob.data):,} bytes; even silence takes {FEWEST_BYTES_PER_S} a second. Replace "
            "the file or leave the sample out."
        )
    return samples


def decode_audio(
    blob: MediaBlob, samples: int, chunks: tuple[AudioChunk, ...], limits: DecodeLimits
) -> tuple[NDArray[np.float32], ...]:
    """The planned chunks, float32[chunk.samples] each, in [-1, 1).

    `samples` is what `audio_samples` gave. Channels are averaged and resampled at 16 bits, as
    Whisper's own loader does; in floating point, FFmpeg would mix stereo 3 dB louder. Uses the
    memory of the chunks, and of about a second of the file's own sound.

    Raises:
        SampleError: the recording is damaged, or its decoded length differs by more than 0.1 s, 1 %
            or 2,304 samples of its own rate, whichever is largest.
    """
    tolerated = round(_tolerated_s(samples / SAMPLE_RATE_HZ) * SAMPLE_RATE_HZ)
    # Pages take memory only when they are written to.
    sound = np.empty(sum(chunk.samples for chunk in chunks), dtype=np.float32)
    if (plain := plain_flac(blob)) is not None:
        decoded = read_plain(blob.name, plain, sound[:samples])
    else:
        decoded, tolerated = _read(blob, limits, sound[:samples], tolerated)
    if abs(decoded - samples) > tolerated:
        raise SampleError(
            f"audio {blob.name!r} is truncated or damaged: its header promises "
            f"{samples / SAMPLE_RATE_HZ:.2f} s and {decoded / SAMPLE_RATE_HZ:.2f} s were decoded; "
            f"they may differ by {tolerated / SAMPLE_RATE_HZ:.2f} s. Replace the file or leave "
            "the sample out."
        )
    sound[min(decoded, samples) :] = 0
    ends = np.cumsum([chunk.samples for chunk in chunks])
    return tuple(np.split(sound, ends[:-1]))


def _is_whole(blob: MediaBlob, limits: DecodeLimits, seconds: float) -> bool:
    """Whether packets of some track reach the end that the header promises."""
    with opened(blob, limits) as container:
        return last_packet_s(container) > seconds - _tolerated_s(seconds)


def _check_signal(blob: MediaBlob, rate_hz: int, channels: int, limits: DecodeLimits) -> None:
    """Raises SampleError when there is no sound, or when the sample rate would make the resampling
    filter huge."""
    what = f"audio {blob.name!r}"
    if rate_hz < LEAST_RATE_HZ or channels < 1:
        raise SampleError(
            f"{what} has {rate_hz:,} samples a second in {channels} channels; it needs at least "
            f"{LEAST_RATE_HZ:,} in one. Replace the file or leave the sample out."
        )
    limits.check("max_audio_rate_hz", rate_hz, f"{what}: samples a second")
    limits.check("max_audio_channels", channels, f"{what}: channels")


def _audio_stream(container: InputContainer, blob: MediaBlob) -> AudioStream:
    if not container.streams.audio:
        raise SampleError(
            f"audio {blob.name!r} ({len(blob.data):,} bytes) has no audio stream: it is another "
            "kind of file, or its header is cut off. Replace it or leave the sample out."
        )
    return container.streams.audio[0]


def _read(
    blob: MediaBlob, limits: DecodeLimits, sound: NDArray[np.float32], tolerated: int
) -> tuple[int, int]:
    """Write the recording's sound at 16 kHz to memory of as many samples as are wanted; returns how
    many it has, or some number beyond what is tolerated, and by how many these may differ:
    `tolerated`, or what its codec may add."""
    decoded = 0
    with opened(blob, limits) as container:
        rate_hz = max(LEAST_RATE_HZ, _audio_stream(container, blob).rate)
        tolerated = max(tolerated, round(TOLERATED_SAMPLES / rate_hz * SAMPLE_RATE_HZ))
        for wave in _at_rate(_seconds(container, blob, limits)):
            room = sound[decoded : decoded + len(wave)]
            _write(wave[: len(room)], room)
            decoded += len(wave)
            if decoded > len(sound) + tolerated:
                break
    return decoded, tolerated


def _seconds(
    container: InputContainer, blob: MediaBlob, limits: DecodeLimits
) -> Iterator[AudioFrame]:
    """The samples in frames of about a second, until the end or the first damage; the caller
    decides whether too many are missing. To resample a frame of MP3 costs several times as much as
    its samples do. Raises ValueError where the format of the samples changes."""
    stream = _audio_stream(container, blob)
    prepare_decoder(stream, limits)
    # In FLAC, a damaged frame is dropped before it reaches the decoder; the numbers of the frames
    # after it reveal the gap. Other formats have no such numbers.
    numbered, expected = container.format.name == "flac", None
    waiting, signal = av.AudioFifo(), None
    try:
        for frame in container.decode(stream):
            if frame.is_corrupt or (expected is not None and frame.pts != expected):
                break
            if numbered and frame.pts is not None:
                expected = frame.pts + frame.samples
            if signal is None:
                signal = rate_hz, _ = frame.sample_rate, frame.layout.nb_channels
                _check_signal(blob, *signal, limits)
            if (frame.sample_rate, frame.layout.nb_channels) != signal:
                break  # joined with the others, it would be read as if it had their channels
            frame.pts = None  # samples are joined in order; gaps in time are not filled
            waiting.write(frame)
            if waiting.samples >= rate_hz and (whole := waiting.read()) is not None:
                yield whole
    except FFmpegError:
        pass
    if waiting.samples and (whole := waiting.read()) is not None:
        yield whole


def _at_rate(frames: Iterator[AudioFrame]) -> Iterator[NDArray[np.int16] | NDArray[np.float32]]:
    """The sound at 16 kHz mono, about a second at a time. Raises ValueError where the frames'
    format changes."""
    resampler = av.AudioResampler(format="s16", layout="mono", rate=SAMPLE_RATE_HZ)
    for frame in frames:
        there = frame.sample_rate == SAMPLE_RATE_HZ and frame.layout.name == "mono"
        if there and frame.format.name in _WHOLE_NUMBERS:
            yield _plane(frame, np.int16)
        elif there and frame.format.name in _FLOATS:
            yield _plane(frame, np.float32)
        else:
            for resampled in resampler.resample(frame):
                yield _plane(resampled, np.int16)
    for resampled in resampler.resample(None):
        yield _plane(resampled, np.int16)


def _plane(frame: AudioFrame, dtype: type[np.generic]) -> NDArray[Any]:
    """The samples of a frame of one channel, where FFmpeg has them."""
    plane: Any = frame.planes[0]  # whose stubs do not say that it is a buffer
    return np.frombuffer(plane, dtype, frame.samples)


def _write(wave: NDArray[Any], room: NDArray[np.float32]) -> None:
    """Sound as whole numbers of 16 bits over the full scale, to memory of as many samples."""
    if wave.dtype == np.int16:
        np.multiply(wave, _OF_FULL_SCALE, out=room)
    else:
        _round(wave, room)


@kernel((read_only(np.float32), array(np.float32)))
def _round(wave: NDArray[np.float32], room: NDArray[np.float32]) -> None:
    """The same of sound in [-1, 1): as FFmpeg rounds it, in a tenth of the time. What is no number
    becomes the smallest."""
    least, most = -_FULL_SCALE, np.float32(_FULL_SCALE - 1)
    for i in range(room.size):
        whole = np.rint(wave[i] * _FULL_SCALE)
        whole = whole if whole >= least else least
        whole = whole if whole <= most else most
        room[i] = whole * _OF_FULL_SCALE


def _tolerated_s(seconds: float) -> float:
    return max(TOLERATED_S, TOLERATED_SHARE * seconds)
