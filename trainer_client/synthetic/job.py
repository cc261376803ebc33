"""A job that is drawn from a seed: what its steps are made of, and the steps themselves."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import cycle

import numpy as np
import torch
from torch import Tensor

from trainer_client.errors import BadArgument
from trainer_client.positions import MropeRule
from trainer_client.shard import IGNORED_LABEL, Shard
from trainer_client.synthetic.sample import (
    CLIP,
    IMAGE,
    RECORDING,
    SyntheticItem,
    SyntheticSample,
)
from trainer_client.synthetic.step import SyntheticStep

SOUND_HZ = 16_000


@dataclass(frozen=True, kw_only=True, slots=True)
class SyntheticMedia:
    """Encoder items, and what a model makes of them.

    `images`, `clips` and `sounds` are how many of each a sample has on average; those that its
    tokens have no room for are left out. Sides are drawn from `side_px`, frames of clips from
    `clip_frames`, seconds of sounds from `sound_s`, by the logarithm. A token is `merge` × `merge`
    patches of `patch` pixels and, in clips, `temporal_patch` frames (Qwen2-VL's, by default), or
    `samples_per_token` samples of sound at 16 kHz.
    """

    images: float = 0.0
    clips: float = 0.0
    sounds: float = 0.0
    side_px: tuple[int, int] = (56, 448)
    clip_frames: tuple[int, int] = (4, 16)
    sound_s: tuple[float, float] = (1.0, 10.0)
    patch: int = 14
    merge: int = 2
    temporal_patch: int = 2
    samples_per_token: int = 640
    seconds_per_patch: float = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class SyntheticJob:
    """What each of `steps` steps is made of; the same seed gives the same steps.

    A step has `microbatches` waves. In each, the replicas form groups of `degrees`, over and over
    while replicas are left; which replicas share a group changes from wave to wave. Each group's
    pack fills `memory_tokens` × its degree with samples, whose lengths are drawn from
    `sample_tokens` by the logarithm; a group of several replicas begins with a sample that needs
    it. `labelled` is the share of a sample's text that has labels, at its end. With `loss_weights`,
    samples weigh between 0.5 and 2. `image_token` and `sound_token` stand where features of
    pictures and of sound go, and nowhere else: give the model's own, from which it may work out
    which tokens see one another. By default they are the last two of the vocabulary. `mrope` is the
    rule by which a model counts time, height and width, as those of Qwen-VL do.

    Raises BadArgument where a number makes no step.
    """

    name: str = "synthetic"
    replicas: int = 1
    steps: int = 10
    microbatches: int = 4
    memory_tokens: int = 8192
    degrees: tuple[int, ...] = (1,)
    sample_tokens: tuple[int, int] = (64, 2048)
    vocabulary: int = 32_000
    image_token: int | None = None
    sound_token: int | None = None
    labelled: float = 0.7
    loss_weights: bool = False
    media: SyntheticMedia = field(default_factory=SyntheticMedia)
    mrope: MropeRule | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        counts = self.replicas, self.microbatches, self.memory_tokens, self.vocabulary - 2
        if min(counts) < 1 or self.steps < 0:
            raise BadArgument(
                f"{self.replicas} replicas, {self.microbatches} microbatches, "
                f"{self.memory_tokens} memory_tokens and a vocabulary of {self.vocabulary} must be "
                f"at least 1, 1, 1 and 3, and steps ({self.steps}) at least 0"
            )
        if not self.degrees or not all(1 <= degree <= self.replicas for degree in self.degrees):
            raise BadArgument(
                f"degrees are {self.degrees}; give some between 1 and the {self.replicas} replicas"
            )
        low, high = self.sample_tokens
        if not 1 <= low <= high:
            raise BadArgument(f"sample_tokens {self.sample_tokens} must be at least 1, and rise")
        image, sound = self.feature_tokens
        if image == sound or not all(0 <= token < self.vocabulary for token in (image, sound)):
            raise BadArgument(
                f"image_token is {image} and sound_token {sound}; give two different ones of the "
                f"vocabulary's 0..{self.vocabulary - 1}"
            )

    @property
    def feature_tokens(self) -> tuple[int, int]:
        """The tokens that stand for features of pictures and of sound."""
        image, sound = self.image_token, self.sound_token
        return (
            self.vocabulary - 2 if image is None else image,
            self.vocabulary - 1 if sound is None else sound,
        )

    def step(self, number: int) -> SyntheticStep:
        """A step, the same on whichever rank it is drawn. Raises BadArgument outside the job."""
        if not 0 <= number < self.steps:
            raise BadArgument(f"step {number} is outside 0..{self.steps - 1}")
        draw = _Draw(self, number)
        waves = [
            [(members, draw.pack(len(members))) for members in self._groups(number + wave)]
            for wave in range(self.microbatches)
        ]
        return SyntheticStep(
            draw.samples,
            waves,
            replicas=self.replicas,
            step=number,
            job=self.name,
            mrope=self.mrope,
        )

    def _groups(self, turn: int) -> Iterator[tuple[int, ...]]:
        """Groups of neighbours, each wave from another replica on."""
        left = [(turn + place) % self.replicas for place in range(self.replicas)]
        for degree in cycle(self.degrees):
            if min(self.degrees) > len(left):
                return
            if degree <= len(left):
                yield tuple(left[:degree])
                left = left[degree:]


def synthetic_shards(job: SyntheticJob, step: int = 0) -> tuple[Shard, ...]:
    """The shards of one step, by replica."""
    drawn = job.step(step)
    return tuple(drawn.shard(replica) for replica in range(job.replicas))


class _Draw:
    """Draws the samples of one step, pack by pack."""

    def __init__(self, job: SyntheticJob, step: int) -> None:
        self._job, self._step = job, step
        self._rng = np.random.default_rng([job.seed, step])
        self.samples: list[SyntheticSample] = []

    def pack(self, degree: int) -> list[int]:
        """Places of new samples that fill a group's memory, padding included."""
        unit = 2 * degree if degree > 1 else 1
        left = self._job.memory_tokens * degree // unit * unit
        # A sample that no smaller group could hold.
        least = min(left, self._job.memory_tokens * (degree - 1) + 1) if degree > 1 else 0
        held = []
        while left > 0:
            wanted = max(least, self._log_uniform(*self._job.sample_tokens))
            tokens = min(wanted, left)
            held.append(len(self.samples))
            self.samples.append(self._sample(tokens))
            left -= -(-tokens // unit) * unit
            least = 0
        return held

    def _sample(self, tokens: int) -> SyntheticSample:
        job, rng = self._job, self._rng
        image, sound = job.feature_tokens
        ids = torch.from_numpy(rng.integers(0, job.vocabulary - 2, tokens))
        for token in sorted((image, sound)):
            ids += ids >= token  # text has all other tokens
        labels = torch.cat([ids[1:], ids.new_full((1,), IGNORED_LABEL)])
        labels[: round(tokens * (1 - job.labelled))] = IGNORED_LABEL
        items = tuple(self._items(tokens))
        for item in items:
            place = slice(item.position, item.position + item.tokens)
            ids[place] = image if item.modality == "vision" else sound
            labels[max(0, item.position - 1) : item.position + item.tokens] = IGNORED_LABEL
        return SyntheticSample(
            id=self._step << 32 | len(self.samples),
            input_ids=ids,
            labels=labels,
            items=items,
            weight=float(rng.uniform(0.5, 2.0)) if job.loss_weights else 1.0,
        )

    def _items(self, tokens: int) -> Iterator[SyntheticItem]:
        """Items with text between them, in mixed order."""
        media, rng = self._job.media, self._rng
        kinds = [
            kind
            for kind, mean in (
                (IMAGE, media.images),
                (CLIP, media.clips),
                (RECORDING, media.sounds),
            )
            for _ in range(int(rng.poisson(mean)))
        ]
        end = 0
        for kind in rng.permutation(kinds).tolist():
            position = end + 1 + int(rng.integers(0, 8))
            item = self._sound(position) if kind == RECORDING else self._picture(kind, position)
            if position + item.tokens < tokens:
                yield item
                end = position + item.tokens

    def _picture(self, kind: int, position: int) -> SyntheticItem:
        media = self._job.media
        factor = media.patch * media.merge
        sides = [max(1, self._log_uniform(*media.side_px) // factor) for _ in range(2)]
        groups, frames = 1, 1
        if kind == CLIP:
            groups = max(1, self._log_uniform(*media.clip_frames) // media.temporal_patch)
            frames = groups * media.temporal_patch
        height, width = sides
        shape = frames, height * factor, width * factor, 3
        return SyntheticItem(
            modality="vision",
            values=torch.from_numpy(self._rng.integers(0, 256, shape, dtype=np.uint8)),
            position=position,
            tokens=groups * height * width,
            kind=kind,
            grid=(groups, height * media.merge, width * media.merge, media.merge),
            seconds_per_patch=media.seconds_per_patch if kind == CLIP else math.nan,
        )

    def _sound(self, position: int) -> SyntheticItem:
        media = self._job.media
        low, high = (int(seconds * SOUND_HZ) for seconds in media.sound_s)
        tokens = max(1, self._log_uniform(low, high) // media.samples_per_token)
        return SyntheticItem(
            modality="audio", values=self._noise(tokens * media.samples_per_token),
            position=position, tokens=tokens, kind=RECORDING,
        )  # fmt: skip

    def _noise(self, samples: int) -> Tensor:
        return torch.from_numpy(self._rng.standard_normal(samples, dtype=np.float32))

    def _log_uniform(self, low: int, high: int) -> int:
        return int(math.exp(self._rng.uniform(math.log(low), math.log(high + 1))))
