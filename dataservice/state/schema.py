"""The tables of state.db and the way from each version to the next.

A released migration is never edited: a later migration changes what it made.
"""

import sqlite3
import time
from contextlib import closing

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

# Predicted and measured seconds of a step, and cost coefficients that take effect at a step.
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

# Steps that attempts skip, from a given attempt on.
_SKIPS = """
CREATE TABLE skips (
    job TEXT NOT NULL REFERENCES jobs (name) ON DELETE CASCADE,
    number INTEGER NOT NULL,
    first_step INTEGER NOT NULL,
    last_step INTEGER NOT NULL,
    action TEXT NOT NULL,
    from_attempt INTEGER NOT NULL,
    recorded_unix_s REAL NOT NULL,
    PRIMARY KEY (job, number)
) STRICT, WITHOUT ROWID;
"""

# What a step delivered; the versions of job files, and the version that each attempt began with;
# the launches of attempts; the order of a job's samples, which is unknown for older jobs.
_VERSIONS = """
ALTER TABLE ledger ADD COLUMN content BLOB;
ALTER TABLE jobs ADD COLUMN spec_version INTEGER NOT NULL DEFAULT 1;
ALTER TABLE jobs ADD COLUMN "order" TEXT NOT NULL DEFAULT '';
CREATE TABLE specs (
    job TEXT NOT NULL REFERENCES jobs (name) ON DELETE CASCADE,
    version INTEGER NOT NULL,
    spec_json TEXT NOT NULL,
    submitted_unix_s REAL NOT NULL,
    PRIMARY KEY (job, version)
) STRICT, WITHOUT ROWID;
INSERT INTO specs SELECT name, 1, spec_json, created_unix_s FROM jobs;
ALTER TABLE attempts ADD COLUMN spec_version INTEGER NOT NULL DEFAULT 1;
ALTER TABLE attempts ADD COLUMN launch TEXT NOT NULL DEFAULT '';
ALTER TABLE costs ADD COLUMN spec_version INTEGER NOT NULL DEFAULT 1;
"""

_MIXTURES = """
CREATE TABLE mixtures (
    job TEXT NOT NULL REFERENCES jobs (name) ON DELETE CASCADE,
    number INTEGER NOT NULL,
    change_json TEXT NOT NULL,
    recorded_unix_s REAL NOT NULL,
    PRIMARY KEY (job, number)
) STRICT, WITHOUT ROWID;
"""

# Which entries of the ledger are in Parquet files; see sqlite_ledger.py.
_ARCHIVES = """
CREATE TABLE archives (
    job TEXT NOT NULL REFERENCES jobs (name) ON DELETE CASCADE,
    attempt INTEGER NOT NULL,
    first_step INTEGER NOT NULL,
    number INTEGER NOT NULL,
    last_step INTEGER NOT NULL,
    last_committed_step INTEGER NOT NULL,
    first_row INTEGER NOT NULL,
    file TEXT NOT NULL,
    PRIMARY KEY (job, attempt, first_step, number)
) STRICT, WITHOUT ROWID;
"""

# The samples of the quarantine, each once, to be counted; see sqlite_quarantine.py. An index would
# do as well, but to delete a job of a million entries would take 12 s and not 3.
_QUARANTINED_SAMPLES = """
CREATE TABLE quarantined_samples (
    job TEXT NOT NULL REFERENCES jobs (name) ON DELETE CASCADE,
    sample_id INTEGER NOT NULL,
    PRIMARY KEY (job, sample_id)
) STRICT, WITHOUT ROWID;
INSERT INTO quarantined_samples
    SELECT DISTINCT job, sample_id FROM quarantine ORDER BY job, sample_id;
"""

MIGRATIONS: tuple[str, ...] = (
    _TABLES, _COSTS, _SKIPS, _VERSIONS, _MIXTURES, _ARCHIVES, _QUARANTINED_SAMPLES,
)  # fmt: skip
"""MIGRATIONS[k] migrates from version k to version k + 1."""

_CREATE_MIGRATIONS = """
CREATE TABLE IF NOT EXISTS migrations (
    version INTEGER PRIMARY KEY,
    applied_unix_s REAL NOT NULL
) STRICT;
"""


def require_known(connection: sqlite3.Connection, where: str) -> None:
    """Raises StateError unless the database is empty, or has exactly the tables of a version that
    this release knows. Reads only."""
    found = _tables(connection)
    version = _version(connection) if "migrations" in found else 0
    if version > len(MIGRATIONS):
        raise StateError(
            f"{where} has schema version {version}; this release knows up to {len(MIGRATIONS)}. "
            "Start the release that wrote it, or a newer one."
        )
    if found and found != _tables_of(version):
        raise StateError(
            f"{where} says schema version {version} and has the tables "
            f"{', '.join(found)}, which is no state of this service. Nothing was changed; choose "
            "another directory with --state-dir, or move the file away."
        )


def migrate(connection: sqlite3.Connection) -> None:
    """Bring a database of a known version up to date; each migration is one transaction."""
    connection.executescript(_CREATE_MIGRATIONS)
    for number in range(_version(connection), len(MIGRATIONS)):
        connection.executescript(
            f"BEGIN IMMEDIATE; {MIGRATIONS[number]} "
            f"INSERT INTO migrations VALUES ({number + 1}, {time.time()}); COMMIT;"
        )


def _version(connection: sqlite3.Connection) -> int:
    (version,) = connection.execute("SELECT COALESCE(MAX(version), 0) FROM migrations").fetchone()
    return int(version)


def _tables(connection: sqlite3.Connection) -> dict[str, list[str]]:
    """The columns of every table."""
    names = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name")
    columns = "SELECT name FROM pragma_table_info(?)"
    return {name: [c for (c,) in connection.execute(columns, (name,))] for (name,) in names}


def _tables_of(version: int) -> dict[str, list[str]]:
    with closing(sqlite3.connect(":memory:")) as scratch:
        scratch.executescript(_CREATE_MIGRATIONS + "".join(MIGRATIONS[:version]))
        return _tables(scratch)
