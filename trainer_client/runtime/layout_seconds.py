"""What a layout's planner predicts of a step's actions, to be laid beside what was measured.

A shard says what each microbatch takes in the decoder; the layout says which part of that each
chunk has, and what encoders take. Sums of both are the planner's own; how a pass divides into
forward and backward is its rule: a backward works twice as much.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from trainer_client.features import HOP_SAMPLES
from trainer_client.runtime.bubble_schedule import RETURN, BubbleSchedule, EncoderAction
from trainer_client.runtime.faults import LayoutError
from trainer_client.runtime.pipeline_schedule import PipelineSchedule
from trainer_client.runtime.pipeline_timeline import Timeline, simulate
from trainer_client.shard import MODALITIES, Microbatch, ModalityBatch, Shard

Floats = npt.NDArray[np.float64]
FORWARD_SHARE = 1.0 / 3.0


@dataclass(frozen=True, kw_only=True, slots=True)
class EncoderCost:
    """Seconds of an encoder's forward and backward: of a token, of a squared length (of an item),
    of an item, and of a batch of them."""

    token_s: float = 0.0
    square_s: float = 0.0
    item_s: float = 0.0
    batch_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class LayoutSeconds:
    """``shares``: the part of the decoder's seconds that each chunk takes, their sum 1.
    ``encoders``: of each modality. ``encoders_train``: whether they have a backward.
    ``encoder_shares``: of each encoder that is cut, the part of its seconds on each chunk; sum 1.
    """

    shares: tuple[float, ...]
    encoders: Mapping[str, EncoderCost]
    encoders_train: bool = True
    encoder_shares: Mapping[str, tuple[float, ...]] = field(default_factory=dict)

    @classmethod
    def of(cls, topology: Mapping[str, Any], cost: Mapping[str, Any]) -> "LayoutSeconds | None":
        """From the keys of a job; None where they do not say the chunks' shares."""
        shares = _shares(topology.get("stage_shares"))
        if not shares:
            return None
        of_modality = {name: cost.get(name) or {} for name in MODALITIES}
        encoders = {
            name: EncoderCost(
                token_s=float(keys.get("linear_s_per_token", 0.0)),
                square_s=float(keys.get("quadratic_s_per_token2", 0.0)),
                item_s=float(keys.get("item_s", 0.0)),
                batch_s=float(keys.get("batch_s", 0.0)),
            )
            for name, keys in of_modality.items()
        }
        return cls(
            shares=shares,
            encoders=encoders,
            encoders_train=bool(topology.get("encoders_train", True)),
            encoder_shares={
                name: cut for name in MODALITIES if (cut := _shares(topology.get(f"{name}_shares")))
            },
        )

    def timeline(
        self,
        shard: Shard,
        schedule: PipelineSchedule | BubbleSchedule,
        *,
        modalities: Sequence[str] = MODALITIES,
    ) -> Timeline:
        """The step as predicted, to be drawn beside the measured one: encoders as a
        ``BubbleSchedule`` has them, which numbers them by ``modalities``, else in the first chunk.
        Ask a rank that has the step's inputs.

        Raises LayoutError where the schedule has other chunks than the layout.
        """
        forward, backward = self.decoding_s(shard)
        backbone = schedule.backbone if isinstance(schedule, BubbleSchedule) else schedule
        if (backbone.microbatches, backbone.chunks) != forward.shape:
            raise LayoutError(
                f"the schedule is for {backbone.microbatches} microbatches in {backbone.chunks} "
                f"chunks, and the layout and the shard have {forward.shape}; make it for these"
            )
        encoder_s = {}
        scheduled: Sequence[str] = ()
        if isinstance(schedule, BubbleSchedule):
            scheduled = modalities[: schedule.encoders]
            for stage, action in schedule.walk():
                if isinstance(action, EncoderAction):
                    microbatch = shard.planned[action.microbatch]
                    name = scheduled[action.encoder]
                    whole = self.encoding_s(microbatch, name)
                    part = self._part(name, action, schedule.encoder_layers[action.encoder])
                    encoder_s[stage, action] = whole[int(action.kind == RETURN)] * part
        for name in MODALITIES:
            if name not in scheduled:
                both = [self.encoding_s(microbatch, name) for microbatch in shard.planned]
                encoding = np.array(both, np.float64).reshape(-1, 2)
                forward[:, 0] += encoding[:, 0]
                backward[:, 0] += encoding[:, 1]
        return simulate(schedule, forward, backward, encoder_s)

    def _part(self, name: str, action: EncoderAction, layers: int) -> float:
        """The part of an encoder's seconds that an action takes: as the layout cuts the encoder,
        a layer of the schedule being what one chunk has of it, or equally for all layers."""
        # A chunk with nothing but a projector has no layer; the last one has it.
        shares = [share for share in self.encoder_shares.get(name, ()) if share > 0]
        if len(shares) < layers or not shares:
            return (action.end - action.first) / layers
        shares[layers - 1 :] = [sum(shares[layers - 1 :])]
        return sum(shares[action.first : action.end])

    def decoding_s(self, shard: Shard) -> tuple[Floats, Floats]:
        """Forward and backward of the decoder's part of each chunk: float64[microbatch, chunk]."""
        of_pack = np.array([microbatch.predicted_s for microbatch in shard.planned])
        both = of_pack[:, None] * np.array(self.shares)
        return both * FORWARD_SHARE, both * (1.0 - FORWARD_SHARE)

    def encoding_s(self, microbatch: Microbatch, modality: str) -> tuple[float, float]:
        """Forward and backward of what this replica encodes for a microbatch. A rank that has not
        asked for its inputs knows of none."""
        batch: ModalityBatch | None = getattr(microbatch, modality)
        if batch is None or not batch.item_count:
            return 0.0, 0.0
        tokens, cost = encoder_tokens(batch, modality), self.encoders[modality]
        both = (
            cost.token_s * float(tokens.sum())
            + cost.square_s * float((tokens**2).sum())
            + cost.item_s * len(tokens)
            + cost.batch_s
        )
        forward = FORWARD_SHARE if self.encoders_train else 1.0
        return both * forward, both * (1.0 - forward)


def _shares(given: Sequence[float] | None) -> tuple[float, ...]:
    """With sum 1; empty where they have none."""
    shares = [float(share) for share in given or ()]
    total = sum(shares)
    return tuple(share / total for share in shares) if total > 0 else ()


def encoder_tokens(batch: ModalityBatch, modality: str) -> Floats:
    """Tokens of each item before the encoder merges them, as the index counts them: patches, or
    rows of 20 ms of sound. Where an item has no grid of all its patches, which one whose patches do
    not merge may lack some of, its pixels count as patches of 14 × 14."""
    if modality == "audio":
        return np.array([item.shape[0] / (2 * HOP_SAMPLES) for item in batch.items])
    patches = np.array(
        [item.shape[0] * item.shape[1] * item.shape[2] / 196 for item in batch.items]
    )
    if batch.notes is None:
        return patches
    grid = batch.notes.grid
    of_grid = grid[:, :3].prod(axis=1).astype(np.float64)
    return np.where(grid[:, 3] > 1, of_grid, patches)
