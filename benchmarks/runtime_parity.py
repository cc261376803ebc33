"""Whether the in-rank runtime computes the right thing on a device, before anything is timed.

ring        every member of a ring in turn, on one device, against fp64
flash3      the same by FlashAttention 3, where it is installed
mla         the same with values narrower than queries and keys
masks       windows, spans and whole attention by the kernels that take them, against fp64
compiled    a layer as one graph for packs of all lengths, against the same layer as it is
whole step  four processes on one device, with CP groups and exchanges, against one process
"""

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import pairwise
from typing import cast

import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn.attention import activate_flash_attention_impl, restore_flash_attention_impl

from benchmarks.runtime_model import Block, Size
from benchmarks.runtime_ranks import step_in_processes, step_of_one_process
from benchmarks.runtime_rows import Row
from trainer_client.positions import held_rows
from trainer_client.runtime import PackedAttention, PeerGroup
from trainer_client.runtime.block_attention import Kernel, lacking_flash

EXACT = 1e-10
HALF_SLACK = 2.0  # of half precision: how many times a fused call's own error
PROCESSES = 4
HEADS = 8

FLASH3_PACKAGE = "flash_attn_interface"  # as torch imports it

Tensors = tuple[Tensor, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Pack:
    """Queries, keys, values and the gradient of the output of a pack, [tokens, heads, dim], with
    the padded `bounds` of its samples and their true `lengths`. Values and output may be of another
    width than queries and keys."""

    bounds: list[int]
    lengths: list[int]
    tensors: Tensors

    def to(self, dtype: torch.dtype) -> "Pack":
        """In another type."""
        held = tuple(tensor.to(dtype) for tensor in self.tensors)
        return Pack(bounds=self.bounds, lengths=self.lengths, tensors=held)


@dataclass(frozen=True, kw_only=True, slots=True)
class Mask:
    """What a query sees: `window` tokens up to its own, and with `spans` also those of its span, of
    which SPAN rows follow one another, every other one."""

    name: str
    causal: bool = True
    window: int | None = None
    spans: bool = False

    def spans_of(self, rows: Tensor) -> Tensor:
        """The number of each row's span, -1 where it is in none."""
        number = rows // SPAN
        return torch.where(number % 2 == 0, number, -1)

    def visible(self, own: slice, device: torch.device) -> Tensor:
        """Of the rows of one sample, bool [queries, keys]."""
        rows = torch.arange(own.start, own.stop, device=device)
        behind = rows[:, None] - rows
        seen = behind >= 0
        if self.spans:
            span = self.spans_of(rows)
            seen |= (span[:, None] == span) & (span >= 0)
        if self.window is not None:
            seen &= behind < self.window
        return seen if self.causal else torch.ones_like(seen)


CAUSAL = Mask(name="causal")
SPAN = 24  # rows; an image's tokens, say
MASKS = (
    Mask(name="bidirectional", causal=False),
    Mask(name="a window", window=50),
    Mask(name="spans", spans=True),
    Mask(name="a window over spans", window=50, spans=True),
)


class OneMember:
    """A CP group of which one member runs: it is given the others' keys, and no gradients.

    `sent` are its own parts of the gradients of the keys and values of each member, since it adds
    them to nothing. A ring hands on keys first, so the t-th hop brings those of member i - t - 1;
    what travels on another channel than they are gradients.
    """

    def __init__(self, index: int, keys: Sequence[Tensors]) -> None:
        self.size, self.index = len(keys), index
        self.sent: dict[int, Tensors] = {}
        self._keys = keys
        self._keys_channel: int | None = None
        self._hops = 0

    def post(
        self,
        sends: Sequence[tuple[Tensor, int]],
        receives: Sequence[tuple[Tensor, int]],
        *,
        channel: int,
        **others: object,
    ) -> "OneMember":
        """Fill what would arrive."""
        if self._keys_channel is None:
            self._keys_channel = channel
        if channel != self._keys_channel:
            owner = (self.index - len(self.sent)) % self.size
            self.sent[owner] = tuple(tensor.clone() for tensor, _ in sends)
            for arriving, _ in receives:
                arriving.zero_()
            return self
        hop = self._hops % (self.size - 1)  # once in the forward pass, once in the backward
        self._hops += 1
        theirs = self._keys[(self.index - hop - 1) % self.size]
        for (arriving, _), key in zip(receives, theirs, strict=True):
            arriving.copy_(key)
        return self

    def wait(self) -> None:
        """It is in the stream's order."""


def ring_rows(size: Size, device: torch.device, dtype: torch.dtype) -> Iterator[Row]:
    """Output and gradients of rings of every degree, on a CPU in fp64, else in half precision."""
    for dim in size.parity_dims:
        for degree in size.parity_degrees:
            pack = random_pack(size.parity_lengths, degree, dim, device)
            yield ring_row(pack, degree, dtype, f"heads of {dim}, grouped queries")


def flash3_rows(size: Size, device: torch.device, dtype: torch.dtype) -> Iterator[Row]:
    """The same by FlashAttention 3, which torch's own switch puts in the place of 2 for as long;
    where there is none, one row that says why."""
    if lacking := lacking_flash3(device):
        what = "ring by FlashAttention 3 against fp64"
        yield Row(what=what, figure=f"skipped: {lacking}", bar=f"≤ {HALF_SLACK:g} × version 2")
        return
    degrees = 1, max(size.parity_degrees)
    packs = [
        (dim, degree, random_pack(size.parity_lengths, degree, dim, device))
        for dim in size.parity_dims
        for degree in degrees
    ]
    limits = [limit_of(pack, dtype) for *_, pack in packs]  # by version 2, before it is switched
    activate_flash_attention_impl("FA3")
    try:
        for (dim, degree, pack), limit in zip(packs, limits, strict=True):
            what = f"heads of {dim}, grouped queries, FlashAttention 3"
            yield ring_row(pack, degree, dtype, what, kernel="flash3", limit=limit)
    finally:
        restore_flash_attention_impl()


def lacking_flash3(device: torch.device) -> str:
    """Why there is no FlashAttention 3 here; empty where there is one."""
    if device.type != "cuda":
        return "it runs on GPUs"
    if importlib.util.find_spec(FLASH3_PACKAGE) is None:
        return f"{FLASH3_PACKAGE}, the package that has it, is not installed"
    return lacking_flash(device, "FA3")


def mla_rows(size: Size, device: torch.device, dtype: torch.dtype) -> Iterator[Row]:
    """The same with the heads of multi-head latent attention (DeepSeek-V2, section 2.1): values are
    narrower than queries and keys, and each query head has keys of its own."""
    dim, value_dim = size.mla_dims
    for degree in size.parity_degrees:
        pack = random_pack(
            size.parity_lengths, degree, dim, device, kv_heads=HEADS, value_dim=value_dim
        )
        what = f"queries and keys of {dim}, values of {value_dim} (MLA)"
        yield ring_row(pack, degree, dtype, what)


def ring_row(
    pack: Pack,
    degree: int,
    dtype: torch.dtype,
    what: str,
    *,
    kernel: Kernel = "auto",
    limit: float | None = None,
) -> Row:
    """The error of a ring over a pack, against fp64; `limit` by default that of ``limit_of``."""
    found = max(errors(ring(pack.to(dtype), degree, kernel), dense(pack)))
    limit = limit_of(pack, dtype) if limit is None else limit
    return Row(
        what=f"ring of {degree} against fp64, {what}, samples of 1 token: output and gradients",
        figure=f"{found:.1e} relative",
        bar=f"≤ {limit:.1e}",
        met=found <= limit,
    )


def limit_of(pack: Pack, dtype: torch.dtype) -> float:
    """The largest error that is right: in half precision by a fused call's own, else none."""
    if dtype.itemsize >= 4:
        return EXACT
    return HALF_SLACK * max(errors(ring(pack.to(dtype), 1), dense(pack)))


def random_pack(
    lengths: Sequence[int],
    degree: int,
    dim: int,
    device: torch.device,
    *,
    heads: int = HEADS,
    kv_heads: int | None = None,
    value_dim: int | None = None,
) -> Pack:
    """In fp64, rounded to bf16 so that half precision starts from the same numbers. By default four
    heads of queries share one of keys and values, and all heads have one width."""
    unit = 2 * degree
    bounds = [0]
    for length in lengths:
        bounds.append(bounds[-1] + -(-length // unit) * unit)
    generator = torch.Generator(device).manual_seed(dim * 100 + degree)
    kv_heads, value_dim = kv_heads or heads // 4, value_dim or dim
    shapes = (heads, dim), (kv_heads, dim), (kv_heads, value_dim), (heads, value_dim)
    tensors = tuple(
        torch.randn(bounds[-1], *shape, dtype=torch.float64, device=device, generator=generator)
        .bfloat16()
        .double()
        for shape in shapes
    )
    return Pack(bounds=bounds, lengths=list(lengths), tensors=tensors)


def dense(pack: Pack, mask: Mask = CAUSAL) -> Tensors:
    """Output and gradients of q, k, v by a matrix of scores a sample; padding gets zeros."""
    q, k, v = (tensor.detach().requires_grad_() for tensor in pack.tensors[:3])
    grad = pack.tensors[3]
    group = q.shape[1] // k.shape[1]
    pieces = []
    for (start, stop), length in zip(pairwise(pack.bounds), pack.lengths, strict=True):
        own = slice(start, start + length)
        keys, values = (x[own].repeat_interleave(group, dim=1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q[own], keys) * q.shape[-1] ** -0.5
        weights = scores.masked_fill(~mask.visible(own, q.device), -torch.inf).softmax(-1)
        pieces.append(torch.einsum("hqk,khd->qhd", weights, values))
        pieces.append(q.new_zeros(stop - start - length, *grad.shape[1:]))
    out = torch.cat(pieces)
    return (out.detach(), *torch.autograd.grad(out, (q, k, v), grad))


def ring(pack: Pack, degree: int, kernel: Kernel = "auto") -> Tensors:
    """The same, by each member of a ring in turn."""
    bounds = torch.tensor(pack.bounds).numpy()
    rows = [torch.from_numpy(held_rows(bounds, degree, r)) for r in range(degree)]
    parts = [
        tuple(tensor[own.to(tensor.device)].contiguous() for tensor in pack.tensors) for own in rows
    ]
    like = (pack.tensors[3], *pack.tensors[:3])  # the output is as wide as its gradient
    whole = tuple(torch.zeros_like(tensor, dtype=torch.float64) for tensor in like)
    for member, (q, k, v, grad) in enumerate(parts):
        q, k, v = (tensor.requires_grad_() for tensor in (q, k, v))
        group = OneMember(member, [(key.detach(), value.detach()) for _, key, value, _ in parts])
        attention = PackedAttention(
            pack.bounds,
            group=cast(PeerGroup, group) if degree > 1 else None,
            lengths=pack.lengths,
        )
        out = attention(q, k, v, kernel=kernel)
        of_q, of_k, of_v = torch.autograd.grad(out, (q, k, v), grad)
        own = rows[member].to(q.device)
        whole[0][own] += out.detach()
        whole[1][own] += of_q
        for owner, held in (group.sent or {member: (of_k, of_v)}).items():
            theirs = rows[owner].to(q.device)
            for total, part in zip(whole[2:], held, strict=True):
                total[theirs] += part
    return whole


def mask_rows(size: Size, device: torch.device, dtype: torch.dtype) -> Iterator[Row]:
    """Output and gradients of a pack that one replica holds under other masks, by each kernel that
    takes them, and the graphs that compiled kernels make for another pack."""
    kernels: tuple[Kernel, ...] = ("flash", "flex") if device.type == "cuda" else ("plain",)
    for dim in size.parity_dims:
        pack = random_pack(size.parity_lengths, 1, dim, device)
        limit = limit_of(pack, dtype)
        # Compiled kernels take seconds for each kind of mask and width.
        for mask in MASKS if dim == size.parity_dims[0] else (MASKS[0], MASKS[-1]):
            for kernel in kernels:
                if mask.spans and kernel == "flash":
                    continue
                found = max(errors(masked(pack.to(dtype), mask, kernel), dense(pack, mask)))
                yield Row(
                    what=f"{mask.name} by {kernel} against fp64, heads of {dim}",
                    figure=f"{found:.1e} relative",
                    bar=f"≤ {limit:.1e}",
                    met=found <= limit,
                )
    made = counters["stats"]["unique_graphs"]
    other = random_pack(size.parity_lengths[::-1][1:], 1, size.parity_dims[0], device).to(dtype)
    for mask in MASKS:
        masked(other, mask, kernels[-1])
    anew = counters["stats"]["unique_graphs"] - made
    yield Row(
        what="graphs made for a pack of other lengths, all masks",
        figure=str(anew),
        bar="0",
        met=anew == 0,
    )


def masked(pack: Pack, mask: Mask, kernel: Kernel) -> Tensors:
    """The same as `dense`, by PackedAttention."""
    q, k, v = (tensor.detach().requires_grad_() for tensor in pack.tensors[:3])
    attention = PackedAttention(pack.bounds, lengths=pack.lengths)
    spans = mask.spans_of(torch.arange(len(q), device=q.device)) if mask.spans else None
    out = attention(q, k, v, causal=mask.causal, window=mask.window, spans=spans, kernel=kernel)
    return (out.detach(), *torch.autograd.grad(out, (q, k, v), pack.tensors[3]))


def compiled_rows(size: Size, device: torch.device, dtype: torch.dtype) -> Iterator[Row]:
    """A decoder layer compiled whole, for one pack and then for others, against fp64."""
    torch.manual_seed(0)
    layer = Block(size.width, size.heads, size.kv_heads, causal=True).to(device)
    exact, layer = deepcopy(layer).double(), layer.to(dtype)
    backend = "inductor" if device.type == "cuda" else "aot_eager"
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=backend)
    worst, slack, own = 0.0, HALF_SLACK if dtype.itemsize < 4 else 1.0, EXACT
    for number in range(3):
        lengths = size.parity_lengths[number:]
        pack = random_pack(lengths, 1, size.width, device, heads=4)
        x = pack.tensors[0][:, 0].contiguous()
        truth = layer_run(exact, exact, pack, x)
        stance = "default" if number == 0 else "fail_on_recompile"
        with torch.compiler.set_stance(stance):
            worst = max(worst, *errors(layer_run(compiled, layer, pack, x.to(dtype)), truth))
        own = max(own, *errors(layer_run(layer, layer, pack, x.to(dtype)), truth))
    yield Row(
        what="a decoder layer in one graph for packs of other lengths, against fp64: output and "
        "gradients",
        figure=f"{worst:.1e} relative",
        bar=f"≤ {slack * own:.1e}, none compiled again",
        met=worst <= slack * own,
    )


def layer_run(call: Callable[..., Tensor], layer: nn.Module, pack: Pack, x: Tensor) -> Tensors:
    """Output, and gradients of the input and the layer's weights."""
    x = x.detach().requires_grad_()
    out = call(x, PackedAttention(pack.bounds, lengths=pack.lengths))
    return (out.detach(), *torch.autograd.grad(out.sum(), (x, *layer.parameters())))


def errors(found: Sequence[Tensor], truth: Sequence[Tensor]) -> list[float]:
    """Relative error of each tensor, by its norm."""
    return [
        float((mine.double() - other).norm() / other.norm().clamp_min(1e-30))
        for mine, other in zip(found, truth, strict=True)
    ]


def step_rows(size: Size, device: torch.device, backend: str) -> Iterator[Row]:
    """Loss and gradients of a whole `run_step` in four processes that share the device, against one
    process on the same samples: once with features sent as they are needed, and once a microbatch
    ahead, by encoders on a stream of their own. `backend`: "gloo" goes through host memory."""
    truth = step_of_one_process(size, device, torch.float64)
    types = [torch.float64, *([torch.bfloat16] if device.type == "cuda" else [])]
    for dtype in types:
        limit = EXACT
        if dtype is not torch.float64:
            limit = HALF_SLACK * max(errors(step_of_one_process(size, device, dtype), truth))
        for ahead in (False, True):
            answers = step_in_processes(
                PROCESSES, size, device, dtype, backend=backend, ahead=ahead
            )
            found = max(max(errors(answer, truth)) for answer in answers)
            yield Row(
                what=f"run_step in {PROCESSES} processes on one device over {backend} against one, "
                f"{str(dtype).removeprefix('torch.')}{', features ahead' if ahead else ''}: "
                "loss and gradients",
                figure=f"{found:.1e} relative",
                bar=f"≤ {limit:.1e}",
                met=found <= limit,
            )
