"""One stage of a pipeline step: its actions one after the other, and when each of them ran.

Microbatches have different shapes, which the plan knows, and come in the plan's order. The
first chunk encodes, exchanges features and embeds; each chunk hands hidden states [local
tokens, width] to the next; the last one gives logits and takes the loss.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, cast

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.nn import Module
from torch.nn.functional import pad

from trainer_client.device import StagedMicrobatches
from trainer_client.runtime.bubble_schedule import (
    AnyAction,
    BubbleSchedule,
    EncoderAction,
)
from trainer_client.runtime.clock import OTHER, switch_phase
from trainer_client.runtime.encoder_runs import EncoderRuns, LayeredEncoders
from trainer_client.runtime.faults import LayoutError
from trainer_client.runtime.gradients import GradientReduction
from trainer_client.runtime.group_pool import GroupPool
from trainer_client.runtime.linear_loss import LinearLogits, settled
from trainer_client.runtime.loss import (
    LossTokens,
    microbatch_loss,
)
from trainer_client.runtime.peers import Transfer
from trainer_client.runtime.phases import (
    BUBBLE,
    pack_place,
)
from trainer_client.runtime.pipeline_mesh import PipelineMesh, StageLinks, empty_message
from trainer_client.runtime.pipeline_schedule import (
    FORWARD,
    Action,
    PipelineSchedule,
)
from trainer_client.runtime.pipeline_timeline import ActionTimes
from trainer_client.runtime.ring_attention import PackedAttention
from trainer_client.runtime.sealed_call import sealed_call
from trainer_client.runtime.step import (
    MultimodalModel,
    added_rows,
    attention_of,
    computed_rows,
    forward_microbatch,
    seen_rows,
)
from trainer_client.shard import Microbatch, Shard

CPU = torch.device("cpu")


class LaterChunk(Protocol):
    """The interface of every model chunk after the first; each is a ``torch.nn.Module``.

    The first chunk is a ``MultimodalModel`` whose ``decode`` returns hidden states.
    """

    def forward(
        self, microbatch: Microbatch, hidden: Tensor, attention: PackedAttention
    ) -> Tensor | LinearLogits:
        """Hidden states [rows, width] through this chunk's layers; of the last chunk, what a
        ``MultimodalModel`` decodes to: logits [rows, vocabulary], ``LinearLogits``, of which a
        sharded chunk returns the ``loss_sum``, or its own loss. There are at least two rows. Of the
        microbatch's tensors only ``position_ids`` and ``positions`` can be relied on, and in the
        last chunk labels."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class HiddenStates:
    """What travels between stages: [local tokens, ``width``] of one type, on one device: where the
    chunks are, if it is None."""

    width: int
    dtype: torch.dtype
    device: torch.device | None = None

    def home(self, chunks: Iterable[Module]) -> torch.device:
        """The device that was given, or that of the chunks' parameters."""
        if self.device is not None:
            return self.device
        return next((p.device for chunk in chunks for p in chunk.parameters()), CPU)


class PipelineStage:
    """Walks through one stage's actions."""

    def __init__(
        self,
        chunks: Sequence[Module],
        shard: Shard,
        mesh: PipelineMesh,
        hidden: HiddenStates,
        schedule: PipelineSchedule | BubbleSchedule,
        reductions: Sequence[GradientReduction],
        loss_tokens: LossTokens,
        encoders: LayeredEncoders | None,
    ) -> None:
        self._shard = shard
        self._under_way: dict[int, Microbatch] = {}  # from their first action here to their last
        if isinstance(shard.microbatches, StagedMicrobatches):
            numbers = (action.microbatch for action in schedule.actions[mesh.stage])
            shard.microbatches.take_in_order(list(dict.fromkeys(numbers)))
        self._mesh = mesh
        self._encoding: EncoderRuns | None = None
        self._order: Sequence[AnyAction] = schedule.actions[mesh.stage]
        if isinstance(schedule, BubbleSchedule):
            assert encoders is not None  # it was checked
            self._encoding = EncoderRuns(encoders, shard.planned, self._taken, mesh, schedule)
            schedule = schedule.backbone
        self._schedule = schedule
        self._actions = schedule.actions[mesh.stage]
        self._reductions = reductions
        self._loss_tokens = loss_tokens
        self._chunks = chunks
        rows = [microbatch.local_tokens for microbatch in shard.planned]
        device = hidden.home(chunks)
        like = empty_message(hidden.width, hidden.dtype, device)
        self._links = StageLinks(mesh, schedule, rows, like)
        self._like = like
        # What a backward needs from its forward: the hidden states taken in, and the output.
        self._held: dict[tuple[int, int], tuple[Tensor | None, Tensor]] = {}
        self._last_backward = {a.virtual_stage: a for a in self._actions if a.kind != FORWARD}
        self.times = ActionTimes(device)
        home = mesh.column.home_of_sums(device)
        self.loss_sum = torch.zeros(1, dtype=torch.float64, device=home)

    def run(self) -> None:
        """Run every action, each receive between chunks posted one action ahead."""
        self._posted = self._post_receive(0)
        last = {action.microbatch: turn for turn, action in enumerate(self._order)}
        place = 0
        for turn, action in enumerate(self._order):
            switch_phase(BUBBLE)
            if self._encoding is not None:
                self._encoding.begin(action)
            if isinstance(action, EncoderAction):
                self._encode(action)
            else:
                self._compute(action, place)
                place += 1
            if last[action.microbatch] == turn:
                self._under_way.pop(action.microbatch, None)
        switch_phase(BUBBLE)
        self._links.finish()
        if self._encoding is not None:
            self._encoding.finish()
        switch_phase(OTHER)

    def _taken(self, number: int) -> Microbatch:
        """A microbatch, whose tensors stay where they are until its last action here."""
        if number not in self._under_way:
            self._under_way[number] = self._shard.microbatches[number]
        return self._under_way[number]

    def _encode(self, action: EncoderAction) -> None:
        assert self._encoding is not None  # only its schedule has such actions
        taken = self._encoding.receive(action)
        with self.times.of_next():
            self._encoding.run(action, taken)

    def _compute(self, action: Action, place: int) -> None:
        arriving, self._posted = self._posted, self._post_receive(place + 1)
        taken = None if arriving is None else self._links.receive(action, arriving)
        chunk = self._schedule.chunk(self._mesh.stage, action)
        first = self._encoding is not None and chunk == self._schedule.first_chunk
        if first and action.kind == FORWARD and self._encoding is not None:
            self._rows = self._encoding.take_features(action.microbatch)
        compute = self._forward if action.kind == FORWARD else self._backward
        self._switch_to(action)
        with self.times.of_next():
            given = compute(action, taken)
        if given is not None:
            self._links.send(action, given)
        if first and action.kind != FORWARD and self._encoding is not None:
            self._encoding.give_gradients(action.microbatch)

    def _switch_to(self, action: Action) -> None:
        passing = "forward" if action.kind == FORWARD else "backward"
        microbatch = self._shard.planned[action.microbatch]
        place = pack_place(microbatch, passing, chunk=action.virtual_stage)
        chunk = f", chunk {action.virtual_stage}" if len(self._chunks) > 1 else ""
        label = f"microbatch {action.microbatch}{chunk}, {passing}"
        switch_phase(f"llm_{passing}", place, label=label)

    def _post_receive(self, place: int) -> tuple[Tensor, Transfer] | None:
        if place >= len(self._actions):
            return None
        return self._links.post_receive(self._actions[place])

    def _forward(self, action: Action, taken: Tensor | None) -> Tensor | None:
        """The hidden states for the next chunk; None after the last."""
        microbatch = self._taken(action.microbatch)
        chunk = self._chunks[action.virtual_stage]
        if taken is None:
            given = self._call_first(chunk)(microbatch, self._mesh.groups)
        else:
            given = _call_later(chunk, microbatch, taken.requires_grad_(), self._mesh.groups)
        given = seen_rows(given, microbatch)
        if self._schedule.target(self._mesh.stage, action) is None:
            given = microbatch_loss(given, microbatch, self._loss_tokens)
            self.loss_sum += given.detach().to(self.loss_sum)
        else:
            self._check(action, given, microbatch)
        self._held[action.microbatch, action.virtual_stage] = taken, given
        return given.detach()

    def _backward(self, action: Action, grad: Tensor | None) -> Tensor | None:
        """The gradient for the previous chunk; None before the first."""
        taken, given = self._held.pop((action.microbatch, action.virtual_stage))
        reduction = self._reductions[action.virtual_stage]
        if grad is None:  # the loss
            given = given * reduction.averaged_over
        last = action == self._last_backward[action.virtual_stage]
        with reduction.microbatch(last=last):
            if given.requires_grad:  # else nothing before it trains
                torch.autograd.backward(given, grad)
        if taken is None:
            return None
        return torch.zeros_like(taken) if taken.grad is None else taken.grad

    def _call_first(self, chunk: Module) -> Callable[[Microbatch, GroupPool], Tensor]:
        """A sharded chunk is called, so that its hooks run."""
        if isinstance(chunk, FSDPModule):
            return partial(sealed_call, chunk)
        model = cast(MultimodalModel, chunk)
        if self._encoding is not None:
            model = self._encoding.ready(model, self._rows)
        return partial(forward_microbatch, model)

    def _check(self, action: Action, given: Tensor, microbatch: Microbatch) -> None:
        wanted = (microbatch.local_tokens, self._like.shape[1])
        if given.shape != wanted or given.dtype != self._like.dtype:
            raise LayoutError(
                f"{action} of stage {self._mesh.stage} gave {given.dtype} {tuple(given.shape)}; "
                f"the next stage takes in {self._like.dtype} {wanted} (local tokens × width). "
                "Give HiddenStates the model's own width and type."
            )


def _call_later(chunk: Module, microbatch: Microbatch, hidden: Tensor, groups: GroupPool) -> Tensor:
    """A chunk's output, of as many rows as the first chunk computes."""
    call = partial(sealed_call, chunk) if isinstance(chunk, FSDPModule) else chunk
    computed = computed_rows(microbatch)
    if added := added_rows(microbatch):
        hidden = pad(hidden, (0, 0, 0, added))
    return settled(call(computed, hidden, attention_of(computed, groups)), computed)
