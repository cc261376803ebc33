"""The in-rank runtime on one GPU: first whether it is right, then how fast it is.

    python -m benchmarks.runtime_gpu --out results.md --measurements measurements.json
    dataservice calibrate --measurements measurements.json     # the same fit, where scipy is

Needs torch, numpy, grpcio, protobuf and trainer_client; nothing of the service. One GPU of 80 GB
and some minutes. Prints one table, writes it to --out, and exits 1 where a row misses its bar.
`--device cpu --tiny` walks the same path in seconds on toy sizes: there errors have their bars,
exact ones, and times and bytes have none.

| row | figure | bar |
|---|---|---|
| ring against fp64 | error of output and gradients, by head width and degree | 2 × a fused call |
| ring by FlashAttention 3 | the same; skipped where it is not installed | 2 × version 2 |
| ring with MLA's heads | the same, queries and keys of 192, values of 128 | 2 × a fused call |
| masks | windows, spans, bidirectional, by flash and flex attention, against fp64 | as above |
| compiled layer | one graph for packs of all lengths | 2 × the layer as it is |
| whole step | four processes on the GPU, over gloo and NCCL, against one | fp64 1e-10, bf16 2 × |
| kernel | which attention the runtime chose | flash |
| cost model | error on packed lengths held out, decoder and vision encoder | < 5 % (DHP: < 8 %) |
| packing | padded over packed seconds of the same vlm-sft samples | > 1 |
| ring | one fused call's seconds over all chunks' of a ring, same work | ≥ 0.9 |
| overlap | share of a ring's hops, by way of host memory, that its kernels hide | ≥ 0.9 |
| copies | seconds that copies of 1 GiB to the device add to a step | < 1 % |
| overhead | seconds of `run_step` over a bare loop's | < 3 % |
| drains | times that the host waits for the device in a step | ≤ 2 |
| loss | peak bytes a logit | ≤ 14.5 |
| linear_loss | the same without logits | ≤ 2 |
"""

import argparse
import json
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

import torch

from benchmarks import runtime_parity, runtime_speed
from benchmarks.runtime_model import PARITY, TINY, Model, Size
from benchmarks.runtime_rows import Row, markdown


def main(arguments: Sequence[str] | None = None) -> int:
    """Check and measure everything; 1 where a row misses its bar, else 0."""
    parser = argparse.ArgumentParser(prog="benchmarks.runtime_gpu", description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="toy sizes, to see that it runs")
    parser.add_argument("--only", choices=["parity", "speed"], help="errors, or times and bytes")
    parser.add_argument("--out", type=Path, help="Markdown file for the table")
    parser.add_argument("--measurements", type=Path, help="JSON file for dataservice calibrate")
    options = parser.parse_args(arguments)
    device, size = torch.device(options.device), TINY if options.tiny else Size()
    rows = [] if options.only == "speed" else [*parity(size, device)]
    if options.only != "parity":
        rows += speed(size, device, options.measurements)
    command = " ".join(sys.argv[1:] if arguments is None else arguments)
    table = markdown(rows, device, command, toy=size is TINY)
    print(table)
    if options.out:
        options.out.write_text(table)
    return int(any(row.met is False for row in rows))


def parity(size: Size, device: torch.device) -> Iterator[Row]:
    """Errors, which have bars on any device."""
    on_gpu = device.type == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float64
    small = TINY if size is TINY else PARITY
    yield from shown("rings", lambda: runtime_parity.ring_rows(size, device, dtype))
    yield from shown(
        "rings by FlashAttention 3", lambda: runtime_parity.flash3_rows(size, device, dtype)
    )
    yield from shown("rings with MLA's heads", lambda: runtime_parity.mla_rows(size, device, dtype))
    yield from shown("masks", lambda: runtime_parity.mask_rows(size, device, dtype))
    yield from shown("a compiled layer", lambda: runtime_parity.compiled_rows(small, device, dtype))
    for backend in ("gloo", "nccl") if on_gpu else ("gloo",):
        yield from shown(
            f"run_step over {backend}",
            partial(runtime_parity.step_rows, small, device, backend),
        )


def shown(what: str, rows: Callable[[], Iterable[Row]]) -> Iterator[Row]:
    """The rows, each told on stderr as it comes. An error among them is a row that misses its bar:
    a run on a borrowed GPU shows all there is to be seen."""
    started_s = time.perf_counter()
    try:
        for row in rows():
            took_s, started_s = time.perf_counter() - started_s, time.perf_counter()
            print(f"{took_s:6.1f} s  {row.what}: {row.figure}", file=sys.stderr, flush=True)
            yield row
    except Exception as error:
        traceback.print_exc()
        said = " ".join(str(error).split())[:200]
        yield Row(what=what, figure=f"{type(error).__name__}: {said}", bar="it runs", met=False)


def speed(size: Size, device: torch.device, measurements: Path | None) -> Iterator[Row]:
    """Times and bytes, which have bars on a GPU."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.manual_seed(0)
    model = Model(size).to(device=device, dtype=dtype)
    one: dict[str, Callable[[], Row]] = {
        "kernel": partial(runtime_speed.kernel_row, model, device),
        "packing": partial(runtime_speed.packing_row, model, size, device),
        "copies": partial(runtime_speed.copies_row, model, size, device),
        "overhead": partial(runtime_speed.overhead_row, model, size, device),
        "drains": partial(runtime_speed.drains_row, model, size, device),
        "loss": partial(runtime_speed.loss_row, size, device, dtype),
        "linear_loss": partial(runtime_speed.linear_loss_row, size, device, dtype),
    }
    for name, row in one.items():
        yield from shown(name, partial(_alone, row))
    yield from shown("overlap", lambda: runtime_speed.overlap_rows(size, device, dtype))
    yield from shown("ring", lambda: runtime_speed.ring_rows(size, device, dtype))
    yield from shown("cost model", lambda: costs(model, size, device, measurements))


def _alone(row: Callable[[], Row]) -> Iterator[Row]:
    yield row()


def costs(
    model: Model, size: Size, device: torch.device, measurements: Path | None
) -> Iterator[Row]:
    """How well a fit foretells what it has not seen; the measurements go into their file."""
    found = runtime_speed.measured(model, size)
    if measurements is not None:
        measurements.write_text(json.dumps(runtime_speed.measurements_file(found, device)))
    yield from runtime_speed.cost_rows(found, device)


if __name__ == "__main__":
    sys.exit(main())
