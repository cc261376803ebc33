"""Pictures delivered from storage that answers late: `python -m benchmarks.data.latency`.

The tars of the other benchmark lie behind a web server that answers each request after 0, 20 or
100 ms. The service has two workers of one slot each. Latencies take turns.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml

from benchmarks.data.corpus import make_corpus
from benchmarks.data.measured import Span, measured, service_over
from benchmarks.harness import hardware, judged

LATENCIES_MS = (0, 20, 100)
BARS = {20: 0.95, 100: 0.9}


@contextmanager
def far(home: Path, latency_ms: int) -> Iterator[None]:
    """The job of `home` reads its tars from a store of this latency."""
    command = [sys.executable, "-m", "benchmarks.data.far_store", str(home / "tars")]
    with subprocess.Popen(
        [*command, str(latency_ms / 1000)], stdout=subprocess.PIPE, text=True
    ) as store:
        try:
            assert store.stdout is not None
            port = int(store.stdout.readline())
            job = yaml.safe_load((home / "job.yaml").read_text())
            tars = [path.name for path in sorted((home / "tars").iterdir())]
            url = f"http://127.0.0.1:{port}/{{{','.join(tars)}}}"
            job["sources"][0]["url"] = url if len(tars) > 1 else url.replace("{", "")[:-1]
            job["index"] = f"index-{latency_ms}-{port}"
            (home / "job.yaml").write_text(yaml.safe_dump(job))
            yield
        finally:
            store.kill()


def measured_at(home: Path, latency_ms: int, given: argparse.Namespace) -> Span:
    """One run."""
    program = [sys.executable, "-m", "benchmarks.data.programs", "service", str(home)]
    with far(home, latency_ms), service_over(home, pool=given.pool, workers=2):
        return measured(home, program, warm=given.warm, pictures=given.pictures)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.data.latency", description=__doc__)
    parser.add_argument("--pictures", type=int, default=600, help="that are counted in a run")
    parser.add_argument("--warm", type=int, default=200, help="that come before")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--pool", choices=("ray", "local"), default="ray")
    given = parser.parse_args()
    spans: dict[int, list[Span]] = {each: [] for each in LATENCIES_MS}
    with tempfile.TemporaryDirectory(prefix="bench-latency-") as folder:
        home = Path(folder)
        make_corpus(home, given.warm + given.pictures)
        for turn in range(given.rounds):
            for latency_ms, runs in spans.items():
                runs.append(measured_at(home, latency_ms, given))
                print(
                    f"round {turn + 1}: {latency_ms} ms: {runs[-1].pictures_per_s:.1f}/s, "
                    f"{runs[-1].cpu_ms:.1f} ms of the processor a picture, "
                    f"load {os.getloadavg()[0]:.1f}",
                    flush=True,
                )
    best = {ms: max(run.pictures_per_s for run in runs) for ms, runs in spans.items()}
    print(f"On {hardware()}, the quickest of {given.rounds} rounds, over 0 ms:")
    for latency_ms, bar in BARS.items():
        ratio = best[latency_ms] / best[0]
        print(f"{latency_ms} ms: {ratio:.2f}; the bar is {bar}: {judged(ratio >= bar)}")


if __name__ == "__main__":
    main()
