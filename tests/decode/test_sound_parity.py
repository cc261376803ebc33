"""Sound, from its file to log-mel on the rank, is what WhisperFeatureExtractor makes of it."""

import io
import wave

import av
import numpy as np
import pytest
import soundfile
import torch
from transformers import WhisperFeatureExtractor

from dataservice.core.limits import DEFAULT_LIMITS
from dataservice.decode.audio import audio_samples, decode_audio
from dataservice.decode.flac import plain_flac, read_plain
from dataservice.decode.processors.whisper import WhisperProcessor
from trainer_client.encoder_inputs import log_mel_batch

WHISPER_SAMPLES = 480_000


def recording(samples: int, seed: int) -> bytes:
    """A WAV of 16 bits at 16 kHz: a chord, noise, and a pause."""
    rng = np.random.default_rng(seed)
    time_s = np.arange(samples) / 16_000
    sound = sum(np.sin(2 * np.pi * hz * time_s) for hz in rng.uniform(80, 6000, 3)) * 0.2
    sound = sound + 0.02 * rng.standard_normal(samples)
    sound[samples // 3 : samples // 2] = 0
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(16_000)
        out.writeframes((sound.clip(-1, 1) * 32767).astype("<i2").tobytes())
    return buffer.getvalue()


def heard(data: bytes) -> np.ndarray:
    """The samples in [-1, 1), read without our code."""
    with wave.open(io.BytesIO(data)) as opened:
        return np.frombuffer(opened.readframes(opened.getnframes()), "<i2") / np.float32(32768)


@pytest.mark.parametrize("samples", [480_000, 160_000, 48_000 + 77, 16_000 - 1, 961])
@pytest.mark.parametrize("n_mels", [80, 128])
def test_a_recording_has_the_features_and_the_mask_of_whisper_s_extractor(files, samples, n_mels):
    data = recording(samples, seed=samples)
    blob = files.blob("audio", data)
    length = audio_samples(blob, DEFAULT_LIMITS)
    chunks = WhisperProcessor().plan(length)
    items = [torch.from_numpy(x) for x in decode_audio(blob, length, chunks, DEFAULT_LIMITS)]
    made = log_mel_batch(items, n_mels=n_mels, pad_to_samples=WHISPER_SAMPLES)
    wanted = WhisperFeatureExtractor(feature_size=n_mels)(
        heard(data), sampling_rate=16_000, return_attention_mask=True, return_tensors="pt"
    )
    assert (made.input_features - wanted["input_features"]).abs().max() <= 1e-6
    assert torch.equal(made.feature_attention_mask, wanted["attention_mask"].long())


def frame_by_frame(data: bytes) -> np.ndarray:
    """FFmpeg's own resampling of every frame of its decoder, one at a time."""
    resampler = av.AudioResampler(format="s16", layout="mono", rate=16_000)
    with av.open(io.BytesIO(data)) as container:
        made = []
        for frame in [*container.decode(audio=0), None]:
            if frame is not None:
                frame.pts = None
            made += [part.to_ndarray()[0] for part in resampler.resample(frame)]
    return np.concatenate(made) / np.float32(32768)


@pytest.mark.parametrize("rate_hz", [16_000, 22_050, 44_100])
@pytest.mark.parametrize("layout", ["mono", "stereo"])
@pytest.mark.parametrize(("container", "codec"), [("mp3", "libmp3lame"), ("flac", "flac")])
def test_samples_are_the_same_as_if_each_frame_were_resampled_alone(
    files, container, codec, layout, rate_hz
):
    data = files.audio(3.3, container=container, codec=codec, rate=rate_hz, layout=layout)
    blob = files.blob("audio", data)
    length = audio_samples(blob, DEFAULT_LIMITS)
    (made,) = decode_audio(blob, length, WhisperProcessor().plan(length), DEFAULT_LIMITS)
    wanted = frame_by_frame(data)[:length]
    assert (made[: len(wanted)] == wanted).all()
    assert not made[len(wanted) :].any()


@pytest.mark.parametrize(
    ("of", "plain"),
    [
        ({}, True),
        ({"rate": 44_100}, False),
        ({"layout": "stereo"}, False),
        ({"container": "wav", "codec": "pcm_s16le"}, False),
    ],
)
def test_flac_is_left_to_its_own_decoder_where_nothing_is_to_be_resampled(files, of, plain):
    data = files.audio(2.0, **{"container": "flac", "codec": "flac", **of})
    assert (plain_flac(files.blob("audio", data)) is not None) == plain
    tagged = b"ID3\4\0\0\0\0\0\x10" + bytes(16) + data
    assert (plain_flac(files.blob("audio", tagged)) is not None) == plain


@pytest.mark.parametrize("samples", [961, 4096, 8 * 4096, 100_000])
def test_flac_that_its_own_library_wrote_is_plain(files, samples):
    """In frames of another size than FFmpeg's; the last is shorter, or not."""
    sound = np.random.default_rng(5).integers(-(2**15), 2**15, samples, dtype=np.int16)
    buffer = io.BytesIO()
    soundfile.write(buffer, sound, 16_000, format="FLAC")
    plain = plain_flac(files.blob("audio", buffer.getvalue()))
    room = np.empty(samples, np.float32)
    assert read_plain("some.flac", plain, room) == samples
    assert np.array_equal(room, sound / np.float32(32768))


def test_flac_of_24_bits_is_rounded_to_16_as_ffmpeg_does_it(files):
    sound = np.random.default_rng(5).integers(-(2**23), 2**23, 20_000, dtype=np.int32) << 8
    buffer = io.BytesIO()
    soundfile.write(buffer, sound, 16_000, subtype="PCM_24", format="FLAC")
    blob = files.blob("audio", buffer.getvalue())
    length = audio_samples(blob, DEFAULT_LIMITS)
    chunks = WhisperProcessor().plan(length)
    made = np.concatenate(decode_audio(blob, length, chunks, DEFAULT_LIMITS))[:length]
    assert np.array_equal(made, frame_by_frame(blob.data))


def test_flac_whose_header_does_not_tell_its_length_is_not_plain(files):
    data = files.audio(2.0, container="flac", codec="flac")
    unknown = data[:21] + bytes([data[21] & 0xF0]) + bytes(4) + data[26:]
    assert plain_flac(files.blob("audio", unknown)) is None


def test_floats_are_rounded_and_cut_off_as_ffmpeg_does_it(files):
    rng = np.random.default_rng(3)
    sound = np.concatenate(
        [
            rng.uniform(-1.3, 1.3, 20_000),
            (np.arange(-70_000, 70_000) / 2) / 32768,  # halves are rounded to even
            [np.nan, -np.inf, 1.0, -1.0, 1e3, -1e3],
            np.zeros(1_000),
        ]
    ).astype(np.float32)
    frame = av.AudioFrame.from_ndarray(sound[None], format="flt", layout="mono")
    frame.sample_rate = 16_000
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="wav") as out:
        stream = out.add_stream("pcm_f32le", rate=16_000, layout="mono")
        out.mux([*stream.encode(frame), *stream.encode()])
    blob = files.blob("audio", buffer.getvalue())
    length = audio_samples(blob, DEFAULT_LIMITS)
    chunks = WhisperProcessor().plan(length)
    made = np.concatenate(decode_audio(blob, length, chunks, DEFAULT_LIMITS))[:length]
    assert np.array_equal(made, frame_by_frame(blob.data))


@pytest.mark.parametrize(("container", "codec"), [("mp3", "libmp3lame"), ("flac", "flac")])
def test_sound_that_has_the_wanted_rate_is_not_resampled(files, monkeypatch, container, codec):
    class Unused:
        def __init__(self, **options):
            pass

        def resample(self, frame):
            assert frame is None
            return []

    data = files.audio(2.0, container=container, codec=codec, rate=16_000, layout="mono")
    blob = files.blob("audio", data)
    length = audio_samples(blob, DEFAULT_LIMITS)
    monkeypatch.setattr(av, "AudioResampler", Unused)
    (made,) = decode_audio(blob, length, WhisperProcessor().plan(length), DEFAULT_LIMITS)
    assert made.any()


def test_a_recording_is_resampled_about_a_second_at_a_time(files, monkeypatch):
    """An MP3 has 28 frames a second or more; handing one over costs more than its samples."""
    handed = []

    class Counting:
        def __init__(self, **options):
            self._resampler = resampler_of(**options)

        def resample(self, frame):
            handed.append(frame)
            return self._resampler.resample(frame)

    resampler_of = av.AudioResampler
    data = files.audio(5.0, container="mp3", codec="libmp3lame", rate=22_050)
    blob = files.blob("audio", data)
    length = audio_samples(blob, DEFAULT_LIMITS)
    monkeypatch.setattr(av, "AudioResampler", Counting)
    decode_audio(blob, length, WhisperProcessor().plan(length), DEFAULT_LIMITS)
    assert len(handed) <= 7


def test_the_chunks_of_a_long_recording_are_each_a_recording_by_itself(files):
    """Longer recordings than 30 s are cut, where the extractor drops what is left."""
    data = recording(WHISPER_SAMPLES + 32_000, seed=1)
    blob = files.blob("audio", data)
    length = audio_samples(blob, DEFAULT_LIMITS)
    chunks = WhisperProcessor().plan(length)
    items = [torch.from_numpy(x) for x in decode_audio(blob, length, chunks, DEFAULT_LIMITS)]
    made = log_mel_batch(items, pad_to_samples=WHISPER_SAMPLES).input_features
    parts = [heard(data)[:WHISPER_SAMPLES], heard(data)[WHISPER_SAMPLES:]]
    wanted = WhisperFeatureExtractor()(parts, sampling_rate=16_000, return_tensors="pt")
    assert (made - wanted["input_features"]).abs().max() <= 1e-6
