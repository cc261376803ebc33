"""What the first draw of a job costs, whatever its sources hold.

    python -m benchmarks.draw            print the table, and write it to benchmarks/results/

Each figure is of a mixture made anew, so nothing of an epoch is at hand. The other way, what this
service did before, is to shuffle the whole epoch and keep it.
"""

import argparse
import datetime
import sys
import time
import tracemalloc
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from benchmarks.harness import Peer, Row, hardware, side_by_side, slug
from benchmarks.report import print_rows, rows_to_markdown, verdict, write_report
from dataservice.core.job import BatchSize
from dataservice.core.ports import Draw
from dataservice.sources.mixture import Mixture

RESULTS = Path(__file__).resolve().parent / "results"
LIMIT_MS = 50.0
SAMPLES = 4096
MEAN_TOKENS = 500
SMALLEST_STORED = 10_000_000


def first_draws(sizes: list[int]) -> list[Row]:
    """A first draw of 4,096 samples, of one source and of three whose weights are fractions; and
    of as many tokens, where lengths of that many samples fit into memory."""
    rows = []
    for size in sizes:
        thirds, weights = [size // 2, size // 4, size // 4], [1.0, 1.5, 0.5]
        batch = BatchSize(samples=SAMPLES)
        rows.append(_row(size, "one source", partial(_draw, [size], [1.0], batch)))
        rows.append(_row(size, "three sources", partial(_draw, thirds, weights, batch)))
    size = min(sizes)
    tokens = np.random.default_rng(0).integers(1, 2 * MEAN_TOKENS, size, dtype=np.int32)
    by_tokens = BatchSize(tokens=SAMPLES * MEAN_TOKENS)
    rows.append(_row(size, "counted in tokens", lambda: _draw([size], [1.0], by_tokens, tokens)))
    return rows


def _draw(
    sizes: list[int],
    weights: list[float],
    batch: BatchSize,
    tokens: NDArray[np.int32] | None = None,
) -> Draw:
    mixture = Mixture(sizes, weights, seed=0, epochs=2, llm_tokens=tokens)
    return mixture.draw(epoch=1, position=sum(sizes) // 3, batch=batch)


def _row(size: int, what: str, draw: Callable[[], Draw]) -> Row:
    timing = side_by_side({"draw": draw}, repeats=5)["draw"]
    tracemalloc.start()
    drawn = len(draw().sample_ids)
    peak_mib = tracemalloc.get_traced_memory()[1] / 2**20
    tracemalloc.stop()
    return Row(
        group="draw",
        what=f"first draw of {drawn:,} samples of {size:,}, {what}",
        figure=timing.wall_s * 1e3,
        unit="ms",
        limit=LIMIT_MS,
        peers=(Peer(name="shuffling the epoch, of 10 M and scaled", figure=_stored_ms(size)),),
        explanation=f"By the clock on the wall; {peak_mib:.1f} MiB at most.",
    )


def _stored_ms(size: int) -> float:
    """A permutation of the whole epoch, measured on ten million and scaled: at least that."""
    begin = time.process_time()
    np.random.default_rng(0).permutation(SMALLEST_STORED)
    return (time.process_time() - begin) * 1e3 * size / SMALLEST_STORED


def main(arguments: list[str]) -> None:
    """Measure, print, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--sizes", type=int, nargs="+", default=[10**8, 10**9])
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    rows = first_draws(options.sizes)
    print_rows(Console(), "First draw", rows)
    today = datetime.date.today().isoformat()
    head = f"# Drawing, {today}\n\n`python -m benchmarks.draw` on {hardware()}. {verdict(rows)}\n"
    path = write_report(
        options.output,
        f"draw_{slug(hardware())}_{today}",
        [head, rows_to_markdown("First draw", rows)],
    )
    print(f"written to {path}")


if __name__ == "__main__":
    main(sys.argv[1:])
