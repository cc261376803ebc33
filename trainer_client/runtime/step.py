"""Trains one optimizer step of one replica, as its rank shard says.

For every microbatch, in the plan's order: encode the items this replica was given, exchange
the features, run the decoder with the pack's attention, take the loss, go backward. The
gradients are summed over replicas at the end. All replicas go through the same waves and run
the same modules in each, so every collective meets its partners.
"""

import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, cast

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel

from trainer_client.runtime.clock import (
    OTHER,
    phase_clock,
    switch_after_backward,
    switch_in_backward,
    switch_phase,
)
from trainer_client.runtime.exchange import exchange_features
from trainer_client.runtime.faults import LayoutError, PlanMismatchError
from trainer_client.runtime.gradients import GradientReduction, reduction_of
from trainer_client.runtime.group_pool import GroupPool
from trainer_client.runtime.loss import IGNORED, microbatch_loss, step_loss_tokens
from trainer_client.runtime.peers import PeerGroup
from trainer_client.runtime.phases import (
    BACKWARD,
    END,
    EXCHANGE,
    FORWARD,
    GRADIENTS,
    MODALITIES,
    START,
    Place,
    moves_rows,
    pack_place,
    seconds_by_phase,
)
from trainer_client.runtime.ring_attention import PackedAttention
from trainer_client.shard import Microbatch, ModalityBatch, Shard


@dataclass(frozen=True, kw_only=True, slots=True)
class Features:
    """Feature rows that arrived for a microbatch, [R, width], and their local tokens [R].

    Put them in with ``scatter_rows(embeddings, features.rows, features.positions)``, also when
    there are none.
    """

    rows: Tensor
    positions: Tensor


class MultimodalModel(Protocol):
    """What ``run_step`` needs from a model, which is a ``torch.nn.Module``.

    To be wrapped in DDP or FSDP2 it also needs a ``forward(microbatch, groups)`` that returns
    ``forward_microbatch(self, microbatch, groups)``, since both hook into ``forward``.
    """

    def encode(self, modality: str, batch: ModalityBatch) -> Tensor:
        """Feature rows [rows, width] of ``batch.items`` joined end to end."""
        ...

    def dummy_item(self, modality: str) -> Tensor:
        """Any small item that this encoder takes, on the device where items arrive.

        It is encoded if the plan gives this replica no item of a modality that other replicas
        encode; its rows are not used. See ``forward_microbatch``.
        """
        ...

    def encoder_trains(self, modality: str) -> bool:
        """Whether gradients flow into this encoder; the same answer on all replicas."""
        ...

    def decode(
        self,
        microbatch: Microbatch,
        features: Mapping[str, Features],
        attention: PackedAttention,
    ) -> Tensor:
        """Logits [local rows, vocabulary]; there is at least one row."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """``loss``: mean over the global batch's loss tokens, weighted where the job weighs them.
    Seconds are this replica's own.

    ``phase_s``: seconds by phase, in the phases that the plan predicts: ``vision`` and ``audio``
    encoding, the ``exchange`` of features and ``llm`` (rings included), each in both directions;
    ``gradients``, what a step takes once: comparing plans, and the part of the sum of gradients
    that does not overlap with the last backward; and ``waiting`` for other replicas. They add up
    to ``seconds``.
    """

    loss: float
    loss_tokens: int
    seconds: float
    phase_s: Mapping[str, float]


def run_step(
    model: Module,
    shard: Shard,
    groups: GroupPool,
    *,
    gradients: GradientReduction | None = None,
    upcoming: Shard | None = None,
) -> StepResult:
    """Forward and backward of a whole step; summed gradients are left in ``.grad``.

    Parameters
    ----------
    model: a ``MultimodalModel``, plain, in ``DistributedDataParallel``, or sharded by
        ``fully_shard``.
    gradients: how gradients are summed over replicas; by default as the model's wrapper does it.
    upcoming: the next step's shard where it has arrived (``dataset.peek(wait=False)``). Once
        all replicas have it, its groups are connected while this step computes.

    Raises PlanMismatchError, PeerError, LayoutError. Collective over all replicas.
    """
    return _whole_step(
        model, shard, groups, gradients or reduction_of(model, groups.everyone), upcoming
    )


def evaluate_step(model: Module, shard: Shard, groups: GroupPool) -> StepResult:
    """The loss of a whole step, without gradients: for validation between training steps.

    The same as ``run_step`` but for the backward pass; gradients that wait in ``.grad`` stay. The
    mean over several steps is that of their losses, weighted by their ``loss_tokens``.
    Modules are run in the mode they are in: call ``model.eval()`` where that makes a difference.

    Raises PlanMismatchError, PeerError, LayoutError. Collective over all replicas.
    """
    with torch.no_grad():
        return _whole_step(model, shard, groups, None, None)


def _whole_step(
    model: Module,
    shard: Shard,
    groups: GroupPool,
    reduction: GradientReduction | None,
    upcoming: Shard | None,
) -> StepResult:
    """A step whose gradients the reduction sums, or one without gradients."""
    started = time.perf_counter()
    everyone = groups.everyone
    forward = _forward_of(model)
    device = _device_of(model)
    with groups.naming_lost("a step"), phase_clock(device, place=START) as clock:
        _prewarm(shard, upcoming, groups)
        loss_tokens = step_loss_tokens(shard, everyone)
        loss_sum = torch.zeros(1, dtype=torch.float64, device=everyone.home_of_sums(device))
        for number, microbatch in enumerate(shard.microbatches, start=1):
            last = number == len(shard.microbatches)
            with nullcontext() if reduction is None else reduction.microbatch(last=last):
                logits = forward(microbatch, groups)
                loss = microbatch_loss(logits, microbatch, loss_tokens)
                if reduction is not None:
                    scaled = loss * reduction.averaged_over
                    scaled = switch_after_backward(scaled, GRADIENTS, END if last else None)
                    clock.switch("llm_backward", pack_place(microbatch, BACKWARD))
                    scaled.backward()  # type: ignore[no-untyped-call]
            clock.switch(OTHER)
            loss_sum += loss.detach().to(loss_sum.device)
        clock.switch(GRADIENTS, END)
        if reduction is not None:
            reduction.finish()
        everyone.post_sum(loss_sum, action="summing the loss").wait()
        mean_loss = float(loss_sum)  # waits for a GPU, so that the step's seconds are all counted
        clock.stop()
        spent = clock.seconds()
        seconds = time.perf_counter() - started
        phase_s = seconds_by_phase(spent, shard.plan, everyone)
    return StepResult(
        loss=mean_loss, loss_tokens=loss_tokens.count, seconds=seconds, phase_s=phase_s
    )


def _device_of(model: Module) -> torch.device:
    first = next(model.parameters(), None)
    return torch.device("cpu") if first is None else first.device


def _forward_of(model: Module) -> Callable[[Microbatch, GroupPool], Tensor]:
    """A wrapped model is called, so that its wrapper's hooks run."""
    if isinstance(model, DistributedDataParallel | FSDPModule):
        return cast(Callable[[Microbatch, GroupPool], Tensor], model)
    return partial(forward_microbatch, cast(MultimodalModel, model))


def _prewarm(shard: Shard, upcoming: Shard | None, groups: GroupPool) -> None:
    """Connect this step's groups, and the next step's if every replica has its shard."""
    following = upcoming.plan.digest if upcoming is not None else ""
    agreed = check_same_plan(shard.plan.digest, groups.everyone, upcoming=following)
    for step in (shard, upcoming if agreed else None):
        if step is not None:
            groups.prewarm(group.replicas for group in step.plan.groups)


def forward_microbatch(model: MultimodalModel, microbatch: Microbatch, groups: GroupPool) -> Tensor:
    """Encode, exchange, decode; logits [local rows, vocabulary]. Collective over all replicas.

    Every replica runs the same modules. An encoder for which this replica has no item, but others
    have one, runs on a dummy item; the decoder of an idle replica runs on one token. The loss sees
    neither. So the collectives of sharded modules, forward and backward, are the same everywhere.
    """
    features: dict[str, Features] = {}
    previous: Tensor | None = None
    for modality in MODALITIES:
        batch: ModalityBatch | None = getattr(microbatch, modality)
        if batch is None:  # then it is None on every replica
            continue
        switch_phase(f"{modality}_forward")
        trains = model.encoder_trains(modality)
        with torch.set_grad_enabled(trains and torch.is_grad_enabled()):
            encoded = _encode(model, modality, batch)
        plan = batch.exchange
        sent = encoded.index_select(0, plan.send_rows.to(encoded.device))
        moves = moves_rows(plan, replica=groups.replica)  # else there is nothing to exchange
        if moves:
            switch_phase(EXCHANGE, Place(modality, microbatch.wave, FORWARD))
        rows = exchange_features(
            switch_in_backward(sent, f"{modality}_backward"),
            plan.send_splits,
            plan.recv_splits,
            groups.everyone,
            after=previous,
            differentiable=trains,
        )
        previous = rows if trains else previous
        if moves:
            rows = switch_in_backward(rows, EXCHANGE, Place(modality, microbatch.wave, BACKWARD))
        else:
            rows = switch_in_backward(rows, f"{modality}_backward")
        features[modality] = Features(rows=rows, positions=plan.recv_positions)
    switch_phase("llm_forward", pack_place(microbatch, FORWARD))
    if microbatch.idle:
        one_token = _one_token(microbatch)
        logits = model.decode(one_token, features, PackedAttention([0, 1]))
        return logits[:0].clone()  # FSDP's hooks want no views
    attention = PackedAttention(
        microbatch.cu_seqlens,
        group=groups.get(microbatch.cp_group),
        lengths=microbatch.lengths,
        layouts=microbatch.layouts,
    )
    return model.decode(microbatch, features, attention)


def _encode(model: MultimodalModel, modality: str, batch: ModalityBatch) -> Tensor:
    """Feature rows of the batch's items; no rows where a dummy item was encoded."""
    if not batch.items:
        return model.encode(modality, replace(batch, items=[model.dummy_item(modality)]))[:0]
    encoded = model.encode(modality, batch)
    planned = len(batch.exchange.send_rows)
    if encoded.shape[0] != planned:
        raise LayoutError(
            f"the {modality} encoder gave {encoded.shape[0]} rows for {len(batch.items)} items "
            f"whose tokens the plan counts as {planned}; check that the model's patch and merge "
            "sizes are those of the job's processor"
        )
    return encoded


def _one_token(idle: Microbatch) -> Microbatch:
    """An idle microbatch with a token that has no label."""
    token = idle.position_ids.new_zeros(1)
    return replace(
        idle,
        input_ids=token,
        labels=torch.full_like(token, IGNORED),
        position_ids=token,
        mrope=None if idle.mrope is None else token.expand(3, 1),
        cu_seqlens=idle.cu_seqlens.new_tensor([0, 1]),
        lengths=idle.cu_seqlens.new_tensor([1]),
        weights=None,
    )


def check_same_plan(digest: str, group: PeerGroup, *, upcoming: str = "") -> bool:
    """Compare the plan digest of all replicas, once a step before its first collective.

    ``digest``: a text of one length everywhere, such as hexadecimal SHA-256. ``upcoming``: that
    of the next step, or nothing where it is not known yet. Returns whether all replicas gave
    the same ``upcoming``, so that they can act on it together.

    Raises PlanMismatchError, on every replica, naming the digests and who holds them.
    """
    message = digest.encode() + upcoming.encode().ljust(len(digest), b"-")[: len(digest)]
    own = torch.frombuffer(bytearray(message), dtype=torch.uint8).to(group.device)
    gathered = group.gather(own, action="comparing plan digests")
    texts = [bytes(theirs.tolist()).decode() for theirs in gathered]
    replicas_of: dict[str, list[int]] = {}
    for replica, text in zip(group.members, texts, strict=True):
        replicas_of.setdefault(text[: len(digest)], []).append(replica)
    if len(replicas_of) > 1:
        raise PlanMismatchError(replicas_of)
    return bool(upcoming) and len(set(texts)) == 1
