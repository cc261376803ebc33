"""Attention of one block, packed queries against packed keys, and which kernel computes it.

The interface between the ring and the hardware. For every query row and head, a kernel gives the
attention over the block's keys alone and the log-sum-exp of its scores, from which the ring merges
blocks exactly. Given the *merged* output and log-sum-exp, it also gives the block's part of the
gradients (FlashAttention's backward needs no more than that).

Shapes: q [query rows, heads, head_dim]; k [key rows, kv heads, head_dim]; v [key rows, kv heads,
value_dim], mostly the same; ``heads`` is a multiple of ``kv heads`` (grouped queries: query head h
uses kv head h // (heads // kv heads)); lse [heads, query rows]. Every sequence of a block has at
least one query and one key; a causal block has equal numbers of both.

    kernel   computes                                            where
    flash    causal, full, windows; half precision, heads ≤ 256  a GPU of capability 8.0 or more;
                                                                 FA3 those of 9.0
    flex     every mask, any floating type                       a GPU with Triton
    plain    everything                                          everywhere, in a loop
"""

import importlib.util
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, Protocol, get_args

import torch
from torch import Tensor
from torch.nn.attention import current_flash_attention_impl

from trainer_client.notices import SlowAttention, tell
from trainer_client.runtime.faults import LayoutError
from trainer_client.runtime.flash_kernel import (
    FLASH_CAPABILITY,
    FLASH_DTYPES,
    FLASH_GENERATIONS,
    FLASH_HEAD_DIM,
    FlashKernel,
)
from trainer_client.runtime.flex_kernel import FLEX_LEAST_DIM, FlexKernel
from trainer_client.runtime.plain_kernel import TILE_ROWS, PlainKernel, accumulation_dtype
from trainer_client.runtime.ring_layout import Block

__all__ = [
    "BlockKernel",
    "FlashKernel",
    "FlexKernel",
    "Kernel",
    "KernelChoice",
    "PlainKernel",
    "accumulation_dtype",
    "choose_kernel",
    "kernel_for",
    "lacking_flash",
]

Kernel = Literal["auto", "flash", "flash2", "flash3", "flex", "plain"]
FLASH_VERSIONS: dict[Kernel, str] = {"flash2": "FA2", "flash3": "FA3"}
"""By torch's names for them. "flash" is whichever is active."""

log = logging.getLogger("trainer_client")


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
    """The kernel that computes a block. On a GPU without flash attention, the reason and the
    remedy."""

    kernel: Kernel
    reason: str = ""
    remedy: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """What a kernel is asked to compute.

    ``head_dim``: the wider one of queries' and values' heads. ``spans``: whether queries see ahead.
    ``flash``: the flash attention that is active in torch. ``lacking_flash``, ``lacking_flex``: why
    this torch has none on this device; empty: it has.
    """

    device_type: str
    dtype: torch.dtype
    head_dim: int
    spans: bool = False
    flash: str = "FA2"
    lacking_flash: str = ""
    lacking_flex: str = ""


def kernel_for(asked: Asked, wanted: Kernel = "auto") -> KernelChoice:
    """The kernel that is wanted, or by default flash where it computes this; for spans flex; else
    plain. On the host the default is plain.

    Raises LayoutError where the one that is wanted cannot compute this, or is unknown.
    """
    if wanted not in get_args(Kernel):
        raise LayoutError(f"kernel={wanted!r}; it is one of {', '.join(get_args(Kernel))}")
    flash, flex = next(_without_flash(asked), None), next(_without_flex(asked), None)
    obstacle = {"flash": flash, "flex": flex}.get(wanted)
    if wanted in FLASH_VERSIONS:
        obstacle = flash or _other_version(asked, FLASH_VERSIONS[wanted])
    if obstacle is not None:
        reason, remedy = obstacle
        raise LayoutError(
            f"kernel={wanted!r} cannot compute this attention: {reason}. To have it, {remedy}; or "
            'take kernel="auto"'
        )
    if wanted != "auto":
        return KernelChoice(kernel="flash" if wanted in FLASH_VERSIONS else wanted)
    if asked.device_type != "cuda":
        return KernelChoice(kernel="plain")
    if flash is None:
        return KernelChoice(kernel="flash")
    if asked.spans and flex is None:
        return KernelChoice(kernel="flex")
    reason, remedy = flex if asked.spans and flex is not None else flash
    return KernelChoice(kernel="plain", reason=reason, remedy=remedy)


def _without_flash(asked: Asked) -> Iterator[tuple[str, str]]:
    """Why flash attention cannot compute this, and what to do."""
    if asked.device_type != "cuda":
        yield f"the tensors are on the {asked.device_type}", "move the model to a GPU"
    if asked.dtype not in FLASH_DTYPES:
        yield (
            f"queries are {asked.dtype}, and flash attention takes float16 and bfloat16",
            "train in bfloat16, or cast q, k and v to it before attention",
        )
    if asked.head_dim > FLASH_HEAD_DIM:
        yield (
            f"head_dim is {asked.head_dim}, and flash attention takes up to {FLASH_HEAD_DIM}",
            "split the heads into narrower ones",
        )
    if asked.spans:
        yield (
            "rows of a span see what lies ahead of them, and flash attention knows causal masks "
            "and windows",
            'take kernel="flex" for layers with spans',
        )
    if asked.lacking_flash:
        yield (
            asked.lacking_flash,
            "take a torch built with FlashAttention-2 and a GPU of compute capability 8.0 or higher"
            if asked.flash == "FA2"
            else "go back to FlashAttention-2 by torch.nn.attention.restore_flash_attention_impl()",
        )


def _other_version(asked: Asked, wanted: str) -> tuple[str, str] | None:
    """Why torch's flash attention is not the version that is wanted, and what to do."""
    if asked.flash == wanted:
        return None
    reason = f"torch's flash attention is {asked.flash} in this process"
    if wanted == "FA2":
        return reason, "call torch.nn.attention.restore_flash_attention_impl() before training"
    return reason, (
        f'call torch.nn.attention.activate_flash_attention_impl("{wanted}") before training, with '
        "the package that has it installed"
    )


def _without_flex(asked: Asked) -> Iterator[tuple[str, str]]:
    """Why flex attention cannot compute this, and what to do."""
    if asked.device_type != "cuda":
        yield (
            f"the tensors are on the {asked.device_type}, where flex attention has no backward",
            "move the model to a GPU",
        )
    if asked.lacking_flex:
        yield asked.lacking_flex, "install the triton that belongs to this torch"
    if asked.device_type == "cuda" and asked.head_dim < FLEX_LEAST_DIM:
        yield (
            f"head_dim is {asked.head_dim}, and flex attention takes {FLEX_LEAST_DIM} or more",
            "take fewer, wider heads",
        )


def choose_kernel(
    q: Tensor, v: Tensor | None = None, *, wanted: Kernel = "auto", spans: bool = False
) -> BlockKernel:
    """The kernel for these queries, and for values where their heads have another width. Where the
    default is plain on a GPU, a SlowAttention warning says why, once for each reason.

    Raises LayoutError as ``kernel_for``.
    """
    flash = current_flash_attention_impl() or "FA2"
    asked = Asked(
        device_type=q.device.type,
        dtype=q.dtype,
        head_dim=q.shape[-1] if v is None else max(q.shape[-1], v.shape[-1]),
        spans=spans,
        flash=flash,
        lacking_flash=lacking_flash(q.device, flash) if q.is_cuda else "",
        lacking_flex=lacking_flex() if q.is_cuda else "",
    )
    choice = kernel_for(asked, wanted)
    if choice.reason:
        tell_slow(choice.reason, choice.remedy)
    if q.is_cuda:
        note_kernel(choice.kernel, flash, q.dtype, asked.head_dim)
    return _KERNELS[choice.kernel]


_KERNELS: dict[Kernel, BlockKernel] = {
    "flash": FlashKernel(),
    "flex": FlexKernel(),
    "plain": PlainKernel(),
}


@lru_cache
def lacking_flash(device: torch.device, flash: str = "FA2") -> str:
    """Why this torch has no such flash attention on this GPU; empty where it has."""
    if flash == "FA2" and not torch.backends.cuda.is_flash_attention_available():
        return "this torch was built without flash attention"
    capability = torch.cuda.get_device_capability(device)
    has = f"the GPU has compute capability {'.'.join(map(str, capability))}"
    if capability < FLASH_CAPABILITY:
        return has
    generations = FLASH_GENERATIONS.get(flash)
    if generations is not None and capability[0] not in generations:
        known = " or ".join(f"{each}.0" for each in generations)
        return f"{flash} is active in torch, which takes {known}, and {has}"
    return ""


@lru_cache
def lacking_flex() -> str:
    """Why flex attention cannot be compiled for GPUs here; empty where it can."""
    found = importlib.util.find_spec("triton") is not None
    return "" if found else "triton, which compiles it, is not installed"


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


@lru_cache
def note_kernel(kernel: Kernel, flash: str, dtype: torch.dtype, head_dim: int) -> None:
    """Log once what a kind of attention is computed with."""
    name = f"flash ({flash})" if kernel == "flash" else kernel
    log.info("attention of %s heads of %d: kernel %s", dtype, head_dim, name)
