"""The plain kernel of attention blocks: matrix products and a softmax, tiled over queries.

It runs on any device and takes any floating type, any mask and any width of heads. It is what CPUs
use, and what the other kernels are compared with; on a GPU it is a slow loop.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from trainer_client.runtime.ring_layout import Block

TILE_ROWS = 128  # query rows in a tile, whose scores should stay in cache


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type in which outputs and gradients of blocks are merged."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class PlainKernel:
    """See ``BlockKernel``."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, block: Block, scale: float
    ) -> tuple[Tensor, Tensor]:
        dtype = accumulation_dtype(q.dtype)
        out = torch.empty(*q.shape[:2], v.shape[2], dtype=dtype, device=q.device)
        lse = torch.empty(q.shape[1], q.shape[0], dtype=dtype, device=q.device)
        for query, key, hidden in _tiles(block):
            scores = _scores(q[query], k[key], hidden, scale)
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
        for query, key, hidden in _tiles(block):
            tile_grad = _group(grad_out[query], kv_heads)
            queries, keys = _group(q[query], kv_heads), _heads_first(k[key]).unsqueeze(1)
            scores = _scores(q[query], k[key], hidden, scale)
            tile_lse = _split_heads(lse[:, query], kv_heads).unsqueeze(-1)
            weights = (scores - tile_lse).exp_()
            grad_weights = tile_grad @ _heads_first(v[key]).unsqueeze(1).mT
            grad_scores = (grad_weights - _group(delta[query], kv_heads)) * weights * scale
            grad_q[query] = _ungroup(grad_scores @ keys)
            grad_k[key] += (grad_scores.mT @ queries).sum(dim=1).transpose(0, 1)
            grad_v[key] += (weights.mT @ tile_grad).sum(dim=1).transpose(0, 1)
        return grad_q, grad_k, grad_v


def _tiles(block: Block) -> Iterator[tuple[slice, slice, Tensor | None]]:
    """Query rows, the key rows that any of them sees, and which are hidden from which of them:
    bool [queries, keys], or None where all are seen."""
    queries, keys = block.queries.bounds, block.keys.bounds
    for sequence in range(len(queries) - 1):
        first, last = queries[sequence], queries[sequence + 1]
        begin, end = keys[sequence], keys[sequence + 1]
        for start in range(first, last, TILE_ROWS):
            query = slice(start, min(start + TILE_ROWS, last))
            if not block.causal:
                yield query, slice(begin, end), None
                continue
            behind = start - first if block.window is None else block.window - 1
            ahead = query.stop - first if block.spans is None else last - first
            key = slice(begin + max(0, start - first - behind), begin + ahead)
            # a causal block has its queries' own keys, in the same order
            yield query, key, _hidden(block, query, slice(key.start - begin + first, first + ahead))


def _hidden(block: Block, query: slice, key: slice) -> Tensor:
    """Which keys a query does not see, bool [queries, keys]; both are counted as queries."""
    device = block.queries.cu_seqlens.device
    behind = (  # of a query, how far its key lies behind
        torch.arange(query.start, query.stop, device=device)[:, None]
        - torch.arange(key.start, key.stop, device=device)
    )
    hidden = behind < 0
    if block.spans is not None:
        of_query, of_key = block.spans[query, None], block.spans[key]
        hidden &= (of_query != of_key) | (of_query < 0)
    if block.window is not None:  # cuts spans too, but not what lies ahead
        hidden |= behind >= block.window
    return hidden


def _scores(q: Tensor, k: Tensor, hidden: Tensor | None, scale: float) -> Tensor:
    """Scaled scores [kv heads, group, queries, keys]; those of hidden keys are -inf."""
    scores = _group(q, k.shape[1]) @ _heads_first(k).unsqueeze(1).mT
    scores *= scale
    if hidden is not None:
        scores.masked_fill_(hidden, float("-inf"))
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
