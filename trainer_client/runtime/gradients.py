"""Sums gradients over replicas: with this package's own sum, DDP, or FSDP2.

With each of them, three things hold for a step. The reduction happens once, in the backward pass
of the last microbatch or after it. It gives sums, not averages: DDP and FSDP divide by the number
of replicas, so the loss is multiplied by it. And every replica runs the same modules in every wave
(``forward_microbatch`` ensures it), because a sharded module gathers its weights, and a wrapped
one starts its reduction, when it runs.

Gradients that are there when a step begins, of steps before it whose optimizer has not stepped yet,
are alike on all replicas, and stay what they are beneath the step's own.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn import Module, Parameter
from torch.nn.parallel import DistributedDataParallel

from trainer_client.runtime.faults import LayoutError
from trainer_client.runtime.group_pool import GroupPool
from trainer_client.runtime.loss import share_out, sum_gradients, sum_gradients_of
from trainer_client.runtime.peers import PeerGroup


class GradientReduction(Protocol):
    """What ``run_step`` needs from the reduction of gradients.

    ``averaged_over``: the number of replicas by which the reduction divides; 1 if it sums.
    """

    averaged_over: int

    def begin(self) -> None:
        """Before the first microbatch: gradients that are there come through ``finish`` as they
        are."""
        ...

    def microbatch(self, *, last: bool) -> AbstractContextManager[None]:
        """Context of a microbatch's forward and backward; ``last`` for the step's last one."""
        ...

    def finish(self) -> None:
        """After the last backward: gradients must be sums when it returns."""
        ...


def reduction_of(model: Module, groups: GroupPool) -> GradientReduction:
    """The reduction that fits the model's wrapper.

    Raises LayoutError where the model is wrapped in part, without a forward of its own, or over
    other ranks than the replicas; and where the pool has groups apart, which are of layers whose
    weights it cannot know.
    """
    if groups.members_apart:
        raise LayoutError(
            f"replicas {list(groups.members_apart[0])} have a group apart, over which layers send "
            "one another tokens, and no `gradients` are given: by default those of all replicas "
            "are added up as if each held the same weights, which is wrong for experts that are "
            "spread over them. Give gradients=ExpertReduction(model, groups, experts=..., "
            "holders=...), or with FSDP2 FsdpReduction(model, groups.everyone, experts=...); where "
            "all weights are held by all, SumReduction or DdpReduction(model, groups.everyone)"
        )
    everyone = groups.everyone
    if isinstance(model, DistributedDataParallel):
        return DdpReduction(model, everyone)
    if isinstance(model, FSDPModule):
        return FsdpReduction(model, everyone)
    parts = [name for name, part in model.named_modules() if isinstance(part, FSDPModule)]
    if parts:
        raise LayoutError(
            f"{type(model).__name__} has sharded parts ({', '.join(parts[:3])}) but is not "
            "sharded itself, so its other gradients would stay local; call fully_shard(model) "
            "last, on the whole model"
        )
    return SumReduction(model, everyone)


class SumReduction:
    """For a model that is not wrapped: one sum after the last backward."""

    averaged_over = 1

    def __init__(self, model: Module, everyone: PeerGroup) -> None:
        self._model = model
        self._everyone = everyone

    def begin(self) -> None:
        share_out(self._model.parameters(), self._everyone.size)

    def microbatch(self, *, last: bool) -> AbstractContextManager[None]:
        return nullcontext()

    def finish(self) -> None:
        sum_gradients(self._model, self._everyone)


class ExpertReduction:
    """For experts that are spread over replicas, in a model that is not wrapped.

    Replicas of one *expert group* hold different experts and send one another their tokens, so an
    expert's gradient comes from all tokens of its group. Replicas with the same experts, the
    ``holders``, add theirs up, and all replicas everything else. The messages of an expert group
    need a communicator of their own, such as ``groups.apart(members)``, and each replica must run
    the same layers in every wave, as ``forward_microbatch`` has it.

    ``experts``: the modules whose parameters only ``holders`` have, this replica among them.
    Making one is collective over them. Raises LayoutError where the model is wrapped.
    """

    averaged_over = 1

    def __init__(
        self, model: Module, groups: GroupPool, *, experts: Iterable[Module], holders: Sequence[int]
    ) -> None:
        if isinstance(model, DistributedDataParallel | FSDPModule):
            raise LayoutError(
                f"{type(model).__name__} sums its gradients itself, also those of experts that "
                "replicas do not share; give ExpertReduction the model without a wrapper, or shard "
                "each expert over its holders and give FsdpReduction(..., experts=...)"
            )
        self._experts = {p: None for module in experts for p in module.parameters()}
        self._model = model
        self._everyone, self._holders = groups.everyone, groups.apart(holders)

    def begin(self) -> None:
        share_out(self._shared(), self._everyone.size)
        share_out(self._experts, self._holders.size)

    def microbatch(self, *, last: bool) -> AbstractContextManager[None]:
        return nullcontext()

    def finish(self) -> None:
        sum_gradients_of(self._shared(), self._everyone)
        sum_gradients_of(self._experts, self._holders)

    def _shared(self) -> list[Parameter]:
        return [p for p in self._model.parameters() if p not in self._experts]


class DdpReduction:
    """For ``DistributedDataParallel``: its buckets are reduced during the last backward.

    Wrap with ``find_unused_parameters=True``: a step's last wave may lack a modality.
    """

    def __init__(self, model: DistributedDataParallel, everyone: PeerGroup) -> None:
        _check_forward(model.module)
        _check_ranks(model.process_group.size(), everyone)
        if model.static_graph:
            raise LayoutError(
                "DistributedDataParallel has static_graph=True, and microbatches of a step differ "
                "in what they run. Wrap with find_unused_parameters=True instead."
            )
        self.averaged_over = everyone.size
        self._model = model

    def begin(self) -> None:
        pass  # the mean of what replicas have alike is what they have

    @contextmanager
    def microbatch(self, *, last: bool) -> Iterator[None]:
        with nullcontext() if last else self._model.no_sync():
            yield

    def finish(self) -> None:
        pass


class FsdpReduction:
    """For FSDP2's ``fully_shard``, on a mesh of all replicas; also sharded in nodes (HSDP).

    ``every_microbatch``: reduce after each microbatch. This costs one reduction per microbatch,
    but keeps no unsharded gradients between them, for which large models have no memory.
    ``keep_weights``: gather the weights once a step and hold them all until its last backward pass,
    instead of gathering them in each microbatch; sets the model's ``reshard_after_forward`` to
    False.
    ``experts``: modules inside that are each sharded over fewer replicas, those that hold the same
    experts. Their gradients come from the tokens of all replicas of their group, so they are summed
    over the holders and divided as all others are: by the number of all replicas.

    Raises LayoutError where parameters are not sharded over all replicas and are not of experts.
    """

    def __init__(
        self,
        model: Module,
        everyone: PeerGroup,
        *,
        every_microbatch: bool = False,
        keep_weights: bool = False,
        experts: Iterable[Module] = (),
    ) -> None:
        _check_forward(model)
        if not isinstance(model, FSDPModule):
            raise LayoutError(f"{type(model).__name__} is not sharded; call fully_shard on it")
        experts = tuple(experts)
        of_experts = {parameter for module in experts for parameter in module.parameters()}
        self._held_alone = [p for p in of_experts if isinstance(p, DTensor) and _holders(p) == 1]
        for module in experts:
            _divide_by(module, everyone.size)
        sharded = [p for p in model.parameters() if isinstance(p, DTensor) and p not in of_experts]
        for size in {parameter.device_mesh.size() for parameter in sharded}:
            _check_ranks(size, everyone)
        self.averaged_over = everyone.size
        self._every_microbatch = every_microbatch
        self._set_sync: Callable[[bool], None] = model.set_requires_gradient_sync
        self._set_reshard: Callable[[bool], None] = model.set_reshard_after_backward
        self._keep_weights = keep_weights
        if keep_weights:
            model.set_reshard_after_forward(False)

    def begin(self) -> None:
        for parameter in self._held_alone:  # others are reduced before they are added
            if parameter.grad is not None:
                parameter.grad.mul_(self.averaged_over)

    @contextmanager
    def microbatch(self, *, last: bool) -> Iterator[None]:
        self._set_sync(last or self._every_microbatch)
        if self._keep_weights:
            self._set_reshard(last)
        yield

    def finish(self) -> None:
        for parameter in self._held_alone:
            if parameter.grad is not None:
                parameter.grad.div_(self.averaged_over)


def _holders(parameter: DTensor) -> int:
    return int(parameter.device_mesh.size())


def _divide_by(expert: Module, replicas: int) -> None:
    """Divide the sum of a sharded expert's gradients by all replicas. Raises LayoutError."""
    if not isinstance(expert, FSDPModule):
        raise LayoutError(
            f"{type(expert).__name__} is among `experts` and not sharded; call fully_shard on each "
            "of them, with a mesh of the replicas that hold the same"
        )
    if not hasattr(expert, "set_gradient_divide_factor"):
        raise LayoutError(
            f"torch {torch.__version__} cannot divide the gradients of experts as those of other "
            "weights; take torch 2.8 or later, or ExpertReduction and a model without a wrapper"
        )
    first = next(expert.parameters())
    if isinstance(first, DTensor) and _holders(first) == 1:
        return  # torch divides twice where nobody shares them in fp16 or fp64
    expert.set_gradient_divide_factor(float(replicas))
    if first.device.type == "cpu":  # gloo has no sum of scaled numbers
        expert.set_force_sum_reduction_for_comms(True)


def _check_forward(model: Module) -> None:
    if type(model).forward is Module.forward:
        raise LayoutError(
            f"{type(model).__name__} has no forward, which DDP and FSDP hook into; define "
            "forward(self, microbatch, groups) as forward_microbatch(self, microbatch, groups)"
        )


def _check_ranks(ranks: int, everyone: PeerGroup) -> None:
    # A mesh with tensor parallel dimensions is a multiple of the replicas.
    if ranks % everyone.size:
        raise LayoutError(
            f"the model is reduced over {ranks} ranks, but gradients are summed over "
            f"{everyone.size} replicas; wrap it over the group of all replicas, and name experts "
            "that fewer replicas share in FsdpReduction(..., experts=...)"
        )
