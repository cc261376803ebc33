"""Exact attention over a pack that is spread along the sequence over a CP group.

Keys and values travel round the ring while queries stay. In every step the next keys are
already on their way while this step's block is computed; partial outputs are merged by their
log-sum-exp in fp32 (fp64 for fp64 inputs). Backward goes round once more, and the gradients
of keys and values travel with them, one hop behind, until they are home.

Source: Ring Attention (Liu et al., 2023) with the zigzag cut described in ``ring_layout.py``;
block backward after FlashAttention-2 (Dao, 2023), algorithm 2.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from trainer_client.runtime.block_attention import BlockKernel, accumulation_dtype, choose_kernel
from trainer_client.runtime.faults import LayoutError
from trainer_client.runtime.peers import PeerGroup, Transfer
from trainer_client.runtime.ring_layout import Block, RingLayout, build_ring_layout

KEYS_CHANNEL = 1
GRADIENTS_CHANNEL = 2


class PackedAttention:
    """Attention over one microbatch's pack; bind it once and call it in every layer.

    Parameters
    ----------
    cu_seqlens: S+1 offsets, tokens, of the *whole* padded pack (not of the local rows).
    group: the pack's CP group, or None for a pack that one replica holds alone.
    lengths: S true lengths, tokens. Full attention needs them where sequences are padded;
        for causal attention they only save work. Rows of padding get zeros.
    layouts: by ``causal``, what would otherwise be worked out from these in the first layer: a
        microbatch's own, on the device that computes.
    """

    def __init__(
        self,
        cu_seqlens: Tensor | Sequence[int],
        *,
        group: PeerGroup | None = None,
        lengths: Tensor | Sequence[int] | None = None,
        layouts: Mapping[bool, RingLayout] | None = None,
    ) -> None:
        self.group = group or PeerGroup((0,), index=0)
        self._cu_seqlens = _on_host(cu_seqlens)
        self._lengths = None if lengths is None else _on_host(lengths)
        self._prepared = layouts or {}
        self._layouts: dict[tuple[bool, torch.device], RingLayout] = {}

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        causal: bool = True,
        scale: float | None = None,
    ) -> Tensor:
        """Attention of q [rows, heads, dim] over k, v [rows, kv heads, dim] → like q.

        ``rows`` are the local rows, ``cu_seqlens[-1] / d``. ``scale``: 1/√dim when None.

        Raises
        ------
        LayoutError: shapes contradict the pack or one another, or q, k and v differ in type.
        PeerError: a member of the group died or hung.
        """
        layout = self._layout(causal, q.device)
        _check_shapes(q, k, v, layout)
        scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
        out: Tensor = _RingAttention.apply(q, k, v, layout, self.group, scale)  # type: ignore[no-untyped-call]
        return out

    def _layout(self, causal: bool, device: torch.device) -> RingLayout:
        if causal in self._prepared:
            return self._prepared[causal]
        key = (causal, device)
        if key not in self._layouts:
            self._layouts[key] = build_ring_layout(
                self._cu_seqlens,
                degree=self.group.size,
                cp_rank=self.group.index,
                causal=causal,
                lengths=self._lengths,
                device=device,
            )
        return self._layouts[key]


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor | Sequence[int],
    *,
    group: PeerGroup | None,
    causal: bool = True,
    scale: float | None = None,
    lengths: Tensor | Sequence[int] | None = None,
) -> Tensor:
    """One call of ``PackedAttention``; see there."""
    attention = PackedAttention(cu_seqlens, group=group, lengths=lengths)
    return attention(q, k, v, causal=causal, scale=scale)


def _on_host(values: Tensor | Sequence[int]) -> list[int]:
    return values.tolist() if isinstance(values, Tensor) else [int(value) for value in values]


def _check_shapes(q: Tensor, k: Tensor, v: Tensor, layout: RingLayout) -> None:
    if q.dim() != 3 or k.dim() != 3 or k.shape != v.shape or q.shape[2] != k.shape[2]:
        raise LayoutError(
            f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)} must be "
            "[rows, heads, head_dim] with equal k and v and one head_dim"
        )
    if q.shape[0] != layout.rows or k.shape[0] != layout.rows:
        raise LayoutError(
            f"q has {q.shape[0]} rows and k {k.shape[0]}, but this pack gives each of its "
            f"{layout.degree} replicas {layout.rows}; pass cu_seqlens of the whole padded pack"
        )
    if q.shape[1] % k.shape[1]:
        raise LayoutError(
            f"{q.shape[1]} query heads cannot share {k.shape[1]} key heads; "
            "the first must be a multiple of the second"
        )
    if not q.dtype == k.dtype == v.dtype:
        half = next((t.dtype for t in (v, k, q) if t.dtype.itemsize == 2), v.dtype)
        raise LayoutError(
            f"q is {q.dtype}, k {k.dtype} and v {v.dtype}, but attention takes one type; cast "
            f"them before it, such as q.to({half}), k.to({half}), v.to({half}). Rotary embeddings "
            "in float32 under autocast leave q and k wider than v"
        )


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


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layout: RingLayout,
        group: PeerGroup,
        scale: float,
    ) -> Tensor:
        kernel = choose_kernel(q)
        ring = _Ring(group, "forward")
        merged = _Merged(q)
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
        out, lse = merged.result()
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.layout, ctx.group, ctx.scale, ctx.kernel = layout, group, scale, kernel
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        layout: RingLayout = ctx.layout
        ring = _Ring(ctx.group, "backward")
        dtype = accumulation_dtype(q.dtype)
        grad_q = torch.zeros(q.shape, dtype=dtype, device=q.device)
        keys, values = k.contiguous(), v.contiguous()
        grads = [torch.zeros(k.shape, dtype=dtype, device=k.device) for _ in range(2)]
        homing: Transfer | None = None
        for step, block in enumerate(layout.blocks):
            last = step == layout.degree - 1
            if not last:
                arriving, transfer = ring.shift((keys, values), channel=KEYS_CHANNEL)
            parts = None
            if block is not None:
                parts = _attend_backward(
                    ctx.kernel, grad_out, q, keys, values, out, lse, block, ctx.scale
                )
            if homing is not None:  # what earlier members found for the keys now held here
                homing.wait()
            if block is not None and parts is not None:
                block.queries.add(grad_q, parts[0])
                block.keys.add(grads[0], parts[1])
                block.keys.add(grads[1], parts[2])
            if layout.degree > 1:
                grads, homing = ring.shift(grads, channel=GRADIENTS_CHANNEL)
            if not last:
                transfer.wait()
                keys, values = arriving
        if homing is not None:
            homing.wait()
        return grad_q.to(q.dtype), grads[0].to(k.dtype), grads[1].to(v.dtype), None, None, None


class _Merged:
    """Output and log-sum-exp over the blocks seen so far.

    A first block over all rows (that of a pack without padding) is taken as it is: at degree 1
    nothing is merged or copied.
    """

    def __init__(self, q: Tensor) -> None:
        self._q = q
        self._so_far: tuple[Tensor, Tensor] | None = None

    def add(self, block: Block, out: Tensor, lse: Tensor) -> None:
        """Merge one block: each side weighs exp of its own log-sum-exp minus the new one."""
        rows = block.queries
        if self._so_far is None and rows.cover(self._q.shape[0]):
            self._so_far = out, lse
            return
        merged, merged_lse = self._so_far or self._nothing()
        merged = merged.to(accumulation_dtype(merged.dtype))
        before = rows.take(merged_lse, dim=1)
        after = torch.logaddexp(before, lse)
        kept = (before - after).exp().T.unsqueeze(-1)
        new = (lse - after).exp().T.unsqueeze(-1)
        rows.put(merged, rows.take(merged) * kept + out * new)
        rows.put(merged_lse, after, dim=1)
        self._so_far = merged, merged_lse

    def result(self) -> tuple[Tensor, Tensor]:
        """Output like q, and lse [heads, rows] in the accumulation type."""
        out, lse = self._so_far or self._nothing()
        return out.to(self._q.dtype), lse

    def _nothing(self) -> tuple[Tensor, Tensor]:
        q, dtype = self._q, accumulation_dtype(self._q.dtype)
        lse = torch.full((q.shape[1], q.shape[0]), -math.inf, dtype=dtype, device=q.device)
        return torch.zeros(q.shape, dtype=dtype, device=q.device), lse


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
