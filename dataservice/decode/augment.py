"""Changes to decoded pixels and sound that differ from epoch to epoch, by the user's own code or by
torchvision's transforms.

What is random comes from the sample's key, the epoch and the place of the code in the job's list,
so that a replay, a restart and any number of ranks give the same bytes. Lengths are those of the
index: an item keeps its shape.
"""

import hashlib
import random
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import numpy as np

from dataservice.core.errors import SampleError, SpecError
from dataservice.core.own_code import made_of, running, version_of
from dataservice.core.quoting import quoted
from dataservice.core.sample import ItemArray, MediaKind
from dataservice.decode.spec import AugmentSpec

TORCHVISION = "torchvision"


class Augmenter(Protocol):
    """A class of the user's own, made with the `options` of the job.

    `version`, where the class has one, says that its results changed; otherwise the source of its
    module does.
    """

    def augment(self, item: ItemArray, kind: MediaKind, rng: np.random.Generator) -> ItemArray:
        """An encoder item, changed: of an image or a clip uint8[frames, height, width, 3], of a
        recording float32[samples] at 16 kHz; in the same shape and type. Where the processor cuts
        pictures into tiles, its tiles and their thumbnail are the frames. Whatever is random is
        drawn from `rng`, which begins alike for all items of one file. `item` may be changed in
        place. Raises SampleError with the reason why it cannot be used."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Augmentation:
    """A job's augmenters by name, in their order, each with its seed."""

    steps: tuple[tuple[str, Augmenter, int], ...] = ()

    def __call__(
        self,
        items: Sequence[ItemArray],
        kinds: Sequence[tuple[MediaKind, int]],
        key: str,
        epoch: int,
    ) -> tuple[ItemArray, ...]:
        """The items of the sample `key` in this epoch; `kinds` has each one's kind and the number
        of its file. Raises SampleError where an augmenter fails or changes a shape."""
        made = tuple(items)
        for place, (name, augmenter, seed) in enumerate(self.steps):
            if place:  # what the one before returned may be an array that it keeps
                made = tuple(item.copy() for item in made)
            made = tuple(
                _augmented(name, augmenter, item, kind, _rng(seed, place, key, epoch, file))
                for item, (kind, file) in zip(made, kinds, strict=True)
            )
        return made

    @property
    def sources(self) -> tuple[tuple[str, str], ...]:
        """(Name, the version that its class declares or the source of its module) of each."""
        return tuple((name, _version_of(augmenter)) for name, augmenter, _ in self.steps)


def _rng(*of: object) -> np.random.Generator:
    """A generator for these values alone, the same on every machine."""
    digest = hashlib.blake2b(repr(of).encode(), digest_size=16).digest()
    return np.random.Generator(np.random.PCG64(int.from_bytes(digest, "little")))


def _augmented(
    name: str, augmenter: Augmenter, item: ItemArray, kind: MediaKind, rng: np.random.Generator
) -> ItemArray:
    shape, dtype = item.shape, item.dtype
    if not item.flags.writeable:
        item = item.copy()
    with running(name):
        made = augmenter.augment(item, kind, rng)
    if not isinstance(made, np.ndarray) or (made.shape, made.dtype) != (shape, dtype):
        found = f"{made.dtype}{list(made.shape)}" if isinstance(made, np.ndarray) else type(made)
        raise SampleError(
            f"{quoted(name)} made {found} of {kind} {dtype}{list(shape)}: an augmentation keeps "
            "shape and type, for the lengths that steps are planned with. Change sizes by the "
            "processor's options or in prepare, which are measured when the job is indexed."
        )
    return cast(ItemArray, np.ascontiguousarray(made))


def choose_augmentation(specs: Sequence[AugmentSpec], custom: Mapping[str, type]) -> Augmentation:
    """Make a job's augmenters. Raises SpecError where one is not in the config or cannot be
    made."""
    return Augmentation(
        steps=tuple((spec.name, _augmenter(spec, custom), spec.seed) for spec in specs)
    )


def _augmenter(spec: AugmentSpec, custom: Mapping[str, type]) -> Augmenter:
    made = made_of(custom, spec.name, spec.options, what="augmenter")
    if callable(getattr(made, "augment", None)):
        return cast(Augmenter, made)
    if is_transform(type(made)):
        return _Transform(made)
    raise SpecError(
        f"augmenter {quoted(spec.name)} is a {type(made).__name__}, which is no transform of "
        "torchvision and has no method augment(item, kind, rng). See Augmenter in "
        "dataservice/decode/augment.py."
    )


def is_transform(kind: type) -> bool:
    """Whether this is a class of torchvision's transforms."""
    return kind.__module__.startswith(f"{TORCHVISION}.transforms.") and callable(kind)


class _Transform:
    """A transform of torchvision's, for pictures and clips; sound stays as it is. All frames of an
    item are given to it at once, so that it changes them alike."""

    # Transforms draw from the global generators of torch and random, which threads share.
    _drawing = threading.Lock()

    def __init__(self, transform: Any) -> None:
        self.transform = transform

    def augment(self, item: ItemArray, kind: MediaKind, rng: np.random.Generator) -> ItemArray:
        """The item behind the transform."""
        if kind == "audio":
            return item
        import torch  # only jobs that name a transform need it

        frames = torch.from_numpy(item).permute(0, 3, 1, 2)
        with self._drawing, torch.random.fork_rng(devices=[]), torch.inference_mode():
            state = random.getstate()
            try:
                torch.manual_seed(int(rng.integers(2**63)))
                random.seed(int(rng.integers(2**63)))
                made = self.transform(frames)
            finally:
                random.setstate(state)
        if not isinstance(made, torch.Tensor):
            raise SampleError(f"the transform made {type(made).__name__}, not a tensor.")
        return cast(ItemArray, made.permute(0, 2, 3, 1).numpy() if made.ndim == 4 else made.numpy())


def _version_of(augmenter: Augmenter) -> str:
    if isinstance(augmenter, _Transform):
        kind = type(augmenter.transform)
        release = str(getattr(sys.modules.get(TORCHVISION), "__version__", "unknown"))
        plain, *_ = release.split("+")  # builds for other accelerators do the same
        return f"{kind.__module__}.{kind.__qualname__} of {TORCHVISION} {plain}"
    return version_of(type(augmenter))
