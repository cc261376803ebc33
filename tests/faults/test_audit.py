"""The audit finds what it is there to find: a training's journal, spoilt in every way."""

import re
from dataclasses import replace

import pytest

from soak.audit import Dataset, audit_rows, surviving
from soak.journal import read_journals
from soak.training import Launch
from tests.faults.stage import JOIN_LIMIT_S


@pytest.fixture(scope="module")
def trained(local_stage):
    """The rows of an undisturbed training, and its dataset."""
    with local_stage.training() as training:
        training.join(JOIN_LIMIT_S)
    rows = read_journals(training.folder / "journal")
    return rows, Dataset(local_stage.data / f"{training.job}.yaml")


def changed(rows, place, **changes):
    return [*rows[:place], replace(rows[place], **changes), *rows[place + 1 :]]


def first_with(rows, what):
    return next(place for place, row in enumerate(rows) if getattr(row, what))


def other_samples(rows):
    place = first_with(rows, "parts")
    part = rows[place].parts[0]
    wrong = replace(part, samples=tuple(sample + 1 for sample in part.samples))
    return changed(rows, place, parts=(wrong, *rows[place].parts[1:]))


def other_tokens(rows):
    place = first_with(rows, "parts")
    parts = rows[place].parts
    return changed(rows, place, parts=(replace(parts[0], tokens="0" * 24), *parts[1:]))


def lost_item(rows):
    place = first_with(rows, "items")
    return changed(rows, place, items=rows[place].items[1:])


def another_item(rows):
    place = first_with(rows, "items")
    return changed(rows, place, items=("0" * 24, *rows[place].items[1:]))


SPOILT = {
    "a lost step": (lambda rows: [row for row in rows if row.step != 3], "3.* never trained"),
    "a step trained twice": (lambda rows: rows + [r for r in rows if r.step == 3], "repeated"),
    "a rank that missed a step": (lambda rows: rows[1:], "was trained by ranks"),
    "another plan on one rank": (lambda rows: changed(rows, 0, plan="other"), "differ in plan"),
    "other samples": (other_samples, "lost|not held once"),
    "other tokens": (other_tokens, "other tokens"),
    "a lost item": (lost_item, "1 frames or recordings are missing"),
    "an item of other bytes": (
        another_item,
        "1 frames or recordings .*, 1 are not of its",
    ),
}


def test_an_undisturbed_training_passes(trained):
    rows, dataset = trained
    assert audit_rows(rows, dataset) == []


@pytest.mark.parametrize("how", SPOILT)
def test_it_finds(trained, how):
    rows, dataset = trained
    spoil, said = SPOILT[how]
    found = audit_rows(spoil(rows), dataset)
    assert any(re.search(said, line) for line in found), found


def test_what_a_later_launch_replaced_does_not_count(trained):
    rows, dataset = trained
    killed = [replace(row, launch=1) for row in rows if row.step < 6]
    resumed = [replace(row, launch=2) for row in rows if row.step >= 4]
    launches = [
        Launch(number=number, world_size=3, start_step=start) for number, start in ((1, 0), (2, 4))
    ]
    assert audit_rows(surviving(killed + resumed, launches), dataset) == []
    assert audit_rows(killed + resumed, dataset) != []
