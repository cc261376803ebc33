"""Sound, from its file to log-mel on the rank, is what WhisperFeatureExtractor makes of it."""

import io
import wave

import numpy as np
import pytest
import torch
from transformers import WhisperFeatureExtractor

from dataservice.core.limits import DEFAULT_LIMITS
from dataservice.decode.audio import audio_samples, decode_audio
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
