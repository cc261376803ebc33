"""What an encoder is given is what the library's own processor gives it, of the same pixels and
sounds."""

import contextlib
from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

from tests.trainer_client.adapters.foreign_models import (
    FAMILIES,
    MEAN,
    MEL_BINS,
    MEL_FRAMES,
    MERGE,
    PATCH,
    PROCESSOR,
    STD,
)
from tests.trainer_client.adapters.foreign_steps import samples_of, shard_of
from tests.trainer_client.runtime.fake_device import DeviceTensor, FakeDevice
from trainer_client.adapters.transformers import trainable
from trainer_client.features import SAMPLE_RATE_HZ
from trainer_client.synthetic import SyntheticJob, SyntheticMedia

COLOURS = {"image_mean": MEAN, "image_std": STD, "do_resize": False, "do_convert_rgb": False}


class Seen(Exception):
    """Carries what an encoder was called with."""


def given_to_encoder(name, modality, part):
    """The items of a microbatch, and what the module `part` is called with for them."""
    samples = samples_of(name, FAMILIES[name].build(), 3)
    microbatches = shard_of(samples, 1, 0, 3, (1,)).microbatches
    batch = next(b for mb in microbatches if (b := getattr(mb, modality)) is not None)
    model = trainable(FAMILIES[name].build(), processor=PROCESSOR)
    seen = []

    def stop(module, arguments, options):
        seen.extend([*arguments, *options.values()])
        raise Seen

    getattr(model.model.model, part).register_forward_pre_hook(stop, with_kwargs=True)
    with contextlib.suppress(Seen):
        model.encode(modality, batch)
    return batch.items, seen


def test_patches_and_grids_are_those_of_the_librarys_processor():
    processor = transformers.Qwen2VLImageProcessorPil(patch_size=PATCH, merge_size=MERGE, **COLOURS)
    items, (pixels, grids, *_) = given_to_encoder("qwen2_5_vl", "vision", "visual")
    rows = iter(pixels.split(grids.prod(1).tolist()))
    images = 0
    for item, grid, found in zip(items, grids, rows, strict=True):
        if len(item) == 1:
            expected = processor(Image.fromarray(item[0].numpy()), return_tensors="pt")
            assert expected["image_grid_thw"].tolist() == [grid.tolist()]
            torch.testing.assert_close(found.float(), expected["pixel_values"], atol=1e-6, rtol=0)
            images += 1
    assert images > 0


@pytest.mark.parametrize("name", ["llava", "internvl", "gemma3"])
def test_squares_are_those_of_the_librarys_processor(name):
    processor = transformers.CLIPImageProcessorPil(do_center_crop=False, **COLOURS)
    items, seen = given_to_encoder(name, "vision", "vision_tower")
    pictures = [Image.fromarray(tile) for tile in np.concatenate([i.numpy() for i in items])]
    expected = processor(pictures, return_tensors="pt")["pixel_values"]
    torch.testing.assert_close(seen[0].float(), expected, atol=1e-6, rtol=0)


def test_spans_of_images_are_found_without_waiting_for_the_device():
    family = trainable(FAMILIES["gemma3"].build(), processor=PROCESSOR).family
    samples = samples_of("gemma3", family.model, 3)
    seen = []
    for microbatch in shard_of(samples, 1, 0, 3, (1,)).microbatches:
        expected = family.spans(microbatch)
        with FakeDevice() as device:
            there = replace(microbatch, input_ids=DeviceTensor(microbatch.input_ids))
            found = family.spans(there)
        assert device.reads == []
        assert (found is None) == (microbatch.vision is None or not len(microbatch.items))
        assert found is None or torch.equal(found.held, expected)
        seen.append(found is not None)
    assert set(seen) == {True, False}


def test_log_mel_frames_are_those_of_the_librarys_processor():
    seconds = MEL_FRAMES // 100
    processor = transformers.WhisperFeatureExtractor(feature_size=MEL_BINS, chunk_length=seconds)
    items, (mel, *_) = given_to_encoder("qwen2_audio", "audio", "audio_tower")
    sounds = [item.numpy() for item in items]
    expected = processor(sounds, sampling_rate=SAMPLE_RATE_HZ, return_tensors="pt")
    torch.testing.assert_close(mel, expected["input_features"], atol=1e-5, rtol=0)


def test_the_tokens_of_a_synthetic_image_see_one_another_where_the_job_has_the_model_s_token():
    family = trainable(FAMILIES["gemma3"].build(), processor=PROCESSOR).family
    config = family.model.config
    job = SyntheticJob(
        memory_tokens=200, sample_tokens=(40, 90),
        vocabulary=config.text_config.vocab_size, image_token=config.image_token_id,
        media=SyntheticMedia(images=3.0, side_px=(16, 16), patch=4, merge=2),
    )  # fmt: skip
    microbatches = [mb for mb in job.step(0).shard(0).microbatches if mb.vision is not None]
    assert microbatches
    for mb in microbatches:
        spans = family.spans(mb)
        images = spans[spans >= 0].bincount()
        assert images[images > 0].tolist() == mb.items.tokens.tolist()
