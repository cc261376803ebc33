"""What a service over many jobs takes to serve again: `python -m benchmarks.scale.restarted`.

A real service, with local workers, has so many jobs of one team over one index of short texts, and
all of them have had an attempt. It is stopped and started; then a rank of the job that would be
opened last asks for its step. Wall seconds, from the start of the process.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from random import Random
from typing import Any

import yaml
from rich.console import Console

from benchmarks.harness import Row
from benchmarks.report import print_rows
from dataservice.core.cursor import Cursor
from dataservice.core.job import AttemptRecord
from dataservice.jobs.job_file import read_job
from dataservice.jobs.setup import index_job
from dataservice.serving.coordinator_client import CoordinatorClient
from dataservice.state.sqlite import SqliteStateStore
from demo.tokenizer import train_tokenizer
from soak.service import ServiceProcess
from trainer_client import ShardDataset

TEXTS = 1000
WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "today")
TURNS = 3


def made_job(home: Path) -> dict[str, Any]:
    """A job file without a name, over an index of short texts."""
    rng = Random(1)
    with (home / "texts.jsonl").open("w") as lines:
        for number in range(TEXTS):
            text = " ".join(rng.choices(WORDS, k=rng.randint(4, 12)))
            lines.write(json.dumps({"id": str(number), "text": text}) + "\n")
    train_tokenizer(home, home / "tokenizer")
    plain = {
        "job": "any",
        "epochs": 1000,
        "sources": [{"name": "texts", "format": "jsonl", "url": "texts.jsonl"}],
        "index": "index",
        "pipeline": {"tokenizer": "tokenizer"},
        "batch": {"samples": 64},
        "plan": {"memory_tokens": 4096},
    }
    index_job(read_job(yaml.safe_dump(plain), home).jobs[0], custom_processors={})
    return plain


def register(service: ServiceProcess, home: Path, jobs: int) -> str:
    """Have the service know so many jobs that have had an attempt. Returns the last one's name."""
    plain, client = made_job(home), CoordinatorClient(service.address)
    names = [f"job-{number:04d}" for number in range(jobs)]
    for name in names:
        client.submit(yaml.safe_dump({**plain, "job": name}), str(home))
    service.stop()
    store = SqliteStateStore(service.state_dir)
    for name in names:
        store.put_attempt(
            AttemptRecord(
                job=name,
                attempt=1,
                world_size=1,
                start_cursor=Cursor().to_json(),
                opened_unix_s=time.time(),
            )
        )
    store.close()
    return names[-1]


def restarted(service: ServiceProcess, job: str) -> tuple[float, float]:
    """Start the service, have a rank ask, and stop: seconds until it serves, and until the rank
    has its shard."""
    began_s = time.monotonic()
    service.start()
    serving_s = time.monotonic() - began_s
    with ShardDataset(service.address, job=job, rank=0, world_size=1) as dataset:
        next(iter(dataset))
        served_s = time.monotonic() - began_s
    service.stop()
    return serving_s, served_s


def measured(jobs: int, folder: Path) -> list[Row]:
    """The figures of so many jobs."""
    home = folder / "service"
    home.mkdir()
    service = ServiceProcess(home=home)
    try:
        service.start()  # which compiles the planner where that was not done
        last = register(service, folder, jobs)
        turns = [restarted(service, last) for _ in range(TURNS)]
    finally:
        service.end()
    serving_s, served_s = (sorted(column) for column in zip(*turns, strict=True))
    return [
        Row(
            group="restart",
            what=f"first shard of a rank, restarted with {jobs} jobs",
            figure=served_s[0],
            unit="s",
            limit=10,
            explanation=f"Served after {serving_s[0]:.1f} s; the longest of {TURNS} took "
            f"{served_s[-1]:.1f} s to the shard.",
        )
    ]


def main(arguments: list[str]) -> int:
    """Measure and print; 1 where a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=100)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        rows = measured(options.jobs, Path(folder))
    print_rows(Console(), "A service that was started again", rows)
    for row in rows:
        print(row.explanation)
    return int(any(row.met is False for row in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
