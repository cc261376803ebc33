"""Calls a model that DDP or FSDP2 wraps, so that the wrapper does not look into its microbatch.

Both walk through the arguments of ``forward``, dataclasses included: FSDP2 for tensors that need
gradients, and with mixed precision to cast what is floating. A microbatch has neither to give. To
walk through it reads every field, of which a rank may not have all (``parts=``) and of which the
client notes what the model reads; and a cast would round loss weights and sound. So the microbatch
is sealed on the way, and opened by a hook that runs behind the wrapper's.
"""

from typing import Any, cast

from torch import Tensor
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel

from trainer_client.shard import Microbatch


class _Sealed:
    """A microbatch that is no dataclass."""

    __slots__ = ("microbatch",)

    def __init__(self, microbatch: Microbatch) -> None:
        self.microbatch = microbatch


def sealed_call(wrapped: Module, microbatch: Microbatch, *rest: object) -> Tensor:
    """``wrapped(microbatch, *rest)``, whose ``forward`` gets the microbatch as it is."""
    inner = wrapped.module if isinstance(wrapped, DistributedDataParallel) else wrapped
    opening = inner.register_forward_pre_hook(_opened)  # behind FSDP2's, which comes first
    try:
        return cast(Tensor, wrapped(_Sealed(microbatch), *rest))
    finally:
        opening.remove()


def _opened(module: Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    sealed, *rest = arguments
    return (sealed.microbatch, *rest)
