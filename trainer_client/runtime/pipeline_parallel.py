"""Trains one optimizer step of one pipeline stage, as its rank shard and the schedule say.

All ranks compare plans, each stage walks through its actions (``pipeline_stage.py``), gradients add
up over microbatches and are summed over replicas at the end, and so is the loss, which the stages
of a replica then share. When each action ran they share once that is known: on a GPU after the
step.
"""

import time
from collections.abc import Sequence
from functools import cached_property
from typing import cast

import numpy as np
import torch
from torch.distributed.fsdp import FSDPModule
from torch.nn import Module, ModuleList, Parameter
from torch.nn.parallel import DistributedDataParallel

from trainer_client.runtime.agreement import (
    COMPARING,
    agreed_tokens,
    digest_bytes,
    holders,
    own_numbers,
)
from trainer_client.runtime.bubble_schedule import (
    AnyAction,
    BubbleSchedule,
    spread_encoders,
)
from trainer_client.runtime.clock import PhaseClock, phase_clock
from trainer_client.runtime.encoder_runs import LayeredEncoders
from trainer_client.runtime.faults import LayoutError, PlanMismatchError
from trainer_client.runtime.gradients import GradientReduction, SumReduction, reduction_of
from trainer_client.runtime.group_pool import GroupPool
from trainer_client.runtime.host_numbers import HostCopy, start_sum, sum_numbers
from trainer_client.runtime.loss import (
    BUCKET_BYTES,
    LossTokens,
    local_gradient,
    share_out,
    sum_gradients,
)
from trainer_client.runtime.phases import (
    BUBBLE,
    END,
    GRADIENTS,
    START,
)
from trainer_client.runtime.pipeline_mesh import PipelineMesh
from trainer_client.runtime.pipeline_schedule import (
    PipelineSchedule,
    one_forward_one_backward,
)
from trainer_client.runtime.pipeline_stage import HiddenStates, PipelineStage
from trainer_client.runtime.pipeline_timeline import ActionTimes, Timeline
from trainer_client.runtime.step import require_gradients, require_own_tokens
from trainer_client.runtime.step_result import StepResult
from trainer_client.shard import Microbatch, ModalityBatch, PlanSummary, Shard

SUMMING_TIED = "summing a tied weight's gradient"


class PipelineResult(StepResult):
    """The result of a step, read as ``StepResult`` is: ``loss``, ``loss_tokens`` and ``timeline``
    are the same on all stages of a replica, the seconds are this rank's own. ``waiting`` includes
    waiting for other stages.

    On a GPU ``timeline`` is shared when it is asked for, or else when the next step begins. So ask
    for it on all stages of a replica at the same place, or on none: a stage that asks alone waits
    until the others begin their next step.

    ``schedule``: what was run.
    """

    def __init__(
        self,
        *,
        loss: HostCopy,
        loss_tokens: int,
        started_s: float,
        clock: PhaseClock,
        plan: PlanSummary,
        mesh: PipelineMesh,
        schedule: PipelineSchedule | BubbleSchedule,
        times: ActionTimes,
    ) -> None:
        """``times`` are those of this stage. Collective over all ranks. As ``StepResult``."""
        super().__init__(
            loss=loss,
            loss_tokens=loss_tokens,
            started_s=started_s,
            clock=clock,
            plan=plan,
            everyone=mesh.column,
            chunks=mesh.virtual_stages,
        )
        self.schedule = schedule
        self._mesh = mesh
        self._times_of_actions = times
        self._shared: HostCopy | None = None
        if clock.on_stream:
            mesh.defer(self._share)
        else:
            self._share()

    @cached_property
    def timeline(self) -> Timeline:
        """When each action ran, on all stages. Collective over them; raises PeerError."""
        self._share()
        assert self._shared is not None, "just shared"
        spans_s = np.reshape(self._shared.read(), (-1, 2))
        return Timeline.of_actions(self.schedule, zip(self._actions(), spans_s, strict=True))

    def _share(self) -> None:
        """Post the sum over stages of what each of them has, unless it was."""
        if self._shared is not None:
            return
        own_s = self._times_of_actions.read()
        spans_s = np.zeros((len(self._actions()), 2))
        spans_s[[stage == self._mesh.stage for stage, _ in self._actions()]] = own_s
        numbers = spans_s.ravel().tolist()
        with self._mesh.naming_ranks(), self._mesh.naming_stages():
            self._shared = start_sum(numbers, self._mesh.row, action="sharing the timeline")

    def _actions(self) -> list[tuple[int, AnyAction]]:
        """Every stage and action of the schedule."""
        return [(stage, each) for stage, own in enumerate(self.schedule.actions) for each in own]


def run_pipeline_step(
    chunks: Sequence[Module],
    shard: Shard,
    mesh: PipelineMesh,
    hidden: HiddenStates,
    *,
    schedule: PipelineSchedule | BubbleSchedule | None = None,
    encoders: LayeredEncoders | None = None,
    gradients: Sequence[GradientReduction] | None = None,
) -> PipelineResult:
    """Forward and backward of a whole step; summed gradients are left in ``.grad``, added to those
    of steps before it where the optimizer has not stepped since.

    Parameters
    ----------
    chunks: this stage's model chunks, in model order: stage s of p holds chunks s, s+p, ....
        Plain, or each sharded by ``fully_shard`` over its column; all stages alike. DDP cannot
        hold several microbatches at a time, and plain chunks are summed as it would.
    shard: needs ``parts`` "inputs" on the first stage and "labels" on the last.
    schedule: interleaved 1F1B when not given; the same on every rank.
    encoders: where encoders run by themselves on all stages, as a ``BubbleSchedule`` places them,
        or else before the pipeline fills and after it drains. Every stage has all of them, needs
        ``parts`` "inputs", and is left with the same gradients of theirs. Chunks are plain. Of a
        mesh with an ``encoder_cut``, each stage runs its chunks' parts, and is left with their
        gradients alone.
    gradients: how each chunk's gradients are summed over replicas, by default as ``run_step`` does
        it; those of plain chunks that share weights by one reduction of them all, several times.

    Weights that several stages share are the caller's to add up: a tied embedding by
    ``sum_of_stages``.

    Raises PlanMismatchError, PeerError, LayoutError, NotFetched, RuntimeFault where gradients are
    off. Collective over all ranks.
    """
    require_gradients()
    mesh.catch_up()
    started = time.perf_counter()
    schedule = schedule or _plain_schedule(shard, mesh, encoders)
    _check_arguments(chunks, shard, mesh, schedule, encoders)
    device = hidden.home(chunks)
    lost = mesh.groups.naming_lost("a step")
    with mesh.naming_ranks(), lost, phase_clock(device, place=START) as clock:
        everyone = mesh.column
        for chunk in chunks:
            mesh.groups.connect_meshes(chunk)
            require_own_tokens(chunk, shard)
        reductions = _reductions_of(chunks, encoders, gradients, mesh.groups)
        labelled = mesh.stage == mesh.stages - 1
        loss_tokens = _meet(shard, mesh, labelled=labelled)
        for reduction in dict.fromkeys(reductions):
            reduction.begin()
        on_all_stages = _modules(encoders) if mesh.encoder_cut is None else []
        for shared in on_all_stages:
            share_out(shared.parameters(), mesh.row.size)
        stage = PipelineStage(
            chunks, shard, mesh, hidden, schedule, reductions, loss_tokens, encoders
        )
        stage.run()
        clock.switch(GRADIENTS, END)
        for reduction in dict.fromkeys(reductions):
            reduction.finish()
        for shared in on_all_stages:  # of what each of them encoded
            with mesh.naming_stages():
                sum_gradients(shared, mesh.row)
        everyone.post_sum(stage.loss_sum, action="summing the loss").wait()
        clock.switch(BUBBLE)
        loss = stage.loss_sum.to(mesh.row.home_of_sums(stage.loss_sum.device))
        with mesh.naming_stages():
            mesh.row.post_sum(loss, action="sharing the loss").wait()
        return PipelineResult(
            loss=HostCopy(loss),
            loss_tokens=loss_tokens.count,
            started_s=started,
            clock=clock,
            plan=shard.plan,
            mesh=mesh,
            schedule=schedule,
            times=stage.times,
        )


def _reductions_of(
    chunks: Sequence[Module],
    encoders: LayeredEncoders | None,
    given: Sequence[GradientReduction] | None,
    groups: GroupPool,
) -> list[GradientReduction]:
    """One reduction per chunk, and behind them that of the encoders, where they need their own.
    Plain chunks have one in common, so that a weight which several of them use is summed once."""
    alone = _modules(encoders)
    if given is None and any(isinstance(chunk, FSDPModule) for chunk in chunks):
        return [reduction_of(chunk, groups) for chunk in chunks]  # encoders go with plain ones
    if given is None:
        return [reduction_of(ModuleList([*chunks, *alone]), groups)] * len(chunks)
    if len(given) != len(chunks) or len({each.averaged_over for each in given}) > 1:
        divisors = [each.averaged_over for each in given]
        raise LayoutError(
            f"`gradients` has {len(given)} reductions, which divide by {divisors}, for "
            f"{len(chunks)} chunks; give one for each chunk, all of one kind"
        )
    if alone and given[0].averaged_over != 1:
        raise LayoutError(
            f"`gradients` divide by {given[0].averaged_over}, and encoders that run by themselves "
            "are added up: give reductions that add, or leave out `encoders`"
        )
    return [*given, *(SumReduction(module, groups.everyone) for module in alone)]


def sum_of_stages(weight: Parameter, mesh: PipelineMesh) -> None:
    """Add up the gradients of a weight that the stage which embeds and the last stage hold, such as
    a tied embedding; one that is frozen gets none. Call it on both, after ``run_pipeline_step``, or
    after the last of several whose gradients go into one step of the optimizer; collective over the
    two.

    Each sends the other its own, some rows at a time, over the communicator of all stages.

    Raises PeerError, and LayoutError on other stages.
    """
    ends = {mesh.embedding_stage, mesh.stages - 1}
    if mesh.stage not in ends:
        raise LayoutError(
            f"stage {mesh.stage} shares no weight: stages {sorted(ends)} embed and have the head; "
            "call sum_of_stages on those"
        )
    if not weight.requires_grad:  # else optimizers would decay what is frozen
        return
    grad = local_gradient(weight)
    rows = max(1, BUCKET_BYTES * len(grad) // max(1, grad.nbytes))
    for other in ends - {mesh.stage}:
        for part in torch.split(grad, rows):
            sends, taken = [(part.contiguous(), other)], torch.empty_like(part)
            with mesh.naming_stages():
                mesh.row.post(sends, [(taken, other)], action=SUMMING_TIED).wait()
            part += taken


def _plain_schedule(
    shard: Shard, mesh: PipelineMesh, encoders: LayeredEncoders | None
) -> PipelineSchedule | BubbleSchedule:
    """Interleaved 1F1B; encoders by themselves are cut as the mesh says, or spread so that stages
    make equally many rows."""
    backbone = one_forward_one_backward(mesh.stages, mesh.virtual_stages, len(shard.microbatches))
    if encoders is None:
        return backbone
    modalities = encoders.modalities
    trains = [encoders.encoder_trains(modality) for modality in modalities]
    if mesh.encoder_cut is not None:
        return mesh.encoder_cut.schedule(backbone, modalities, trains=trains)
    return spread_encoders(
        backbone,
        [encoders.layers(modality) for modality in modalities],
        trains=trains,
        work=[_encoded_rows(microbatch, modalities) for microbatch in shard.planned],
    )


def _encoded_rows(microbatch: Microbatch, modalities: Sequence[str]) -> int:
    """Feature rows that this replica makes for a microbatch. Raises NotFetched on a stage without
    its inputs, which would count none and run another schedule than the others."""
    if microbatch.input_ids is None:
        return 0
    batches: list[ModalityBatch | None] = [getattr(microbatch, name) for name in modalities]
    return sum(len(batch.exchange.send_rows) for batch in batches if batch is not None)


def _modules(encoders: LayeredEncoders | None) -> list[Module]:
    return [] if encoders is None else [cast(Module, encoders)]


def _check_arguments(
    chunks: Sequence[Module],
    shard: Shard,
    mesh: PipelineMesh,
    schedule: PipelineSchedule | BubbleSchedule,
    encoders: LayeredEncoders | None,
) -> None:
    if mesh.encoder_cut is not None and encoders is None:
        raise LayoutError(
            f"the mesh cuts {', '.join(mesh.encoder_cut.parts)} over its first chunks, and no "
            "encoders are given: give `encoders`, with the parts of this stage"
        )
    if isinstance(schedule, BubbleSchedule) != (encoders is not None):
        raise LayoutError(
            "a BubbleSchedule goes with `encoders`, and only such a schedule: it says when they run"
        )
    sharded = [chunk for chunk in chunks if isinstance(chunk, FSDPModule)]
    if encoders is not None and sharded:
        raise LayoutError(
            f"{type(sharded[0]).__name__} is sharded, and encoders that run by themselves need "
            "plain chunks: leave out fully_shard, or `encoders`"
        )
    if isinstance(schedule, BubbleSchedule):
        schedule = schedule.backbone
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


def _meet(shard: Shard, mesh: PipelineMesh, *, labelled: bool) -> LossTokens:
    """All ranks compare plans and count loss tokens, along rows and then along columns.

    Raises PlanMismatchError, on every rank, where any two of them differ.
    """
    everyone = mesh.column
    with mesh.naming_stages():
        of_row = sum_numbers(own_numbers(shard, labelled=labelled), mesh.row, action=COMPARING)
    sums = sum_numbers(of_row, everyone, action=COMPARING)
    agreed = agreed_tokens(shard, sums, ranks=mesh.row.size * everyone.size)
    if agreed is not None:
        return agreed
    digest = shard.plan.digest
    with mesh.naming_stages():
        row = mesh.row.gather(digest_bytes(digest, mesh.row.device), action=COMPARING)
    rows = everyone.gather(torch.cat(row).to(everyone.device), action=COMPARING)
    raise PlanMismatchError(holders(enumerate(rows), len(digest)))
