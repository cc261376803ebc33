"""What is deleted or archived leaves no room taken: not in state.db, not in its backup."""

import logging
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from dataservice.core.job import JobRecord
from dataservice.state import directory, free_pages
from dataservice.state.directory import BACKUP, FILE
from dataservice.state.sqlite import SqliteStateStore

# Killed at some instruction of the file's making anew, or of a turn that gives pages back.
KILLED = """
import os, signal, sqlite3, sys
from pathlib import Path
from dataservice.state import free_pages
from dataservice.state.sqlite import SqliteStateStore

def die():
    os.kill(os.getpid(), signal.SIGKILL)

class Killed(sqlite3.Connection):
    def execute(self, query, *values):
        if query == "VACUUM":
            self.set_progress_handler(die, int(sys.argv[2]))
        done = super().execute(query, *values)
        if query == "VACUUM":
            die()
        return done

    def executescript(self, script):
        if "incremental_vacuum" in script:
            self.set_progress_handler(die, int(sys.argv[2]))
        done = super().executescript(script)
        if "incremental_vacuum" in script:
            die()
        return done

connect = sqlite3.connect
sqlite3.connect = lambda *given, **named: connect(*given, **{"factory": Killed, **named})
free_pages.LEAST_COMPACTED_BYTES = int(sys.argv[3])
free_pages.KEPT_PAGES = 0
SqliteStateStore(Path(sys.argv[1])).trim()
"""


def job(number: int) -> JobRecord:
    return JobRecord(
        name=f"{number:03d}", spec_json=f"{number}" * 2000, index_fingerprint="f", created_unix_s=1
    )


def mostly_free(home: Path, *, deleted: int = 90) -> list[JobRecord]:
    """A store of 100 jobs that has deleted some; returns those that are left."""
    store = SqliteStateStore(home)
    store.put_job(*map(job, range(100)))
    store.delete_job(*(job(number).name for number in range(deleted)))
    left = store.jobs()
    store.close()
    assert len(left) == 100 - deleted
    return left


def free_and_all(path: Path) -> tuple[int, int]:
    """The free pages of a file, and all of them."""
    connection = sqlite3.connect(path)
    (free,) = connection.execute("PRAGMA freelist_count").fetchone()
    (pages,) = connection.execute("PRAGMA page_count").fetchone()
    connection.close()
    return free, pages


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if a page were much."""
    monkeypatch.setattr(free_pages, "KEPT_PAGES", 5)
    monkeypatch.setattr(free_pages, "PAGES_A_TURN", 20)
    monkeypatch.setattr(free_pages, "LEAST_COMPACTED_BYTES", 4096)


@pytest.fixture
def of_before(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[JobRecord]:
    """The jobs of a file that was made before files gave pages back, and is mostly free."""
    with monkeypatch.context() as patch:
        patch.setattr(directory, "allow_giving_back", lambda connection: None)
        return mostly_free(tmp_path)


def test_free_pages_are_given_back_some_in_a_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = mostly_free(tmp_path)
    before, (free, _) = (tmp_path / FILE).stat().st_size, free_and_all(tmp_path / FILE)
    monkeypatch.setattr(free_pages, "KEPT_PAGES", 5)
    monkeypatch.setattr(free_pages, "PAGES_A_TURN", 20)
    store, given = SqliteStateStore(tmp_path), []
    while some := store.trim():
        given.append(some // 4096)
    turns, last = divmod(free - 5, 20)
    assert given == [20] * turns + [last]
    assert store.jobs() == left
    store.close()
    assert free_and_all(tmp_path / FILE)[0] == 5
    assert (tmp_path / FILE).stat().st_size == before - 4096 * sum(given)


def test_few_free_pages_stay_for_what_comes(tmp_path: Path) -> None:
    mostly_free(tmp_path)
    store = SqliteStateStore(tmp_path)
    assert store.trim() == 0
    store.close()


def test_a_file_of_before_is_made_anew_at_a_start_and_gives_back_from_then_on(
    tmp_path: Path, of_before: list[JobRecord], small: None
) -> None:
    before = (tmp_path / FILE).stat().st_size
    store = SqliteStateStore(tmp_path)
    assert store.jobs() == of_before
    assert (tmp_path / f"{FILE}-wal").stat().st_size < before // 4
    store.put_job(*map(job, range(100)))
    store.delete_job(*(job(number).name for number in range(90)))
    assert store.trim()
    store.close()
    assert free_and_all(tmp_path / BACKUP)[0] == 0
    assert (tmp_path / BACKUP).stat().st_size < before // 4


def test_a_file_of_which_half_is_in_use_or_that_is_small_is_left_as_it_is(
    tmp_path: Path, small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    mostly_free(tmp_path / "half", deleted=40)
    free = free_and_all(tmp_path / "half" / FILE)
    SqliteStateStore(tmp_path / "half").close()
    assert free_and_all(tmp_path / "half" / FILE) == free
    monkeypatch.setattr(free_pages, "LEAST_COMPACTED_BYTES", 64 * 2**20)
    mostly_free(tmp_path / "small")
    free = free_and_all(tmp_path / "small" / FILE)
    SqliteStateStore(tmp_path / "small").close()
    assert free_and_all(tmp_path / "small" / FILE) == free


def killed(home: Path, after: int, *, least_compacted_bytes: int) -> None:
    command = [sys.executable, "-c", KILLED, str(home), str(after), str(least_compacted_bytes)]
    assert subprocess.run(command, check=False).returncode == -9


@pytest.mark.parametrize("after", [20, 2_000, 10_000_000])
def test_a_start_that_is_killed_while_it_makes_the_file_anew_loses_nothing(
    after: int, tmp_path: Path, of_before: list[JobRecord], small: None
) -> None:
    killed(tmp_path, after, least_compacted_bytes=0)
    store = SqliteStateStore(tmp_path)
    assert store.jobs() == of_before
    store.close()
    assert free_and_all(tmp_path / FILE)[0] == 0


@pytest.mark.parametrize("after", [20, 200, 10_000_000])
def test_a_service_that_is_killed_while_it_gives_pages_back_loses_nothing(
    after: int, tmp_path: Path, small: None
) -> None:
    left = mostly_free(tmp_path)
    killed(tmp_path, after, least_compacted_bytes=2**40)
    store = SqliteStateStore(tmp_path)
    assert store.jobs() == left
    while store.trim():
        pass
    assert store.jobs() == left
    store.close()


def test_a_disk_without_room_for_a_new_file_keeps_the_one_there_is(
    tmp_path: Path,
    of_before: list[JobRecord],
    small: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    before = free_and_all(tmp_path / FILE)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=4096))
    with caplog.at_level(logging.WARNING):
        store = SqliteStateStore(tmp_path)
    assert store.jobs() == of_before
    assert "free pages: its disk has too little room left" in caplog.text
    assert store.trim() == 0
    store.close()
    assert free_and_all(tmp_path / FILE) == before
