"""The sentence that names who waits for whom."""

from dataclasses import replace

import pytest

from dataservice.core.health import FleetHealth, JobHealth, RankHealth, SourceHealth
from dataservice.core.orders import StorageOutage
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


@pytest.mark.parametrize(("planned", "told"), [(6, "7 steps, the last is step 6"), (-1, "0 steps")])
def test_a_job_whose_data_is_given_out_says_how_many_steps_and_which_is_the_last(planned, told):
    found = the_sentence(a_job(ended=True, planned_step=planned))
    assert found.text == f"all data is given out: {told}"


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
    assert "3 of 4 workers are down, see their logs" in found.text
    short = replace(fleet, shortfall="3 of 4 workers are missing: no room")
    found = the_sentence(a_starved_job(sources=sources, share_slots=2.0), short)
    assert found.text.endswith("; 3 of 4 workers are missing: no room")


def test_without_any_worker_nothing_moves():
    fleet = replace(FLEET, workers=0, slots=0)
    found = the_sentence(a_starved_job(share_slots=0.0), fleet)
    assert (found.severity, "no worker of 4 is alive" in found.text) == ("stalled", True)
    found = the_sentence(a_starved_job(share_slots=0.0), replace(fleet, shortfall="no room"))
    assert found.text.endswith("no worker of 4 is alive; no room")


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


# ---- what decoding waits for ----------------------------------------------------------------


def said_where_ranks_wait_for(**seconds: float) -> str:
    """What is said of a source with these seconds, none of which is known as usual."""
    source = a_source("captions", usual_s=0.0, **seconds)
    return the_sentence(a_starved_job(sources=(source,))).text


def test_a_source_that_waits_for_its_storage_asks_for_reads_and_not_for_workers():
    assert said_where_ranks_wait_for(
        samples=100.0, read_s=12.0, read_cpu_s=0.4, decode_s=4.0, decode_cpu_s=3.8
    ) == (
        "ranks 0-3 wait 0.6 s a step: source `captions` is read at 0.5 of need, 0.16 s a sample, "
        "0.042 s of it on a CPU; the rest it waits for its storage: look there, or raise "
        "reads_per_worker 2.2 times, for a read that waits takes neither a slot nor a CPU"
    )


def test_samples_that_wait_for_a_cpu_do_not_ask_for_workers():
    """0.063 s a sample, of which 0.022 is CPU."""
    assert said_where_ranks_wait_for(
        samples=300.0, read_s=0.3, read_cpu_s=0.3, decode_s=18.6, decode_cpu_s=6.3
    ) == (
        "ranks 0-3 wait 0.6 s a step: source `captions` decodes at 0.42 of need, 0.063 s a sample, "
        "0.022 s of it on a CPU; the rest it waits for a CPU, or for what its processor calls: "
        "look at what else runs on the workers' hosts, and give them a CPU for each slot"
    )


def test_samples_that_keep_cpus_busy_ask_for_workers():
    said = said_where_ranks_wait_for(
        samples=300.0, read_s=0.3, read_cpu_s=0.2, decode_s=18.6, decode_cpu_s=17.0
    )
    assert said.endswith("decodes at 0.42 of need, 0.063 s a sample; add 7 workers")


def test_a_source_whose_storage_grew_slow_is_told_from_one_whose_cpus_are_taken():
    grown = {"samples": 10.0, "usual_s": 0.05}
    far = a_source("far", read_s=11.0, read_cpu_s=0.1, decode_s=1.0, decode_cpu_s=0.9, **grown)
    found = the_sentence(a_starved_job(sources=(far,)))
    assert "s of it on a CPU, where 0.05 s is usual; look at its storage" in found.text
    robbed = a_source("near", read_s=0.1, read_cpu_s=0.1, decode_s=12.0, decode_cpu_s=0.9, **grown)
    found = the_sentence(a_starved_job(sources=(robbed,)))
    assert "where 0.05 s is usual; the rest it waits for a CPU" in found.text


def test_storage_that_is_away_is_the_cause_before_decoding_that_it_starves():
    outages = (
        StorageOutage(job="j", source="far", away_s=31.0, reason="503"),
        StorageOutage(job="j", source="farther", away_s=94.4, reason="no route"),
    )
    sources = (a_source("far", decode_s=20.0, usual_s=0.0),)
    found = the_sentence(a_starved_job(sources=sources, outages=outages))
    assert found.text == (
        "the storage of source `farther` has not answered for 94 s; its samples wait, and none is "
        "masked for it: no route"
    )
    assert found.severity == "stalled"


def test_workers_whose_memory_is_full_are_not_asked_for_a_longer_window():
    sources = (a_source("captions", decode_s=1.9, usual_s=0.0),)
    found = the_sentence(a_starved_job(sources=sources, room_s=0.8))
    assert found.text == (
        "ranks 0-3 wait 0.6 s a step: the workers' memory is full, and a pack waits 0.8 s for room "
        "before it is decoded; raise held_bytes_per_worker, or add workers"
    )


def test_a_team_that_holds_all_the_bytes_it_may_is_told_so():
    sources = (a_source("captions", decode_s=1.9, usual_s=0.0),)
    found = the_sentence(a_starved_job(sources=sources, bytes_full=True))
    assert "its team holds all the decoded bytes that it may" in found.text
    assert found.text.endswith("raise the team's max_ready_bytes")


def test_full_memory_is_no_cause_while_decoding_itself_is_short():
    sources = (a_source("captions", decode_s=20.0, usual_s=0.0),)
    found = the_sentence(a_starved_job(sources=sources, room_s=0.8, bytes_full=True))
    assert "source `captions` decodes at 0.4 of need" in found.text


# ---- clients that do not train --------------------------------------------------------------


def test_a_client_that_only_reads_is_not_decoding_its_first_steps():
    ranks = (a_rank(0, untrained_steps=57, wait_s=0.2), a_rank(1, untrained_steps=56))
    found = the_sentence(a_starved_job(ranks=ranks, steps=0, step_s=0.0, ready_steps=0))
    assert (found.severity, found.text) == (
        "info",
        "ranks 0-1 only read: 57 steps begun, none committed, and waited 0.2 s a step for data; a "
        "trainer commits each step that it has trained",
    )


@pytest.mark.parametrize(("step_s", "reads"), [(0.0, True), (0.009, True), (0.05, False)])
def test_a_loop_that_computes_nothing_between_steps_is_told_so(step_s, reads):
    found = the_sentence(a_starved_job(step_s=step_s))
    assert found.severity == ("info" if reads else "slow")
    assert reads == found.text.startswith(
        "ranks 0-3 only read: each step is asked for as soon as the one before is there, and "
        "waited 0.6 s a step for data; a trainer computes between steps"
    )


def test_a_trainer_in_its_first_steps_is_not_said_to_read_only():
    ranks = (a_rank(0, untrained_steps=2, wait_s=0.2), a_rank(1, untrained_steps=1))
    found = the_sentence(a_starved_job(ranks=ranks, steps=0, sources=()))
    assert "its first steps are being decoded" in found.text


def test_without_any_worker_a_client_that_only_reads_is_told_of_that_first():
    ranks = (a_rank(0, untrained_steps=57, wait_s=0.2),)
    found = the_sentence(a_starved_job(ranks=ranks, steps=0), replace(FLEET, workers=0, slots=0))
    assert "no worker of 4 is alive" in found.text
