"""What tests of the store see and change beneath it."""

import sqlite3
from pathlib import Path

import pytest

from dataservice.state import directory


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
