"""The soak in short: two teams, random kills, and nothing lost, repeated or left behind."""

import time
from random import Random

import pytest

from soak.chaos import KINDS, Target, draw
from soak.recovery import Commits
from soak.report import markdown
from soak.run import SoakOptions, SoakResult, soak
from soak.team import Progress
from soak.training import Connection, Training
from tests.waiting import wait_for

KILLS = 6


@pytest.mark.long
@pytest.mark.timeout(900)
def test_random_kills_lose_nothing_and_leave_nothing_behind(tmp_path):
    # Growth is judged by a soak of some length alone: here, processes that begin anew would be it.
    options = SoakOptions(
        kills=KILLS, seed=142, limit_s=400.0, nodes=0, epochs=2, least_watched=10_000
    )
    result = soak(tmp_path / "soak", options)
    assert result.broken == []
    assert result.kills >= KILLS
    assert {job.job.split("-")[0] for job in result.jobs} == {"vision", "speech"}


def test_the_same_seed_draws_the_same_faults():
    drawn = [
        [draw(rng, spare_coordinator=False) for _ in range(50)] for rng in (Random(3), Random(3))
    ]
    assert drawn[0] == drawn[1]
    assert set(drawn[0]) <= set(KINDS)


def test_the_steps_of_a_job_count_whatever_step_the_job_before_it_ended_at():
    before, begun, later = (
        Progress(job=job, attempt=1, step=step, start_step=0)
        for job, step in (("vision-003", 23), ("vision-004", 0), ("vision-004", 5))
    )
    assert begun.steps_since(before) == 1
    assert later.steps_since(begun) == 5
    assert not begun.beyond(begun)


def test_commits_from_before_a_fault_are_no_recovery_from_it():
    class TeamAtStep:
        step = 0

        def progress(self):
            return Progress(job="vision-001", attempt=1, step=self.step, start_step=0)

    team = TeamAtStep()
    commits = Commits(team=team)
    commits.look()
    team.step = 20  # no poll sees these; only the look before the fault does
    commits.look()
    fault_s = time.monotonic()
    assert commits.recovery(fault_s) is None
    team.step = 40
    commits.look()
    assert commits.recovery(fault_s) is not None


def test_a_strike_at_ranks_that_have_all_ended_is_no_kill(tmp_path):
    nowhere = Connection(address="127.0.0.1:1")
    training = Training(tmp_path, "job", nowhere, world_sizes=[2]).start()
    target = Target(service=None, gate=None, cluster=None, trainings=[training], rng=Random(0))
    wait_for(lambda: len(training.pids) == 2)
    assert KINDS["rank"].strike(target)
    training.stop()
    for kind in ("rank", "all ranks", "rank paused"):
        assert not KINDS[kind].strike(target)
    assert not training.kill_ranks(0)


def test_the_page_says_when_growth_could_not_be_judged():
    result = SoakResult(options=SoakOptions(least_watched=40))
    unjudged = "growth could not be judged by 0 samples, of at least 40"
    assert unjudged in markdown(result, "python -m soak")
    result = SoakResult(options=SoakOptions(least_watched=0))
    assert "could not be judged" not in markdown(result, "python -m soak")
