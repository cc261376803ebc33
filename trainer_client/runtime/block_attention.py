"""Attention of one block: packed queries against packed keys, with its log-sum-exp.

The interface between the ring and the hardware. For every query row and head, a kernel gives the
attention over the block's keys alone and the log-sum-exp of its scores, from which the ring merges
blocks exactly. Given the *merged* output and log-sum-exp, it also gives the block's part of the
gradients (FlashAttention's backward needs no more than that).

Shapes: q [query rows, heads, head_dim]; k, v [key rows, kv heads, head_dim], with ``heads`` a
multiple of ``kv heads`` (grouped queries: query head h uses kv head h // (heads // kv heads));
lse [heads, query rows]. Every sequence of a block has at least one query and one key; a
causal block has equal numbers of both.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor

from trainer_client.notices import SlowAttention, tell
from trainer_client.runtime.ring_layout import Block

TILE_ROWS = 128  # query rows in a tile of the plain kernel, whose scores should stay in cache

# Largest head_dim of torch's FlashAttention-2.
FLASH_HEAD_DIM = 256
FLASH_MULTIPLE = 8
FLASH_CAPABILITY = (8, 0)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type in which outputs and gradients of blocks are merged."""
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


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelChoice:
    """Whether flash attention computes a block; if not on a GPU, the reason and the remedy."""

    flash: bool
    reason: str = ""
    remedy: str = ""


def kernel_for(
    *, device_type: str, dtype: torch.dtype, head_dim: int, lacking: str = ""
) -> KernelChoice:
    """The kernel for queries of this kind. ``lacking``: why this torch has no flash attention on
    this GPU, empty where it has. On the host the plain kernel is used."""
    if device_type != "cuda":
        return KernelChoice(flash=False)
    if dtype not in (torch.float16, torch.bfloat16):
        return KernelChoice(
            flash=False,
            reason=f"queries are {dtype}, and flash attention takes float16 and bfloat16",
            remedy="train in bfloat16, or cast q, k and v to it before attention",
        )
    if head_dim > FLASH_HEAD_DIM or head_dim % FLASH_MULTIPLE:
        return KernelChoice(
            flash=False,
            reason=f"head_dim is {head_dim}, and flash attention takes multiples of "
            f"{FLASH_MULTIPLE} up to {FLASH_HEAD_DIM}",
            remedy="pad the heads of q, k and v with zeros to such a width, cut the output, and "
            "give scale= of the true one",
        )
    if lacking:
        return KernelChoice(
            flash=False,
            reason=lacking,
            remedy="take a torch built with FlashAttention-2 and a GPU of compute capability 8.0 "
            "or higher",
        )
    return KernelChoice(flash=True)


def choose_kernel(q: Tensor) -> BlockKernel:
    """Flash attention where torch has it for this device and type, else the plain kernel; on a GPU
    the plain kernel comes with a SlowAttention warning, once for each reason."""
    choice = kernel_for(
        device_type=q.device.type,
        dtype=q.dtype,
        head_dim=q.shape[-1],
        lacking=lacking_flash(q.device) if q.is_cuda else "",
    )
    if choice.reason:
        tell_slow(choice.reason, choice.remedy)
    return FlashKernel() if choice.flash else PlainKernel()


@lru_cache
def lacking_flash(device: torch.device) -> str:
    """Why this torch has no FlashAttention-2 on this GPU; empty where it has."""
    if not torch.backends.cuda.is_flash_attention_available():
        return "this torch was built without flash attention"
    capability = torch.cuda.get_device_capability(device)
    if capability < FLASH_CAPABILITY:
        return f"the GPU has compute capability {'.'.join(map(str, capability))}"
    return ""


@lru_cache
def tell_slow(reason: str, remedy: str) -> None:
    """Warn that the plain kernel is in use on a GPU. Because of the cache, a process warns once
    for each reason."""
    tell(
        SlowAttention,
        f"attention on the GPU is computed by the plain kernel, a Python loop over {TILE_ROWS} "
        f"queries at a time, which is many times slower than flash attention: {reason}. "
        f"To have it fast, {remedy}.",
    )


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
        # delta [rows, heads, 1]: subtracted from every score's gradient by softmax's normalisation
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

    It calls the operators below that function, because the ring's backward needs gradients from a
    merged log-sum-exp, which the public function does not offer.
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
