"""Pixels are normalised as the model's own image processor would: with its mean and deviation, or
without, and by its factor. transformers' processor judges the encoder's inputs."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from trainer_client.adapters.transformers import UnsupportedModel
from trainer_client.adapters.transformers.trainable import normalization
from trainer_client.encoder_inputs import square_pixels

COLOURS = {"image_mean": [0.4, 0.5, 0.6], "image_std": [0.3, 0.2, 0.25]}
SETTINGS = {
    "normalised": {},
    "not normalised": {"do_normalize": False},
    "not rescaled": {"do_rescale": False},
    "neither": {"do_normalize": False, "do_rescale": False},
    "by another factor": {"rescale_factor": 1 / 127.5},
    "by another factor alone": {"rescale_factor": 1 / 127.5, "do_normalize": False},
}
ASIS = {"do_resize": False, "do_center_crop": False, "do_convert_rgb": False}


def model_at(place):
    return SimpleNamespace(name_or_path=str(place))


@pytest.mark.parametrize("of", ["folder", "processor"])
@pytest.mark.parametrize("name", SETTINGS)
def test_an_encoder_gets_what_the_models_own_processor_gives(tmp_path, name, of):
    judge = CLIPImageProcessorPil(**COLOURS, **ASIS, **SETTINGS[name])
    judge.save_pretrained(tmp_path)
    found = normalization(model_at(tmp_path), judge if of == "processor" else None)
    pixels = torch.randint(0, 256, (1, 8, 8, 3), dtype=torch.uint8)
    made = square_pixels([pixels], found.mean, found.std)
    wanted = judge(images=pixels[0].numpy(), input_data_format="channels_last", return_tensors="np")
    np.testing.assert_allclose(made.numpy(), wanted["pixel_values"], rtol=2e-6, atol=2e-6)


def test_a_mean_and_deviation_that_are_given_stay_bit_for_bit(tmp_path):
    CLIPImageProcessorPil(**COLOURS).save_pretrained(tmp_path)
    found = normalization(model_at(tmp_path), None)
    assert list(found.mean) == COLOURS["image_mean"]
    assert list(found.std) == COLOURS["image_std"]


def test_a_processor_that_does_not_normalise_needs_no_mean():
    found = normalization(model_at(""), SimpleNamespace(do_normalize=False))
    assert (found.mean, found.std) == ((0, 0, 0), (1, 1, 1))


def test_one_that_normalises_by_a_mean_that_nobody_knows_is_refused():
    with pytest.raises(UnsupportedModel, match="mean and deviation"):
        normalization(model_at(""), SimpleNamespace(do_normalize=True))
