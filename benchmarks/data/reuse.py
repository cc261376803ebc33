"""Decoding of pictures that were decoded before: `python -m benchmarks.data.reuse`.

One service with a cache of decoded samples. A job is trained once, then once more, as its next
epoch would be; then another job over the same tars. Seconds of the processor of the decoders alone.
"""

import argparse
import sys
import tempfile
from pathlib import Path

import yaml

from benchmarks.data.corpus import AHEAD, make_corpus
from benchmarks.data.measured import measured, service_over
from benchmarks.harness import hardware, judged

EPOCH_BAR, JOBS_BAR = 0.2, 1.15


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.data.reuse", description=__doc__)
    parser.add_argument("--pictures", type=int, default=600, help="that are counted in a run")
    parser.add_argument("--warm", type=int, default=200, help="that come before")
    parser.add_argument("--pool", choices=("ray", "local"), default="ray")
    given = parser.parse_args()
    spent = {}
    with tempfile.TemporaryDirectory(prefix="bench-reuse-") as folder:
        home = Path(folder)
        make_corpus(home, given.warm + given.pictures + AHEAD)
        config = home / "service.yaml"
        config.write_text(yaml.safe_dump({"decoded_cache": str(home / "cache")}))
        with service_over(home, pool=given.pool, workers=2, config=config) as service:
            other = yaml.safe_load((home / "job.yaml").read_text()) | {"job": "others"}
            (home / "others.yaml").write_text(yaml.safe_dump(other))
            service.cli("job", "submit", str(home / "others.yaml"))
            for run, job in (("first", "pictures"), ("again", "pictures"), ("other job", "others")):
                (home / "job").write_text(job)
                program = [sys.executable, "-m", "benchmarks.data.programs", "service", str(home)]
                span = measured(home, program, warm=given.warm, pictures=given.pictures)
                spent[run] = span.role_ms("decoders")
                print(f"{run}: {spent[run]:.2f} ms of decoders a picture", flush=True)
    again, jobs = spent["again"] / spent["first"], 1 + spent["other job"] / spent["first"]
    print(
        f"On {hardware()}: a second epoch {again:.2f} of the first; the bar is {EPOCH_BAR}: "
        f"{judged(again <= EPOCH_BAR)}"
    )
    print(f"two jobs {jobs:.2f} of one; the bar is {JOBS_BAR}: {judged(jobs <= JOBS_BAR)}")


if __name__ == "__main__":
    main()
