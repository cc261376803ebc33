"""The sentence that names who waits for whom."""

from dataclasses import replace

import pytest

from dataservice.core.health import FleetHealth, JobHealth, RankHealth, SourceHealth
from dataservice.observability.diagnosis import diagnose, waiting

FLEET = FleetHealth(workers=4, wanted_workers=4, slots=8, slots_per_worker=2, busy_slots=6.0)


def a_rank(rank, **changes):
    given = {
        "rank": rank,
        "client": f"node:{100 + rank}",
        "live": True,
        "received_step": 42,
        "committed_step": 40,
        "quiet_s": 1.0,
    }
    return RankHealth(**(given | changes))


def a_source(name, **changes):
    given = {"source": name, "samples": 10.0, "read_s": 0.1, "decode_s": 0.4, "usual_s": 0.05}
    return SourceHealth(**(given | changes))


def a_job(**changes):
    given = {
        "job": "vlm-sft",
        "attempt": 1,
        "world_size": 4,
        "missing_ranks": (),
        "forming_s": 0.0,
        "draining": False,
        "ended": False,
        "committed_step": 40,
        "planned_step": 44,
        "ready_steps": 4,
        "decoded_steps": 4,
        "window_steps": 4,
        "steps": 20,
        "step_s": 1.0,
        "plan_s": 0.01,
        "share_slots": 8.0,
        "ranks": tuple(a_rank(rank) for rank in range(4)),
        "sources": (a_source("captions"), a_source("ocr")),
    }
    return JobHealth(**(given | changes))


def a_starved_job(**changes):
    ranks = tuple(a_rank(rank, wait_s=0.6) for rank in range(4))
    return a_job(**({"decoded_steps": 0, "ready_steps": 1, "ranks": ranks} | changes))


def the_sentence(job, fleet=FLEET):
    return diagnose(job, fleet)[0]


def test_a_job_whose_window_is_full_is_in_health():
    found = the_sentence(a_job())
    assert (found.severity, found.text) == (
        "info",
        "nobody waits for data: 4 of 4 steps are decoded ahead of the last rank",
    )


def test_a_job_without_trainers_says_so():
    assert the_sentence(a_job(ranks=())).text == "no trainer is connected since step 40"


def test_a_job_that_ended_with_an_error_says_which():
    found = the_sentence(a_job(failure="source 'ocr' cannot be read"))
    assert found.severity == "stalled"
    assert "source 'ocr' cannot be read" in found.text


def test_ranks_that_have_not_opened_are_counted_and_named():
    job = a_job(world_size=12, missing_ranks=(3, 4, 5, 9), forming_s=31.0)
    found = the_sentence(job)
    assert found.severity == "stalled"
    assert "8 of 12 ranks have waited 31 s for ranks 3-5 and 9" in found.text


def test_ranks_that_come_one_after_the_other_are_no_alarm():
    found = the_sentence(a_job(world_size=12, missing_ranks=(3, 4, 5, 9), forming_s=2.0))
    assert (found.severity, found.text) == ("info", "8 of 12 ranks have come so far")


def test_a_stopped_rank_is_named_with_its_process_and_step():
    ranks = (a_rank(0), a_rank(1), a_rank(2, quiet_s=14.0, committed_step=39), a_rank(3))
    found = the_sentence(a_job(ranks=ranks))
    assert found.severity == "stalled"
    assert found.text.startswith("ranks 0-1 and 3 wait: rank 2 (node:102), at step 40, has said")


def test_a_rank_that_left_is_named_before_one_that_is_only_silent():
    ranks = (a_rank(0), a_rank(1, quiet_s=99.0), a_rank(2, live=False), a_rank(3))
    found = the_sentence(a_job(ranks=ranks, report_every_s=2.0))
    assert "rank 2 (node:102), at step 41, has left" in found.text


def test_a_rank_that_was_silent_before_its_connection_broke_is_not_said_to_have_left():
    ranks = (a_rank(0), a_rank(1, live=False, quiet_s=12.0))
    found = the_sentence(a_job(ranks=ranks, report_every_s=2.0))
    assert "is cut off, and had said nothing for 12 s: see whether its process" in found.text


def test_a_stopped_rank_hides_that_data_is_late_as_well():
    ranks = (a_rank(0, wait_s=0.9), a_rank(1, quiet_s=20.0))
    assert "rank 1" in the_sentence(a_starved_job(ranks=ranks)).text


def test_slow_planning_is_told_from_slow_decoding():
    found = the_sentence(a_starved_job(ready_steps=0, plan_s=1.7))
    assert found.severity == "slow"
    assert "planning takes 1.7 s a step, training 1 s" in found.text


def test_starved_workers_are_told_how_many_more_would_do():
    sources = (a_source("captions", decode_s=4.0, usual_s=0.4), a_source("ocr", decode_s=8.0))
    sources = tuple(replace(source, usual_s=0.0) for source in sources)
    found = the_sentence(a_starved_job(sources=sources, share_slots=8.0))
    # 12.2 slot seconds a step of 1 s on 8 slots.
    assert "ranks 0-3 wait 0.6 s a step: source `ocr` decodes at 0.66 of need" in found.text
    assert found.text.endswith("; add 3 workers")


def test_a_source_that_grew_slow_is_named_though_another_costs_more():
    sources = (
        a_source("captions", decode_s=6.0, usual_s=0.61),
        a_source("ocr", read_s=3.0, decode_s=0.5, usual_s=0.05),
    )
    found = the_sentence(a_starved_job(sources=sources))
    assert "source `ocr` is read at 0.83 of need, 0.35 s a sample where 0.05 s is usual" in (
        found.text
    )
    assert found.text.endswith("look at its storage")


def test_a_cheap_source_that_grew_a_little_is_not_blamed_for_what_a_dear_one_costs():
    sources = (
        a_source("texts", samples=10.0, read_s=0.0, decode_s=0.2, usual_s=0.01),
        a_source("captions", samples=10.0, read_s=0.0, decode_s=20.0, usual_s=2.0),
    )
    found = the_sentence(a_starved_job(sources=sources))
    assert "source `captions` decodes at 0.4 of need, 2 s a sample; add" in found.text


def test_lost_workers_are_blamed_before_more_are_asked_for():
    fleet = replace(FLEET, workers=1, slots=2)
    sources = (a_source("captions", decode_s=4.0, usual_s=0.4),)
    found = the_sentence(a_starved_job(sources=sources, share_slots=2.0), fleet)
    assert "3 of 4 workers are down" in found.text


def test_without_any_worker_nothing_moves():
    fleet = replace(FLEET, workers=0, slots=0)
    found = the_sentence(a_starved_job(share_slots=0.0), fleet)
    assert (found.severity, "no worker of 4 is alive" in found.text) == ("stalled", True)


def test_a_team_at_its_share_is_told_who_has_the_rest():
    job = a_starved_job(
        job="vision/vlm-sft",
        share_slots=2.7,
        sources=(a_source("captions", decode_s=4.0, usual_s=0.4),),
    )
    found = the_sentence(job, replace(FLEET, waiting_teams=("speech", "vision")))
    assert "team speech use the rest: raise the team's weight, or add workers" in found.text


def test_ranks_that_wait_though_steps_are_decoded_are_sent_to_the_network():
    ranks = (a_rank(0), a_rank(1), a_rank(2), a_rank(3, wait_s=0.4))
    found = the_sentence(a_job(ranks=ranks))
    assert "rank 3 waits 0.4 s a step though 4 steps are decoded" in found.text


def test_ranks_that_have_used_up_the_window_wait_for_the_one_behind_and_not_for_data():
    ranks = (a_rank(0), a_rank(1, wait_s=0.4, received_step=44), a_rank(2, received_step=40))
    found = the_sentence(a_job(ranks=ranks, decoded_steps=0))
    assert "rank 1 waits 0.4 s a step: rank 2 (node:102) is 4 steps behind, and no more" in (
        found.text
    )


def test_a_window_that_planning_has_not_filled_is_no_rank_s_fault():
    ranks = (a_rank(0, wait_s=0.4, received_step=44), a_rank(1, received_step=43))
    found = the_sentence(a_job(ranks=ranks, ready_steps=1, decoded_steps=1))
    assert "behind" not in found.text


def test_a_source_near_the_end_of_its_budget_is_mentioned_beside_the_cause():
    sources = (a_source("captions"), a_source("ocr", budget_used=0.8, quarantined=8))
    findings = diagnose(a_job(sources=sources), FLEET)
    assert [finding.severity for finding in findings] == ["info", "slow"]
    assert "`ocr` has used 80% of its error budget: 8 samples masked" in findings[1].text


def test_many_missing_ranks_are_abbreviated():
    missing = tuple(range(1, 64, 2))
    found = the_sentence(a_job(world_size=64, missing_ranks=missing, forming_s=31.0))
    assert "ranks 1, 3, 5, 7, 9, 11, 13, 15 and 24 more to open" in found.text


def test_waiting_ranks_come_worst_first_and_only_if_it_shows():
    ranks = (a_rank(0, wait_s=0.005), a_rank(1, wait_s=0.1), a_rank(2, wait_s=0.5))
    assert [rank.rank for rank in waiting(a_job(ranks=ranks))] == [2, 1]


def test_a_step_that_is_decoded_for_a_moment_does_not_turn_the_blame_to_the_network():
    sources = (a_source("captions", decode_s=20.0, usual_s=0.0),)
    found = the_sentence(a_starved_job(decoded_steps=1, ready_steps=4, sources=sources))
    assert "source `captions` decodes at 0.4 of need" in found.text


def test_samples_that_are_slow_now_and_then_ask_for_a_longer_window():
    sources = (a_source("captions", decode_s=1.9, usual_s=0.0),)
    found = the_sentence(a_starved_job(sources=sources))
    assert "decoding keeps up in the mean, at 4 times the need" in found.text
    assert found.text.endswith("raise ready_steps, now 4")


def test_a_job_without_workers_says_so_before_its_first_step():
    job = a_job(steps=0, decoded_steps=0, share_slots=0.0, sources=(), step_s=0.0)
    found = the_sentence(job, replace(FLEET, workers=0, slots=0))
    assert (found.severity, found.text) == (
        "stalled",
        "all ranks wait: no worker of 4 is alive; see the workers' logs",
    )


@pytest.mark.parametrize("steps", [0, 1])
def test_a_job_that_has_only_begun_is_not_blamed(steps):
    found = the_sentence(a_starved_job(steps=steps, sources=(), share_slots=8.0))
    assert "its first steps are being decoded" in found.text
