"""Attention over a pack as an operator of torch, so that compilers and checkpoints can name it.

    dataservice::packed_attention(q, k, v, pack, causal, scale, window, spans, kernel) → out, lse
    dataservice::packed_attention_backward(grad_out, q, k, v, out, lse, pack, ...) → gradients

An operator takes tensors and plain values, but attention needs its pack: the cut and the group.
``pack`` is a handle, a tensor of one number on the host, under which the pack is registered. To a
compiler it is a tensor like another, whose value it never looks at: all microbatches run through
one graph, and each graph's backward pass keeps the handles that its forward pass was given.

Lifetime: a pack stays registered as long as its handle's memory. Whoever needs the pack later, a
backward pass or a checkpoint's second forward pass, has saved the handle; when the last of them is
gone, so is the pack. The backward pass of an eager call keeps it whatever hooks make of saved
tensors (``save_on_cpu`` moves them elsewhere).

Communication inside is ordered by the data: within a graph, the rings of one pack follow one
another from layer to layer, on all members alike.
"""

import itertools
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, library

from trainer_client.runtime.block_attention import Kernel, choose_kernel
from trainer_client.runtime.faults import LayoutError
from trainer_client.runtime.peers import PeerGroup
from trainer_client.runtime.ring_layout import RingLayout, build_ring_layout, masked
from trainer_client.runtime.ring_passes import pass_backward, pass_forward

_packs: dict[int, "BoundPack"] = {}
_numbers = itertools.count()

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)  # of q, k and v
LayoutKey = tuple[bool, int | None, int | None, torch.device]


class BoundPack:
    """A pack and its group, with the layouts that its layers have asked for. ``prepared`` has those
    that came with the microbatch, by ``causal``.

    ``calls``: forward passes of attention over it, counted as they run, compiled or not.
    """

    def __init__(
        self,
        cu_seqlens: Sequence[int],
        lengths: Sequence[int] | None,
        group: PeerGroup,
        prepared: Mapping[bool, RingLayout],
    ) -> None:
        self.group = group
        self._prepared = prepared
        self.calls = 0
        self._cu_seqlens = cu_seqlens
        self._lengths = lengths
        # Spans lie beside their layout, so that no others can come to their address.
        self._layouts: dict[LayoutKey, tuple[RingLayout, Tensor | None]] = {}

    def layout(
        self, causal: bool, window: int | None, spans: Tensor | None, device: torch.device
    ) -> RingLayout:
        """The blocks of this member. Raises LayoutError."""
        if window is None and spans is None and causal in self._prepared:
            return self._prepared[causal]
        key = causal, window, None if spans is None else spans.data_ptr(), device
        if key not in self._layouts:
            self._layouts[key] = self._made(causal, window, spans, device), spans
        return self._layouts[key][0]

    def _made(
        self, causal: bool, window: int | None, spans: Tensor | None, device: torch.device
    ) -> RingLayout:
        """Of a window or spans, the rows of the layout without them."""
        if window is not None or spans is not None:
            lengths = self._lengths or np.diff(self._cu_seqlens).tolist()
            return masked(
                self.layout(causal, None, None, device),
                causal=causal,
                longest=max(lengths, default=0),
                window=window,
                spans=spans,
            )
        return build_ring_layout(
            self._cu_seqlens,
            degree=self.group.size,
            cp_rank=self.group.index,
            causal=causal,
            lengths=self._lengths,
            device=device,
        )


def bind(pack: BoundPack) -> Tensor:
    """A handle of the pack, which lives as long as the handle's memory."""
    number = next(_numbers)
    handle = torch.tensor(number, dtype=torch.int64, device="cpu")
    _packs[number] = pack
    weakref.finalize(handle.untyped_storage(), _packs.pop, number, None).atexit = False
    return handle


def bound_packs() -> int:
    """Packs that are registered now."""
    return len(_packs)


def _pack_of(handle: Tensor) -> BoundPack:
    found = _packs.get(int(handle))
    if found is None:
        raise LayoutError(
            f"pack {int(handle)} is gone, and a pass over its attention is still to come; its "
            "saved tensors were copied, or are of another process. Keep the PackedAttention until "
            "the backward pass is over"
        )
    return found


@library.custom_op("dataservice::packed_attention", mutates_args=())
def packed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pack: Tensor,
    causal: bool,
    scale: float,
    window: int | None,
    spans: Tensor | None,
    kernel: str,
) -> tuple[Tensor, Tensor]:
    """Output [rows, heads, value width], and lse [heads, rows] in the accumulation type."""
    bound = _pack_of(pack)
    layout = bound.layout(causal, window, spans, q.device)
    _check_shapes(q, k, v, layout)
    bound.calls += 1
    computed_by = choose_kernel(q, v, wanted=cast(Kernel, kernel), spans=_sees_ahead(layout))
    return pass_forward(q, k, v, layout=layout, group=bound.group, kernel=computed_by, scale=scale)


@library.custom_op("dataservice::packed_attention_backward", mutates_args=())
def packed_attention_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    pack: Tensor,
    causal: bool,
    scale: float,
    window: int | None,
    spans: Tensor | None,
    kernel: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients like q, k, v."""
    bound = _pack_of(pack)
    layout = bound.layout(causal, window, spans, q.device)
    computed_by = choose_kernel(q, v, wanted=cast(Kernel, kernel), spans=_sees_ahead(layout))
    return pass_backward(
        grad_out,
        *(q, k, v, out, lse),
        layout=layout,
        group=bound.group,
        kernel=computed_by,
        scale=scale,
    )


def _sees_ahead(layout: RingLayout) -> bool:
    return any(block is not None and block.spans is not None for block in layout.blocks)


@packed_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    rows, heads = q.shape[0], q.shape[1]
    return q.new_empty(rows, heads, v.shape[2]), q.new_empty(heads, rows, dtype=wide)


@packed_attention_backward.register_fake
def _(grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: object) -> tuple[Tensor, ...]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, pack, *ctx.settings, spans, ctx.kernel = inputs
    ctx.save_for_backward(q, k, v, *output, pack, spans)
    if type(pack) is Tensor:  # not while a compiler traces
        ctx.keeps = pack


def _backward(ctx: Any, grad_out: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    *tensors, pack, spans = ctx.saved_tensors
    grads = packed_attention_backward(grad_out, *tensors, pack, *ctx.settings, spans, ctx.kernel)
    return (*grads, *[None] * 6)


packed_attention.register_autograd(_backward, setup_context=_save)


def _check_shapes(q: Tensor, k: Tensor, v: Tensor, layout: RingLayout) -> None:
    flat = q.dim() == k.dim() == v.dim() == 3
    if not flat or k.shape[:2] != v.shape[:2] or q.shape[2] != k.shape[2]:
        raise LayoutError(
            f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)} must be "
            "[rows, heads, head_dim], with one head_dim of q and k, and as many heads of k as of v"
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
    if q.dtype not in FLOATS:
        raise LayoutError(
            f"q, k and v are {q.dtype}, and attention takes {', '.join(map(str, FLOATS))}; cast "
            "all three before it, such as q.to(torch.bfloat16)"
        )
