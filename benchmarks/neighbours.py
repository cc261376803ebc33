"""A small job beside the largest that the default limits admit on one rank, of another team.

`python -m benchmarks.neighbours` starts a real service with two teams. One trains steps of 64
short texts; then the other joins with steps of as many samples as a replica may have. Shown side
by side: how long the first waits for its part of a step (GetShard) and for a step, alone and
beside the other; and the coordinator's memory before, with, and after the large job.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from threading import Thread
from typing import Annotated, Any

import numpy as np
import typer
import yaml

from benchmarks.harness import hardware
from dataservice.core.job_limits import DEFAULT_JOB_LIMITS
from dataservice.core.tokens import new_token, token_digest
from dataservice.jobs.indexing import index_job
from dataservice.jobs.job_file import read_job
from dataservice.serving.client_access import Access
from dataservice.serving.coordinator_client import CoordinatorClient
from demo.tokenizer import train_tokenizer
from soak.service import ROOT, ServiceProcess, child_environment

LARGE, SMALL = "large", "small"
SMALL_SAMPLES = 64
WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "today")
SETTLED_STEPS = 20
MIB = 2**20


def make_jobs(home: Path, *, rows: int, large_samples: int) -> dict[str, Path]:
    """Two job files over `rows` short texts, with their index."""
    rng = Random(1)
    (home / "texts").mkdir(parents=True)
    with (home / "texts" / "texts.jsonl").open("w") as lines:
        for k in range(rows):
            text = " ".join(rng.choices(WORDS, k=rng.randint(4, 12)))
            lines.write(json.dumps({"id": f"t{k}", "text": text}) + "\n")
    train_tokenizer(home / "texts", home / "tokenizer")
    files = {}
    for job, samples in ((LARGE, large_samples), (SMALL, SMALL_SAMPLES)):
        plain = {
            "job": job,
            "sources": [{"name": "texts", "format": "jsonl", "url": "texts/*.jsonl"}],
            "index": "index",
            "pipeline": {"tokenizer": "tokenizer"},
            "batch": {"samples": samples},
            "plan": {"memory_tokens": 8192},
            "epochs": 1000,
        }
        files[job] = home / f"{job}.yaml"
        files[job].write_text(yaml.safe_dump(plain))
    index_job(read_job(files[SMALL].read_text(), home), custom_processors={}, processes=2)
    return files


@contextmanager
def service_of_two_teams(
    home: Path, *, pool: str = "local", **config: Any
) -> Iterator[tuple[ServiceProcess, dict[str, str]]]:
    """A service, and the token of each team; the teams are named as their jobs."""
    home.mkdir(parents=True, exist_ok=True)
    tokens = {team: new_token() for team in (LARGE, SMALL)}
    entries = [
        {"name": team, "team": team, "role": "team", "sha256": token_digest(token).hex()}
        for team, token in tokens.items()
    ]
    (home / "tokens.yaml").write_text(yaml.safe_dump(entries))
    told = {"workers": 2, "tokens_file": str(home / "tokens.yaml")}
    told |= {"allowed_roots": "any", **config}
    (home / "service.yaml").write_text(yaml.safe_dump(told))
    flags = ("--config", str(home / "service.yaml"))
    service = ServiceProcess(home=home, pool=pool, flags=flags).start()
    try:
        yield service, tokens
    finally:
        service.end()


def client(service: ServiceProcess, token: str) -> CoordinatorClient:
    """A team's own."""
    return CoordinatorClient(service.address, access=Access(token=lambda: token), timeout_s=120)


def resident_bytes(pid: int) -> int:
    """Memory of a process that is in use by it."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmRSS")).split()[1]) * 1024


@dataclass
class Trainer:
    """One rank in a process of its own, and what it tells of each step: seconds of GetShard,
    and from one step to the next."""

    address: str
    job: str
    token: str
    pace_s: float
    get_shard_s: list[float] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)
    process: subprocess.Popen[str] | None = None
    _listener: Thread | None = None

    def start(self) -> "Trainer":
        """Begin to train."""
        command = [sys.executable, "-m", "benchmarks.neighbours", "--train", self.job]
        self.process = subprocess.Popen(
            [*command, "--address", self.address, "--pace-s", str(self.pace_s)],
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**child_environment(ROOT), "DATASERVICE_TOKEN": self.token},
        )
        self._listener = Thread(target=self._listen, daemon=True)
        self._listener.start()
        return self

    def _listen(self) -> None:
        assert self.process is not None
        for line in self.process.stdout or ():
            get_shard_s, step_s = json.loads(line)
            self.get_shard_s.append(get_shard_s)
            self.step_s.append(step_s)

    def wait_steps(self, steps: int, limit_s: float = 300.0) -> slice:
        """Wait until `steps` more are done; returns them."""
        first = len(self.step_s)
        deadline_s = time.monotonic() + limit_s
        while len(self.step_s) < first + steps:
            assert self.process is not None
            assert self.process.poll() is None, "the trainer ended"
            assert time.monotonic() < deadline_s, f"{self.job} stands at {len(self.step_s)} steps"
            time.sleep(0.05)
        return slice(first, first + steps)

    def stop(self) -> None:
        """End the process."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            assert self._listener is not None
            self._listener.join()
            assert self.process.stdout is not None
            self.process.stdout.close()


def train(address: str, job: str, pace_s: float) -> None:
    """A rank that trains for ever and prints, for each step, the two times."""
    from dataservice_proto.v1 import coordinator_pb2

    from trainer_client import ShardDataset
    from trainer_client.shard_calls import ShardCalls

    waits: dict[int, float] = {}
    calls: Any = ShardCalls
    ask = calls.ask

    def timed(self: Any, request: coordinator_pb2.GetShardRequest) -> Any:
        asked_s = time.monotonic()
        answer = ask(self, request)
        waits[request.step] = time.monotonic() - asked_s
        return answer

    calls.ask = timed
    with ShardDataset(address, job=job, rank=0, world_size=1) as dataset:
        before_s = time.monotonic()
        for shard in dataset:
            time.sleep(pace_s)
            dataset.commit(shard.step)
            now_s = time.monotonic()
            print(json.dumps([waits.pop(shard.step), now_s - before_s]), flush=True)
            before_s = now_s


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """What was measured; times of the small job's steps, memory of the coordinator."""

    large_samples: int
    large_steps: int
    alone_get_s: list[float]
    beside_get_s: list[float]
    alone_step_s: list[float]
    beside_step_s: list[float]
    before_bytes: int
    most_bytes: int
    after_bytes: int


def measure(home: Path, *, steps: int, large_samples: int, pool: str, settle_s: float) -> Figures:
    """Both phases over one service."""
    files = make_jobs(home / "corpus", rows=40_000, large_samples=large_samples)
    trainers: list[Trainer] = []
    with service_of_two_teams(home / "service", pool=pool) as (service, tokens):
        for job, file in files.items():
            with client(service, tokens[job]) as own:
                own.submit(file.read_text(), str(file.parent))
        try:
            small = Trainer(service.address, SMALL, tokens[SMALL], pace_s=0.05).start()
            trainers.append(small)
            small.wait_steps(SETTLED_STEPS)
            alone = small.wait_steps(steps)
            before_bytes = most_bytes = resident_bytes(service.pid)
            large = Trainer(service.address, LARGE, tokens[LARGE], pace_s=0.0).start()
            trainers.append(large)
            large.wait_steps(2)
            first, large_before = len(small.step_s), len(large.step_s)
            while len(small.step_s) < first + steps:
                small.wait_steps(5)
                most_bytes = max(most_bytes, resident_bytes(service.pid))
            beside = slice(first, first + steps)
            large_steps = len(large.step_s) - large_before
            large.stop()
            time.sleep(1.0)
            with client(service, tokens[LARGE]) as own:
                own.delete(LARGE)
            time.sleep(settle_s)
            after_bytes = resident_bytes(service.pid)
        finally:
            for trainer in trainers:
                trainer.stop()
    return Figures(
        large_samples=large_samples,
        large_steps=large_steps,
        alone_get_s=small.get_shard_s[alone],
        beside_get_s=small.get_shard_s[beside],
        alone_step_s=small.step_s[alone],
        beside_step_s=small.step_s[beside],
        before_bytes=before_bytes,
        most_bytes=most_bytes,
        after_bytes=after_bytes,
    )


def as_markdown(figures: Figures, command: str) -> str:
    """The report."""
    rows = [
        ("GetShard", figures.alone_get_s, figures.beside_get_s),
        ("step", figures.alone_step_s, figures.beside_step_s),
    ]
    cells = []
    for name, alone, beside in rows:
        for percent in (50, 99):
            pair = [1e3 * float(np.percentile(times, percent)) for times in (alone, beside)]
            cells.append(f"| {name} p{percent} | {pair[0]:.1f} ms | {pair[1]:.1f} ms |")
    memory = [figures.before_bytes, figures.most_bytes, figures.after_bytes]
    return "\n".join(
        [
            "# Neighbours: a small job beside the largest that the limits admit on one rank",
            "",
            f"`{command}` on {hardware()}.",
            "",
            f"The small job: {SMALL_SAMPLES} short texts a step, a step of training takes 50 ms, "
            f"{len(figures.alone_step_s)} steps alone and as many beside the large job of another "
            f"team: {figures.large_samples:,} samples a step on one rank, as fast as it goes, "
            f"{figures.large_steps} steps in that time.",
            "",
            "| small job | alone | beside the large one |",
            "| --- | --: | --: |",
            *cells,
            "",
            "| resident memory of the coordinator | MiB |",
            "| --- | --: |",
            *(
                f"| {name} | {size / MIB:,.0f} |"
                for name, size in zip(
                    ("before", "most, with the large job", "after it was deleted"),
                    memory,
                    strict=True,
                )
            ),
            "",
        ]
    )


def main(
    steps: Annotated[int, typer.Option(help="steps of the small job in each phase")] = 200,
    pool: Annotated[str, typer.Option(help="local or ray")] = "local",
    out: Annotated[Path | None, typer.Option(help="folder for the results file")] = None,
    large_samples: Annotated[
        int, typer.Option(help="samples a step of the large job")
    ] = DEFAULT_JOB_LIMITS.max_replica_samples,
    train_job: Annotated[str, typer.Option("--train", hidden=True)] = "",
    address: Annotated[str, typer.Option(hidden=True)] = "",
    pace_s: Annotated[float, typer.Option(hidden=True)] = 0.0,
) -> None:
    """Measure, print, and write a results file where a folder is given."""
    if train_job:
        train(address, train_job, pace_s)
        return
    with tempfile.TemporaryDirectory() as home:
        figures = measure(
            Path(home), steps=steps, large_samples=large_samples, pool=pool, settle_s=15.0
        )
    command = f"python -m benchmarks.neighbours --steps {steps} --pool {pool}"
    text = as_markdown(figures, command)
    print(text)
    if out is not None:
        day = datetime.now(tz=UTC).date().isoformat()
        (out / f"neighbours_{pool}_{day}.md").write_text(text)


if __name__ == "__main__":
    typer.run(main)
