"""The in-rank runtime on one GPU: kernel, cost model, packing, ring and copies.

    python -m benchmarks.runtime_gpu --out results.md --measurements measurements.json
    dataservice calibrate --measurements measurements.json     # the same fit, where scipy is

Needs torch, numpy, grpcio, protobuf and trainer_client; nothing of the service. One GPU of 40 GB
and about three minutes. Prints one table and writes it to --out. `--device cpu --tiny` walks the
same path in seconds on toy sizes, to see that it runs; its figures say nothing.

| row | figure | aim |
|---|---|---|
| kernel | which attention the runtime chose | flash |
| cost model | error on lengths held out, decoder and vision encoder | < 5 % (DHP reports < 8 %) |
| packing | padded over packed seconds of the same vlm-sft samples | > 1 |
| ring | one fused call's seconds over all chunks' of a ring, same work | ≥ 0.9 |
| copies | seconds that copies to the device add to a step | ~ 0 |
"""

import argparse
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.runtime_model import MERGE, TINY, Model, Size
from trainer_client import Microbatch, ModalityBatch
from trainer_client.device import DeviceCopier
from trainer_client.runtime import GroupPool, PackedAttention, PeerGroup, loads, measure
from trainer_client.runtime.block_attention import choose_kernel
from trainer_client.runtime.loss import token_weighted_loss
from trainer_client.shard import FeatureExchange, PlanSummary, Shard

HELD_OUT_EVERY = 4  # as dataservice.planning.calibration holds out


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One line of the table."""

    what: str
    figure: str
    aim: str
    met: bool | None = None


def train_once(model: Model, microbatch: Microbatch) -> None:
    """Forward and backward of a pack on this device alone."""
    attention = PackedAttention(microbatch.cu_seqlens, lengths=microbatch.lengths)
    logits = model.decode(microbatch, {}, attention)
    token_weighted_loss(logits, microbatch.labels, len(logits)).backward()  # type: ignore[no-untyped-call]


def seconds_of(work: Callable[[], None], device: torch.device, turns: int) -> float:
    """Median seconds of a call, the device drained before and behind it."""
    spent = []
    for _ in range(turns + 1):
        _drain(device)
        started_s = time.perf_counter()
        work()
        _drain(device)
        spent.append(time.perf_counter() - started_s)
    return float(np.median(spent[1:]))


def _drain(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# ---- rows ---------------------------------------------------------------------------------


def kernel_row(model: Model, device: torch.device) -> Row:
    """Which kernel the runtime takes for this device and type."""
    weight = model.tokens.weight
    q = torch.zeros(1, 1, model.head_dim, dtype=weight.dtype, device=device)
    name = type(choose_kernel(q)).__name__
    return Row(what="attention kernel", figure=name, aim="FlashKernel", met=name == "FlashKernel")


def cost_rows(found: dict[str, list[dict[str, Any]]]) -> Iterator[Row]:
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
            aim="< 5 % (DHP: < 8 %)",
            met=bool(off.mean() < 0.05),
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
        aim="> 1",
        met=padded_s > packed_s,
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
    ) -> "Loopback":
        """Copy on the device, where a link would bring it."""
        for (sent, _to), (arriving, _from) in zip(sends, receives, strict=True):
            arriving.copy_(sent)
        return self

    def wait(self) -> None:
        """The copies are in the stream's order."""


def ring_rows(size: Size, device: torch.device, dtype: torch.dtype) -> Iterator[Row]:
    """Forward and backward of one fused causal call, over those of all members of a ring."""
    for tokens in size.ring_tokens:
        whole_s = _attention_s(size, tokens, 1, 0, device, dtype)
        for degree in (2, 4, 8):
            total = tokens // (2 * degree) * 2 * degree
            members_s = sum(
                _attention_s(size, total, degree, member, device, dtype) for member in range(degree)
            )
            yield Row(
                what=f"ring of {degree} over {tokens} tokens: fused call / all its chunks",
                figure=f"{whole_s / members_s:.3f} ({whole_s:.4f} s fused)",
                aim="≥ 0.9",
                met=whole_s / members_s >= 0.9,
            )


def _attention_s(
    size: Size, tokens: int, degree: int, member: int, device: torch.device, dtype: torch.dtype
) -> float:
    shape, dim = tokens // degree, size.width // size.heads
    q, k, v = (
        torch.randn(shape, heads, dim, dtype=dtype, device=device, requires_grad=True)
        for heads in (size.heads, size.kv_heads, size.kv_heads)
    )
    grad = torch.randn_like(q)
    group = None if degree == 1 else cast(PeerGroup, Loopback(degree, member))
    attention = PackedAttention([0, tokens], group=group)

    def run() -> None:
        attention(q, k, v).backward(grad)  # type: ignore[no-untyped-call]

    return seconds_of(run, device, size.turns)


def copies_row(model: Model, size: Size, device: torch.device) -> Row:
    """A step on a shard that is there, on one that is copied while the step before computes,
    and on one that is copied first."""
    shard = _shard(size, device)
    copier = DeviceCopier(device)
    resident = copier.arrive(copier.send(shard))

    def compute(shard: Shard) -> None:
        for microbatch in shard.microbatches:
            if microbatch.vision is not None:
                model.encode("vision", microbatch.vision).float().sum().backward()  # type: ignore[no-untyped-call]
            train_once(model, microbatch)

    coming = [copier.send(shard)]

    def overlapped() -> None:
        arrived = copier.arrive(coming.pop())
        ahead = threading.Thread(target=lambda: coming.append(copier.send(shard)))
        ahead.start()
        compute(arrived)
        ahead.join()

    def first() -> None:
        sent = copier.send(shard)
        _drain(device)
        compute(copier.arrive(sent))

    there_s = seconds_of(lambda: compute(resident), device, size.turns)
    hidden_s = seconds_of(overlapped, device, size.turns)
    first_s = seconds_of(first, device, size.turns)
    return Row(
        what=f"copies of {shard.size_bytes / 2**20:.0f} MiB a step, beside computing",
        figure=f"{(hidden_s - there_s) / there_s:+.1%} of the step "
        f"({(first_s - there_s) / there_s:+.1%} when copied first)",
        aim="< 1 %",
        met=hidden_s - there_s < 0.01 * there_s,
    )


def _shard(size: Size, device: torch.device) -> Shard:
    """One microbatch of vlm-sft: a pack, and its tiles as they arrive, pinned for a GPU."""
    items = [torch.zeros(1, *size.tile_px, 3, dtype=torch.uint8) for _ in range(size.tiles)]
    if device.type == "cuda":
        items = [item.pin_memory() for item in items]
    nothing = torch.zeros(0, dtype=torch.int64)
    exchange = FeatureExchange(
        send_rows=nothing, send_splits=[], recv_splits=[], recv_positions=nothing
    )
    pack = first_fit(vlm_sft_tokens(size.samples), size.memory_tokens)[0]
    text = loads.make_microbatch(pack, (0,), 0, torch.device("cpu"))
    plan = PlanSummary(
        digest="", replicas=1, samples=len(pack), loss_tokens=sum(pack), predicted_s=0.0,
        waves=(), stages=(),
    )  # fmt: skip
    return Shard(
        job="", attempt=1, step=0, rank=0, replica=0, cursor_after="", plan=plan,
        microbatches=(replace(text, vision=ModalityBatch(items=items, exchange=exchange)),),
        size_bytes=sum(item.numel() for item in items) + 3 * 8 * sum(pack),
    )  # fmt: skip


# ---- all of it ----------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure everything; exits 1 on a GPU where a row misses its aim."""
    parser = argparse.ArgumentParser(prog="benchmarks.runtime_gpu", description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="toy sizes, to see that it runs")
    parser.add_argument("--out", type=Path, help="Markdown file for the table")
    parser.add_argument("--measurements", type=Path, help="JSON file for dataservice calibrate")
    options = parser.parse_args(arguments)
    device, size = torch.device(options.device), TINY if options.tiny else Size()
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.manual_seed(0)
    model = Model(size).to(device=device, dtype=dtype)
    found = measured(model, size)
    if options.measurements:
        options.measurements.write_text(json.dumps(_file(found, device)))
    rows = [
        kernel_row(model, device),
        *cost_rows(found),
        packing_row(model, size, device),
        *ring_rows(size, device, dtype),
        copies_row(model, size, device),
    ]
    table = markdown(rows, device, size, sys.argv[1:] if arguments is None else arguments)
    print(table)
    if options.out:
        options.out.write_text(table)
    return int(device.type == "cuda" and not all(row.met for row in rows))


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


def _file(found: dict[str, list[dict[str, Any]]], device: torch.device) -> dict[str, Any]:
    return {
        "format": measure.FORMAT,
        "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "model": "benchmarks.runtime_gpu:Model",
        "hardware": _hardware(device),
        "ranks": 1,
        "torch": torch.__version__,
        "measurements": found,
    }


def _hardware(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{os.cpu_count()} CPUs"


def markdown(
    rows: Sequence[Row], device: torch.device, size: Size, arguments: Sequence[str]
) -> str:
    """The table, with what it was made on and by."""
    verdict = {True: "met", False: "NOT MET", None: "–"}
    lines = [
        "# The in-rank runtime on one device",
        "",
        f"{_hardware(device)}, torch {torch.__version__}, "
        f"{'toy sizes: the figures say nothing' if size is TINY else 'bf16'}",
        "",
        f"    python -m benchmarks.runtime_gpu {' '.join(arguments)}",
        "",
        "| what | figure | aim | |",
        "|---|---|---|---|",
        *(f"| {row.what} | {row.figure} | {row.aim} | {verdict[row.met]} |" for row in rows),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
