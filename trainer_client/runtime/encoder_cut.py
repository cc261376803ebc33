"""Encoders whose layers are cut over the first chunks, as actions of a schedule.

    chunk   0            1                      2
    layers  v v v      │ v ┆ a a ┆ l l        │ l l l      v, a: encoders, l: llm
    runs    EF0[0:1] ─▶│ EF0[1:2] EF0.1[0:1]  │
                       │ F0 of chunk 1 ──────▶│ F0 of chunk 2

What a chunk has of an encoder is one layer of the schedule. The decoder begins on the first chunk
that has a layer of it; those before it encode and nothing else.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trainer_client.runtime.bubble_schedule import (
    ENCODE,
    RETURN,
    AnyAction,
    BubbleSchedule,
    EncoderAction,
)
from trainer_client.runtime.faults import LayoutError
from trainer_client.runtime.pipeline_schedule import FORWARD, Action, PipelineSchedule


@dataclass(frozen=True, kw_only=True, slots=True)
class EncoderCut:
    """``parts``: of each encoder, by modality, its layers (first, end) on every chunk that has
    some, in order: chunk → (first, end). ``decoder_chunk``: where features are exchanged and
    embedded.

    Raises LayoutError where an encoder would end behind that chunk.
    """

    parts: Mapping[str, Mapping[int, tuple[int, int]]]
    decoder_chunk: int

    def __post_init__(self) -> None:
        for modality, parts in self.parts.items():
            if parts and max(parts) > self.decoder_chunk:
                raise LayoutError(
                    f"the {modality} encoder ends on chunk {max(parts)}, and the decoder begins on "
                    f"{self.decoder_chunk}; cut it so that encoders end there or before"
                )

    def layers_of(self, modality: str) -> list[tuple[int, int]]:
        """First layer and end of each part of an encoder."""
        return list(self.parts[modality].values())

    def reads_inputs(self, stage: int, stages: int) -> bool:
        """Whether a stage needs what comes in: it encodes, or it embeds."""
        chunks = {self.decoder_chunk, *(chunk for parts in self.parts.values() for chunk in parts)}
        return any(chunk % stages == stage for chunk in chunks)

    def schedule(
        self, backbone: PipelineSchedule, modalities: Sequence[str], *, trains: Sequence[bool]
    ) -> BubbleSchedule:
        """A schedule of all chunks in which each action of a chunk begins with its parts of the
        encoders, or ends with their backward. Raises LayoutError where the modalities are not those
        that are cut."""
        if set(modalities) != set(self.parts):
            raise LayoutError(
                f"the encoders are {', '.join(modalities)}, and the layout cuts "
                f"{', '.join(self.parts)}; lay out the model that is trained"
            )
        return BubbleSchedule(
            actions=tuple(
                tuple(
                    each
                    for action in actions
                    for each in self._on(backbone.chunk(stage, action), action, modalities, trains)
                )
                for stage, actions in enumerate(backbone.actions)
            )
        )

    def _on(
        self, chunk: int, action: Action, modalities: Sequence[str], trains: Sequence[bool]
    ) -> list[AnyAction]:
        forward = action.kind == FORWARD
        encoding: list[AnyAction] = []
        for encoder, modality in enumerate(modalities):
            chunks = list(self.parts[modality])
            if chunk in chunks and (forward or trains[encoder]):
                part, kind = chunks.index(chunk), ENCODE if forward else RETURN
                encoding.append(EncoderAction(kind, action.microbatch, encoder, part, part + 1))
        decoding = [action] if chunk >= self.decoder_chunk else []
        return [*encoding, *decoding] if forward else [*decoding, *reversed(encoding)]
