"""Files that were damaged, disks that are full or read-only: said plainly, nothing made worse."""

import hashlib
import os
import random
import re
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import pytest

from dataservice.core.errors import StateError
from dataservice.core.job import JobRecord, LedgerEntry
from dataservice.state.directory import BACKUP
from dataservice.state.sqlite import SqliteStateStore
from dataservice.state.wal import lost_transactions
from tests.ledger import ledger_of

JOB = JobRecord(name="job", spec_json='{"seed": 1}', index_fingerprint="f")
BYTES_A_STEP = 384  # what the ledger may grow by with a step, as the README promises

# A process that is killed leaves its last transactions in the log.
WRITER = """
import os, signal, sys
from pathlib import Path
from dataservice.core.job import JobRecord
from dataservice.state.sqlite import SqliteStateStore
store = SqliteStateStore(Path(sys.argv[1]))
for number in range(int(sys.argv[2])):
    store.put_job(JobRecord(name=f"job-{number:03d}", spec_json="x" * 900, index_fingerprint="f"))
os.kill(os.getpid(), signal.SIGKILL)
"""


def killed_while_writing(home: Path, jobs: int = 20) -> Path:
    done = subprocess.run([sys.executable, "-c", WRITER, str(home), str(jobs)], check=False)
    assert done.returncode == -9
    assert (home / "state.db-wal").stat().st_size > 0
    return home


def entry(step: int, attempt: int = 1) -> LedgerEntry:
    cursor = (
        f'{{"epoch": 3, "order": "0123456789ab", "position": {step * 4096}, "step": {step}, '
        '"step_in_window": 7, "version": 1}'
    )
    return LedgerEntry(
        job="job",
        attempt=attempt,
        step=step,
        cursor=cursor,
        plan_digest=hashlib.md5(str(step).encode()).hexdigest(),
        world_size=2560,
        cost_version="23a6e7a9b827810d-a1fcc48ffc0ec14a-a1fcc48ffc0ec14a",
        planned_unix_s=1.7e9 + step / 3,
        predicted_s=1 / (step + 3),
    )


def contents(home: Path) -> dict[str, str]:
    """A digest of each file, the lock and the shared memory aside."""
    names = [name for name in os.listdir(home) if not name.endswith(("-shm", ".lock"))]
    return {name: hashlib.md5((home / name).read_bytes()).hexdigest() for name in names}


def refused(home: Path) -> str:
    """Opening is refused, twice with the same words, and changes no file."""
    before = contents(home)
    with pytest.raises(StateError) as told:
        SqliteStateStore(home)
    with pytest.raises(StateError) as again:
        SqliteStateStore(home)
    assert str(told.value) == str(again.value)
    assert contents(home) == before
    return str(told.value)


@pytest.fixture
def home(tmp_path: Path, connections: list[sqlite3.Connection]) -> Path:
    """A store of some size that was started twice, so that there is a backup."""
    for number in (1, 2):
        store = SqliteStateStore(tmp_path)
        connections[-1].execute("PRAGMA synchronous = OFF")
        store.put_job(JOB)
        for step in range(100):
            store.put_ledger(entry(step, number))
        store.close()
    return tmp_path


# ---- damage -------------------------------------------------------------------------------


def noise(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[4096 : 4096 + 8000] = random.Random(1).randbytes(8000)
    path.write_bytes(data)


def halved(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def cut_in_a_page(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1000)


def beheaded(path: Path) -> None:
    path.write_bytes(bytes(100) + path.read_bytes()[100:])


@pytest.mark.parametrize("damage", [noise, halved, cut_in_a_page, beheaded])
def test_a_damaged_file_is_refused_with_its_backup_and_restored_as_told(
    home: Path, damage: Callable[[Path], None]
) -> None:
    damage(home / "state.db")
    said = refused(home)
    assert str(home / "state.db") in said
    assert "was left as it is" in said
    assert f"`cp {home / BACKUP} {home / 'state.db'}`" in said
    for name in ("state.db", "state.db-wal", "state.db-shm"):  # as told
        if (home / name).exists():
            (home / name).rename(home / f"{name}.damaged")
    (home / "state.db").write_bytes((home / BACKUP).read_bytes())
    store = SqliteStateStore(home)
    assert store.jobs() == [JOB]
    assert len(ledger_of(store, "job")) == 100  # of when it was last started
    store.close()


@pytest.mark.parametrize("damage", [lambda path: path.unlink(), lambda path: os.truncate(path, 0)])
def test_a_file_that_is_gone_beside_its_backup_is_not_begun_anew(
    home: Path, damage: Callable[[Path], None]
) -> None:
    damage(home / "state.db")
    said = refused(home)
    assert "but its backup" in said
    assert "move the backup away too to start anew" in said
    (home / BACKUP).unlink()
    store = SqliteStateStore(home)
    assert store.jobs() == []
    store.close()


def test_a_log_is_taken_up_whole_after_a_kill(tmp_path: Path) -> None:
    killed_while_writing(tmp_path)
    assert lost_transactions(tmp_path / "state.db-wal") == ""
    store = SqliteStateStore(tmp_path)
    assert len(store.jobs()) == 20
    store.close()


def test_a_log_that_ends_in_a_half_written_transaction_is_taken_up_to_there(
    tmp_path: Path,
) -> None:
    log = killed_while_writing(tmp_path) / "state.db-wal"
    os.truncate(log, log.stat().st_size - 100)
    assert lost_transactions(log) == ""
    store = SqliteStateStore(tmp_path)
    assert [job.name for job in store.jobs()] == [f"job-{n:03d}" for n in range(19)]
    store.close()


@pytest.mark.parametrize("place", [0.2, 0.5, 0.8])
def test_a_log_damaged_in_its_middle_is_refused_not_cut_off_there(
    tmp_path: Path, place: float
) -> None:
    log = killed_while_writing(tmp_path) / "state.db-wal"
    data = bytearray(log.read_bytes())
    at = int(len(data) * place)
    data[at] ^= 1
    log.write_bytes(data)
    assert "is damaged, and whole transactions follow" in refused(tmp_path)


def test_a_log_without_its_header_is_refused(tmp_path: Path) -> None:
    log = killed_while_writing(tmp_path) / "state.db-wal"
    log.write_bytes(bytes(32) + log.read_bytes()[32:])
    assert "state.db-wal: its header is damaged" in refused(tmp_path)


def test_a_log_begun_anew_over_an_older_one_is_sound(tmp_path: Path) -> None:
    """Frames of before the last checkpoint stay behind those of after it."""
    killed_while_writing(tmp_path, jobs=20)
    with closing(sqlite3.connect(tmp_path / "state.db")) as connection:
        connection.execute("PRAGMA wal_checkpoint(RESTART)")
        connection.execute("UPDATE jobs SET state = 'draining' WHERE name = 'job-003'")
        connection.commit()
        log = (tmp_path / "state.db-wal").read_bytes()
    copy = tmp_path / "copy-wal"
    copy.write_bytes(log)
    assert len(log) > 20 * 4096
    assert lost_transactions(copy) == ""


def test_a_database_of_something_else_is_refused(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "state.db")) as connection:
        connection.execute("CREATE TABLE photos (name TEXT)")
    assert "the tables photos, which is no state of this service" in refused(tmp_path)


def test_a_version_that_its_tables_belie_is_refused(tmp_path: Path) -> None:
    SqliteStateStore(tmp_path).close()
    with closing(sqlite3.connect(tmp_path / "state.db")) as connection:
        connection.execute("DELETE FROM migrations WHERE version > 1")
        connection.commit()
    assert "says schema version 1" in refused(tmp_path)


def test_a_start_that_was_killed_at_its_first_write_is_begun_anew(tmp_path: Path) -> None:
    (tmp_path / "state.db").touch()
    store = SqliteStateStore(tmp_path)
    store.put_job(JOB)
    store.close()


# ---- the backup ---------------------------------------------------------------------------


def test_a_backup_that_cannot_be_written_stops_no_service(
    home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = (home / BACKUP).read_bytes()
    (home / f"{BACKUP}.part").mkdir()
    store = SqliteStateStore(home)
    assert store.jobs() == [JOB]
    store.close()
    assert "the state was not backed up" in caplog.text
    assert (home / BACKUP).read_bytes() == before


def test_a_store_that_was_closed_leaves_the_file_and_its_backup(home: Path) -> None:
    assert sorted(contents(home)) == [BACKUP, "state.db"]


def test_a_start_that_is_refused_keeps_the_backup_of_the_one_before(home: Path) -> None:
    before = (home / BACKUP).read_bytes()
    with closing(sqlite3.connect(home / "state.db")) as connection:
        connection.execute("INSERT INTO migrations VALUES (99, 0.0)")
        connection.commit()
    assert "schema version 99" in refused(home)
    assert (home / BACKUP).read_bytes() == before


# ---- disks --------------------------------------------------------------------------------


@contextmanager
def mounted(folder: Path, size_bytes: int) -> Iterator[Path]:
    """A file system of its own, as small as that."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", str(folder)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("file systems cannot be mounted here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def filled(ballast: Path) -> None:
    """Take what is left of the disk."""
    with suppress(OSError), ballast.open("wb", buffering=0) as stream:
        while stream.write(bytes(4096)):
            pass


def commit_all(store: SqliteStateStore, steps: int) -> None:
    for step in range(steps):
        store.commit_step("job", 1, step, 1.0)


def test_a_disk_that_fills_up_keeps_what_was_safe_and_goes_on_once_there_is_room(
    tmp_path: Path,
) -> None:
    with mounted(tmp_path / "disk", 2 * 2**20) as disk:
        store = SqliteStateStore(disk)
        store.put_job(JOB)
        (disk / "ballast").write_bytes(bytes(1_500_000))
        step, said = 0, ""
        while not said:
            try:
                store.put_ledger(entry(step))
                step += 1
            except StateError as error:
                said = str(error)
        assert re.search(r"state\.db: .*full.*need not be restarted", said)
        assert [e.step for e in ledger_of(store, "job")] == list(range(step))
        with pytest.raises(StateError):
            commit_all(store, step)  # some have room in what was written in vain
        (disk / "ballast").unlink()
        store.put_ledger(entry(step))
        store.commit_step("job", 1, step, 1.0)
        assert store.last_committed_step("job", 1) == step
        store.close()


def test_a_disk_that_is_full_or_read_only_at_the_start_is_named(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", 2**20) as disk:
        SqliteStateStore(disk).close()
        filled(disk / "ballast")
        with pytest.raises(StateError, match=rf"{disk}.*(No space left|full|I/O error).*[Ss]pace"):
            SqliteStateStore(disk)
        # With room for a new page of the lock, but not for SQLite.
        with (disk / "ballast").open("r+b") as ballast:
            ballast.truncate(ballast.seek(0, 2) - 4096)
        with pytest.raises(StateError, match=r"(full|I/O error).*start the service again") as full:
            SqliteStateStore(disk)
        assert "need not be restarted" not in str(full.value)
        (disk / "ballast").unlink()
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        with pytest.raises(StateError, match=r"cannot be written: Read-only file system"):
            SqliteStateStore(disk)


@pytest.mark.parametrize("name", ["state.db", "state.db-wal", "state.backup.db", "state.lock"])
def test_a_folder_in_place_of_a_file_is_named_and_left_as_it_is(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir(mode=0o755)
    with pytest.raises(StateError, match=rf"{name} is a folder.*Move it away.*--state-dir"):
        SqliteStateStore(tmp_path)
    assert (tmp_path / name).stat().st_mode & 0o777 == 0o755


# ---- size and speed -----------------------------------------------------------------------


def test_the_ledger_grows_by_a_bounded_number_of_bytes_a_step(
    tmp_path: Path, connections: list[sqlite3.Connection]
) -> None:
    store = SqliteStateStore(tmp_path)
    store.put_job(JOB)
    connections[-1].execute("PRAGMA synchronous = OFF")
    connections[-1].execute("PRAGMA wal_checkpoint(TRUNCATE)")
    before = (tmp_path / "state.db").stat().st_size
    for step in range(2000):
        store.put_ledger(entry(step))
        store.put_content("job", 1, step, hashlib.sha1(str(step).encode()).digest())
        store.commit_step("job", 1, step, 1.7e9 + step, 0.5)
    store.close()
    assert ((tmp_path / "state.db").stat().st_size - before) / 2000 <= BYTES_A_STEP


def test_no_question_of_a_restart_or_a_page_of_explain_scans_the_ledger(
    tmp_path: Path, connections: list[sqlite3.Connection]
) -> None:
    store = SqliteStateStore(tmp_path)
    store.put_job(JOB)
    for attempt in (1, 2):
        for step in range(50):
            store.put_ledger(entry(step, attempt))
    asked: list[str] = []
    connections[-1].set_trace_callback(asked.append)
    store.last_attempt("job")
    last = store.last_entry("job", 2)
    assert last is not None
    assert last.step == 49
    store.last_entry("job", 2, before=7)
    store.last_committed_step("job", 2)
    store.last_planned_step("job")
    store.ledger_entry("job", 7)
    store.ledger_of_step("job", 7)
    store.quarantine_of_step("job", 1, 7)
    store.skips("job")
    connections[-1].set_trace_callback(None)
    assert len(asked) == 12  # of the ledger also, once, whether it has old entries
    for query in asked:
        plan = connections[-1].execute(f"EXPLAIN QUERY PLAN {query}").fetchall()
        steps = " ".join(row[3] for row in plan)
        assert "SEARCH" in steps, (query, steps)
        assert "SCAN ledger" not in steps, (query, steps)
        assert "ledger USING PRIMARY KEY (job=?)" not in steps, (query, "all steps of the job")
        assert "TEMP B-TREE" not in steps, (query, steps)
    store.close()
