"""The names of a job's sample order: which files it may have grown from, and which not."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dataservice.core.cursor import Cursor
from dataservice.core.errors import IndexStaleError, QuotaError, StateError
from dataservice.core.job import BatchSize, JobRecord, MixtureChange
from dataservice.core.job_limits import JobLimits
from dataservice.core.job_setup import JobSetup
from dataservice.core.ports import SampleStream
from dataservice.core.sample import IntArray, LengthTable
from dataservice.engine.planner import PlannedStep, in_order, plan_step
from dataservice.jobs import setup
from dataservice.jobs.indexing import index_job
from dataservice.jobs.sample_order import SampleOrder
from dataservice.jobs.setup import job_records, open_job
from dataservice.sources.catalog import IndexedCatalog
from tests.jobs.corpus import job_of, write_job

TALKS = {"name": "talks", "format": "jsonl", "url": "talks.jsonl"}
PAGES = {"name": "pages", "format": "parquet", "url": "pages.parquet"}
MORE = {"name": "more", "format": "jsonl", "url": "more.jsonl", "weight": 0}
LATER = {"name": "later", "format": "jsonl", "url": "later.jsonl", "weight": 0}
BRING_IN = {"from_epoch": 1, "weights": {"more": 1.0}}
GONE = {"from_epoch": 2, "weights": {"talks": 0.5}}


@pytest.fixture
def grown_home(home: Path) -> Path:
    """The corpus with two files more, all four sources indexed."""
    for name in ("more", "later"):
        records = [{"id": f"{name}-{k}", "text": f"{name} " * (k + 2)} for k in range(6)]
        text = "".join(json.dumps(record) + "\n" for record in records)
        (home / f"{name}.jsonl").write_text(text)
    write_job(home, sources=[TALKS, PAGES, MORE, LATER])
    index_job(job_of(home), custom_processors={})
    return home


def record_of(home: Path, *sources: dict[str, Any], **changes: Any) -> JobRecord:
    file = write_job(home, sources=list(sources), **changes)
    return job_records(file.read_text(), str(home))[0]


def opened(home: Path, *sources: dict[str, Any], **changes: Any) -> JobSetup:
    return open_job(record_of(home, *sources, **changes), custom_processors={})


def fits(setup: JobSetup, before: JobSetup) -> bool:
    """Whether a job may go on from another file's checkpoints."""
    return before.order == setup.order or before.order in setup.earlier_orders


def test_a_file_has_grown_from_those_that_end_before_its_waiting_sources_and_its_changes(
    grown_home: Path,
) -> None:
    home = grown_home
    files = [
        opened(home, TALKS, PAGES),
        opened(home, TALKS, PAGES, MORE),
        opened(home, TALKS, PAGES, MORE, mixture_changes=[BRING_IN]),
        opened(home, TALKS, PAGES, MORE, LATER, mixture_changes=[BRING_IN]),
        opened(home, TALKS, PAGES, MORE, LATER, mixture_changes=[BRING_IN, GONE]),
    ]
    assert len({each.order for each in files}) == len(files)
    for place, newer in enumerate(files):
        assert [fits(newer, older) for older in files] == [
            before <= place for before in range(len(files))
        ]


def test_the_name_of_an_order_is_that_of_releases_before_jobs_could_grow(home: Path) -> None:
    for changes, name in (([], "aebf762562ce"), ([BRING_IN, GONE], "26f37e672d7e")):
        write_job(home, sources=[TALKS, {**PAGES, "weight": 0.5}, MORE], mixture_changes=changes)
        assert SampleOrder.of(job_of(home), ["f1", "f2", "f3"], {}).name == name


@pytest.mark.parametrize(
    "sources",
    [
        (PAGES, TALKS, MORE),
        (TALKS, MORE, PAGES),
        (TALKS, MORE),
        (TALKS, {**PAGES, "name": "leaves"}, MORE),
        (TALKS, PAGES, {**MORE, "weight": 0.1}),
        (TALKS, {**PAGES, "weight": 0.5}, MORE),
        (TALKS, {**PAGES, "max_passes": 3}, MORE),
    ],
    ids=["reordered", "inserted", "removed", "renamed", "weighed", "changed", "bounded"],
)
def test_whatever_else_becomes_of_the_sources_is_another_order(
    grown_home: Path, sources: tuple[dict[str, Any], ...]
) -> None:
    before = opened(grown_home, TALKS, PAGES)
    write_job(grown_home, sources=list(sources))
    index_job(job_of(grown_home), custom_processors={})
    assert not fits(opened(grown_home, *sources), before)


@pytest.mark.parametrize(
    "changes", [[], [GONE, BRING_IN], [{**BRING_IN, "from_epoch": 2}]], ids=["gone", "before", "on"]
)
def test_changes_of_the_mixture_that_a_file_had_stay_in_their_places(
    grown_home: Path, changes: list[dict[str, Any]]
) -> None:
    before = opened(grown_home, TALKS, PAGES, MORE, mixture_changes=[BRING_IN])
    after = opened(grown_home, TALKS, PAGES, MORE, LATER, mixture_changes=changes)
    assert not fits(after, before)


def other_content(home: Path, name: str) -> None:
    path = home / f"{name}.jsonl"
    path.write_text(path.read_text().replace("cat", "cow").replace("more", "less"))
    index_job(job_of(home), custom_processors={})


@pytest.mark.parametrize("name", ["talks", "more"])
def test_another_content_of_a_source_of_before_is_another_order(
    grown_home: Path, name: str
) -> None:
    before = opened(grown_home, TALKS, PAGES, MORE)
    write_job(grown_home, sources=[TALKS, PAGES, MORE, LATER])
    assert fits(opened(grown_home, TALKS, PAGES, MORE, LATER), before)
    other_content(grown_home, name)
    assert not fits(opened(grown_home, TALKS, PAGES, MORE, LATER), before)


def test_the_content_of_a_source_that_was_added_is_held_to_from_then_on(grown_home: Path) -> None:
    setup = opened(grown_home, TALKS, PAGES, MORE)
    setup.require_current()
    other_content(grown_home, "more")
    with pytest.raises(IndexStaleError, match="over other samples"):
        setup.require_current()
    with pytest.raises(StateError, match=f"was registered in sample order {setup.order}"):
        open_job(setup.record, custom_processors={})


def test_only_the_index_of_the_added_source_is_made(grown_home: Path) -> None:
    for name in ("more", "later"):
        shutil.rmtree(grown_home / "index" / name)
    write_job(grown_home, sources=[TALKS, PAGES, MORE])
    made = index_job(job_of(grown_home), custom_processors={})
    assert [(each.source, each.files_reused, each.files) for each in made] == [
        ("talks", 1, 1),
        ("pages", 1, 1),
        ("more", 0, 1),
    ]


def test_sample_ids_of_before_stay(grown_home: Path) -> None:
    before = opened(grown_home, TALKS, PAGES)
    after = opened(grown_home, TALKS, PAGES, MORE)
    ids = np.arange(before.catalog.samples)
    assert [ref for ref, _ in after.catalog.details(ids)] == [
        ref for ref, _ in before.catalog.details(ids)
    ]


def test_an_added_source_counts_against_the_limits(grown_home: Path) -> None:
    grown = record_of(grown_home, TALKS, PAGES, MORE)
    for limits, which in (
        (JobLimits(max_sources=2), "max_sources"),
        (JobLimits(max_samples=12), "max_samples"),
    ):
        few = record_of(grown_home, TALKS, PAGES)
        open_job(few, custom_processors={}, job_limits=limits)
        with pytest.raises(QuotaError, match=which):
            open_job(grown, custom_processors={}, job_limits=limits)


ISF = {"memory_tokens": 512, "window_steps": 2}


def test_windows_of_steps_are_split_as_before_and_shares_end_their_epoch_as_before(
    grown_home: Path,
) -> None:
    for changes in ({"plan": ISF}, {"weights": "tokens"}):
        before = opened(grown_home, TALKS, PAGES, **changes)
        after = opened(grown_home, TALKS, PAGES, MORE, **changes)
        assert after.limits_at("") == before.limits_at("")
        assert (before.limits_at("") is not None) == ("plan" in changes)
        assert after.epoch_size == before.epoch_size


@pytest.mark.parametrize("most", [1, 3, 5, 9, 10, 100])
def test_windows_of_a_large_index_are_packed_by_samples_from_all_over_it(
    grown_home: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    looked_at: list[list[int]] = []

    def noted(catalog: IndexedCatalog, ids: IntArray) -> LengthTable:
        looked_at.append(np.asarray(ids).tolist())
        return lengths(catalog, ids)

    lengths = IndexedCatalog.lengths
    monkeypatch.setattr(IndexedCatalog, "lengths", noted)
    monkeypatch.setattr(setup, "MOST_LOOKED_AT", most)
    kept = [opened(grown_home, TALKS, PAGES, plan=ISF).limits_at("") for _ in range(2)]
    assert kept[0] == kept[1]
    (once, again) = looked_at
    assert once == again
    stretch = -(-10 // most)  # talks and pages have ten samples
    assert [each // stretch for each in once] == list(range(-(-10 // stretch)))


def planned(setup: JobSetup) -> list[PlannedStep]:
    cursor, steps = Cursor(), []
    while (
        step := plan_step(setup, setup.stream.begin_changes(cursor), setup.topology(2))
    ) is not None:
        steps.append(step)
        cursor = step.next_cursor
    return steps


def digests(steps: list[PlannedStep]) -> list[str]:
    return [each.plan.digest for each in steps]


@pytest.mark.parametrize("plan", [ISF, {"memory_tokens": 512}], ids=["windows", "steps"])
@pytest.mark.parametrize("weights", ["passes", "tokens"])
def test_every_step_before_the_change_is_planned_as_if_nothing_had_been_added(
    grown_home: Path, plan: dict[str, Any], weights: str
) -> None:
    about = {"plan": plan, "weights": weights, "epochs": 3}
    loud = {**MORE, "loss_weight": 3.0}
    before = planned(opened(grown_home, TALKS, PAGES, **about))
    waiting = opened(grown_home, TALKS, PAGES, loud, **about)
    assert digests(planned(waiting)) == digests(before)
    change = {"bring": MixtureChange(weights={"more": 1.0}, from_step=4)}
    brought = planned(replace(waiting, stream=waiting.stream.changed(change)))
    assert digests(brought)[:4] == digests(before)[:4]
    drawn = np.concatenate([each.plan.sample_ids for each in brought[4:]])
    assert drawn.max() >= 10, "talks and pages have ten samples"
    for checkpoint in (each.next_cursor for each in before):  # inside of windows too
        resumed = plan_step(waiting, in_order(checkpoint, waiting), waiting.topology(2))
        assert resumed is None or resumed.plan.digest == digests(before)[checkpoint.step]


def test_once_it_is_brought_in_windows_are_packed_for_it_too(grown_home: Path) -> None:
    change = {"bring": MixtureChange(weights={"more": 1.0}, from_step=0)}
    for sources in ((TALKS, PAGES, MORE), (PAGES, MORE), (PAGES, {**TALKS, "weight": 0}, MORE)):
        setup = opened(grown_home, *sources, plan=ISF)
        stream = setup.stream.changed(change)
        brought = replace(setup, stream=stream)
        assert brought.limits_at("") == setup.limits(stream.sources_met(""))
        assert brought.limits_at("bring@0:0") == setup.limits(len(sources))


def all_samples(stream: SampleStream) -> list[int]:
    draw = stream.draw(epoch=0, position=0, batch=BatchSize(samples=1000))
    return list(draw.sample_ids.tolist())


def older_of(setup: JobSetup, record: JobRecord) -> JobSetup:
    return setup.revise(setup, replace(record, order=setup.order))


def test_an_older_version_is_planned_over_the_newest_catalog_in_which_the_added_wait(
    grown_home: Path,
) -> None:
    loud = {**MORE, "loss_weight": 3.0, "error_budget": {"rate": 0.5}}
    older = record_of(grown_home, TALKS, PAGES, epochs=3)
    newest = opened(grown_home, TALKS, PAGES, loud, mixture_changes=[BRING_IN], epochs=3)
    setup = older_of(newest, older)
    assert setup.catalog is newest.catalog
    assert setup.budgets["more"].rate == 0.5
    assert setup.loss_weights == (1.0, 1.0, 3.0)
    assert setup.mixture is not None
    assert [each.passes for each in setup.mixture.sources] == [1.0, 1.0, 0.0]
    of_older = open_job(older, custom_processors={}).stream
    assert all_samples(setup.stream) == all_samples(of_older), "its file has no change"
    assert all_samples(newest.stream) != all_samples(of_older)
