"""Where a fault plays: a real service, a gate before it, and jobs with audited trainers."""

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from dataservice.serving.coordinator_client import CoordinatorClient
from soak import processes
from soak.audit import Dataset, audit
from soak.cluster import Cluster, cluster
from soak.config import write_config
from soak.corpus import JobShape, write_job
from soak.gate import Gate
from soak.service import ServiceProcess
from soak.training import Connection, Training
from soak.vision import DecodingGate
from tests.waiting import LIMIT_S

JOIN_LIMIT_S = 180.0
WORKERS = 2
DECODE_LIMIT_S = 12.0  # Ray gives its workers what others leave of the CPUs
STEP = 4  # where most faults strike: a checkpoint lies behind, most of the epoch ahead


@dataclass(kw_only=True)
class Stage:
    """A running service and what faults need of it."""

    data: Path
    service: ServiceProcess
    gate: Gate
    decoding: DecodingGate
    cluster: Cluster | None = None
    numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    @property
    def ledger(self) -> Path:
        """The file of the durable state."""
        return self.service.state_dir / "state.db"

    def is_worker(self, address: str) -> bool:
        """Whether a trainer's address is a worker's: every one but the coordinator's."""
        return address != self.service.address

    def is_coordinator(self, address: str) -> bool:
        """Whether a trainer's address is the coordinator's."""
        return address == self.service.address

    @contextmanager
    def training(
        self, *, ranks: int = 3, shape: JobShape | None = None, most_unasked: int = 0
    ) -> Iterator[Training]:
        """Submit a job of its own and train it, once every worker decodes (again); whatever
        happens, its ranks end."""
        decoding = processes.decoders
        wait_for("workers decode", lambda: len(decoding(self.service.home)) >= WORKERS)
        job = f"job-{next(self.numbers)}"
        job_file = write_job(self.data, job, shape or JobShape())
        with CoordinatorClient(self.service.address) as client:
            client.submit(job_file.read_text(), str(self.data))
        training = Training(
            self.service.home / job,
            job,
            Connection(address=self.service.address, gate=self.gate.control),
            world_sizes=[ranks],
            most_unasked=most_unasked,
        )
        try:
            yield training.start()
        finally:
            training.release()
            training.stop()

    def findings(self, training: Training) -> list[str]:
        """The audit of a training that has ended."""
        dataset = Dataset(self.data / f"{training.job}.yaml")
        return audit(training.folder, training.launches, dataset)


@contextmanager
def staged(data: Path, home: Path, pool: str, *, nodes: int = 0) -> Iterator[Stage]:
    """A service over `data` with its state in `home`, with `nodes` of a Ray cluster to join if
    any; all of it ends behind the block."""
    home.mkdir(parents=True, exist_ok=True)
    decoding = DecodingGate(home / "decoding")
    write_config(home / "service.yaml", decode_timeout_s=DECODE_LIMIT_S)
    flags = ("--config", str(home / "service.yaml"), "--workers", str(WORKERS))
    environment = decoding.environment
    with ExitStack() as stack:
        joined = None
        if nodes:
            joined = stack.enter_context(cluster(home, [1] * nodes, environment))
            flags = (*flags, "--ray-address", joined.address)
            environment = joined.environment
        service = ServiceProcess(home=home, pool=pool, flags=flags, environment=environment)
        stack.callback(service.end)
        gate = stack.enter_context(Gate())
        service.start()
        yield Stage(data=data, service=service, gate=gate, decoding=decoding, cluster=joined)


def wait_for(what: str, condition: Callable[[], bool], limit_s: float = LIMIT_S) -> None:
    """Poll until true."""
    deadline_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline_s, f"waited {limit_s:g} s in vain until {what}"
        time.sleep(0.02)
