"""What tests of the store see and change beneath it."""

import sqlite3
from pathlib import Path

import pytest

from dataservice.state import directory, sqlite_ledger


@pytest.fixture
def connections(monkeypatch: pytest.MonkeyPatch) -> list[sqlite3.Connection]:
    """The own connection of each store that is opened from here on, in that order."""
    opened: list[sqlite3.Connection] = []
    connect = directory.connect

    def noted(path: Path) -> sqlite3.Connection:
        opened.append(connect(path))
        return opened[-1]

    monkeypatch.setattr(directory, "connect", noted)
    return opened


@pytest.fixture
def everything_is_old(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store may archive the whole ledger but what is behind its newest commit."""
    monkeypatch.setattr(sqlite_ledger, "LEAST_ROWS", 1)
    monkeypatch.setattr(sqlite_ledger, "KEPT_STEPS", 0)
