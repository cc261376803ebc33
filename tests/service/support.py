"""A real service in its own process, and trainer ranks as threads that read from it."""

import json
import re
import socket
import threading
import time
import urllib.request
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import SystemRandom
from typing import Any

import numpy as np
import yaml
from prometheus_client.parser import text_string_to_metric_families

from dataservice.core.errors import ConflictError
from dataservice.core.job_setup import JobSetup
from dataservice.core.sample import DecodedSample
from dataservice.jobs.sample_pipeline import decoder_of, reader_of
from dataservice.serving.coordinator_client import CoordinatorClient
from soak.audit import Dataset, bytes_wrong, step_wrong
from soak.rank import row_of
from soak.service import ServiceProcess, dataservice
from tests.waiting import LIMIT_S, wait_for
from trainer_client import Shard, ShardDataset, Tls
from trainer_client.parts import EVERYTHING

__all__ = [
    "Ranks",
    "ServiceProcess",
    "dataservice",
    "decoder_of_job",
    "delete_unused",
    "differing_bytes",
    "explained",
    "free_ports",
    "job_file",
    "metrics_addresses",
    "scraped",
    "serving",
    "wait_for",
]

HOLD_LIMIT_S = 60.0


@contextmanager
def serving(home: Path, pool: str = "local", *flags: str) -> Iterator[ServiceProcess]:
    """A service over a state folder of its own; whatever is left of it is killed."""
    home.mkdir(parents=True, exist_ok=True)
    service = ServiceProcess(home=home, pool=pool, flags=flags).start()
    try:
        yield service
    finally:
        service.end()


def free_ports(count: int, host: str = "127.0.0.1") -> int:
    """The first of so many neighbouring ports that are free now. They lie below those that the
    system gives to whoever asks for any, so that nobody takes one of them before it is used."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    while True:
        first = SystemRandom().randrange(25_000, 32_000)
        try:
            with ExitStack() as found:
                for port in range(first, first + count):
                    found.enter_context(socket.create_server((host, port), family=family))
        except OSError:
            continue
        return first


def metrics_addresses(service: ServiceProcess) -> list[str]:
    """Where each worker that counts is scraped, then the coordinator, whichever started first."""
    found = re.findall(r"(worker\S+: )?metrics at http://(\S+)/metrics", service.log.read_text())
    return [address for _, address in sorted(found, key=lambda of: of[0] == "")]


def scraped(address: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Every series and its value, by name and labels."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def job_file(corpus: Path, home: Path, *, job: str = "job", **changes: Any) -> Path:
    """A job over the shared corpus and its index."""
    home.mkdir(parents=True, exist_ok=True)
    plain = yaml.safe_load((corpus / "job.yaml").read_text())
    plain.update({"job": job, **changes})
    path = home / f"{job}.yaml"
    path.write_text(yaml.safe_dump(plain))
    return path


@dataclass
class Ranks:
    """Trainer ranks of one attempt, each in a thread; what they received, and how they ended.
    `elsewhere` are ranks that somebody else runs.

    Once they are `stopping`, all end behind one step that none of them has begun: a rank that ended
    behind an earlier one would take no more steps, and the others would wait for it. With
    `hold_at`, none commits that step before `release`: what a test does while they are `held` is
    done in the midst of training, however long it takes.
    """

    address: str
    world_size: int
    job: str = "job"
    token: str | None = None
    token_file: Path | None = None
    tls: Tls | None = None
    connect_timeout_s: float = 20.0
    timeout_s: float = 60.0
    shards: dict[int, list[Shard]] = field(default_factory=dict)
    errors: dict[int, Exception] = field(default_factory=dict)
    state: dict[str, str | int] | None = None
    steps_done: int = 0
    stopping: bool = False
    stop_after: int | None = None
    hold_at: int | None = None
    pace_s: float = 0.0
    measured_s: float | None = None
    phase_s: Mapping[str, float] | None = None
    elsewhere: Collection[int] = ()
    parts_of: Callable[[int], Collection[str]] = lambda rank: EVERYTHING
    _threads: list[threading.Thread] = field(default_factory=list)
    _steps: threading.Lock = field(default_factory=threading.Lock)
    _newest_step: int = -1
    _go: threading.Event = field(default_factory=threading.Event)

    def start(
        self, *, state: dict[str, str | int] | None = None, stop_after: int | None = None
    ) -> "Ranks":
        self.stop_after = stop_after
        self._threads = [
            threading.Thread(target=self._train, args=(rank, state), daemon=True)
            for rank in range(self.world_size)
            if rank not in self.elsewhere
        ]
        for thread in self._threads:
            thread.start()
        return self

    def join(self, limit_s: float = LIMIT_S) -> "Ranks":
        deadline_s = time.monotonic() + limit_s
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        assert not any(thread.is_alive() for thread in self._threads), "ranks hang"
        if self.errors:
            raise next(iter(self.errors.values()))
        return self

    @property
    def held(self) -> bool:
        """Whether every rank stands at `hold_at`."""
        shards = list(self.shards.values())
        return len(shards) == self.world_size - len(self.elsewhere) and all(
            mine and mine[-1].step == self.hold_at for mine in shards
        )

    def release(self, hold_at: int | None = None) -> None:
        """Let ranks that are held go on, to another step where one is given."""
        go, self._go, self.hold_at = self._go, threading.Event(), hold_at
        go.set()

    def stop_at_one_step(self) -> "Ranks":
        """End all ranks, and wait."""
        self.stopping = True
        return self.join()

    def _train(self, rank: int, state: dict[str, str | int] | None) -> None:
        mine = self.shards.setdefault(rank, [])
        try:
            with ShardDataset(
                self.address,
                job=self.job,
                rank=rank,
                world_size=self.world_size,
                token=self.token,
                token_file=self.token_file,
                tls=self.tls,
                parts=self.parts_of(rank),
                connect_timeout_s=self.connect_timeout_s,
                timeout_s=self.timeout_s,
            ) as dataset:
                if state is not None:
                    dataset.load_state_dict(state)
                for shard in dataset:
                    go = self._go  # before we count as held
                    self._note_begun(mine, shard)
                    if shard.step == self.hold_at:
                        go.wait(HOLD_LIMIT_S)
                    time.sleep(self.pace_s)
                    dataset.commit(shard.step, measured_s=self.measured_s, phase_s=self.phase_s)
                    if rank == 0:
                        self.steps_done = shard.step + 1
                    if self._is_last(shard.step):
                        dataset.state_dict()  # waits longer for the commits than closing does
                        break
                if rank == 0:
                    self.state = dataset.state_dict()
        except Exception as error:
            self.errors[rank] = error

    def _note_begun(self, mine: list[Shard], shard: Shard) -> None:
        with self._steps:
            mine.append(shard)
            self._newest_step = max(self._newest_step, shard.step)

    def _is_last(self, step: int) -> bool:
        with self._steps:
            if self.stopping and self.stop_after is None:
                self.stop_after = self._newest_step + 2
            return self.stop_after is not None and step + 1 >= self.stop_after

    @property
    def digests(self) -> dict[int, str]:
        """The plan of each step; all ranks must have seen the same."""
        seen = [{shard.step: shard.plan.digest for shard in got} for got in self.shards.values()]
        assert all(each == seen[0] for each in seen)
        return seen[0]

    @property
    def visits(self) -> Counter[int]:
        """How often each sample was trained: counted where a group's first member holds it."""
        return self.visits_in({shard.step for got in self.shards.values() for shard in got})

    def visits_in(self, steps: Collection[int]) -> Counter[int]:
        """The same of these steps alone."""
        return Counter(
            sample
            for got in self.shards.values()
            for shard in got
            if shard.step in steps
            for microbatch in shard.microbatches
            if microbatch.cp_rank == 0
            for sample in microbatch.sample_ids.tolist()
        )


def differing_bytes(ranks: Ranks, job_file: Path) -> list[str]:
    """What ranks received that is not what a decode past the service gives: token ids, labels,
    positions, pixels and sound of every sample; and ranks whose plans differ."""
    rows = defaultdict(list)
    for shard in (shard for shards in ranks.shards.values() for shard in shards):
        rows[shard.step].append(row_of(shard, launch=0, world_size=ranks.world_size))
    dataset = Dataset(job_file)
    found = [
        step_wrong(step, each) + bytes_wrong(step, each, dataset) for step, each in rows.items()
    ]
    return [line for lines in found for line in lines]


def delete_unused(client: CoordinatorClient, job: str) -> None:
    """Delete a job whose trainers have left it; the service notices that a moment later."""

    def deleted() -> bool:
        try:
            client.delete(job)
        except ConflictError:
            return False
        return True

    wait_for(deleted)


def decoder_of_job(setup: JobSetup) -> Callable[[int], DecodedSample]:
    """Decodes samples of an opened job by their ids, as its workers do."""
    reader, pipeline = reader_of(setup.pipeline), decoder_of({}, setup.pipeline)

    def decode(sample_id: int) -> DecodedSample:
        ref, lengths = setup.catalog.details(np.array([sample_id]))[0]
        return pipeline.decode(reader.read(ref), lengths)

    return decode


def explained(service: ServiceProcess, step: int, job: str = "job") -> Any:
    """What `dataservice explain --json` says."""
    return json.loads(service.cli("explain", job, "--step", str(step), "--json").stdout)
