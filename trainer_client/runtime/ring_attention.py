"""Exact attention over a pack, alone or spread along the sequence over a CP group.

PackedAttention ─ a handle ─▶ the operator ─ layout, kernel ─▶ the passes round the ring
this file                     ring_operator.py                 ring_passes.py
"""

import math
from collections.abc import Mapping, Sequence

from torch import Tensor

from trainer_client.runtime.block_attention import Kernel
from trainer_client.runtime.peers import PeerGroup
from trainer_client.runtime.ring_layout import RingLayout
from trainer_client.runtime.ring_operator import BoundPack, bind, packed_attention


class PackedAttention:
    """Attention over one microbatch's pack; bind it once and call it in every layer.

    A compiled layer takes it as an argument: its pack and group are no part of the compiled graph,
    so that every microbatch and group runs through the same one.

    Parameters
    ----------
    cu_seqlens: S+1 offsets, tokens, of the *whole* padded pack (not of the local rows).
    group: the pack's CP group, or None for a pack that one replica holds alone.
    lengths: S true lengths, tokens. Full attention needs them where sequences are padded;
        for causal attention they only save work. Rows of padding get zeros.
    layouts: by ``causal``, what would otherwise be worked out from these in the first layer: a
        microbatch's own, on the device that computes.

    ``handle``: under it the operator finds this pack.
    """

    def __init__(
        self,
        cu_seqlens: Tensor | Sequence[int],
        *,
        group: PeerGroup | None = None,
        lengths: Tensor | Sequence[int] | None = None,
        layouts: Mapping[bool, RingLayout] | None = None,
    ) -> None:
        self._pack = BoundPack(
            _on_host(cu_seqlens),
            None if lengths is None else _on_host(lengths),
            group or PeerGroup((0,), index=0),
            layouts or {},
        )
        self.handle = bind(self._pack)

    @property
    def group(self) -> PeerGroup:
        """Its CP group, of one where a replica holds the pack alone."""
        return self._pack.group

    @property
    def calls(self) -> int:
        """How often attention was computed over the pack, layers that were run again included."""
        return self._pack.calls

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        causal: bool = True,
        scale: float | None = None,
        window: int | None = None,
        spans: Tensor | None = None,
        kernel: Kernel = "auto",
    ) -> Tensor:
        """Attention of q [rows, heads, dim] over k [rows, kv heads, dim] and v [rows, kv heads,
        value dim] → [rows, heads, value dim].

        ``rows`` are the local rows, ``cu_seqlens[-1] / d``. ``scale``: 1/√dim when None.

        ``window``: tokens that a query sees, itself included. ``spans``: int64 [rows], left
        unchanged until the backward pass; rows of one number >= 0 also see those ahead of them in
        their sequence (the images of Gemma 3). Both are of causal attention at degree 1; a window
        that holds every sequence is none.

        ``kernel``: "auto" takes flash attention where it computes this, and on a GPU warns where
        it does not; "flash", "flash2", "flash3", "flex" and "plain" are demands. See
        ``block_attention.py``.

        Raises
        ------
        LayoutError: shapes contradict the pack or one another, q, k and v differ in type or are
            not floating of 16, 32 or 64 bits, or the kernel cannot compute this.
        PeerError: a member of the group died or hung.
        """
        scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
        out: Tensor
        out, _ = packed_attention(q, k, v, self.handle, causal, scale, window, spans, kernel)
        return out


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
