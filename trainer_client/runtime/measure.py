"""Measure a model's forward and backward seconds by length and CP degree, for a cost model.

    torchrun --nproc-per-node 4 -m trainer_client.runtime.measure \\
        --model package.module:build --out measurements.json

`dataservice calibrate` runs this on one host and fits what it finds; on a cluster run it under
your own torchrun and give the file to `dataservice calibrate --measurements`. `build()` returns
a `MultimodalModel` that is not wrapped. It is measured as a step runs it: all replicas at work
at once, CP groups side by side, a rank that no group needs computing alone as much as a member.

Ring groups are measured inside nodes, and across them where there are several. A group's seconds
are those of its slowest member; of all repeats and groups a low quantile is kept.
"""

import argparse
import importlib
import json
import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module

from trainer_client.errors import BadArgument
from trainer_client.runtime.group_pool import GroupPool
from trainer_client.runtime.loss import token_weighted_loss
from trainer_client.runtime.ring_attention import PackedAttention
from trainer_client.runtime.step import MultimodalModel
from trainer_client.shard import FeatureExchange, Microbatch, ModalityBatch

FORMAT = 1
LENGTHS = (128, 192, 256, 384, 512, 768, 1024, 1280, 1536, 2048)
ITEM_TOKENS = (64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536)
MODALITIES = ("vision:4:area", "audio:2:area")
PACKED = 4  # sequences of a pack, items of a batch: what tells linear and square terms apart
CLIP_FRAMES = 8
TOKEN_IDS = 251  # ids used; vocabularies are larger, and one id alone would make a slow gradient
TIMEOUT_S = 300.0
LOW_QUANTILE = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class Groups:
    """A partition of the replicas: groups of `degree`, and a rest that computes alone."""

    degree: int
    crosses_node: bool
    members: tuple[tuple[int, ...], ...]

    def of(self, replica: int) -> tuple[int, ...]:
        """The group of a replica; itself if it is in none."""
        return next((group for group in self.members if replica in group), (replica,))


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """What one measurement is of: sequences or items of these tokens, and how they are run."""

    phase: str
    tokens: tuple[int, ...]
    groups: Groups
    run: Callable[[], None]
    clip: bool = False

    @property
    def in_words(self) -> str:
        """For progress."""
        what = "a clip of" if self.clip else f"{len(self.tokens)} ×"
        return f"{self.phase}: {what} {self.tokens[0]} tokens at degree {self.groups.degree}"

    def row(self, seconds: float) -> dict[str, Any]:
        """As the file of measurements has it."""
        found: dict[str, Any] = {"tokens": list(self.tokens), "seconds": seconds}
        if self.phase == "llm":
            found |= {"degree": self.groups.degree, "crosses_node": self.groups.crosses_node}
        return found | ({"clip": True} if self.clip else {})


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodedAs:
    """How a modality's items count: `tokens_per_row` encoder tokens make one feature row; an
    item grows by `area`, or by `frames` where the encoder takes one picture size alone."""

    name: str
    tokens_per_row: float
    grows: str

    @classmethod
    def parse(cls, text: str) -> "EncodedAs":
        """From NAME:TOKENS_PER_ROW:GROWS. Raises BadArgument."""
        name, _, rest = text.partition(":")
        tokens, _, grows = rest.partition(":")
        try:
            made = cls(name=name, tokens_per_row=float(tokens or 1), grows=grows or "area")
        except ValueError:
            made = cls(name="", tokens_per_row=1, grows="")
        if made.name not in ("vision", "audio") or made.grows not in ("area", "frames"):
            raise BadArgument(
                f"modality {text!r} is not NAME:TOKENS_PER_ROW:GROWS; NAME is vision or audio and "
                "GROWS is area or frames, as in vision:4:area."
            )
        return made


# ---- what is measured ---------------------------------------------------------------------


def partitions(degrees: Sequence[int], replicas: int, per_node: int) -> Iterator[Groups]:
    """One of each degree that fits a node, and one across nodes where there are several."""
    order = list(range(replicas))
    nodes = replicas // per_node
    spread = sorted(order, key=lambda r: (r % per_node, r // per_node))
    for degree in sorted({d for d in degrees if d <= replicas}):
        if degree <= per_node:
            inside = [
                tuple(order[node * per_node + first : node * per_node + first + degree])
                for node in range(nodes)
                for first in range(0, per_node - degree + 1, degree)
            ]
            yield Groups(degree=degree, crosses_node=False, members=tuple(inside))
        if nodes > 1 and degree > 1:
            across = [
                tuple(spread[first : first + degree])
                for first in range(0, replicas - degree + 1, degree)
            ]
            yield Groups(degree=degree, crosses_node=True, members=tuple(across))


def decoder_loads(
    model: MultimodalModel, pool: GroupPool, groups: Groups, lengths: Sequence[int]
) -> Iterator[Load]:
    """Each length as one sequence and as a pack of four, and on several replicas as much again
    as those hold together."""
    longer = [n * groups.degree for n in lengths if n * groups.degree > max(lengths)]
    packs: list[tuple[int, ...]] = [(n,) for n in [*lengths, *longer]]
    packs += [(n // PACKED,) * PACKED for n in lengths if n >= 16 * PACKED * groups.degree]
    members = groups.of(pool.replica)
    for tokens in packs:
        # A rank beside the groups holds as many tokens as their members do.
        own = tokens if len(members) == groups.degree else _shared(tokens, groups.degree)
        microbatch = make_microbatch(own, members, members.index(pool.replica), device_of(model))

        def run(microbatch: Microbatch = microbatch) -> None:
            attention = PackedAttention(
                microbatch.cu_seqlens,
                group=pool.get(microbatch.cp_group),
                lengths=microbatch.lengths,
            )
            logits = model.decode(microbatch, {}, attention)
            loss = token_weighted_loss(logits, microbatch.labels, max(1, logits.shape[0]))
            loss.backward()  # type: ignore[no-untyped-call]

        yield Load(phase="llm", tokens=tokens, groups=groups, run=run)


def encoder_loads(
    model: MultimodalModel, encoded: EncodedAs, item_tokens: Sequence[int], groups: Groups
) -> Iterator[Load]:
    """Each length as one item and as a batch of four; and for encoders of pictures of any size
    clips, whose frames they may hold apart."""
    dummy = model.dummy_item(encoded.name)
    dummy_tokens = len(_encode(model, encoded.name, [dummy])) * encoded.tokens_per_row
    seen = set()
    for tokens in item_tokens:
        one = grown(dummy, round(tokens / dummy_tokens), encoded)
        quarter = grown(dummy, round(tokens / PACKED / dummy_tokens), encoded)
        batches = [[one], [quarter] * PACKED]
        if encoded.name == "vision" and encoded.grows == "area":
            batches.append([quarter.repeat(CLIP_FRAMES, 1, 1, 1)])
        for batch in batches:
            clip = encoded.grows == "area" and batch[0].ndim == 4 and len(batch[0]) > len(dummy)
            # The encoder says itself how many frames it joins, and what it drops.
            with torch.no_grad():
                rows = len(_encode(model, encoded.name, batch[:1]))
            load = (max(1, round(rows * encoded.tokens_per_row)),) * len(batch)
            if (load, batch[0].shape) in seen:
                continue
            seen.add((load, batch[0].shape))

            def run(batch: list[Tensor] = batch) -> None:
                features = _encode(model, encoded.name, batch)
                if features.requires_grad:
                    features.float().square().sum().backward()  # type: ignore[no-untyped-call]

            yield Load(phase=encoded.name, tokens=load, groups=groups, run=run, clip=clip)


def _encode(model: MultimodalModel, modality: str, items: list[Tensor]) -> Tensor:
    nothing = torch.zeros(0, dtype=torch.int64)
    exchange = FeatureExchange(
        send_rows=nothing, send_splits=[], recv_splits=[], recv_positions=nothing
    )
    with torch.set_grad_enabled(model.encoder_trains(modality) and torch.is_grad_enabled()):
        return model.encode(modality, ModalityBatch(items=items, exchange=exchange))


def grown(dummy: Tensor, times: int, encoded: EncodedAs) -> Tensor:
    """The dummy item repeated about `times` times, at least once."""
    times = max(1, times)
    if encoded.name == "audio":
        return dummy.repeat(times)
    if encoded.grows == "frames":
        return dummy.repeat(times, 1, 1, 1)
    high = max(1, int(times**0.5))
    return dummy.repeat(1, high, max(1, round(times / high)), 1)


def make_microbatch(
    tokens: Sequence[int], members: tuple[int, ...], cp_rank: int, device: torch.device
) -> Microbatch:
    """This rank's part of a pack of sequences of `tokens`, cut as the service cuts it."""
    degree = len(members)
    unit = 2 * degree if degree > 1 else 1
    padded = [-(-n // unit) * unit for n in tokens]
    held = [cp_rank, 2 * degree - 1 - cp_rank] if degree > 1 else [0]
    chunks = [
        np.arange(index * (n // unit), (index + 1) * (n // unit)) for n in padded for index in held
    ]
    positions = torch.from_numpy(np.concatenate(chunks)).to(device)
    ids = positions % TOKEN_IDS
    return Microbatch(
        wave=0,
        pack=0,
        cp_group=members,
        cp_rank=cp_rank,
        predicted_s=0.0,
        input_ids=ids,
        labels=ids,
        position_ids=positions,
        cu_seqlens=torch.from_numpy(np.cumsum([0, *padded], dtype=np.int32)),
        lengths=torch.tensor(list(tokens), dtype=torch.int32),
        sample_ids=torch.arange(len(tokens)),
    )


def _shared(tokens: Sequence[int], degree: int) -> tuple[int, ...]:
    return tuple(max(1, n // degree) for n in tokens)


def device_of(model: MultimodalModel) -> torch.device:
    """Where its weights are."""
    return next(cast(Module, model).parameters()).device


# ---- measuring ----------------------------------------------------------------------------


class Stopwatch:
    """Seconds of work on a device, the host's other programs left out as far as can be.

    CUDA: the device is drained before and behind. CPU with one thread a rank: seconds that this
    process computed, so that neither other programs nor a slower peer count. CPU with more: time
    that passed, since threads that wait for one another burn seconds too.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        alone = device.type == "cpu" and torch.get_num_threads() == 1
        self._now = time.process_time if alone else time.perf_counter

    def time(self, work: Callable[[], None]) -> float:
        """Seconds of one call."""
        self.drain()
        started_s = self._now()
        work()
        self.drain()
        return self._now() - started_s

    def drain(self) -> None:
        """Wait for the device."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def measure(
    model: MultimodalModel,
    pool: GroupPool,
    options: argparse.Namespace,
    *,
    tell: Callable[[str], None],
) -> dict[str, list[dict[str, Any]]]:
    """All measurements by phase, the same on every rank. Collective.

    All loads run once to warm up, and then in rounds, each in another order, so that a disturbance
    falls on a round of many loads and not on all repeats of one.
    """
    loads = list(all_loads(model, pool, options))
    watch = Stopwatch(device_of(model))
    spent = np.zeros((options.repeats + 1, len(loads)))
    for number in range(options.repeats + 1):  # the first connects groups, compiles and allocates
        order = list(range(len(loads)))
        random.Random(number).shuffle(order)
        for done, index in enumerate(order, start=1):
            cast(Module, model).zero_grad()
            watch.drain()
            _together(pool)
            spent[number, index] = watch.time(loads[index].run)
            tell(
                f"measured {number * len(loads) + done}/{spent.size} {loads[index].in_words}, "
                + (f"round {number} of {options.repeats}" if number else "to warm up")
            )
    own = torch.from_numpy(spent[1:]).to(pool.everyone.device)
    # [ranks, repeats, loads]
    everyone = torch.stack(pool.everyone.gather(own, action="collecting seconds")).cpu().numpy()
    found: dict[str, list[dict[str, Any]]] = {}
    for index, load in enumerate(loads):
        found.setdefault(load.phase, []).append(load.row(undisturbed_s(load, everyone[..., index])))
    return found


def undisturbed_s(load: Load, seconds: npt.NDArray[np.float64]) -> float:
    """A low quantile over repeats and groups of the slowest member's `seconds` [ranks, repeats].

    Low, because whatever else runs on a machine only adds time; not the least, because clocks
    and caches have lucky moments too.
    """
    slowest = [seconds[list(group)].max(axis=0) for group in load.groups.members]
    return float(np.quantile(np.concatenate(slowest), LOW_QUANTILE))


def all_loads(
    model: MultimodalModel, pool: GroupPool, options: argparse.Namespace
) -> Iterator[Load]:
    """What is measured, in one order on all ranks."""
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", pool.replicas))
    degrees = options.degrees or range(1, pool.replicas + 1)
    for way in partitions(degrees, pool.replicas, per_node):
        yield from decoder_loads(model, pool, way, options.lengths)
    alone = Groups(degree=1, crosses_node=False, members=tuple((r,) for r in range(pool.replicas)))
    for encoded in map(EncodedAs.parse, options.modalities):
        yield from encoder_loads(model, encoded, options.item_tokens, alone)


def _together(pool: GroupPool) -> None:
    """No rank starts before all have come."""
    here = torch.zeros(1, device=pool.everyone.device)
    pool.everyone.gather(here, action="starting together")[0].cpu()


def build_model(path: str, device: torch.device, dtype: torch.dtype | None) -> MultimodalModel:
    """Import `package.module:build`, call it, and move what it returns. Raises BadArgument."""
    module, _, attribute = path.partition(":")
    try:
        build = getattr(importlib.import_module(module), attribute or "?")
    except (ImportError, AttributeError) as error:
        raise BadArgument(
            f"--model {path!r} cannot be imported: {type(error).__name__}: {error}. Give "
            "package.module:build, from a folder where Python finds it."
        ) from error
    torch.manual_seed(0)
    model = build()
    missing = [m for m in ("decode", "encode", "dummy_item", "encoder_trains")
               if not callable(getattr(model, m, None))]  # fmt: skip
    if not isinstance(model, Module) or missing:
        raise BadArgument(
            f"--model {path!r} gave a {type(model).__name__} without {', '.join(missing)}; it "
            "must return a MultimodalModel that is not wrapped (trainer_client/runtime/README.md)."
        )
    return cast(MultimodalModel, model.to(device=device, dtype=dtype))


def parser() -> argparse.ArgumentParser:
    """The command line; `dataservice calibrate` passes the same options on."""
    made = argparse.ArgumentParser(
        prog="trainer_client.runtime.measure", description="Measure a model for a cost model."
    )
    made.add_argument("--model", required=True, help="package.module:build")
    made.add_argument("--out", type=Path, required=True, help="JSON file that rank 0 writes")
    made.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, help="decoder tokens")
    made.add_argument("--item-tokens", type=int, nargs="+", default=ITEM_TOKENS)
    made.add_argument("--degrees", type=int, nargs="*", default=(), help="default: all that fit")
    made.add_argument(
        "--modalities",
        nargs="*",
        default=MODALITIES,
        help="encoders, as NAME:ENCODER_TOKENS_PER_ROW:area|frames",
    )
    made.add_argument("--repeats", type=int, default=5)
    made.add_argument("--dtype", help="of the weights, such as bfloat16; default as built")
    made.add_argument("--device", help="default: cuda where there is one, else cpu")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """One rank."""
    options = parser().parse_args(arguments)
    device = _device(options.device)
    ranked = "RANK" in os.environ
    if ranked:
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo", timeout=timedelta(seconds=TIMEOUT_S)
        )
    try:
        dtype = getattr(torch, options.dtype) if options.dtype else None
        model = build_model(options.model, device, dtype)
        with GroupPool(timeout_s=TIMEOUT_S) as pool:
            first = pool.replica == 0
            found = measure(
                model, pool, options, tell=lambda line: print(line, flush=True) if first else None
            )
            if first:
                options.out.write_text(json.dumps(_report(found, options, pool, device)))
    except BadArgument as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 1
    finally:
        if ranked:
            dist.destroy_process_group()
    return 0


def _device(name: str | None) -> torch.device:
    chosen = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    if chosen.type == "cuda":
        chosen = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(chosen)
    return chosen


def _report(
    found: dict[str, list[dict[str, Any]]],
    options: argparse.Namespace,
    pool: GroupPool,
    device: torch.device,
) -> dict[str, Any]:
    on_gpu = device.type == "cuda"
    return {
        "format": FORMAT,
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "model": options.model,
        "hardware": torch.cuda.get_device_name(device) if on_gpu else f"{os.cpu_count()} CPUs",
        "ranks": pool.replicas,
        "torch": torch.__version__,
        "measurements": found,
    }


if __name__ == "__main__":
    sys.exit(main())
