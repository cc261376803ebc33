"""The ring as an attention implementation of transformers, for the layers of a text decoder.

    decode ─ packed=PackAttention ─▶ model ─ **kwargs ─▶ layer ─ **kwargs ─▶ attend ─▶ the ring

The pack travels to every layer as a keyword argument. So nothing is global, and a layer that is
computed again in the backward pass (gradient checkpointing) finds its own microbatch's pack.

transformers builds no mask for an implementation whose name it has no mask function for, and so
none here: which rows see which is the pack's affair.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from trainer_client.adapters.transformers.faults import UnsupportedModel
from trainer_client.runtime import PackedAttention

RING = "dataservice_ring"  # the implementation's name in transformers

DEGREE_ONE = "give the job plan: {strategy: packing, static_degree: 1}"


class PackAttention:
    """Attention over one microbatch's pack, as a decoder's layers ask for it.

    Parameters
    ----------
    ring: the pack's attention. degree: members of its CP group.
    cu_seqlens, lengths: padded offsets and true lengths of the pack's samples, tokens.
    spans: int64 [rows]; rows of one number ≥ 0 see one another in both directions (Gemma 3's
        images), -1 marks the others. None where all attention is causal.
    """

    def __init__(
        self,
        ring: PackedAttention,
        *,
        degree: int,
        cu_seqlens: Sequence[int],
        lengths: Sequence[int],
        spans: Tensor | None = None,
    ) -> None:
        self.calls = 0
        self._ring = ring
        self._degree = degree
        self._bounds = [
            (start, start + length)
            for (start, _), length in zip(pairwise(cu_seqlens), lengths, strict=True)
        ]
        self._longest = max(lengths, default=0)
        self._spans = spans
        self._visible: dict[int | None, list[Tensor]] = {}

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, *, scale: float | None, window: int | None
    ) -> Tensor:
        """Attention of q [rows, heads, dim] over k, v [rows, kv heads, dim] → like q.

        ``window``: tokens that a query sees, itself included. A window that holds every sample of
        the pack is none.

        Raises UnsupportedModel where a window or spans meet a CP degree above 1.
        """
        self.calls += 1
        windowed = window is not None and window < self._longest
        if not windowed and self._spans is None:
            return self._ring(q, k, v, scale=scale)
        if self._degree > 1:
            what = f"a sliding window of {window} tokens" if windowed else "bidirectional spans"
            raise UnsupportedModel(
                f"this layer attends with {what}, and the pack, whose longest sample has "
                f"{self._longest} tokens, is spread over {self._degree} replicas; the ring "
                f"computes causal attention only. Windows and spans are exact at CP degree 1: "
                f"{DEGREE_ONE}."
            )
        return self._masked(q, k, v, scale, window if windowed else None)

    def _masked(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float | None, window: int | None
    ) -> Tensor:
        """One sample after the other, each with its own mask; zeros at the padding."""
        out = torch.zeros_like(q)
        for (start, stop), visible in zip(self._bounds, self._masks(window, q.device), strict=True):
            query, key, value = (x[start:stop].transpose(0, 1)[None] for x in (q, k, v))
            found = scaled_dot_product_attention(
                query, key, value, attn_mask=visible, scale=scale, enable_gqa=True
            )
            out[start:stop] = found[0].transpose(0, 1)
        return out

    def _masks(self, window: int | None, device: torch.device) -> list[Tensor]:
        """Which key a query sees, bool [length, length] a sample; kept for the other layers."""
        if window not in self._visible:
            self._visible[window] = [
                self._mask(start, stop, window, device) for start, stop in self._bounds
            ]
        return self._visible[window]

    def _mask(self, start: int, stop: int, window: int | None, device: torch.device) -> Tensor:
        place = torch.arange(stop - start, device=device)
        behind = place[:, None] - place  # of a query, how far its key lies behind
        visible = behind >= 0
        if self._spans is not None:
            span = self._spans[start:stop].to(device)
            visible |= (span[:, None] == span) & (span >= 0)
        if window is not None:  # cuts spans too, as in Gemma 3; but not what lies ahead
            visible &= behind < window
        return visible


def attend(
    module: Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packed: PackAttention | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """What transformers calls in a layer: query [1, heads, rows, dim] → [1, rows, heads, dim].

    Raises UnsupportedModel where a layer asks for what the ring does not compute.
    """
    if packed is None:
        raise UnsupportedModel(
            "this model's attention is the ring, which needs the pack that run_step gives it. To "
            'evaluate or generate, call set_attn_implementation("sdpa") on the model; the next '
            "training step takes the ring again."
        )
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    asked = {
        "an attention mask": attention_mask is not None,
        "attention that is not causal": not causal,
        "a position bias": position_bias is not None,
        "a softcap of its scores (attn_logit_softcapping)": softcap is not None,
        "attention sinks": s_aux is not None,
        "dropout of attention weights (set attention_dropout to 0 in its config)": dropout > 0,
    }
    for what, is_asked in asked.items():
        if is_asked:
            raise UnsupportedModel(
                f"{type(module).__name__} asks for {what}, which the ring does not compute; "
                "training without it would train another model"
            )
    q, k, v = (_rows(x) for x in (query, key, value))
    return packed(q, k, v, scale=scaling, window=sliding_window)[None], None


def _rows(states: Tensor) -> Tensor:
    """[1, heads, rows, dim] → [rows, heads, dim], under autocast in its type, as torch's own
    attention would have it."""
    rows = states[0].transpose(0, 1)
    device = rows.device.type
    if torch.is_autocast_enabled(device):
        rows = rows.to(torch.get_autocast_dtype(device))
    return rows


AttentionInterface.register(RING, attend)
