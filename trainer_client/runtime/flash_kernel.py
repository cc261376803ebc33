"""The flash kernel of attention blocks: torch's own variable-length FlashAttention.

It calls the operators below ``torch.nn.attention.varlen``, because the ring's backward needs
gradients from a merged log-sum-exp, which the public function does not offer. Which FlashAttention
stands behind them is torch's own switch: version 2 is built in, and
``torch.nn.attention.activate_flash_attention_impl("FA3")`` or ``("FA4")`` puts another in its
place. Heads of a width that the operators do not take, and values that are narrower than queries
(multi-head latent attention), are padded with zeros, which changes nothing but the time.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from trainer_client.runtime.ring_layout import Block

FLASH_HEAD_DIM = 256  # the largest that torch's FlashAttention-2 takes
FLASH_MULTIPLE = 8
FLASH_DTYPES = (torch.float16, torch.bfloat16)
FLASH_CAPABILITY = (8, 0)
FLASH_GENERATIONS = {"FA3": (9,), "FA4": (9, 10)}  # those that torch lets them run on


class FlashKernel:
    """See ``BlockKernel``; for causal and full blocks and windows, in half precision on a GPU."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, block: Block, scale: float
    ) -> tuple[Tensor, Tensor]:
        width = _width(q, v)
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            _widened(q, width),
            _widened(k, width),
            _widened(v, width),
            *_bounds(block),
            0.0,
            block.causal,
            return_debug_mask=False,
            scale=scale,
            **_window(block),
        )
        return _narrowed(out, v.shape[2]), lse

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
        width = _width(q, v)
        no_dropout = torch.empty(2, dtype=torch.uint64, device=q.device)  # which nobody reads
        grad_q, grad_k, grad_v = torch.ops.aten._flash_attention_backward(
            *(_widened(rows, width) for rows in (grad_out, q, k, v, out)),
            lse.contiguous(),
            *_bounds(block),
            0.0,
            block.causal,
            no_dropout,
            torch.empty(0, device=q.device),
            scale=scale,
            **_window(block),
        )
        widths = q.shape[2], k.shape[2], v.shape[2]
        narrowed = map(_narrowed, (grad_q, grad_k, grad_v), widths)
        return next(narrowed), next(narrowed), next(narrowed)


def _bounds(block: Block) -> tuple[Tensor, Tensor, int, int]:
    queries, keys = block.queries, block.keys
    return queries.cu_seqlens, keys.cu_seqlens, queries.longest, keys.longest


def _window(block: Block) -> dict[str, int]:
    """Flash counts the keys before a query's own."""
    if block.window is None:
        return {}
    return {"window_size_left": block.window - 1, "window_size_right": 0}


def _width(q: Tensor, v: Tensor) -> int:
    """The width at which the operators compute queries, keys and values alike."""
    widest = max(q.shape[2], v.shape[2])
    return -(-widest // FLASH_MULTIPLE) * FLASH_MULTIPLE


def _widened(rows: Tensor, width: int) -> Tensor:
    missing = width - rows.shape[2]
    return pad(rows, (0, missing)) if missing else rows.contiguous()


def _narrowed(rows: Tensor, width: int) -> Tensor:
    return rows if rows.shape[2] == width else rows[..., :width].contiguous()
