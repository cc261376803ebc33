"""The series by name: Prometheus' conventions, bounded labels, and the room's own table."""

import re
from pathlib import Path

import pytest

import dataservice.observability
from dataservice.observability.metrics import PrometheusMetrics
from dataservice.observability.series import Series, series_of
from dataservice.observability.worker_metrics import worker_registry

README = Path(dataservice.observability.__file__).parent / "README.md"
# https://prometheus.io/docs/practices/naming: base units, or what is counted, in the plural.
UNITS = ("seconds", "bytes", "tokens", "ratio")
COUNTED = (
    "steps",
    "samples",
    "packs",
    "groups",
    "ranks",
    "jobs",
    "slots",
    "workers",
    "weight",
    "rank",
    "tickets",
    "reads",
)
# Few values each, known before the run: none that grows with steps, ranks or samples.
LABELS = {
    "job",
    "team",
    "source",
    "stage",
    "phase",
    "degree",
    "worker",
    "path",
    "where",
    "state",
    "over_replicas",
    "fault",
}


def known() -> list[Series]:
    worker = worker_registry("worker-0.1", slots=2, read=lambda: None)
    return [*series_of(PrometheusMetrics().registry), *series_of(worker)]


@pytest.mark.parametrize("each", known(), ids=lambda each: each.name)
def test_a_name_and_its_labels_follow_the_conventions(each):
    assert re.fullmatch(r"dataservice(_[a-z]+)+", each.name)
    assert each.text.endswith("."), "a sentence"
    assert set(each.labels) <= LABELS
    # A counter's `_total` is added when it is shown; of gauges and histograms it would be a lie.
    assert not each.name.endswith(("_total", "_count", "_sum", "_bucket", "_info"))
    *_, last = each.name.split("_")
    assert last in (*UNITS, *COUNTED)
    assert each.kind in ("counter", "gauge", "histogram")


def test_the_coordinator_s_and_a_worker_s_series_can_be_scraped_into_one_prometheus():
    names = [each.name for each in known()]
    assert len(names) == len(set(names))


def test_the_readme_s_table_has_every_series_with_its_labels_and_no_other():
    rows = re.findall(r"^\| `(dataservice_\w+)(?:\{([\w, ]+)\})?` \|", README.read_text(), re.M)
    told = {name: {label for label in labels.split(", ") if label} for name, labels in rows}
    assert told == {each.shown: set(each.labels) - {"job"} for each in known()}


def test_series_of_jobs_are_marked_in_the_readme_by_their_table():
    before, after = README.read_text().split("### Of a job")[1].split("### Of teams and workers")
    jobs = {each.shown for each in known() if "job" in each.labels}
    assert set(re.findall(r"^\| `(dataservice_\w+)", before, re.M)) == jobs
    assert not jobs & set(re.findall(r"^\| `(dataservice_\w+)", after, re.M))
