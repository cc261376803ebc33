"""Calls a model that DDP or FSDP2 wraps, so that the wrapper does not look into its microbatch.

Both walk through the arguments of ``forward``, dataclasses included: FSDP2 for tensors that need
gradients, and with mixed precision to cast what is floating. A microbatch has neither to give. To
walk through it reads every field, of which a rank may not have all (``parts=``) and of which the
client notes what the model reads; and a cast would round loss weights and sound. So a hook seals
the microbatch right before the wrapper looks, and another opens it right behind:

    DDP      hooks of the wrapper ─ seal ─ DDP's forward ─ open ─ hooks of the module ─ forward
    FSDP2    hooks put before FSDP2's ─ seal ─ FSDP2's hook ─ open ─ all other hooks ─ forward

Hooks of the model's own see it as it is. One exception: hooks that run after the forward of DDP's
wrapper are told the arguments that this was called with, the sealed one among them.
"""

from collections import OrderedDict
from typing import Any, cast

from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel

from trainer_client.shard import Microbatch


class _Sealed:
    """A microbatch that is no dataclass."""

    __slots__ = ("microbatch",)

    def __init__(self, microbatch: Microbatch) -> None:
        self.microbatch = microbatch


def sealed_call(wrapped: Module, microbatch: Microbatch, *rest: object) -> Tensor:
    """``wrapped(microbatch, *rest)``, whose ``forward`` and hooks get the microbatch as it is."""
    inner = wrapped.module if isinstance(wrapped, DistributedDataParallel) else wrapped
    sealing = wrapped.register_forward_pre_hook(_sealed)
    opening = inner.register_forward_pre_hook(_opened, prepend=inner is not wrapped)
    try:
        if inner is wrapped:
            _put_around_fsdp(wrapped)
        return cast(Tensor, wrapped(microbatch, *rest))
    finally:
        sealing.remove()
        opening.remove()


def _put_around_fsdp(module: Module) -> None:
    """Move the two hooks, which are the last, next to FSDP2's; all others stay in their order.
    Around all of them where a release of torch hides which is FSDP2's."""
    hooks = cast(OrderedDict[int, Any], module._forward_pre_hooks)
    *others, sealing, opening = hooks
    state = cast(FSDPModule, module)._get_fsdp_state()
    own = [at for at, key in enumerate(others) if _is_of(hooks[key], state)]
    begin, end = (own[0], own[0] + 1) if own else (0, len(others))
    for key in (*others[:begin], sealing, *others[begin:end], opening, *others[end:]):
        hooks.move_to_end(key)


def _is_of(hook: Any, state: object) -> bool:
    """Whether a hook is a method of this state, also wrapped, as for modules sharded as one."""
    while hook is not None:
        if getattr(hook, "__self__", None) is state:
            return True
        hook = getattr(hook, "__wrapped__", None)
    return False


def _sealed(module: Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    microbatch, *rest = arguments
    return (_Sealed(microbatch), *rest)


def _opened(module: Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    sealed, *rest = arguments
    return (sealed.microbatch, *rest)
