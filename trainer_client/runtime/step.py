"""Trains one optimizer step of one replica, as its rank shard says.

For every microbatch, in the plan's order: encode the items this replica was given, exchange
the features, run the decoder with the pack's attention, take the loss, go backward. The items of
the next microbatch may be encoded before that, and their features travel meanwhile. The gradients
are summed over replicas at the end. All replicas go through the same waves and run the same modules
in each, so every collective meets its partners.
"""

import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel

from trainer_client.alignment import extended
from trainer_client.runtime.agreement import begin_step
from trainer_client.runtime.clock import (
    OTHER,
    phase_clock,
    switch_after_backward,
    switch_phase,
)
from trainer_client.runtime.encoder_stream import EncoderStream, encoder_stream_of
from trainer_client.runtime.faults import RuntimeFault
from trainer_client.runtime.gradients import GradientReduction, reduction_of
from trainer_client.runtime.group_pool import GroupPool
from trainer_client.runtime.host_numbers import HostCopy
from trainer_client.runtime.linear_loss import LinearLogits, settled
from trainer_client.runtime.loss import microbatch_loss
from trainer_client.runtime.phases import (
    BACKWARD,
    END,
    FORWARD,
    GRADIENTS,
    START,
    pack_place,
)
from trainer_client.runtime.ring_attention import PackedAttention
from trainer_client.runtime.sealed_call import sealed_call
from trainer_client.runtime.step_result import StepResult
from trainer_client.runtime.wave_ahead import wave_taken, waves_of
from trainer_client.runtime.wave_features import Features, WaveFeatures, keeps_for_backward
from trainer_client.shard import Microbatch, ModalityBatch, Shard

LEAST_ROWS = 2  # that a decoder runs on: torch compiles sizes of 0 and 1 into graphs of their own


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
    ) -> Tensor | LinearLogits:
        """Logits [local rows, vocabulary]; there are at least two rows.

        Or, so that logits are never held, ``LinearLogits``; or a loss of the model's own, a scalar:
        the sum over rows of loss weight times cross-entropy, 0 of rows without a label.
        """
        ...


def run_step(
    model: Module,
    shard: Shard,
    groups: GroupPool,
    *,
    gradients: GradientReduction | None = None,
    features_ahead: bool | None = None,
    encoder_stream: bool = True,
) -> StepResult:
    """Forward and backward of a whole step; summed gradients are left in ``.grad``, added to those
    of steps before it where the optimizer has not stepped since.

    On a GPU everything is queued when it returns; reading the result waits for the device, so read
    it after the optimizer's step.

    Parameters
    ----------
    model: a ``MultimodalModel``, plain, in ``DistributedDataParallel``, or sharded by
        ``fully_shard``.
    gradients: how gradients are summed over replicas; by default as the model's wrapper does it.
        Needed where experts are spread over replicas, which send tokens over ``groups.apart``.
    features_ahead: whether the items of a microbatch are encoded before the decoder runs the
        microbatch before it, so that features travel while that computes. Loss and gradients are
        the same bits, but for random numbers such as those of dropout, which are drawn in another
        order. Encoders that train then keep two microbatches for their backward pass, of which a
        job's ``plan.memory`` counts one. By default it is done where encoders keep nothing, those
        of the next microbatch being frozen, and where all replicas have room for it by what their
        devices were seen to take (``memory_room.py``). The same on all replicas.
    encoder_stream: whether encoders that go ahead may run on a stream of their own, where the
        device has streams and the model is not sharded by FSDP2; see ``_stream_of``.

    Raises PlanMismatchError, PeerError, LayoutError, RuntimeFault where gradients are off or the
    model was compiled as a whole. Collective over all replicas.
    """
    require_gradients()
    require_eager(model)
    reduction = gradients or reduction_of(model, groups)
    return _whole_step(model, shard, groups, reduction, features_ahead, encoder_stream)


def require_gradients() -> None:
    """Raises RuntimeFault where gradients are off."""
    if not torch.is_grad_enabled():
        raise RuntimeFault(
            "a step goes backward, and gradients are off here: it is called within torch.no_grad "
            "or inference_mode. Call it outside of them, or evaluate_step for the loss alone."
        )


def require_eager(model: Module) -> None:
    """Raises RuntimeFault where a model, or what is in its wrapper, was compiled as a whole."""
    for part in (model, _inside_ddp(model)):
        if hasattr(part, "_orig_mod") or part._compiled_call_impl is not None:
            raise RuntimeFault(
                "the model was compiled as a whole, by torch.compile, by its compile() or by a "
                "trainer's torch_compile=True; a step exchanges features and waits for other "
                "ranks, which is no graph. Leave the whole as it is, and compile the layers of its "
                "decoder, each by layer.compile(fullgraph=True, dynamic=True); of a model in "
                "trainable(), model.model.get_decoder().layers has them."
            )


def evaluate_step(model: Module, shard: Shard, groups: GroupPool) -> StepResult:
    """The loss of a whole step, without gradients: for validation between training steps.

    The same as ``run_step`` but for the backward pass; gradients that wait in ``.grad`` stay. The
    mean over several steps is that of their losses, weighted by their ``loss_tokens``.
    Modules are run in the mode they are in: call ``model.eval()`` where that makes a difference.

    Raises PlanMismatchError, PeerError, LayoutError, RuntimeFault where the model was compiled as a
    whole. Collective over all replicas.
    """
    require_eager(model)
    with torch.no_grad():
        result = _whole_step(model, shard, groups, None, True, True)
    # What FSDP2 does behind a backward pass. Else it would compute the next step with the weights
    # that it holds gathered, the root's at least, whatever the optimizer has made of them.
    for part in model.modules():
        if isinstance(part, FSDPModule):
            part.reshard()
    return result


def _whole_step(
    model: Module,
    shard: Shard,
    groups: GroupPool,
    reduction: GradientReduction | None,
    features_ahead: bool | None,
    encoder_stream: bool,
) -> StepResult:
    """A step whose gradients the reduction sums, or one without gradients."""
    started = time.perf_counter()
    everyone = groups.everyone
    forward = _forward_of(model)
    device = _device_of(model)
    with groups.naming_lost("a step"), phase_clock(device, place=START) as clock:
        groups.connect_meshes(model)
        trains = _encoders_train(model, shard)
        require_own_tokens(model, shard)
        asks = features_ahead is None and trains
        room = asks and groups.room.begin(device, shard.planned)
        agreed = begin_step(shard, everyone, features_ahead=features_ahead, has_room=room)
        ahead = True if agreed.room else features_ahead
        stream = _stream_of(model, device, trains) if encoder_stream else None
        if ahead is False or (ahead is None and trains):
            stream = None  # it would cost memory of its own, for nothing
        loss_sum = torch.zeros(1, dtype=torch.float64, device=everyone.home_of_sums(device))
        if reduction is not None:
            reduction.begin()
        with waves_of(shard, ahead, stream=stream) as waves:
            for number, microbatch in enumerate(waves, start=1):
                last = number == len(shard.microbatches)
                with nullcontext() if reduction is None else reduction.microbatch(last=last):
                    given = seen_rows(forward(microbatch, groups), microbatch)
                    loss = microbatch_loss(given, microbatch, agreed.loss_tokens)
                    waves.post()
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
        groups.room.end(ahead=agreed.room)
        return StepResult(
            loss=HostCopy(loss_sum),
            loss_tokens=agreed.loss_tokens.count,
            started_s=started,
            clock=clock,
            plan=shard.plan,
            everyone=everyone,
        )


def _encoders_train(model: Module, shard: Shard) -> bool:
    """Whether encoding a wave of the step keeps anything for a backward pass; the same on all
    replicas."""
    own = cast(MultimodalModel, _inside_ddp(model))
    return any(keeps_for_backward(own, microbatch) for microbatch in shard.planned)


def require_own_tokens(model: Module, shard: Shard) -> None:
    """Have a model that can tell (``require_own_tokens(microbatch)``) refuse what was tokenized for
    another. Raises its LayoutError."""
    look = getattr(_inside_ddp(model), "require_own_tokens", None)
    if look is not None:
        for microbatch in shard.planned:
            look(microbatch)


def _inside_ddp(model: Module) -> Module:
    inner: Module = model.module if isinstance(model, DistributedDataParallel) else model
    return inner


def _stream_of(model: Module, device: torch.device, trains: bool) -> EncoderStream | None:
    """The stream on which this model's encoders may run beside its decoder, if there is one.

    None in FSDP2, whose gathers wait for one another: the decoder's first would wait for the
    encoders anyway. None for encoders that train in DDP, which sums a bucket once the stream of its
    last gradient has it, so a bucket's gradients must come on one stream.
    """
    sharded = isinstance(model, FSDPModule)
    if sharded or (trains and isinstance(model, DistributedDataParallel)):
        return None
    return encoder_stream_of(device)


def _device_of(model: Module) -> torch.device:
    first = next(model.parameters(), None)
    return torch.device("cpu") if first is None else first.device


def _forward_of(model: Module) -> Callable[[Microbatch, GroupPool], Tensor]:
    """A wrapped model is called, so that its wrapper's hooks run; so is one whose ``forward`` was
    replaced, as accelerate does for autocast."""
    if isinstance(model, DistributedDataParallel | FSDPModule):
        return partial(sealed_call, model)
    if "forward" in vars(model):
        return model
    return partial(forward_microbatch, cast(MultimodalModel, model))


def forward_microbatch(model: MultimodalModel, microbatch: Microbatch, groups: GroupPool) -> Tensor:
    """Encode, exchange, decode; logits [local rows, vocabulary], or the sum of the rows' loss, a
    scalar, where the decoder gives it or ``LinearLogits``. Collective over all replicas.

    Every replica runs the same modules. An encoder for which this replica has no item, but others
    have one, runs on a dummy item; the decoder of an idle replica runs on ``LEAST_ROWS`` tokens, or
    on as many as rows are aligned to. The loss sees neither. So the collectives of sharded modules,
    forward and backward, are the same everywhere. Added rows are among the result, for
    ``seen_rows`` to leave out behind the wrapper: FSDP2 gathers weights in the order in which its
    hooks lie on a module's result, so all replicas give it results that were made alike.
    """
    arriving = wave_taken(
        microbatch,
        partial(WaveFeatures, model, groups=groups),
        partial(keeps_for_backward, model),
    )
    features = arriving.take()
    switch_phase("llm_forward", pack_place(microbatch, FORWARD))
    computed = computed_rows(microbatch)
    given = settled(model.decode(computed, features, attention_of(computed, groups)), computed)
    return _with_backward(given, model)


def _with_backward(given: Tensor, model: MultimodalModel) -> Tensor:
    """The same result, with a backward pass also where nothing that trains had a part in it, such
    as text where the encoders alone train. In the last of a step wrappers reduce the gradients of
    all microbatches. No weight gets a gradient from it."""
    if given.requires_grad or not torch.is_grad_enabled():
        return given
    # Those of encoders that run by themselves are reduced apart, by models that are no module.
    weights = model.parameters() if isinstance(model, Module) else iter(())
    trained = next((weight for weight in weights if weight.requires_grad), None)
    if trained is None:
        return given
    same: Tensor = _Reached.apply(given, trained)  # type: ignore[no-untyped-call]
    return same


class _Reached(torch.autograd.Function):
    # DDP reduces once it was told of a weight, of no gradient too.
    @staticmethod
    def forward(ctx: Any, given: Tensor, weight: Tensor) -> Tensor:
        return given.view_as(given)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None]:
        return None, None


def computed_rows(microbatch: Microbatch) -> Microbatch:
    """A microbatch as its decoder computes it: with ``added_rows``, tokens without labels that see
    one another alone."""
    # Only a pack that one replica holds has so few rows: rings cut each sample in two chunks.
    return extended(microbatch, added_rows(microbatch), degree=1, cp_rank=0)


def added_rows(microbatch: Microbatch) -> int:
    """Rows that a microbatch lacks of ``LEAST_ROWS``, or of as many as rows are aligned to."""
    return max(0, max(LEAST_ROWS, microbatch.rows_multiple) - microbatch.local_tokens)


def seen_rows(given: Tensor, microbatch: Microbatch) -> Tensor:
    """What was computed of a microbatch without the rows that were added; a loss is as it was."""
    rows = microbatch.local_tokens
    return given[:rows] if rows < LEAST_ROWS and given.dim() else given


def attention_of(computed: Microbatch, groups: GroupPool) -> PackedAttention:
    """Attention over the pack that this replica computes with."""
    return PackedAttention(
        computed.cu_seqlens,
        group=groups.get(computed.cp_group),
        lengths=computed.lengths,
        layouts=computed.layouts,
    )
