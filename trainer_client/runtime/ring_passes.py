"""The two passes of ring attention over a pack that is spread along the sequence over a CP group.

Keys and values travel round the ring while queries stay. In every step the next keys are
already on their way while this step's block is computed; partial outputs are merged by their
log-sum-exp in fp32 (fp64 for fp64 inputs). Backward goes round once more, and the gradients
of keys and values travel with them, one hop behind, until they are home. A pack that one replica
holds alone is one block, whose kernel gives output and gradients as they are.

Source: Ring Attention (Liu et al., 2023) with the zigzag cut described in ``ring_layout.py``;
block backward after FlashAttention-2 (Dao, 2023), algorithm 2.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from trainer_client.runtime.block_attention import BlockKernel, accumulation_dtype
from trainer_client.runtime.peers import PeerGroup, Transfer
from trainer_client.runtime.ring_layout import Block, RingLayout

KEYS_CHANNEL = 1
GRADIENTS_CHANNEL = 2


def pass_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    layout: RingLayout,
    group: PeerGroup,
    kernel: BlockKernel,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Output [rows, heads, value width] like q, and lse [heads, rows] in the accumulation type.

    Raises PeerError.
    """
    ring = _Ring(group, "forward")
    merged = _Merged(q, v)
    keys, values = k.contiguous(), v.contiguous()
    for step, block in enumerate(layout.blocks):
        last = step == layout.degree - 1
        if not last:
            arriving, transfer = ring.shift((keys, values), channel=KEYS_CHANNEL)
        if block is not None:
            merged.add(block, *_attend(kernel, q, keys, values, block, scale))
        if not last:
            transfer.wait()
            keys, values = arriving
    return merged.result()


def pass_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    layout: RingLayout,
    group: PeerGroup,
    kernel: BlockKernel,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients like q, k, v. Raises PeerError."""
    if layout.degree == 1 and (whole := layout.blocks[0]) is not None and _is_whole(whole, q):
        grads = kernel.backward(grad_out, q, k, v, out, lse, whole, scale)
        return grads[0].to(q.dtype), grads[1].to(k.dtype), grads[2].to(v.dtype)
    ring = _Ring(group, "backward")
    dtype = accumulation_dtype(q.dtype)
    grad_q = torch.zeros(q.shape, dtype=dtype, device=q.device)
    keys, values = k.contiguous(), v.contiguous()
    travelling = [torch.zeros(x.shape, dtype=dtype, device=k.device) for x in (k, v)]
    homing: Transfer | None = None
    for step, block in enumerate(layout.blocks):
        last = step == layout.degree - 1
        if not last:
            arriving, transfer = ring.shift((keys, values), channel=KEYS_CHANNEL)
        parts = None
        if block is not None:
            parts = _attend_backward(kernel, grad_out, q, keys, values, out, lse, block, scale)
        if homing is not None:  # what earlier members found for the keys now held here
            homing.wait()
        if block is not None and parts is not None:
            block.queries.add(grad_q, parts[0])
            block.keys.add(travelling[0], parts[1])
            block.keys.add(travelling[1], parts[2])
        if layout.degree > 1:
            travelling, homing = ring.shift(travelling, channel=GRADIENTS_CHANNEL)
        if not last:
            transfer.wait()
            keys, values = arriving
    if homing is not None:
        homing.wait()
    return grad_q.to(q.dtype), travelling[0].to(k.dtype), travelling[1].to(v.dtype)


def _is_whole(block: Block, q: Tensor) -> bool:
    """Whether these are all rows, as in a pack without padding."""
    return block.queries.cover(q.shape[0]) and block.keys.cover(q.shape[0])


class _Ring:
    """Hands tensors to the next member and takes the previous member's."""

    def __init__(self, group: PeerGroup, direction: str) -> None:
        self._group = group
        self._direction = direction

    def shift(self, tensors: Sequence[Tensor], *, channel: int) -> tuple[list[Tensor], Transfer]:
        """Start one hop; the tensors returned are filled once the transfer is waited for."""
        size, index = self._group.size, self._group.index
        arriving = [torch.empty_like(tensor) for tensor in tensors]
        transfer = self._group.post(
            [(tensor, (index + 1) % size) for tensor in tensors],
            [(tensor, (index - 1) % size) for tensor in arriving],
            action=f"ring attention ({self._direction})",
            channel=channel,
        )
        return arriving, transfer


class _Merged:
    """Output and log-sum-exp over the blocks seen so far.

    A first block over all rows (that of a pack without padding) is taken as it is: at degree 1
    nothing is merged or copied.
    """

    def __init__(self, q: Tensor, v: Tensor) -> None:
        self._q = q
        self._shape = (*q.shape[:2], v.shape[2])
        self._so_far: tuple[Tensor, Tensor] | None = None

    def add(self, block: Block, out: Tensor, lse: Tensor) -> None:
        """Merge one block: each side weighs exp of its own log-sum-exp minus the new one, so the
        block's weight is the logistic function of how far its own lies above the other."""
        rows = block.queries
        if self._so_far is None and rows.cover(self._q.shape[0]):
            self._so_far = out, lse
            return
        merged, merged_lse = self._so_far or self._nothing()
        merged = merged.to(accumulation_dtype(merged.dtype))
        before = rows.take(merged_lse, dim=1)
        weight = torch.sub(lse, before).sigmoid_().T.unsqueeze(-1)
        rows.put(merged_lse, torch.logaddexp(before, lse), dim=1)
        rows.move(merged, out.to(merged.dtype), weight)
        self._so_far = merged, merged_lse

    def result(self) -> tuple[Tensor, Tensor]:
        """Output of q's type, and lse [heads, rows] in the accumulation type."""
        out, lse = self._so_far or self._nothing()
        return out.to(self._q.dtype), lse

    def _nothing(self) -> tuple[Tensor, Tensor]:
        q, dtype = self._q, accumulation_dtype(self._q.dtype)
        lse = torch.full((q.shape[1], q.shape[0]), -math.inf, dtype=dtype, device=q.device)
        return torch.zeros(self._shape, dtype=dtype, device=q.device), lse


def _attend(
    kernel: BlockKernel, q: Tensor, keys: Tensor, values: Tensor, block: Block, scale: float
) -> tuple[Tensor, Tensor]:
    return kernel.forward(
        block.queries.take(q), block.keys.take(keys), block.keys.take(values), block, scale
    )


def _attend_backward(
    kernel: BlockKernel,
    grad_out: Tensor,
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    out: Tensor,
    lse: Tensor,
    block: Block,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    rows = block.queries
    return kernel.backward(
        rows.take(grad_out),
        rows.take(q),
        block.keys.take(keys),
        block.keys.take(values),
        rows.take(out),
        rows.take(lse, dim=1),
        block,
        scale,
    )
