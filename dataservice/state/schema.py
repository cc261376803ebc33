"""The tables of state.db and the way from each version to the next.

A migration is never edited once released: the next one changes what it made.
"""

import sqlite3
import time

from dataservice.core.errors import StateError

_TABLES = """
CREATE TABLE jobs (
    name TEXT PRIMARY KEY,
    spec_json TEXT NOT NULL,
    index_fingerprint TEXT NOT NULL,
    state TEXT NOT NULL,
    created_unix_s REAL NOT NULL
) STRICT;
CREATE TABLE attempts (
    job TEXT NOT NULL REFERENCES jobs (name) ON DELETE CASCADE,
    attempt INTEGER NOT NULL,
    world_size INTEGER NOT NULL,
    start_cursor TEXT NOT NULL,
    opened_unix_s REAL NOT NULL,
    PRIMARY KEY (job, attempt)
) STRICT, WITHOUT ROWID;
CREATE TABLE ledger (
    job TEXT NOT NULL REFERENCES jobs (name) ON DELETE CASCADE,
    attempt INTEGER NOT NULL,
    step INTEGER NOT NULL,
    cursor TEXT NOT NULL,
    plan_digest TEXT NOT NULL,
    world_size INTEGER NOT NULL,
    cost_version TEXT NOT NULL,
    planned_unix_s REAL NOT NULL,
    committed_unix_s REAL,
    PRIMARY KEY (job, attempt, step)
) STRICT, WITHOUT ROWID;
CREATE INDEX ledger_by_step ON ledger (job, step, attempt);
CREATE TABLE quarantine (
    job TEXT NOT NULL REFERENCES jobs (name) ON DELETE CASCADE,
    attempt INTEGER NOT NULL,
    step INTEGER NOT NULL,
    sample_id INTEGER NOT NULL,
    source TEXT NOT NULL,
    key TEXT NOT NULL,
    reason TEXT NOT NULL,
    PRIMARY KEY (job, attempt, step, sample_id)
) STRICT, WITHOUT ROWID;
"""

# What was predicted and measured of a step, and costs that take over at a step.
_COSTS = """
ALTER TABLE ledger ADD COLUMN predicted_s REAL;
ALTER TABLE ledger ADD COLUMN measured_s REAL;
CREATE TABLE costs (
    job TEXT NOT NULL REFERENCES jobs (name) ON DELETE CASCADE,
    from_step INTEGER NOT NULL,
    cost_json TEXT NOT NULL,
    cost_version TEXT NOT NULL,
    recorded_unix_s REAL NOT NULL,
    PRIMARY KEY (job, from_step)
) STRICT, WITHOUT ROWID;
"""

MIGRATIONS: tuple[str, ...] = (_TABLES, _COSTS)
"""MIGRATIONS[k] leads from version k to version k + 1."""

_CREATE_MIGRATIONS = """
CREATE TABLE IF NOT EXISTS migrations (
    version INTEGER PRIMARY KEY,
    applied_unix_s REAL NOT NULL
) STRICT;
"""


def migrate(connection: sqlite3.Connection, where: str) -> None:
    """Bring a database up to date; each migration is applied whole or not at all.

    Raises:
        StateError: the database was written by a newer release.
    """
    connection.executescript(_CREATE_MIGRATIONS)
    (version,) = connection.execute("SELECT COALESCE(MAX(version), 0) FROM migrations").fetchone()
    if version > len(MIGRATIONS):
        raise StateError(
            f"{where} has schema version {version}; this release knows up to {len(MIGRATIONS)}. "
            "Start the release that wrote it, or a newer one."
        )
    for number in range(version, len(MIGRATIONS)):
        connection.executescript(
            f"BEGIN IMMEDIATE; {MIGRATIONS[number]} "
            f"INSERT INTO migrations VALUES ({number + 1}, {time.time()}); COMMIT;"
        )
