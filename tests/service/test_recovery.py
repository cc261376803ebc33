"""Restarts and resumes; what comes of kills at chosen moments is in tests/faults."""

from collections import Counter

import pytest

from tests.service.support import (
    Ranks,
    differing_bytes,
    explained,
    job_file,
    serving,
    wait_for,
)
from trainer_client import Fenced

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def undisturbed(corpus, tmp_path_factory):
    """The digests of an epoch in which nothing happens."""
    home = tmp_path_factory.mktemp("undisturbed")
    with serving(home) as service:
        service.cli("job", "submit", str(job_file(corpus, home)))
        ranks = Ranks(service.address, 3).start().join()
    return ranks.digests, ranks.visits


def test_trainers_go_on_when_the_service_is_stopped_and_started_under_them(
    corpus, tmp_path, undisturbed
):
    with serving(tmp_path) as service:
        service.cli("job", "submit", str(job_file(corpus, tmp_path)))
        ranks = Ranks(service.address, 3, pace_s=0.1).start()
        wait_for(lambda: ranks.steps_done >= 3)
        service.stop()
        service.start()
        ranks.join()
        assert (ranks.digests, ranks.visits) == undisturbed
        assert differing_bytes(ranks, tmp_path / "job.yaml") == []
        assert explained(service, 1)["plan_digest"] == ranks.digests[1]


def test_plans_are_the_same_however_often_the_service_restarts(corpus, tmp_path, undisturbed):
    digests, state = {}, None
    with serving(tmp_path) as service:
        service.cli("job", "submit", str(job_file(corpus, tmp_path)))
        for stop_after in (2, 4):
            ranks = Ranks(service.address, 3).start(state=state, stop_after=stop_after).join()
            digests |= ranks.digests
            state = ranks.state
            service.stop()
            service.start()
    assert digests == {step: undisturbed[0][step] for step in range(4)}


def test_killed_trainers_resume_at_another_world_size_and_visit_each_sample_once(
    corpus, tmp_path, undisturbed
):
    with serving(tmp_path) as service:
        service.cli("job", "submit", str(job_file(corpus, tmp_path)))
        visits: Counter[int] = Counter()
        first = Ranks(service.address, 4).start(stop_after=4).join()
        for shards in first.shards.values():
            assert [shard.step for shard in shards] == [0, 1, 2, 3]
        visits += first.visits
        second = Ranks(service.address, 3).start(state=first.state).join()
        visits += second.visits
        assert visits == undisturbed[1]
        for ranks in (first, second):
            assert differing_bytes(ranks, tmp_path / "job.yaml") == []
        assert {shard.attempt for shard in second.shards[0]} == {2}


def test_a_newer_start_of_the_job_fences_ranks_that_lost_their_connection(corpus, tmp_path):
    with serving(tmp_path) as service:
        service.cli("job", "submit", str(job_file(corpus, tmp_path)))
        # They keep trying for as long as two starts of a service may take.
        old = Ranks(service.address, 3, hold_at=1, timeout_s=200.0).start()
        wait_for(lambda: old.held)
        service.kill()  # the old ranks keep trying; the new ones come first
        old.release()
        old_address, service.address = service.address, ""
        service.start()
        Ranks(service.address, 3).start(stop_after=1).join()
        service.stop()
        service.address = old_address
        service.start()
        with pytest.raises(Fenced, match="attempt 1"):
            old.join(limit_s=200.0)
