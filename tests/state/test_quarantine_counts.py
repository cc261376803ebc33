"""The quarantine is counted once, beside the calls of steps, and as a query would count it."""

import random
import sqlite3
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from dataservice.core.errors import NotFoundError, StateError
from dataservice.core.job import JobRecord, QuarantineEntry
from dataservice.core.state_store import StateStore
from dataservice.state import sqlite_quarantine
from dataservice.state.memory import MemoryStateStore
from dataservice.state.sqlite import SqliteStateStore


def put_job(store: StateStore, name: str = "a") -> None:
    store.put_job(JobRecord(name=name, spec_json="{}", index_fingerprint="f", created_unix_s=1.0))


def bad(sample_id: int, step: int, *, attempt: int = 1, name: str = "a") -> QuarantineEntry:
    return QuarantineEntry(
        job=name,
        attempt=attempt,
        step=step,
        sample_id=sample_id,
        source=f"source-{sample_id % 3}",
        key=f"{sample_id:06d}",
        reason="corrupt",
    )


def counts(store: StateStore, last_step: int) -> list[object]:
    """All counts of two jobs, in the steps up to this one."""
    return [
        (
            store.quarantined_samples(name),
            [store.quarantined_by_source(name, n, last_step=last_step) for n in (1, 2, 3)],
        )
        for name in ("a", "b")
    ]


@pytest.mark.parametrize("seed", range(4))
def test_every_count_is_that_of_the_entries_whatever_came_between(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite_quarantine, "PIECE_ENTRIES", 2)
    counting, plain = SqliteStateStore(tmp_path), MemoryStateStore()
    draw = random.Random(seed)

    def something_happens() -> None:
        name, kind = draw.choice("ab"), draw.choice(["add"] * 12 + ["delete", "forget", "put"])
        drawn = [(draw.randrange(30), draw.randrange(8), draw.randint(1, 2)) for _ in range(3)]
        entries = [bad(sample, step, attempt=n, name=name) for sample, step, n in drawn]
        for store in (plain, counting):
            with suppress(NotFoundError):
                if kind == "add":
                    store.add_quarantine(entries)
                elif kind == "delete":
                    store.delete_job(name)
                elif kind == "put":
                    put_job(store, name)
                else:
                    store.put_job(
                        JobRecord(name="b", spec_json="", index_fingerprint="f"), forget=[name]
                    )

    for _ in range(150):
        something_happens()
        last_step = draw.randrange(-1, 9)
        if draw.random() < 0.05:  # the coordinator starts anew
            counting.close()
            counting = SqliteStateStore(tmp_path)
        with monkeypatch.context() as patch:  # also between the pieces of a count
            patch.setattr(sqlite_quarantine, "rest", something_happens)
            counting.quarantined_by_source(draw.choice("ab"), 1, last_step=last_step)
        assert counts(counting, last_step) == counts(plain, last_step)
    counting.close()


def test_what_was_counted_is_not_counted_again(
    tmp_path: Path, connections: list[sqlite3.Connection]
) -> None:
    store = SqliteStateStore(tmp_path)
    put_job(store)
    store.add_quarantine([bad(sample, sample // 2) for sample in range(20)])
    counts(store, 6)
    asked: list[str] = []
    connections[-1].set_trace_callback(asked.append)
    counts(store, 6)
    assert asked == []
    store.add_quarantine([bad(3, 7), bad(99, 7)])
    assert store.quarantined_samples("a") == 21
    assert store.quarantined_by_source("a", 1, last_step=7) == {
        "source-0": 8,
        "source-1": 5,
        "source-2": 5,
    }
    connections[-1].set_trace_callback(None)
    counted = [query for query in asked if "COUNT" in query]
    assert len(counted) == 1, "the new step, and no sample"
    assert "step BETWEEN 7 AND 7" in counted[0]
    store.close()


def test_other_calls_have_their_turn_between_the_pieces_of_a_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite_quarantine, "PIECE_ENTRIES", 4)
    store = SqliteStateStore(tmp_path)
    put_job(store)
    store.add_quarantine([bad(sample, sample // 2) for sample in range(20)])
    came: list[bool] = []

    def another_calls() -> None:
        other = threading.Thread(target=store.check, daemon=True)
        other.start()
        other.join(10)
        came.append(not other.is_alive())

    monkeypatch.setattr(sqlite_quarantine, "rest", another_calls)
    assert sum(store.quarantined_by_source("a", 1, last_step=9).values()) == 20
    assert came == [True] * 4
    store.close()


def test_entries_that_were_not_recorded_are_not_counted(
    tmp_path: Path, connections: list[sqlite3.Connection]
) -> None:
    store = SqliteStateStore(tmp_path)
    put_job(store)
    store.add_quarantine([bad(1, 1)])
    before = counts(store, 9)
    with pytest.raises(NotFoundError):
        store.add_quarantine([bad(2, 1), bad(2, 1, name="gone")])
    connections[-1].execute("PRAGMA query_only = 1")
    with pytest.raises(StateError):
        store.add_quarantine([bad(2, 1), bad(3, 2)])
    connections[-1].execute("PRAGMA query_only = 0")
    assert counts(store, 9) == before
    store.close()


def test_a_deleted_job_leaves_no_sample_behind(
    tmp_path: Path, connections: list[sqlite3.Connection]
) -> None:
    store = SqliteStateStore(tmp_path)
    for name in ("a", "b"):
        put_job(store, name)
        store.add_quarantine([bad(1, 1, name=name), bad(1, 2, name=name)])
    store.delete_job("a")
    left = connections[-1].execute("SELECT * FROM quarantined_samples").fetchall()
    assert left == [("b", 1)]
    store.close()
