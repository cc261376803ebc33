"""A large job of one team beside a small one of another, on a real service."""

from pathlib import Path

import pytest
import yaml

from benchmarks.neighbours import (
    LARGE,
    MIB,
    SMALL,
    Trainer,
    client,
    make_jobs,
    resident_bytes,
    service_of_two_teams,
)
from dataservice.core.errors import QuotaError
from tests.service.support import Ranks, delete_unused, wait_for
from trainer_client.errors import RequestRefused

pytestmark = pytest.mark.long

ROWS, SAMPLES = 6000, 4096


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_jobs(tmp_path_factory.mktemp("neighbours"), rows=ROWS, large_samples=SAMPLES)


def changed(file: Path, **changes: object) -> str:
    return yaml.safe_dump({**yaml.safe_load(file.read_text()), **changes})


def test_jobs_that_ask_for_too_much_are_refused_by_the_limits_name(tmp_path, jobs):
    config = {"job_limits": {"max_samples": ROWS, "max_sources": 2}}
    with service_of_two_teams(tmp_path, **config) as (service, tokens):
        large = client(service, tokens[LARGE])
        before_bytes = resident_bytes(service.pid)

        def refused(limit: str, **changes: object) -> None:
            with pytest.raises(QuotaError, match=f"job_limits.{limit}"):
                large.submit(changed(jobs[LARGE], **changes), str(jobs[LARGE].parent))

        source = yaml.safe_load(jobs[LARGE].read_text())["sources"][0]
        refused("max_step_samples", batch={"samples": 1_000_000_000})
        refused("max_step_samples", batch={"tokens": 10**12})
        refused("max_ready_samples", batch={"samples": 300_000}, ready_steps=64)
        refused("max_step_samples", plan={"memory_tokens": 8192, "window_steps": 500})
        refused("max_samples", sources=[{**source, "weight": 1.5}])
        refused("max_sources", sources=[{**source, "name": f"s{k}"} for k in range(3)])
        refused("max_epochs", epochs=10**9)
        refused("max_job_file_bytes", unknown="x" * 300_000)
        assert resident_bytes(service.pid) < before_bytes + 200 * MIB

        large.submit(changed(jobs[LARGE], batch={"samples": 300_000}), str(jobs[LARGE].parent))
        ranks = Ranks(service.address, 1, job=LARGE, token=tokens[LARGE]).start()
        with pytest.raises(RequestRefused, match=r"job_limits.max_replica_samples"):
            ranks.join()
        assert large.job(LARGE).planned_step == -1
        large.close()


def test_a_large_job_delays_no_one_and_leaves_its_memory(tmp_path, jobs):
    trainers: list[Trainer] = []
    with service_of_two_teams(tmp_path) as (service, tokens):
        for job, file in jobs.items():
            with client(service, tokens[job]) as own:
                own.submit(file.read_text(), str(file.parent))
        try:
            small = Trainer(service.address, SMALL, tokens[SMALL], pace_s=0.02).start()
            trainers.append(small)
            small.wait_steps(20)
            before_bytes = resident_bytes(service.pid)
            large = Trainer(service.address, LARGE, tokens[LARGE], pace_s=0.0).start()
            trainers.append(large)
            large.wait_steps(1)
            before = len(large.step_s)
            small.wait_steps(30)
            meanwhile = len(large.step_s) - before
            large.wait_steps(1)
        finally:
            for trainer in trainers:
                trainer.stop()
        # Behind the large job's steps, the small one's would come one or two at a time.
        assert meanwhile <= 30 // 3
        with client(service, tokens[LARGE]) as own:
            delete_unused(own, LARGE)
        wait_for(lambda: resident_bytes(service.pid) < before_bytes + 300 * MIB)
