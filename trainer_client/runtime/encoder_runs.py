"""Encoders that run by themselves on any stage, as a schedule places them.

    stage 1   EF2 ── features ─────────────┐        ┌── gradients ──▶ EB2   layer by layer
    stage 0                      F2: exchange, embed …  B2

Every layer's output is cut out of the graph, so that a layer's backward can run whenever its own
action comes. The first chunk takes the features as leaves, and hands their gradients back.

Contract
--------
Shapes: features are [rows, row width], of which the plan knows the rows; what one stage hands
another between layers has the shape that the encoder says. Both sides read them from the
microbatch. Order: ``encoder_messages.py``. Failure: as for the messages between chunks.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, cast

import torch
from torch import Tensor
from torch.nn import Module

from trainer_client.runtime.bubble_schedule import (
    ENCODE,
    RETURN,
    AnyAction,
    BubbleSchedule,
    EncoderAction,
    Hop,
)
from trainer_client.runtime.clock import switch_phase
from trainer_client.runtime.encoder_messages import EncoderMessages
from trainer_client.runtime.faults import LayoutError
from trainer_client.runtime.linear_loss import LinearLogits
from trainer_client.runtime.pipeline_mesh import PipelineMesh
from trainer_client.runtime.ring_attention import PackedAttention
from trainer_client.runtime.step import MultimodalModel
from trainer_client.runtime.wave_features import Features
from trainer_client.shard import Microbatch, ModalityBatch


class LayeredEncoders(Protocol):
    """The encoders of a model as rows of layers: a ``torch.nn.Module`` whose weights are theirs,
    the same on every stage; of encoders that are cut, those that the stage runs at least. What
    comes before the first layer belongs to it, and a projector to the last.

    ``modalities``: in the order in which schedules number them. Others are encoded by the first
    chunk.
    """

    @property
    def modalities(self) -> Sequence[str]: ...

    def layers(self, modality: str) -> int:
        """How many layers an encoder has."""
        ...

    def encoder_trains(self, modality: str) -> bool:
        """Whether gradients flow into this encoder; the same answer on all ranks."""
        ...

    def run_layer(
        self, modality: str, batch: ModalityBatch, layer: int, hidden: Tensor | None
    ) -> Tensor:
        """What a layer makes of what the one before it gave: the first of ``batch.items`` alone,
        the last the feature rows [rows, row width]. There is at least one item."""
        ...

    def shape_of(self, modality: str, batch: ModalityBatch, layer: int) -> tuple[int, ...]:
        """The shape of what ``run_layer`` gives."""
        ...


class ReadyFeatures:
    """A ``MultimodalModel`` whose encoders ran by themselves: the first chunk, which decodes, and
    the rows that they gave for one microbatch. What they did not run, the chunk encodes."""

    def __init__(
        self, chunk: MultimodalModel, encoders: LayeredEncoders, rows: Mapping[str, Tensor]
    ) -> None:
        self._chunk = chunk
        self._encoders = encoders
        self._rows = rows

    def encode(self, modality: str, batch: ModalityBatch) -> Tensor:
        rows = self._rows.get(modality)
        return self._chunk.encode(modality, batch) if rows is None else rows

    def dummy_item(self, modality: str) -> Tensor:
        if self._ran(modality):
            return torch.empty(0)  # nothing encodes it, so any will do
        return self._chunk.dummy_item(modality)

    def encoder_trains(self, modality: str) -> bool:
        encoder = self._encoders if self._ran(modality) else self._chunk
        return encoder.encoder_trains(modality)

    def _ran(self, modality: str) -> bool:
        return modality in self._encoders.modalities

    def decode(
        self,
        microbatch: Microbatch,
        features: Mapping[str, Features],
        attention: PackedAttention,
    ) -> Tensor | LinearLogits:
        return self._chunk.decode(microbatch, features, attention)


class EncoderRuns:
    """One step's encoder actions of one stage, and the messages that they take and give.

    Raises LayoutError where the schedule is of other encoders.
    """

    def __init__(
        self,
        encoders: LayeredEncoders,
        planned: Sequence[Microbatch],
        taken: Callable[[int], Microbatch],
        mesh: PipelineMesh,
        schedule: BubbleSchedule,
    ) -> None:
        """``taken`` gives the one of ``planned`` with this number on the device."""
        _check_schedule(encoders, schedule)
        self._encoders = encoders
        self._planned = planned
        self._taken = taken
        self._schedule = schedule
        self._like = next(cast(Module, encoders).parameters()).detach()
        # Of each layer that ran: what it took and what it gave, until its backward.
        self._held: dict[tuple[int, int], list[tuple[Tensor | None, Tensor]]] = {}
        self._leaves: dict[tuple[int, int], Tensor] = {}  # features, of the first chunk
        self._messages = EncoderMessages(
            mesh,
            schedule,
            travels=lambda hop: self._items(hop.encoder, hop.microbatch),
            room_for=self._room_for,
        )

    def begin(self, action: AnyAction) -> None:
        """Before any action of the stage: post the messages whose turn has come."""
        self._messages.begin(action)

    def receive(self, action: EncoderAction) -> Tensor | None:
        """Wait for what an action takes: hidden states, or a gradient; None where it takes none."""
        key = action.encoder, action.microbatch
        layer = action.first - 1 if action.kind == ENCODE else action.end - 1
        if layer < 0 or not self._items(*key):
            return None
        return self._messages.take(Hop(action.kind, *key, layer))

    def run(self, action: EncoderAction, taken: Tensor | None) -> None:
        """Run some layers of an encoder, and hand on what they give."""
        if not self._items(action.encoder, action.microbatch):
            return
        passing = "forward" if action.kind == ENCODE else "backward"
        switch_phase(f"{self._encoders.modalities[action.encoder]}_{passing}")
        if action.kind == ENCODE:
            self._forward(action, taken)
        else:
            assert taken is not None  # the gradient of its last layer
            self._backward(action, taken)

    def ready(self, chunk: MultimodalModel, rows: Mapping[str, Tensor]) -> ReadyFeatures:
        """The first chunk with the rows that `take_features` gave."""
        return ReadyFeatures(chunk, self._encoders, rows)

    def take_features(self, microbatch: int) -> dict[str, Tensor]:
        """Before the first chunk's forward of a microbatch: by modality, the feature rows of this
        replica's items, as leaves."""
        rows = {}
        for encoder, modality in enumerate(self._encoders.modalities):
            batch = self._batch(encoder, microbatch)
            if batch is None:
                continue
            last = self._schedule.encoder_layers[encoder] - 1
            if batch.items:
                leaf = self._messages.take(Hop(ENCODE, encoder, microbatch, last)).detach()
            else:
                leaf = self._like.new_empty(self._encoders.shape_of(modality, batch, last))
            leaf.requires_grad_(self._encoders.encoder_trains(modality))
            rows[modality] = self._leaves[encoder, microbatch] = leaf
        return rows

    def give_gradients(self, microbatch: int) -> None:
        """After the first chunk's backward of a microbatch: hand those rows' gradients back."""
        for encoder in range(len(self._encoders.modalities)):
            leaf = self._leaves.pop((encoder, microbatch), None)
            if leaf is None or not leaf.requires_grad or not self._items(encoder, microbatch):
                continue
            last = self._schedule.encoder_layers[encoder] - 1
            grad = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
            self._messages.give(Hop(RETURN, encoder, microbatch, last), grad)

    def finish(self) -> None:
        """Wait until every message was taken."""
        self._messages.finish()

    def _forward(self, action: EncoderAction, hidden: Tensor | None) -> None:
        modality = self._encoders.modalities[action.encoder]
        batch = getattr(self._taken(action.microbatch), modality)  # it has items
        trains = self._encoders.encoder_trains(modality)
        held = self._held.setdefault((action.encoder, action.microbatch), [])
        for layer in range(action.first, action.end):
            taken = None if hidden is None else hidden.detach().requires_grad_(trains)
            with torch.set_grad_enabled(trains):
                given = self._encoders.run_layer(modality, batch, layer, taken)
            self._check_shape(modality, batch, layer, given)
            if trains:
                held.append((taken, given))
            hidden = given.detach()
        assert hidden is not None  # an action has at least one layer
        self._messages.give(Hop(ENCODE, action.encoder, action.microbatch, action.end - 1), hidden)

    def _backward(self, action: EncoderAction, grad: Tensor) -> None:
        held = self._held[action.encoder, action.microbatch]
        for _ in range(action.first, action.end):
            taken, given = held.pop()
            if given.requires_grad:
                torch.autograd.backward(given, grad)
            if taken is not None:
                grad = torch.zeros_like(taken) if taken.grad is None else taken.grad
        below = action.first - 1
        if self._schedule.runs(RETURN, action.microbatch, action.encoder, below):
            self._messages.give(Hop(RETURN, action.encoder, action.microbatch, below), grad)
        else:  # what is below does not train
            self._held.pop((action.encoder, action.microbatch))

    def _batch(self, encoder: int, microbatch: int) -> ModalityBatch | None:
        modality = self._encoders.modalities[encoder]
        batch: ModalityBatch | None = getattr(self._planned[microbatch], modality)
        return batch

    def _items(self, encoder: int, microbatch: int) -> bool:
        """Whether this replica encodes anything, so that there are messages."""
        batch = self._batch(encoder, microbatch)
        return batch is not None and bool(batch.items)

    def _room_for(self, hop: Hop) -> Tensor:
        batch = self._batch(hop.encoder, hop.microbatch)
        assert batch is not None  # else nothing travels
        modality = self._encoders.modalities[hop.encoder]
        return self._like.new_empty(self._encoders.shape_of(modality, batch, hop.layer))

    def _check_shape(self, modality: str, batch: ModalityBatch, layer: int, given: Tensor) -> None:
        wanted = self._encoders.shape_of(modality, batch, layer)
        if tuple(given.shape) != tuple(wanted) or given.dtype != self._like.dtype:
            raise LayoutError(
                f"layer {layer} of the {modality} encoder gave {given.dtype} {tuple(given.shape)}, "
                f"and its shape_of says {self._like.dtype} {tuple(wanted)}; other stages rely on "
                "that"
            )


def _check_schedule(encoders: LayeredEncoders, schedule: BubbleSchedule) -> None:
    given = tuple(encoders.layers(modality) for modality in encoders.modalities)
    if given != schedule.encoder_layers:
        raise LayoutError(
            f"the schedule is for encoders of {schedule.encoder_layers} layers, and these "
            f"({', '.join(encoders.modalities)}) have {given}; lay out the model that is trained, "
            "and leave out encoders that the layout's samples had nothing for"
        )
    for encoder, modality in enumerate(encoders.modalities):
        returns, trains = schedule.returns(encoder), encoders.encoder_trains(modality)
        if returns != trains:
            raise LayoutError(
                f"the schedule has {'a' if returns else 'no'} backward of the {modality} encoder, "
                f"which is {'trained' if trains else 'frozen'}; make it for encoders as they train"
            )
