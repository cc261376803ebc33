"""Trains one optimizer step of one pipeline stage, as its rank shard and the schedule say.

Microbatches have different shapes, which the plan knows, and come in the plan's order. The
first chunk encodes, exchanges features and embeds; each chunk hands hidden states [local
tokens, width] to the next; the last one gives logits and takes the loss. Gradients add up over
microbatches and are summed over replicas at the end.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.nn import Module, ModuleList
from torch.nn.parallel import DistributedDataParallel

from trainer_client.runtime.clock import OTHER, Clock, phase_clock, start_clock, switch_phase
from trainer_client.runtime.faults import LayoutError, PlanMismatchError
from trainer_client.runtime.gradients import GradientReduction, reduction_of
from trainer_client.runtime.group_pool import GroupPool
from trainer_client.runtime.loss import LossTokens, microbatch_loss, step_loss_tokens
from trainer_client.runtime.peers import PeerGroup, Transfer
from trainer_client.runtime.phases import (
    BUBBLE,
    END,
    GRADIENTS,
    START,
    pack_place,
    seconds_by_phase,
)
from trainer_client.runtime.pipeline_mesh import PipelineMesh, StageLinks, empty_message
from trainer_client.runtime.pipeline_schedule import (
    FORWARD,
    Action,
    PipelineSchedule,
    one_forward_one_backward,
)
from trainer_client.runtime.pipeline_timeline import Timeline
from trainer_client.runtime.ring_attention import PackedAttention
from trainer_client.runtime.step import MultimodalModel, forward_microbatch
from trainer_client.shard import Microbatch, Shard

CPU = torch.device("cpu")


class LaterChunk(Protocol):
    """The interface of every model chunk after the first; each is a ``torch.nn.Module``.

    The first chunk is a ``MultimodalModel`` whose ``decode`` returns hidden states.
    """

    def forward(self, microbatch: Microbatch, hidden: Tensor, attention: PackedAttention) -> Tensor:
        """Hidden states [rows, width] through this chunk's layers; of the last chunk, logits
        [rows, vocabulary]. There is at least one row. Of the microbatch's tensors only
        ``position_ids`` can be relied on."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class HiddenStates:
    """What travels between stages: [local tokens, ``width``] of one type, on one device."""

    width: int
    dtype: torch.dtype
    device: torch.device = CPU


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineResult:
    """The result of a step: the same on all stages of a replica, except the seconds, which are
    this rank's own.

    ``loss``: mean over the global batch's loss tokens, weighted as in ``StepResult``.
    ``timeline``: of all stages.
    ``phase_s``: as in ``StepResult``; ``waiting`` includes waiting for other stages.
    """

    loss: float
    loss_tokens: int
    seconds: float
    phase_s: Mapping[str, float]
    timeline: Timeline


def run_pipeline_step(
    chunks: Sequence[Module],
    shard: Shard,
    mesh: PipelineMesh,
    hidden: HiddenStates,
    *,
    schedule: PipelineSchedule | None = None,
    upcoming: Shard | None = None,
) -> PipelineResult:
    """Forward and backward of a whole step; summed gradients are left in ``.grad``.

    Parameters
    ----------
    chunks: this stage's model chunks, in model order: stage s of p holds chunks s, s+p, ....
        Plain, or each sharded by ``fully_shard`` over its column; all stages alike. DDP cannot
        hold several microbatches at a time, and plain chunks are summed as it would.
    shard: needs ``parts`` "inputs" on the first stage and "labels" on the last.
    schedule: interleaved 1F1B when not given; the same on every rank.
    upcoming: the next step's shard where it has arrived; see ``run_step``.

    Weights that several stages share (a tied embedding) are the caller's to add up.

    Raises PlanMismatchError, PeerError, LayoutError, NotFetched. Collective over all ranks.
    """
    started = time.perf_counter()
    schedule = schedule or one_forward_one_backward(
        mesh.stages, mesh.virtual_stages, len(shard.microbatches)
    )
    _check_arguments(chunks, shard, mesh, schedule)
    lost = mesh.groups.naming_lost("a step")
    with mesh.naming_ranks(), lost, phase_clock(hidden.device, place=START) as clock:
        everyone = mesh.groups.everyone
        reductions = _reductions_of(chunks, everyone)
        _meet(shard, upcoming, mesh)
        labelled = mesh.stage == mesh.stages - 1
        loss_tokens = step_loss_tokens(shard, everyone, labelled=labelled)
        stage = _Stage(chunks, shard, mesh, hidden, schedule, reductions, loss_tokens)
        stage.run()
        clock.switch(GRADIENTS, END)
        for reduction in dict.fromkeys(reductions):
            reduction.finish()
        everyone.post_sum(stage.loss_sum, action="summing the loss").wait()
        clock.switch(BUBBLE)
        count = loss_tokens.count if labelled else 0
        loss, tokens, timeline = _share(stage, count, mesh, schedule)
        clock.stop()
        spent = clock.seconds()
        seconds = time.perf_counter() - started
        phase_s = seconds_by_phase(spent, shard.plan, everyone, chunks=len(chunks))
    return PipelineResult(
        loss=loss,
        loss_tokens=tokens,
        seconds=seconds,
        phase_s=phase_s,
        timeline=timeline,
    )


class _Stage:
    """Walks through one stage's actions."""

    def __init__(
        self,
        chunks: Sequence[Module],
        shard: Shard,
        mesh: PipelineMesh,
        hidden: HiddenStates,
        schedule: PipelineSchedule,
        reductions: Sequence[GradientReduction],
        loss_tokens: LossTokens,
    ) -> None:
        self._microbatches = tuple(shard.microbatches)  # several are under way at a time
        self._mesh = mesh
        self._schedule = schedule
        self._actions = schedule.actions[mesh.stage]
        self._reductions = reductions
        self._loss_tokens = loss_tokens
        self._chunks = chunks
        rows = [microbatch.local_tokens for microbatch in shard.planned]
        like = empty_message(hidden.width, hidden.dtype, hidden.device)
        self._links = StageLinks(mesh, schedule, rows, like)
        self._like = like
        # What a backward needs from its forward: the hidden states taken in, and the output.
        self._held: dict[tuple[int, int], tuple[Tensor | None, Tensor]] = {}
        self._last_backward = {a.virtual_stage: a for a in self._actions if a.kind != FORWARD}
        self._marks: list[tuple[Action, int, int]] = []
        self._clock: Clock = start_clock(hidden.device)
        home = mesh.groups.everyone.home_of_sums(hidden.device)
        self.loss_sum = torch.zeros(1, dtype=torch.float64, device=home)

    def run(self) -> None:
        """Run every action, each receive posted one action ahead."""
        posted = self._post_receive(0)
        for place, action in enumerate(self._actions):
            switch_phase(BUBBLE)
            arriving, posted = posted, self._post_receive(place + 1)
            taken = None if arriving is None else self._links.receive(action, arriving)
            compute = self._forward if action.kind == FORWARD else self._backward
            self._switch_to(action)
            begun = self._clock.mark()
            given = compute(action, taken)
            self._marks.append((action, begun, self._clock.mark()))
            if given is not None:
                self._links.send(action, given)
        switch_phase(BUBBLE)
        self._links.finish()
        switch_phase(OTHER)

    def _switch_to(self, action: Action) -> None:
        passing = "forward" if action.kind == FORWARD else "backward"
        microbatch = self._microbatches[action.microbatch]
        place = pack_place(microbatch, passing, chunk=action.virtual_stage)
        switch_phase(f"llm_{passing}", place)

    def _post_receive(self, place: int) -> tuple[Tensor, Transfer] | None:
        if place >= len(self._actions):
            return None
        return self._links.post_receive(self._actions[place])

    def timeline(self) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """Start and end of this stage's actions, 0 for those of others."""
        shape = (self._schedule.microbatches, self._schedule.chunks, 2)
        start_s, end_s = np.zeros(shape), np.zeros(shape)
        moments_s = self._clock.read()
        for action, begun, ended in self._marks:
            chunk = self._schedule.chunk(self._mesh.stage, action)
            at = action.microbatch, chunk, int(action.kind != FORWARD)
            start_s[at], end_s[at] = moments_s[begun], moments_s[ended]
        return start_s, end_s

    def _forward(self, action: Action, taken: Tensor | None) -> Tensor | None:
        """The hidden states for the next chunk; None after the last."""
        microbatch = self._microbatches[action.microbatch]
        chunk = self._chunks[action.virtual_stage]
        if taken is None:
            given = _call_first(chunk)(microbatch, self._mesh.groups)
        else:
            given = _call_later(chunk, microbatch, taken.requires_grad_(), self._mesh.groups)
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

    def _check(self, action: Action, given: Tensor, microbatch: Microbatch) -> None:
        wanted = (microbatch.local_tokens, self._like.shape[1])
        if given.shape != wanted or given.dtype != self._like.dtype:
            raise LayoutError(
                f"{action} of stage {self._mesh.stage} gave {given.dtype} {tuple(given.shape)}; "
                f"the next stage takes in {self._like.dtype} {wanted} (local tokens × width). "
                "Give HiddenStates the model's own width and type."
            )


def _call_first(chunk: Module) -> Callable[[Microbatch, GroupPool], Tensor]:
    """A sharded chunk is called, so that its hooks run."""
    if isinstance(chunk, FSDPModule):
        return cast(Callable[[Microbatch, GroupPool], Tensor], chunk)
    return partial(forward_microbatch, cast(MultimodalModel, chunk))


def _call_later(chunk: Module, microbatch: Microbatch, hidden: Tensor, groups: GroupPool) -> Tensor:
    """A chunk's output. On an idle replica the chunk runs on one row that the loss does not see,
    so that its modules run everywhere, and the output has no rows."""
    if not microbatch.idle:
        attention = PackedAttention(
            microbatch.cu_seqlens,
            group=groups.get(microbatch.cp_group),
            lengths=microbatch.lengths,
            layouts=microbatch.layouts,
        )
        given: Tensor = chunk(microbatch, hidden, attention)
        return given
    one_row = replace(
        microbatch,
        input_ids=None,
        labels=None,
        position_ids=microbatch.position_ids.new_zeros(1),
        cu_seqlens=microbatch.cu_seqlens.new_tensor([0, 1]),
        lengths=microbatch.cu_seqlens.new_tensor([1]),
    )
    padded = torch.cat([hidden, hidden.new_zeros(1, hidden.shape[1])])
    given = chunk(one_row, padded, PackedAttention([0, 1]))
    return given[:0].clone()  # FSDP's hooks want no views


def _reductions_of(chunks: Sequence[Module], everyone: PeerGroup) -> list[GradientReduction]:
    """One reduction per chunk; plain chunks have one in common, so that a weight which several of
    them use is summed once."""
    if any(isinstance(chunk, FSDPModule) for chunk in chunks):
        return [reduction_of(chunk, everyone) for chunk in chunks]
    return [reduction_of(ModuleList(chunks), everyone)] * len(chunks)


def _check_arguments(
    chunks: Sequence[Module], shard: Shard, mesh: PipelineMesh, schedule: PipelineSchedule
) -> None:
    for chunk in chunks:
        if isinstance(chunk, DistributedDataParallel):
            raise LayoutError(
                "a chunk is wrapped in DistributedDataParallel, which cannot hold several "
                "microbatches at a time; leave it plain and its gradients are summed over "
                "replicas, or shard it with fully_shard"
            )
    found = len(chunks), mesh.stages, len(shard.microbatches)
    wanted = schedule.virtual_stages, schedule.stages, schedule.microbatches
    if found != wanted or mesh.virtual_stages != schedule.virtual_stages:
        raise LayoutError(
            f"this rank has {found[0]} chunks, {found[1]} stages of {mesh.virtual_stages} virtual "
            f"stages and {found[2]} microbatches; the schedule is for {wanted[0]} chunks a stage, "
            f"{wanted[1]} stages and {wanted[2]} microbatches"
        )
    if shard.plan.replicas != mesh.replicas or shard.replica != mesh.replica:
        raise LayoutError(
            f"the shard is of replica {shard.replica} of {shard.plan.replicas}, this rank is of "
            f"replica {mesh.replica} of {mesh.replicas}; give the mesh the tensor_ranks and stages "
            "of the job's topology"
        )


def _meet(shard: Shard, upcoming: Shard | None, mesh: PipelineMesh) -> None:
    """All ranks compare plans; then the column's groups are connected in the background.

    Raises PlanMismatchError, on every rank, where any two of them differ.
    """
    digest = shard.plan.digest
    following = upcoming.plan.digest if upcoming is not None else ""
    text = digest + following.ljust(len(digest), "-")[: len(digest)]
    everyone = mesh.groups.everyone
    own = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    action = "comparing plan digests"
    with mesh.naming_stages():
        row = torch.cat(mesh.row.gather(own.to(mesh.row.device), action=action))
    rows = everyone.gather(row.to(everyone.device), action=action)
    replicas_of: dict[str, list[int]] = {}
    texts: set[str] = set()
    for replica, gathered in enumerate(rows):
        held = bytes(gathered.tolist()).decode()
        of_stages = {held[i : i + len(text)] for i in range(0, len(held), len(text))}
        texts |= of_stages
        for each in sorted({of_stage[: len(digest)] for of_stage in of_stages}):
            replicas_of.setdefault(each, []).append(replica)
    if len(replicas_of) > 1:
        raise PlanMismatchError(replicas_of)
    for step in (shard, upcoming if following and len(texts) == 1 else None):
        if step is not None:
            mesh.groups.prewarm(group.replicas for group in step.plan.groups)


def _share(
    stage: _Stage, loss_tokens: int, mesh: PipelineMesh, schedule: PipelineSchedule
) -> tuple[float, int, Timeline]:
    """Loss, loss tokens and timeline of the row, summed over what each of its stages has."""
    start_s, end_s = stage.timeline()
    numbers = np.concatenate([[float(stage.loss_sum), loss_tokens], start_s.ravel(), end_s.ravel()])
    shared = torch.from_numpy(numbers).to(mesh.row.device)
    with mesh.naming_stages():
        mesh.row.post_sum(shared, action="sharing the loss").wait()
    summed = shared.cpu().numpy()
    start_s, end_s = summed[2:].reshape(2, *start_s.shape)
    timeline = Timeline(stages=schedule.stages, start_s=start_s, end_s=end_s)
    return float(summed[0]), int(summed[1]), timeline
