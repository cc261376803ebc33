"""Items to the inputs of encoders: the tensors that transformers' own processors give.

Pixels from files are compared in tests/decode/test_pixel_parity.py; here are the layouts, and
sound.
"""

import numpy as np
import pytest
import torch
from transformers import WhisperFeatureExtractor
from transformers.models.whisper import feature_extraction_whisper
from transformers.vision_utils import get_vision_cu_seqlens

from tests.trainer_client.runtime.fake_device import THERE, FakeDevice
from trainer_client import normalize_pixels, patchify
from trainer_client.encoder_inputs import (
    frame_cu_seqlens,
    log_mel_batch,
    patch_rows,
    square_pixels,
)

MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


def pixels(*shape: int) -> torch.Tensor:
    rng = np.random.default_rng(shape)
    return torch.from_numpy(rng.integers(0, 256, (*shape, 3), dtype=np.uint8))


def test_patches_of_images_and_clips_follow_one_another_with_their_grids():
    items = [pixels(1, 56, 84), pixels(4, 28, 28), pixels(3, 28, 56)]
    made = patch_rows(items, MEAN, STD)
    assert made.grid_thw.tolist() == [[1, 4, 6], [2, 2, 2], [2, 2, 4]]
    assert made.pixel_values.shape == (24 + 8 + 16, 3 * 2 * 14 * 14)
    alone = [patchify(normalize_pixels(item, MEAN, STD))[0] for item in items]
    torch.testing.assert_close(made.pixel_values, torch.cat(alone), rtol=0, atol=0)


def test_frames_begin_and_end_where_transformers_says():
    grid = torch.tensor([[1, 4, 6], [2, 2, 2], [3, 2, 4]])
    made = frame_cu_seqlens(grid)
    assert made.tolist() == [0, 24, 28, 32, 40, 48, 56]
    wanted = get_vision_cu_seqlens(grid)
    assert made.dtype == wanted.dtype
    assert torch.equal(made, wanted)


def test_tiles_of_all_items_become_one_batch_of_planes():
    items = [pixels(3, 16, 16), pixels(1, 16, 16)]
    made = square_pixels(items, MEAN, STD, dtype=torch.float64)
    assert made.shape == (4, 3, 16, 16)
    assert made[3, 1, 2, 5] == pytest.approx((items[1][0, 2, 5, 1] / 255 - MEAN[1]) / STD[1])


def sounds() -> list[np.ndarray]:
    rng = np.random.default_rng(3)
    time_s = np.arange(16_000 * 3) / 16_000
    tone = 0.5 * np.sin(2 * np.pi * 440 * time_s) + 0.01 * rng.standard_normal(len(time_s))
    quiet = 1e-4 * rng.standard_normal(160 * 70)
    stepped = np.round(3000 * np.sin(2 * np.pi * 200 * time_s[:16_000])) / 32768  # as of 16 bits
    return [x.astype(np.float32) for x in (tone, quiet, stepped, np.zeros(4800), tone[:160])]


@pytest.mark.parametrize("n_mels", [80, 128])
@pytest.mark.parametrize("pad_to_samples", [None, 480_000])
def test_log_mel_features_and_their_mask_are_those_of_whisper_s_extractor(n_mels, pad_to_samples):
    made = log_mel_batch(
        [torch.from_numpy(x) for x in sounds()], n_mels=n_mels, pad_to_samples=pad_to_samples
    )
    wanted = WhisperFeatureExtractor(feature_size=n_mels)(
        sounds(),
        sampling_rate=16_000,
        padding="max_length" if pad_to_samples else "longest",
        return_attention_mask=True,
        return_tensors="pt",
    )
    assert made.input_features.shape == wanted["input_features"].shape
    assert (made.input_features - wanted["input_features"]).abs().max() <= 1e-6
    assert torch.equal(made.feature_attention_mask, wanted["attention_mask"].long())


def test_log_mel_is_as_near_to_the_extractor_s_numpy_path_as_its_torch_path_is(monkeypatch):
    """Without torch the extractor takes another path, which is up to 1e-4 from its own."""
    sound = sounds()[0]

    def extracted() -> np.ndarray:
        made = WhisperFeatureExtractor()(sound, sampling_rate=16_000, return_tensors="np")
        return made["input_features"][0]

    by_torch = extracted()
    monkeypatch.setattr(feature_extraction_whisper, "is_torch_available", lambda: False)
    by_numpy = extracted()
    made = log_mel_batch([torch.from_numpy(sound)], pad_to_samples=480_000).input_features[0]
    assert 0 < np.abs(by_torch - by_numpy).max() < 1e-3
    assert np.abs(made.numpy() - by_numpy).max() <= np.abs(by_torch - by_numpy).max() + 1e-6


def test_what_an_encoder_cannot_take_is_refused():
    for make in (
        lambda: patch_rows([], MEAN, STD),
        lambda: square_pixels([], MEAN, STD),
        lambda: log_mel_batch([]),
    ):
        with pytest.raises(ValueError, match="there are no items"):
            make()
    with pytest.raises(ValueError, match=r"tiles of \[\(8, 8\), \(16, 16\)\] pixels"):
        square_pixels([pixels(1, 16, 16), pixels(1, 8, 8)], MEAN, STD)
    with pytest.raises(ValueError, match="1,600 samples does not fit pad_to_samples=800"):
        log_mel_batch([torch.zeros(1600)], pad_to_samples=800)


def test_items_on_a_device_never_make_the_host_wait_behind_the_first():
    with FakeDevice() as device:
        images = [pixels(1, 28, 28).to(THERE) for _ in range(20)]
        recordings = [torch.zeros(1600 * (1 + n)).to(THERE) for n in range(3)]

        def make_all():
            rows = patch_rows(images, MEAN, STD)
            squares = square_pixels(images, MEAN, STD)
            mel = log_mel_batch(recordings)
            return [*rows, squares, *mel]

        device.copies.clear()
        assert {made.device for made in make_all()} == {THERE}
        assert len(device.copies) == 3  # mean and deviation of colours, and the filters of sound
        device.copies.clear()
        make_all()
        assert not device.copies
        assert not device.reads
