"""Old entries of the ledger lie in Parquet files, and nobody who asks can tell."""

import gc
import random
import sqlite3
from contextlib import suppress
from pathlib import Path

import pyarrow as pa
import pytest

from dataservice.core.errors import NotFoundError, StateError
from dataservice.core.job import AttemptRecord, JobRecord, LedgerEntry
from dataservice.core.state_store import StateStore
from dataservice.state import ledger_files, sqlite_ledger
from dataservice.state.directory import FILE
from dataservice.state.memory import MemoryStateStore
from dataservice.state.sqlite import SqliteStateStore
from tests.ledger import ledger_of
from tests.state.archiving import ArchivingStore


def put_job(store: StateStore, name: str = "vlm-sft") -> None:
    store.put_job(
        JobRecord(name=name, spec_json="{}", index_fingerprint="f1", created_unix_s=10.25)
    )


def put_attempt(store: StateStore, number: int, name: str = "vlm-sft") -> None:
    store.put_attempt(
        AttemptRecord(job=name, attempt=number, world_size=8, start_cursor="{}", opened_unix_s=11.5)
    )


def entry(step: int, attempt: int = 1, name: str = "vlm-sft", day: float = 0.0) -> LedgerEntry:
    return LedgerEntry(
        job=name,
        attempt=attempt,
        step=step,
        cursor=f'{{"epoch": 0, "position": {step * 512}, "step": {step}, "seed": 7}}',
        plan_digest=random.Random(step).randbytes(32).hex(),
        world_size=8,
        cost_version="default-1",
        planned_unix_s=86_400.0 * day + step,
        predicted_s=1.5 + step / 7,
        content=random.Random(-step).randbytes(20),
    )


def files_of(folder: Path) -> list[Path]:
    return sorted((folder / "ledger").glob("*")) if (folder / "ledger").exists() else []


def filled(folder: Path, *, steps: int, attempts: int = 2) -> SqliteStateStore:
    """A job of some attempts with as many steps each, all committed."""
    store = SqliteStateStore(folder)
    put_job(store)
    for number in range(1, attempts + 1):
        put_attempt(store, number)
        for step in range(steps):
            store.put_ledger(entry(step, number))
            store.commit_step("vlm-sft", number, step, 99.5 + step, 0.25)
    return store


def killed_between_file_and_transaction(store: SqliteStateStore) -> None:
    """A turn of the archiver that ends there, as a crash ends it."""

    def dies(*of: object) -> object:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sqlite_ledger, "runs_of", dies)
        with pytest.raises(KeyboardInterrupt):
            store.archive_ledger(1e9)


@pytest.mark.parametrize("seed", range(2))
def test_every_question_has_the_answer_of_a_store_that_archives_nothing(
    seed: int, tmp_path: Path, everything_is_old: None
) -> None:
    plain, archiving = MemoryStateStore(), ArchivingStore(tmp_path)
    draw = random.Random(seed)
    for store in (plain, archiving):
        for name in ("vlm-sft", "other"):
            put_job(store, name)
            put_attempt(store, 1, name)
    attempts = {"vlm-sft": 1, "other": 1}
    for _ in range(60):
        name, step = draw.choice(["vlm-sft", "other"]), draw.randrange(12)
        number = draw.randint(1, attempts[name])
        kind = draw.choice(["plan", "plan", "plan", "commit", "content", "start", "again"])
        measured_s, known = draw.choice([None, 0.5]), plain.ledger_entry(name, step, number)
        if known is not None and known.committed_unix_s is not None and kind == "plan":
            continue  # what was trained is not planned again
        for store in (plain, archiving):
            with suppress(NotFoundError):
                if kind == "plan":
                    store.put_ledger(entry(step, number, name))
                elif kind == "commit":
                    store.commit_step(name, number, step, 100.0 + step, measured_s)
                elif kind == "content":
                    store.put_content(name, number, step, bytes([step]))
                elif kind == "start" and attempts[name] < 6:
                    put_attempt(store, attempts[name] + 1, name)
        if kind == "start":
            attempts[name] = min(attempts[name] + 1, 6)
        if kind == "again":  # the coordinator starts anew
            archiving.close()
            archiving = ArchivingStore(tmp_path)
        assert answers(archiving) == answers(plain)
    assert files_of(tmp_path)
    archiving.close()


def answers(store: StateStore) -> list[object]:
    found: list[object] = []
    for name in ("vlm-sft", "other"):
        found += [ledger_of(store, name), store.last_planned_step(name)]
        for number in range(1, 7):
            found.append(store.last_committed_step(name, number))
            found += [store.last_entry(name, number, before=step) for step in (None, 0, 5, 12)]
            found += [store.ledger_entry(name, step, number) for step in (0, 6, 11)]
        found += [store.ledger_entry(name, step) for step in (0, 6, 11)]
    return found


def test_only_old_steps_move_and_those_that_trainers_may_still_need_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite_ledger, "LEAST_ROWS", 1)
    monkeypatch.setattr(sqlite_ledger, "KEPT_STEPS", 10)
    store = filled(tmp_path, steps=30)
    before = ledger_of(store, "vlm-sft")
    assert store.archive_ledger(0.0) == 0  # nothing is so old
    assert store.archive_ledger(5.0) == 10  # five steps of each attempt
    assert store.archive_ledger(1e9) == 25 + 14  # 19 of 30 are far enough behind the newest commit
    assert store.archive_ledger(1e9) == 0
    assert ledger_of(store, "vlm-sft") == before
    store.close()


def test_few_old_steps_are_not_worth_a_file(tmp_path: Path) -> None:
    store = filled(tmp_path, steps=30)
    assert store.archive_ledger(1e9) == 0
    assert not files_of(tmp_path)
    store.close()


def test_files_are_their_owners_alone_and_go_with_their_job(
    tmp_path: Path, everything_is_old: None
) -> None:
    store = filled(tmp_path, steps=5)
    store.archive_ledger(1e9)
    (file,) = files_of(tmp_path)
    assert (file.stat().st_mode & 0o777, file.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    store.delete_job("vlm-sft")
    assert not files_of(tmp_path)
    put_job(store)
    assert (ledger_of(store, "vlm-sft"), store.last_planned_step("vlm-sft")) == ([], -1)
    store.close()


def test_a_file_that_is_gone_or_of_other_steps_is_named_and_training_goes_on(
    tmp_path: Path, everything_is_old: None
) -> None:
    store = filled(tmp_path, steps=8)
    store.archive_ledger(1e9)
    store.put_ledger(entry(8, 2))
    (file,) = files_of(tmp_path)
    store.close()
    store = SqliteStateStore(tmp_path)
    kept = file.read_bytes()
    for damaged in (None, kept[: len(kept) // 2], b""):
        file.unlink(missing_ok=True)
        if damaged is not None:
            file.write_bytes(damaged)
        with pytest.raises(StateError, match=r"missing or damaged.*restore the file from a backup"):
            store.ledger_entry("vlm-sft", 3, 1)
        assert store.last_entry("vlm-sft", 2).step == 8
        store.commit_step("vlm-sft", 2, 8, 100.0)
    file.write_bytes(kept)
    assert store.ledger_entry("vlm-sft", 3, 1).step == 3
    store.close()
    other = filled(tmp_path / "other", steps=9)
    other.archive_ledger(1e9)
    (of_others,) = files_of(tmp_path / "other")
    other.close()
    file.write_bytes(of_others.read_bytes())
    store = SqliteStateStore(tmp_path)
    with pytest.raises(StateError, match="is damaged: row 8 is not step 0 of attempt 2"):
        store.ledger_entry("vlm-sft", 0, 2)
    store.close()


def test_a_full_disk_leaves_all_entries_where_they_are(
    tmp_path: Path, everything_is_old: None
) -> None:
    store = filled(tmp_path, steps=8)
    before = ledger_of(store, "vlm-sft")
    (tmp_path / "ledger").write_text("a file where the folder should be")
    with pytest.raises(StateError, match=r"They stay in state\.db"):
        store.archive_ledger(1e9)
    assert ledger_of(store, "vlm-sft") == before
    (tmp_path / "ledger").unlink()
    assert store.archive_ledger(1e9) == 15
    assert ledger_of(store, "vlm-sft") == before
    store.close()


def test_a_crash_between_file_and_transaction_loses_and_repeats_nothing(
    tmp_path: Path, everything_is_old: None
) -> None:
    store = filled(tmp_path, steps=8)
    before = ledger_of(store, "vlm-sft")
    killed_between_file_and_transaction(store)
    store.close()
    store = SqliteStateStore(tmp_path)
    assert ledger_of(store, "vlm-sft") == before
    assert store.archive_ledger(1e9) == 15
    assert (ledger_of(store, "vlm-sft"), len(files_of(tmp_path))) == (before, 2)
    store.close()


def test_a_step_takes_less_than_half_of_the_room_in_a_file(
    tmp_path: Path, everything_is_old: None
) -> None:
    steps = 300
    store = filled(tmp_path, steps=steps)
    moved = store.archive_ledger(1e9)
    assert moved == 2 * steps - 1
    store.close()
    (file,) = files_of(tmp_path)
    assert file.stat().st_size / moved < (tmp_path / FILE).stat().st_size / (2 * steps) / 2


def test_a_visit_reads_no_entry_where_none_is_old(
    tmp_path: Path, everything_is_old: None, connections: list[sqlite3.Connection]
) -> None:
    store = filled(tmp_path, steps=20)
    asked: list[str] = []
    connections[-1].set_trace_callback(asked.append)
    assert store.archive_ledger(0.0) == 0
    connections[-1].set_trace_callback(None)
    assert asked
    assert not [query for query in asked if "plan_digest" in query]
    store.close()


def test_the_next_visit_begins_with_the_job_of_the_last(
    tmp_path: Path, everything_is_old: None, connections: list[sqlite3.Connection]
) -> None:
    store = SqliteStateStore(tmp_path)
    for name in ("a", "b", "c"):
        put_job(store, name)
        put_attempt(store, 1, name)
        for step in range(4):
            store.put_ledger(entry(step, name=name, day=9.0 if name == "a" else 0.0))
            store.commit_step(name, 1, step, 99.5)
    assert store.archive_ledger(86_400.0) == 3, "of b, the first that has old ones"
    asked: list[str] = []
    connections[-1].set_trace_callback(asked.append)
    assert store.archive_ledger(86_400.0) == 3
    connections[-1].set_trace_callback(None)
    looked_at = [name for query in asked for name in "abc" if f"'{name}'" in query]
    assert list(dict.fromkeys(looked_at)) == ["b", "c"]
    store.close()


def test_a_file_that_no_transaction_names_is_removed(
    tmp_path: Path, everything_is_old: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = filled(tmp_path, steps=8)

    def fails(*of: object) -> object:
        raise sqlite3.OperationalError("disk I/O error")

    monkeypatch.setattr(sqlite_ledger, "runs_of", fails)
    with pytest.raises(StateError):
        store.archive_ledger(1e9)
    assert not files_of(tmp_path)
    store.close()


def test_half_a_file_that_a_crash_leaves_is_swept_and_all_others_stay(
    tmp_path: Path, everything_is_old: None
) -> None:
    store = filled(tmp_path, steps=8)
    before = ledger_of(store, "vlm-sft")
    killed_between_file_and_transaction(store)
    (left,) = files_of(tmp_path)
    store.archive_ledger(1e9)
    (named,) = {*files_of(tmp_path)} - {left}
    half, strange = named.with_name(f"{'0' * 16}.parquet.part"), named.with_name("notes.parquet")
    half.write_bytes(b"half")
    strange.write_bytes(b"of somebody else")
    store.close()
    store = SqliteStateStore(tmp_path)
    assert store.trim() == 4
    assert {*files_of(tmp_path)} == {left, named, strange}, (
        "the state may be put back that names it"
    )
    assert store.trim() == 0
    assert ledger_of(store, "vlm-sft") == before
    store.close()


def entries_in_memory() -> int:
    return sum(type(each) is LedgerEntry for each in gc.get_objects())


def test_a_replay_leaves_few_entries_in_memory(tmp_path: Path) -> None:
    files, groups = ledger_files.LedgerFiles(tmp_path), 24
    for number in range(groups):
        steps = range(number * 4096, (number + 1) * 4096)
        files.write(f"{number:016x}", [entry(step) for step in steps])
    before, entries = pa.total_allocated_bytes(), entries_in_memory()
    for number in range(groups):
        step = number * 4096 + 7
        assert files.entry(f"{number:016x}", 7, ("vlm-sft", 1, step)) == entry(step)
    assert entries_in_memory() <= entries + 1
    assert pa.total_allocated_bytes() - before < 24e6
