"""Whether the in-rank runtime computes the right thing on a device, before anything is timed.

ring        every member of a ring in turn, on one device, against fp64
whole step  four processes on one device, with CP groups and exchanges, against one process
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import cast

import torch
from torch import Tensor

from benchmarks.runtime_model import Size
from benchmarks.runtime_ranks import step_in_processes, step_of_one_process
from benchmarks.runtime_rows import Row
from trainer_client.positions import held_rows
from trainer_client.runtime import PackedAttention, PeerGroup

EXACT = 1e-10
HALF_SLACK = 2.0  # of half precision: how many times a fused call's own error
PROCESSES = 4

Tensors = tuple[Tensor, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Pack:
    """Queries, keys, values and the gradient of the output of a pack, [tokens, heads, dim], with
    the padded `bounds` of its samples and their true `lengths`."""

    bounds: list[int]
    lengths: list[int]
    tensors: Tensors

    def to(self, dtype: torch.dtype) -> "Pack":
        """In another type."""
        held = tuple(tensor.to(dtype) for tensor in self.tensors)
        return Pack(bounds=self.bounds, lengths=self.lengths, tensors=held)


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
            truth = dense(pack)
            found = errors(ring(pack.to(dtype), degree), truth)
            limit = EXACT
            if dtype.itemsize < 4:
                limit = HALF_SLACK * max(errors(ring(pack.to(dtype), 1), truth))
            yield Row(
                what=f"ring of {degree} against fp64, heads of {dim}, grouped queries, samples of "
                "1 token: output and gradients",
                figure=f"{max(found):.1e} relative",
                bar=f"≤ {limit:.1e}",
                met=max(found) <= limit,
            )


def random_pack(
    lengths: Sequence[int], degree: int, dim: int, device: torch.device, heads: int = 8
) -> Pack:
    """In fp64, rounded to bf16 so that half precision starts from the same numbers."""
    unit = 2 * degree
    bounds = [0]
    for length in lengths:
        bounds.append(bounds[-1] + -(-length // unit) * unit)
    generator = torch.Generator(device).manual_seed(dim * 100 + degree)
    tensors = tuple(
        torch.randn(bounds[-1], count, dim, dtype=torch.float64, device=device, generator=generator)
        .bfloat16()
        .double()
        for count in (heads, heads // 4, heads // 4, heads)
    )
    return Pack(bounds=bounds, lengths=list(lengths), tensors=tensors)


def dense(pack: Pack) -> Tensors:
    """Output and gradients of q, k, v by a matrix of scores a sample; padding gets zeros."""
    q, k, v = (tensor.detach().requires_grad_() for tensor in pack.tensors[:3])
    grad = pack.tensors[3]
    group = q.shape[1] // k.shape[1]
    pieces = []
    for (start, stop), length in zip(pairwise(pack.bounds), pack.lengths, strict=True):
        own = slice(start, start + length)
        keys, values = (x[own].repeat_interleave(group, dim=1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q[own], keys) * q.shape[-1] ** -0.5
        ahead = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
        weights = scores.masked_fill(ahead, -torch.inf).softmax(-1)
        pieces.append(torch.einsum("hqk,khd->qhd", weights, values))
        pieces.append(q.new_zeros(stop - start - length, *q.shape[1:]))
    out = torch.cat(pieces)
    return (out.detach(), *torch.autograd.grad(out, (q, k, v), grad))


def ring(pack: Pack, degree: int) -> Tensors:
    """The same, by each member of a ring in turn."""
    bounds = torch.tensor(pack.bounds).numpy()
    rows = [torch.from_numpy(held_rows(bounds, degree, r)) for r in range(degree)]
    parts = [
        tuple(tensor[own.to(tensor.device)].contiguous() for tensor in pack.tensors) for own in rows
    ]
    like = (pack.tensors[0], *pack.tensors[:3])
    whole = tuple(torch.zeros_like(tensor, dtype=torch.float64) for tensor in like)
    for member, (q, k, v, grad) in enumerate(parts):
        q, k, v = (tensor.requires_grad_() for tensor in (q, k, v))
        group = OneMember(member, [(key.detach(), value.detach()) for _, key, value, _ in parts])
        attention = PackedAttention(
            pack.bounds,
            group=cast(PeerGroup, group) if degree > 1 else None,
            lengths=pack.lengths,
        )
        out = attention(q, k, v)
        of_q, of_k, of_v = torch.autograd.grad(out, (q, k, v), grad)
        own = rows[member].to(q.device)
        whole[0][own] += out.detach()
        whole[1][own] += of_q
        for owner, held in (group.sent or {member: (of_k, of_v)}).items():
            theirs = rows[owner].to(q.device)
            for total, part in zip(whole[2:], held, strict=True):
                total[theirs] += part
    return whole


def errors(found: Sequence[Tensor], truth: Sequence[Tensor]) -> list[float]:
    """Relative error of each tensor, by its norm."""
    return [
        float((mine.double() - other).norm() / other.norm().clamp_min(1e-30))
        for mine, other in zip(found, truth, strict=True)
    ]


def step_rows(size: Size, device: torch.device) -> Iterator[Row]:
    """Loss and gradients of a whole `run_step` in four processes that share the device, their
    messages through host memory, against one process on the same samples: once with features sent
    as they are needed, and once a microbatch ahead, by encoders on a stream of their own."""
    truth = step_of_one_process(size, device, torch.float64)
    types = [torch.float64, *([torch.bfloat16] if device.type == "cuda" else [])]
    for dtype in types:
        limit = EXACT
        if dtype is not torch.float64:
            limit = HALF_SLACK * max(errors(step_of_one_process(size, device, dtype), truth))
        for ahead in (False, True):
            answers = step_in_processes(PROCESSES, size, device, dtype, ahead=ahead)
            found = max(max(errors(answer, truth)) for answer in answers)
            yield Row(
                what=f"run_step in {PROCESSES} processes on one device against one process, "
                f"{str(dtype).removeprefix('torch.')}{', features ahead' if ahead else ''}: "
                "loss and gradients",
                figure=f"{found:.1e} relative",
                bar=f"≤ {limit:.1e}",
                met=found <= limit,
            )
