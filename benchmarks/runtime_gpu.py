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
| whole step | four processes on the GPU, through host memory, against one | fp64 1e-10, bf16 2 × |
| kernel | which attention the runtime chose | flash |
| cost model | error on packed lengths held out, decoder and vision encoder | < 5 % (DHP: < 8 %) |
| packing | padded over packed seconds of the same vlm-sft samples | > 1 |
| ring | one fused call's seconds over all chunks' of a ring, same work | ≥ 0.9 |
| copies | seconds that copies of 1 GiB to the device add to a step | < 1 % |
| overhead | seconds of `run_step` over a bare loop's | < 3 % |
| drains | times that the host waits for the device in a step | ≤ 2 |
| loss | peak bytes a logit | ≤ 14.5 |
"""

import argparse
import json
import sys
from collections.abc import Sequence
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
    parser.add_argument("--parity-only", action="store_true", help="errors, no times")
    parser.add_argument("--out", type=Path, help="Markdown file for the table")
    parser.add_argument("--measurements", type=Path, help="JSON file for dataservice calibrate")
    options = parser.parse_args(arguments)
    device, size = torch.device(options.device), TINY if options.tiny else Size()
    rows = [*parity(size, device)]
    if not options.parity_only:
        rows += speed(size, device, options.measurements)
    command = " ".join(sys.argv[1:] if arguments is None else arguments)
    table = markdown(rows, device, command, toy=size is TINY)
    print(table)
    if options.out:
        options.out.write_text(table)
    return int(any(row.met is False for row in rows))


def parity(size: Size, device: torch.device) -> list[Row]:
    """Errors, which have bars on any device."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float64
    return [
        *runtime_parity.ring_rows(size, device, dtype),
        *runtime_parity.step_rows(TINY if size is TINY else PARITY, device),
    ]


def speed(size: Size, device: torch.device, measurements: Path | None) -> list[Row]:
    """Times and bytes, which have bars on a GPU."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.manual_seed(0)
    model = Model(size).to(device=device, dtype=dtype)
    found = runtime_speed.measured(model, size)
    if measurements is not None:
        measurements.write_text(json.dumps(runtime_speed.measurements_file(found, device)))
    return [
        runtime_speed.kernel_row(model, device),
        *runtime_speed.cost_rows(found, device),
        runtime_speed.packing_row(model, size, device),
        *runtime_speed.ring_rows(size, device, dtype),
        runtime_speed.copies_row(model, size, device),
        runtime_speed.overhead_row(model, size, device),
        runtime_speed.drains_row(model, size, device),
        runtime_speed.loss_row(size, device, dtype),
    ]


if __name__ == "__main__":
    sys.exit(main())
