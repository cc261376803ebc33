"""Loss weighted by tokens over the whole global batch, and gradients summed over replicas.

Every replica divides its own sum of cross-entropies by the number of loss tokens of *all*
replicas, and gradients are added, not averaged. So the result is the mean over the global batch's
tokens, independent of how they were packed and divided among replicas.

A trainer that lets DDP or FSDP reduce gradients gets their average: ``gradients.py`` multiplies
the loss by the number of replicas to make that a sum.
"""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.nn.functional import cross_entropy

from trainer_client.runtime.faults import LayoutError
from trainer_client.runtime.peers import PeerGroup, Transfer

IGNORED = -100
BUCKET_BYTES = 25 * 2**20  # bytes of gradients in one all-reduce; DDP's default


def token_weighted_loss(logits: Tensor, labels: Tensor, total_loss_tokens: int) -> Tensor:
    """Sum of cross-entropies over this replica's rows / loss tokens of the global batch.

    Parameters
    ----------
    logits: [..., vocabulary]. labels: [...], already shifted by the worker: the target of a
        row is the label of the same row; -100 marks rows without one.
    total_loss_tokens: labels other than -100 in the step, over all replicas and microbatches.
        A step without any (all its samples quarantined) gives 0 and zero gradients.

    Raises LayoutError where logits and labels differ in shape.
    """
    if logits.shape[:-1] != labels.shape:
        raise LayoutError(
            f"logits {tuple(logits.shape)} and labels {tuple(labels.shape)} differ; "
            "the decoder must give one row of logits per local token"
        )
    rows = logits.reshape(-1, logits.shape[-1])
    if rows.dtype in (torch.float16, torch.bfloat16):
        rows = rows.float()
    total = cross_entropy(rows, labels.reshape(-1), ignore_index=IGNORED, reduction="sum")
    return total / max(total_loss_tokens, 1)


def count_loss_tokens(labels: Iterable[Tensor]) -> int:
    """Labels other than -100."""
    counts = [(tensor != IGNORED).sum() for tensor in labels]
    return int(torch.stack(counts).sum()) if counts else 0  # waits for the device once


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
    if group.size == 1:
        return
    parameters = [p for p in module.parameters() if p.requires_grad]
    if not parameters:
        return
    owners = torch.tensor(
        [p.grad is not None for p in parameters], dtype=torch.int32, device=group.device
    )
    group.post_sum(owners, action="the gradient sum").wait()
    owned = [p for p, count in zip(parameters, owners.tolist(), strict=True) if count]
    in_flight = [_start_bucket(bucket, group) for bucket in _buckets(owned)]
    for bucket, flat, transfer in in_flight:
        transfer.wait()
        _unflatten(bucket, flat)


def _start_bucket(
    bucket: list[Parameter], group: PeerGroup
) -> tuple[list[Parameter], Tensor, Transfer]:
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in bucket]
    flat = torch.cat([grad.detach().reshape(-1) for grad in grads])
    return bucket, flat, group.post_sum(flat, action="the gradient sum")


def _unflatten(bucket: list[Parameter], flat: Tensor) -> None:
    start = 0
    for parameter in bucket:
        grad = flat.narrow(0, start, parameter.numel()).view_as(parameter)
        start += parameter.numel()
        if parameter.grad is None:
            parameter.grad = grad.clone()  # not a view, which would keep the bucket alive
        else:
            parameter.grad.copy_(grad)


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
