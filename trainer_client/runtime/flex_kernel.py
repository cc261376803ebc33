"""The flex kernel of attention blocks: torch's flex attention, with the block's mask as a function.

It takes every mask: sequences of a pack, causal, windows, and spans whose rows see one another
(the images of Gemma 3). On a GPU it is compiled into a fused kernel that skips what no query sees;
on a CPU it would run unfused, which only tests do.

Flex attention gives gradients of its own output and log-sum-exp, o and l, not those of a block of
a merged output. With O and L merged over blocks, O = Σ o·exp(l − L), so that the gradients to hand
it are

    of o    g · w               w = exp(l − L), per row and head
    of l    Σ_dim g·(o − O) · w

and its backward pass runs its forward again. Source: Flex Attention (Dong et al., 2024).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import (
    AuxRequest,
    BlockMask,
    create_block_mask,
    flex_attention,
)

from trainer_client.runtime.plain_kernel import accumulation_dtype
from trainer_client.runtime.ring_layout import Block, Rows

FLEX_LEAST_DIM = 16  # narrower heads are not what its fused kernel takes

Compiler = Callable[[Callable[..., Any]], Callable[..., Any]]

_masks: WeakKeyDictionary[Block, BlockMask] = WeakKeyDictionary()


class FlexKernel:
    """See ``BlockKernel``; for any block. ``compiler`` compiles it, on any device; by default
    ``torch.compile`` does on GPUs, and nothing on CPUs, where torch compiles flex attention without
    log-sum-exp and gradients only."""

    def __init__(self, compiler: Compiler | None = None) -> None:
        self._compiler = compiler

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, block: Block, scale: float
    ) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            out, lse = self._attend([_heads_first(rows) for rows in (q, k, v)], block, scale)
        return _rows_first(out), lse[0].contiguous()

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
        with _recording():
            leaves = [_heads_first(rows.detach()).requires_grad_() for rows in (q, k, v)]
            own, own_lse = self._attend(leaves, block, scale)
        dtype = accumulation_dtype(q.dtype)
        weight = (own_lse.detach() - lse).exp()  # [1, heads, rows]
        wide = _heads_first(grad_out).to(dtype)
        apart = (wide * (own.detach().to(dtype) - _heads_first(out).to(dtype))).sum(-1)
        given = (wide * weight[..., None]).to(own.dtype), (apart * weight).to(own_lse.dtype)
        grads = torch.autograd.grad((own, own_lse), leaves, given)
        return _rows_first(grads[0]), _rows_first(grads[1]), _rows_first(grads[2])

    def _attend(self, qkv: list[Tensor], block: Block, scale: float) -> tuple[Tensor, Tensor]:
        """Output [1, heads, rows, width], and lse [1, heads, rows], of q, k and v as flex attention
        takes them."""
        q, k, v = qkv
        compiler = self._compiler or (compile_for_any_rows if q.is_cuda else _unfused)
        out, aux = _compiled(flex_attention, compiler)(
            *(q, k, v),
            block_mask=_mask_of(block, q.device, compiler),
            scale=scale,
            enable_gqa=q.shape[1] != k.shape[1],
            return_aux=AuxRequest(lse=True),
        )
        return out, aux.lse


@contextmanager
def _recording() -> Iterator[None]:
    """Record gradients. The ring calls kernels below its operator, where torch's dispatcher leaves
    out autograd, so that switching gradients on is not enough."""
    include = torch._C._dispatch_tls_local_include_set()
    exclude = torch._C._dispatch_tls_local_exclude_set() & torch._C._after_ADInplaceOrView_keyset
    with torch._C._ForceDispatchKeyGuard(include, exclude), torch.enable_grad():
        yield


def _heads_first(rows: Tensor) -> Tensor:
    """[rows, heads, dim] → [1, heads, rows, dim]."""
    return rows.transpose(0, 1)[None]


def _rows_first(heads: Tensor) -> Tensor:
    """[1, heads, rows, dim] → [rows, heads, dim]."""
    return heads[0].transpose(0, 1).contiguous()


def _mask_of(block: Block, device: torch.device, compiler: Compiler) -> BlockMask:
    """The block's mask, made once for all layers. Compiled, it never holds the whole mask of
    queries × keys."""
    if block not in _masks:
        rows = block.queries.bounds[-1], block.keys.bounds[-1]
        of_query, of_key = _sequences(block.queries, device), _sequences(block.keys, device)
        sees = _visible(block, of_query, of_key)
        create = _compiled(create_block_mask, compiler)
        made: BlockMask = create(sees, None, None, *rows, device=device)
        _masks[block] = made
    return _masks[block]


def _visible(block: Block, of_query: Tensor, of_key: Tensor) -> Callable[..., Tensor]:
    """Flex attention's mask function of (batch, head, query, key)."""
    causal, window, spans = block.causal, block.window, block.spans

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        visible = of_query[query] == of_key[key]
        if not causal:
            return visible
        reach = query >= key
        if spans is not None:
            reach = reach | ((spans[query] == spans[key]) & (spans[query] >= 0))
        if window is not None:  # cuts spans too, but not what lies ahead
            reach = reach & (query - key < window)
        return visible & reach

    return sees


def _sequences(rows: Rows, device: torch.device) -> Tensor:
    """The sequence of each row, int64 [rows]."""
    places = torch.arange(rows.bounds[-1], device=device)
    return torch.searchsorted(rows.cu_seqlens.to(places.dtype), places, right=True)


def compile_for_any_rows(function: Callable[..., Any]) -> Callable[..., Any]:
    """Packs differ in rows, so it is compiled once for all of them, for each kind of mask."""
    return torch.compile(function, dynamic=True)


def _unfused(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


@lru_cache
def _compiled(function: Callable[..., Any], compiler: Compiler) -> Callable[..., Any]:
    return compiler(function)
