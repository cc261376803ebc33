"""An operator's view of a real service: its metrics and its log, against what the job did."""

import json
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.service.support import Ranks, explained, job_file, serving, wait_for


def scraped(address: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Every series and its value, by name and labels."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def outstanding(series) -> list[float]:
    return [v for (name, _), v in series.items() if name.endswith("_outstanding_tokens")]


@pytest.fixture(scope="module")
def watched(corpus, tmp_path_factory):
    """An epoch over three ranks: what they got, the plans, the series, and the log."""
    home = tmp_path_factory.mktemp("watched")
    flags = ("--metrics-listen", "127.0.0.1:0", "--log-json")
    with serving(home, "local", *flags) as service:
        service.cli("job", "submit", str(job_file(corpus, home)))
        ranks = Ranks(service.address, 3).start().join()
        lines = service.log.read_text().splitlines()
        said = next(line for line in lines if line.startswith("metrics at "))
        address = said.removeprefix("metrics at http://").removesuffix("/metrics")
        wait_for(lambda: not any(outstanding(scraped(address))))  # the last receipts
        series = scraped(address)
        last = explained(service, len(ranks.digests) - 1)
        service.stop()
        log = [json.loads(line) for line in service.log.read_text().splitlines() if line[0] == "{"]
    return ranks, series, last, log


def test_the_metrics_agree_with_what_the_job_did(watched):
    ranks, series, last, _ = watched

    def of_job(name, **labels):
        return series[f"dataservice_{name}", frozenset({"job": "job", **labels}.items())]

    steps = len(ranks.digests)
    assert of_job("planned_steps_total") == steps
    assert of_job("committed_steps_total") == steps
    assert of_job("plan_seconds_count") == steps
    assert of_job("planned_samples_total") == ranks.visits.total()
    packs = {
        (shard.step, microbatch.wave, microbatch.pack)
        for shards in ranks.shards.values()
        for shard in shards
        for microbatch in shard.microbatches
        if not microbatch.idle
    }
    assert len(packs) == sum(v for (name, _), v in series.items() if "cp_groups_total" in name)
    # A receipt that the ranks overtake, because they have the bytes already, is not waited for.
    assert 0.9 * len(packs) <= of_job("decoded_packs_total") <= len(packs)
    assert of_job("predicted_step_seconds") == pytest.approx(last["plan"]["predicted_s"])
    assert of_job("decode_seconds_total") > 0
    assert of_job("prepared_bytes_total") > sum(
        microbatch.input_ids.numel()
        for shards in ranks.shards.values()
        for shard in shards
        for microbatch in shard.microbatches
    )
    assert outstanding(series) == [0.0, 0.0]


def test_no_label_grows_with_the_length_of_the_run(watched):
    _, series, _, _ = watched
    labels = {name for _, pairs in series for name, _ in pairs}
    assert labels <= {"job", "team", "source", "stage", "phase", "degree", "worker", "le"}


def test_every_log_line_is_json_and_says_what_it_is_about(watched):
    ranks, _, _, log = watched
    planned = [line["step"] for line in log if line["message"].startswith("planned ")]
    assert planned == sorted(ranks.digests)
    opened = [line for line in log if line["message"].startswith("attempt opened")]
    assert [(line["job"], line["attempt"]) for line in opened] == [("job", 1)]
    assert {"time", "level", "logger", "message"} <= set.intersection(*map(set, log))
