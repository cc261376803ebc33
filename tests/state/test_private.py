"""The state holds the jobs of all teams: nobody else on the machine may read it."""

import logging
import os
import stat
from collections.abc import Iterator

import pytest

from dataservice.core.job import JobRecord
from dataservice.state.sqlite import SqliteStateStore


@pytest.fixture(autouse=True)
def open_umask() -> Iterator[None]:
    """The most careless one."""
    before = os.umask(0)
    yield
    os.umask(before)


def modes(directory) -> dict[str, int]:
    return {path.name: stat.S_IMODE(path.stat().st_mode) for path in directory.iterdir()}


def used(directory) -> SqliteStateStore:
    store = SqliteStateStore(directory)
    store.put_job(JobRecord(name="a", spec_json="{}", index_fingerprint="f"))
    return store


def test_every_file_is_its_owner_s_alone_from_the_moment_it_is_made(tmp_path):
    directory = tmp_path / "made" / "state"
    used(directory).close()
    store = used(directory)  # which makes a backup of what is there
    assert set(modes(directory)) >= {"state.db", "state.db-wal", "state.db-shm", "state.backup.db"}
    assert set(modes(directory).values()) == {0o600}
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    store.close()


def test_what_an_older_release_left_readable_is_tightened_and_told(tmp_path, caplog):
    used(tmp_path).close()
    used(tmp_path).close()
    (tmp_path / "secret").write_bytes(bytes(32))
    for path in tmp_path.iterdir():
        path.chmod(0o644)
    with caplog.at_level(logging.WARNING):
        store = used(tmp_path)
    assert set(modes(tmp_path).values()) == {0o600}
    assert f"{tmp_path / 'state.db'} had mode 0644" in caplog.text
    store.close()
