"""Pixels and sound to encoder inputs, against slow references written from the definitions."""

import math

import numpy as np
import pytest
import torch

from trainer_client import log_mel, normalize_pixels, patchify
from trainer_client.features import mel_filters

MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


@pytest.mark.parametrize("shape", [(2, 5, 7, 3), (1, 1, 3), (0, 4, 4, 3)])
def test_pixels_are_normalised_by_channel(shape):
    pixels = np.random.default_rng(0).integers(0, 256, size=shape, dtype=np.uint8)
    expected = (pixels / 255.0 - np.array(MEAN)) / np.array(STD)
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 2e-6), (torch.bfloat16, 2e-2)):
        made = normalize_pixels(torch.from_numpy(pixels), MEAN, STD, dtype)
        assert made.dtype == dtype
        np.testing.assert_allclose(made.double(), expected, atol=tolerance)


def test_pixels_that_are_not_bytes_or_not_channels_last_are_refused():
    for pixels in (torch.zeros(2, 2, 3), torch.zeros(3, 2, 2, dtype=torch.uint8)):
        with pytest.raises(ValueError, match="give uint8"):
            normalize_pixels(pixels, MEAN, STD)


def slow_patches(pixels, patch, temporal_patch, merge):
    """Rows of patches by the encoder's rule, one patch at a time."""
    frames, height, width, _ = pixels.shape
    while len(pixels) % temporal_patch:
        pixels = np.concatenate([pixels, pixels[-1:]])
    rows = []
    for t in range(0, len(pixels), temporal_patch):
        for y in range(0, height, patch * merge):
            for x in range(0, width, patch * merge):
                for dy in range(merge):
                    for dx in range(merge):
                        top, left = y + dy * patch, x + dx * patch
                        block = pixels[
                            t : t + temporal_patch, top : top + patch, left : left + patch
                        ]
                        rows.append(block.transpose(3, 0, 1, 2).reshape(-1))
    grid = (-(-frames // temporal_patch), height // patch, width // patch)
    return np.stack(rows), grid


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((1, 28, 56, 3), {}),
        ((3, 56, 28, 3), {}),
        ((4, 12, 18, 3), {"patch": 3, "merge": 2}),
        ((5, 8, 4, 3), {"patch": 4, "merge": 1, "temporal_patch": 3}),
    ],
)
def test_patches_come_in_the_encoder_s_order(shape, options):
    options = {"patch": 14, "temporal_patch": 2, "merge": 2, **options}
    pixels = np.random.default_rng(1).integers(0, 256, size=shape, dtype=np.uint8)
    rows, grid = patchify(torch.from_numpy(pixels), **options)
    expected, expected_grid = slow_patches(pixels, **options)
    assert grid == expected_grid
    np.testing.assert_array_equal(rows, expected)


def test_frames_that_do_not_fall_into_patches_are_refused():
    with pytest.raises(ValueError, match="multiples of 28"):
        patchify(torch.zeros(1, 28, 42, 3))


def slow_mel_scale(hz):
    return 3 * hz / 200 if hz < 1000 else 15 + 27 * math.log(hz / 1000) / math.log(6.4)


def slow_filters(n_mels):
    """Triangles between edges that are even on the mel scale, found by bisection."""
    top = slow_mel_scale(8000.0)
    edges = []
    for mel in (top * i / (n_mels + 1) for i in range(n_mels + 2)):
        low, high = 0.0, 8000.0
        for _ in range(80):
            middle = (low + high) / 2
            low, high = (middle, high) if slow_mel_scale(middle) < mel else (low, middle)
        edges.append((low + high) / 2)
    bins = np.arange(201) * 40.0
    return np.stack(
        [
            np.interp(bins, edges[i : i + 3], [0.0, 2.0 / (edges[i + 2] - edges[i]), 0.0])
            for i in range(n_mels)
        ]
    )


def slow_log_mel(audio, n_mels):
    """Whisper's features by an explicit Fourier sum in float64."""
    padded = np.concatenate([audio[200:0:-1], audio, audio[-2:-202:-1]]).astype(np.float64)
    window = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(400) / 400)
    fourier = np.exp(-2j * np.pi * np.outer(np.arange(201), np.arange(400)) / 400)
    frames = np.stack(
        [padded[160 * i : 160 * i + 400] * window for i in range(len(audio) // 160)], axis=1
    )
    mel = slow_filters(n_mels) @ np.abs(fourier @ frames) ** 2
    log = np.log10(np.maximum(mel, 1e-10))
    return (np.maximum(log, log.max() - 8) + 4) / 4


@pytest.mark.parametrize(("samples", "n_mels"), [(16000, 80), (5003, 128), (201, 80)])
def test_log_mel_is_whisper_s(samples, n_mels):
    rng = np.random.default_rng(2)
    tone = np.sin(2 * np.pi * 440 * np.arange(samples) / 16000)
    audio = (0.5 * tone + 0.01 * rng.standard_normal(samples)).astype(np.float32)
    made = log_mel(torch.from_numpy(audio), n_mels=n_mels)
    assert made.shape == (n_mels, samples // 160)
    np.testing.assert_allclose(made, slow_log_mel(audio, n_mels), atol=2e-4)


def test_log_mel_takes_batches_silence_and_padding():
    audio = torch.randn(2, 3, 1000)
    made = log_mel(audio, pad_to_samples=3200)
    assert made.shape == (2, 3, 80, 20)
    torch.testing.assert_close(made[1, 2], log_mel(audio[1, 2], pad_to_samples=3200))
    assert log_mel(torch.zeros(100)).shape == (80, 1)
    torch.testing.assert_close(log_mel(torch.zeros(1600)), torch.full((80, 10), -1.5))


def test_mel_filters_are_the_published_ones():
    assert mel_filters(80)[0, 1] == pytest.approx(0.02486259, abs=1e-8)
    assert mel_filters(128).shape == (128, 201)
