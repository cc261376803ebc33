"""What is trained: samples with their encoder items, as a worker would have decoded them."""

import math
from dataclasses import dataclass

from torch import Tensor

from trainer_client.errors import BadArgument
from trainer_client.shard import IGNORED_LABEL, MODALITIES

UNKNOWN, IMAGE, CLIP, RECORDING = -1, 0, 1, 2


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SyntheticItem:
    """An encoder item whose features replace `tokens` tokens of its sample, from `position` on.

    `values` is what the encoder gets: uint8 [frames, height, width, 3] for vision, float32
    [samples] at 16 kHz for audio, or whatever a model of yours takes. `kind`, `grid` and
    `seconds_per_patch` are those of `ItemNotes`.
    """

    modality: str
    values: Tensor
    position: int
    tokens: int
    kind: int = UNKNOWN
    grid: tuple[int, int, int, int] = (0, 0, 0, 0)
    seconds_per_patch: float = math.nan


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SyntheticSample:
    """A training example. `input_ids`, `labels` int64 [tokens]: labels are shifted already, -100
    for none. `weight` is that of its loss. Items come in the order of their positions.

    Raises BadArgument where labels or items do not fit the tokens.
    """

    id: int
    input_ids: Tensor
    labels: Tensor
    items: tuple[SyntheticItem, ...] = ()
    weight: float = 1.0

    def __post_init__(self) -> None:
        if self.labels.shape != self.input_ids.shape:
            raise BadArgument(
                f"sample {self.id} has input_ids {tuple(self.input_ids.shape)} and labels "
                f"{tuple(self.labels.shape)}; give one label for each token, -100 for none"
            )
        end = 0
        for item in self.items:
            if item.modality not in MODALITIES or item.position < end:
                raise BadArgument(
                    f"sample {self.id} has a {item.modality!r} item at token {item.position}, "
                    f"where the one before it ends at {end}; items are of {MODALITIES} and come "
                    "in the order of their positions"
                )
            end = item.position + item.tokens
        if end > self.tokens:
            raise BadArgument(
                f"sample {self.id} has {self.tokens} tokens, and an item that ends at token {end}"
            )

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        return len(self.input_ids)

    @property
    def loss_tokens(self) -> int:
        """Number of tokens that have a label."""
        return int((self.labels != IGNORED_LABEL).sum())
