"""Attention of one block: packed queries against packed keys, with its log-sum-exp.

The seam between the ring and the hardware. A kernel gives for every query row and head the
attention over the block's keys alone and the log of the sum of its exponentials, from which
the ring merges blocks exactly; and, given the *merged* output and log-sum-exp, the block's
part of the gradients (FlashAttention's backward needs no more than that).

Shapes: q [query rows, heads, head_dim]; k, v [key rows, kv heads, head_dim], with ``heads`` a
multiple of ``kv heads`` (grouped queries: query head h uses kv head h // (heads // kv heads));
lse [heads, query rows]. Every sequence of a block has at least one query and one key; a
causal block has equal numbers of both.
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor

from trainer_client.runtime.ring_layout import Block

TILE_ROWS = 128  # query rows a plain tile scores at once: the scores should stay in cache


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Type in which outputs and gradients of blocks are merged."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class BlockKernel(Protocol):
    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, block: Block, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Output like q, and lse [heads, query rows] in the accumulation type."""
        ...

    def backward(
        self,
        grad_out: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        block: Block,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of q, k, v from this block; ``out`` and ``lse`` are the merged ones."""
        ...


def choose_kernel(q: Tensor) -> BlockKernel:
    """Flash attention where torch has it for this device and type, else the plain kernel."""
    half = q.dtype in (torch.float16, torch.bfloat16)
    fits = half and q.shape[-1] <= 256 and q.shape[-1] % 8 == 0
    return FlashKernel() if q.is_cuda and fits and _has_flash(q.device) else PlainKernel()


@lru_cache
def _has_flash(device: torch.device) -> bool:
    """Whether this torch was built with FlashAttention-2 and the GPU can run it (sm80 and on)."""
    built = torch.backends.cuda.is_flash_attention_available()
    return built and torch.cuda.get_device_capability(device) >= (8, 0)


class PlainKernel:
    """Matrix products and a softmax, tiled over queries; any device and floating type."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, block: Block, scale: float
    ) -> tuple[Tensor, Tensor]:
        dtype = accumulation_dtype(q.dtype)
        out = torch.empty(q.shape, dtype=dtype, device=q.device)
        lse = torch.empty(q.shape[1], q.shape[0], dtype=dtype, device=q.device)
        for query, key, visible in _tiles(block):
            scores = _scores(q[query], k[key], visible, scale)
            tile_lse = scores.logsumexp(dim=-1, keepdim=True)
            weights = (scores - tile_lse).exp_()
            out[query] = _ungroup(weights @ _heads_first(v[key]).unsqueeze(1))
            lse[:, query] = tile_lse.flatten(0, 1).squeeze(-1)
        return out, lse

    def backward(
        self,
        grad_out: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        block: Block,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        dtype = accumulation_dtype(q.dtype)
        kv_heads = k.shape[1]
        grad_q = torch.empty(q.shape, dtype=dtype, device=q.device)
        grad_k = torch.zeros(k.shape, dtype=dtype, device=q.device)
        grad_v = torch.zeros(v.shape, dtype=dtype, device=q.device)
        # delta [rows, heads, 1]: what the softmax's normalisation takes from every score
        delta = (grad_out.to(dtype) * out.to(dtype)).sum(dim=-1, keepdim=True)
        for query, key, visible in _tiles(block):
            tile_grad = _group(grad_out[query], kv_heads)
            queries, keys = _group(q[query], kv_heads), _heads_first(k[key]).unsqueeze(1)
            scores = _scores(q[query], k[key], visible, scale)
            tile_lse = _split_heads(lse[:, query], kv_heads).unsqueeze(-1)
            weights = (scores - tile_lse).exp_()
            grad_weights = tile_grad @ _heads_first(v[key]).unsqueeze(1).mT
            grad_scores = (grad_weights - _group(delta[query], kv_heads)) * weights * scale
            grad_q[query] = _ungroup(grad_scores @ keys)
            grad_k[key] += (grad_scores.mT @ queries).sum(dim=1).transpose(0, 1)
            grad_v[key] += (weights.mT @ tile_grad).sum(dim=1).transpose(0, 1)
        return grad_q, grad_k, grad_v


class FlashKernel:
    """Torch's own variable-length FlashAttention, as torch.nn.attention.varlen calls it.

    The operators below it are used because its public form recomputes nothing from a merged
    log-sum-exp, which the ring's backward needs.
    """

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, block: Block, scale: float
    ) -> tuple[Tensor, Tensor]:
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            q.contiguous(),
            k.contiguous(),
            v.contiguous(),
            block.queries.cu_seqlens,
            block.keys.cu_seqlens,
            block.queries.longest,
            block.keys.longest,
            0.0,
            block.causal,
            return_debug_mask=False,
            scale=scale,
        )
        return out, lse

    def backward(
        self,
        grad_out: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        block: Block,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        no_dropout = torch.zeros(2, dtype=torch.uint64, device=q.device)
        grads: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._flash_attention_backward(
            grad_out.contiguous(),
            q.contiguous(),
            k.contiguous(),
            v.contiguous(),
            out.contiguous(),
            lse.contiguous(),
            block.queries.cu_seqlens,
            block.keys.cu_seqlens,
            block.queries.longest,
            block.keys.longest,
            0.0,
            block.causal,
            no_dropout,
            torch.empty(0, device=q.device),
            scale=scale,
        )
        return grads


def _tiles(block: Block) -> Iterator[tuple[slice, slice, int | None]]:
    """Query rows, the key rows they can see, and for causal tiles the first query's place."""
    queries, keys = block.queries.bounds, block.keys.bounds
    for sequence in range(len(queries) - 1):
        first, last = queries[sequence], queries[sequence + 1]
        for start in range(first, last, TILE_ROWS):
            stop = min(start + TILE_ROWS, last)
            key_start = keys[sequence]
            key_stop = key_start + stop - first if block.causal else keys[sequence + 1]
            visible = start - first if block.causal else None
            yield slice(start, stop), slice(key_start, key_stop), visible


def _scores(q: Tensor, k: Tensor, visible: int | None, scale: float) -> Tensor:
    """Scaled scores [kv heads, group, queries, keys]; future keys of a causal tile are -inf."""
    scores = _group(q, k.shape[1]) @ _heads_first(k).unsqueeze(1).mT
    scores *= scale
    if visible is not None:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device)
        scores.masked_fill_(future.triu_(visible + 1), float("-inf"))
    return scores


def _heads_first(rows: Tensor) -> Tensor:
    """[rows, heads, dim] → [heads, rows, dim] in the accumulation type."""
    return rows.to(accumulation_dtype(rows.dtype)).transpose(0, 1)


def _group(rows: Tensor, kv_heads: int) -> Tensor:
    """[rows, heads, dim] → [kv heads, group, rows, dim] in the accumulation type."""
    return _split_heads(_heads_first(rows), kv_heads)


def _split_heads(tensor: Tensor, kv_heads: int) -> Tensor:
    """[heads, ...] → [kv heads, group, ...]."""
    group = tensor.shape[0] // kv_heads
    return tensor.reshape(kv_heads, group, *tensor.shape[1:])


def _ungroup(grouped: Tensor) -> Tensor:
    """[kv heads, group, rows, dim] → [rows, heads, dim]."""
    return grouped.flatten(0, 1).transpose(0, 1)
