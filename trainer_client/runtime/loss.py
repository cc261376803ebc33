"""Loss weighted by tokens over the whole global batch, and gradients summed over replicas.

Every replica divides its own sum of cross-entropies by the number of loss tokens of *all*
replicas, and gradients are added, not averaged. So the result is the mean over the global batch's
tokens, independent of how they were packed and divided among replicas. Where the job weighs its
loss, each cross-entropy is multiplied by its sample's weight, and the sum of these weights over the
loss tokens takes the place of their number.

A model may take its own loss, or leave its logits to ``linear_loss.py``, which never holds them.

A trainer that lets DDP or FSDP reduce gradients gets their average: ``gradients.py`` multiplies
the loss by the number of replicas to make that a sum.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Module, Parameter
from torch.nn.functional import cross_entropy

from trainer_client.runtime.faults import LayoutError
from trainer_client.runtime.host_numbers import sum_numbers
from trainer_client.runtime.peers import PeerGroup, Transfer
from trainer_client.shard import IGNORED_LABEL, Microbatch, Shard

BUCKET_BYTES = 25 * 2**20  # bytes of gradients in one all-reduce; DDP's default


def token_weighted_loss(
    logits: Tensor, labels: Tensor, total_loss_tokens: float, weights: Tensor | None = None
) -> Tensor:
    """Sum of cross-entropies over this replica's rows / loss tokens of the global batch.

    Parameters
    ----------
    logits: [..., vocabulary]. labels: [...], already shifted by the worker: the target of a
        row is the label of the same row; -100 marks rows without one.
    total_loss_tokens: labels other than -100 in the step, over all replicas and microbatches.
        A step without any (all its samples quarantined) gives 0 and zero gradients.
    weights: [...], of each row's cross-entropy; then `total_loss_tokens` is their sum over the
        same labels. Rows of weight 0 are left out, as rows without a label are.

    Raises LayoutError where logits, labels and weights differ in shape.
    """
    if logits.shape[:-1] != labels.shape:
        raise LayoutError(
            f"logits {tuple(logits.shape)} and labels {tuple(labels.shape)} differ; "
            "the decoder must give one row of logits per local token"
        )
    rows = logits.reshape(-1, logits.shape[-1])
    if rows.dtype in (torch.float16, torch.bfloat16):
        rows = rows.float()
    targets = labels.reshape(-1)
    if weights is None:
        total = cross_entropy(rows, targets, ignore_index=IGNORED_LABEL, reduction="sum")
    else:
        total = _weighted_sum(rows, targets, weights)
    return total / (total_loss_tokens or 1)


def _weighted_sum(rows: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    if weights.numel() != targets.numel():
        raise LayoutError(
            f"there are {weights.numel()} loss weights for {targets.numel()} labels; give "
            "mb.loss_weights beside mb.labels"
        )
    factors = weights.reshape(-1).to(rows.dtype)
    # A weight of 0 ignores its row: 0 times an infinite loss is no number.
    targets = targets.masked_fill(factors == 0, IGNORED_LABEL)
    each = cross_entropy(rows, targets, ignore_index=IGNORED_LABEL, reduction="none")
    return (each * factors).sum()


@dataclass(frozen=True, kw_only=True, slots=True)
class LossTokens:
    """Labels other than -100 of a step, over all replicas: their number, and the sum of their
    weights, which divides the step's loss. Without weights the two are equal."""

    count: int
    weight: float


def own_loss_tokens(shard: Shard, *, labelled: bool = True) -> LossTokens:
    """The loss tokens of this replica's labels, or none on a rank without (`labelled`). Samples
    that were masked while decoding do not count."""
    counts = [mb.loss_tokens() for mb in shard.planned] if labelled else []
    return LossTokens(
        count=sum(count for count, _ in counts), weight=sum(weight for _, weight in counts)
    )


def summed_loss_tokens(shard: Shard, count: float, weight: float) -> LossTokens:
    """The step's loss tokens from the sums over its replicas."""
    weighed = shard.plan.weighted_loss_tokens is not None
    return LossTokens(count=int(count), weight=weight if weighed else int(count))


def microbatch_loss(given: Tensor, microbatch: Microbatch, tokens: LossTokens) -> Tensor:
    """A microbatch's part of the step's mean loss: of logits [rows, vocabulary], or of a loss that
    the model has summed over its rows itself, a scalar."""
    if given.dim() == 0:
        return given / (tokens.weight or 1)
    labels = microbatch.labels.to(given.device)
    weights = None if microbatch.weights is None else microbatch.loss_weights.to(given.device)
    return token_weighted_loss(given, labels, tokens.weight, weights)


def global_loss_tokens(local_count: int, group: PeerGroup | None = None) -> int:
    """Loss tokens of all replicas, from this replica's count. Collective over ``group``."""
    if group is None:
        return local_count
    count = torch.tensor([local_count], dtype=torch.int64, device=group.device)
    group.post_sum(count, action="counting loss tokens").wait()
    return int(count)


def sum_gradients(module: Module, group: PeerGroup) -> None:
    """Add every parameter's gradient over the replicas of ``group``, in place.

    A replica without a gradient for some parameter (it encoded no audio) counts as zero. A
    parameter without one on *every* replica keeps None, as it would in a single process, so
    that the optimizer skips it there too.

    Raises PeerError where a replica died or hung. Collective over ``group``.
    """
    sum_gradients_of(module.parameters(), group)


def sum_gradients_of(parameters: Iterable[Parameter], group: PeerGroup) -> None:
    """As ``sum_gradients``, of these parameters."""
    parameters = [p for p in parameters if p.requires_grad]
    if group.size == 1 or not parameters:
        return
    having = [float(p.grad is not None) for p in parameters]
    owners = sum_numbers(having, group, action="the gradient sum")
    owned = [p for p, count in zip(parameters, owners, strict=True) if count]
    in_flight = [_start_bucket(bucket, group) for bucket in _buckets(owned)]
    for bucket, flat, transfer in in_flight:
        transfer.wait()
        _unflatten(bucket, flat)


def share_out(parameters: Iterable[Parameter], replicas: int) -> None:
    """Divide gradients that so many replicas have alike, so that ``sum_gradients`` gives them as
    they are, beside what is added meanwhile."""
    for parameter in parameters if replicas > 1 else ():
        if parameter.grad is not None:
            parameter.grad.div_(replicas)


def _start_bucket(
    bucket: list[Parameter], group: PeerGroup
) -> tuple[list[Tensor], Tensor, Transfer]:
    grads = [local_gradient(parameter) for parameter in bucket]
    flat = torch.cat([grad.reshape(-1) for grad in grads])
    return grads, flat, group.post_sum(flat, action="the gradient sum")


def local_gradient(parameter: Parameter) -> Tensor:
    """What this rank holds of the parameter's gradient, zeros where it has none; a part of it where
    tensor ranks share the weight, cut as the weight is."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    grad = parameter.grad.detach()
    if not isinstance(grad, DTensor):
        return grad
    if isinstance(parameter, DTensor) and grad.placements != parameter.placements:
        grad = parameter.grad = grad.redistribute(placements=parameter.placements)
    return grad.to_local()


def _unflatten(grads: list[Tensor], flat: Tensor) -> None:
    start = 0
    for grad in grads:
        grad.copy_(flat.narrow(0, start, grad.numel()).view_as(grad))
        start += grad.numel()


def _buckets(parameters: Iterable[Parameter]) -> Iterator[list[Parameter]]:
    """Runs of parameters of one type and device, each of about BUCKET_BYTES."""
    kinds: dict[tuple[torch.dtype, torch.device], list[Parameter]] = {}
    for parameter in parameters:
        kinds.setdefault((parameter.dtype, parameter.device), []).append(parameter)
    for alike in kinds.values():
        bucket: list[Parameter] = []
        size_bytes = 0
        for parameter in alike:
            bucket.append(parameter)
            size_bytes += parameter.numel() * parameter.element_size()
            if size_bytes >= BUCKET_BYTES:
                yield bucket
                bucket, size_bytes = [], 0
        if bucket:
            yield bucket
