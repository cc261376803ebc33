"""What an opened index of many samples takes: `python -m benchmarks.scale.opened_index`.

Another process makes up the index and hands it over, as the one that opens a job does; this one
takes it over, checks it, and draws. Figures are of this process: processor seconds, and resident
memory beyond what it had before.
"""

import argparse
import os
import socket
import sys
import time
from multiprocessing import Process
from pathlib import Path

import numpy as np
from rich.console import Console

from benchmarks.harness import Row
from benchmarks.report import print_rows
from benchmarks.scale.made_job import SOURCE, hand_over, made_catalog
from dataservice.core.job import BatchSize
from dataservice.core.limits import DEFAULT_LIMITS
from dataservice.sources.catalog_handover import (
    RowFiles,
    hand_over_head,
    take_over,
    take_over_head,
)
from dataservice.sources.mixture import Mixture

BATCH = 4096
STEPS = 20


def resident_bytes() -> int:
    """Of this process, mapped files among them."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def hand(samples: int, text: bool, line: socket.socket) -> None:
    """Make an index up and send its files."""
    catalog = made_catalog(samples, text=text)
    files = hand_over(catalog)
    socket.send_fds(line, [b"."], [hand_over_head(catalog.parts), files.lengths, files.details])


def opened(samples: int, *, text: bool = False) -> list[Row]:
    """The figures of one size."""
    ours, theirs = socket.socketpair()
    maker = Process(target=hand, args=(samples, text, theirs))
    maker.start()
    _, (head, lengths, details), _, _ = socket.recv_fds(ours, 1, 3)
    maker.join()
    before, began_s = resident_bytes(), time.process_time()
    files = RowFiles(lengths=lengths, details=details)
    catalog = take_over(take_over_head(head), files, DEFAULT_LIMITS)
    opened_s, held = time.process_time() - began_s, resident_bytes() - before
    began_s = time.process_time()
    longest, tokens = catalog.longest_sample, catalog.totals[0].tokens
    sums_s = time.process_time() - began_s
    stream = Mixture(
        catalog.sizes, [1.0], seed=0, epochs=2, llm_tokens=catalog.llm_tokens, names=(SOURCE,)
    )
    batch, drawn_s = BatchSize(samples=BATCH), []
    for step in range(STEPS):
        began_s = time.process_time()
        catalog.lengths(stream.draw(epoch=0, position=step * BATCH, batch=batch).sample_ids)
        drawn_s.append(time.process_time() - began_s)
    after = resident_bytes() - before
    about = f"{samples:,} samples"
    return [
        Row(group="index", what=f"taken over and checked: {about}", figure=opened_s, unit="s"),
        Row(
            group="index",
            what=f"longest sample and sum of tokens: {about}",
            figure=sums_s,
            unit="s",
            explanation=f"Sample {longest}, {tokens:,} tokens.",
        ),
        Row(
            group="index",
            what=f"first draw of {BATCH:,}: {about}",
            figure=drawn_s[0],
            unit="s",
            limit=0.05,
            explanation=f"The median of {STEPS} is {1e3 * float(np.median(drawn_s)):.1f} ms.",
        ),
        Row(
            group="index",
            what=f"resident once opened: {about}",
            figure=held / samples,
            unit="B a sample",
            limit=8,
            explanation=f"After {STEPS} steps {after / samples:.1f}: pages of files, which the "
            "system takes back when it needs them.",
        ),
    ]


def main(arguments: list[str]) -> int:
    """Measure and print; 1 where a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=10_000_000)
    parser.add_argument("--text", action="store_true", help="samples without pictures")
    options = parser.parse_args(arguments)
    rows = opened(options.samples, text=options.text)
    print_rows(Console(), "An opened index", rows)
    return int(any(row.met is False for row in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
