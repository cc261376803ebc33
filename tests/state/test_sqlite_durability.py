"""What only the store on disk can get wrong."""

import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from dataservice.core.errors import StateError
from dataservice.core.job import JobRecord
from dataservice.state import schema
from dataservice.state.directory import hold
from dataservice.state.sqlite import SqliteStateStore
from tests.ledger import ledger_of

JOB = JobRecord(name="job", spec_json="{}", index_fingerprint="f")

HOLDER = """
import sys, time
from pathlib import Path
from dataservice.core.job import JobRecord
from dataservice.state.directory import hold
from dataservice.state.sqlite import SqliteStateStore
store = SqliteStateStore(Path(sys.argv[1]))
store.put_job(JobRecord(name="job", spec_json="{}", index_fingerprint="f"))
print("held", flush=True)
time.sleep(60)
"""


def test_what_was_put_is_there_after_opening_again(tmp_path: Path) -> None:
    store = SqliteStateStore(tmp_path / "state")
    store.put_job(JOB)
    store.close()
    store.close()
    again = SqliteStateStore(tmp_path / "state")
    assert again.jobs() == [JOB]
    again.close()


def test_the_file_is_in_wal_mode_and_fully_synchronous(
    tmp_path: Path, connections: list[sqlite3.Connection]
) -> None:
    store = SqliteStateStore(tmp_path)
    assert connections[-1].execute("PRAGMA journal_mode").fetchone() == ("wal",)
    assert connections[-1].execute("PRAGMA synchronous").fetchone() == (2,)
    store.close()


def test_a_second_process_is_refused_and_a_killed_one_leaves_the_directory_free(
    tmp_path: Path,
) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(StateError, match=rf"process {holder.pid}\).*--state-dir"):
            SqliteStateStore(tmp_path)
        os.kill(holder.pid, signal.SIGKILL)
    store = SqliteStateStore(tmp_path)
    assert store.jobs() == [JOB]
    store.close()


def test_a_second_store_in_the_same_process_is_refused_too(tmp_path: Path) -> None:
    store = SqliteStateStore(tmp_path)
    with pytest.raises(StateError, match="held by another service"):
        SqliteStateStore(tmp_path)
    store.close()


def test_a_directory_that_was_held_before_stays_so_after_its_store_is_closed(
    tmp_path: Path,
) -> None:
    with hold(tmp_path) as held:
        SqliteStateStore(tmp_path, held=held).close()
        with pytest.raises(StateError, match="held by another service"):
            SqliteStateStore(tmp_path)
    SqliteStateStore(tmp_path).close()


def test_a_file_that_is_no_database_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "state.db").write_bytes(b"not a database at all" * 300)
    with pytest.raises(StateError, match=r"damaged.*no backup"):
        SqliteStateStore(tmp_path)
    assert (tmp_path / "state.db").read_bytes().startswith(b"not a database")


def test_a_damaged_page_is_found_when_opening(tmp_path: Path) -> None:
    store = SqliteStateStore(tmp_path)
    for number in range(200):
        store.put_job(JobRecord(name=f"{number}", spec_json="x" * 500, index_fingerprint="f"))
    store.close()
    with (tmp_path / "state.db").open("r+b") as file:
        file.seek(8 * 4096)
        file.write(b"\xff" * 4096 * 8)
    with pytest.raises(StateError, match=r"damaged.*no backup"):
        SqliteStateStore(tmp_path)
    with pytest.raises(StateError, match="damaged"):  # and the directory was let go of
        SqliteStateStore(tmp_path)


def test_a_file_of_a_newer_release_is_refused(tmp_path: Path) -> None:
    SqliteStateStore(tmp_path).close()
    with sqlite3.connect(tmp_path / "state.db") as connection:
        connection.execute("INSERT INTO migrations VALUES (99, 0.0)")
    connection.close()
    with pytest.raises(StateError, match=r"schema version 99.*knows up to 7"):
        SqliteStateStore(tmp_path)


def test_an_older_file_is_migrated_and_keeps_its_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, connections: list[sqlite3.Connection]
) -> None:
    store = SqliteStateStore(tmp_path)
    store.put_job(JOB)
    store.close()
    newer = (*schema.MIGRATIONS, "CREATE TABLE notes (note TEXT) STRICT;")
    monkeypatch.setattr(schema, "MIGRATIONS", newer)
    store = SqliteStateStore(tmp_path)
    assert store.jobs() == [JOB]
    assert connections[-1].execute("SELECT COUNT(*) FROM notes").fetchone() == (0,)
    version = connections[-1].execute("SELECT MAX(version) FROM migrations").fetchone()
    assert version == (len(newer),)
    store.close()


def test_a_ledger_of_the_first_release_goes_on_without_its_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, connections: list[sqlite3.Connection]
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(schema, "MIGRATIONS", schema.MIGRATIONS[:1])
        store = SqliteStateStore(tmp_path)
        connections[-1].execute("INSERT INTO jobs VALUES ('job', '{}', 'f', 'active', 0.0)")
        connections[-1].execute(
            "INSERT INTO ledger VALUES ('job', 1, 4, '{}', 'digest', 8, 'v1', 1.0, NULL)"
        )
        store.close()
    store = SqliteStateStore(tmp_path)
    (entry,) = ledger_of(store, "job")
    assert (entry.step, entry.predicted_s, entry.measured_s) == (4, None, None)
    store.commit_step("job", 1, 4, 2.0, 0.5)
    assert ledger_of(store, "job")[0].measured_s == 0.5
    assert store.costs("job") == []
    store.close()


def test_a_migration_that_fails_leaves_the_older_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, connections: list[sqlite3.Connection]
) -> None:
    SqliteStateStore(tmp_path).close()
    with monkeypatch.context() as patch:
        broken = (*schema.MIGRATIONS, "CREATE TABLE notes (note TEXT); CREATE TABLE jobs (x);")
        patch.setattr(schema, "MIGRATIONS", broken)
        with pytest.raises(StateError, match="already exists"):
            SqliteStateStore(tmp_path)
    store = SqliteStateStore(tmp_path)
    store.put_job(JOB)
    tables = connections[-1].execute("SELECT name FROM sqlite_master").fetchall()
    assert ("notes",) not in tables
    store.close()


def test_a_full_disk_keeps_what_was_safe_and_says_what_to_do(
    tmp_path: Path, connections: list[sqlite3.Connection]
) -> None:
    store = SqliteStateStore(tmp_path)
    store.put_job(JOB)
    (pages,) = connections[-1].execute("PRAGMA page_count").fetchone()
    connections[-1].execute(f"PRAGMA max_page_count = {pages + 2}")
    with pytest.raises(StateError, match=r"state\.db: .*full.*Free space"):
        store.put_job(JobRecord(name="big", spec_json="x" * 100_000, index_fingerprint="f"))
    assert store.jobs() == [JOB]
    connections[-1].execute("PRAGMA max_page_count = 100000")
    store.put_job(JobRecord(name="later", spec_json="{}", index_fingerprint="f"))
    assert [job.name for job in store.jobs()] == ["job", "later"]
    store.close()


def test_a_store_that_turned_read_only_says_so(
    tmp_path: Path, connections: list[sqlite3.Connection]
) -> None:
    store = SqliteStateStore(tmp_path)
    connections[-1].execute("PRAGMA query_only = 1")
    with pytest.raises(StateError, match="writable for this user"):
        store.put_job(JOB)
    store.close()


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StateError, match=r"file/state cannot be written.*--state-dir"):
        SqliteStateStore(tmp_path / "file" / "state")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_directory_is_named(tmp_path: Path) -> None:
    directory = tmp_path / "state"
    directory.mkdir(mode=0o500)
    with pytest.raises(StateError, match=r"cannot be written: Permission denied"):
        SqliteStateStore(directory)


def test_a_closed_store_raises_a_state_error(tmp_path: Path) -> None:
    store = SqliteStateStore(tmp_path)
    store.close()
    with pytest.raises(StateError, match="closed"):
        store.jobs()
