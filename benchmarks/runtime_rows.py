"""A line of the GPU benchmark's table, how its seconds are measured, and the table."""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One line of the table. `met` is whether the figure meets its bar; None where there is none,
    as for times on a CPU."""

    what: str
    figure: str
    bar: str
    met: bool | None = None


def judged(met: bool, device: torch.device) -> bool | None:
    """A bar that only a GPU's seconds or bytes are measured by."""
    return met if device.type == "cuda" else None


def seconds_of(work: Callable[[], None], device: torch.device, turns: int) -> float:
    """Median seconds of a call, the device drained before and behind it."""
    spent = []
    for _ in range(turns + 1):
        drain(device)
        started_s = time.perf_counter()
        work()
        drain(device)
        spent.append(time.perf_counter() - started_s)
    return float(np.median(spent[1:]))


def drain(device: torch.device) -> None:
    """Wait for all that is queued."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def hardware(device: torch.device) -> str:
    """What it runs on."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{os.cpu_count()} CPUs"


def markdown(rows: Sequence[Row], device: torch.device, command: str, *, toy: bool) -> str:
    """The table, with what it was made on and by."""
    verdict = {True: "met", False: "NOT MET", None: "–"}
    sizes = "toy sizes: of the figures only errors and counts say something" if toy else "bf16"
    lines = [
        "# The in-rank runtime on one device",
        "",
        f"{hardware(device)}, torch {torch.__version__}, {sizes}",
        "",
        f"    python -m benchmarks.runtime_gpu {command}",
        "",
        "| what | figure | bar | |",
        "|---|---|---|---|",
        *(f"| {row.what} | {row.figure} | {row.bar} | {verdict[row.met]} |" for row in rows),
    ]
    return "\n".join(lines) + "\n"
