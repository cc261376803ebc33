"""Speed and memory of the in-rank runtime on one device."""

import argparse
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast
from unittest.mock import patch

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker

from benchmarks.runtime_model import MERGE, Model, Size
from benchmarks.runtime_rows import Row, drain, hardware, judged, seconds_of
from trainer_client import Microbatch
from trainer_client.device import DeviceCopier
from trainer_client.runtime import (
    GroupPool,
    PackedAttention,
    PeerGroup,
    linear_loss,
    loads,
    measure,
    run_step,
)
from trainer_client.runtime.block_attention import choose_kernel
from trainer_client.runtime.loss import token_weighted_loss
from trainer_client.shard import Shard
from trainer_client.synthetic import SyntheticItem, SyntheticSample, SyntheticStep

HELD_OUT_EVERY = 4  # as dataservice.planning.calibration holds out
MOST_SYNCS = 2  # of a step: its loss, and its last moment
OVERLAP_DEGREE = 4
HEAD_WIDTH = 3584  # of a model of 7B
BYTES_WITHOUT_LOGITS = 2  # gradients of hidden states and head, and a chunk of logits
BYTES_PER_LOGIT = 14.5  # 2 in bf16; in fp32 4, 4 of their softmax, and 4 of the gradient

_Make = Callable[..., Tensor]  # a tensor of a shape, on the device


def train_once(model: Model, microbatch: Microbatch) -> None:
    """Forward and backward of a pack on this device alone."""
    attention = PackedAttention(microbatch.cu_seqlens, lengths=microbatch.lengths)
    logits = model.decode(microbatch, {}, attention)
    token_weighted_loss(logits, microbatch.labels, len(logits)).backward()  # type: ignore[no-untyped-call]


def kernel_row(model: Model, device: torch.device) -> Row:
    """Which kernel the runtime takes for this device and type."""
    weight = model.tokens.weight
    q = torch.zeros(1, 1, model.head_dim, dtype=weight.dtype, device=device)
    name = type(choose_kernel(q)).__name__
    return Row(
        what="attention kernel",
        figure=name,
        bar="FlashKernel",
        met=judged(name == "FlashKernel", device),
    )


def cost_rows(found: dict[str, list[dict[str, Any]]], device: torch.device) -> Iterator[Row]:
    """A fit at degree 1 and its error on lengths that it has not seen, clips left out."""
    for phase, every in found.items():
        rows = [row for row in every if not row.get("clip")]
        loads = sorted({tuple(row["tokens"]) for row in rows}, key=lambda t: (sum(t), t))
        held = set(loads[HELD_OUT_EVERY // 2 : -1 : HELD_OUT_EVERY])
        terms = np.array([_terms(row["tokens"], phase) for row in rows])
        seconds = np.array([row["seconds"] for row in rows])
        unseen = np.array([tuple(row["tokens"]) in held for row in rows])
        relative = terms / seconds[:, None]
        off = np.abs(relative[unseen] @ nonnegative_fit(relative[~unseen]) - 1)
        yield Row(
            what=f"cost model, {phase}: mean error on {unseen.sum()} held-out loads",
            figure=f"{off.mean():.1%} (largest {off.max():.1%})",
            bar="< 5 % (DHP: < 8 %)",
            met=judged(bool(off.mean() < 0.05), device),
        )


def _terms(tokens: Sequence[int], phase: str) -> tuple[float, ...]:
    """Of a group or a batch; of encoders also each item's own."""
    both = float(sum(t * t for t in tokens)), float(sum(tokens)), 1.0
    return both if phase == "llm" else (*both, float(len(tokens)))


def nonnegative_fit(columns: NDArray[np.float64], turns: int = 30) -> NDArray[np.float64]:
    """c ≥ 0 with columns @ c ≈ 1 [k], by Huber weights and coordinate descent."""
    scale = 1 / np.maximum(np.median(columns, axis=0), 1e-300)
    a = columns * scale
    c = np.full(a.shape[1], 1 / a.shape[1])
    weights = np.ones(len(a))
    for _ in range(turns):
        gram, target = a.T @ (weights[:, None] * a), a.T @ weights
        for _ in range(3000):
            for k in range(len(c)):
                c[k] = max(0.0, c[k] + (target[k] - gram[k] @ c) / gram[k, k])
        off = np.abs(a @ c - 1)
        width = max(1.5 * float(np.median(off)), 1e-3)
        weights = np.minimum(1.0, width / np.maximum(off, 1e-12))
    return cast(NDArray[np.float64], c * scale)


def packing_row(model: Model, size: Size, device: torch.device) -> Row:
    """vlm-sft samples as packs of true length, and as rows padded to the longest of their
    microbatch, in drawn order; both within `memory_tokens`."""
    lengths = vlm_sft_tokens(size.samples)
    packs, padded = first_fit(lengths, size.memory_tokens), pad_in_order(lengths, size)

    def run(packs: list[list[int]]) -> Callable[[], None]:
        made = [loads.make_microbatch(tokens, (0,), 0, device) for tokens in packs]

        def step() -> None:
            for microbatch in made:
                train_once(model, microbatch)

        return step

    packed_s = seconds_of(run(packs), device, size.turns)
    padded_s = seconds_of(run(padded), device, size.turns)
    paid = sum(map(sum, padded)) / sum(map(sum, packs))
    return Row(
        what=f"padded / packed step, {size.samples} vlm-sft samples in {size.memory_tokens} tokens",
        figure=f"{padded_s / packed_s:.2f} ({packed_s:.3f} s packed; {paid:.2f} times the tokens)",
        bar="> 1",
        met=judged(padded_s > packed_s, device),
    )


def vlm_sft_tokens(samples: int) -> list[int]:
    """InternVL-1.2M-like: 256 tokens a tile, 1/3/5 tiles with .70/.14/.16, and an answer of
    lognormal length, mean 267, σ .6."""
    generator = np.random.default_rng(0)
    tiles = generator.choice([1, 3, 5], samples, p=[0.70, 0.14, 0.16])
    answer = generator.lognormal(np.log(267) - 0.18, 0.6, samples)
    return [int(n) for n in 256 * tiles + np.maximum(answer, 1)]


def first_fit(lengths: Sequence[int], room: int) -> list[list[int]]:
    """Packs of at most `room` tokens, longest samples first."""
    packs: list[list[int]] = []
    for length in sorted(lengths, reverse=True):
        pack = next((pack for pack in packs if sum(pack) + length <= room), None)
        if pack is None:
            packs.append(pack := [])
        pack.append(length)
    return packs


def pad_in_order(lengths: Sequence[int], size: Size) -> list[list[int]]:
    """Microbatches in drawn order, every row as long as the longest."""
    batches: list[list[int]] = [[]]
    for length in lengths:
        rows = [*batches[-1], length]
        if len(rows) * max(rows) > size.memory_tokens:
            batches.append(rows := [length])
        batches[-1] = rows
    return [[max(rows)] * len(rows) for rows in batches]


class Loopback:
    """Stands in for a CP group whose other members are elsewhere: what would arrive is a copy of
    what is sent, so that one device runs one member's part of a ring."""

    def __init__(self, size: int, index: int) -> None:
        self.size, self.index = size, index

    def post(
        self,
        sends: Sequence[tuple[Tensor, int]],
        receives: Sequence[tuple[Tensor, int]],
        **_: object,
    ) -> "Hop":
        """Copy on the device, where a link would bring it."""
        for (sent, _to), (arriving, _from) in zip(sends, receives, strict=True):
            arriving.copy_(sent)
        return Hop(lambda: None)  # the copies are in the stream's order


@dataclass(frozen=True, slots=True)
class Hop:
    """What is under way, and waited for by a call."""

    wait: Callable[[], object]


class Link(Loopback):
    """The same behind a link: a hop comes by way of host memory, `beside` the device's computing or
    before it goes on. Off a GPU a thread takes a millisecond for it."""

    def __init__(self, size: int, index: int, device: torch.device, *, beside: bool) -> None:
        super().__init__(size, index)
        self._device, self._beside = device, beside
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        else:
            self._thread = ThreadPoolExecutor(1)

    def post(
        self,
        sends: Sequence[tuple[Tensor, int]],
        receives: Sequence[tuple[Tensor, int]],
        **_: object,
    ) -> "Hop":
        """Have what is sent arrive."""
        pairs = [(sent, there) for (sent, _), (there, _) in zip(sends, receives, strict=True)]
        if self._device.type == "cuda":
            hop = Hop(self._on_stream(pairs))
        else:
            hop = Hop(self._thread.submit(_come, pairs).result)
        if not self._beside:
            hop.wait()
        return hop

    def _on_stream(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> Callable[[], object]:
        stream = self._stream
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            for sent, there in pairs:
                between = torch.empty(sent.shape, dtype=sent.dtype, pin_memory=True)
                there.copy_(between.copy_(sent, non_blocking=True), non_blocking=True)
                for tensor in (sent, there):
                    tensor.record_stream(stream)
        come = stream.record_event()
        return lambda: torch.cuda.current_stream(self._device).wait_event(come)


def _come(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    time.sleep(1e-3)
    for sent, there in pairs:
        there.detach().copy_(sent.detach())


def overlap_rows(size: Size, device: torch.device, dtype: torch.dtype) -> Iterator[Row]:
    """How much of a ring's hops is hidden under its kernels, forward and backward: of what they add
    when each is waited for at once, over copies on the device."""
    for tokens in size.ring_tokens:
        total = tokens // (2 * OVERLAP_DEGREE) * 2 * OVERLAP_DEGREE
        groups = (
            Loopback(OVERLAP_DEGREE, 0),
            Link(OVERLAP_DEGREE, 0, device, beside=False),
            Link(OVERLAP_DEGREE, 0, device, beside=True),
        )
        bare_s, waited_s, beside_s = (
            _attention_s(size, total, group, device, dtype) for group in groups
        )
        hidden = (waited_s - beside_s) / (waited_s - bare_s)
        yield Row(
            what=f"hops of a ring of {OVERLAP_DEGREE} over {tokens} tokens that kernels hide",
            figure=f"{hidden:.2f} of {waited_s - bare_s:.4f} s ({bare_s:.4f} s without)",
            bar="≥ 0.9",
            met=judged(hidden >= 0.9, device),
        )


def ring_rows(size: Size, device: torch.device, dtype: torch.dtype) -> Iterator[Row]:
    """Forward and backward of one fused causal call, over those of all members of a ring."""
    for tokens in size.ring_tokens:
        whole_s = _attention_s(size, tokens, None, device, dtype)
        for degree in (2, 4, 8):
            total = tokens // (2 * degree) * 2 * degree
            members_s = sum(
                _attention_s(size, total, Loopback(degree, member), device, dtype)
                for member in range(degree)
            )
            yield Row(
                what=f"ring of {degree} over {tokens} tokens: fused call / all its chunks",
                figure=f"{whole_s / members_s:.3f} ({whole_s:.4f} s fused)",
                bar="≥ 0.9",
                met=judged(whole_s / members_s >= 0.9, device),
            )


def _attention_s(
    size: Size, tokens: int, group: Loopback | None, device: torch.device, dtype: torch.dtype
) -> float:
    shape, dim = tokens // (group.size if group is not None else 1), size.width // size.heads
    q, k, v = (
        torch.randn(shape, heads, dim, dtype=dtype, device=device, requires_grad=True)
        for heads in (size.heads, size.kv_heads, size.kv_heads)
    )
    grad = torch.randn_like(q)
    attention = PackedAttention([0, tokens], group=cast("PeerGroup | None", group))

    def run() -> None:
        attention(q, k, v).backward(grad)  # type: ignore[no-untyped-call]

    return seconds_of(run, device, size.turns)


def measured(model: Model, size: Size) -> dict[str, list[dict[str, Any]]]:
    """What `trainer_client.runtime.measure` finds, with progress on stderr."""
    options = argparse.Namespace(
        degrees=[1], lengths=size.lengths, item_tokens=size.patches, repeats=size.turns,
        modalities=[f"vision:{MERGE**2}:area"],
    )  # fmt: skip
    with GroupPool() as pool:
        return measure.measure(
            model, pool, options, tell=lambda line: print(line, file=sys.stderr, flush=True)
        )


def measurements_file(
    found: dict[str, list[dict[str, Any]]], device: torch.device
) -> dict[str, Any]:
    return {
        "format": measure.FORMAT,
        "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "model": "benchmarks.runtime_model:Model",
        "hardware": hardware(device),
        "ranks": 1,
        "torch": torch.__version__,
        "measurements": found,
    }


def copies_row(model: Model, size: Size, device: torch.device) -> Row:
    """A step on microbatches that are there, on ones that are copied while the one before computes,
    and on ones that are copied first."""
    shard = heavy_shard(size, device)
    copier = DeviceCopier(device)
    resident = tuple(copier.send(shard).microbatches)

    def compute(microbatch: Microbatch) -> None:
        if microbatch.vision is not None:
            for item in microbatch.vision.items:
                item.sum()
        train_once(model, microbatch)

    def there() -> None:
        for microbatch in resident:
            compute(microbatch)

    coming = [copier.send(shard)]

    def overlapped() -> None:
        arrived = coming.pop()
        ahead = threading.Thread(target=lambda: coming.append(copier.send(shard)))
        ahead.start()
        for microbatch in arrived.microbatches:
            compute(microbatch)
        ahead.join()

    def first() -> None:
        for microbatch in copier.send(shard).microbatches:
            drain(device)
            compute(microbatch)

    there_s, hidden_s, first_s = (
        seconds_of(work, device, size.turns) for work in (there, overlapped, first)
    )
    return Row(
        what=f"copies of {shard.size_bytes / 2**20:.0f} MiB a step, beside computing",
        figure=f"{(hidden_s - there_s) / there_s:+.1%} of the step "
        f"({(first_s - there_s) / there_s:+.1%} when copied first)",
        bar="< 1 %",
        met=judged(hidden_s - there_s < 0.01 * there_s, device),
    )


def heavy_shard(size: Size, device: torch.device) -> Shard:
    """Packs of vlm-sft text, each with as many tiles as make up `step_bytes`, pinned for a GPU."""
    height, width = size.tile_px
    whole = torch.zeros(size.tiles, 1, height, width, 3, dtype=torch.uint8)
    if device.type == "cuda":
        whole = whole.pin_memory()
    packs = -(-size.step_bytes // whole.nbytes)
    tiles = tuple(
        SyntheticItem(modality="vision", values=tile, position=place, tokens=1)
        for place, tile in enumerate(whole)
    )
    ids = torch.zeros(size.step_tokens, dtype=torch.int64)
    samples = [
        SyntheticSample(id=number, input_ids=ids, labels=ids, items=tiles)
        for number in range(packs)
    ]
    waves = [[((0,), [number])] for number in range(packs)]
    return SyntheticStep(samples, waves, replicas=1).shard(0)


def overhead_row(model: Model, size: Size, device: torch.device) -> Row:
    """`run_step` over the same microbatches trained in a bare loop."""
    shard = shard_on(text_shard(size), device)
    shard = replace(shard, microbatches=tuple(shard.microbatches))  # all there before it begins

    def bare() -> None:
        for microbatch in shard.microbatches:
            train_once(model, microbatch)

    with GroupPool() as groups:

        def step() -> None:
            run_step(model, shard, groups)

        bare_s, step_s = (seconds_of(work, device, size.turns) for work in (bare, step))
    return Row(
        what=f"run_step over a bare loop, {len(shard.microbatches)} microbatches",
        figure=f"{step_s / bare_s - 1:+.1%} ({bare_s:.4f} s bare)",
        bar="< 3 %",
        met=judged(step_s < 1.03 * bare_s, device),
    )


def drains_row(model: Model, size: Size, device: torch.device) -> Row:
    """How often the host waits for the device in a step, as torch itself warns of it, or for an
    event, of which torch does not."""
    what = "times that the host waits for the device in a step"
    bar = f"≤ {MOST_SYNCS}"
    if device.type != "cuda":
        return Row(what=what, figure="not to be seen on a CPU (test_staging.py counts)", bar=bar)
    shard = text_shard(size)
    for_events = 0

    def counted(event: torch.cuda.Event) -> None:
        nonlocal for_events
        for_events += 1
        synchronize(event)

    synchronize = torch.cuda.Event.synchronize
    with GroupPool() as groups, warnings.catch_warnings(record=True) as told:
        run_step(model, shard_on(shard, device), groups)  # what is made once
        drain(device)
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        torch.cuda.Event.synchronize = counted  # type: ignore  # torch says nothing of it
        told.clear()  # of the notice that the mode is not complete
        try:
            run_step(model, shard_on(shard, device), groups)
        finally:
            torch.cuda.set_sync_debug_mode("default")
            torch.cuda.Event.synchronize = synchronize  # type: ignore
        warned = sum("called a synchronizing CUDA operation" in str(each.message) for each in told)
    waits = warned + for_events
    figure = f"{waits}, {for_events} of them for an event"
    return Row(what=what, figure=figure, bar=bar, met=waits <= MOST_SYNCS)


def text_shard(size: Size) -> Shard:
    """Full packs of text on the host."""
    ids = torch.zeros(size.step_tokens, dtype=torch.int64)
    samples = [SyntheticSample(id=k, input_ids=ids, labels=ids) for k in range(size.turns)]
    waves = [[((0,), [number])] for number in range(size.turns)]
    return SyntheticStep(samples, waves, replicas=1).shard(0)


def shard_on(shard: Shard, device: torch.device) -> Shard:
    """As the prefetch thread would hand it over."""
    return DeviceCopier(device).send(shard)


def loss_row(size: Size, device: torch.device, dtype: torch.dtype) -> Row:
    """Peak memory of the loss and its backward pass over logits of a real vocabulary; off a GPU
    that of tensors which torch only pretends to make."""
    rows, vocabulary = size.loss_shape

    def take_loss(made: _Make) -> Tensor:
        logits = made(rows, vocabulary, requires_grad=True)
        return token_weighted_loss(logits, made(rows, dtype=torch.int64), rows)

    used_bytes = _peak_bytes(take_loss, device, dtype)
    return _bytes_row(
        f"peak bytes of the loss a logit in bf16, {rows} × {vocabulary}, logits included",
        used_bytes,
        rows * vocabulary,
        bar=BYTES_PER_LOGIT,
    )


def linear_loss_row(size: Size, device: torch.device, dtype: torch.dtype) -> Row:
    """The same of a loss that is taken without logits, beyond the hidden states and the head."""
    rows, vocabulary = size.loss_shape

    def take_loss(made: _Make) -> Tensor:
        hidden = made(rows, HEAD_WIDTH, requires_grad=True)
        head = made(vocabulary, HEAD_WIDTH, requires_grad=True)
        return linear_loss.linear_cross_entropy(hidden, head, made(rows, dtype=torch.int64))

    # Labels on the host are read for the rows that have one; a trainer's lie on its device.
    with patch.object(linear_loss, "HOST", torch.device("meta")):
        used_bytes = _peak_bytes(take_loss, device, dtype)
    given_bytes = (rows + vocabulary) * HEAD_WIDTH * torch.bfloat16.itemsize
    return _bytes_row(
        f"peak bytes of the loss a logit in bf16 without logits, {rows} × {vocabulary}",
        used_bytes - given_bytes,
        rows * vocabulary,
        bar=BYTES_WITHOUT_LOGITS,
    )


def _bytes_row(what: str, used_bytes: int, logits: int, *, bar: float) -> Row:
    each = used_bytes / logits
    figure = f"{each:.2f} ({used_bytes / 1e9:.1f} GB)"
    return Row(what=what, figure=figure, bar=f"≤ {bar:g}", met=each <= bar)


def _peak_bytes(
    take_loss: Callable[[_Make], Tensor], device: torch.device, dtype: torch.dtype
) -> int:
    """What is held at most while `take_loss` makes what it needs and takes a loss, and in the
    loss's backward pass."""
    if device.type == "cuda":
        drain(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        take_loss(partial(torch.zeros, dtype=dtype, device=device)).backward()  # type: ignore[no-untyped-call]
        drain(device)
        return torch.cuda.max_memory_allocated(device) - before
    host, tracker = torch.device("cpu"), MemTracker()
    with FakeTensorMode(), tracker:
        take_loss(partial(torch.zeros, dtype=torch.bfloat16)).backward()  # type: ignore[no-untyped-call]
    return int(tracker.get_tracker_snapshot("peak")[host]["Total"])
