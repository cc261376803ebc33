"""One suite for every StateStore."""

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from dataservice.core.errors import ConflictError, NotFoundError
from dataservice.core.job import (
    AttemptRecord,
    CostRecord,
    JobRecord,
    LedgerEntry,
    QuarantineEntry,
    SkipRecord,
)
from dataservice.core.state_store import StateStore
from dataservice.state import memory, sqlite_quarantine
from dataservice.state.memory import MemoryStateStore
from dataservice.state.sqlite import SqliteStateStore
from tests.ledger import ledger_of
from tests.state.archiving import ArchivingStore


@pytest.fixture(params=["memory", "sqlite", "sqlite, archived"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[StateStore]:
    opened: StateStore
    if request.param == "memory":
        opened = MemoryStateStore()
    elif request.param == "sqlite":
        opened = SqliteStateStore(tmp_path)
    else:
        request.getfixturevalue("everything_is_old")
        opened = ArchivingStore(tmp_path)
    yield opened
    opened.close()


def job(name: str = "vlm-sft", **changes: object) -> JobRecord:
    record = JobRecord(
        name=name, spec_json='{"seed": 1}', index_fingerprint="f1", created_unix_s=10.25
    )
    return replace(record, **changes)


def attempt(number: int, name: str = "vlm-sft") -> AttemptRecord:
    return AttemptRecord(
        job=name, attempt=number, world_size=8, start_cursor='{"step": 0}', opened_unix_s=11.5
    )


def entry(step: int, number: int = 1, name: str = "vlm-sft", **changes: object) -> LedgerEntry:
    record = LedgerEntry(
        job=name,
        attempt=number,
        step=step,
        cursor=f'{{"step": {step}}}',
        plan_digest=f"digest-{number}-{step}",
        world_size=8,
        cost_version="v1",
        planned_unix_s=12.125,
    )
    return replace(record, **changes)


def bad(
    sample_id: int, *, step: int = 0, number: int = 1, reason: str = "corrupt"
) -> QuarantineEntry:
    return QuarantineEntry(
        job="vlm-sft",
        attempt=number,
        step=step,
        sample_id=sample_id,
        source="images",
        key=f"{sample_id:06d}",
        reason=reason,
    )


def cost(from_step: int, version: str = "v2", name: str = "vlm-sft") -> CostRecord:
    return CostRecord(
        job=name, from_step=from_step, cost_json="{}", cost_version=version, recorded_unix_s=13.5
    )


def test_a_job_is_read_back_as_it_was_put(store: StateStore) -> None:
    store.put_job(job())
    assert store.job("vlm-sft") == job()
    assert store.job("other") is None


def test_jobs_are_listed_by_name(store: StateStore) -> None:
    for name in ("b", "c", "a"):
        store.put_job(job(name))
    assert [record.name for record in store.jobs()] == ["a", "b", "c"]


def test_replacing_a_job_keeps_its_attempts_and_ledger(store: StateStore) -> None:
    store.put_job(job())
    store.put_attempt(attempt(1))
    store.put_ledger(entry(0))
    store.add_quarantine([bad(3)])
    store.put_job(job(state="draining"))
    assert store.job("vlm-sft") == job(state="draining")
    assert store.last_attempt("vlm-sft") == attempt(1)
    assert ledger_of(store, "vlm-sft") == [entry(0)]
    assert store.quarantine("vlm-sft") == [bad(3)]


def test_every_version_of_a_job_file_is_kept_and_the_newest_is_the_jobs(
    store: StateStore,
) -> None:
    store.put_job(job(order="o1"))
    store.put_job(job(state="draining", order="o1"))
    newest = job(state="draining", order="o1", spec_json='{"seed": 1, "epochs": 2}', spec_version=2)
    store.put_job(newest)
    assert store.job("vlm-sft") == newest
    specs = store.specs("vlm-sft")
    assert [(spec.job, spec.version, spec.spec_json) for spec in specs] == [
        ("vlm-sft", 1, '{"seed": 1}'),
        ("vlm-sft", 2, newest.spec_json),
    ]
    assert 0 < specs[0].submitted_unix_s <= specs[1].submitted_unix_s
    assert store.specs("other") == []


def test_a_version_once_kept_is_never_changed(store: StateStore) -> None:
    store.put_job(job())
    store.put_job(job(spec_json="{}"))
    assert [spec.spec_json for spec in store.specs("vlm-sft")] == ['{"seed": 1}']


def test_versions_go_with_their_job(store: StateStore) -> None:
    store.put_job(job())
    store.put_job(job(spec_version=2))
    store.delete_job("vlm-sft")
    store.put_job(job())
    assert [spec.version for spec in store.specs("vlm-sft")] == [1]


def test_an_attempt_keeps_its_launch_and_its_version_of_the_job_file(store: StateStore) -> None:
    store.put_job(job())
    begun = replace(attempt(1), spec_version=2, launch="torchrun:none@a:1")
    store.put_attempt(begun)
    assert store.last_attempt("vlm-sft") == begun
    assert store.attempts("vlm-sft") == [begun]


def test_a_cost_keeps_the_version_that_it_was_recorded_under(store: StateStore) -> None:
    store.put_job(job())
    store.put_cost(replace(cost(5), spec_version=3))
    assert store.costs("vlm-sft") == [replace(cost(5), spec_version=3)]


def test_deleting_a_job_removes_all_of_it_and_nothing_of_another(store: StateStore) -> None:
    for name in ("vlm-sft", "other"):
        store.put_job(job(name))
        store.put_attempt(attempt(1, name))
        store.put_ledger(entry(0, name=name))
    store.add_quarantine([bad(3)])
    store.put_cost(cost(5))
    store.put_cost(cost(5, name="other"))
    store.delete_job("vlm-sft")
    store.put_job(job())
    assert store.last_attempt("vlm-sft") is None
    assert ledger_of(store, "vlm-sft") == []
    assert store.quarantine("vlm-sft") == []
    assert store.costs("vlm-sft") == []
    assert store.costs("other") == [cost(5, name="other")]
    assert store.last_planned_step("vlm-sft") == -1
    assert ledger_of(store, "other") == [entry(0, name="other")]
    assert store.last_attempt("other") == attempt(1, "other")


def test_several_jobs_are_stored_and_deleted_together(store: StateStore) -> None:
    store.put_job(job("a"), job("b"))
    store.put_attempt(attempt(1, "b"))
    anew = job("b", spec_json="{}")
    store.put_job(job("a", spec_version=2), anew, forget=["b"])
    assert [spec.version for spec in store.specs("a")] == [1, 2]
    assert [spec.spec_json for spec in store.specs("b")] == ["{}"]
    assert store.last_attempt("b") is None
    store.delete_job("a", "b")
    assert store.jobs() == []


def test_deleting_an_unknown_job_is_no_error(store: StateStore) -> None:
    store.delete_job("never")


def test_attempts_count_up_from_one(store: StateStore) -> None:
    store.put_job(job())
    assert store.last_attempt("vlm-sft") is None
    store.put_attempt(attempt(1))
    store.put_attempt(attempt(2))
    assert store.last_attempt("vlm-sft") == attempt(2)


@pytest.mark.parametrize("number", [0, 1, 3])
def test_an_attempt_that_is_not_the_next_is_refused(store: StateStore, number: int) -> None:
    store.put_job(job())
    store.put_attempt(attempt(1))
    with pytest.raises(ConflictError, match="next one, which is 2"):
        store.put_attempt(attempt(number))
    assert store.last_attempt("vlm-sft") == attempt(1)


def test_records_of_a_deleted_job_are_refused(store: StateStore) -> None:
    with pytest.raises(NotFoundError, match="no job 'vlm-sft'"):
        store.put_attempt(attempt(1))
    with pytest.raises(NotFoundError, match="no job 'vlm-sft'"):
        store.put_ledger(entry(0))
    with pytest.raises(NotFoundError, match="no job 'vlm-sft'"):
        store.add_quarantine([bad(1)])


def test_a_planned_step_is_committed_once_all_ranks_trained_it(store: StateStore) -> None:
    store.put_job(job())
    store.put_ledger(entry(4))
    store.commit_step("vlm-sft", 1, 4, 99.5)
    assert store.ledger_entry("vlm-sft", 4) == entry(4, committed_unix_s=99.5)


def test_a_step_keeps_what_was_predicted_and_measured(store: StateStore) -> None:
    store.put_job(job())
    store.put_ledger(entry(4, predicted_s=1.5))
    store.commit_step("vlm-sft", 1, 4, 99.5, 1.75)
    store.commit_step("vlm-sft", 1, 4, 100.5)  # told again, without its seconds
    expected = entry(4, predicted_s=1.5, measured_s=1.75, committed_unix_s=100.5)
    assert store.ledger_entry("vlm-sft", 4) == expected


def test_the_last_planned_step_is_that_of_any_attempt(store: StateStore) -> None:
    store.put_job(job())
    assert store.last_planned_step("vlm-sft") == -1
    for number, step in ((1, 7), (1, 8), (2, 3)):
        store.put_ledger(entry(step, number))
    assert store.last_planned_step("vlm-sft") == 8


def test_costs_are_listed_by_step_and_replace_those_that_begin_later(store: StateStore) -> None:
    store.put_job(job())
    for from_step, version in ((10, "a"), (30, "b"), (50, "c"), (30, "d")):
        store.put_cost(cost(from_step, version))
    assert store.costs("vlm-sft") == [cost(10, "a"), cost(30, "d")]
    assert store.costs("other") == []


def test_costs_need_their_job(store: StateStore) -> None:
    with pytest.raises(NotFoundError, match="no job 'vlm-sft'"):
        store.put_cost(cost(0))


def test_what_a_step_delivered_is_kept_when_it_is_committed(store: StateStore) -> None:
    store.put_job(job())
    store.put_ledger(entry(4))
    store.put_ledger(entry(4, 2))
    store.put_content("vlm-sft", 1, 4, b"\x00what\xff")
    store.commit_step("vlm-sft", 1, 4, 99.5, 1.75)
    first, second = store.ledger_of_step("vlm-sft", 4)
    assert first == entry(4, committed_unix_s=99.5, measured_s=1.75, content=b"\x00what\xff")
    assert second.content is None
    store.put_content("vlm-sft", 1, 4, b"else")
    assert store.ledger_entry("vlm-sft", 4, 1).content == b"else"
    with pytest.raises(NotFoundError, match="never planned"):
        store.put_content("vlm-sft", 1, 5, b"what")
    with pytest.raises(NotFoundError, match="never planned"):
        store.put_content("other", 1, 4, b"what")


def test_what_steps_delivered_is_recorded_with_an_entry_or_neither(store: StateStore) -> None:
    store.put_job(job())
    store.put_ledger(entry(4))
    store.put_ledger(entry(5))
    store.put_ledger(entry(6), [(4, b"four"), (5, b"five")])
    recorded = [store.ledger_entry("vlm-sft", step, 1) for step in (4, 5, 6)]
    assert [each.content for each in recorded] == [b"four", b"five", None]
    with pytest.raises(NotFoundError, match=r"step 8 .* never planned"):
        store.put_ledger(entry(7), [(6, b"six"), (8, b"eight")])
    assert store.ledger_entry("vlm-sft", 7, 1) is None
    assert store.ledger_entry("vlm-sft", 6, 1).content is None


def test_a_step_that_was_never_planned_cannot_be_committed(store: StateStore) -> None:
    store.put_job(job())
    store.put_ledger(entry(4))
    for number, step in ((1, 5), (2, 4)):
        with pytest.raises(NotFoundError, match="never planned"):
            store.commit_step("vlm-sft", number, step, 99.5)


def test_a_step_is_found_in_its_newest_attempt_or_in_the_one_asked_for(store: StateStore) -> None:
    store.put_job(job())
    for number, step in ((1, 0), (1, 1), (2, 1), (2, 2), (3, 2)):
        store.put_ledger(entry(step, number))
    assert store.ledger_entry("vlm-sft", 0) == entry(0, 1)
    assert store.ledger_entry("vlm-sft", 1) == entry(1, 2)
    assert store.ledger_entry("vlm-sft", 1, attempt=1) == entry(1, 1)
    assert store.ledger_entry("vlm-sft", 1, attempt=3) is None
    assert store.ledger_entry("vlm-sft", 7) is None
    assert store.ledger_entry("other", 0) is None


def test_the_ledger_is_listed_by_attempt_and_step(store: StateStore) -> None:
    store.put_job(job())
    places = [(2, 3), (1, 10), (1, 9), (2, 0)]
    for number, step in places:
        store.put_ledger(entry(step, number))
    assert [(e.attempt, e.step) for e in ledger_of(store, "vlm-sft")] == sorted(places)


def test_planning_a_step_again_replaces_its_entry(store: StateStore) -> None:
    store.put_job(job())
    store.put_ledger(entry(0))
    store.put_ledger(entry(0, plan_digest="again"))
    assert ledger_of(store, "vlm-sft") == [entry(0, plan_digest="again")]


def test_the_entries_of_a_step_and_the_last_of_an_attempt_are_found(store: StateStore) -> None:
    store.put_job(job())
    for number, step in ((1, 0), (1, 1), (1, 5), (2, 1), (2, 2)):
        store.put_ledger(entry(step, number))
    assert store.ledger_of_step("vlm-sft", 1) == [entry(1, 1), entry(1, 2)]
    assert store.ledger_of_step("vlm-sft", 9) == []
    assert store.last_entry("vlm-sft", 1) == entry(5, 1)
    assert store.last_entry("vlm-sft", 1, before=5) == entry(1, 1)
    assert store.last_entry("vlm-sft", 1, before=0) is None
    assert store.last_entry("vlm-sft", 3) is None


def test_the_last_committed_step_is_that_of_its_attempt(store: StateStore) -> None:
    store.put_job(job())
    for number, step in ((1, 0), (1, 1), (1, 5), (2, 1)):
        store.put_ledger(entry(step, number))
    assert store.last_committed_step("vlm-sft", 1) == -1
    store.commit_step("vlm-sft", 1, 0, 1.0)
    store.commit_step("vlm-sft", 1, 1, 1.0)
    assert (store.last_committed_step("vlm-sft", 1), store.last_committed_step("vlm-sft", 2)) == (
        1,
        -1,
    )


def test_all_attempts_are_listed_in_order(store: StateStore) -> None:
    store.put_job(job())
    for number in (1, 2, 3):
        store.put_attempt(attempt(number))
    assert store.attempts("vlm-sft") == [attempt(1), attempt(2), attempt(3)]
    assert store.attempts("other") == []


def test_skips_hold_from_the_next_attempt_on_and_are_numbered(store: StateStore) -> None:
    store.put_job(job())
    (first,) = store.add_skips("vlm-sft", [(3, 5)], "skip", 20.5)
    store.put_attempt(attempt(1))
    more = store.add_skips("vlm-sft", [(7, 7), (4, 4)], "train", 21.5)
    assert first == SkipRecord(
        job="vlm-sft", number=1, first_step=3, last_step=5, action="skip", from_attempt=1,
        recorded_unix_s=20.5,
    )  # fmt: skip
    assert [(skip.number, skip.from_attempt, skip.action) for skip in more] == [
        (2, 2, "train"),
        (3, 2, "train"),
    ]
    assert store.skips("vlm-sft") == [first, *more]
    assert store.skips("other") == []
    with pytest.raises(NotFoundError, match="no job 'other'"):
        store.add_skips("other", [(3, 5)], "skip", 20.5)
    store.delete_job("vlm-sft")
    store.put_job(job())
    assert store.skips("vlm-sft") == []


def test_samples_in_quarantine_are_counted_once_and_found_by_step(store: StateStore) -> None:
    store.put_job(job())
    store.add_quarantine([bad(9, step=1), bad(2, step=1), bad(9, step=0, number=2), bad(5)])
    assert store.quarantined_samples("vlm-sft") == 3
    assert store.quarantined_samples("other") == 0
    assert store.quarantine_of_step("vlm-sft", 1, 1) == [bad(2, step=1), bad(9, step=1)]
    assert store.quarantine_of_step("vlm-sft", 2, 1) == []


def test_quarantined_samples_of_an_attempt_s_first_steps_are_counted_by_source(
    store: StateStore,
) -> None:
    store.put_job(job())
    clip = replace(bad(4, step=2), source="clips")
    store.add_quarantine([bad(9, step=1), bad(9, step=2), clip, bad(9, step=3), bad(5, number=2)])

    def counted(attempt: int, last_step: int) -> dict[str, int]:
        return store.quarantined_by_source("vlm-sft", attempt, last_step=last_step)

    assert counted(1, 2) == {"images": 2, "clips": 1}
    assert counted(1, 0) == counted(1, -1) == counted(3, 9) == {}
    assert counted(2, 0) == {"images": 1}
    assert store.quarantined_by_source("other", 1, last_step=9) == {}


def test_a_quarantined_sample_is_kept_once_a_step_and_listed_in_order(store: StateStore) -> None:
    store.put_job(job())
    store.add_quarantine([bad(9, step=1), bad(2, step=1), bad(5, step=0, number=2), bad(5)])
    store.add_quarantine([bad(9, step=1, reason="told twice")])
    expected = [bad(5), bad(2, step=1), bad(9, step=1), bad(5, step=0, number=2)]
    assert store.quarantine("vlm-sft") == expected


def test_the_quarantine_is_listed_in_pages(store: StateStore) -> None:
    store.put_job(job())
    entries = [bad(s, step=t, number=n) for n in (1, 2) for t in (0, 3) for s in (2, 7, 9)]
    store.add_quarantine(entries)
    listed: list[QuarantineEntry] = []
    while page := store.quarantine("vlm-sft", behind=listed[-1] if listed else None, most=5):
        assert len(page) <= 5
        listed += page
    assert listed == entries


def test_a_quarantine_that_is_full_counts_further_samples(
    store: StateStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (memory, sqlite_quarantine):
        monkeypatch.setattr(module, "MOST_QUARANTINED", 5)
    store.put_job(job(), job("other"))
    store.add_quarantine([bad(s) for s in range(4)])
    store.add_quarantine([bad(s, step=1) for s in range(4)])
    assert store.quarantine("vlm-sft") == [*(bad(s) for s in range(4)), bad(0, step=1)]
    store.add_quarantine([bad(8, step=2), replace(bad(8), job="other")])
    assert len(store.quarantine("vlm-sft")) == 5
    assert store.quarantined_samples("vlm-sft") == 5
    assert len(store.quarantine("other")) == 1
    store.delete_job("vlm-sft")
    store.put_job(job())
    store.add_quarantine([bad(1)])
    assert store.quarantine("vlm-sft") == [bad(1)]
    assert store.quarantined_samples("vlm-sft") == 1


def test_a_job_of_many_entries_is_deleted_in_pieces(tmp_path: Path) -> None:
    with contextlib.closing(SqliteStateStore(tmp_path)) as store:
        store.put_job(job(), job("other"))
        for step in range(5):
            store.add_quarantine([bad(s, step=step, reason="r" * 1500) for s in range(3000)])
        store.add_quarantine([replace(bad(3), job="other")])
        held_bytes = (tmp_path / "state.db").stat().st_size
        store.delete_job("vlm-sft")
        assert held_bytes > 50 * 2**20
        assert (tmp_path / "state.db-wal").stat().st_size < held_bytes / 3, "room that it needs"
        assert [record.name for record in store.jobs()] == ["other"]
        assert (store.quarantine("vlm-sft"), store.quarantined_samples("vlm-sft")) == ([], 0)
        assert len(store.quarantine("other")) == store.quarantined_samples("other") == 1


def test_quarantine_entries_of_one_call_are_kept_all_or_none(store: StateStore) -> None:
    store.put_job(job())
    with pytest.raises(NotFoundError):
        store.add_quarantine([bad(1), replace(bad(2), job="other")])
    assert store.quarantine("vlm-sft") == []
    store.add_quarantine([])


def test_room_is_given_back_until_there_is_none_and_nothing_else_goes(store: StateStore) -> None:
    store.put_job(job(), job("other"))
    store.put_ledger(entry(0))
    store.commit_step("vlm-sft", 1, 0, 1.0)
    store.add_quarantine([bad(3)])
    before = (ledger_of(store, "vlm-sft"), store.quarantine("vlm-sft"))
    store.delete_job("other")
    while store.trim():
        pass
    assert (ledger_of(store, "vlm-sft"), store.quarantine("vlm-sft")) == before
    assert [record.name for record in store.jobs()] == ["vlm-sft"]


def test_threads_take_turns(store: StateStore) -> None:
    store.put_job(job())
    failures: list[Exception] = []

    def write(number: int) -> None:
        try:
            for step in range(20):
                store.put_ledger(entry(step, number))
                store.commit_step("vlm-sft", number, step, 1.0)
                store.ledger_entry("vlm-sft", step)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    ledger = ledger_of(store, "vlm-sft")
    assert len(ledger) == 80
    assert all(e.committed_unix_s == 1.0 for e in ledger)
