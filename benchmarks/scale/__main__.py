"""What thousands of ranks cost one coordinator: `python -m benchmarks.scale`.

The coordinator, its workers and the ranks are processes of their own, and talk gRPC over loopback.
Workers only acknowledge orders, and ranks fetch nothing: bytes are not the subject. Ranks ask along
one open call each, as trainer_client does. Figures of a step are beyond those of as many empty
calls, taken in turns with it on the same server. An empty call is a whole call of its own, dearer
than the message on an open stream with which it is compared, which favours us: what a step takes in
all stands beside, and has no bar.
"""

import argparse
import datetime
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
from rich.console import Console

from benchmarks.harness import Row, hardware, slug
from benchmarks.report import print_rows, rows_to_markdown, verdict, write_report
from benchmarks.scale.play import Cost, Stage, staged
from benchmarks.scale.service import Size
from benchmarks.scale.stages import scattered_orders, stages
from dataservice.planning.warm import warm_up

RESULTS = Path(__file__).parents[1] / "results"
# Ranks, and the most processor seconds that a step may cost beyond the empty calls.
BARS: dict[int, float | None] = {512: None, 2_560: 0.4, 10_000: 2.0}
SAMPLES_A_RANK = 60
SLOWER = 1.5  # than an empty call, at most, by the 99th percentiles
RANK_BYTES, ROW_BYTES = 8_192, 24  # of an answer, and for each of its packs and items
SMALL_RANKS, SMALL_SAMPLES, SMALL_STEPS, SMALL_WARM = 2, 8, 500, 100
SMALL_S = 0.003  # of a processor, at most, that a small step may cost the coordinator
LONG_RANKS, LONG_SAMPLES, LONG_STEPS, LONG_WARM = 64, 8, 2_000, 400
LONG_LOOKS = 10
WATCHED_RANKS, WATCHED_STEPS = 2_560, 5
LONGEST_S = 0.1  # of a processor, that a turn of the event loop may take
GROWTH = 0.05  # of the resident memory, at most, from the warm steps to the last


def played(ranks: int, limit_s: float | None, turns: int, steps: int) -> list[Row]:
    """The bars of one number of ranks: the least that steps took in some turns beside the least
    that empty calls did, as the machine may have other work. Not the least difference of a turn,
    which is that of the empty calls that were disturbed most."""
    size = Size(ranks=ranks, samples_a_rank=SAMPLES_A_RANK)
    with staged(size) as stage:
        stage.steps(1)
        pairs = [(stage.empty(steps), stage.steps(steps)) for _ in range(turns)]
        rss_bytes = stage.used().rss_bytes
    empty = min((empty for empty, _ in pairs), key=lambda cost: cost.cpu_s)
    real = min((real for _, real in pairs), key=lambda cost: cost.cpu_s)
    beyond_s = real.cpu_s - empty.cpu_s
    slower = min(real.p99_s for _, real in pairs) / min(empty.p99_s for empty, _ in pairs)
    about = f"{ranks:,} ranks × {SAMPLES_A_RANK} samples"
    return [
        Row(
            group="played",
            what=f"processor time of a step beyond as many empty calls, {about}",
            figure=beyond_s,
            unit="s",
            limit=limit_s,
            explanation=f"The empty calls take {empty.cpu_s:.3f} s; resident "
            f"{rss_bytes / 2**20:.0f} MiB.",
        ),
        Row(
            group="played",
            what=f"processor time of a step in all, {about}",
            figure=real.cpu_s,
            unit="s",
        ),
        Row(
            group="played",
            what=f"p99 of a shard asked for over that of an empty call, {about}",
            figure=slower,
            unit="×",
            limit=SLOWER,
            explanation=f"p50 {1e3 * real.p50_s:.0f} ms, empty {1e3 * empty.p50_s:.0f} ms; p99 "
            f"{1e3 * real.p99_s:.0f} ms, empty {1e3 * empty.p99_s:.0f} ms.",
        ),
        _answer_bytes(about, real),
    ]


def _answer_bytes(about: str, real: Cost) -> Row:
    rows = real.packs + real.items
    return Row(
        group="played",
        what=f"bytes of a rank's answer, {about}",
        figure=real.size_bytes,
        unit="B",
        limit=RANK_BYTES + ROW_BYTES * rows,
        explanation=f"{real.packs:.1f} packs and {real.items:.1f} items in it.",
    )


def small_steps(steps: int) -> Row:
    """Processor time of a step of few samples, as ranks that train nothing ask for them."""
    size = Size(ranks=SMALL_RANKS, samples_a_rank=SMALL_SAMPLES, indexed=50_000)
    with staged(size, workers=2, players=1) as stage:
        _run(stage, SMALL_WARM)
        cost = stage.steps(steps, settle_s=0.0)
    return Row(
        group="small",
        what=f"processor time of a step, {SMALL_RANKS} ranks × {SMALL_SAMPLES} samples, 2 workers",
        figure=cost.cpu_s,
        unit="s",
        limit=SMALL_S,
        explanation=f"Mean of {steps:,} steps, with all calls and the ledger on disk.",
    )


def long_run(steps: int, ranks: int) -> Row:
    """Resident memory over many small steps, looked at ten times."""
    size = Size(ranks=ranks, samples_a_rank=LONG_SAMPLES, indexed=50_000)
    with staged(size, workers=4, players=1) as stage:
        _run(stage, LONG_WARM)
        began_s, resident = time.monotonic(), [stage.used().rss_bytes]
        for part in np.diff(np.linspace(0, steps, LONG_LOOKS + 1).astype(int)).tolist():
            _run(stage, part)
            resident.append(stage.used().rss_bytes)
        took_s = time.monotonic() - began_s
    return Row(
        group="long",
        what=f"growth of resident memory over {steps:,} steps, {ranks:,} ranks",
        figure=resident[-1] / resident[0] - 1,
        unit="of it",
        limit=GROWTH,
        explanation=f"MiB at each tenth, after {LONG_WARM} steps before: "
        f"{', '.join(f'{each / 2**20:.0f}' for each in resident)}; in {took_s:.0f} s.",
    )


def longest_turn(ranks: int, steps: int) -> Row:
    """Processor time of the longest turn of the event loop in a large step, in which it does not
    look at its sockets: what of drawing, planning, orders and receipts is done there, and the
    answers to ranks, who all ask at once."""
    longest_s = []
    with staged(Size(ranks=ranks, samples_a_rank=SAMPLES_A_RANK)) as stage:
        stage.steps(1)
        for _ in range(steps):
            stage.longest_turn_s = 0.0
            stage.steps(1)
            longest_s.append(stage.longest_turn_s)
    return Row(
        group="played",
        what=f"processor time of the event loop's longest turn, {ranks:,} ranks × "
        f"{SAMPLES_A_RANK} samples",
        figure=max(longest_s),
        unit="s",
        limit=LONGEST_S,
        explanation=f"Of each step {', '.join(f'{1e3 * each:.0f}' for each in longest_s)} ms.",
    )


def _run(stage: Stage, steps: int) -> None:
    stage.steps(steps, settle_s=0.0)


def main(arguments: list[str]) -> int:
    """Measure, print, write the results; 1 where a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="*", default=sorted(BARS))
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3, help="of each turn")
    parser.add_argument("--watched-ranks", type=int, default=WATCHED_RANKS, help="0: leave it out")
    parser.add_argument("--small-steps", type=int, default=SMALL_STEPS, help="0: leave it out")
    parser.add_argument("--long-steps", type=int, default=LONG_STEPS, help="0: leave it out")
    parser.add_argument("--long-ranks", type=int, default=LONG_RANKS)
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    warm_up()
    large = Size(ranks=2_560, samples_a_rank=SAMPLES_A_RANK)
    rows = [*stages(large), scattered_orders(replace(large, indexed=1_000_000))]
    for ranks in options.ranks:
        rows += played(ranks, BARS.get(ranks), options.turns, options.steps)
    if options.watched_ranks:
        rows.append(longest_turn(options.watched_ranks, WATCHED_STEPS))
    if options.small_steps:
        rows.append(small_steps(options.small_steps))
    if options.long_steps:
        rows.append(long_run(options.long_steps, options.long_ranks))
    print_rows(Console(), "Thousands of ranks", rows)
    today = datetime.date.today().isoformat()
    head = f"# Scale, {today}\n\n`python -m benchmarks.scale` on {hardware()}. {verdict(rows)}\n"
    path = write_report(
        options.output,
        f"scale_{slug(hardware())}_{today}",
        [head, rows_to_markdown("Thousands of ranks", rows)],
    )
    print(f"written to {path}")
    return int(any(row.met is False for row in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
