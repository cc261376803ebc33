"""An operator's view of a real service: its metrics and its log, against what the job did."""

import json
from collections import Counter

import pytest
import yaml

from dataservice.serving.coordinator_client import CoordinatorClient
from tests.observability.collector import collecting
from tests.service.small import (
    CLIPS,
    IMAGES,
    TEXTS,
    beheaded_member,
    indexed_job,
    make_corpus,
    spoil,
)
from tests.service.support import Ranks, metrics_addresses, scraped, serving, wait_for

RANKS = 3
STEP_S = 0.05
PHASE_S = {"vision": 0.01, "llm": 0.035, "waiting": 0.005}


def outstanding(series) -> list[float]:
    return [v for (name, _), v in series.items() if name.endswith("_outstanding_tokens")]


class Watched:
    """An epoch over three ranks: what they got, the plans, the series, and the log."""

    def __init__(self, corpus, home, collector):
        config = home / "service.yaml"
        first = 24000  # of this test alone
        ports = f"{first}-{first + 99}"
        plain = {"workers": 2, "worker_metrics_ports": ports, "traces": collector.endpoint}
        config.write_text(yaml.safe_dump(plain))
        file = indexed_job(corpus, epochs=2, error_budget={"rate": 1})
        spoil(corpus / "images" / "images-0.tar", beheaded_member("image-00.jpg"))
        flags = ("--config", str(config), "--metrics-listen", "127.0.0.1:0", "--log-json")
        with serving(home, "local", *flags) as service:
            service.cli("job", "submit", str(file))
            self.ranks = Ranks(
                service.address, RANKS, pace_s=STEP_S, measured_s=STEP_S, phase_s=PHASE_S
            )
            self.ranks.start().join()
            *workers, coordinator = metrics_addresses(service)
            wait_for(lambda: self.settled(coordinator, workers))
            steps = len(self.ranks.digests)
            with CoordinatorClient(service.address) as client:
                self.plans = [client.explain("job", step).plan for step in range(steps)]
            service.stop()
            lines = service.log.read_text().splitlines()
        self.log = [json.loads(line) for line in lines if line[0] == "{"]

    def settled(self, coordinator, workers):
        """Look, and whether this was the last look: ranks that have joined may still count as
        waiting, receipts of their last step may be under way, and workers may hold it."""
        self.series = scraped(coordinator)
        self.workers = [scraped(address) for address in workers]
        left = self.of_job("worst_exposed_wait_rank") == -1
        return left and not any(outstanding(self.series)) and not self.of_workers("held_bytes")

    def traced(self, name, collector):
        """The traces that have a span of this name."""
        return {span.trace_id.hex() for _, span in collector.spans if span.name == name}

    def of_job(self, name, **labels):
        return self.series[f"dataservice_{name}", frozenset({"job": "job", **labels}.items())]

    def by(self, label, name):
        """A job's values by another label."""
        return {
            dict(labels)[label]: value
            for (found, labels), value in self.series.items()
            if found == f"dataservice_{name}"
        }

    def of_workers(self, name):
        """The sum over all workers."""
        return sum(
            value
            for series in self.workers
            for (found, _), value in series.items()
            if found == f"dataservice_worker_{name}"
        )


@pytest.fixture(scope="module")
def watched(tmp_path_factory):
    corpus = make_corpus(tmp_path_factory.mktemp("observed") / "corpus")
    with collecting() as collector:
        seen = Watched(corpus, tmp_path_factory.mktemp("watched"), collector)
        wait_for(lambda: seen.traced("plan", collector) == set(seen.ranks.digests.values()))
        wait_for(lambda: seen.traced("prepare pack", collector) == seen.traced("plan", collector))
        return seen


def test_steps_and_samples_are_those_that_were_trained(watched):
    ranks, of_job = watched.ranks, watched.of_job
    steps = len(ranks.digests)
    assert of_job("planned_steps_total") == of_job("committed_steps_total") == steps
    assert of_job("plan_seconds_count") == steps
    assert of_job("planned_samples_total") == ranks.visits.total()
    assert of_job("ready_steps") == 0


def test_packs_degrees_and_balance_are_those_of_the_plans(watched):
    degrees = Counter(str(d) for plan in watched.plans for d in plan.pack_degree.tolist())
    assert watched.by("degree", "cp_groups_total") == degrees
    # A receipt that the ranks overtake, because they have the bytes already, is not waited for.
    packs = degrees.total()
    assert 0.9 * packs <= watched.of_job("decoded_packs_total") <= packs
    last = watched.plans[-1]
    assert watched.of_job("predicted_step_seconds") == pytest.approx(last.predicted_s)
    gaps = {stage.stage: pytest.approx(stage.gap) for stage in last.stages}
    assert watched.by("stage", "plan_gap_ratio").items() >= gaps.items()
    loads = watched.by("over_replicas", "predicted_replica_seconds")
    rounded = 1 + 1e-9  # a mean of equal loads may be off by a bit
    assert loads["least"] <= loads["mean"] * rounded
    assert loads["mean"] <= loads["most"] * rounded <= last.predicted_s * 1.001
    assert 0 <= watched.of_job("plan_pad_ratio") < 1


def test_bytes_samples_and_bad_ones_are_told_by_source(watched):
    shown = watched.by("source", "read_samples_total")
    trained = {"images": 2 * IMAGES, "clips": 2 * CLIPS, "texts": 2 * TEXTS}
    assert all(0.9 * trained[source] <= shown[source] <= trained[source] for source in trained)
    assert watched.by("source", "quarantined_samples_total") == {"images": 2}
    assert watched.by("source", "read_bytes_total")["images"] > 2 * (IMAGES - 1) * 500
    read_s = watched.by("source", "source_read_seconds_total")
    decode_s = watched.by("source", "source_decode_seconds_total")
    total_s = sum(read_s.values()) + sum(decode_s.values())
    assert watched.of_job("decode_seconds_total") == pytest.approx(total_s)
    assert watched.by("team", "team_decode_seconds_total") == {"": pytest.approx(total_s)}


def test_measured_seconds_and_waits_are_those_that_the_ranks_told(watched):
    steps = len(watched.ranks.digests)
    assert watched.of_job("measured_step_seconds") == STEP_S
    assert watched.of_job("measured_rank_seconds_count") == RANKS * steps
    assert watched.of_job("measured_rank_seconds_sum") == pytest.approx(RANKS * steps * STEP_S)
    assert watched.by("phase", "measured_phase_seconds") == pytest.approx(PHASE_S)
    predicted = watched.by("phase", "predicted_phase_seconds")
    assert predicted == watched.plans[-1].time.phase_s
    assert watched.by("phase", "measured_over_predicted_phase_ratio").keys() == {
        phase for phase in PHASE_S if predicted[phase] > 0
    }
    assert watched.of_job("measured_over_predicted_ratio") > 0
    assert watched.of_job("worst_exposed_wait_rank") == -1  # all have left
    assert watched.of_job("waiting_ranks") == 0


def test_what_the_workers_tell_adds_up_to_what_the_coordinator_heard(watched):
    assert len(watched.workers) == 2
    samples = sum(watched.by("source", "read_samples_total").values())
    assert watched.of_workers("samples_total") >= samples
    assert watched.of_workers("samples_total") == watched.ranks.visits.total()
    assert watched.of_workers("masked_samples_total") == 2
    assert watched.of_workers("decoding_slots") == 2
    assert watched.of_workers("held_bytes") == 0
    heard_s = watched.of_job("decode_seconds_total")
    assert watched.of_workers("decode_seconds_total") >= 0.999 * heard_s
    assert outstanding(watched.series) == [0.0, 0.0]


def test_no_label_grows_with_the_length_of_the_run(watched):
    for series in (watched.series, *watched.workers):
        labels = {name for _, pairs in series for name, _ in pairs}
        assert labels <= {
            "job", "team", "source", "stage", "phase", "degree", "worker", "state",
            "over_replicas", "le", "fault", "path", "where",
        }  # fmt: skip


def test_every_log_line_is_json_and_says_what_it_is_about(watched):
    planned = [line["step"] for line in watched.log if line["message"].startswith("planned ")]
    assert planned == sorted(watched.ranks.digests)
    assert {line["step"]: line["trace_id"] for line in watched.log if "trace_id" in line} == (
        watched.ranks.digests
    )
    packs = [line for line in watched.log if line["message"].startswith("pack ")]
    assert {line["step"] for line in packs} == set(watched.ranks.digests)
    assert {line["worker"] for line in packs} == {"worker-0.1", "worker-1.1"}
    opened = [line for line in watched.log if line["message"].startswith("attempt opened")]
    assert [(line["job"], line["attempt"]) for line in opened] == [("job", 1)]
    assert {"time", "level", "logger", "message"} <= set.intersection(*map(set, watched.log))
