"""Memory and descriptors over an hour's worth of pictures: `python -m benchmarks.data.steady`.

As many pictures as the service delivers of the usual size in an hour, but small ones, so that it
takes minutes: what leaks leaks by message, pack, step or epoch, of which there are as many. Every
second the memory and the descriptors of each role's processes are read; the medians of the second
quarter and of the last are compared. It exits with 1 where a role grew by more than its bar.
"""

import argparse
import contextlib
import statistics
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

import psutil

from benchmarks.data.corpus import make_corpus
from benchmarks.data.measured import delivered_until, role_of, service_over
from benchmarks.harness import hardware
from soak.processes import family, title
from soak.watch import limit_of

HOUR_PICTURES = 220_000  # at 61 a second
ROLES = ("coordinator", "workers", "decoders", "client")
WIDTH, HEIGHT = 224, 168
READINGS = 200


def read_roles(home: Path) -> dict[str, tuple[int, int]]:
    """Bytes of memory that are a role's own or its share of what is shared (PSS), and descriptors,
    of all its processes."""
    found: dict[str, tuple[int, int]] = defaultdict(lambda: (0, 0))
    for process in family(home):
        with contextlib.suppress(psutil.Error):
            role = role_of(title(process))
            held_bytes, files = found[role]
            own_bytes = process.memory_full_info().pss
            found[role] = held_bytes + own_bytes, files + process.num_fds()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.data.steady", description=__doc__)
    parser.add_argument("--pictures", type=int, default=HOUR_PICTURES)
    parser.add_argument("--distinct", type=int, default=4000, help="in the corpus, as epochs")
    parser.add_argument("--pool", choices=("ray", "local"), default="ray")
    given = parser.parse_args()
    readings = []
    with tempfile.TemporaryDirectory(prefix="bench-steady-") as folder:
        home = Path(folder)
        make_corpus(home, given.distinct, WIDTH, HEIGHT)
        program = [sys.executable, "-m", "benchmarks.data.programs", "service", str(home)]
        with (
            service_over(home, pool=given.pool, workers=2),
            delivered_until(home, program) as until,
        ):
            for reading in range(1, READINGS + 1):
                until(given.pictures * reading // READINGS)
                readings.append(read_roles(home))
    print(f"On {hardware()}, {given.pictures:,} pictures of {WIDTH} × {HEIGHT}:")
    quarter = READINGS // 4
    grown = False
    for role in ROLES:
        for which, (what, unit) in enumerate((("memory bytes", 2**20), ("descriptors", 1))):
            first, last = (
                statistics.median(reading[role][which] for reading in some)
                for some in (readings[quarter : 2 * quarter], readings[-quarter:])
            )
            limit = limit_of(what, first)
            grown |= last > limit
            print(
                f"{role}: {what.removesuffix(' bytes')} {first / unit:.1f} → {last / unit:.1f}"
                f"{' MiB' * what.endswith('bytes')}, "
                f"bar {limit / unit:.1f}: {'GREW' if last > limit else 'flat'}"
            )
    return int(grown)


if __name__ == "__main__":
    sys.exit(main())
