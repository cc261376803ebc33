"""Measure a model's forward and backward seconds by length and CP degree, for a cost model, and on
CUDA the peak of its memory, for a memory model.

    torchrun --nproc-per-node 4 -m trainer_client.runtime.measure \\
        --model package.module:build --out measurements.json

`dataservice calibrate` runs this on one host and fits what it finds; on a cluster run it under
your own torchrun and give the file to `dataservice calibrate --measurements`. `build()` returns
a `MultimodalModel` that is not wrapped. It is measured as it runs in a step: all replicas compute
at the same time, in CP groups side by side; a rank outside the groups computes alone, with the
number of tokens that a member has.

Groups are measured inside nodes, and with several nodes also across them. A group's seconds are
those of its slowest member; a low quantile over all repeats and groups is kept. A load's peak is
what it adds to weights and inputs on the rank where that is most: activations and gradients.
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
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch.nn import Module

from trainer_client.errors import BadArgument
from trainer_client.runtime.group_pool import GroupPool
from trainer_client.runtime.layer_times import measure_layers
from trainer_client.runtime.loads import (
    EncodedAs,
    Groups,
    Load,
    decoder_loads,
    device_of,
    encoder_loads,
    partitions,
)
from trainer_client.runtime.step import MultimodalModel
from trainer_client.runtime.step_loads import exchange_loads, gradients_load

FORMAT = 1
LENGTHS = (128, 192, 256, 384, 512, 768, 1024, 1280, 1536, 2048)
EXCHANGED_ROWS = (16, 32, 64, 128, 256, 512, 1024)
ITEM_TOKENS = (64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536)
MODALITIES = ("vision:4:area", "audio:2:area")
TIMEOUT_S = 300.0
LOW_QUANTILE = 0.1
SLEEP_CYCLES_PER_S = 2e9  # of a GPU's clock, about
HELD_UP = 1.25  # times as long as the host took to queue a load before
LONGEST_HELD_S = 0.5


@dataclass(frozen=True, slots=True)
class Timed:
    """Seconds of a load, or those that it gives because it measures them itself; and those in which
    the host queued it, on a device that has streams."""

    seconds: float
    queued_s: float


class Stopwatch:
    """Seconds of work on a device, as far as possible without the host's other programs.

    CUDA: seconds of the device from the first of the work to its last. The host queues it while the
    device is held up, as it runs ahead in a step: else small loads would be measured as the time
    that it takes to queue them. CPU with one thread per rank: CPU seconds of this process, so that
    neither other programs nor a slower peer count. CPU with more threads: wall-clock seconds,
    because threads that wait for one another use CPU too.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        alone = device.type == "cpu" and torch.get_num_threads() == 1
        self._now = time.process_time if alone else time.perf_counter

    def time(self, work: Callable[[], float | None], *, held_s: float = 0.0) -> "Timed":
        """One call, before which a device that has streams is held up for so many seconds."""
        if self._device.type == "cuda":
            return self._time_on_stream(work, held_s)
        started_s = self.now_s()
        own_s = work()
        seconds = self.now_s() - started_s
        return Timed(seconds=seconds if own_s is None else own_s, queued_s=0.0)

    def _time_on_stream(self, work: Callable[[], float | None], held_s: float) -> "Timed":
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        self.drain()
        with torch.cuda.device(self._device):
            torch.cuda._sleep(int(held_s * SLEEP_CYCLES_PER_S))  # type: ignore[no-untyped-call]
        started_s = self._now()
        began.record()
        own_s = work()
        ended.record()
        queued_s = self._now() - started_s
        self.drain()
        seconds = began.elapsed_time(ended) / 1e3
        return Timed(seconds=seconds if own_s is None else own_s, queued_s=queued_s)

    def now_s(self) -> float:
        """Seconds, once the device has no work."""
        self.drain()
        return self._now()

    def drain(self) -> None:
        """Wait for the device."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


class PeakGauge:
    """The most bytes that work adds to what its device held before. CUDA's allocator counts them;
    elsewhere nothing is measured, and every peak is nan."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before = 0

    def begin(self) -> None:
        """Call when the device has no work."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            self._before = torch.cuda.memory_allocated(self._device)

    def peak_bytes(self) -> float:
        """Since `begin`."""
        if self._device.type != "cuda":
            return float("nan")
        return float(torch.cuda.max_memory_allocated(self._device) - self._before)


def measure(
    model: MultimodalModel,
    pool: GroupPool,
    options: argparse.Namespace,
    *,
    tell: Callable[[str], None],
    after_round: Callable[[int], None] = lambda number: None,
) -> dict[str, list[dict[str, Any]]]:
    """All measurements by phase, the same on every rank. Collective.

    All loads run once to warm up, and then in rounds, each in another order, so that a disturbance
    affects one repeat of many loads and not all repeats of one load. `after_round` is called with
    the number of each, 0 to warm up.
    """
    loads = list(all_loads(model, pool, options))
    watch, gauge = Stopwatch(device_of(model)), PeakGauge(device_of(model))
    spent = np.zeros((options.repeats + 1, len(loads)))
    peaks = np.zeros_like(spent)
    queued_s = np.full(len(loads), LONGEST_HELD_S / HELD_UP)  # the least, of earlier rounds
    for number in range(options.repeats + 1):  # round 0 connects groups, compiles and allocates
        order = list(range(len(loads)))
        random.Random(number).shuffle(order)
        for done, index in enumerate(order, start=1):
            cast(Module, model).zero_grad()
            watch.drain()
            held_s = _together(pool, HELD_UP * queued_s[index] if number else 0.0)
            gauge.begin()
            timed = watch.time(loads[index].run, held_s=held_s)
            spent[number, index] = timed.seconds
            queued_s[index] = min(queued_s[index], timed.queued_s)
            peaks[number, index] = gauge.peak_bytes()
            tell(
                f"measured {number * len(loads) + done}/{spent.size} {loads[index].in_words}, "
                + (f"round {number} of {options.repeats}" if number else "to warm up")
            )
        after_round(number)
    own = torch.from_numpy(np.stack([spent[1:], peaks[1:]])).to(pool.everyone.device)
    # [ranks, 2, repeats, loads]
    everyone = torch.stack(pool.everyone.gather(own, action="collecting seconds")).cpu().numpy()
    found: dict[str, list[dict[str, Any]]] = {}
    for index, load in enumerate(loads):
        seconds = undisturbed_s(load, everyone[:, 0, :, index])
        row = load.row(seconds, float(everyone[:, 1, :, index].max()))
        found.setdefault(load.phase, []).append(row)
    return found


def undisturbed_s(load: Load, seconds: npt.NDArray[np.float64]) -> float:
    """A low quantile over repeats and groups of the slowest member's `seconds` [ranks, repeats].

    Low, because other programs on the machine only add time; not the minimum, because clock speed
    and caches can also make a repeat exceptionally fast.
    """
    slowest = [seconds[list(group)].max(axis=0) for group in load.groups.members]
    return float(np.quantile(np.concatenate(slowest), LOW_QUANTILE))


def all_loads(
    model: MultimodalModel, pool: GroupPool, options: argparse.Namespace
) -> Iterator[Load]:
    """All loads to measure, in the same order on all ranks."""
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", pool.replicas))
    degrees = options.degrees or range(1, pool.replicas + 1)
    encoders = [EncodedAs.parse(text) for text in options.modalities]
    modalities = [encoded.name for encoded in encoders]
    for way in partitions(degrees, pool.replicas, per_node):
        yield from decoder_loads(model, pool, way, options.lengths, modalities=modalities)
    alone = Groups(degree=1, crosses_node=False, members=tuple((r,) for r in range(pool.replicas)))
    for encoded in encoders:
        yield from encoder_loads(model, encoded, options.item_tokens, alone)
    if pool.replicas == 1:
        return
    if encoders:
        for way in partitions((2,), pool.replicas, per_node):
            yield from exchange_loads(
                model, pool, way, options.exchanged_rows, text_tokens=max(options.lengths)
            )
    if not options.wrapped:
        everyone = Groups(
            degree=pool.replicas, crosses_node=False, members=(tuple(range(pool.replicas)),)
        )
        yield gradients_load(
            model,
            pool,
            everyone,
            modalities,
            text_tokens=max(options.lengths),
        )


def _together(pool: GroupPool, own: float) -> float:
    """A barrier, that no rank passes before all have arrived; the largest number of theirs."""
    here = torch.full((1,), own, dtype=torch.float64, device=pool.everyone.device)
    everyone = pool.everyone.gather(here, action="starting together")
    return float(torch.stack(everyone).max())


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
    """The command line; `dataservice calibrate` passes on the same options."""
    made = argparse.ArgumentParser(
        prog="trainer_client.runtime.measure", description="Measure a model for a cost model."
    )
    made.add_argument("--model", required=True, help="package.module:build")
    made.add_argument("--out", type=Path, required=True, help="JSON file that rank 0 writes")
    made.add_argument(
        "--lengths", type=int, nargs="+", default=LENGTHS, help="decoder lengths, tokens"
    )
    made.add_argument("--item-tokens", type=int, nargs="+", default=ITEM_TOKENS)
    made.add_argument(
        "--exchanged-rows", type=int, nargs="+", default=EXCHANGED_ROWS, help="feature rows"
    )
    made.add_argument(
        "--wrapped",
        action="store_true",
        help="the trainer wraps the model in DDP or FSDP2, whose sum of gradients overlaps with "
        "the backward pass: it is taken to cost nothing",
    )
    made.add_argument("--degrees", type=int, nargs="*", default=(), help="default: all that fit")
    made.add_argument(
        "--modalities",
        nargs="*",
        default=MODALITIES,
        help="encoders, as NAME:ENCODER_TOKENS_PER_ROW:area|frames",
    )
    made.add_argument(
        "--layers", action="store_true", help="measure each layer too, for a layout of stages"
    )
    made.add_argument("--repeats", type=int, default=5)
    made.add_argument("--dtype", help="of the weights, such as bfloat16; default as built")
    made.add_argument("--device", help="default: cuda where there is one, else cpu")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one rank."""
    options = parser().parse_args(arguments)
    try:
        check(options)
        _run(options)
    except BadArgument as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 1
    return 0


def check(options: argparse.Namespace) -> None:
    """Raises BadArgument for what would fail only in the middle of measuring, or behind it."""
    tokens = (*options.lengths, *options.item_tokens, *options.exchanged_rows)
    if (least := min(*tokens, *options.degrees, options.repeats)) < 1:
        raise BadArgument(f"{least} is no number of tokens, rows or repeats; give 1 or more.")
    dtype = getattr(torch, options.dtype or "float32", None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise BadArgument(f"--dtype {options.dtype!r} is no type of weights, such as bfloat16.")
    writes = os.environ.get("RANK", "0") == "0"
    if writes and not options.out.absolute().parent.is_dir():
        raise BadArgument(f"--out {options.out} is in a folder that does not exist; make it first.")


def _run(options: argparse.Namespace) -> None:
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
            at_rest = _memory(model, device)
            if first and at_rest is None:
                print(f"no memory is measured on {device.type}: only CUDA tells a peak", flush=True)

            def tell(line: str) -> None:
                if first:
                    print(line, flush=True)

            found = measure(model, pool, options, tell=tell)
            more: dict[str, Any] = {"memory": at_rest}
            if options.layers:
                clock = Stopwatch(device)
                more["layers"] = measure_layers(model, pool, options, now_s=clock.now_s, tell=tell)
            if first:
                options.out.write_text(json.dumps(_report(found, options, pool, device) | more))
    finally:
        if ranked:
            dist.destroy_process_group()


def _device(name: str | None) -> torch.device:
    """The device of this rank. Raises BadArgument."""
    there = torch.cuda.is_available()
    try:
        chosen = torch.device(name or ("cuda" if there else "cpu"))
    except RuntimeError as error:
        raise BadArgument(f"--device {name!r} is no device; give cpu or cuda.") from error
    if chosen.type == "cuda" and not there:
        raise BadArgument(f"--device {name!r}, and torch finds no GPU here; give cpu.")
    if chosen.type == "cuda":
        chosen = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(chosen)
    return chosen


def _memory(model: MultimodalModel, device: torch.device) -> dict[str, float] | None:
    """Bytes of the device, of the model's weights and buffers there, and of the gradients of those
    weights that train; None where the device is not CUDA."""
    if device.type != "cuda":
        return None
    module = cast(Module, model)
    weights = [*module.parameters(), *module.buffers()]
    trained = [each for each in module.parameters() if each.requires_grad]
    return {
        "device_bytes": float(torch.cuda.get_device_properties(device).total_memory),
        "weights_bytes": float(sum(each.numel() * each.element_size() for each in weights)),
        "gradients_bytes": float(sum(each.numel() * each.element_size() for each in trained)),
    }


def _report(
    found: dict[str, list[dict[str, Any]]],
    options: argparse.Namespace,
    pool: GroupPool,
    device: torch.device,
) -> dict[str, Any]:
    on_gpu = device.type == "cuda"
    return {
        "format": FORMAT,
        "when": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "model": options.model,
        "hardware": torch.cuda.get_device_name(device) if on_gpu else f"{os.cpu_count()} CPUs",
        "ranks": pool.replicas,
        "torch": torch.__version__,
        "measurements": found,
    }


if __name__ == "__main__":
    sys.exit(main())
