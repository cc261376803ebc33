"""The ring as an attention implementation of transformers, for the layers of a text decoder.

    decode ─ packed=PackAttention ─▶ model ─ **kwargs ─▶ layer ─ **kwargs ─▶ attend ─▶ the ring

The pack travels to every layer as a keyword argument. So nothing is global, and a layer that is
computed again in the backward pass (gradient checkpointing) finds its own microbatch's pack, and a
compiled layer is one graph for all packs.

transformers builds no mask for an implementation whose name it has no mask function for, and so
none here: which rows see which is the pack's affair. A window that a model puts into its mask alone
would be lost so, without a word of its layers: `note_mask_windows` writes it down, and `attend`
misses it.
"""

import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from transformers import AttentionInterface

from trainer_client.adapters.transformers.faults import UnsupportedModel
from trainer_client.runtime import Kernel, PackedAttention

RING = "dataservice_ring"  # the implementation's name in transformers

DEGREE_ONE = "give the job plan: {strategy: packing, static_degree: 1}"


@dataclass(frozen=True, kw_only=True, slots=True)
class PackAttention:
    """Attention over one microbatch's pack, as a decoder's layers ask for it.

    ``spans``: int64 [rows]; rows of one number >= 0 see one another in both directions (Gemma 3's
    images), -1 marks the others. None where all attention is causal.
    """

    ring: PackedAttention
    spans: Tensor | None = None
    kernel: Kernel = "auto"


def note_mask_windows(decoder: Any) -> None:
    """Write down at each part of a decoder the window, in tokens, that its library's masks have in
    that part's layer: `window_of_mask`, or None where there is none that could hide a token.

    It is an attribute, found before training, because layers compile: what looked up its own
    number in the config would be one graph for each layer.
    """
    config = decoder.config
    longest = getattr(config, "max_position_embeddings", None) or sys.maxsize
    window = getattr(config, "sliding_window", None) if _masks_windows(decoder) else None
    if not window or window >= longest:
        window = None
    kinds = getattr(config, "layer_types", None)
    sliding = (
        None if kinds is None else [i for i, k in enumerate(kinds) if k == "sliding_attention"]
    )
    for part in decoder.modules():
        slides = sliding is None or getattr(part, "layer_idx", None) in sliding
        part.window_of_mask = window if slides else None


def _masks_windows(decoder: Any) -> bool:
    """Whether a decoder's own code makes masks of windows; others may have a number for them, as
    many a Llama's config has, and never look at it."""
    code = [sys.modules.get(kind.__module__) for kind in type(decoder).__mro__]
    return any(hasattr(module, "create_sliding_window_causal_mask") for module in code)


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
            f"{type(module).__name__} was called without the pack that run_step gives the model. "
            "In run_step that means that a layer does not pass on the arguments which it is given, "
            "as Nemotron's do not; such a model cannot be trained from packs. Outside of run_step "
            "the model has the ring still: to evaluate or generate, call "
            'set_attn_implementation("sdpa") on it; the next training step takes the ring again.'
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
    if sliding_window is None and (lost := getattr(module, "window_of_mask", None)) is not None:
        longest = getattr(module.config, "max_position_embeddings", None)
        raise UnsupportedModel(
            f"{type(module).__name__} has a window of {lost} tokens in its mask alone, and the "
            f"ring makes no masks; samples may have {longest} tokens (max_position_embeddings), so "
            "that training without the window would train another model. Where no sample of the "
            f"job is longer than {lost}, set sliding_window to {longest} in the model's config "
            "before trainable()"
        )
    q, k, v = (_rows(x) for x in (query, key, value))
    found = packed.ring(
        *(q, k, v), scale=scaling, window=sliding_window, spans=packed.spans, kernel=packed.kernel
    )
    return found[None], None


def _rows(states: Tensor) -> Tensor:
    """[1, heads, rows, dim] → [rows, heads, dim], under autocast in its type, as torch's own
    attention would have it."""
    rows = states[0].transpose(0, 1)
    device = rows.device.type
    if torch.is_autocast_enabled(device):
        rows = rows.to(torch.get_autocast_dtype(device))
    return rows


AttentionInterface.register(RING, attend)
