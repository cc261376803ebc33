"""The memory model: bytes that a rank holds through a step, by phase (DHP eq. 7).

    budget_bytes ┌────────────────────────────────┐
                 │ free                           │
                 │ encoders   Σ bytes · patches   │  of the items that the rank encodes
                 │ decoder    bytes · Σ s/d       │  of its part of the pack
                 │ states                         │  weights, gradients, optimizer
                 └────────────────────────────────┘  times the microbatches that are kept at once

What a token keeps stays until its backward pass, so recomputation makes it less, and a pipeline
holds several microbatches at a time.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import ClassVar, Self

from dataservice.core.errors import PlanningError
from dataservice.core.job import STRICT
from dataservice.core.topology import ReplicaLayout


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryModel:
    """Bytes of one rank. All are of that rank's own part of the model, where tensor parallelism or
    pipeline stages divide it; of unequal ranks, those of the fullest."""

    __pydantic_config__: ClassVar[dict[str, object]] = STRICT

    budget_bytes: float
    """What a rank may hold: the device's memory less a reserve for the allocator and libraries."""
    llm_token_bytes: float
    """What one token of the decoder keeps until its backward pass, logits included: with
    recomputation, what that leaves."""
    states_bytes: float = 0.0
    """All that does not depend on the batch: weights, gradients, optimizer states."""
    vision_token_bytes: float = 0.0
    """What one token (patch) of the vision encoder keeps until its backward pass; less with
    recomputation, next to nothing where the encoder is frozen. 0: it is not counted."""
    audio_token_bytes: float = 0.0
    """The same for one token (frame) of the audio encoder."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not (math.isfinite(value) and value >= 0):
                raise PlanningError(
                    f"memory.{field.name} is {value}; bytes are finite and at least 0: measure "
                    "again with `dataservice calibrate`, or mend it"
                )
        if self.llm_token_bytes <= 0:
            raise PlanningError(
                f"memory.llm_token_bytes is {self.llm_token_bytes}; a token keeps more than 0 "
                "bytes: measure it with `dataservice calibrate`"
            )
        if self.free_bytes < self.llm_token_bytes:
            raise PlanningError(
                f"memory.budget_bytes is {self.budget_bytes:,.0f} and memory.states_bytes "
                f"{self.states_bytes:,.0f}: that leaves no room for one token of "
                f"{self.llm_token_bytes:,.0f} bytes. Raise budget_bytes, or shard the states "
                "over more ranks."
            )

    @property
    def free_bytes(self) -> float:
        """What is left for activations."""
        return self.budget_bytes - self.states_bytes

    @property
    def encoder_token_bytes(self) -> tuple[float, float]:
        """Bytes of an encoder token, in the order of Modality."""
        return self.vision_token_bytes, self.audio_token_bytes

    def microbatch_bytes(self, layout: ReplicaLayout) -> float:
        """What one microbatch of one rank may keep: the free bytes over the microbatches that the
        layout keeps at once. Raises PlanningError where encoders run in a way that no limit of a
        microbatch can bound."""
        if not any(self.encoder_token_bytes):
            return self.free_bytes / layout.kept_microbatches
        if layout.encoder_stage == "spread" and layout.pipeline_stages > 1:
            raise PlanningError(
                "topology.encoder_stage is spread, which keeps what all encoders of a step made "
                "until the pipeline has drained, and plan.memory limits that of each microbatch: "
                "set vision_token_bytes and audio_token_bytes to 0 where encoders are frozen or "
                "recomputed, or encoder_stage to first or own"
            )
        return self.free_bytes / layout.begun_microbatches

    def tokens(self, layout: ReplicaLayout) -> int:
        """The simple form, `memory_tokens`: tokens of one microbatch that a replica can hold where
        it encodes nothing. Raises PlanningError where that is none."""
        tokens = int(self.microbatch_bytes(layout) / self.llm_token_bytes)
        if tokens < 1:
            raise PlanningError(
                f"memory leaves {self.free_bytes:,.0f} bytes for {layout.begun_microbatches} "
                f"microbatches that the pipeline keeps at once, less than one token of "
                f"{self.llm_token_bytes:,.0f} bytes in each. Raise budget_bytes, or use fewer "
                "pipeline stages."
            )
        return tokens

    def to_dict(self) -> dict[str, float]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, float]) -> Self:
        """Raises PlanningError on unknown or missing names."""
        try:
            return cls(**{name: float(value) for name, value in values.items()})
        except (TypeError, ValueError) as error:
            if isinstance(error, PlanningError):
                raise
            names = ", ".join(field.name for field in fields(cls))
            raise PlanningError(
                f"a memory model got {sorted(values)}; it takes numbers of bytes under {names}"
            ) from error
