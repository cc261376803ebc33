"""Pixels and sound that change from epoch to epoch, and are the same for whoever decodes them."""

import threading
from dataclasses import replace

import numpy as np
import pytest
import torch

from dataservice.core.errors import SampleError, SpecError
from dataservice.decode.processors.qwen3_vl import Qwen3VLProcessor
from dataservice.decode.processors.whisper import WhisperProcessor
from dataservice.decode.sample_pipeline import build_pipeline
from dataservice.decode.spec import AugmentSpec


class Flip:
    """Turns pictures and clips round, half the time."""

    version = 1

    def augment(self, item, kind, rng):
        return item[:, :, ::-1] if kind != "audio" and rng.random() < 0.5 else item


class Brighter:
    """By one step for the whole file; behind 255 comes 0."""

    def augment(self, item, kind, rng):
        return item + rng.integers(1, 200, dtype=np.uint8)


class Louder:
    """Changes sound in place."""

    def augment(self, item, kind, rng):
        if kind == "audio":
            item *= rng.uniform(0.5, 2.0)
        return item


class Noise:
    def augment(self, item, kind, rng):
        return item if kind == "audio" else rng.integers(0, 256, item.shape, dtype=np.uint8)


class Blot:
    """Returns one and the same picture."""

    kept = None

    def augment(self, item, kind, rng):
        if self.kept is None:
            self.kept = np.full(item.shape, 128, item.dtype)
        return self.kept


class Lighter:
    """Changes pictures in place."""

    def augment(self, item, kind, rng):
        item += 1
        return item


class Crop:
    def augment(self, item, kind, rng):
        return item[:, 1:]


class Floats:
    def augment(self, item, kind, rng):
        return item / 255


class Fails:
    def augment(self, item, kind, rng):
        raise KeyError("nothing")


class Jitter(torch.nn.Module):
    """As torchvision's: one draw from torch's own generator for all that it is given."""

    def __init__(self, strength=0.5):
        super().__init__()
        self.strength = strength

    def forward(self, frames):
        assert frames.shape[1] == 3, "channels come first"
        factor = 1 + self.strength * (2 * torch.rand(()) - 1)
        return (frames * factor).clamp(0, 255).to(torch.uint8)


Jitter.__module__ = "torchvision.transforms.v2._color"

KINDS = (Flip, Brighter, Louder, Blot, Lighter, Noise, Crop, Floats, Fails, Jitter)
CUSTOM = {**{kind.__name__.lower(): kind for kind in KINDS}, "bare": object}


@pytest.fixture
def pipeline(kitchen):
    def make(*names, seed=0, vision=None, **options):
        steps = tuple(AugmentSpec(name=name, options=options, seed=seed) for name in names)
        more = {"vision": vision} if vision else {}
        spec = kitchen.spec(augment=steps, audio=WhisperProcessor(), **more)
        return build_pipeline(spec, custom_processors=CUSTOM)

    return make


@pytest.fixture
def picture(sample, files):
    return sample({"text": "<image>a gate"}, files.blob("image", files.image(112, 84)))


def items_of(pipeline, raw, epoch):
    return pipeline.decode(raw, pipeline.measure(raw), epoch).items


def seen(pipeline, raw, epochs=range(8)):
    """The bytes of the items in each of these epochs."""
    return [b"".join(item.tobytes() for item in items_of(pipeline, raw, e)) for e in epochs]


@pytest.mark.parametrize("name", ["noise", "jitter"])
def test_an_epoch_has_its_own_pixels_and_every_decoder_the_same(pipeline, picture, name):
    once = seen(pipeline(name), picture)
    assert len(set(once)) == len(once)
    assert seen(pipeline(name), picture, reversed(range(8))) == once[::-1]
    assert seen(pipeline(name, seed=1), picture) != once


def test_without_an_epoch_nothing_is_augmented(pipeline, picture):
    plain = seen(pipeline(), picture, [None])
    assert seen(pipeline("noise"), picture, [None]) == plain
    assert seen(pipeline(), picture, range(2)) == 2 * plain


def test_samples_of_one_epoch_are_changed_each_in_its_own_way(pipeline, picture):
    one, other = (seen(pipeline("noise"), replace(picture, key=key), [3]) for key in "ab")
    assert one != other


def test_sound_is_changed_in_its_range_and_never_given_to_a_transform_of_pictures(
    pipeline, sample, files
):
    raw = sample({"text": "<audio>a bell"}, files.blob("audio", files.audio()))
    (plain,) = items_of(pipeline(), raw, None)
    for epoch in range(4):
        (louder,) = items_of(pipeline("louder"), raw, epoch)
        factor = np.abs(louder).max() / np.abs(plain).max()
        assert 0.5 <= factor <= 2.0
        np.testing.assert_allclose(louder, plain * factor, rtol=1e-5)
    assert seen(pipeline("jitter"), raw) == 8 * seen(pipeline(), raw, [None])


def test_all_parts_of_a_clip_are_changed_alike(pipeline, sample, files):
    raw = sample({"text": "<video>a walk"}, files.blob("video", files.video()))
    vision = Qwen3VLProcessor()
    plain = items_of(pipeline(vision=vision), raw, None)
    assert len(plain) > 1, "a part for each time that the text tells"
    steps = set()
    for epoch in range(4):
        made = items_of(pipeline("brighter", vision=vision), raw, epoch)
        (step,) = {n for a, b in zip(made, plain, strict=True) for n in np.unique(a - b).tolist()}
        steps.add(step)
    assert len(steps) > 1


def test_augmenters_run_in_their_order_each_with_draws_of_its_own(pipeline, picture):
    assert seen(pipeline("noise", "flip"), picture) != seen(pipeline("noise"), picture)
    twice = pipeline("noise", "noise")
    assert seen(twice, picture) != seen(pipeline("noise"), picture)


def test_what_one_changes_in_place_is_not_what_another_keeps(pipeline, picture):
    made = pipeline("blot", "lighter")
    for _ in range(3):
        (item,) = items_of(made, picture, 0)
        assert set(np.unique(item).tolist()) == {129}


def test_pixels_lie_in_the_place_given_unless_an_augmenter_may_keep_them(pipeline, picture):
    """What an augmenter keeps would change with the next sample in that place."""
    for names, used in ((), True), (("brighter",), False):
        made = pipeline(*names)
        planned = made.measure(picture)
        place = np.zeros(planned.items[0].shape, np.uint8)
        (pixels,) = made.decode(picture, planned, 1, (place,)).items
        assert np.shares_memory(pixels, place) == used
        assert (pixels == made.decode(picture, planned, 1).items[0]).all()


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("crop", r"'crop' made uint8\[1, 83, 112, 3\] of image uint8\[1, 84, 112, 3\]: .*keeps"),
        ("floats", r"'floats' made float64"),
        ("fails", "'fails' failed with KeyError: 'nothing'. Mend its code"),
    ],
)
def test_what_changes_a_shape_or_fails_spoils_its_sample_and_is_named(
    pipeline, picture, name, reason
):
    with pytest.raises(SampleError, match=reason):
        seen(pipeline(name), picture)


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("secret", {}, "augmenter 'secret' is not in the service's config"),
        ("flip", {"size": 3}, "augmenter 'flip' cannot be made with options"),
        ("bare", {}, "augmenter 'bare' is a object, which is no transform.*no method augment"),
    ],
)
def test_code_that_cannot_be_used_says_why(pipeline, name, options, reason):
    with pytest.raises(SpecError, match=reason):
        pipeline(name, **options)


def test_augmentation_is_part_of_the_identity_and_no_index_depends_on_it(pipeline):
    made = [
        pipeline(),
        pipeline("flip"),
        pipeline("flip", seed=1),
        pipeline("noise"),
        pipeline("flip", "noise"),
        pipeline("jitter"),
        pipeline("jitter", strength=0.1),
    ]
    assert len({each.digests.get("augment") for each in made}) == len(made)
    assert len({each.fingerprint for each in made}) == 1
    assert "augment" not in made[0].digests, "jobs without are what they were"


def test_a_transform_leaves_the_random_numbers_of_others_alone(pipeline, picture):
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    seen(pipeline("jitter"), picture)
    assert torch.equal(torch.rand(3), expected)


def test_transforms_in_several_threads_draw_what_they_would_alone(pipeline, sample, files):
    made = pipeline("jitter")
    blob = files.blob("image", files.image(112, 84))
    raws = [sample({"text": f"<image>{n}"}, blob) for n in range(4)]
    alone = [seen(made, raw) for raw in raws]
    found = [[]] * len(raws)

    def decode(place):
        found[place] = seen(made, raws[place])

    threads = [threading.Thread(target=decode, args=(place,)) for place in range(len(raws))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == alone
