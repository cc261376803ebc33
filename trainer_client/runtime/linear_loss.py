"""Cross-entropy of a linear head, without its logits.

Logits of 16k rows and 152k words take 31 GB with their softmax and its gradient, more than the rest
of a layer by far. Here a few rows at a time go through the head, the softmax and back: what is kept
are the gradients of the hidden states and of the head, which are needed anyway. They are made in
the forward pass, in which the rows' logits are at hand, and are multiplied by the loss's own
gradient in the backward pass; so logits are computed once, and nothing is computed again.

    hidden ─ rows ─▶ logits ─▶ Σ weight · cross-entropy
                       └─ softmax − target ─▶ gradients of hidden, head, bias

Rows without a label or with weight 0 are left out where labels lie on the host, as a shard brings
them; on a device, finding them would make the host wait, so there they count as 0, and so they do
in a compiled graph, whose shapes cannot follow them.

Source: the idea of computing a head's gradients in its forward pass by chunks of rows is that of
Liger Kernel (Hsu et al., 2024), section 3.2.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from trainer_client.runtime.faults import LayoutError
from trainer_client.runtime.plain_kernel import accumulation_dtype
from trainer_client.shard import IGNORED_LABEL, Microbatch

HOST = torch.device("cpu")
CHUNK_BYTES = 2**29  # of the logits of the rows that are computed at a time, at least one row


@dataclass(frozen=True, kw_only=True, slots=True)
class LinearLogits:
    """Logits that are not computed: softcap · tanh(scale · (hidden @ weight.T + bias) / softcap).

    Attributes
    ----------
    hidden: [rows, width].
    head: the linear module, which is called, so that FSDP gathers its weight; or a weight
        [vocabulary, width] that is at hand, such as a tied embedding's.
    softcap: None where logits are not capped.
    """

    hidden: Tensor
    head: nn.Linear | Tensor
    scale: float = 1.0
    softcap: float | None = None

    def loss_sum(self, microbatch: Microbatch) -> Tensor:
        """Σ weight · cross-entropy over the microbatch's local rows, a scalar.

        A model that shards itself calls it in its own forward, where its weights are gathered.

        Raises LayoutError where rows and labels differ, or the weight is not at hand.
        """
        weights = None if microbatch.weights is None else microbatch.loss_weights

        def loss(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            return linear_cross_entropy(
                hidden,
                weight,
                microbatch.labels,
                weights,
                bias=bias,
                scale=self.scale,
                softcap=self.softcap,
            )

        if isinstance(self.head, Tensor):
            return loss(self.hidden, self.head, None)
        head = self.head
        with instead_of_forward(head, lambda hidden: loss(hidden, head.weight, head.bias)):
            total: Tensor = head(self.hidden)
        return total


def settled(given: "Tensor | LinearLogits", microbatch: Microbatch) -> Tensor:
    """What a decoder gave, as a tensor: logits, hidden states, or the sum of its loss."""
    return given.loss_sum(microbatch) if isinstance(given, LinearLogits) else given


@contextmanager
def instead_of_forward(head: nn.Linear, function: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Within, calling the head calls the function, hooks of the head included."""
    if not is_plain_linear(head):
        raise LayoutError(
            f"the head is a {type(head).__name__} with a forward of its own, so that its loss "
            "cannot be taken without its logits; return its logits"
        )
    head.forward = function  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        del head.forward


def is_plain_linear(head: object) -> bool:
    """Whether a module computes just hidden @ weight.T + bias, sharded by FSDP or not."""
    plain = isinstance(head, nn.Linear) and type(head).forward is nn.Linear.forward
    return plain and "forward" not in vars(head) and not hasattr(head, "parametrizations")


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    weights: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    scale: float = 1.0,
    softcap: float | None = None,
) -> Tensor:
    """Σ weights · cross-entropy of the logits that ``LinearLogits`` describes, a scalar in fp32, or
    in fp64 for fp64 hidden states.

    Parameters
    ----------
    hidden: [..., width]. weight: [vocabulary, width]. bias: [vocabulary].
    labels: [...], int64; -100 marks rows without one. weights: [...], 1 where None.

    Under autocast, logits are computed in its type, as those of ``torch.nn.functional.linear``.
    The gradients can be taken once. Compiled with ``fullgraph=True, dynamic=True`` it is one graph
    for each number of chunks of rows, and another where the last one is a single row.

    Raises LayoutError where shapes or types differ, or the weight is sharded.
    """
    _check(hidden, weight, labels, weights)
    device = hidden.device
    if torch.is_autocast_enabled(device.type):
        dtype = torch.get_autocast_dtype(device.type)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    if not torch.is_grad_enabled():  # which a function cannot see in its forward pass
        hidden, weight = hidden.detach(), weight.detach()
        bias = None if bias is None else bias.detach()
    rows = hidden.reshape(-1, hidden.shape[-1])
    targets, factors = labels.reshape(-1), None if weights is None else weights.reshape(-1)
    if targets.device == HOST and not torch.compiler.is_compiling():
        learnt = targets != IGNORED_LABEL
        if factors is not None:
            learnt &= factors.cpu() != 0
        if not bool(learnt.all()):
            kept = learnt.nonzero().squeeze(1)
            rows = rows.index_select(0, kept.to(device, non_blocking=True))
            targets = targets[kept]
            factors = None if factors is None else factors[kept.to(factors.device)]
    total: Tensor = _LinearCrossEntropy.apply(  # type: ignore[no-untyped-call]
        rows,
        weight,
        bias,
        targets.to(device, non_blocking=True),
        None if factors is None else factors.to(device, non_blocking=True),
        scale,
        softcap,
    )
    return total


def _check(hidden: Tensor, weight: Tensor, labels: Tensor, weights: Tensor | None) -> None:
    if isinstance(weight, DTensor) or (weight.numel() and not weight.untyped_storage().size()):
        raise LayoutError(
            "the head's weight is sharded where its loss is taken. In FSDP2, give LinearLogits the "
            "head's module, or call its loss_sum(microbatch) in the forward of the module that is "
            "sharded; a tensor-parallel head returns its logits"
        )
    if hidden.shape[:-1] != labels.shape or hidden.shape[-1] != weight.shape[-1]:
        raise LayoutError(
            f"hidden states {tuple(hidden.shape)}, head {tuple(weight.shape)} and labels "
            f"{tuple(labels.shape)} do not fit; the decoder must give one row per local token, of "
            "the head's width"
        )
    if weights is not None and weights.shape != labels.shape:
        raise LayoutError(
            f"there are {weights.numel()} loss weights for {labels.numel()} labels; give "
            "mb.loss_weights beside mb.labels"
        )
    mixed = not torch.is_autocast_enabled(hidden.device.type) and hidden.dtype != weight.dtype
    if mixed:
        raise LayoutError(
            f"hidden states are {hidden.dtype} and the head is {weight.dtype}; cast one of them, "
            f"such as hidden.to({weight.dtype})"
        )


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        factors: Tensor | None,
        scale: float,
        softcap: float | None,
    ) -> Tensor:
        dtype = accumulation_dtype(hidden.dtype)
        of_hidden, of_weight, of_bias = ctx.needs_input_grad[:3]
        total = torch.zeros((), dtype=dtype, device=hidden.device)
        grad_hidden = torch.empty_like(hidden) if of_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=dtype) if of_weight else None
        grad_bias = torch.zeros_like(bias, dtype=dtype) if bias is not None and of_bias else None
        for chunk in _chunks(hidden.shape[0], weight.shape[0] * dtype.itemsize):
            rows = hidden[chunk]
            logits = nn.functional.linear(rows, weight, bias).to(dtype)
            part = None if factors is None else factors[chunk].to(dtype)
            loss, slope = _row_losses(
                logits, targets[chunk], part, scale, softcap, any(ctx.needs_input_grad)
            )
            total += loss
            if slope is None:
                continue
            if grad_bias is not None:
                grad_bias += slope.sum(0)
            slope = slope.to(hidden.dtype)
            if grad_hidden is not None:
                grad_hidden[chunk] = slope @ weight
            if grad_weight is not None:
                _add_product(grad_weight, slope.T, rows)
        ctx.save_for_backward(
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None or bias is None else grad_bias.to(bias.dtype),
        )
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        # In place: a second copy of a head's gradient is gigabytes. Torch refuses a second pass.
        grads = [None if each is None else each.mul_(grad) for each in ctx.saved_tensors]
        return (*grads, None, None, None, None)


def _chunks(rows: int, row_bytes: int) -> Iterator[slice]:
    step = max(1, CHUNK_BYTES // row_bytes)
    # By their number: a compiler makes a graph of each, and would of each number of rows.
    starts = (number * step for number in range(-(-rows // step)))
    return (slice(start, min(start + step, rows)) for start in starts)


def _row_losses(
    logits: Tensor,
    targets: Tensor,
    factors: Tensor | None,
    scale: float,
    softcap: float | None,
    with_slope: bool,
) -> tuple[Tensor, Tensor | None]:
    """The loss of some rows, and its gradient by the head's output [rows, vocabulary]. Overwrites
    ``logits``, which the head gave."""
    if scale != 1:
        logits.mul_(scale)
    capped = None  # logits / softcap, in (-1, 1)
    if softcap is not None:
        capped = logits.div_(softcap).tanh_()
        logits = capped * softcap
    learnt = targets != IGNORED_LABEL
    if factors is not None:
        learnt = learnt & (factors != 0)  # 0 times an infinite loss is no number
    places = targets.where(learnt, 0)[:, None]
    normalizer = logits.logsumexp(dim=1, keepdim=True)
    losses = (normalizer - logits.gather(1, places)).squeeze(1)
    factors = learnt.to(logits.dtype) if factors is None else factors.where(learnt, 0)
    total = (losses.where(learnt, 0) * factors).sum()
    if not with_slope:
        return total, None
    slope = logits.sub_(normalizer).exp_()
    slope.scatter_add_(1, places, slope.new_full(places.shape, -1))
    slope.mul_(factors[:, None])
    if capped is not None:
        slope.mul_(capped.square_().neg_().add_(1))
    return total, slope.mul_(scale) if scale != 1 else slope


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right, where total may be of a wider type."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        total += left @ right
