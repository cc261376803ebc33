"""What a service over many jobs takes to serve again: `python -m benchmarks.scale.restarted`.

A real service, its workers in `--pool`, has so many jobs of one team over one index of short texts,
`--millions` of them or a thousand; what a million take is some 250 bytes of `--folder` each.
Each has had an attempt, and the ledger has so many of its steps: by default those of a day, of 12 s
each. The service is stopped and started; as soon as it serves, a rank of the job that would be
opened last asks for its step. Wall seconds, from the start of the process.
"""

import argparse
import json
import sqlite3
import sys
import tempfile
import time
from contextlib import closing
from dataclasses import astuple, fields, replace
from pathlib import Path
from random import Random
from typing import Any

import yaml
from rich.console import Console

from benchmarks.harness import Row
from benchmarks.report import print_rows
from benchmarks.scale.submitted_index import FIRST, link_files, opened
from dataservice.core.cursor import Cursor
from dataservice.core.job import AttemptRecord, LedgerEntry
from dataservice.engine.planner import pass_over
from dataservice.jobs.indexing import index_job
from dataservice.jobs.job_file import read_job
from dataservice.serving.coordinator_client import CoordinatorClient
from dataservice.sources.index_cache import LENGTHS, IndexCache
from dataservice.sources.index_folder import MANIFEST
from dataservice.sources.manifest import Manifest
from dataservice.state.directory import FILE
from dataservice.state.sqlite import SqliteStateStore
from demo.tokenizer import train_tokenizer
from soak.service import ServiceProcess
from trainer_client import ShardDataset

SOURCE, CACHE = "texts", "cache"
KEPT_WITHIN_S = 900.0
TEXTS = 1000
WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "today")
TURNS = 3
STEP_S = 12.0


def made_job(home: Path, texts: int, files: int) -> dict[str, Any]:
    """A job file without a name, over an index of so many files, each of so many short texts."""
    rng = Random(1)
    (home / "data").mkdir()
    with (home / "data" / FIRST).open("w") as lines:
        for number in range(texts):
            text = " ".join(rng.choices(WORDS, k=rng.randint(4, 12)))
            lines.write(json.dumps({"id": str(number), "text": text}) + "\n")
    train_tokenizer(home, home / "tokenizer")
    plain = {
        "job": "any",
        "epochs": 1000,
        "sources": [{"name": SOURCE, "format": "jsonl", "url": "data/*.jsonl"}],
        "index": "index",
        "pipeline": {"tokenizer": "tokenizer"},
        "batch": {"samples": 64},
        "plan": {"memory_tokens": 4096},
    }
    index_job(read_job(yaml.safe_dump(plain), home).jobs[0], custom_processors={})
    manifest = Manifest.from_json((home / "index" / SOURCE / MANIFEST).read_bytes(), "the manifest")
    link_files(home, SOURCE, manifest, files)
    return plain


def register(
    service: ServiceProcess, home: Path, plain: dict[str, Any], jobs: int, steps: int
) -> str:
    """Have the service know so many jobs of this kind that have had an attempt of so many steps.
    Returns the last one's name."""
    client = CoordinatorClient(service.address)
    names = [f"job-{number:04d}" for number in range(jobs)]
    for name in names:
        client.submit(yaml.safe_dump({**plain, "job": name}), str(home))
        if name == names[0]:
            wait_until_kept(home / CACHE)  # or each job would read the index
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
    job = home / "job.yaml"
    job.write_text(yaml.safe_dump(plain))
    fill_ledger(service.state_dir / FILE, names, trained(job, steps))
    return names[-1]


def wait_until_kept(cache: Path) -> None:
    """Wait until the service has read the index, and keeps its lengths."""
    until_s = time.monotonic() + KEPT_WITHIN_S
    while not any(cache.rglob(f"*{LENGTHS}")):
        if time.monotonic() > until_s:
            raise TimeoutError(f"no index was kept within {KEPT_WITHIN_S:.0f} s")
        time.sleep(0.1)


def trained(job: Path, steps: int) -> list[LedgerEntry]:
    """The entries of so many steps of a job, all trained, the last one now."""
    entries, now_s = [], time.time()
    with closing(opened(job, IndexCache(job.parent / CACHE, 2**40))) as openings:
        _, setup = next(openings)
        cursor = Cursor()
        for step in range(steps):
            at_s = now_s - STEP_S * (steps - step)
            entry = LedgerEntry(
                job=setup.record.name,
                attempt=1,
                step=step,
                cursor=cursor.to_json(),
                plan_digest=f"{step:032x}",
                world_size=1,
                cost_version="analytic",
                planned_unix_s=at_s,
                committed_unix_s=at_s,
                predicted_s=STEP_S,
                measured_s=STEP_S,
            )
            entries.append(entry)
            cursor = pass_over(setup, cursor, to_step=step + 1)
    return entries


def fill_ledger(state: Path, jobs: list[str], entries: list[LedgerEntry]) -> None:
    """These entries for each of the jobs, at once: one by one they would take minutes."""
    values = ", ".join("?" * len(fields(LedgerEntry)))
    with closing(sqlite3.connect(state)) as db, db:
        for job in jobs:
            rows = (astuple(replace(entry, job=job)) for entry in entries)
            db.executemany(f"INSERT INTO ledger VALUES ({values})", rows)


def restarted(service: ServiceProcess, job: str) -> tuple[float, float]:
    """Start the service, have a rank ask, and stop: seconds until it serves, and until the rank
    has its shard."""
    began_s = time.monotonic()
    service.start(workers=False)
    serving_s = time.monotonic() - began_s
    with ShardDataset(service.address, job=job, rank=0, world_size=1) as dataset:
        next(iter(dataset))
        served_s = time.monotonic() - began_s
    service.stop()
    return serving_s, served_s


def measured(
    jobs: int, steps: int, pool: str, folder: Path, *, texts: int = TEXTS, files: int = 1
) -> list[Row]:
    """The figures of so many jobs, each of so many steps, over so many files of texts."""
    home = folder / "service"
    home.mkdir()
    plain = made_job(folder, texts, files)
    config = folder / "service.yaml"
    config.write_text(yaml.safe_dump({"index_cache": str(folder / CACHE)}))
    service = ServiceProcess(home=home, pool=pool, flags=("--config", str(config)))
    try:
        service.start()  # which compiles the planner where that was not done
        last = register(service, folder, plain, jobs, steps)
        turns = [restarted(service, last) for _ in range(TURNS)]
    finally:
        service.end()
    serving_s, served_s = (sorted(column) for column in zip(*turns, strict=True))
    return [
        Row(
            group="restart",
            what=f"first shard of a rank, restarted with {jobs} jobs of {steps:,} steps and "
            f"{texts * files:,} samples, pool {pool}",
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
    parser.add_argument("--pool", choices=("local", "ray"), default="local")
    parser.add_argument("--steps", type=int, default=int(24 * 3600 / STEP_S), help="of each job")
    parser.add_argument("--millions", type=int, default=0, help="of samples, a file each")
    parser.add_argument("--folder", type=Path, help="where the data and the service's state lie")
    options = parser.parse_args(arguments)
    of = {"texts": 1_000_000, "files": options.millions} if options.millions else {}
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        rows = measured(options.jobs, options.steps, options.pool, Path(folder), **of)
    print_rows(Console(), "A service that was started again", rows)
    for row in rows:
        print(row.explanation)
    return int(any(row.met is False for row in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
